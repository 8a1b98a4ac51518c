"""Upserts into a plain Postgres table are written by MERGE, which may not change what the modes promise."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from database_scene import Place, make_postgres, server

from semel.bridges.database import Database
from semel.bridges.merge import Rule
from semel.bridges.postgres import PostgresDatabase
from semel.bridges.table_writer import TableOptions, TableWriter, prepare
from semel.errors import ConfigError, DatabaseError, ValueDoesNotFit
from semel.testing.postgres import Postgres

__all__ = ["server"]

PLAIN = "CREATE TABLE stock (id bigint PRIMARY KEY, name text)"
RULE = Rule("stock", "upsert", ("id",))


class Recorded(PostgresDatabase):
    """Remembers its statements."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.statements: list[str] = []

    def _execute(self, statement: str, *values: object) -> Any:
        self.statements.append(statement)
        return super()._execute(statement, *values)

    def ran(self, word: str) -> bool:
        return any(one.startswith(word) for one in self.statements)


@pytest.fixture
def place(server: Postgres) -> Place:
    return make_postgres(server)


@pytest.fixture
def database(place: Place) -> Iterator[Recorded]:
    with Recorded(place.address) as database:
        database.ensure_tables()
        yield database


def rows(*pairs: tuple[Any, str | None]) -> pa.Table:
    kind = pa.string() if pairs and isinstance(pairs[0][0], str) else pa.int64()
    return pa.table({"id": pa.array([key for key, _ in pairs], kind), "name": pa.array([n for _, n in pairs])})


def upsert(database: Database, *pairs: tuple[Any, str | None], rule: Rule = RULE, expected: int | None = None) -> int:
    """As Spark's driver does it: rows without an order. Returns how many rows were written."""
    table = rows(*pairs)
    writer = TableWriter(TableOptions(rule))
    writer.check(database, table.schema)
    with database.transaction():
        source = database.stage(prepare(table, rule))
        counts = writer.merge(database, [source], expected or table.num_rows, is_ordered=False)
    return counts.written


def found(place: Place) -> list[tuple[Any, ...]]:
    return place.ask("SELECT id, name FROM ONLY stock ORDER BY id")


def test_a_plain_table_is_written_by_one_merge_without_counting(place: Place, database: Recorded) -> None:
    """F1: new rows, changed rows and both at once; work_mem is raised for that transaction alone."""
    place.do(PLAIN)
    assert upsert(database, (1, "a"), (2, "b")) == 2
    assert upsert(database, (2, "B"), (3, None)) == 2
    assert found(place) == [(1, "a"), (2, "B"), (3, None)]
    assert database.ran("MERGE")
    assert not database.ran("INSERT INTO")
    assert not database.ran("SELECT count(*)")
    assert database.scalar("SHOW work_mem") == "4MB"


@pytest.mark.parametrize(
    "make",
    [
        [
            PLAIN,
            "CREATE FUNCTION shout() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN NEW.name = upper(NEW.name); RETURN NEW; END $$",
            "CREATE TRIGGER shouting BEFORE INSERT ON stock FOR EACH ROW EXECUTE FUNCTION shout()",
        ],
        [PLAIN, "CREATE RULE keep AS ON DELETE TO stock DO INSTEAD NOTHING"],
        [PLAIN, "CREATE TABLE more () INHERITS (stock)", "INSERT INTO more VALUES (2, 'of the child')"],
        [PLAIN, "ALTER TABLE stock ALTER id TYPE integer"],
        ['CREATE TABLE stock (id text COLLATE "C" PRIMARY KEY, name text)'],
    ],
    ids=["trigger", "rule", "child", "other type", "collation"],
)
def test_other_tables_are_written_as_before(place: Place, database: Recorded, make: list[str]) -> None:
    """F1: where MERGE would mean something else, or cannot compare the keys, it is not used."""
    place.do(*make)
    one, two = ("1", "2") if "COLLATE" in make[0] else (1, 2)
    upsert(database, (one, "a"), (two, "b"))
    upsert(database, (two, "c"))
    assert [(key, name.lower()) for key, name in found(place)] == [(one, "a"), (two, "c")]
    assert not database.ran("MERGE")


@pytest.mark.parametrize("there", [False, True])
def test_two_rows_of_one_key_are_refused_and_named(place: Place, database: Recorded, *, there: bool) -> None:
    """F1: rows without an order, whether the key is in the table or not. Nothing is written."""
    place.do(PLAIN, *(["INSERT INTO stock VALUES (7, 'old')"] if there else []))
    before = found(place)
    with pytest.raises(ConfigError, match=r"Two rows of one batch have the key \{'id': 7\}"):
        upsert(database, (1, "a"), (7, "b"), (7, "c"))
    assert found(place) == before


def test_a_row_that_another_writer_inserts_meanwhile_is_updated(place: Place, database: Recorded) -> None:
    """F1: MERGE does not see it and fails on the key; the batch is written all the same, in the same transaction."""
    place.do(PLAIN)
    with psycopg.connect(place.address) as other:
        other.execute("INSERT INTO stock VALUES (2, 'theirs')")
        writing = threading.Thread(target=upsert, args=(database, (1, "a"), (2, "ours")))
        writing.start()
        while not place.ask("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"):
            assert writing.is_alive(), "the merge did not wait for the other writer"
        other.commit()
        writing.join(30)
    assert found(place) == [(1, "a"), (2, "ours")]
    assert database.ran("MERGE")
    assert database.ran("INSERT INTO")


def test_a_value_that_a_constraint_refuses_is_the_same_error(place: Place, database: Recorded) -> None:
    """F4: a check, and another unique index than that of the key."""
    place.do(PLAIN, "ALTER TABLE stock ADD CHECK (name <> 'bad')", "CREATE UNIQUE INDEX ON stock (name)")
    with pytest.raises(ValueDoesNotFit, match="stock_name_check"):
        upsert(database, (1, "bad"))
    with pytest.raises(ValueDoesNotFit, match="stock_name_idx"):
        upsert(database, (1, "same"), (2, "same"))
    assert found(place) == []


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_staged_rows_that_are_missing_are_noticed_after_the_write(place: Place, database: Recorded, mode: Any) -> None:
    """F1: a server that was restarted has emptied staging tables. Nothing is kept, and the batch is staged again."""
    place.do(PLAIN)
    rule = RULE if mode == "upsert" else Rule("stock")
    with pytest.raises(DatabaseError, match="3 rows were staged for table 'stock' and 2 are there") as raised:
        upsert(database, (1, "a"), (2, "b"), rule=rule, expected=3)
    assert raised.value.is_transient
    assert found(place) == []


def test_a_statement_that_changes_as_many_rows_as_were_staged_is_checked_too(place: Place, database: Recorded) -> None:
    """F1: what a user's own statement changes says nothing about what it has read."""
    place.do(PLAIN)
    rule = Rule("stock", statement="INSERT INTO stock SELECT id + n, name FROM rows, generate_series(0, 2) AS n")
    with pytest.raises(DatabaseError, match="3 rows were staged"):
        upsert(database, (1, "a"), rule=rule, expected=3)
    assert found(place) == []
