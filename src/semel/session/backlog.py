"""Records that were fetched and not handed out yet, cut into portions. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from semel.client.fetched import PartitionRecords
from semel.client.partitions import TopicPartition


def partition_of(records: PartitionRecords) -> TopicPartition:
    return TopicPartition(records.topic, records.partition)


@dataclass(slots=True)
class Backlog:
    """In the order in which they came; within a partition that is the order of its offsets."""

    _waiting: deque[PartitionRecords] = field(default_factory=deque[PartitionRecords])
    record_count: int = 0
    byte_count: int = 0

    def add(self, fetched: Iterable[PartitionRecords]) -> None:
        for records in fetched:
            self._waiting.append(records)
            self.record_count += records.table.num_rows
            self.byte_count += records.table.nbytes

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    def take(self, records_max: int, bytes_max: int) -> list[PartitionRecords]:
        """Up to so many records and so many bytes, at least one record if there is any."""
        taken: list[PartitionRecords] = []
        rows_left, bytes_left = records_max, bytes_max
        while self._waiting and rows_left > 0 and (bytes_left > 0 or not taken):
            records = self._waiting.popleft()
            portion, rest = _cut(records, rows_left, bytes_left)
            taken.append(portion)
            rows_left -= portion.table.num_rows
            bytes_left -= portion.table.nbytes
            if rest is not None:
                self._waiting.appendleft(rest)
        self._count()
        return taken

    def keep_only(self, partitions: Collection[TopicPartition]) -> None:
        """Drop what belongs to others now."""
        self._waiting = deque(records for records in self._waiting if partition_of(records) in partitions)
        self._count()

    def clear(self) -> None:
        self._waiting.clear()
        self._count()

    def _count(self) -> None:
        self.record_count = sum(records.table.num_rows for records in self._waiting)
        self.byte_count = sum(records.table.nbytes for records in self._waiting)


def _cut(records: PartitionRecords, rows_max: int, bytes_max: int) -> tuple[PartitionRecords, PartitionRecords | None]:
    rows, size = records.table.num_rows, records.table.nbytes
    fitting = rows_max
    if size > bytes_max:
        fitting = min(rows_max, max(1, bytes_max * rows // size))
    if rows <= fitting:
        return records, None
    rest = records.table.slice(fitting)
    first = replace(records, table=records.table.slice(0, fitting), next_offset=rest.column("offset")[0].as_py())
    return first, replace(records, table=rest)
