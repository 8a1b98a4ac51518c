"""Batches for every mode of a database target, and what must be in the table after so many of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from semel.bridges.targets import DatabaseTarget, Postgres, SQLite

KEYS: Final = 97
PAD: Final = "x" * 120
"""Makes one task's rows too many to be handed over to the driver."""

Row = tuple[int, int, int]
"""Id, version, amount."""


def rows_of(batch: int, rows: int) -> list[Row]:
    """Half of the ids of each batch come again in the next one."""
    first = batch * rows // 2
    return [(number, number * 7919 % 10_007, number % 13) for number in range(first, first + rows)]


def parts_of(batch: int, rows: int) -> list[pa.Table]:
    """Two tasks: one with much, one with little."""
    found = rows_of(batch, rows)
    columns = list(zip(*found, strict=True))
    table = pa.table(
        {
            "id": pa.array(columns[0], pa.int64()),
            "key": pa.array([number % KEYS for number in columns[0]], pa.int64()),
            "version": pa.array(columns[1], pa.int64()),
            "amount": pa.array(columns[2], pa.int64()),
            "pad": [PAD] * len(found),
        }
    )
    few = rows // 10
    return [table.slice(0, len(found) - few), table.slice(len(found) - few)]


def is_nameless(number: int) -> bool:
    """Whether `bad_parts_of` takes its id away."""
    return number % 500 == 3


def bad_parts_of(batch: int, rows: int) -> list[pa.Table]:
    """The same, where some rows have no id."""
    made: list[pa.Table] = []
    for part in parts_of(batch, rows):
        ids = [None if is_nameless(number) else number for number in part["id"].to_pylist()]
        made.append(part.set_column(0, "id", pa.array(ids, pa.int64())))
    return made


@dataclass(frozen=True)
class Mode:
    """How rows are written, what is read from the table in the end, and what that must be."""

    options: dict[str, Any]
    query: str
    expected: Callable[[list[Row]], list[tuple[int, ...]]]
    table: str = "out"
    prepare: tuple[str, ...] = ()


def _all(rows: list[Row]) -> list[tuple[int, ...]]:
    return sorted((number, amount) for number, _, amount in rows)


def _last(rows: list[Row]) -> list[tuple[int, ...]]:
    """The highest id of each key."""
    return sorted({number % KEYS: (number % KEYS, number) for number, _, _ in sorted(rows)}.values())


def _newest(rows: list[Row]) -> list[tuple[int, ...]]:
    """The highest version of each key."""
    best: dict[int, int] = {}
    for number, version, _ in rows:
        best[number % KEYS] = max(version, best.get(number % KEYS, -1))
    return sorted(best.items())


def _distinct(rows: list[Row]) -> list[tuple[int, ...]]:
    return sorted({(number, amount) for number, _, amount in rows})


def _counts(rows: list[Row]) -> list[tuple[int, ...]]:
    return sorted(Counter(number % KEYS for number, _, _ in rows).items())


MODES: Final[dict[str, Mode]] = {
    "append": Mode({"create": True}, "SELECT id, amount FROM out ORDER BY id, amount", _all),
    "upsert": Mode(
        {"create": True, "mode": "upsert", "key": ["key"], "version": "id"},
        "SELECT key, id FROM out ORDER BY key",
        _last,
    ),
    "newest": Mode(
        {"create": True, "mode": "newest", "key": ["key"], "version": "version"},
        "SELECT key, version FROM out ORDER BY key",
        _newest,
    ),
    "dedup": Mode(
        {"create": True, "mode": "dedup", "key": ["id"]}, "SELECT id, amount FROM out ORDER BY id, amount", _distinct
    ),
    "statement": Mode(
        {
            "statement": "INSERT INTO counts AS c (key, n) SELECT key, count(*) FROM rows WHERE true GROUP BY key "
            "ON CONFLICT (key) DO UPDATE SET n = c.n + excluded.n"
        },
        "SELECT key, n FROM counts ORDER BY key",
        _counts,
        prepare=("CREATE TABLE counts (key BIGINT PRIMARY KEY, n BIGINT)",),
    ),
}


def target_at(place: str, **options: Any) -> DatabaseTarget:
    """In Postgres if `place` is a URI, otherwise in a SQLite file."""
    return Postgres(place, **options) if place.startswith("postgresql:") else SQLite(place, **options)


def target_for(place: str, mode: str, **more: Any) -> DatabaseTarget:
    return target_at(place, table=MODES[mode].table, **MODES[mode].options, **more)


def prepare(target: DatabaseTarget, mode: str) -> None:
    with target.open() as database:
        for statement in MODES[mode].prepare:
            database.execute(statement)


def contents(target: DatabaseTarget, mode: str) -> list[tuple[int, ...]]:
    with target.open() as database:
        return [tuple(map(int, row)) for row in database.execute(MODES[mode].query).rows]


def expected(mode: str, batches: int, rows: int) -> list[tuple[int, ...]]:
    return MODES[mode].expected([row for batch in range(batches) for row in rows_of(batch, rows)])


def sqlite_place(folder: Path) -> str:
    return str(folder / "out.db")
