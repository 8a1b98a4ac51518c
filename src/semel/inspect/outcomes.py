"""What became of each batch of a partition: committed, aborted, open, or outside of any transaction. Pure.

Up to the last stable offset a broker lists the aborted transactions beside what it sends, so each batch is decided at
once. Beyond it only the markers in the log decide, and they come after the records that they are about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from semel.client.visibility import AbortedTransaction, Visibility
from semel.records import BatchHeader, ControlMarker

Status = Literal["plain", "committed", "aborted", "open", "marker"]
"""`plain` records belong to no transaction. `marker` is a control batch: the end of a transaction."""


class LoggedBatch(NamedTuple):
    """A batch as it lies in the log, by its header."""

    base_offset: int
    last_offset: int
    record_count: int
    total_bytes: int
    max_timestamp_ms: int
    compression: str
    producer_id: int
    producer_epoch: int
    base_sequence: int
    leader_epoch: int
    is_transactional: bool
    status: Status
    marker: ControlMarker | None = None

    @classmethod
    def of(cls, header: BatchHeader, status: Status, marker: ControlMarker | None = None) -> LoggedBatch:
        return cls(
            header.base_offset,
            header.last_offset,
            header.record_count,
            header.total_bytes,
            header.max_timestamp,
            header.compression,
            header.producer_id,
            header.producer_epoch,
            header.base_sequence,
            header.partition_leader_epoch,
            header.is_transactional,
            status,
            marker,
        )

    @property
    def last_sequence(self) -> int:
        """-1 without an idempotent producer."""
        return -1 if self.base_sequence < 0 else (self.base_sequence + self.last_offset - self.base_offset) & 0x7FFFFFFF


ReadMarker = Callable[[], ControlMarker | None]


class Outcomes:
    """Takes the batches of a partition in log order, from any offset on.

    `take_stable` is for those that were sent to a `read_committed` reader, `take_beyond` for those after them.
    """

    def __init__(self) -> None:
        self._visibility = Visibility()
        self._open: dict[int, list[LoggedBatch]] = {}

    def begin_answer(self, aborted: Iterable[AbortedTransaction]) -> None:
        """The batches of another answer to a `read_committed` Fetch follow."""
        self._visibility = Visibility(aborted)

    def take_stable(self, header: BatchHeader, read_marker: ReadMarker) -> LoggedBatch:
        """A batch below the last stable offset, decided."""
        marker = read_marker() if header.is_control else None
        is_visible = self._visibility.admits(header, lambda: None if marker is None else marker.kind)
        if header.is_control:
            return LoggedBatch.of(header, "marker", marker)
        if not header.is_transactional:
            return LoggedBatch.of(header, "plain")
        return LoggedBatch.of(header, "committed" if is_visible else "aborted")

    def take_beyond(self, header: BatchHeader, read_marker: ReadMarker) -> tuple[LoggedBatch, list[LoggedBatch]]:
        """A batch from the last stable offset on, and those before it that are decided by it."""
        if header.is_control:
            marker = read_marker()
            batch = LoggedBatch.of(header, "marker", marker)
            return batch, [] if marker is None else self._decide(marker)
        if not header.is_transactional:
            return LoggedBatch.of(header, "plain"), []
        batch = LoggedBatch.of(header, "open")
        self._open.setdefault(header.producer_id, []).append(batch)
        return batch, []

    def _decide(self, marker: ControlMarker) -> list[LoggedBatch]:
        status: Status = "committed" if marker.kind == "commit" else "aborted"
        return [batch._replace(status=status) for batch in self._open.pop(marker.producer_id, [])]

    @property
    def still_open(self) -> list[LoggedBatch]:
        """Those that no marker has ended so far."""
        return sorted(batch for batches in self._open.values() for batch in batches)
