"""The Arrow side: what a decoded table looks like, and which columns an encoder takes."""
# pyarrow comes without types, so what it returns is unknown to the checker.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from semel.errors import ConfigError
from semel.records.reference import Record

HEADER_TYPE = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
HEADERS_TYPE = pa.list_(HEADER_TYPE)
TIMESTAMP_TYPE = pa.timestamp("ms", tz="UTC")

RECORD_SCHEMA = pa.schema(
    [
        pa.field("offset", pa.int64()),
        pa.field("timestamp", TIMESTAMP_TYPE),
        pa.field("timestamp_type", pa.int8()),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("headers", HEADERS_TYPE),
    ]
)


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """One batch as it goes over the wire. `data` is a writable view, so that `stamp` can work in place."""

    data: memoryview
    record_count: int

    def __reduce__(self) -> tuple[Any, ...]:
        # A view cannot be pickled; the copy stays writable for `stamp`.
        return (_unpickle, (bytearray(self.data), self.record_count))


def _unpickle(data: bytearray, record_count: int) -> EncodedBatch:
    return EncodedBatch(memoryview(data), record_count)


@dataclass(frozen=True, slots=True)
class RecordColumns:
    """The four columns of an input table in the few types that the encoder handles.

    key and value are binary or large_binary, headers is list<struct<key: binary, value: binary>>, and timestamp is
    int64 milliseconds; each of the last three may be missing.
    """

    row_count: int
    value: pa.ChunkedArray
    key: pa.ChunkedArray | None
    headers: pa.ChunkedArray | None
    timestamp: pa.ChunkedArray | None

    def pieces(self) -> list[RecordColumns]:
        """The same rows in pieces of which each column is one array."""
        parts = {"value": self.value, "key": self.key, "headers": self.headers, "timestamp": self.timestamp}
        present = {name: part for name, part in parts.items() if part is not None}
        if all(part.num_chunks == 1 for part in present.values()):
            return [self]
        batches = pa.table(present).to_batches()
        return [
            RecordColumns(
                batch.num_rows,
                **{name: pa.chunked_array([batch.column(name)]) if name in present else None for name in parts},
            )
            for batch in batches
        ]

    def record(self, row: int, default_timestamp_ms: int) -> Record:
        """One row as the reference codec takes it, with the row number for its offset."""
        timestamp = None if self.timestamp is None else self.timestamp[row].as_py()
        headers = () if self.headers is None else self.headers[row].as_py() or ()
        return Record(
            offset=row,
            timestamp_ms=default_timestamp_ms if timestamp is None else timestamp,
            key=None if self.key is None else self.key[row].as_py(),
            value=self.value[row].as_py(),
            headers=tuple(
                (header["key"].decode("utf-8", errors="surrogateescape"), header["value"]) for header in headers
            ),
        )


def normalise_columns(table: pa.Table | pa.RecordBatch) -> RecordColumns:
    """Check the columns of a table to be encoded and bring them into the types that `RecordColumns` promises."""
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    if "value" not in table.column_names:
        raise ConfigError(f"The table has no column `value`, only {', '.join(table.column_names) or 'none'}.")
    for name in ("value", "key", "headers", "timestamp"):
        if table.column_names.count(name) > 1:
            raise ConfigError(f"The table has the column `{name}` more than once; rename or drop the others.")

    def column(name: str) -> pa.ChunkedArray | None:
        return table.column(name) if name in table.column_names else None

    key, headers, timestamp = column("key"), column("headers"), column("timestamp")
    return RecordColumns(
        row_count=table.num_rows,
        value=as_binary("value", table.column("value")),
        key=None if key is None else as_binary("key", key),
        headers=None if headers is None else _as_headers(headers),
        timestamp=None if timestamp is None else _as_milliseconds(timestamp),
    )


def as_binary(name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = column.type
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return column
    if pa.types.is_string(kind) or pa.types.is_null(kind):
        return column.cast(pa.binary())
    if (
        pa.types.is_large_string(kind)
        or pa.types.is_fixed_size_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_string_view(kind)
    ):
        return column.cast(pa.large_binary())
    raise ConfigError(f"The column `{name}` has the type {kind}; Kafka stores bytes, so cast it to string or binary.")


def _as_headers(column: pa.ChunkedArray) -> pa.ChunkedArray:
    target = pa.list_(pa.struct([pa.field("key", pa.binary()), pa.field("value", pa.binary())]))
    kind = column.type
    if pa.types.is_map(kind):
        column = pa.chunked_array(
            [_map_as_list(chunk) for chunk in column.chunks], type=None if column.chunks else target
        )
        kind = column.type
    try:
        names = [field.name for field in kind.value_type] if not pa.types.is_null(kind) else ["key", "value"]
        if names != ["key", "value"]:
            raise ConfigError(f"The column `headers` has the type {kind}; it must be list<struct<key, value>>.")
        return column.cast(target)
    except (AttributeError, TypeError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ConfigError(
            f"The column `headers` has the type {kind}; it must be list<struct<key: string, value: binary>> ({error})."
        ) from error


def check_header_keys(columns: RecordColumns) -> None:
    """Raises ConfigError that names the first row with a header that has no key."""
    row = 0
    for chunk in () if columns.headers is None else columns.headers.chunks:
        entries = chunk.values
        if entries.null_count or entries.field("key").null_count:  # perhaps in no row's list
            for headers in chunk.to_pylist():
                if any(header is None or header["key"] is None for header in headers or ()):
                    raise ConfigError(
                        f"Row {row} has a header without a key, which Kafka does not allow. Nothing was encoded."
                    )
                row += 1
        else:
            row += len(chunk)


def _map_as_list(chunk: pa.MapArray) -> pa.ListArray:
    entries = pa.StructArray.from_arrays([chunk.keys, chunk.items], ["key", "value"])
    return pa.ListArray.from_arrays(chunk.offsets, entries, mask=chunk.is_null() if chunk.null_count else None)


def _as_milliseconds(column: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = column.type
    if pa.types.is_timestamp(kind):
        # Finer units lose their digits below a millisecond, which Kafka cannot store; coarser ones may overflow.
        column = column.cast(pa.timestamp("ms"), safe=kind.unit == "s") if kind.tz is None else _from_zone(column)
    elif not (pa.types.is_integer(kind) or pa.types.is_null(kind)):
        raise ConfigError(f"The column `timestamp` has the type {kind}; it must be a timestamp or int64 milliseconds.")
    return column.cast(pa.int64())


def _from_zone(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(pa.timestamp("ms", tz=column.type.tz), safe=column.type.unit == "s")
