"""Two pipelines that write into one table at the same moment."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import psycopg
import pyarrow as pa
import pytest
from database_scene import Place, make_postgres, server
from session_scene import wait_until

from semel.bridges.dead_letter_table import DeadLetterTable
from semel.bridges.merge import Rule
from semel.bridges.postgres import PostgresDatabase
from semel.bridges.table_writer import TableOptions, TableWriter
from semel.errors import DatabaseError
from semel.testing.postgres import Postgres

__all__ = ["server"]

NEWEST = Rule("accounts", "newest", ("id",), version="version", delete="gone")


@pytest.fixture
def place(server: Postgres) -> Place:
    return make_postgres(server)


@pytest.fixture
def databases(place: Place) -> Iterator[list[PostgresDatabase]]:
    made = [PostgresDatabase(place.address) for _ in range(2)]
    made[0].ensure_tables()
    yield made
    for one in made:
        one.close()


def change(version: int, *, gone: bool) -> pa.Table:
    return pa.table({"id": pa.array([1]), "version": pa.array([version]), "gone": pa.array([gone])})


def writer_of(database: PostgresDatabase, rule: Rule, schema: pa.Schema, **options: object) -> TableWriter:
    writer = TableWriter(TableOptions(rule, **options))  # pyright: ignore[reportArgumentType]
    writer.check(database, schema)
    return writer


def waits_or_has_ended(place: Place, thread: threading.Thread) -> bool:
    return not thread.is_alive() or place.ask("SELECT count(*) > 0 FROM pg_locks WHERE NOT granted") == [(True,)]


@pytest.mark.parametrize("first_deletes", [True, False])
def test_a_deleted_row_does_not_return_by_an_older_one_of_another_pipeline(
    place: Place, databases: list[PostgresDatabase], first_deletes: bool
) -> None:
    """mode="newest": version 5 deletes the row, version 3 writes it, and neither sees the other's before its commit."""
    place.do("CREATE TABLE accounts (id bigint PRIMARY KEY, version bigint NOT NULL)")
    deletion, old = change(5, gone=True), change(3, gone=False)
    first, second = (deletion, old) if first_deletes else (old, deletion)
    writers = [writer_of(database, NEWEST, deletion.schema) for database in databases]

    def write_second() -> None:
        with databases[1].transaction():
            writers[1].write(databases[1], second)

    other = threading.Thread(target=write_second)
    with databases[0].transaction():
        writers[0].write(databases[0], first)
        other.start()
        wait_until(lambda: waits_or_has_ended(place, other), "the second pipeline to write")
    other.join(30)
    assert place.ask("SELECT * FROM accounts") == []
    assert place.ask("SELECT version FROM accounts_semel_deleted") == [(5,)]


def at_once(*works: object) -> list[BaseException]:
    """Run them as near to each other as threads can be."""
    gate, errors = threading.Barrier(len(works)), list[BaseException]()

    def run(work: object) -> None:
        gate.wait()
        try:
            work()  # pyright: ignore[reportCallIssue, reportUnknownVariableType]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return errors


def test_tables_and_columns_that_two_pipelines_make_at_once_are_made_once(
    place: Place, databases: list[PostgresDatabase]
) -> None:
    """create=True, the table of deletions, dead letters, new_columns="add": the second waits, and finds them there."""
    wide = pa.table({"id": [1], "version": [1], "gone": [False], "note": ["x"]})
    narrow = wide.drop_columns(["note"])

    def make(database: PostgresDatabase) -> None:
        writer_of(database, NEWEST, narrow.schema, create=True)
        DeadLetterTable("failed", None, pipeline="p", target="accounts").prepare(database)
        writer_of(database, NEWEST, wide.schema, new_columns="add")

    for database in databases:
        database.scalar("SELECT 1")
    for _ in range(15):
        assert at_once(*(lambda one=one: make(one) for one in databases)) == []
        place.do("DROP TABLE accounts, accounts_semel_deleted, failed")


def test_a_table_that_another_program_makes_meanwhile_is_no_bad_row(
    place: Place, databases: list[PostgresDatabase]
) -> None:
    """It takes no turn, so Postgres reports the name of the table's type as taken; the transaction is tried again."""
    schema = change(1, gone=False).schema
    errors: list[BaseException] = []

    def make() -> None:
        try:
            writer_of(databases[0], NEWEST, schema, create=True)
        except DatabaseError as error:
            errors.append(error)

    other = threading.Thread(target=make)
    with psycopg.connect(place.address) as connection:
        connection.execute("CREATE TABLE accounts (id bigint PRIMARY KEY, version bigint NOT NULL)")
        other.start()
        wait_until(lambda: waits_or_has_ended(place, other), "the pipeline to make its table")
    other.join(30)
    assert [type(error) for error in errors] == [DatabaseError]
    assert isinstance(errors[0], DatabaseError)
    assert errors[0].is_transient
    make()
    assert len(errors) == 1
