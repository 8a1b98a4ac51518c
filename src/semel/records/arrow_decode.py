"""Record batches to an Arrow table.

The compiled kernel scans and copies; small batches are decoded together, so that the work per table is shared. A batch
that the kernel refuses is decoded again by the reference codec, which says what is wrong with it. Without the kernel
the reference decodes everything.
"""
# pyarrow comes without types, so what it returns is unknown to the checker.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import accumulate, islice
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from semel.errors import CorruptRecords
from semel.records.compiled import kernel
from semel.records.compression import DECOMPRESSED_BYTES_MAX, headers_max, too_large
from semel.records.layout import (
    RECORD_BYTES_MIN,
    BatchHeader,
    as_bytes_view,
    check_batch_crc,
    check_header,
    iter_batches,
    read_header,
)
from semel.records.reference import iterate_body, unpack_body
from semel.records.schema import HEADER_TYPE, HEADERS_TYPE, RECORD_SCHEMA, TIMESTAMP_TYPE

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from semel.records.kernel import HeaderParts, StringParts

_SMALL_BYTES = 128 * 1024  # batches below this are decoded together
_GROUP_BYTES = 1024 * 1024

_INT64 = pa.int64()
_INT8 = pa.int8()
_BINARY = pa.binary()
_STRING = pa.string()


def _make_no_headers(count: int) -> pa.ListArray:
    ends = pa.py_buffer(bytes(4 * (count + 1)))
    return pa.Array.from_buffers(HEADERS_TYPE, count, [None, ends], children=[pa.nulls(0, HEADER_TYPE)])


# Columns that are the same for most batches, to be shared by them.
_SHARED_ROWS = 65536
_NO_HEADERS = _make_no_headers(_SHARED_ROWS)
# Not by `pa.array`, which imports pandas where it is installed: half a second for each Python worker of Spark.
_CREATE_TIME = pa.Array.from_buffers(_INT8, _SHARED_ROWS, [None, pa.py_buffer(bytes(_SHARED_ROWS))])

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
        small = len(body) < _SMALL_BYTES
        if small:
            group.append((header, body))
            group_bytes += len(body)
        if group and (not small or group_bytes > _GROUP_BYTES):
            chunks += _decode(group, decompressed_bytes_max)
            group, group_bytes = [], 0
        if not small:
            decoded = _decode([(header, body)], decompressed_bytes_max)
            chunks += decoded
            if header.compression != "none":
                unpacked_bytes += _HEADER_BYTES * sum(len(chunk.column("headers").values) for chunk in decoded)
        if total_bytes_max is not None and unpacked_bytes >= total_bytes_max:
            break
    chunks += _decode(group, decompressed_bytes_max)
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


def _decode(group: list[Body], bytes_max: int) -> list[pa.RecordBatch]:
    if not group:
        return []
    columns = None if kernel is None else kernel.read_records(group, headers_max(bytes_max), pa.allocate_buffer)
    if columns is None:
        return _decode_slowly(group, bytes_max)
    count, offsets, timestamps, keys, values, headers = columns
    arrays = [
        pa.Array.from_buffers(_INT64, count, [None, offsets]),
        pa.Array.from_buffers(TIMESTAMP_TYPE, count, [None, timestamps]),
        _timestamp_types(group, count),
        _strings(_BINARY, keys, count),
        _strings(_BINARY, values, count),
        _no_headers(count) if headers is None else _headers(headers, count),
    ]
    return [pa.RecordBatch.from_arrays(arrays, schema=RECORD_SCHEMA)]


def _strings(kind: pa.DataType, parts: StringParts, count: int) -> pa.Array:
    return pa.Array.from_buffers(kind, count, list(parts))


def _headers(parts: HeaderParts, row_count: int) -> pa.ListArray:
    ends, keys, values = parts
    count = len(keys[1]) // 4 - 1
    names = _strings(_BINARY, keys, count)
    try:
        names = names.cast(_STRING)
    except pa.ArrowInvalid:
        names = _as_text(names.to_pylist())
    entries = pa.Array.from_buffers(HEADER_TYPE, count, [None], children=[names, _strings(_BINARY, values, count)])
    return pa.Array.from_buffers(HEADERS_TYPE, row_count, [None, ends], children=[entries])


def _as_text(names: list[bytes]) -> pa.StringArray:
    """Not every client writes UTF-8 here; like the reference, show what can be shown."""
    texts = [name.decode("utf-8", errors="replace").encode() for name in names]
    ends = array("i", accumulate(map(len, texts), initial=0))
    return pa.Array.from_buffers(_STRING, len(texts), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(texts))])


def _no_headers(count: int) -> pa.ListArray:
    return _NO_HEADERS.slice(0, count) if count <= _SHARED_ROWS else _make_no_headers(count)


def _timestamp_types(group: list[Body], count: int) -> pa.Int8Array:
    if count <= _SHARED_ROWS and not any(header.timestamp_type for header, _ in group):
        return _CREATE_TIME.slice(0, count)
    types = b"".join(bytes([header.timestamp_type]) * header.record_count for header, _ in group)
    return pa.Array.from_buffers(_INT8, count, [None, pa.py_buffer(types)])


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
