"""Which conversions to a column's type may lose something, and the SQL that finds the values that do. Pure.

A cast in SQL rounds, cuts off and shifts without a word. A value that would be changed is refused instead. Columns of
floating point are the exception: their type says that they are approximate.
"""

from __future__ import annotations

import re
from typing import Final

import pyarrow as pa

from semel.bridges.merge import quote

_INTEGERS: Final = frozenset({"smallint", "integer", "bigint"})
_NUMERIC: Final = re.compile(r"numeric(?:\((\d+),(-?\d+)\))?$")
_MODIFIER: Final = re.compile(r"\(\d+(?:,-?\d+)?\)")
_ZONED: Final = " with time zone"
_DATE: Final = r"\d{4}-\d{2}-\d{2}"
_TIME: Final = r"([01]\d|2[0-3]):[0-5]\d(:[0-5]\d(\.\d{1,6})?)?"
_ZONE: Final = r" ?(Z|UTC|[+-]\d{2}(:?\d{2})?)"
_ISO: Final = {
    "date": f"^{_DATE}$",
    "time without time zone": f"^{_TIME}$",
    "time with time zone": f"^{_TIME}{_ZONE}$",
    "timestamp without time zone": f"^{_DATE}([T ]{_TIME})?$",
    "timestamp with time zone": f"^{_DATE}[T ]{_TIME}{_ZONE}$",
}
"""What text must look like to mean the same in every session and to keep all of its parts: ISO 8601."""


def is_assigned(kind: pa.DataType, column_type: str) -> bool:
    """Whether the value goes into the column without an explicit cast, which would cut text off.

    >>> is_assigned(pa.string(), "character varying(5)")
    True
    >>> is_assigned(pa.list_(pa.string()), "character varying(5)[]")
    True
    """
    if pa.types.is_list(kind):
        return _is_array(column_type) and is_assigned(kind.value_type, column_type[:-2])
    return pa.types.is_string(kind) and column_type.startswith("character") and not _is_array(column_type)


def zone_mismatch(kind: pa.DataType, column_type: str) -> bool:
    """Whether the conversion depends on the time zone of the connection.

    >>> zone_mismatch(pa.timestamp("us"), "timestamp with time zone")
    True
    """
    if pa.types.is_list(kind):
        return _is_array(column_type) and zone_mismatch(kind.value_type, column_type[:-2])
    is_moment = pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_time(kind)
    if not is_moment or not column_type.startswith("time"):
        return False
    has_zone = pa.types.is_timestamp(kind) and kind.tz is not None
    return has_zone != column_type.endswith(_ZONED)


def find_changed(name: str, kind: pa.DataType, own_type: str, column_type: str) -> str | None:
    """A condition that is true for values that the column's type would change; None if it changes none.

    >>> find_changed("n", pa.float64(), "double precision", "bigint")
    'CAST(CAST("n" AS bigint) AS double precision) IS DISTINCT FROM "n"'
    >>> find_changed("n", pa.int32(), "integer", "bigint") is None
    True
    """
    return _changed(quote(name), kind, own_type, column_type)


def _changed(value: str, kind: pa.DataType, own_type: str, column_type: str) -> str | None:
    is_list = pa.types.is_list(kind)
    if _is_array(column_type) and (is_list or pa.types.is_string(kind)):
        item = _changed("item", kind.value_type if is_list else kind, own_type.removesuffix("[]"), column_type[:-2])
        items = value if is_list else f"CAST({value} AS text[])"
        return None if item is None else f"EXISTS (SELECT 1 FROM unnest({items}) AS item WHERE {item})"
    if column_type == "money" and (pa.types.is_string(kind) or pa.types.is_decimal(kind)):
        return f"CAST(CAST({value} AS money) AS numeric) IS DISTINCT FROM CAST({value} AS numeric)"
    if pa.types.is_string(kind):
        return _text_changed(value, column_type)
    if not _may_change(kind, column_type):
        return None
    return f"CAST(CAST({value} AS {column_type}) AS {own_type}) IS DISTINCT FROM {value}"


def _text_changed(text: str, column_type: str) -> str | None:
    """Text that Postgres reads as something else than it says: cut off, rounded, or in the session's time zone."""
    plain = _MODIFIER.sub("", column_type)
    rounded = f"CAST({text} AS {column_type}) IS DISTINCT FROM CAST({text} AS {plain})"
    if plain in _ISO:
        condition = f"{text} !~ '{_ISO[plain]}'"
        return condition if plain == column_type else f"CASE WHEN {condition} THEN true ELSE {rounded} END"
    if plain.startswith("interval"):
        kept = f"CAST(CAST({text} AS {column_type}) AS text) IS DISTINCT FROM CAST(CAST({text} AS interval) AS text)"
        return f"{text} ~ '\\.\\d{{7}}' OR {kept}"
    if plain == "numeric":
        return (
            None if plain == column_type else f"CAST({text} AS {column_type}) IS DISTINCT FROM CAST({text} AS {plain})"
        )
    if plain.startswith("bit") or column_type in ("name", '"char"'):
        return f"CAST(CAST({text} AS {column_type}) AS text) IS DISTINCT FROM {text}"
    if plain.startswith("character") and plain != column_type:  # within an array, which is cast as a whole
        return f"char_length({text}) > {column_type[len(plain) + 1 : -1]}"
    return None


def _may_change(kind: pa.DataType, column_type: str) -> bool:
    numeric = _NUMERIC.match(column_type)
    if pa.types.is_integer(kind):
        is_rounded = numeric is not None and int(numeric.group(2) or 0) < 0
        return is_rounded or column_type.startswith(("bit", "boolean"))
    if pa.types.is_floating(kind):
        return column_type in _INTEGERS or numeric is not None
    if pa.types.is_decimal(kind):
        if column_type in _INTEGERS:
            return kind.scale > 0
        return numeric is not None and numeric.group(2) is not None and int(numeric.group(2)) < kind.scale
    if pa.types.is_timestamp(kind):
        return not column_type.startswith("timestamp ") and column_type != "text"
    if pa.types.is_time(kind):
        return "(" in column_type
    return pa.types.is_duration(kind) and column_type not in ("interval", "text")


def _is_array(column_type: str) -> bool:
    return column_type.endswith("[]")
