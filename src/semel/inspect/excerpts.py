"""A piece of a partition: its batches or records, who wrote them, and what became of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from semel.client.cluster import Cluster
from semel.client.partitions import TopicPartition
from semel.inspect.log import LogReader, Seen
from semel.inspect.outcomes import LoggedBatch, Status
from semel.records import ControlMarker
from semel.records.reference import Record, decode_batch

EXCERPT_BYTES_MAX: Final = 64 << 20
"""How much of a log is read to find the end of a transaction."""
_UNPACKED_BYTES_MAX: Final = 256 << 20

Readers = Literal["everyone", "read_uncommitted", "nobody"]


@dataclass(frozen=True, slots=True)
class ShownBatch:
    """A batch with its bytes. `ended_by` is the marker of its transaction, if it was read."""

    batch: LoggedBatch
    data: memoryview
    ended_by: ControlMarker | None = None


@dataclass(frozen=True, slots=True)
class LoggedRecord:
    """A record, the batch it lies in, and the readers that see it now."""

    record: Record
    batch: LoggedBatch
    ended_by: ControlMarker | None
    visible_to: Readers


@dataclass(frozen=True, slots=True)
class Excerpt:
    """What was read of one partition."""

    topic: str
    partition: int
    batches: tuple[ShownBatch, ...]
    next_offset: int
    """Where to go on reading."""
    log_start_offset: int
    last_stable_offset: int
    high_watermark: int
    is_decided: bool
    """Whether the log was read far enough for "open" to be certain."""

    def records(
        self, start: int, end: int | None = None, *, unpacked_bytes_max: int = _UNPACKED_BYTES_MAX
    ) -> Iterator[LoggedRecord]:
        """Those from `start` up to but without `end`. Markers are among the batches, not among these."""
        for shown in self.batches:
            if shown.batch.status == "marker":
                continue
            _, records = decode_batch(shown.data, decompressed_bytes_max=unpacked_bytes_max)
            for record in records:
                if record.offset >= start and (end is None or record.offset < end):
                    readers = visible_to(shown.batch.status, record.offset, self.last_stable_offset)
                    yield LoggedRecord(record, shown.batch, shown.ended_by, readers)


def visible_to(status: Status, offset: int, last_stable_offset: int) -> Readers:
    """
    >>> visible_to("committed", 4, last_stable_offset=9), visible_to("committed", 9, last_stable_offset=9)
    ('everyone', 'read_uncommitted')
    """
    if status == "marker":
        return "nobody"
    if status in ("plain", "committed") and offset < last_stable_offset:
        return "everyone"
    return "read_uncommitted"


def read_excerpt(
    cluster: Cluster,
    named: TopicPartition,
    start: int,
    *,
    end: int | None = None,
    batches_max: int,
    bytes_max: int = EXCERPT_BYTES_MAX,
) -> Excerpt:
    """Batches from `start` on; then the log is read on until each of their transactions has its end, within bounds."""
    reader = LogReader(cluster, named, start)
    reader.look()
    stop = reader.high_watermark if end is None else min(end, reader.high_watermark)
    collected = _Collected(stop, batches_max)
    while reader.position < reader.high_watermark and reader.bytes_read < bytes_max:
        if not collected.waiting and (collected.is_full or reader.position >= stop):
            break
        for seen in reader.read():
            collected.take(seen)
    shown = collected.shown
    is_open = any(one.batch.status == "open" for one in shown)
    return Excerpt(
        *named,
        tuple(shown),
        shown[-1].batch.last_offset + 1 if shown else reader.position,
        reader.log_start_offset,
        reader.last_stable_offset,
        reader.high_watermark,
        is_decided=not is_open or reader.position >= reader.high_watermark,
    )


class _Collected:
    """The first batches of a walk, and those of them that wait for the end of their transaction."""

    def __init__(self, stop: int, batches_max: int) -> None:
        self._stop = stop
        self._batches_max = batches_max
        self.shown: list[ShownBatch] = []
        self.waiting: dict[int, list[int]] = {}
        """Places in `shown`, by producer id."""

    @property
    def is_full(self) -> bool:
        return len(self.shown) >= self._batches_max

    def take(self, seen: Seen) -> None:
        batch = seen.batch
        if batch.marker is not None:
            self._end(batch.marker)
        if self.is_full or batch.base_offset >= self._stop:
            return
        if batch.status in ("committed", "aborted", "open"):
            self.waiting.setdefault(batch.producer_id, []).append(len(self.shown))
        self.shown.append(ShownBatch(batch, seen.data))

    def _end(self, marker: ControlMarker) -> None:
        status: Status = "committed" if marker.kind == "commit" else "aborted"
        for place in self.waiting.pop(marker.producer_id, []):
            one = self.shown[place]
            self.shown[place] = ShownBatch(one.batch._replace(status=status), one.data, marker)
