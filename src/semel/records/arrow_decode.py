"""Record batches to an Arrow table.

Large batches are decoded one by one, small ones together, so that the work per batch is shared. Whatever the vectorised
readers find odd, damaged or not, is decoded again by the reference codec, which then raises or returns: the two cannot
disagree on what is refused.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from semel.errors import CorruptRecords
from semel.records.chain import Chain, check_chain, find_chain, walk
from semel.records.compression import DECOMPRESSED_BYTES_MAX
from semel.records.decode_ragged import headers_array, read_fields
from semel.records.decode_runs import read_runs
from semel.records.layout import (
    RECORD_BYTES_MIN,
    BatchHeader,
    as_bytes_view,
    check_batch_crc,
    check_header,
    iter_batches,
    read_header,
)
from semel.records.ragged import POSITION_MAX, gather_binary
from semel.records.reference import decode_body, unpack_body
from semel.records.schema import HEADER_TYPE, HEADERS_TYPE, RECORD_SCHEMA
from semel.records.varints import Bytes, Integers, NotVectorisable

if TYPE_CHECKING:
    from typing_extensions import Buffer

_SMALL_RECORDS = 512  # batches with fewer records are decoded together
_SMALL_BYTES = 128 * 1024
_GROUP_BYTES = 1024 * 1024

_NUMBER_TYPES = RECORD_SCHEMA.types[:3]
_NO_ENTRIES = pa.array([], HEADER_TYPE)
_ZEROS = np.zeros(256 * 1024, np.uint8)

Body = tuple[BatchHeader, memoryview]


def decode_batches(
    batches: Buffer | Iterable[Buffer],
    *,
    check_crc: bool = True,
    decompressed_bytes_max: int = DECOMPRESSED_BYTES_MAX,
) -> pa.Table:
    """The records of many batches of one partition, in their order, as a table in RECORD_SCHEMA.

    Takes the views that `iter_batches` yields, or the bytes of a fetch response, whose incomplete last batch is left out.
    Control batches hold no user records and are refused: handle them by their header first. Each batch is either decoded
    whole or refused with CorruptRecords, or RecordTooLarge if it unpacks to more than `decompressed_bytes_max` bytes.

    >>> import pyarrow as pa
    >>> from semel.records import decode_batches, encode_table
    >>> batches = encode_table(pa.table({"key": ["a", "b"], "value": ["one", "two"]}), default_timestamp_ms=1000)
    >>> decode_batches(batch.data for batch in batches)["value"].to_pylist()
    [b'one', b'two']
    """
    if isinstance(batches, Iterable) and not isinstance(batches, (bytes, bytearray, memoryview)):
        pairs = ((read_header(view), view) for view in map(as_bytes_view, batches))
    else:
        pairs = iter_batches(batches)
    chunks: list[pa.RecordBatch] = []
    group: list[Body] = []
    group_bytes = 0
    for header, view in pairs:
        check_header(header, view)
        if header.is_control:
            raise CorruptRecords(
                f"The batch at offset {header.base_offset} is a transaction marker, which holds no user records: "
                "leave control batches out before decoding."
            )
        if check_crc:
            check_batch_crc(header, view)
        body = unpack_body(header, view, decompressed_bytes_max)
        small = header.record_count < _SMALL_RECORDS and len(body) < _SMALL_BYTES
        if small:
            group.append((header, body))
            group_bytes += len(body)
        if group and (not small or group_bytes > _GROUP_BYTES):
            chunks.append(_decode_group(group))
            group, group_bytes = [], 0
        if not small:
            chunks.append(_decode_large(header, body))
    if group:
        chunks.append(_decode_group(group))
    return pa.Table.from_batches([chunk for chunk in chunks if len(chunk)], RECORD_SCHEMA)


def _decode_large(header: BatchHeader, body: memoryview) -> pa.RecordBatch:
    if header.record_count == 0 or not RECORD_BYTES_MIN * header.record_count <= len(body) <= POSITION_MAX:
        return _decode_slowly([(header, body)])
    data: Bytes = np.frombuffer(body, np.uint8)
    try:
        runs = read_runs(data, header.record_count)
        if runs is None:
            return _decode_ragged([header], data, find_chain(data, header.record_count))
        return _assemble(
            _offsets([header], runs.offset_deltas() if runs.have_gaps else None),
            _timestamps([header], runs.timestamp_deltas()),
            _timestamp_types([header]),
            runs.copy_keys(data),
            runs.copy_values(data),
            _no_headers(header.record_count),
        )
    except NotVectorisable:
        return _decode_slowly([(header, body)])


def _decode_group(group: list[Body]) -> pa.RecordBatch:
    # What compaction emptied has nothing to add; records where the header counts none are damage, which the walk finds.
    group = [(header, body) for header, body in group if header.record_count or len(body)]
    if not group:
        return pa.RecordBatch.from_pylist([], RECORD_SCHEMA)
    raw = b"".join(body for _, body in group)
    starts: list[int] = []
    position = 0
    try:
        for header, body in group:
            starts += walk(raw, header.record_count, position)
            position += len(body)
        data: Bytes = np.frombuffer(raw, np.uint8)
        # Each record must lead to the next, also over the border between two batches.
        chain = check_chain(data, np.array(starts, np.int64))
        if chain is None:
            raise NotVectorisable
        return _decode_ragged([header for header, _ in group], data, chain)
    except NotVectorisable:
        return _decode_slowly(group)


def _decode_ragged(headers: list[BatchHeader], data: Bytes, chain: Chain) -> pa.RecordBatch:
    fields = read_fields(data, chain)
    return _assemble(
        _offsets(headers, fields.offset_deltas),
        _timestamps(headers, fields.timestamp_deltas),
        _timestamp_types(headers),
        gather_binary(data, fields.keys.positions, fields.keys.lengths),
        gather_binary(data, fields.values.positions, fields.values.lengths),
        _no_headers(len(chain.ends)) if fields.header_counts is None else headers_array(data, fields),
    )


def _offsets(headers: list[BatchHeader], deltas: Integers | None) -> Integers:
    """Offset of each row, checked to rise within what the headers state; deltas without gaps may be left out."""
    if deltas is None:
        # The header's count and last delta were checked against each other, so these lie within.
        (header,) = headers
        return np.arange(header.base_offset, header.base_offset + header.record_count, dtype=np.int64)
    first_rows = np.cumsum([header.record_count for header in headers])[:-1]
    rising = deltas[1:] > deltas[:-1]
    rising[first_rows - 1] = True  # each batch starts anew
    if not rising.all() or int(deltas[0]) < 0 or (deltas[first_rows] < 0).any():
        raise NotVectorisable
    if (deltas > _of_each_row(headers, [header.last_offset_delta for header in headers])).any():
        raise NotVectorisable
    return deltas + _of_each_row(headers, [header.base_offset for header in headers])


def _timestamps(headers: list[BatchHeader], deltas: Integers) -> Integers:
    timestamps = deltas + _of_each_row(headers, [header.base_timestamp for header in headers])
    if any(header.timestamp_type for header in headers):
        by_broker = _of_each_row(headers, [header.timestamp_type for header in headers])
        append_times = _of_each_row(headers, [header.max_timestamp for header in headers])
        return np.where(np.broadcast_to(by_broker, timestamps.shape), append_times, timestamps)
    return timestamps


def _timestamp_types(headers: list[BatchHeader]) -> Bytes:
    row_count = sum(header.record_count for header in headers)
    if not any(header.timestamp_type for header in headers):
        return _zeros(row_count)
    return np.full(row_count, _of_each_row(headers, [header.timestamp_type for header in headers]), np.uint8)


def _of_each_row(headers: list[BatchHeader], values: list[int]) -> Integers | np.int64:
    """A value of each batch for each of its rows; one number if they are all equal."""
    if len(set(values)) == 1:
        return np.int64(values[0])
    return np.repeat(np.array(values, np.int64), [header.record_count for header in headers])


def _assemble(
    offsets: Integers,
    timestamps: Integers,
    types: Bytes,
    keys: pa.BinaryArray,
    values: pa.BinaryArray,
    headers: pa.ListArray,
) -> pa.RecordBatch:
    numbers = zip(_NUMBER_TYPES, (offsets, timestamps, types), strict=True)
    columns = [pa.Array.from_buffers(kind, len(column), [None, pa.py_buffer(column)]) for kind, column in numbers]
    return pa.RecordBatch.from_arrays([*columns, keys, values, headers], schema=RECORD_SCHEMA)


def _no_headers(count: int) -> pa.ListArray:
    offsets = pa.py_buffer(_zeros(4 * (count + 1)))
    return pa.Array.from_buffers(HEADERS_TYPE, count, [None, offsets], children=[_NO_ENTRIES])


def _zeros(size: int) -> Bytes:
    """Zeros that nobody will write to: shared, unless there are very many."""
    return _ZEROS[:size] if size <= len(_ZEROS) else np.zeros(size, np.uint8)


def _decode_slowly(group: list[Body]) -> pa.RecordBatch:
    """By the reference codec: the judge of everything unusual."""
    rows = [
        {
            "offset": record.offset,
            "timestamp": record.timestamp_ms,
            "timestamp_type": header.timestamp_type,
            "key": record.key,
            "value": record.value,
            "headers": [{"key": key, "value": value} for key, value in record.headers],
        }
        for header, body in group
        for record in decode_body(header, body)
    ]
    return pa.RecordBatch.from_pylist(rows, RECORD_SCHEMA)
