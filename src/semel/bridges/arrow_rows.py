"""Tables as a database can take them: Arrow's many types reduced to those that every database here has.

What cannot be kept exactly is an error that names the row, the column and both types. Nothing is rounded in silence.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final
from uuid import UUID

import numpy as np
import pyarrow as pa

from semel.bridges.merge import ROW, TIME, Rule
from semel.errors import ConfigError, ValueDoesNotFit

_PLAIN: Final = frozenset(
    {
        *(pa.bool_(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64()),
        *(pa.string(), pa.binary(), pa.date32()),
    }
)
"""The types that stay as they are, besides those of times and decimals."""
_INT32_BITS: Final = 32
_CAST_ERRORS: Final = (pa.ArrowInvalid, pa.ArrowNotImplementedError)
_JSON_ERRORS: Final = (ValueError, TypeError, OverflowError, RecursionError)
"""Of NaN, nesting that is too deep, and moments that Python does not have."""


def normalise(table: pa.Table) -> pa.Table:
    """The same values in fewer types: no dictionaries, views, unsigned or nested ones but lists of plain values.

    Structs, maps and lists of them become JSON text, and maps with text as keys objects there; UUIDs become text; times
    have microseconds.

    >>> normalise(pa.table({"a": pa.array([{"x": 1}])})).to_pylist()
    [{'a': '{"x": 1}'}]
    """
    columns = [_normalise_column(name, table.column(name)) for name in table.column_names]
    return pa.table(columns, names=table.column_names)


def normal_schema(schema: pa.Schema) -> pa.Schema:
    """The schema that a table has after `normalise`. Raises `ConfigError` with the name of a column without a form."""
    return pa.schema([pa.field(one.name, _normal_type_of(one)) for one in schema])


def _normal_type_of(one: pa.Field) -> pa.DataType:
    try:
        return normal_type(one.type)
    except ConfigError as error:
        raise ConfigError(f"Column {one.name!r} of the rows is {one.type}. {error} Nothing was written.") from error


def normal_type(kind: pa.DataType) -> pa.DataType:
    """The type that a column has after `normalise`."""
    found: pa.DataType | None = None
    if isinstance(kind, pa.BaseExtensionType):
        found = pa.string() if _is_uuid(kind) else normal_type(kind.storage_type)
    elif pa.types.is_dictionary(kind):
        found = normal_type(kind.value_type)
    elif pa.types.is_null(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        found = pa.string()
    elif pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind) or pa.types.is_fixed_size_binary(kind):
        found = pa.binary()
    elif pa.types.is_int8(kind) or pa.types.is_uint8(kind):
        found = pa.int16()
    elif pa.types.is_uint16(kind):
        found = pa.int32()
    elif pa.types.is_uint32(kind) or pa.types.is_uint64(kind):
        found = pa.int64()
    elif pa.types.is_float16(kind):
        found = pa.float32()
    elif pa.types.is_timestamp(kind):
        found = pa.timestamp("us", kind.tz and "UTC")
    elif pa.types.is_date64(kind):
        found = pa.date32()
    elif pa.types.is_time(kind):
        found = pa.time64("us")
    elif pa.types.is_duration(kind):
        found = pa.duration("us")
    elif pa.types.is_decimal(kind):
        if kind.precision > 38:
            raise ConfigError(f"{kind} is too wide: databases take decimals of up to 38 digits. Cast the column.")
        found = pa.decimal128(kind.precision, kind.scale)
    elif _is_list(kind):
        item = kind.value_type
        found = pa.string() if _is_list(item) or _is_nested(item) else pa.list_(normal_type(item))
    elif pa.types.is_struct(kind) or pa.types.is_map(kind):
        found = pa.string()
    elif kind not in _PLAIN:
        raise ConfigError(f"Columns of type {kind} cannot be written to a database: cast the column.")
    if found == pa.string():
        _check_names(kind)
    return kind if found is None else found


def _check_names(kind: pa.DataType) -> None:
    """Raises if a struct at any depth has two fields of one name, of which an object in JSON can keep only one."""
    inner = [kind.field(at) for at in range(kind.num_fields)]
    if pa.types.is_struct(kind) and len({one.name for one in inner}) < len(inner):
        raise ConfigError(f"{kind} has two fields of one name, which JSON cannot keep: rename one, or cast the column.")
    for one in inner:
        _check_names(one.type)


def _normalise_column(name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    wanted = normal_type(column.type)
    if column.type == wanted:
        return column
    if pa.types.is_dictionary(column.type):
        return _normalise_column(name, column.cast(column.type.value_type))
    if isinstance(column.type, pa.BaseExtensionType):
        if _is_uuid(column.type):
            return _from_python(name, column, wanted, _uuid_text)
        stored = [chunk.storage for chunk in column.chunks]
        return _normalise_column(name, pa.chunked_array(stored, column.type.storage_type))
    if wanted == pa.string() and _is_nested(column.type):
        return _from_python(name, column, wanted, lambda value: _json_text(column.type, value))
    try:
        return column.cast(wanted)
    except _CAST_ERRORS:
        try:
            # Of a slice of lists, Arrow casts the items of the rows around it too.
            return column.take(np.arange(len(column))).cast(wanted)
        except _CAST_ERRORS as error:
            raise _does_not_fit(name, column, wanted) from error


def _does_not_fit(name: str, column: pa.ChunkedArray, wanted: pa.DataType) -> ValueDoesNotFit:
    for index in range(len(column)):
        one = column.take([index])
        try:
            one.cast(wanted)
        except _CAST_ERRORS:
            return ValueDoesNotFit(
                f"Row {index}, column {name!r}: {_shown(one)} of type {column.type} cannot be kept exactly as "
                f"{wanted}. Cast or drop it before it is written.",
                row=index,
                column=name,
            )
    return ValueDoesNotFit(f"Column {name!r} of type {column.type} cannot become {wanted}.", column=name)


def _shown(one: pa.ChunkedArray) -> str:
    """The only value. Python has no moments and durations that are as large as Arrow's: they are shown as numbers."""
    try:
        return str(one[0])
    except (OverflowError, ValueError):
        is_list = _is_list(one.type)
        item = one.type.value_type if is_list else one.type
        number = pa.int32() if item.bit_width == _INT32_BITS else pa.int64()
        return str(one.cast(pa.list_(number) if is_list else number)[0])


def with_order(table: pa.Table, rule: Rule, *, first_row: int = 0) -> pa.Table:
    """The columns that the mode's statements need besides the user's."""
    rows = pa.array(np.arange(first_row, first_row + table.num_rows, dtype=np.int64))
    table = table.append_column(ROW, rows)
    if rule.event_time is not None:
        table = table.append_column(TIME, event_times(table, rule.event_time))
    return table


def event_times(table: pa.Table, name: str) -> pa.ChunkedArray:
    """Milliseconds since 1970. A row without an event time could not be told from an old one, so it is refused."""
    column = table.column(name)
    if column.null_count:
        row = next(index for index, value in enumerate(column) if not value.is_valid)
        raise ValueDoesNotFit(
            f"Row {row}, column {name!r}: the event time is null, so nobody can tell whether its id has expired.",
            row=row,
            column=name,
        )
    if pa.types.is_integer(column.type):
        return column.cast(pa.int64())
    if pa.types.is_date(column.type) or pa.types.is_timestamp(column.type):
        return column.cast(pa.timestamp("ms"), safe=False).cast(pa.int64())
    raise ConfigError(
        f"event_time={name!r} is a column of type {column.type}: use a timestamp, a date, or milliseconds since 1970."
    )


def _from_python(
    name: str, column: pa.ChunkedArray, wanted: pa.DataType, convert: Callable[[Any], str]
) -> pa.ChunkedArray:
    made: list[str | None] = []
    for index, value in enumerate(column):
        try:
            made.append(convert(value.as_py()) if value.is_valid else None)
        except _JSON_ERRORS as error:
            raise ValueDoesNotFit(
                f"Row {index}, column {name!r}: a value of type {column.type} cannot be kept exactly as {wanted}: "
                f"{error}. Change or drop it before it is written.",
                row=index,
                column=name,
            ) from error
    return pa.chunked_array([pa.array(made, wanted)])


def _uuid_text(value: UUID | bytes) -> str:
    return str(UUID(bytes=value) if isinstance(value, bytes) else value)


def _json_text(kind: pa.DataType, value: object) -> str:
    # Python would write NaN and Infinity, which no other reader of JSON takes.
    return json.dumps(_with_objects(kind, value) if _has_map(kind) else value, default=_to_json, allow_nan=False)


def _with_objects(kind: pa.DataType, value: Any) -> Any:
    """The same value, in which maps with text as keys are dictionaries and no lists of pairs."""
    if value is None or not _has_map(kind):
        return value
    if _is_list(kind):
        return [_with_objects(kind.value_type, item) for item in value]
    if pa.types.is_struct(kind):
        return {one.name: _with_objects(one.type, value[one.name]) for one in kind}
    pairs = [(_with_objects(kind.key_type, key), _with_objects(kind.item_type, item)) for key, item in value]
    if not (pa.types.is_string(kind.key_type) or pa.types.is_large_string(kind.key_type)):
        return pairs
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a map has one key twice, which JSON cannot keep")
    return made


def _has_map(kind: pa.DataType) -> bool:
    if pa.types.is_map(kind):
        return True
    if _is_list(kind):
        return _has_map(kind.value_type)
    return pa.types.is_struct(kind) and any(_has_map(one.type) for one in kind)


def _to_json(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    return str(value)


def _is_uuid(kind: pa.BaseExtensionType) -> bool:
    return getattr(kind, "extension_name", "") == "arrow.uuid"


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_nested(kind: pa.DataType) -> bool:
    if _is_list(kind):
        return _is_list(kind.value_type) or _is_nested(kind.value_type)
    return pa.types.is_struct(kind) or pa.types.is_map(kind)
