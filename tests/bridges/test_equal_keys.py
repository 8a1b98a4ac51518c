"""Keys and versions that the table's columns hold to be equal, or in another order than the rows' own values."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from database_scene import Place, place, server

import semel
from semel.bridges.database import Database
from semel.bridges.merge import Mode, Rule
from semel.bridges.spark_misfits import MisfitSearch
from semel.bridges.table_writer import TableOptions, TableWriter, prepare
from semel.errors import ConfigError, DatabaseError

__all__ = ["place", "server"]

LOWER = "aaaaaaaa-0000-0000-0000-000000000001"
KEYS = {
    "postgres": [
        ("uuid", LOWER.upper(), LOWER),
        ("bigint", "007", "7"),
        ("character(5)", "a", "a  "),
        ('text COLLATE "C"', "a", "a"),
        ('varchar(5) COLLATE "C"', "a", "a"),
    ],
    "sqlite": [
        ("TEXT COLLATE NOCASE", "Ann", "ann"),
        ("STRING", "7.0", "7"),
        ("INTEGER", "1000.0", "1000"),
    ],
}
VERSIONS = {
    "postgres": [("bigint", "9", "10"), ("numeric", "9.5", "10"), ('text COLLATE "C"', "a", "b")],
    "sqlite": [("INTEGER", "9", "10"), ("REAL", "9.5", "10"), ("TEXT COLLATE NOCASE", "a", "B")],
}


def make(place: Place, definition: str) -> None:
    place.do("DROP TABLE IF EXISTS users", "DROP TABLE IF EXISTS users_semel_deleted")
    place.do(f"CREATE TABLE users ({definition})")


def rows(*given: tuple[Any, ...]) -> pa.Table:
    ids, versions, gone = zip(*given, strict=True)
    return pa.table({"id": ids, "version": versions, "gone": pa.array(gone, pa.bool_())})


def write(place: Place, rule: Rule, *batches: pa.Table) -> None:
    with place.target(table="users").open() as database:
        database.ensure_tables()
        writer = TableWriter(TableOptions(rule))
        writer.check(database, batches[0].schema)
        for batch in batches:
            with database.transaction():
                writer.write(database, batch)


def merge(database: Database, writer: TableWriter, table: pa.Table) -> None:
    """As Spark's driver does."""
    with database.transaction():
        writer.merge(database, [database.stage(prepare(table, writer.options.rule))], table.num_rows, is_ordered=False)


@pytest.mark.parametrize("mode", ["upsert", "newest"])
def test_rows_whose_keys_the_table_holds_to_be_equal_are_rows_of_one_key(place: Place, mode: Mode) -> None:
    """The last one wins, and a delete deletes, whether they come in one batch or in several."""
    for kind, one, other in KEYS[place.kind]:
        make(place, f"id {kind} NOT NULL PRIMARY KEY, version int")
        rule = Rule("users", mode, ("id",), "version" if mode == "newest" else None, delete="gone")
        write(place, rule, rows((one, 1, False), (other, 2, False)))
        assert place.ask("SELECT version FROM users") == [(2,)], kind
        write(place, rule, rows((one, 3, False), (other, 4, True)))
        assert place.ask("SELECT version FROM users") == [], kind
        write(place, rule, rows((one, 5, True), (other, 6, False)), rows((one, 7, True)))
        assert place.ask("SELECT version FROM users") == [], kind


def test_rows_without_an_order_are_refused_if_the_table_holds_their_keys_to_be_equal(place: Place) -> None:
    """Spark's rows: the refusal names the key, in place of an error of the database or a row that wins by chance."""
    for kind, one, other in KEYS[place.kind]:
        make(place, f"id {kind} NOT NULL PRIMARY KEY, version int")
        with place.target(table="users").open() as database:
            database.ensure_tables()
            writer = TableWriter(TableOptions(Rule("users", "upsert", ("id",))))
            table = rows((one, 1, False), (other, 2, False)).drop(["gone"])
            writer.check(database, table.schema)
            with pytest.raises(ConfigError, match="Two rows of one batch have the key"):
                merge(database, writer, table)


KEYS_THAT_COMPARE_IN_TWO_WAYS = [
    ("id TEXT NOT NULL COLLATE RTRIM PRIMARY KEY", "", "RTRIM"),
    ("id TEXT NOT NULL, PRIMARY KEY (id COLLATE NOCASE)", "", "NOCASE.*BINARY"),
    ("id TEXT NOT NULL, UNIQUE (id COLLATE RTRIM)", "", "RTRIM"),
    ("id TEXT NOT NULL", "CREATE UNIQUE INDEX one ON users (id COLLATE NOCASE)", "NOCASE.*BINARY"),
    ("id TEXT NOT NULL PRIMARY KEY", "CREATE UNIQUE INDEX one ON users (id COLLATE NOCASE)", "NOCASE.*BINARY"),
    ("id TEXT NOT NULL COLLATE NOCASE", "CREATE UNIQUE INDEX one ON users (id COLLATE BINARY)", "BINARY.*NOCASE"),
]


@pytest.mark.parametrize("mode", ["upsert", "newest"])
@pytest.mark.parametrize(("definition", "index", "words"), KEYS_THAT_COMPARE_IN_TWO_WAYS)
def test_a_key_that_sqlite_compares_in_two_ways_is_refused_before_anything_is_read(
    tmp_path: Path, mode: Mode, definition: str, index: str, words: str
) -> None:
    """One key for the index and two for the column, or the other way round: the wrong row would win or be deleted.

    SQLite itself does not find all keys that RTRIM holds to be equal: its Bloom filters count the blanks.
    """
    place = Place("sqlite", str(tmp_path / "shop.db"))
    columns, comma, constraint = definition.partition(",")
    make(place, f"{columns}, version int{comma}{constraint}")
    place.do(*[index] if index else [])
    version = {"version": "version"} if mode == "newest" else {}
    with pytest.raises(ConfigError, match=f"key column 'id' of table 'users'.*{words}.*Nothing was written"):
        semel.run(
            lambda row: None,
            to=place.target(table="users", mode=mode, key=["id"], **version),
            bootstrap="127.0.0.1:1",
            topics=["users"],
            name="users",
        )


def test_a_collation_that_sqlite_does_not_have_hides_no_other(tmp_path: Path) -> None:
    """A column beside the key has one of the user's own program."""
    place = Place("sqlite", str(tmp_path / "shop.db"))
    with closing(sqlite3.connect(place.address)) as connection:
        connection.create_collation("phonebook", lambda one, other: (one > other) - (one < other))
        connection.execute(
            "CREATE TABLE users (name TEXT COLLATE phonebook, id TEXT NOT NULL COLLATE NOCASE PRIMARY KEY, version int)"
        )
    write(place, Rule("users", "upsert", ("id",), delete="gone"), rows(("Ann", 1, False), ("ann", 2, False)))
    assert place.ask("SELECT version FROM users") == [(2,)]


def test_versions_within_a_batch_are_ordered_as_in_the_table(place: Place) -> None:
    """Text for a column of numbers: 10 is newer than 9, in one batch as in two."""
    for kind, older, newer in VERSIONS[place.kind]:
        make(place, f"id int NOT NULL PRIMARY KEY, version {kind}")
        rule = Rule("users", "newest", ("id",), "version", delete="gone")
        write(place, rule, rows((1, older, True), (1, newer, False), (2, newer, True), (2, older, False)))
        assert place.ask("SELECT id, version = " + f"'{newer}' FROM users") == [(1, True)], kind


def test_misfits_are_not_looked_for_in_an_order_that_is_not_the_tables(place: Place) -> None:
    """Spark's rows in halves: versions as text would let 9 win over 10, so the batch is refused instead."""
    make(place, "id int NOT NULL PRIMARY KEY, version bigint, amount int CHECK (amount > 0)")
    rule = Rule("users", "upsert", ("id",), "version")
    table = pa.table({"id": [1, 1, 2], "version": ["9", "10", "1"], "amount": [9, 10, -1]})
    with place.target(table="users").open() as database:
        database.ensure_tables()
        writer = TableWriter(TableOptions(rule))
        writer.check(database, table.schema)
        prepared = prepare(table, rule)
        search = MisfitSearch(database, writer, prepared.schema, lambda row, error: None)
        with pytest.raises(DatabaseError, match="cast it in the query"), database.transaction():
            search.merge([database.stage(prepared)], 3)
    assert place.ask("SELECT id FROM users") == []
