"""Arrow table to record batches."""
# pyarrow comes without types, so what it returns is unknown to the checker.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from semel.errors import ConfigError, RecordTooLarge
from semel.records import reference
from semel.records.compression import check_compression, compress
from semel.records.encode_plan import Strings, Window
from semel.records.encode_ragged import write_ragged
from semel.records.encode_runs import SLACK_BYTES, Run, find_runs, plan_uniform, write_runs
from semel.records.few import too_large
from semel.records.layout import (
    HEADER_BYTES,
    LENGTH_FIELD_END,
    MAGIC,
    SEQUENCE_MAX,
    BatchHeader,
    as_bytes_view,
    make_attributes,
    next_sequence,
    write_header,
)
from semel.records.schema import EncodedBatch, RecordColumns, normalise_columns
from semel.records.varints import NotVectorisable, Words

_WINDOW_MARGIN_ROWS = 64


def encode_table(
    table: pa.Table | pa.RecordBatch,
    *,
    default_timestamp_ms: int,
    compression: str = "none",
    compression_level: int | None = None,
    batch_bytes_max: int = 1_048_576,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    transactional: bool = False,
) -> list[EncodedBatch]:
    """The rows of a table as record batches, in their order.

    Columns are found by name: `value` (needed), `key`, `headers` and `timestamp`. Strings count as their UTF-8 bytes; a
    timestamp is any Arrow timestamp or an integer of milliseconds, and null means `default_timestamp_ms`. A batch takes
    as many rows as fit into `batch_bytes_max` bytes before compression. Base offsets are 0, as a broker expects them;
    sequences go on from batch to batch if `base_sequence` is given.

    >>> import pyarrow as pa
    >>> from semel.records import encode_table, read_header
    >>> batches = encode_table(pa.table({"value": ["a", "b", "c"]}), default_timestamp_ms=1000, batch_bytes_max=80)
    >>> [read_header(batch.data).record_count for batch in batches]
    [2, 1]
    """
    check_compression(compression, compression_level)
    if not -1 <= base_sequence <= SEQUENCE_MAX:
        raise ConfigError(f"base_sequence {base_sequence} is outside of -1 to {SEQUENCE_MAX}.")
    columns = normalise_columns(table)
    encoder = _Encoder(columns, default_timestamp_ms, batch_bytes_max - HEADER_BYTES)
    batches: list[EncodedBatch] = []
    first = 0
    while first < columns.row_count:
        body = encoder.next_body(first)
        batch = _frame(body, compression, compression_level)
        write_header(
            batch,
            BatchHeader(
                base_offset=0,
                batch_length=len(batch) - LENGTH_FIELD_END,
                partition_leader_epoch=-1,
                magic=MAGIC,
                crc=0,
                attributes=make_attributes(compression=compression, transactional=transactional),
                last_offset_delta=body.row_count - 1,
                base_timestamp=body.base_timestamp,
                max_timestamp=body.max_timestamp,
                producer_id=producer_id,
                producer_epoch=producer_epoch,
                base_sequence=base_sequence if base_sequence < 0 else next_sequence(base_sequence, first),
                record_count=body.row_count,
            ),
        )
        batches.append(EncodedBatch(batch, body.row_count))
        first += body.row_count
    return batches


class _Body(NamedTuple):
    """The records of one batch; `framed` is set if they stand in a buffer of their own with room for the header."""

    row_count: int
    base_timestamp: int
    max_timestamp: int
    records: memoryview
    framed: memoryview | None


class _Encoder:
    """Cuts the rows of a table into batches, from a window of rows that is likely to be enough for one."""

    def __init__(self, columns: RecordColumns, default_timestamp_ms: int, records_bytes_max: int) -> None:
        self.columns = columns
        self.default_timestamp_ms = default_timestamp_ms
        self.records_bytes_max = records_bytes_max
        row_bytes = columns.value.nbytes + (0 if columns.key is None else columns.key.nbytes)
        self.window_rows = _with_margin(records_bytes_max * columns.row_count // (row_bytes + 1))

    def next_body(self, first: int) -> _Body:
        """The records from row `first` on, as many as fit."""
        while True:
            count = min(self.window_rows, self.columns.row_count - first)
            window = Window(self.columns, first, count, self.default_timestamp_ms)
            try:
                taken, records, framed = self._write_window(window, first)
            except NotVectorisable:
                return self._write_slowly(first)
            if taken < count or first + count == self.columns.row_count:
                self.window_rows = _with_margin(taken)
                return _Body(taken, *window.timestamp_range(taken), records, framed)
            self.window_rows *= 2

    def _write_window(self, window: Window, first: int) -> tuple[int, memoryview, memoryview | None]:
        """How many rows of the window fit into a batch, and their records."""
        timestamp_words, timestamp_widths = window.timestamp_varints()
        runs = plan_uniform(window, timestamp_widths, self.records_bytes_max)
        if runs:
            return runs[-1].end, *_write_runs(runs, window.keys, window.values, timestamp_words)
        plan = window.plan(self.records_bytes_max)
        if plan.count == 0:
            raise self._too_large(first, plan.records_bytes)
        runs = find_runs(plan)
        if runs is not None:
            return plan.count, *_write_runs(runs, plan.keys, plan.values, plan.timestamp_words)
        return plan.count, write_ragged(plan), None

    def _write_slowly(self, first: int) -> _Body:
        """By the reference codec: for time differences of millions of years."""
        rows = self.columns.slice(first, self.columns.row_count - first)
        records = bytearray()
        timestamps: list[int] = []
        for row in range(rows.row_count):
            record = rows.record(row, self.default_timestamp_ms)
            timestamps.append(record.timestamp_ms)
            body = bytearray()
            reference.write_record(body, record, 0, timestamps[0])
            if len(records) + len(body) > self.records_bytes_max:
                if row == 0:
                    raise self._too_large(first, len(body))
                timestamps.pop()
                break
            records += body
        return _Body(len(timestamps), timestamps[0], max(timestamps), memoryview(records), None)

    def _too_large(self, row: int, size: int) -> RecordTooLarge:
        return too_large(row, size + HEADER_BYTES, self.records_bytes_max + HEADER_BYTES)


def _with_margin(rows: int) -> int:
    return rows + rows // 32 + _WINDOW_MARGIN_ROWS


def _write_runs(
    runs: list[Run], keys: Strings | None, values: Strings, timestamp_words: Words | None
) -> tuple[memoryview, memoryview]:
    size = HEADER_BYTES + sum((run.end - run.first) * run.shape.stride for run in runs)
    buffer = pa.allocate_buffer(size + SLACK_BYTES)
    write_runs(runs, keys, values, timestamp_words, np.frombuffer(buffer, np.uint8))
    framed = as_bytes_view(buffer)[:size]
    return framed[HEADER_BYTES:], framed


def _frame(body: _Body, compression: str, level: int | None) -> memoryview:
    """The records behind room for the header, in a buffer of Arrow's, whose allocator gives memory back warm."""
    if compression == "none" and body.framed is not None:
        return body.framed
    packed = as_bytes_view(compress(compression, body.records, level))
    batch = as_bytes_view(pa.allocate_buffer(HEADER_BYTES + len(packed)))
    batch[HEADER_BYTES:] = packed
    return batch
