"""Consume, transform, produce, with the positions inside the transaction: what copier and counters have in common."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from semel.client.admin import Admin
from semel.client.fetcher import Fetcher
from semel.client.partitions import TopicPartition
from semel.verify.clients.face import GroupConsumer, Incoming, Outcome
from semel.verify.clients.libraries import find_library
from semel.verify.clients.manual_consumer import ManualConsumer
from semel.verify.history import Act, Phase
from semel.verify.workloads.life import Life
from semel.verify.workloads.roles import POLL_MS, live_as_source
from semel.verify.workloads.transactions import Batch, Positions, Taken, Transactions, next_positions, take_sound
from semel.verify.workloads.workload import Role, Workload


class Transform:
    """What a worker makes of its input. Told whether its last batch counts, since it may keep a state."""

    def apply(self, taken: Taken) -> Batch:
        raise NotImplementedError

    def settle(self, outcome: Outcome) -> None:
        """The transaction with the last batch has ended so."""

    def forget(self, partitions: frozenset[int]) -> None:
        """These were given to this worker anew, so others may have worked on them meanwhile."""


class Pipeline(Workload):
    """Sources fill `input`; workers read it and write `output`."""

    worker_role: str
    has_positions = True

    @property
    def input(self) -> str:
        return f"{self.prefix}-in"

    @property
    def output(self) -> str:
        return f"{self.prefix}-out"

    @property
    def group(self) -> str:
        return f"{self.prefix}-group"

    def topics(self) -> dict[str, int]:
        return {self.input: self.options.partitions, self.output: self.options.partitions}

    def work_roles(self) -> list[Role]:
        sources = Role("source", self.options.sources, "source")
        return [sources, Role(self.worker_role, self.options.workers, "worker")]

    def has_group(self, library: str) -> bool:
        is_safe = find_library(library).has_safe_groups
        return self.options.assignment == "group" or (self.options.assignment == "auto" and is_safe)

    def backlog(self, settings: Mapping[str, Any]) -> int:
        """From the group's positions to the ends; nothing if only markers and aborted records lie in between."""
        places = [TopicPartition(self.input, index) for index in range(self.options.partitions)]
        with Admin(settings) as admin, Fetcher(settings) as fetcher:
            committed = admin.committed_offsets(self.group, places, require_stable=True)
            positions = {place: committed[place].offset if place in committed else 0 for place in places}
            fetcher.assign(positions)
            ends = fetcher.end_offsets()
            is_behind = any(table.num_rows for table in fetcher.read_until(ends))
        return sum(ends[place] - positions[place] for place in places) if is_behind else 0

    def work(self, life: Life) -> None:
        if life.spec.role == "source":
            live_as_source(life, self.source(life))
        else:
            _Worker(self, life).live()

    @abstractmethod
    def source(self, life: Life) -> Any:
        """Makes batches of input: a function of their number of records."""

    @abstractmethod
    def transform(self, life: Life) -> Transform: ...


class _Worker:
    """One life of a worker."""

    def __init__(self, pipeline: Pipeline, life: Life) -> None:
        self._pipeline = pipeline
        self._life = life
        self._transform = pipeline.transform(life)
        self._inputs = frozenset(pipeline.numbers_of(pipeline.input))
        self._moved: set[int] = set()
        """Partitions whose next record does not follow the last one that was seen here."""

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
                incoming = life.insist(lambda: consumer.poll(POLL_MS, life.options.batch_records_max))
                if len(incoming) and self._work(transactions, consumer, incoming) is not Outcome.COMMITTED:
                    life.insist(transactions.writer.connect)
                    life.insist(consumer.rewind)
                    self._moved |= self._inputs
        finally:
            consumer.close()
            transactions.writer.close()

    def _open_consumer(self) -> GroupConsumer:
        life = self._life
        if self._pipeline.has_group(life.spec.library):
            return life.clients.group_consumer(self._pipeline.group, self._pipeline.input)
        share = sorted(self._inputs)[life.spec.index :: life.spec.count]
        reader = life.clients.reader(dict.fromkeys(share, 0), "read_committed")
        return ManualConsumer(life.surroundings, reader, self._pipeline.group, share)

    def _work(self, transactions: Transactions, consumer: GroupConsumer, incoming: Incoming) -> Outcome:
        life = self._life
        self._transform.forget(incoming.restarted)
        positions = next_positions(incoming)
        for number in sorted(positions.keys() & (self._moved | incoming.restarted)):
            first = int(incoming.offset[incoming.partition == number][0])
            life.history.note(Act.ASSIGN, Phase.OK, time_ns=time.monotonic_ns(), partition=number, offset=first)
            self._moved.discard(number)
        taken = take_sound(life, incoming)
        batch = life.insist(lambda: self._transform.apply(taken))
        outcome = transactions.run(
            batch,
            taken=taken,
            positions=Positions(positions, self._pipeline.group, consumer.member),
            is_to_abort=life.wants_abort(),
        )
        self._transform.settle(outcome)
        return outcome
