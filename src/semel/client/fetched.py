"""What one partition's part of a Fetch response holds for a reader at a given position. Pure: bytes in, records out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from semel.client.visibility import AbortedTransaction, Visibility
from semel.errors import CorruptRecords, RecordTooLarge
from semel.records import (
    RECORD_SCHEMA,
    BatchHeader,
    ControlMarker,
    decode_batches,
    iter_batches,
    read_control_batch,
    read_header,
)
from semel.records.arrow_decode import Decoded, decode_some
from semel.records.compression import DECOMPRESSED_BYTES_MAX

# Spark's Kafka connector has these names in this order.
READ_SCHEMA = pa.schema(
    [
        RECORD_SCHEMA.field("key"),
        RECORD_SCHEMA.field("value"),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        RECORD_SCHEMA.field("offset"),
        RECORD_SCHEMA.field("timestamp"),
        RECORD_SCHEMA.field("timestamp_type").with_name("timestampType"),
        RECORD_SCHEMA.field("headers"),
    ]
)


@dataclass(frozen=True, slots=True)
class PartitionRecords:
    """What one fetch brought from one partition; the table may be empty where only aborted records were passed."""

    topic: str
    partition: int
    table: pa.Table
    """In `RECORD_SCHEMA`."""
    next_offset: int
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    markers: tuple[ControlMarker, ...] = ()
    """The transaction markers among the records, if they were asked for."""


@dataclass(frozen=True, slots=True)
class Window:
    """The offsets a reader wants: from `start`, up to but without `end`; and what it may see of them."""

    start: int
    end: int | None = None
    read_committed: bool = True
    last_stable_offset: int = -1
    include_markers: bool = False

    @property
    def stop(self) -> int | None:
        """The first offset that must not be given out, if there is a limit."""
        limits = [] if self.end is None else [self.end]
        # The broker stops at the last stable offset by itself; a batch that it appended after it had taken the number
        # is left for the next fetch, so that no record is ever beyond the number that is reported beside it.
        if self.read_committed and self.last_stable_offset >= 0:
            limits.append(self.last_stable_offset)
        return min(limits, default=None)


@dataclass(slots=True)
class Opened:
    """The batches of a response sorted out by their headers alone; nothing is decoded yet."""

    window: Window
    next_offset: int
    leader_epoch: int = -1
    """Of the last batch that was passed."""
    visible: list[memoryview] = field(default_factory=list[memoryview])
    markers: list[ControlMarker] = field(default_factory=list[ControlMarker])
    damaged: CorruptRecords | None = None
    """Why the walk ended before the end of the data: what comes before it is fine."""
    is_cut_short: bool = False
    """There are bytes, and not one whole batch in them: the same position must be fetched with a larger limit."""

    def keep_before(self, offset: int, batch_count: int) -> None:
        """Only the first visible batches, up to `offset`: the batch there is damaged."""
        self.visible = self.visible[:batch_count]
        self.markers = [marker for marker in self.markers if marker.offset < offset]
        self.next_offset = offset
        self.leader_epoch = -1


def open_records(records: bytes | memoryview, window: Window, aborted: Iterable[AbortedTransaction] = ()) -> Opened:
    """Walk over the batches of a response, choose the visible ones and find the next position."""
    opened = Opened(window, window.start)
    visibility = Visibility(aborted if window.read_committed else ())
    stop = window.stop
    seen = 0
    try:
        for header, batch in iter_batches(records):
            seen += 1
            if stop is not None and header.base_offset >= stop:
                if window.end is not None and header.base_offset >= window.end:
                    opened.next_offset = max(opened.next_offset, window.end)  # only a gap lies between
                break
            _sort_out(header, batch, opened, visibility)
    except CorruptRecords as error:
        opened.damaged = error
    opened.is_cut_short = len(records) > 0 and seen == 0 and opened.damaged is None
    return opened


def _sort_out(header: BatchHeader, batch: memoryview, opened: Opened, visibility: Visibility) -> None:
    window = opened.window
    if window.start <= header.last_offset < opened.next_offset:
        return  # an answer that holds a batch twice: the second time an abort that is over would hide nothing of it
    marker = None
    if header.is_control and window.include_markers and header.last_offset >= window.start:
        marker = read_control_batch(batch)

    def kind_of_marker():
        found = marker or read_control_batch(batch)
        return None if found is None else found.kind

    is_visible = visibility.admits(header, kind_of_marker)
    if header.last_offset < window.start:
        return  # a broker may begin before the position that was asked for
    if is_visible and header.record_count:
        opened.visible.append(batch)
    if marker is not None:
        opened.markers.append(marker)
    opened.leader_epoch = header.partition_leader_epoch
    # Compaction leaves gaps and emptied batches, so the position follows the headers and not the records.
    opened.next_offset = header.last_offset + 1 if window.end is None else min(header.last_offset + 1, window.end)


def decode_opened(
    opened: Opened, *, check_crc: bool, batch_bytes_max: int = DECOMPRESSED_BYTES_MAX, bytes_max: int | None = None
) -> Decoded:
    """The visible records of the window as a table in `RECORD_SCHEMA`; of compressed ones about `bytes_max`."""
    if not opened.visible:
        return Decoded(RECORD_SCHEMA.empty_table(), 0, 0)
    decoded = decode_some(
        opened.visible, check_crc=check_crc, decompressed_bytes_max=batch_bytes_max, total_bytes_max=bytes_max
    )
    return decoded._replace(table=cut_to_window(decoded.table, opened.window.start, opened.window.end))


def split_off(opened: Opened, batch_count: int) -> Opened | None:
    """Leave only so many visible batches in `opened`; what comes after them, if anything does."""
    if batch_count >= len(opened.visible):
        return None
    offset = read_header(opened.visible[batch_count]).base_offset
    rest = Opened(
        replace(opened.window, start=offset),
        opened.next_offset,
        opened.leader_epoch,
        opened.visible[batch_count:],
        [marker for marker in opened.markers if marker.offset >= offset],
        opened.damaged,
    )
    last = read_header(opened.visible[batch_count - 1])
    opened.keep_before(offset, batch_count)
    opened.leader_epoch = last.partition_leader_epoch
    return rest


def intact_prefix(
    batches: Sequence[memoryview], *, check_crc: bool, batch_bytes_max: int = DECOMPRESSED_BYTES_MAX
) -> int:
    """How many batches from the front on can be decoded."""
    for count, batch in enumerate(batches):
        try:
            decode_batches([batch], check_crc=check_crc, decompressed_bytes_max=batch_bytes_max)
        except (CorruptRecords, RecordTooLarge):
            return count
    return len(batches)


def cut_to_window(table: pa.Table, start: int, end: int | None) -> pa.Table:
    """Without the records before `start` and from `end` on: a fetch gives whole batches.

    >>> table = RECORD_SCHEMA.empty_table().set_column(0, "offset", pa.array([], pa.int64()))
    >>> cut_to_window(table, 5, 9).num_rows
    0
    """
    offsets = table.column("offset")
    first = _count_below(offsets, start)
    count = (table.num_rows if end is None else _count_below(offsets, end)) - first
    return table if count == table.num_rows else table.slice(first, max(count, 0))


def _count_below(offsets: pa.ChunkedArray, limit: int) -> int:
    """How many offsets are below `limit`; they are sorted, so whole chunks are passed by their last one."""
    count = 0
    for chunk in offsets.chunks:
        if len(chunk) and chunk[-1].as_py() >= limit:
            # Not by `to_numpy`, which imports pandas where it is installed: half a second for each worker of Spark.
            numbers = np.frombuffer(chunk.buffers()[1], np.int64)[chunk.offset : chunk.offset + len(chunk)]
            return count + int(numbers.searchsorted(limit))
        count += len(chunk)
    return count


def to_read_table(fetched: Iterable[PartitionRecords]) -> pa.Table:
    """One table in `READ_SCHEMA` from the records of several partitions."""
    tables: list[pa.Table] = []
    for records in fetched:
        table, count = records.table, records.table.num_rows
        columns = {name: table.column(name) for name in table.column_names}
        columns["timestampType"] = columns.pop("timestamp_type")
        columns["topic"] = pa.repeat(pa.scalar(records.topic, pa.string()), count)
        columns["partition"] = pa.repeat(pa.scalar(records.partition, pa.int32()), count)
        tables.append(pa.table([columns[name] for name in READ_SCHEMA.names], schema=READ_SCHEMA))
    return pa.concat_tables(tables) if tables else READ_SCHEMA.empty_table()
