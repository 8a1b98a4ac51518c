"""Arrow table, or single records, to record batches: by the compiled kernel, or without it by the reference codec."""
# pyarrow comes without types, so what it returns is unknown to the checker.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from semel.errors import ConfigError, RecordTooLarge
from semel.records.compiled import kernel, string_column
from semel.records.compression import check_compression, compress
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
from semel.records.reference import Record, write_record
from semel.records.schema import EncodedBatch, RecordColumns, check_header_keys, normalise_columns

if TYPE_CHECKING:
    from semel.records.kernel import Columns, Writer

_BATCH_BYTES_MAX = 2**31 - 1  # its length has 32 bits
_ROW_BYTES_MAX = 36  # what a record takes at most besides its key, value and headers
_HEADER_BYTES_MAX = 10  # and a header besides its name and content


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
    check_header_keys(columns)
    if kernel is None:
        records = (columns.record(row, default_timestamp_ms) for row in range(columns.row_count))
        bodies = _write_by_reference(records, batch_bytes_max)
    else:
        bodies = _write_columns(columns, default_timestamp_ms, batch_bytes_max)
    batches: list[EncodedBatch] = []
    first = 0
    for body in bodies:
        sequence = base_sequence if base_sequence < 0 else next_sequence(base_sequence, first)
        producer = _Producer(producer_id, producer_epoch, sequence, transactional)
        batches.append(_finish(body, compression, compression_level, producer))
        first += body.row_count
    return batches


def encode_records(
    records: Sequence[Record], *, compression: str, compression_level: int | None, batch_bytes_max: int
) -> list[EncodedBatch]:
    """Single records as the batches that `encode_table` makes of a table of them; their own offsets do not count.

    >>> records = [Record(number, 1000, None, value) for number, value in enumerate((b"a", b"b", b"c"))]
    >>> batches = encode_records(records, compression="none", compression_level=None, batch_bytes_max=80)
    >>> [batch.record_count for batch in batches]
    [2, 1]
    """
    check_compression(compression, compression_level)
    bodies = (_write_by_reference if kernel is None else _write_rows)(records, batch_bytes_max)
    return [_finish(body, compression, compression_level, _NOBODY) for body in bodies]


class _Body(NamedTuple):
    """The records of one batch, in a buffer of their own behind room for the header."""

    row_count: int
    base_timestamp: int
    max_timestamp: int
    framed: memoryview


class _Producer(NamedTuple):
    """The producer's fields of a batch."""

    id: int
    epoch: int
    base_sequence: int
    is_transactional: bool


_NOBODY = _Producer(-1, -1, -1, False)


def _finish(body: _Body, compression: str, level: int | None, producer: _Producer) -> EncodedBatch:
    batch = body.framed
    if compression != "none":
        packed = as_bytes_view(compress(compression, batch[HEADER_BYTES:], level))
        # In a buffer of Arrow's, whose allocator gives memory back warm.
        batch = as_bytes_view(pa.allocate_buffer(HEADER_BYTES + len(packed)))
        batch[HEADER_BYTES:] = packed
    write_header(
        batch,
        BatchHeader(
            base_offset=0,
            batch_length=len(batch) - LENGTH_FIELD_END,
            partition_leader_epoch=-1,
            magic=MAGIC,
            crc=0,
            attributes=make_attributes(compression=compression, transactional=producer.is_transactional),
            last_offset_delta=body.row_count - 1,
            base_timestamp=body.base_timestamp,
            max_timestamp=body.max_timestamp,
            producer_id=producer.id,
            producer_epoch=producer.epoch,
            base_sequence=producer.base_sequence,
            record_count=body.row_count,
        ),
    )
    return EncodedBatch(batch, body.row_count)


def _write_columns(columns: RecordColumns, default_timestamp_ms: int, bytes_max: int) -> Iterator[_Body]:
    pieces = [_as_columns(piece) for piece in columns.pieces()]

    def fill(writer: Writer, first: int) -> None:
        for piece in pieces:
            there = piece.row_count - first
            if there > 0 and writer.append(piece, first) < there:
                return
            first = max(-there, 0)

    room = sum(piece.bytes_max for piece in pieces)
    return _cut(columns.row_count, room, bytes_max, default_timestamp_ms, fill)


def _write_rows(records: Sequence[Record], bytes_max: int) -> Iterator[_Body]:
    rows = [
        (
            record.timestamp_ms,
            record.key,
            record.value,
            [(name.encode("utf-8", errors="surrogateescape"), content) for name, content in record.headers],
        )
        for record in records
    ]

    def fill(writer: Writer, first: int) -> None:
        for row in islice(rows, first, None):
            if not writer.append_row(*row):
                return

    return _cut(len(rows), sum(map(_row_bytes_max, rows)), bytes_max, 0, fill)


def _cut(
    row_count: int, room: int, bytes_max: int, default_timestamp_ms: int, fill: Callable[[Writer, int], None]
) -> Iterator[_Body]:
    """Batches of as many rows as fit; `fill` writes them from a row on, and all of them take at most `room` bytes."""
    assert kernel is not None
    done = 0
    while done < row_count:
        size = min(bytes_max, _BATCH_BYTES_MAX, room + HEADER_BYTES)
        buffer = pa.allocate_buffer(max(size, HEADER_BYTES), resizable=True)
        writer = kernel.Writer(buffer, HEADER_BYTES, default_timestamp_ms)
        fill(writer, done)
        if writer.record_count == 0:
            raise too_large(done, writer.refused_bytes + HEADER_BYTES, bytes_max)
        end = writer.end
        writer.close()  # it must not write into the buffer that is about to move
        if end < buffer.size:
            buffer.resize(end, shrink_to_fit=True)
        yield _Body(writer.record_count, writer.base_timestamp, writer.max_timestamp, as_bytes_view(buffer))
        done += writer.record_count
        room -= end - HEADER_BYTES


def _row_bytes_max(row: tuple[int, bytes | None, bytes | None, list[tuple[bytes, bytes | None]]]) -> int:
    _, key, value, headers = row
    contents = sum(len(name) + len(content or b"") + _HEADER_BYTES_MAX for name, content in headers)
    return len(key or b"") + len(value or b"") + contents + _ROW_BYTES_MAX


def _as_columns(piece: RecordColumns) -> Columns:
    """The columns of a table of one piece by their buffers."""
    assert kernel is not None
    timestamps = headers = None
    if piece.timestamp is not None:
        chunk = piece.timestamp.chunk(0)
        timestamps = (*chunk.buffers(), chunk.offset)
    if piece.headers is not None:
        chunk = piece.headers.chunk(0)
        names, contents = (string_column(chunk.values.field(name)) for name in ("key", "value"))
        headers = (*chunk.buffers()[:2], chunk.offset, names, contents)
    key = None if piece.key is None else string_column(piece.key.chunk(0))
    return kernel.Columns(string_column(piece.value.chunk(0)), key, timestamps, headers)


def _write_by_reference(records: Iterable[Record], bytes_max: int) -> Iterator[_Body]:
    framed, timestamps = bytearray(HEADER_BYTES), list[int]()
    for row, record in enumerate(records):
        body = _write_record(record, timestamps)
        if timestamps and len(framed) + len(body) > bytes_max:
            yield _Body(len(timestamps), timestamps[0], max(timestamps), memoryview(framed))
            framed, timestamps = bytearray(HEADER_BYTES), []
            body = _write_record(record, timestamps)
        if len(framed) + len(body) > bytes_max:
            raise too_large(row, len(framed) + len(body), bytes_max)
        framed += body
        timestamps.append(record.timestamp_ms)
    if timestamps:
        yield _Body(len(timestamps), timestamps[0], max(timestamps), memoryview(framed))


def _write_record(record: Record, timestamps: list[int]) -> bytearray:
    """The next record of a batch whose records so far have these timestamps."""
    body = bytearray()
    base_timestamp = timestamps[0] if timestamps else record.timestamp_ms
    write_record(body, replace(record, offset=len(timestamps)), 0, base_timestamp)
    return body


def too_large(row: int, size: int, limit: int) -> RecordTooLarge:
    """The error for a record that fits into no batch."""
    return RecordTooLarge(
        f"Row {row} takes {size} bytes in a batch of its own, more than the limit of {limit}; no row was encoded. "
        "Raise max.request.size here and max.message.bytes of the topic (message.max.bytes of the broker), or make the "
        "record smaller."
    )
