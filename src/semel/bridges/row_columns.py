"""Dictionaries into an Arrow table. Columns keep their types from batch to batch, whatever one batch has in them.

A value that has another type than its column is the fault of its row alone.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

import pyarrow as pa

from semel.bridges.merge import RESERVED
from semel.errors import ValueDoesNotFit

_ARROW_ERRORS: Final = (pa.ArrowException, OverflowError, TypeError, ValueError)
_DIGITS_MAX: Final = 38
"""Of a decimal, in Arrow's type and in databases."""
_INT64_DIGITS: Final = 19


class RowColumns:
    """
    >>> columns = RowColumns()
    >>> columns.table([{"id": 1, "note": "a"}, {"id": 2}]).to_pylist()
    [{'id': 1, 'note': 'a'}, {'id': 2, 'note': None}]
    >>> columns.table([{"id": 3}]).schema.names
    ['id', 'note']
    >>> list(columns.find_misfits([{"id": 4}, {"id": "five"}]))
    [1]

    `event_id` names columns that hold whole numbers, text or booleans only, as an event id must.
    """

    def __init__(self, *, event_id: Collection[str] = ()) -> None:
        self._types: dict[str, pa.DataType] = {}
        self._event_id = event_id

    def table(self, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
        """Raises `ValueDoesNotFit` with the number of a row that has a value of another type than its column."""
        types: dict[str, pa.DataType] = {}
        arrays: list[pa.Array] = []
        for name in self._names(rows):
            array = self._array(name, rows)
            types[name] = array.type
            arrays.append(array)
        self._types = types  # only now: rows that do not fit must not decide what the others should be
        return pa.table(arrays, names=list(types))

    def find_misfits(self, rows: Sequence[Mapping[str, Any]]) -> dict[int, ValueDoesNotFit]:
        """The rows with values of another type than their column, by number."""
        found: dict[int, ValueDoesNotFit] = {}
        for name in self._names(rows):
            for number, error in self._judge(name, rows)[1].items():
                found.setdefault(number, error)
        return found

    def _names(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        return list({**self._types, **dict.fromkeys(name for row in rows for name in row)})

    def _array(self, name: str, rows: Sequence[Mapping[str, Any]]) -> pa.Array:
        found = None
        if _name_fault(name) is None:
            found = _try_array(_values(rows, name), self._known(name), is_id=name in self._event_id)
        if found is not None:
            return found
        kind, misfits = self._judge(name, rows)
        for error in misfits.values():
            raise error
        return pa.array(_values(rows, name), kind)  # each value alone fits this type

    def _known(self, name: str) -> pa.DataType | None:
        known = self._types.get(name)
        return None if known is None or pa.types.is_null(known) else known

    def _judge(
        self, name: str, rows: Sequence[Mapping[str, Any]]
    ) -> tuple[pa.DataType | None, dict[int, ValueDoesNotFit]]:
        """The type of a column, and the rows whose values do not fit it.

        The first value decides, unless the batches before have decided; whole numbers may get fractions, and decimals
        more digits.
        """
        fault = _name_fault(name)
        if fault is not None:
            return None, {number: _misfit(name, number, fault) for number, row in enumerate(rows) if name in row}
        values, is_id = _values(rows, name), name in self._event_id
        wanted, misfits = self._known(name), dict[int, ValueDoesNotFit]()
        for number, value in enumerate(values):
            if value is None:
                continue
            own = _try_array([value], None, is_id=is_id)
            if own is None:
                misfits[number] = _misfit(name, number, _no_type(value, is_id=is_id))
            elif wanted is None:
                wanted = own.type
            elif _try_array([value], wanted, is_id=is_id) is None:
                wanted = _widen(wanted, own.type) or wanted
        for number, value in enumerate(values):
            if value is not None and number not in misfits and _try_array([value], wanted, is_id=is_id) is None:
                fault = f"a value of type {type(value).__name__} does not fit a column of type {wanted}"
                misfits[number] = _misfit(name, number, fault)
        return wanted, dict(sorted(misfits.items()))


class _NoForm:
    """In place of a value that has no form in a database. Arrow takes it for no type."""

    def __init__(self, fault: str) -> None:
        self.fault = fault


def _values(rows: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    return [_plain(row.get(name)) for row in rows]


def _name_fault(name: Any) -> str | None:
    """Why no column can have this name, which a record may have brought along as a key of JSON."""
    if not isinstance(name, str):
        return f"a column's name must be text, and this one is of type {type(name).__name__}"
    if name in RESERVED:
        return "the column's name is used by Semel itself; rename it"
    if "\0" in name or not _is_unicode(name):
        return "the column's name is not valid text"
    return None


def _is_unicode(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _try_array(values: list[Any], kind: pa.DataType | None, *, is_id: bool) -> pa.Array | None:
    try:
        found = pa.array(values, kind)
    except _ARROW_ERRORS:
        return None
    return found if _keeps(values, found.type, is_id=is_id) else None


def _keeps(values: Sequence[Any], kind: pa.DataType, *, is_id: bool) -> bool:
    """Whether Arrow has kept what it took: it drops time zones, the time of a day and fractions without an error."""
    if is_id and not (pa.types.is_null(kind) or pa.types.is_integer(kind) or pa.types.is_string(kind)):
        return pa.types.is_boolean(kind)
    if pa.types.is_list(kind):
        item = kind.value_type
        return all(_keeps(value, item, is_id=False) for value in values if value is not None)
    if pa.types.is_timestamp(kind):
        has_zone = kind.tz is not None
        return all(
            (isinstance(value, datetime) and (value.tzinfo is not None) == has_zone)
            for value in values
            if isinstance(value, date | int)
        )
    if pa.types.is_date(kind):
        return not any(isinstance(value, datetime | int) for value in values)
    if pa.types.is_time(kind):
        return not any(isinstance(value, int) or getattr(value, "tzinfo", None) is not None for value in values)
    if pa.types.is_duration(kind):
        return not any(isinstance(value, int) for value in values)
    if pa.types.is_integer(kind):
        return not any(isinstance(value, float | Decimal) and not _is_whole(value) for value in values)
    return not pa.types.is_decimal(kind) or kind.precision <= _DIGITS_MAX


def _is_whole(value: float | Decimal) -> bool:
    if isinstance(value, Decimal):
        return value.is_finite() and value == value.to_integral_value()
    return float(value).is_integer()


def _widen(wanted: pa.DataType, own: pa.DataType) -> pa.DataType | None:
    """The type of a column that takes values of a second type as well; None if it must not."""
    if pa.types.is_floating(own) and pa.types.is_integer(wanted):
        return own
    if not pa.types.is_decimal(own) and not pa.types.is_decimal(wanted):
        return None
    digits = [_digits(wanted), _digits(own)]
    if None in digits:
        return None
    [before, after] = [max(part) for part in zip(*filter(None, digits), strict=True)]
    return pa.decimal128(before + after, after) if before + after <= _DIGITS_MAX else None


def _digits(kind: pa.DataType) -> tuple[int, int] | None:
    """How many a number may have before and after the point."""
    if pa.types.is_integer(kind):
        return _INT64_DIGITS, 0
    return (kind.precision - kind.scale, kind.scale) if pa.types.is_decimal(kind) else None


def _no_type(value: Any, *, is_id: bool) -> str:
    if isinstance(value, _NoForm):
        return value.fault
    if isinstance(value, list) and len(types := _type_names(value)) > 1:
        listed = f"{', '.join(types[:-1])} and {types[-1]}"
        return f"a list of values of types {listed} has no type in Arrow. Make it text, for jsonb by json.dumps()"
    if is_id:
        return f"an event id must be a whole number, text or a boolean, and this one is of type {type(value).__name__}"
    if isinstance(value, int):
        return (
            f"the whole number {value:.6g} does not fit into 64 bits. For a numeric column return "
            "decimal.Decimal(value), or make it text"
        )
    return (
        f"a value of type {type(value).__name__} has no type in Arrow. Use numbers of up to {_DIGITS_MAX} digits, "
        "text, bytes, dates, times without a zone or lists"
    )


def _type_names(values: list[Any]) -> list[str]:
    return list(dict.fromkeys(type(value).__name__ for value in values if value is not None))


def _misfit(name: str, index: int, fault: str) -> ValueDoesNotFit:
    return ValueDoesNotFit(f"Row {index}, column {name!r}: {fault}.", row=index, column=str(name))


def _plain(value: Any) -> Any:
    """UUIDs become text, and dictionaries and lists of them JSON."""
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, Mapping):
        return _json(dict(value))
    if isinstance(value, list | tuple | set | frozenset):
        items = list(value)
        is_nested = any(isinstance(item, Mapping | list | tuple) for item in items)
        return _json(items) if is_nested else [_plain(item) for item in items]
    return value


def _json(value: object) -> str | _NoForm:
    try:
        return json.dumps(value, default=_to_json)
    except RecursionError:
        return _NoForm("the value is nested too deeply for JSON")
    except (TypeError, ValueError) as error:
        return _NoForm(f"the value has no form in JSON: {error}")


def _to_json(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Decimal | UUID | date | datetime | time):
        return str(value)
    if isinstance(value, set | frozenset | tuple):
        return list(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    raise TypeError(f"{type(value).__name__} has no form in JSON")
