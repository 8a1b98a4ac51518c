"""Runs a writer's transactions, and notes each step in the order that the history promises.

The rows of a step are in the kernel's hands before the step leaves the process: a record that is visible while its
transaction has no COMMIT in the history was never to be seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from semel.errors import Fenced, SemelError
from semel.verify.clients.face import Incoming, Integers, Outcome, Outgoing
from semel.verify.history import Act, Phase, make_rows
from semel.verify.payload import Payloads, decode_many, encode_many, number_keys
from semel.verify.workloads.life import Life

_ENDS = {Outcome.COMMITTED: Phase.OK, Outcome.ABORTED: Phase.FAIL, Outcome.UNKNOWN: Phase.UNKNOWN}


@dataclass(frozen=True, slots=True)
class Batch:
    """Records to write, as columns; `partition` is a number of the manifest."""

    partition: Integers
    origin: Integers
    sequence: Integers
    value: Integers
    key: Integers

    def __len__(self) -> int:
        return len(self.partition)

    def chosen(self, rows: Integers) -> Batch:
        """Some of them: `rows` is a mask or row numbers."""
        return Batch(*(getattr(self, name)[rows] for name in Batch.__slots__))


@dataclass(frozen=True, slots=True)
class Taken:
    """Sound records that a transaction uses as its input."""

    partition: Integers
    offset: Integers
    payloads: Payloads

    def __len__(self) -> int:
        return len(self.partition)


@dataclass(frozen=True, slots=True)
class Positions:
    """Where a group goes on reading once the transaction is committed."""

    offsets: dict[int, int]
    group: str
    member: object


def take_sound(life: Life, incoming: Incoming) -> Taken:
    """The records that are what was sent to that partition; the others are noted as damaged or misrouted."""
    payloads = decode_many(incoming.payloads)
    is_right = payloads.is_sound & (payloads.partition == incoming.partition)
    if not is_right.all():
        wrong = ~is_right
        _note_reads(life, incoming.partition[wrong], incoming.offset[wrong], payloads.chosen(wrong), Phase.FAIL)
        return Taken(incoming.partition[is_right], incoming.offset[is_right], payloads.chosen(is_right))
    return Taken(incoming.partition, incoming.offset, payloads)


def note_all_reads(life: Life, incoming: Incoming) -> None:
    """Every record in the order in which it came, sound or not: a reader that seems to jump would be accused of it."""
    payloads = decode_many(incoming.payloads)
    is_right = payloads.is_sound & (payloads.partition == incoming.partition)
    phases = np.where(is_right, Phase.OK, Phase.FAIL)
    _note_reads(life, incoming.partition, incoming.offset, payloads, phases)


def _note_reads(life: Life, partition: Integers, offset: Integers, payloads: Payloads, phase: Phase | Integers) -> None:
    rows = make_rows(
        len(partition),
        Act.READ,
        Phase.OK,
        time_ns=time.monotonic_ns(),
        partition=partition,
        offset=offset,
        writer=payloads.writer,
        transaction=payloads.transaction,
        origin=payloads.origin,
        sequence=payloads.sequence,
        value=payloads.value,
    )
    rows["phase"] = phase
    life.history.note_rows(rows)


def next_positions(incoming: Incoming) -> dict[int, int]:
    """Behind the last record of each partition."""
    return {
        number: int(incoming.offset[incoming.partition == number].max()) + 1
        for number in np.unique(incoming.partition).tolist()
    }


def outgoing(life: Life, batch: Batch, transaction: int) -> Outgoing:
    payloads = encode_many(
        len(batch),
        size=life.options.record_bytes,
        origin=batch.origin,
        sequence=batch.sequence,
        writer=life.number,
        transaction=transaction,
        value=batch.value,
        partition=batch.partition,
    )
    return Outgoing(batch.partition, payloads, number_keys(batch.key))


def note_sends(
    life: Life, batch: Batch, transaction: int, phase: Phase | Integers, offset: Integers | int = -1
) -> None:
    rows = make_rows(
        len(batch),
        Act.SEND,
        Phase.INVOKE,
        time_ns=time.monotonic_ns(),
        partition=batch.partition,
        origin=batch.origin,
        sequence=batch.sequence,
        value=batch.value,
        writer=life.number,
        transaction=transaction,
        offset=offset,
    )
    rows["phase"] = phase
    life.history.note_rows(rows)


def note_taken(life: Life, taken: Taken, transaction: int) -> None:
    """The inputs of a transaction; -1: of no transaction."""
    rows = make_rows(
        len(taken),
        Act.CONSUME,
        Phase.OK,
        time_ns=time.monotonic_ns(),
        partition=taken.partition,
        offset=taken.offset,
        writer=taken.payloads.writer,
        transaction=transaction,
        origin=taken.payloads.origin,
        sequence=taken.payloads.sequence,
        value=taken.payloads.value,
    )
    life.history.note_rows(rows)


class Transactions:
    """The transactions of one process, counted from 0."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._count = 0
        self.writer = life.clients.transactional_writer(life.transactional_id)

    def run(
        self,
        batch: Batch,
        *,
        taken: Taken | None = None,
        take_last: Callable[[], Taken | None] | None = None,
        positions: Positions | None = None,
        is_to_abort: bool = False,
    ) -> Outcome:
        """One transaction with these records; raises `Fenced` when it is the last of this process.

        `take_last` reads more input when the records are stored and nothing is committed yet.
        """
        self._life.insist(self.writer.begin)
        number, self._count = self._count, self._count + 1
        self._note(Act.BEGIN, Phase.OK, number)
        try:
            self._fill(number, batch, taken, positions)
            if take_last is not None and (last := take_last()) is not None:
                note_taken(self._life, last, number)
        except Fenced:
            self._note(Act.ABORT, Phase.OK, number)  # whoever fenced it has aborted it
            raise
        except SemelError:
            is_to_abort = True
        return self._abort(number) if is_to_abort else self._commit(number)

    def _fill(self, number: int, batch: Batch, taken: Taken | None, positions: Positions | None) -> None:
        records = outgoing(self._life, batch, number)
        note_sends(self._life, batch, number, Phase.INVOKE)
        if len(batch):
            self.writer.send(records)
        if taken is not None:
            note_taken(self._life, taken, number)
        if positions is not None:
            for partition, offset in positions.offsets.items():
                self._note(Act.POSITION, Phase.OK, number, partition=partition, offset=offset)
            self.writer.send_positions(positions.offsets, positions.group, positions.member)
        offsets = self.writer.flush()
        is_told = offsets >= 0
        if is_told.all():
            note_sends(self._life, batch, number, Phase.OK, offsets)
        elif is_told.any():
            note_sends(self._life, batch.chosen(is_told), number, Phase.OK, offsets[is_told])

    def _commit(self, number: int) -> Outcome:
        self._note(Act.COMMIT, Phase.INVOKE, number)
        self._life.history.flush()
        outcome = self.writer.commit()
        self._note(Act.COMMIT, _ENDS[outcome], number)
        self._life.history.flush()
        return outcome

    def _abort(self, number: int) -> Outcome:
        self._note(Act.ABORT, Phase.INVOKE, number)
        self._life.history.flush()
        phase = Phase.OK
        try:
            self.writer.abort()
        except Fenced:
            self._note(Act.ABORT, Phase.OK, number)
            raise
        except SemelError:
            phase = Phase.UNKNOWN  # its writer is gone; the next one, or the time-out, aborts it
        self._note(Act.ABORT, phase, number)
        return Outcome.ABORTED if phase is Phase.OK else Outcome.UNKNOWN

    def _note(self, act: Act, phase: Phase, number: int, *, partition: int = -1, offset: int = -1) -> None:
        self._life.history.note(
            act, phase, time_ns=time.monotonic_ns(), transaction=number, partition=partition, offset=offset
        )
