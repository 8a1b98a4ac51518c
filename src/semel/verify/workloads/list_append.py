"""Lists that only grow: each transaction reads some of them to their ends, and appends elements of its own to several.

An element is unique, so who has read whose element, and in which order elements stand, shows what depends on what. Some
transactions read before they append and some after it: two that run at the same time and have both appended must not
see each other's elements, or each would depend on the other (G1c).
"""

from __future__ import annotations

import time

import numpy as np

from semel.errors import SemelError
from semel.verify.clients.face import Incoming, Reader
from semel.verify.history import Act, Manifest, Phase
from semel.verify.payload import Payloads
from semel.verify.workloads.life import Life
from semel.verify.workloads.roles import ends_of
from semel.verify.workloads.transactions import Batch, Taken, Transactions, take_sound
from semel.verify.workloads.workload import Role, Workload

_QUIET_MS = 60
"""A list has been read to its end when nothing came for so long."""
_POLLS_MAX = 50
_READ_RECORDS_MAX = 20_000
_READ_FIRST_FRACTION = 0.3
_READ_LAST_FRACTION = 0.3


class ListAppend(Workload):
    name = "list-append"
    summary = "transactions read lists and append to lists: nobody reads what is not committed, or only half of it"

    def topics(self) -> dict[str, int]:
        return {f"{self.prefix}-lists": self.options.partitions}

    def work_roles(self) -> list[Role]:
        return [Role("appender", self.options.workers, "worker")]

    def manifest(self) -> Manifest:
        # An element's value is the number of its list.
        return Manifest(self.partitions(), keyed_topics=list(self.topics()))

    def work(self, life: Life) -> None:
        transactions = Transactions(life)
        reader = self._open_reader(life)
        sequence = 0
        try:
            while not life.is_over:
                when = life.chance.random()
                taken = self._read(life, reader) if when < _READ_FIRST_FRACTION else None
                reads_last = when >= 1 - _READ_LAST_FRACTION
                batch = self._elements(life, life.batch_size(), sequence)
                sequence += len(batch)
                transactions.run(
                    batch,
                    taken=taken,
                    take_last=(lambda: self._read(life, reader)) if reads_last else None,
                    is_to_abort=life.wants_abort(),
                )
                life.keep_pace(len(batch))
        finally:
            reader.close()
            transactions.writer.close()

    def _elements(self, life: Life, count: int, sequence: int) -> Batch:
        lists = life.numbers.integers(0, self.options.partitions, count)
        return Batch(
            partition=lists.astype(np.int16),
            origin=np.full(count, life.number, np.int32),
            sequence=np.arange(sequence, sequence + count, dtype=np.int32),
            value=lists,
            key=lists,
        )

    def _open_reader(self, life: Life) -> Reader:
        """For some of the lists: from their beginning on, or in a later life from their present end on."""
        lists = sorted(life.chance.sample(range(self.options.partitions), max(1, self.options.partitions // 2)))
        positions = dict.fromkeys(lists, 0)
        if life.spec.life:
            positions = life.insist(lambda: ends_of(life, lists))
        for number, offset in positions.items():
            life.history.note(Act.ASSIGN, Phase.OK, time_ns=time.monotonic_ns(), partition=number, offset=offset)
        return life.insist(lambda: life.clients.reader(positions, "read_committed"))

    def _read(self, life: Life, reader: Reader) -> Taken | None:
        found: list[Taken] = []
        for _ in range(_POLLS_MAX):
            try:
                incoming: Incoming = reader.poll(_QUIET_MS, _READ_RECORDS_MAX)
            except SemelError:
                life.pause()
                break
            if not len(incoming):
                break
            found.append(take_sound(life, incoming))
        return _joined(found)


def _joined(parts: list[Taken]) -> Taken | None:
    if not parts:
        return None
    names = Payloads.__slots__
    columns = (np.concatenate([getattr(part.payloads, name) for part in parts]) for name in names)
    return Taken(
        np.concatenate([part.partition for part in parts]),
        np.concatenate([part.offset for part in parts]),
        Payloads(*columns),
    )
