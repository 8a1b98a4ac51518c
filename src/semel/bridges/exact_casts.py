"""Which conversions to a column's type may lose something, and the SQL that finds the values that do. Pure.

A cast in SQL rounds, cuts off and shifts without a word. A value that would be changed is refused instead. Columns of
floating point are the exception: their type says that they are approximate. `char(n)` is another: it fills text up with
blanks, which mean nothing there.

A column's type is named here by what it is made of: a domain by the type under it, a range by "range of" the type of
its bounds ("multirange of" likewise), and a composite type by "row of" the types of its fields.
"""

from __future__ import annotations

import re
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from semel.bridges.merge import quote

_INTEGERS: Final = frozenset({"smallint", "integer", "bigint"})
_NUMERIC: Final = re.compile(r"numeric(?:\((\d+),(-?\d+)\))?$")
_MODIFIER: Final = re.compile(r"\(\d+(?:,-?\d+)?\)")
_ZONED: Final = " with time zone"
_DATE: Final = r"\d{4}-\d{2}-\d{2}"
_TIME: Final = r"([01]\d|2[0-3]):[0-5]\d(:[0-5]\d(\.\d{1,6})?)?"
_ZONE: Final = r" ?(Z|UTC|[+-]\d{2}(:?\d{2})?)"
_ISO: Final = {
    "date": _DATE,
    "time without time zone": _TIME,
    "time with time zone": f"{_TIME}{_ZONE}",
    "timestamp without time zone": f"{_DATE}([T ]{_TIME})?",
    "timestamp with time zone": f"{_DATE}[T ]{_TIME}{_ZONE}",
}
"""What text must look like to mean the same in every session and to keep all of its parts: ISO 8601."""
_RANGE: Final = re.compile("(multi)?range of (.*)")
_ROW: Final = "row of "
_LIMITED_TEXT: Final = re.compile(r"character(?: varying)?\((\d+)\)")
_KEPT_IN_ROWS: Final = frozenset(
    {"text", "boolean", "bytea", "uuid", "json", "numeric", "real", "double precision", *_INTEGERS}
)


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
    if not is_moment or not (column_type.startswith("time") or column_type == "date"):
        return False
    has_zone = pa.types.is_timestamp(kind) and kind.tz is not None
    return has_zone != column_type.endswith(_ZONED)


def field_that_changes(kind: pa.DataType, column_type: str) -> str | None:
    """The type of a composite type's field that may change what it is given. Text does not show what each field was
    given, so such a column takes none.

    >>> field_that_changes(pa.string(), "row of text, numeric(12,2)")
    'numeric(12,2)'
    """
    if not column_type.startswith(_ROW) or not pa.types.is_string(_item_type(kind)):
        return None
    fields = column_type.removeprefix(_ROW).replace("[]", "").split(", ")
    return next((one for one in fields if one not in _KEPT_IN_ROWS), None)


def has_longer_text(column: pa.ChunkedArray, column_type: str) -> bool:
    """Whether any text is longer than its column. COPY would cut off blanks at its end without a word.

    >>> has_longer_text(pa.chunked_array([["abcde "]]), "character varying(5)")
    True
    """
    limit = _LIMITED_TEXT.match(column_type)
    if limit is None:
        return False
    texts = pc.list_flatten(column) if pa.types.is_list(column.type) else column  # pyright: ignore[reportAttributeAccessIssue]
    longest = pc.max(pc.utf8_length(texts)).as_py()  # pyright: ignore[reportAttributeAccessIssue]
    return longest is not None and longest > int(limit.group(1))


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
    if _LIMITED_TEXT.fullmatch(column_type) or column_type == "name":
        return f"CAST(CAST({value} AS {column_type}) AS text) IS DISTINCT FROM CAST({value} AS text)"
    if not _may_change(kind, column_type):
        return None
    return f"CAST(CAST({value} AS {column_type}) AS {own_type}) IS DISTINCT FROM {value}"


def _text_changed(text: str, column_type: str) -> str | None:
    """Text that Postgres reads as something else than it says: cut off, rounded, or in the session's time zone."""
    span = _RANGE.match(column_type)
    if span is not None:
        return _range_changed(text, span.group(2), is_multirange=span.group(1) is not None)
    plain = _MODIFIER.sub("", column_type)
    rounded = f"CAST({text} AS {column_type}) IS DISTINCT FROM CAST({text} AS {plain})"
    if plain in _ISO:
        condition = f"{text} !~ '^{_ISO[plain]}$'"
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
    limit = _LIMITED_TEXT.fullmatch(column_type)
    return None if limit is None else f"char_length({text}) > {limit.group(1)}"


def _range_changed(text: str, bound_type: str, *, is_multirange: bool) -> str | None:
    """Bounds are read by the rules of their own type, which has no modifier in a range."""
    if bound_type not in _ISO:
        return None
    bound = f'("?{_ISO[bound_type]}"?)?'
    one = rf"[[(]{bound}, ?{bound}[])]"
    several = rf"\{{({one}(, ?{one})*)?\}}"
    return f"{text} !~ '^({several if is_multirange else f'empty|{one}'})$'"


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


def _item_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_list(kind) else kind


def _is_array(column_type: str) -> bool:
    return column_type.endswith("[]")
