"""The demo's database: Postgres that is killed and started again, SQLite where there is none."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from semel.cli.demo import about_database
from semel.demo.database import DemoDatabase, RowMoments
from semel.demo.orders import Sale
from semel.demo.pipeline_names import PIPELINES, PLAIN, SEMEL
from semel.demo.tables import Kind, Tables
from semel.demo.victims import descendants, is_alive
from semel.errors import BrokerUnreachable

SALES = [Sale(1, "teapot", "kitchen", 2400), Sale(2, "green tea", "tea", 890), Sale(2, "green tea", "tea", 890)]


def insert(tables: Tables, pipeline: str, sales: list[Sale]) -> None:
    with closing(tables.connect(pipeline)) as connection:
        connection.cursor().executemany(tables.insert_into(pipeline), sales)
        connection.commit()


@pytest.mark.parametrize("kind", ["postgres", "sqlite"])
def test_rows_are_read_as_they_were_inserted_and_tables_are_apart(tmp_path: Path, kind: Kind) -> None:
    """A row that is there twice is counted twice, and only in its own table."""
    with DemoDatabase(kind, tmp_path) as database:
        assert database.tables.kind == kind
        insert(database.tables, PLAIN, SALES)
        assert database.tables.read(PLAIN) == Counter(SALES)
        assert database.tables.read(SEMEL) == Counter()
        assert database.can_be_killed == (kind == "postgres")


def test_a_killed_postgres_returns_with_what_was_committed_and_without_the_rest(tmp_path: Path) -> None:
    """`kill -9` for all of its processes while a transaction is open; and the end leaves no process behind."""
    with DemoDatabase("postgres", tmp_path) as database:
        tables = database.tables
        insert(tables, PLAIN, SALES)
        unfinished = tables.connect(PLAIN)
        unfinished.cursor().execute(tables.insert_into(PLAIN), SALES[0])
        assert database.kill() > 2
        unfinished.close()
        database.start()
        assert tables.read(PLAIN) == Counter(SALES)
        assert database._server is not None
        # The backend of the connection just closed may end at any moment, so only the server itself must be alive.
        family = [database._server.process_id, *(one.number for one in descendants(database._server.process_id))]
        assert is_alive(family[0])
        assert len(family) > 2
    assert not any(map(is_alive, family))


def test_the_moments_are_seen_when_rows_are_written_and_not_before(tmp_path: Path) -> None:
    """The plain sink's by its commits, Semel's while its transaction is open."""
    with DemoDatabase("postgres", tmp_path) as database:
        insert(database.tables, PLAIN, SALES)
        with closing(RowMoments(database.tables)) as moments, closing(database.tables.connect(SEMEL)) as writer:
            assert not moments.has_plain_grown()
            assert not moments.is_semel_writing()
            writer.cursor().execute(database.tables.insert_into(SEMEL), SALES[0])
            assert moments.is_semel_writing()
            writer.commit()
            assert not moments.is_semel_writing()
            insert(database.tables, PLAIN, SALES[:1])
            assert moments.has_plain_grown()


def test_where_postgres_does_not_start_it_is_sqlite_and_one_line_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo goes on: a new user need not repair a Postgres first."""

    def refuse(**_: object) -> object:
        raise BrokerUnreachable("Postgres did not start:\ncould not create shared memory")

    monkeypatch.setattr("semel.demo.database.Postgres", refuse)
    with DemoDatabase("postgres", tmp_path) as database:
        assert about_database(database) == (
            "Database: SQLite, because Postgres did not start here: could not create shared memory"
        )
        assert not database.can_be_killed
        for pipeline in PIPELINES:
            insert(database.tables, pipeline, SALES)
            assert database.tables.read(pipeline) == Counter(SALES)


def test_one_line_says_which_database_it_is_and_how_to_get_the_other(tmp_path: Path) -> None:
    """For those who have installed `semel[spark]` alone, and for those who have more."""
    with DemoDatabase("sqlite", tmp_path) as database:
        assert "SQLite (for Postgres: pip install 'semel[postgres,clients]')" in about_database(database)
    with DemoDatabase("postgres", tmp_path / "other") as database:
        assert "Postgres, started for this run" in about_database(database)
