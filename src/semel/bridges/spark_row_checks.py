"""What can be wrong with a row of Spark before any database has seen it, such as a null key or text that is none."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from semel.bridges.dead_letter_table import RefusedRow
from semel.bridges.merge import Rule
from semel.bridges.value_ranges import find_outside
from semel.client.dead_letters import describe_error
from semel.errors import ValueDoesNotFit

_ORIGIN: Final = {"topic": str, "partition": int, "offset": int}


def find_misfits(rows: pa.Table, rule: Rule, *, takes_nul: bool) -> dict[int, tuple[str, str]]:
    """The numbers of rows that cannot be staged, each with a column and its fault.

    `takes_nul` says whether the database stores the character U+0000 in text, as SQLite does and Postgres does not.

    >>> find_misfits(pa.table({"id": [1, None]}), Rule("t", "upsert", ("id",)), takes_nul=True)
    {1: ('id', 'the key is null. Drop such rows, or fill the key.')}
    """
    found: dict[int, tuple[str, str]] = {}
    for name, fault in _needed(rule).items():
        _add(found, name, fault, rows.column(name).is_null() if rows.column(name).null_count else None)
    for name in rows.column_names:
        first = 0
        for chunk in rows.column(name).chunks:
            for fault, mask in _text_faults(chunk, takes_nul=takes_nul):
                _add(found, name, fault, mask, first)
            for fault, mask in _outside(chunk, "SQLite" if takes_nul else "Postgres"):
                _add(found, name, fault, mask, first)
            first += len(chunk)
    return found


def _needed(rule: Rule) -> dict[str, str]:
    needed = dict.fromkeys(rule.key, "the key is null. Drop such rows, or fill the key.")
    if rule.version is not None:
        needed.setdefault(rule.version, "the version is null. Drop such rows, or fill the version.")
    if rule.event_time is not None:
        needed.setdefault(
            rule.event_time, "the event time is null, so nobody can tell whether its id has expired. Drop such rows."
        )
    return needed


def _add(found: dict[int, tuple[str, str]], name: str, fault: str, mask: Any, first: int = 0) -> None:
    """`mask` is an Arrow column or None; the first fault of a row counts."""
    for number in () if mask is None else np.flatnonzero(mask.to_numpy(zero_copy_only=False)):
        found.setdefault(first + int(number), (name, fault))


def _text_faults(chunk: pa.Array, *, takes_nul: bool) -> list[tuple[str, Any]]:
    if pa.types.is_list(chunk.type):
        faults = _text_faults(chunk.flatten(), takes_nul=takes_nul)
        return [(fault, _of_lists(chunk, mask)) for fault, mask in faults]
    if not pa.types.is_string(chunk.type):
        return []
    if not _is_utf8(chunk):
        mask = pa.array([value.is_valid and not _is_utf8(chunk.slice(at, 1)) for at, value in enumerate(chunk)])
        return [("its bytes are not UTF-8. Decode them in the query, or write them to a binary column.", mask)]
    if takes_nul or not _may_have_nul(chunk):
        return []
    mask = pa.array(["\0" in (text or "") for text in chunk.to_pylist()])
    return [("text with the character U+0000, which the database does not take. Remove it in the query.", mask)]


def _outside(chunk: pa.Array, database: str) -> list[tuple[str, Any]]:
    if pa.types.is_list(chunk.type):
        return [(fault, _of_lists(chunk, mask)) for fault, mask in _outside(chunk.flatten(), database)]
    found = find_outside(chunk, database)
    return [] if found is None else [found]


def _of_lists(lists: pa.ListArray, mask: pa.Array) -> pa.Array:
    bad = np.zeros(len(lists), dtype=bool)
    bad[lists.value_parent_indices().to_numpy()[mask.to_numpy(zero_copy_only=False)]] = True
    return pa.array(bad)


def _is_utf8(chunk: pa.Array) -> bool:
    try:
        chunk.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _may_have_nul(chunk: pa.StringArray) -> bool:
    """Looks at the smallest byte, which is sixty times as fast as to search each string."""
    _, offsets, data = chunk.buffers()
    if data is None or not len(chunk):
        return False
    ends = np.frombuffer(offsets, dtype=np.int32)
    begin, end = ends[chunk.offset], ends[chunk.offset + len(chunk)]
    return bool(end > begin and np.frombuffer(data, dtype=np.uint8)[begin:end].min() == 0)


def misfit(rows: pa.Table, number: int, named: tuple[str, str], first_row: int) -> ValueDoesNotFit:
    """The error for one row; `first_row` is the number of the first one."""
    name, fault = named
    return ValueDoesNotFit(
        f"Row {first_row + number}, column {name!r}: {fault} The column is of type {rows.schema.field(name).type}.",
        row=first_row + number,
        column=name,
    )


def put_aside(
    rows: pa.Table, misfits: Mapping[int, tuple[str, str]], first_row: int, add: Callable[[RefusedRow], None]
) -> pa.Table:
    """The other rows."""
    for number, named in sorted(misfits.items()):
        add(refused_row(readable(rows.slice(number, 1)), misfit(rows, number, named, first_row)))
    kept = np.ones(rows.num_rows, dtype=bool)
    kept[list(misfits)] = False
    return rows.filter(pa.array(kept))


def readable(row: pa.Table) -> dict[str, Any]:
    """The values of one row, whatever its strings hold."""
    return {name: _readable(row.column(name).combine_chunks()) for name in row.column_names}


def _readable(column: pa.Array) -> Any:
    [value] = column
    if pa.types.is_string(column.type) and value.is_valid:
        return value.as_buffer().to_pybytes().decode("utf-8", "backslashreplace")
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return "(text that is not UTF-8)"


def refused_row(row: Mapping[str, Any], error: ValueDoesNotFit) -> RefusedRow:
    """A row as it goes to the dead-letter table: as JSON, with its origin if it has the columns of a record."""
    known = {name: row[name] if isinstance(row.get(name), kind) else None for name, kind in _ORIGIN.items()}
    return RefusedRow(
        **known, key=None, value=as_json(row).encode(), error=describe_error(error), origin=short_json(row)
    )


def as_json(row: Mapping[str, Any]) -> str:
    """
    >>> as_json({"id": 1, "raw": b"AB"})
    '{"id": 1, "raw": "4142"}'
    """
    return json.dumps(row, default=lambda value: value.hex() if isinstance(value, bytes) else str(value))


def short_json(row: Mapping[str, Any], *, characters_max: int = 500) -> str:
    text = as_json(row)
    return text if len(text) <= characters_max else f"{text[:characters_max]} ..."


def of_batch(refused: Sequence[RefusedRow], batch: str) -> list[RefusedRow]:
    """With the micro-batch or job in the error, since that is known of every row."""
    return [row._replace(error=f"{batch}: {row.error}") for row in refused]
