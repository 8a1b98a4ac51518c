"""A few records to an Arrow table, one by one: below some dozens of them a vectorised reader is mostly overhead."""
# pyarrow comes without types, so what it returns is unknown to the checker.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

import pyarrow as pa

from semel.records.layout import BatchHeader
from semel.records.reference import Record, iterate_body
from semel.records.schema import RECORD_SCHEMA, TIMESTAMP_TYPE

FEW_RECORDS = 24

_INT64 = pa.int64()
_INT8 = pa.int8()
_BINARY = pa.binary()


def decode_few(
    group: Sequence[tuple[BatchHeader, memoryview]], no_headers: pa.ListArray, bytes_max: int
) -> pa.RecordBatch | None:
    """The records by the readable codec, which also decides what is refused; None if one of them has headers.

    `no_headers` is the column of as many records without any. Arrow's arrays are made of buffers and not by `pa.array`,
    which imports pandas where it is installed: half a second for each Python worker of Spark.
    """
    records: list[Record] = []
    for header, body in group:
        for record in iterate_body(header, body, bytes_max):
            if record.headers:
                return None
            records.append(record)
    types = array("b", (header.timestamp_type for header, _ in group for _ in range(header.record_count)))
    columns = [
        _numbers(_INT64, array("q", [record.offset for record in records])),
        _numbers(TIMESTAMP_TYPE, array("q", [record.timestamp_ms for record in records])),
        _numbers(_INT8, types),
        _binary([record.key for record in records]),
        _binary([record.value for record in records]),
        no_headers,
    ]
    return pa.RecordBatch.from_arrays(columns, schema=RECORD_SCHEMA)


def _numbers(kind: pa.DataType, values: array[int]) -> pa.Array:
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _binary(values: Sequence[bytes | None]) -> pa.BinaryArray:
    ends = array("i", accumulate((len(value or b"") for value in values), initial=0))
    validity = None
    if None in values:
        bits = sum(1 << row for row, value in enumerate(values) if value is not None)
        validity = pa.py_buffer(bits.to_bytes(len(values) // 8 + 1, "little"))
    data = pa.py_buffer(b"".join(value or b"" for value in values))
    return pa.Array.from_buffers(_BINARY, len(values), [validity, pa.py_buffer(ends), data])
