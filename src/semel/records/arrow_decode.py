"""Record batches to an Arrow table.

Large batches are decoded one by one, small ones together, so that the work per batch is shared. Whatever the vectorised
readers find odd, damaged or not, is decoded again by the reference codec, which then raises or returns: the two cannot
disagree on what is refused.
"""
# pyarrow comes without types, so what it returns is unknown to the checker.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from semel.errors import CorruptRecords
from semel.records.chain import Chain, check_chain, find_chain, walk
from semel.records.compression import DECOMPRESSED_BYTES_MAX, headers_max, too_large, too_many_headers
from semel.records.decode_few import FEW_RECORDS, decode_few
from semel.records.decode_ragged import TooManyHeaders, headers_array, read_fields
from semel.records.decode_runs import Runs, read_runs
from semel.records.decode_uniform import Uniform, read_uniform
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
from semel.records.reference import iterate_body, unpack_body
from semel.records.schema import HEADER_TYPE, HEADERS_TYPE, RECORD_SCHEMA, TIMESTAMP_TYPE
from semel.records.varints import Bytes, Integers, NotVectorisable

if TYPE_CHECKING:
    from typing_extensions import Buffer

_SMALL_RECORDS = 512  # batches with fewer records are decoded together
_SMALL_BYTES = 128 * 1024
_GROUP_BYTES = 1024 * 1024

_INT64 = pa.int64()


def _of_int8(values: npt.NDArray[np.int8]) -> pa.Int8Array:
    # Not by `pa.array`, which imports pandas where it is installed: half a second for each Python worker of Spark.
    return pa.Array.from_buffers(pa.int8(), len(values), [None, pa.py_buffer(values)])


def _make_no_headers(count: int) -> pa.ListArray:
    offsets = pa.py_buffer(np.zeros(count + 1, np.int32))
    return pa.Array.from_buffers(HEADERS_TYPE, count, [None, offsets], children=[pa.nulls(0, HEADER_TYPE)])


# Columns that are the same for most batches, to be shared by them.
_SHARED_ROWS = 65536
_NO_HEADERS = _make_no_headers(_SHARED_ROWS)
_CREATE_TIME = _of_int8(np.zeros(_SHARED_ROWS, np.int8))

_ROW_BYTES = 40
"""About what a row takes besides key and value: offset, timestamp, and where key, value and headers end."""
_HEADER_BYTES = 8
"""What a header takes besides its own bytes once it is decoded: where key and value end."""
_SLOW_ROWS = 16384

Body = tuple[BatchHeader, memoryview]


def decode_batches(
    batches: Buffer | Iterable[Buffer | tuple[BatchHeader, memoryview]],
    *,
    check_crc: bool = True,
    decompressed_bytes_max: int = DECOMPRESSED_BYTES_MAX,
) -> pa.Table:
    """The records of many batches of one partition, in their order, as a table in RECORD_SCHEMA.

    Takes what `iter_batches` yields, or the views alone, or the bytes of a fetch response, whose incomplete last batch
    is left out. Control batches hold no user records and are refused: handle them by their header first. A batch is
    decoded whole or refused with CorruptRecords, or with RecordTooLarge if it unpacks to more than
    `decompressed_bytes_max` bytes or its headers take more memory than that; then nothing is returned of the others
    either.

    >>> import pyarrow as pa
    >>> from semel.records import decode_batches, encode_table
    >>> batches = encode_table(pa.table({"key": ["a", "b"], "value": ["one", "two"]}), default_timestamp_ms=1000)
    >>> decode_batches(batch.data for batch in batches)["value"].to_pylist()
    [b'one', b'two']
    """
    return decode_some(batches, check_crc=check_crc, decompressed_bytes_max=decompressed_bytes_max).table


class Decoded(NamedTuple):
    """What `decode_some` gives."""

    table: pa.Table
    batch_count: int
    """How many batches it holds, from the first on."""
    unpacked_bytes: int
    """About how much memory the compressed ones among them take."""


def decode_some(
    batches: Buffer | Iterable[Buffer | tuple[BatchHeader, memoryview]],
    *,
    check_crc: bool = True,
    decompressed_bytes_max: int = DECOMPRESSED_BYTES_MAX,
    total_bytes_max: int | None = None,
) -> Decoded:
    """The same, up to the batch with which what was compressed takes `total_bytes_max` or more; at least one.

    A few bytes of a hostile answer can unpack to gigabytes: who reads in slices holds one slice and one batch.
    """
    if isinstance(batches, Iterable) and not isinstance(batches, (bytes, bytearray, memoryview)):
        pairs = map(_with_header, batches)
    else:
        pairs = iter_batches(batches)
    chunks: list[pa.RecordBatch] = []
    group: list[Body] = []
    group_bytes = unpacked_bytes = batch_count = 0
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
        if header.compression != "none":
            unpacked_bytes += _memory_of(header, body, decompressed_bytes_max)
        batch_count += 1
        small = header.record_count < _SMALL_RECORDS and len(body) < _SMALL_BYTES
        if small:
            group.append((header, body))
            group_bytes += len(body)
        if group and (not small or group_bytes > _GROUP_BYTES):
            chunks += _decode_group(group, decompressed_bytes_max)
            group, group_bytes = [], 0
        if not small:
            decoded = _decode_large(header, body, decompressed_bytes_max)
            chunks += decoded
            if header.compression != "none":
                unpacked_bytes += _HEADER_BYTES * sum(len(chunk.column("headers").values) for chunk in decoded)
        if total_bytes_max is not None and unpacked_bytes >= total_bytes_max:
            break
    if group:
        chunks += _decode_group(group, decompressed_bytes_max)
    table = pa.Table.from_batches([chunk for chunk in chunks if len(chunk)], RECORD_SCHEMA)
    return Decoded(table, batch_count, unpacked_bytes)


def _memory_of(header: BatchHeader, body: memoryview, bytes_max: int) -> int:
    """Short records take more as rows than their own bytes: a batch of millions of them is too large as well."""
    size = len(body) + _ROW_BYTES * min(header.record_count, len(body) // RECORD_BYTES_MIN)
    if size > bytes_max:
        raise too_large(bytes_max)
    return size


def _with_header(batch: Buffer | tuple[BatchHeader, memoryview]) -> Body:
    if isinstance(batch, tuple):
        return batch
    view = as_bytes_view(batch)
    return read_header(view), view


def _decode_large(header: BatchHeader, body: memoryview, bytes_max: int) -> list[pa.RecordBatch]:
    count = header.record_count
    if count == 0 or not RECORD_BYTES_MIN * count <= len(body) <= POSITION_MAX:
        return _decode_slowly([(header, body)], bytes_max)
    data: Bytes = np.frombuffer(body, np.uint8)
    try:
        records: Uniform | Runs | None = read_uniform(data, count) or read_runs(data, count)
        if records is None:
            return [_decode_ragged([header], data, find_chain(data, count), bytes_max)]
        gaps = records.offset_deltas() if isinstance(records, Runs) and records.have_gaps else None
        batch = _assemble(
            _offsets([header], gaps),
            _timestamps([header], records.timestamp_deltas()),
            _timestamp_types([header]),
            records.copy_keys(),
            records.copy_values(),
            _no_headers(count),
        )
        return [batch]
    except TooManyHeaders:
        raise too_many_headers(bytes_max) from None
    except NotVectorisable:
        return _decode_slowly([(header, body)], bytes_max)


def _decode_group(group: list[Body], bytes_max: int) -> list[pa.RecordBatch]:
    # What compaction emptied has nothing to add; records where the header counts none are damage, which the walk finds.
    group = [(header, body) for header, body in group if header.record_count or len(body)]
    if not group:
        return []
    count = sum(header.record_count for header, _ in group)
    if 0 < count <= FEW_RECORDS and (few := decode_few(group, _no_headers(count), bytes_max)) is not None:
        return [few]
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
        return [_decode_ragged([header for header, _ in group], data, chain, bytes_max)]
    except NotVectorisable:
        return _decode_slowly(group, bytes_max)  # it counts the headers of each batch by itself


def _decode_ragged(headers: list[BatchHeader], data: Bytes, chain: Chain, bytes_max: int) -> pa.RecordBatch:
    fields = read_fields(data, chain, headers_max(bytes_max))
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
    deltas += _of_each_row(headers, [header.base_timestamp for header in headers])
    if not any(header.timestamp_type for header in headers):
        return deltas
    by_broker = np.broadcast_to(_of_each_row(headers, [header.timestamp_type for header in headers]), deltas.shape)
    return np.where(by_broker, _of_each_row(headers, [header.max_timestamp for header in headers]), deltas)


def _timestamp_types(headers: list[BatchHeader]) -> pa.Int8Array:
    row_count = sum(header.record_count for header in headers)
    if row_count <= _SHARED_ROWS and not any(header.timestamp_type for header in headers):
        return _CREATE_TIME.slice(0, row_count)
    kinds = _of_each_row(headers, [header.timestamp_type for header in headers])
    return _of_int8(np.full(row_count, kinds, np.int8))


def _of_each_row(headers: list[BatchHeader], values: list[int]) -> Integers | np.int64:
    """A value of each batch for each of its rows; one number if they are all equal."""
    if len(values) == 1 or len(set(values)) == 1:
        return np.int64(values[0])
    return np.repeat(np.array(values, np.int64), [header.record_count for header in headers])


def _assemble(
    offsets: Integers,
    timestamps: Integers,
    types: pa.Int8Array,
    keys: pa.BinaryArray,
    values: pa.BinaryArray,
    headers: pa.ListArray,
) -> pa.RecordBatch:
    count = len(offsets)
    columns = [
        pa.Array.from_buffers(_INT64, count, [None, pa.py_buffer(offsets)]),
        pa.Array.from_buffers(TIMESTAMP_TYPE, count, [None, pa.py_buffer(timestamps)]),
        types,
        keys,
        values,
        headers,
    ]
    return pa.RecordBatch.from_arrays(columns, schema=RECORD_SCHEMA)


def _no_headers(count: int) -> pa.ListArray:
    return _NO_HEADERS.slice(0, count) if count <= _SHARED_ROWS else _make_no_headers(count)


def _decode_slowly(group: list[Body], bytes_max: int) -> list[pa.RecordBatch]:
    """By the reference codec: the judge of everything unusual. In slices, since its rows take ten times the memory."""
    rows = (
        {
            "offset": record.offset,
            "timestamp": record.timestamp_ms,
            "timestamp_type": header.timestamp_type,
            "key": record.key,
            "value": record.value,
            "headers": record.headers,
        }
        for header, body in group
        for record in iterate_body(header, body, bytes_max)
    )
    slices = iter(lambda: list(islice(rows, _SLOW_ROWS)), [])
    return [pa.RecordBatch.from_pylist(each, RECORD_SCHEMA) for each in slices]
