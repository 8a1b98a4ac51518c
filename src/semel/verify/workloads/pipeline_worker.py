"""One life of a worker that consumes, transforms and produces; and how it does so exactly once, in transactions."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from semel.verify.clients.face import GroupConsumer, Incoming, Outcome
from semel.verify.clients.libraries import find_library
from semel.verify.clients.manual_consumer import ManualConsumer
from semel.verify.history import Act, Phase
from semel.verify.workloads.life import Life
from semel.verify.workloads.options import Options
from semel.verify.workloads.roles import POLL_MS
from semel.verify.workloads.transactions import Batch, Positions, Taken, Transactions, next_positions, take_sound


def is_member_of_group(library: str, options: Options) -> bool:
    """Else its workers take fixed shares of the input."""
    is_safe = find_library(library).has_safe_groups
    return options.assignment == "group" or (options.assignment == "auto" and is_safe)


class Transform:
    """What a worker makes of its input. Told whether its last batch counts, since it may keep a state."""

    def apply(self, taken: Taken) -> Batch:
        raise NotImplementedError

    def settle(self, outcome: Outcome) -> None:
        """The transaction with the last batch has ended so."""

    def forget(self, partitions: frozenset[int]) -> None:
        """These were given to this worker anew, so others may have worked on them meanwhile."""


class PipelineWorker(ABC):
    """What workers of every guarantee have in common: how they read."""

    def __init__(self, life: Life, transform: Transform, topic: str, inputs: Sequence[int], group: str) -> None:
        self._life = life
        self._transform = transform
        self._topic = topic
        self._inputs = frozenset(inputs)
        self._group = group
        self._moved: set[int] = set()
        """Partitions whose next record does not follow the last one that was seen here."""

    @abstractmethod
    def live(self) -> None:
        """Until the life is over."""

    def _open_consumer(self) -> GroupConsumer:
        life = self._life
        if is_member_of_group(life.spec.library, life.options):
            return life.clients.group_consumer(self._group, self._topic)
        share = sorted(self._inputs)[life.spec.index :: life.spec.count]
        reader = life.clients.reader(dict.fromkeys(share, 0), "read_committed")
        return ManualConsumer(life.surroundings, reader, self._group, share)

    def _poll(self, consumer: GroupConsumer) -> Incoming:
        return self._life.insist(lambda: consumer.poll(POLL_MS, self._life.options.batch_records_max))

    def _go_back(self, consumer: GroupConsumer) -> None:
        """To the group's positions: what was read behind them is read again."""
        self._life.insist(consumer.rewind)
        self._moved |= self._inputs

    def _take(self, incoming: Incoming) -> tuple[Taken, Batch, dict[int, int]]:
        """The sound records, what is to be written for them, and where the group goes on reading afterwards."""
        life = self._life
        self._transform.forget(incoming.restarted)
        positions = next_positions(incoming)
        for number in sorted(positions.keys() & (self._moved | incoming.restarted)):
            first = int(incoming.offset[incoming.partition == number][0])
            life.history.note(Act.ASSIGN, Phase.OK, time_ns=time.monotonic_ns(), partition=number, offset=first)
            self._moved.discard(number)
        taken = take_sound(life, incoming)
        return taken, life.insist(lambda: self._transform.apply(taken)), positions


class ExactlyOnce(PipelineWorker):
    """What is written and the positions that it was made from become visible together, or not at all."""

    def live(self) -> None:
        life = self._life
        transactions = Transactions(life)
        # In this order: what the former life has left open is settled when the writer owns the id, and only then can
        # its last position be known.
        life.insist(transactions.writer.connect)
        consumer = life.insist(self._open_consumer)
        try:
            life.insist(consumer.rewind)
            while not life.is_over:
                incoming = self._poll(consumer)
                if len(incoming) and self._work(transactions, consumer, incoming) is not Outcome.COMMITTED:
                    life.insist(transactions.writer.connect)
                    self._go_back(consumer)
        finally:
            consumer.close()
            transactions.writer.close()

    def _work(self, transactions: Transactions, consumer: GroupConsumer, incoming: Incoming) -> Outcome:
        taken, batch, positions = self._take(incoming)
        outcome = transactions.run(
            batch,
            taken=taken,
            positions=Positions(positions, self._group, consumer.member),
            is_to_abort=self._life.wants_abort(),
        )
        self._transform.settle(outcome)
        return outcome
