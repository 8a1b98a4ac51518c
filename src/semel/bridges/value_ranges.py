"""Values of Arrow that a database has no room for: moments before or after its calendar, and NaN in SQLite. Pure."""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from semel.errors import ValueDoesNotFit

_DAYS: Final = {"Postgres": (-2_440_588, 2_145_042_905), "SQLite": (-719_162, 2_932_896)}
"""The first and last day, counted from 1970."""
_DAY_US: Final = 86_400_000_000
_INT64_MAX: Final = 2**63 - 1


def find_outside(column: pa.Array | pa.ChunkedArray, database: str) -> tuple[str, Any] | None:
    """What is wrong, and an Arrow column that is true for each such value; None if all values have room.

    >>> fault, mask = find_outside(pa.array([1.5, float("nan")]), "SQLite")
    >>> fault, mask.to_pylist()
    ('NaN, which SQLite turns into null. Replace it before it is written.', [False, True])
    >>> find_outside(pa.array([1.5, float("nan")]), "Postgres") is None
    True
    """
    kind = column.type
    if pa.types.is_floating(kind) and database == "SQLite":
        mask = pc.is_nan(column)  # pyright: ignore[reportAttributeAccessIssue]
        return _found("NaN, which SQLite turns into null. Replace it before it is written.", mask)
    first, last = _DAYS[database]
    if pa.types.is_date32(kind):
        numbers = column.cast(pa.int32())
    elif pa.types.is_timestamp(kind) and kind.unit == "us":
        numbers = column.cast(pa.int64())
        first, last = first * _DAY_US, min((last + 1) * _DAY_US - 1, _INT64_MAX)
    else:
        return None
    mask = pc.or_(pc.less(numbers, first), pc.greater(numbers, last))  # pyright: ignore[reportAttributeAccessIssue]
    years = "1 to 9999" if database == "SQLite" else "-4713 to 294276 (dates: 5874897)"
    return _found(f"a moment outside of the years {years}, which {database} cannot store. Drop or replace it.", mask)


def _found(fault: str, mask: Any) -> tuple[str, Any] | None:
    mask = mask.fill_null(False)
    return (fault, mask) if pc.any(mask).as_py() else None  # pyright: ignore[reportAttributeAccessIssue]


def check_ranges(table: pa.Table | pa.RecordBatch, database: str) -> None:
    """Raises `ValueDoesNotFit` for the first column with such a value."""
    for name, column in zip(table.schema.names, table.columns, strict=True):
        items = pc.list_flatten(column) if pa.types.is_list(column.type) else column  # pyright: ignore[reportAttributeAccessIssue]
        found = find_outside(items, database)
        if found is not None:
            raise ValueDoesNotFit(f"column {name!r}: {found[0]}", column=name)
