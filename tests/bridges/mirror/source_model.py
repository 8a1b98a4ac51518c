"""A source cluster for simulations: logs that grow as Kafka's do, with the truth about every record beside them.

It keeps to Kafka's rules and to nothing else: all records of a transaction are written before its first marker, markers
arrive one by one and late, and under protocol 1 a producer begins again only after the last of them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from semel.bridges.mirror.cuts import CutFinder
from semel.client.partitions import TopicPartition


@dataclass(frozen=True, slots=True)
class Entry:
    """A batch or a marker in a log. `transaction` is the truth, which the mirror does not see; None: no transaction."""

    start: int
    end: int
    producer: tuple[int, int]
    transaction: int | None
    marker: Literal["commit", "abort"] | None = None


@dataclass(slots=True)
class _Producer:
    producer_id: int
    protocol: int
    epoch: int = 0
    transaction: int | None = None
    touched: list[TopicPartition] = field(default_factory=list[TopicPartition])
    markers_left: list[TopicPartition] = field(default_factory=list[TopicPartition])
    outcome: Literal["commit", "abort"] = "commit"
    hangs: bool = False


class SourceModel:
    """Grows by one small step at a time, chosen at random."""

    def __init__(self, rng: random.Random, *, partitions: int, producers: int, protocols: tuple[int, ...]) -> None:
        self._rng = rng
        self.logs: dict[TopicPartition, list[Entry]] = {TopicPartition("t", number): [] for number in range(partitions)}
        self.outcomes: dict[int, Literal["commit", "abort"]] = {}
        self._producers = [_Producer(number, rng.choice(protocols)) for number in range(producers)]

    def end(self, partition: TopicPartition) -> int:
        log = self.logs[partition]
        return log[-1].end if log else 0

    def _append(
        self,
        partition: TopicPartition,
        producer: tuple[int, int],
        transaction: int | None,
        marker: Literal["commit", "abort"] | None = None,
    ) -> None:
        start = self.end(partition)
        count = 1 if marker else self._rng.randint(1, 3)
        self.logs[partition].append(Entry(start, start + count, producer, transaction, marker))

    def grow(self) -> None:
        rng = self._rng
        if rng.random() < 0.05:
            self._append(rng.choice(list(self.logs)), (-1, -1), None)
            return
        producer = rng.choice(self._producers)
        if producer.markers_left:
            self._write_marker(producer)
        elif producer.transaction is None:
            producer.transaction = len(self.outcomes) + sum(p.transaction is not None for p in self._producers)
            while producer.transaction in self.outcomes or self._is_taken(producer):
                producer.transaction += 1
            producer.hangs = rng.random() < 0.02
            self._write(producer)
        elif rng.random() < 0.6 or producer.hangs:
            if not producer.hangs:
                self._write(producer)
        else:
            self._end(producer)

    def _is_taken(self, producer: _Producer) -> bool:
        return any(one is not producer and one.transaction == producer.transaction for one in self._producers)

    def _write(self, producer: _Producer) -> None:
        partition = self._rng.choice(list(self.logs))
        self._append(partition, (producer.producer_id, producer.epoch), producer.transaction)
        if partition not in producer.touched:
            producer.touched.append(partition)

    def _end(self, producer: _Producer, *, times_out: bool = False) -> None:
        assert producer.transaction is not None
        producer.outcome = "abort" if times_out or self._rng.random() < 0.33 else "commit"
        self.outcomes[producer.transaction] = producer.outcome
        producer.markers_left = list(producer.touched)
        self._rng.shuffle(producer.markers_left)
        if producer.protocol == 2 or times_out:
            producer.epoch += 1  # the markers already bear it

    def _write_marker(self, producer: _Producer) -> None:
        partition = producer.markers_left.pop()
        self._append(partition, (producer.producer_id, producer.epoch), producer.transaction, producer.outcome)
        if not producer.markers_left:
            producer.transaction, producer.touched, producer.hangs = None, [], False

    def come_to_rest(self) -> None:
        """Every transaction ends; those that hang by their timeout."""
        for producer in self._producers:
            if producer.transaction is not None and not producer.markers_left:
                self._end(producer, times_out=producer.hangs)
            while producer.markers_left:
                self._write_marker(producer)

    # -- the truth -------------------------------------------------------------------------------------------------

    def torn(self, ends: Mapping[TopicPartition, int]) -> set[int]:
        """The committed transactions that a cut at `ends` would tear."""
        sides: dict[int, set[bool]] = {}
        for partition, log in self.logs.items():
            for entry in log:
                if entry.marker is None and entry.transaction is not None:
                    sides.setdefault(entry.transaction, set()).add(entry.start < ends[partition])
        return {one for one, found in sides.items() if len(found) == 2 and self.outcomes.get(one) != "abort"}

    def undecided_below(self, ends: Mapping[TopicPartition, int]) -> set[int]:
        """Transactions with records below `ends` that have not ended."""
        return {
            entry.transaction
            for partition, log in self.logs.items()
            for entry in log
            if entry.start < ends[partition]
            and entry.transaction is not None
            and entry.transaction not in self.outcomes
        }

    def largest_cut(self, limits: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """The slow and obvious one, which knows the truth: lower the ends until nothing is torn or undecided."""
        ends = dict(limits)
        while True:
            lower = self._first_fault(ends, limits)
            if lower is None:
                return ends
            partition, end = lower
            ends[partition] = end

    def _first_fault(
        self, ends: Mapping[TopicPartition, int], limits: Mapping[TopicPartition, int]
    ) -> tuple[TopicPartition, int] | None:
        faulty = self.torn(ends) | self.undecided_below(ends)
        for partition, log in self.logs.items():
            ended: set[int | None] = {
                entry.transaction for entry in log if entry.marker and entry.start < limits[partition]
            }
            for entry in log:
                is_record = entry.marker is None and entry.transaction is not None and entry.start < ends[partition]
                if is_record and (entry.transaction in faulty or entry.transaction not in ended):
                    return partition, entry.start
        return None


class SimulatedMirror:
    """Drives a `CutFinder` over a source as the real mirror does: reads, barriers, cuts and crashes at any moment."""

    def __init__(self, source: SourceModel, rng: random.Random) -> None:
        self._source = source
        self._rng = rng
        self.committed = dict.fromkeys(source.logs, 0)
        self.copied: dict[TopicPartition, list[tuple[int, int]]] = {partition: [] for partition in source.logs}
        self.cuts = 0
        self._asked: tuple[int, dict[TopicPartition, int]] | None = None
        self._restart()

    def _restart(self) -> None:
        self.finder = CutFinder(self.committed)
        self._asked = None

    def crash(self) -> None:
        """All that was read is forgotten; what was committed is not."""
        self._restart()

    def read(self, partition: TopicPartition, count: int) -> None:
        position = self.finder.positions[partition]
        log = self._source.logs[partition]
        barrier = self.finder.barrier
        for entry in [entry for entry in log if entry.start >= position][:count]:
            if barrier is not None and entry.start >= barrier.ends[partition]:
                break
            if entry.marker is not None:
                self.finder.add_marker(partition, entry.start, entry.producer, entry.marker)
            else:
                self.finder.add_batch(partition, entry.start, entry.end, producer=entry.producer, size=1, now=0.0)
        self.finder.try_pass_barrier()

    def step(self) -> None:
        """One of: read some, ask one partition for its end, cut, crash."""
        rng = self._rng
        what = rng.random()
        if what < 0.55:
            self.read(rng.choice(list(self._source.logs)), rng.randint(1, 4))
        elif what < 0.85:
            self._ask()
        elif what < 0.99:
            self.cut(rng.choice([None, None, 2, 5]))
        else:
            self.crash()

    def _ask(self) -> None:
        """The ends are answered one by one, while the source goes on."""
        if self.finder.barrier is not None:
            return
        if self._asked is None:
            self._asked = (self.finder.event, {})
        event, ends = self._asked
        missing = [partition for partition in self._source.logs if partition not in ends]
        for partition in self._rng.sample(missing, min(2, len(missing))):
            ends[partition] = self._source.end(partition)
        if len(ends) == len(self._source.logs):
            self.finder.set_barrier(event, ends)
            self.finder.try_pass_barrier()
            self._asked = None

    def read_everything(self) -> None:
        """Two barriers with nothing new between them: all that can be known is known."""
        for _ in range(2):
            self._asked = None
            for partition in self._source.logs:
                self.read(partition, 1_000_000)
            event = self.finder.event
            self.finder.set_barrier(event, {partition: self._source.end(partition) for partition in self._source.logs})
            for partition in self._source.logs:
                self.read(partition, 1_000_000)

    def cut(self, bytes_max: int | None = None) -> None:
        ends = self.finder.find_ends(bytes_max)
        if not ends:
            return
        self.cuts += 1
        for partition, pieces in self.finder.take(ends).pieces.items():
            self.copied[partition] += [(piece.start, piece.end) for piece in pieces]
        self.committed |= ends
