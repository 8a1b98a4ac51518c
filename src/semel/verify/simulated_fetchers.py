"""Processes that read with Semel's own fetcher inside the simulation: a reader, and one that copies exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.config import FetchConfig
from semel.client.fetcher import Fetcher
from semel.client.partitions import TopicPartition as Partition
from semel.client.producer import Producer
from semel.errors import OffsetOutOfRange, SemelError
from semel.verify.simulated_processes import Process, Surroundings, TransactionalProcess
from semel.verify.simulation_ledger import TopicPartition, Transaction, Violation

_COPIED_MAX = 6


class Reading(Process):
    """A process with a fetcher."""

    is_committed = True

    def make_fetcher(self, cluster: Cluster) -> Fetcher:
        chance = self.chance
        config = FetchConfig(
            isolation="read_committed" if self.is_committed else "read_uncommitted",
            fetch_bytes_max=chance.choice((5_000, 1_000_000)),
            partition_bytes_max=chance.choice((300, 10_000, 1_000_000)),
            wait_ms_max=chance.choice((0, 30, 150)),
        )
        return Fetcher(cluster, config, prefetch=chance.random() < 0.7)

    def next_records(self, fetcher: Fetcher) -> Iterator[tuple[TopicPartition, list[tuple[int, str]]]]:
        """Records by partition as they come from one of the two ways to read."""
        if self.chance.random() < 0.7:
            for records in fetcher.fetch(self.chance.choice((0, 100, 400))):
                table = records.table
                offsets, values = table.column("offset").to_pylist(), table.column("value").to_pylist()
                yield (records.topic, records.partition), _decoded(offsets, values)
            return
        ends = fetcher.end_offsets()
        for table in fetcher.read_until(ends, stall_ms=1_500):
            columns = [table.column(name).to_pylist() for name in ("topic", "partition", "offset", "value")]
            for topic, partition, offset, value in zip(*columns, strict=True):
                yield (topic, partition), _decoded([offset], [value])
        if short := {where: end for where, end in ends.items() if fetcher.positions[where] < end}:
            raise Violation(f"{self.name} has read until {short} and is at {fetcher.positions}")


def _decoded(offsets: list[int], values: list[bytes]) -> list[tuple[int, str]]:
    return [(offset, value.decode()) for offset, value in zip(offsets, values, strict=True)]


class ReaderProcess(Reading):
    """Reads some partitions from their beginning to their end. Where it stands outlives it, as with a checkpoint."""

    def __init__(
        self,
        world: Surroundings,
        name: str,
        seed: int,
        partitions: Sequence[TopicPartition],
        *,
        is_committed: bool,
    ) -> None:
        super().__init__(world, name, seed)
        self.is_committed = is_committed
        self.positions = dict.fromkeys(partitions, 0)
        self.seen: dict[TopicPartition, list[tuple[int, str]]] = {where: [] for where in partitions}
        self._starts = 0

    def is_done(self) -> bool:
        return self.world.is_over

    def begin_again(self) -> None:
        """What was read may be gone with the power: go on behind the last record that still stands where it stood."""
        self._starts += 1
        for where, seen in self.seen.items():
            present = self.world.checker.topic_view(where).records
            while seen and (seen[-1][0] not in present or present[seen[-1][0]].value != seen[-1][1]):
                seen.pop()
            self.positions[where] = seen[-1][0] + 1 if seen else 0

    def has_read_to(self, ends: Iterable[tuple[str, int, int]]) -> bool:
        return all(self.positions.get((topic, index), end) >= end for topic, index, end in ends)

    def live(self) -> None:
        fetcher = self.make_fetcher(self.make_cluster())
        while not self.is_done():
            starts = self._starts
            fetcher.assign(dict(self.positions))
            while starts == self._starts and not self.is_done():
                self.pause(1_200)
                self._read_some(fetcher, starts)

    def _read_some(self, fetcher: Fetcher, starts: int) -> None:
        try:
            for where, records in self.next_records(fetcher):
                if starts != self._starts:
                    return
                self._take(where, records)
        except OffsetOutOfRange as error:
            if starts == self._starts and self._is_there():
                raise Violation(f"{self.name} at {self.positions}: {error}") from error
            self.note_failure("to read", error)
        except SemelError as error:
            self.note_failure("to read", error)
        if starts == self._starts:
            self._move(fetcher.positions)

    def _take(self, where: TopicPartition, records: list[tuple[int, str]]) -> None:
        seen = self.seen[where]
        for offset, _ in records:
            if offset < self.positions[where] or (seen and offset <= seen[-1][0]):
                raise Violation(f"{self.name} goes back to offset {offset} of {where}")
            self.positions[where] = offset + 1
        if self.is_committed:
            self.world.checker.check_readable(where, records)
        seen.extend(records)

    def _move(self, positions: dict[Partition, int]) -> None:
        for where, position in positions.items():
            if position < self.positions[where]:
                raise Violation(f"{self.name} goes back from {self.positions[where]} to {position} of {where}")
            self.positions[where] = position

    def _is_there(self) -> bool:
        """Whether all it asks for is in the logs."""
        return all(self.world.checker.views[where].end_offset >= at for where, at in self.positions.items())


class CopierProcess(TransactionalProcess, Reading):
    """Copies the input topic: records and positions in one transaction, under an id that fences its predecessors."""

    def __init__(
        self,
        world: Surroundings,
        name: str,
        seed: int,
        group_id: str,
        inputs: Sequence[TopicPartition],
        outputs: Sequence[TopicPartition],
    ) -> None:
        super().__init__(world, name, seed, group_id, outputs)
        self._group_id = group_id
        self._inputs = [Partition(*where) for where in inputs]
        self._batch: dict[TopicPartition, list[tuple[int, str]]] = {}

    def is_done(self) -> bool:
        return self.world.is_copied(self._group_id)

    def live(self) -> None:
        self.pause(600)
        producer = self.begin_life()
        cluster = self.make_cluster()
        fetcher, admin = self.make_fetcher(cluster), Admin(cluster)
        while not self.is_done():
            committed = admin.committed_offsets(self._group_id, self._inputs)
            fetcher.assign({where: committed[where].offset if where in committed else 0 for where in self._inputs})
            if not self._copy_while_it_works(producer, fetcher):
                return
        producer.close()

    def _copy_while_it_works(self, producer: Producer, fetcher: Fetcher) -> bool:
        """Until the positions have to be looked up again; returns whether this producer can go on."""
        while not self.is_done():
            self.pause(250)
            self._batch = {}
            try:
                for where, records in self.next_records(fetcher):
                    self._batch.setdefault(where, []).extend(records)
            except SemelError as error:
                self.note_failure("to read", error)
                return True
            if not any(self._batch.values()):
                continue
            if not self.transact(producer):
                return False
            if self.current is None or self.current.answered != "commit":
                return True
        return True

    def fill(self, producer: Producer, transaction: Transaction, written: dict[str, TopicPartition]) -> None:
        number = 0
        for where, records in self._batch.items():
            output = self._partitions[where[1] % len(self._partitions)]
            for _, value in records:
                self.send(producer, written, f"{transaction.key}/{number}={value}", output)
                number += 1
        offsets = {Partition(*where): records[-1][0] + 1 for where, records in self._batch.items() if records}
        producer.send_offsets(offsets, self._group_id)
