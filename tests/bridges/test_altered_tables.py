"""Tables whose columns change between two transactions of a writer, and after its checks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from database_scene import Place, make_postgres, server
from session_scene import wait_until

from semel.bridges.database import Database
from semel.bridges.merge import Rule
from semel.bridges.table_writer import NewColumns, TableOptions, TableWriter, prepare
from semel.errors import DatabaseError, ValueDoesNotFit
from semel.testing.postgres import Postgres

__all__ = ["server"]

UPSERT = Rule("altered", "upsert", ("id",))


@pytest.fixture
def place(server: Postgres) -> Place:
    return make_postgres(server)


@pytest.fixture
def database(place: Place) -> Iterator[Database]:
    with place.target(table="altered").open() as database:
        database.ensure_tables()
        yield database


def rows(number: int, value: Any, kind: pa.DataType) -> pa.Table:
    return pa.table({"id": pa.array([number], pa.int64()), "v": pa.array([value], kind)})


def write(database: Database, writer: TableWriter, table: pa.Table) -> None:
    with database.transaction():
        writer.write(database, table)


def merge(database: Database, writer: TableWriter, table: pa.Table) -> None:
    """As Spark's driver does."""
    with database.transaction():
        writer.merge(database, [database.stage(prepare(table, writer.options.rule))], table.num_rows, is_ordered=False)


@pytest.mark.parametrize("write", [write, merge])
@pytest.mark.parametrize(
    ("rule", "before", "after", "kind", "value", "stored"),
    [
        (Rule("altered"), "bigint", "double precision", pa.int64(), 1000, "1000"),
        (Rule("altered"), "integer", "real", pa.int32(), 1000, "1000"),
        (Rule("altered"), "double precision", "bigint", pa.float64(), 1.5, None),
        (Rule("altered"), "bigint", "text", pa.int64(), 1000, "1000"),
        (UPSERT, "numeric(12,2)", "numeric(12,1)", pa.decimal128(12, 2), Decimal("1.25"), None),
        (UPSERT, "bigint", "double precision", pa.int64(), 1000, "1000"),
    ],
)
def test_rows_are_written_for_the_types_that_the_table_has_now(
    place: Place,
    database: Database,
    write: Any,
    rule: Rule,
    before: str,
    after: str,
    kind: Any,
    value: Any,
    stored: Any,
) -> None:
    """A column's type is changed between two transactions: the next value is converted exactly, or refused."""
    place.do(f"CREATE TABLE altered (id bigint PRIMARY KEY, v {before})")
    writer = TableWriter(TableOptions(rule))
    table = rows(1, value, kind)
    writer.check(database, table.schema)
    write(database, writer, table)
    place.do("DELETE FROM altered", f"ALTER TABLE altered ALTER v TYPE {after}")
    if stored is None:
        with pytest.raises(ValueDoesNotFit, match="cannot be kept exactly"):
            write(database, writer, table)
        assert place.ask("SELECT * FROM altered") == []
        return
    write(database, writer, table)
    assert place.ask("SELECT id, v::text FROM altered") == [(1, stored)]


def test_a_type_cannot_change_between_the_check_and_the_commit(place: Place, database: Database) -> None:
    """ALTER TABLE waits for the transaction that has looked at the columns."""
    place.do("CREATE TABLE altered (id bigint, v bigint)")
    writer = TableWriter(TableOptions(Rule("altered")))
    writer.check(database, rows(1, 1, pa.int64()).schema)
    waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'altered'::regclass"
    alter = threading.Thread(target=place.do, args=["ALTER TABLE altered ALTER v TYPE double precision"])
    with database.transaction():
        database.keep_columns("altered")
        alter.start()
        wait_until(lambda: place.ask(waiting) == [(1,)], "ALTER TABLE waits")
        writer.write(database, rows(1, 1000, pa.int64()))
    alter.join()
    assert place.ask("SELECT v FROM altered") == [(1000.0,)]


def test_a_user_with_rights_to_some_columns_only_can_still_append(place: Place, server: Postgres) -> None:
    """The lock on the columns asks for no right that the insert does not ask for."""
    role = f"clerk_{place.address.partition('shop_')[2][:8]}"
    place.do("CREATE TABLE altered (id bigint, v bigint, secret text)", f"CREATE ROLE {role} LOGIN")
    place.do(f"GRANT INSERT (id, v) ON altered TO {role}", f"GRANT CREATE ON SCHEMA public TO {role}")
    clerk = Place("postgres", place.address.replace("postgres@", f"{role}@"))
    with clerk.target(table="altered").open() as database:
        writer = TableWriter(TableOptions(Rule("altered")))
        writer.check(database, rows(1, 1, pa.int64()).schema)
        write(database, writer, rows(1, 1, pa.int64()))
    assert place.ask("SELECT id, v FROM altered") == [(1, 1)]


@pytest.mark.parametrize("new_columns", ["ignore", "add"])
def test_staged_rows_without_a_column_that_the_table_has_got_are_staged_again(
    place: Place, database: Database, new_columns: NewColumns
) -> None:
    """Rows staged for the former columns are not merged without the new one; after staging again they are whole."""
    place.do("CREATE TABLE altered (id bigint PRIMARY KEY)")
    writer = TableWriter(TableOptions(UPSERT, new_columns=new_columns))
    table = rows(1, 7, pa.int64())
    writer.check(database, table.schema)
    if new_columns == "ignore":
        place.do("ALTER TABLE altered ADD v bigint")
        with pytest.raises(DatabaseError, match="staged again") as caught:
            merge(database, writer, table.select(writer.columns))
        assert caught.value.is_transient
    else:
        place.do("ALTER TABLE altered DROP v")
    writer.ensure(database, table.schema)
    merge(database, writer, table.select(writer.columns))
    assert place.ask("SELECT id, v FROM altered") == [(1, 7)]


def test_a_dropped_table_is_an_error_that_says_so(place: Place, database: Database) -> None:
    """The check of the columns does not make the table again."""
    place.do("CREATE TABLE altered (id bigint, v bigint)")
    writer = TableWriter(TableOptions(Rule("altered"), create=True))
    writer.check(database, rows(1, 1, pa.int64()).schema)
    with psycopg.connect(place.address, autocommit=True) as other:
        other.execute("DROP TABLE altered")
    with pytest.raises(DatabaseError, match="no such table"):
        write(database, writer, rows(1, 1, pa.int64()))
    assert not place.has("altered")
