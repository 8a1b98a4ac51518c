"""Random batches with every mode, on SQLite and on Postgres, against the obvious model."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from database_scene import server
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from table_model import Refused, TableModel

import semel
from semel.bridges.database import Database
from semel.bridges.merge import HORIZON, SEEN, Mode, Rule, tombstones_of
from semel.bridges.table_writer import TableOptions, TableWriter
from semel.errors import ValueDoesNotFit
from semel.testing.postgres import Postgres

__all__ = ["server"]

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("part", pa.string()),
        ("version", pa.int64()),
        ("value", pa.string()),
        ("amount", pa.float64()),
        ("gone", pa.bool_()),
    ]
)
_numbers = itertools.count()


def sometimes_null(strategy: st.SearchStrategy[Any], one_in: int) -> st.SearchStrategy[Any]:
    return st.integers(1, one_in).flatmap(lambda n: st.none() if n == one_in else strategy)


rows = st.fixed_dictionaries(
    {
        "id": sometimes_null(st.integers(0, 3), 60),
        "part": sometimes_null(st.sampled_from(["a", "b", "1:a", "ü'\"", ""]), 60),
        "version": sometimes_null(st.integers(0, 4), 60),
        "value": sometimes_null(st.text("xyz'\"\\\n", max_size=3), 4),
        "amount": sometimes_null(st.floats(allow_nan=False).map(lambda number: number + 0.0), 4),
        "gone": sometimes_null(st.booleans(), 4),
    }
)
keys = st.sampled_from([("id",), ("id", "part"), ("part", "id")])


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    modes: list[Mode] = ["append", "upsert", "dedup", "newest"]
    mode = draw(st.sampled_from(modes))
    table = f"model_{next(_numbers)}"
    if mode == "append":
        return Rule(table)
    key = draw(keys)
    delete = draw(st.sampled_from([None, "gone"]))
    if mode == "dedup":
        keep = draw(st.sampled_from([None, timedelta(milliseconds=1), timedelta(milliseconds=3)]))
        return Rule(table, "dedup", key, event_time=None if keep is None else "version", keep=keep)
    return Rule(table, mode, key, version="version" if mode == "newest" else None, delete=delete)


@st.composite
def histories(draw: st.DrawFn) -> list[list[dict[str, Any]]]:
    """Batches, some of which come again later."""
    batches = draw(st.lists(st.lists(rows, min_size=1, max_size=6), min_size=1, max_size=6))
    again = draw(st.lists(st.integers(0, len(batches) - 1), max_size=3))
    return batches + [batches[number] for number in again]


@pytest.fixture(scope="module")
def databases(server: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Database]]:
    path: Path = tmp_path_factory.mktemp("model") / "model.db"
    with (
        semel.SQLite(path, table="t").open() as sqlite,
        semel.Postgres(server.uri, table="t").open() as postgres,
    ):
        for database in (sqlite, postgres):
            database.ensure_tables()
        yield {"sqlite": sqlite, "postgres": postgres}


def contents(database: Database, rule: Rule) -> list[tuple[Any, ...]]:
    names = ", ".join(name for name in SCHEMA.names if name not in rule.extra_columns)
    found = database.execute(f"SELECT {names} FROM {rule.table}").rows
    gone = None if "gone" in rule.extra_columns else SCHEMA.names.index("gone")
    return sorted((_with_booleans(row, gone) for row in found), key=repr)


def _with_booleans(row: tuple[Any, ...], index: int | None) -> tuple[Any, ...]:
    """SQLite has none."""
    return tuple(bool(value) if at == index and value is not None else value for at, value in enumerate(row))


def forget(database: Database, rule: Rule) -> None:
    for table in (rule.table, tombstones_of(rule.table)):
        database.execute(f"DROP TABLE IF EXISTS {table}")
    for table in (SEEN, HORIZON):
        database.execute(f"DELETE FROM {table} WHERE scope LIKE $1", f'%"{rule.table}" %')


def write(database: Database, writer: TableWriter, table: pa.Table, cut: int) -> None:
    """In one transaction, whole or in two parts."""
    with database.transaction():
        if cut >= table.num_rows:
            writer.write(database, table)
            return
        for part in (table.slice(0, cut), table.slice(cut)):
            with database.savepoint():
                writer.write_part(database, part)
        writer.finish(database)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_every_mode_makes_of_random_batches_what_the_model_makes_of_them(
    kind: str, databases: dict[str, Database]
) -> None:
    """F1: several key columns, nulls, repeats of whole batches, deletes, ties of versions, parts of a batch."""
    database = databases[kind]

    @settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(rules(), histories(), st.integers(1, 7))
    def compare(rule: Rule, history: list[list[dict[str, Any]]], cut: int) -> None:
        model = TableModel(rule, SCHEMA.names, int(time.time() * 1000))
        writer = TableWriter(TableOptions(rule, create=True))
        try:
            writer.check(database, SCHEMA)
            for batch in history:
                note(f"{rule} {batch}")
                table = pa.Table.from_pylist(batch, SCHEMA)
                try:
                    model.write(batch)
                except Refused:
                    with pytest.raises(ValueDoesNotFit):
                        write(database, writer, table, cut)
                    writer.forget()
                else:
                    write(database, writer, table, cut)
                assert contents(database, rule) == model.contents
        finally:
            forget(database, rule)

    compare()


def test_replays_change_nothing_where_the_mode_promises_that(databases: dict[str, Database]) -> None:
    """F1: with "newest" and "dedup" any batch may come again, at any time."""
    for mode, more in (("newest", {"version": "version", "delete": "gone"}), ("dedup", {})):
        for database in databases.values():
            rule = Rule(f"model_{next(_numbers)}", mode, ("id",), **more)  # pyright: ignore[reportArgumentType]
            writer = TableWriter(TableOptions(rule, create=True))
            writer.check(database, SCHEMA)
            batches = [
                pa.Table.from_pylist(
                    [
                        {"id": n % 4, "part": str(n), "version": (n * 7) % 11, "gone": n % 5 == 0}
                        for n in range(begin, begin + 9)
                    ],
                    SCHEMA,
                )
                for begin in (0, 9, 18)
            ]
            for batch in batches:
                write(database, writer, batch, 9)
            before = contents(database, rule)
            for batch in (batches[0], batches[2], batches[1], batches[0]):
                write(database, writer, batch, 4)
                assert contents(database, rule) == before
            forget(database, rule)
