"""Rows that lack columns which others have. Pure.

A row is written without the columns that it lacks: an upsert keeps their old values, and a new row gets their defaults.
That must not depend on which other rows share its transaction, so rows are parted by the columns that they have.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa


def columns_of(rows: Iterable[Mapping[str, Any]]) -> list[frozenset[str]]:
    """The columns that each row has. Rows that have the same ones share one set."""
    known: dict[frozenset[str], frozenset[str]] = {}
    return [known.setdefault(columns, columns) for columns in map(frozenset, rows)]


def part_rows(columns: Sequence[Hashable], keys: Sequence[Hashable] | None) -> list[list[int]]:
    """The numbers of the rows of each part. All rows of a part have the same columns, and rows with one key keep their
    order if part is written after part. Without keys, rows may be written in any order.

    >>> part_rows(["ab", "a", "ab", "a", "ab"], [1, 2, 3, 1, 1])
    [[0, 2], [1, 3], [4]]
    """
    parts: list[list[int]] = []
    parts_with: dict[Hashable, list[int]] = {}
    part_of_key: dict[Hashable, int] = {}
    for number, own in enumerate(columns):
        first = 0 if keys is None else part_of_key.get(keys[number], 0)
        # The last part with these columns takes the row, unless an earlier row of its key is in a later part.
        found = parts_with.setdefault(own, [])
        if not found or found[-1] < first:
            found.append(len(parts))
            parts.append([])
        parts[found[-1]].append(number)
        if keys is not None:
            part_of_key[keys[number]] = found[-1]
    return parts


def part_table(table: pa.Table, columns: Sequence[frozenset[str]], keys: Sequence[Hashable] | None) -> list[pa.Table]:
    """The rows of `table`, each with its `columns` alone, as tables to be written one after the other."""
    return [
        (table if len(part) == len(columns) else table.take(pa.array(part, pa.int64()))).select(
            [name for name in table.column_names if name in columns[part[0]]]
        )
        for part in part_rows(columns, keys)
    ]
