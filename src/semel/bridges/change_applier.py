"""Change events into tables of the same columns: what a capture has read out of one database, written to another.

The statements run in the reader's own transaction, so with `SourceInbox` the copy shows whole transactions only.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final

from semel.bridges.merge import quote, quote_table
from semel.errors import ConfigError, RecordFailed
from semel.session.transaction import Row

OPERATION_HEADER: Final = "semel.change.operation"
SCHEMA_HEADER: Final = "semel.change.schema"
TABLE_HEADER: Final = "semel.change.table"
UNCHANGED_HEADER: Final = "semel.change.unchanged"
"""A JSON list of columns that are not in the value, since they did not change."""

_VALUE: Final = "\0"
_WRITES: Final = ("snapshot", "insert", "update")


@dataclass(frozen=True, slots=True)
class ChangeStatement:
    """One event as SQL, with NUL for values, as no name can have it."""

    sql: str
    values: tuple[Any, ...] = ()
    must_hit: bool = field(default=False, compare=False)
    """Whether it must change one row: an update that has no value for some columns cannot insert it."""


def apply_changes(
    connection: Any,
    events: Iterable[Row],
    *,
    tables: Mapping[str, str] | Callable[[str, str], str | None] | None = None,
) -> int:
    """Write events of change capture to the tables of a database, by key and in their order; returns how many.

    `connection` is one of sqlite3 or psycopg, inside of a transaction. `tables` says where a table goes, as a mapping
    from "schema.table" or a function of schema and table; None leaves it out. Without it, it is the same name; in
    SQLite without the schema.

    >>> with SourceInbox(connection, bootstrap="127.0.0.1:9092", source="shop", topics=["public.accounts"],
    ...                  name="copy") as inbox:  # doctest: +SKIP
    ...     for delivery in inbox:
    ...         with delivery as connection:
    ...             apply_changes(connection, delivery.rows())
    """
    is_sqlite = isinstance(connection, sqlite3.Connection)
    where = _targets(tables, has_schemas=not is_sqlite)
    cursor = connection.cursor()
    count = 0
    statements = (one for row in events if (one := statement_of(row, where, is_sqlite=is_sqlite)) is not None)
    for (sql, must_hit), group in groupby(statements, lambda one: (one.sql, one.must_hit)):
        batch = [one.values for one in group]
        text = sql.replace(_VALUE, "?") if is_sqlite else sql.replace("%", "%%").replace(_VALUE, "%s")
        cursor.executemany(text, batch)
        if must_hit and cursor.rowcount != len(batch):
            raise ConfigError(
                f"An update found {cursor.rowcount} of {len(batch)} rows ({text}). The table is not what the events "
                "before it have made, so it was changed by somebody else, or filled from another state. The "
                "transaction is rolled back. Start over with empty tables, under another name=."
            )
        count += len(batch)
    return count


def statement_of(
    row: Row, where: Callable[[str, str], str | None], *, is_sqlite: bool = False
) -> ChangeStatement | None:
    """None for what changes nothing: a tombstone, and a table that goes nowhere."""
    headers = {name: (value or b"").decode() for name, value in row.headers}
    operation = headers.get(OPERATION_HEADER)
    if operation is None or TABLE_HEADER not in headers:
        raise _failed(row, f"it has no header {OPERATION_HEADER!r} or {TABLE_HEADER!r}, as events of a capture have")
    table = where(headers.get(SCHEMA_HEADER, ""), headers[TABLE_HEADER])
    if table is None:
        return None
    name = quote_table(table)
    if operation == "truncate":
        return ChangeStatement(f"DELETE FROM {name}")  # TRUNCATE would show an older snapshot an empty table
    if row.value is None:
        return None  # the tombstone after a delete
    key = _columns(row.key, is_sqlite=is_sqlite) if row.key else {}
    if operation == "delete":
        return _delete(row, name, key)
    if operation in _WRITES:
        return _write(row, name, key, _columns(row.value, is_sqlite=is_sqlite), headers, is_sqlite=is_sqlite)
    raise _failed(row, f"its operation {operation!r} is not known to this release")


def _delete(row: Row, name: str, key: Mapping[str, Any]) -> ChangeStatement:
    if not key:
        raise _failed(row, "it deletes a row and has no key, so the row cannot be found: give the table a primary key")
    return ChangeStatement(f"DELETE FROM {name} WHERE {_equal(key)}", tuple(key.values()))


def _write(
    row: Row,
    name: str,
    key: Mapping[str, Any],
    columns: Mapping[str, Any],
    headers: Mapping[str, str],
    *,
    is_sqlite: bool,
) -> ChangeStatement | None:
    others = {column: value for column, value in columns.items() if column not in key}
    if headers[OPERATION_HEADER] == "update" and not key:
        raise _failed(row, "it updates a row and has no key, so the row cannot be found: give the table a primary key")
    if UNCHANGED_HEADER in headers:
        if not others:
            return None
        changes = ", ".join(f"{quote(column)} = {_VALUE}" for column in others)
        return ChangeStatement(
            f"UPDATE {name} SET {changes} WHERE {_equal(key)}", (*others.values(), *key.values()), must_hit=True
        )
    names = ", ".join(quote(column) for column in columns)
    # Values of an identity column come from the source.
    overriding = "" if is_sqlite else " OVERRIDING SYSTEM VALUE"
    sql = f"INSERT INTO {name} ({names}){overriding} VALUES ({', '.join(_VALUE * len(columns))})"
    if key:
        changes = ", ".join(f"{quote(column)} = excluded.{quote(column)}" for column in others)
        action = f"UPDATE SET {changes}" if others else "NOTHING"
        sql += f" ON CONFLICT ({', '.join(quote(column) for column in key)}) DO {action}"
    return ChangeStatement(sql, tuple(columns.values()))


def _equal(key: Mapping[str, Any]) -> str:
    return " AND ".join(f"{quote(column)} = {_VALUE}" for column in key)


def _columns(data: bytes, *, is_sqlite: bool) -> dict[str, Any]:
    """Postgres reads every value from its text as a column of its type does, so no digit is lost on the way."""
    if is_sqlite:
        return json.loads(data)
    found: dict[str, Any] = json.loads(data, parse_float=str, parse_int=str)
    return {name: str(value).lower() if isinstance(value, bool) else value for name, value in found.items()}


def _targets(
    tables: Mapping[str, str] | Callable[[str, str], str | None] | None, *, has_schemas: bool
) -> Callable[[str, str], str | None]:
    if tables is None:
        return lambda schema, table: f"{schema}.{table}" if has_schemas and schema else table
    if isinstance(tables, Mapping):
        named: Mapping[str, str] = tables
        return lambda schema, table: named.get(f"{schema}.{table}")
    return tables


def _failed(row: Row, why: str) -> RecordFailed:
    return RecordFailed(
        f"The event at {row.topic}-{row.partition} offset {row.offset} cannot be applied: {why}. Nothing of its "
        "transaction was applied.",
        topic=row.topic,
        partition=row.partition,
        offset=row.offset,
    )
