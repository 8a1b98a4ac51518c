"""An outbox table in SQLite as a source. Here the highest id that was relayed is all there is to know.

SQLite lets one transaction write at a time, from its first write to its commit. So ids are given out in the order in
which transactions commit, and no row can appear below an id that was seen. This needs ids that are never given out
twice: only AUTOINCREMENT does that, after the row with the highest id was deleted too.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import pyarrow as pa

from semel.bridges.database import HOME, TABLES
from semel.bridges.merge import quote, quote_table
from semel.bridges.relay.options import Columns, RelayOptions, choose_columns
from semel.bridges.relay.routes import TOPIC_COLUMN
from semel.bridges.relay.row_source import Identity, Portion, Position, RowSource, count_fitting, nothing_due
from semel.bridges.relay.table_sql import one_line, outbox_table_sql
from semel.bridges.relay.waking import SqliteWaker, Waker
from semel.bridges.run_owner import home_of
from semel.bridges.sqlite import SqliteDatabase
from semel.errors import ConfigError, DatabaseUnreachable

_DELETED_AT_ONCE: Final = 10_000


class SqliteSource(RowSource):
    """Rows of one table of a file."""

    def __init__(self, database: SqliteDatabase, options: RelayOptions) -> None:
        self.table = options.table
        self._database = database
        self._options = options
        self._columns: Columns | None = None
        self._file: tuple[int, int] | None = None

    def prepare(self) -> Identity:
        self._database.close()  # a file that has taken the place of the old one is another one
        self._file = self._find_file()
        if self._file is None:  # SQLite would make one
            raise ConfigError(f"There is no SQLite file {self._database.path!r}. Nothing was relayed. Check the path.")
        self._check_table()
        # A file that was deleted and made again counts from 1, and so has other rows under the ids that were relayed.
        if self._database.columns(HOME) is None:
            self._database.execute(f"CREATE TABLE IF NOT EXISTS {HOME} ({TABLES[HOME]})")
        return {"kind": "sqlite", "home": home_of(self._database), "table": self._database.full_name(self.table)}

    def _find_file(self) -> tuple[int, int] | None:
        """What tells the file from another one that is put in its place."""
        try:
            found = os.stat(self._database.path)
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def _check_table(self) -> None:
        available = self._database.columns(self.table)
        if available is None:
            raise ConfigError(
                f"There is no table {self.table!r} in {self._database.path!r}. Nothing was relayed. Create it: "
                f"{one_line(outbox_table_sql('sqlite', self.table))}"
            )
        self._columns = choose_columns(self._options, available)
        if not self._keeps_ids():
            raise ConfigError(
                f"Column {self._options.id!r} of {self.table!r} is not INTEGER PRIMARY KEY AUTOINCREMENT: SQLite gives "
                "the id of a deleted last row out again, and such a row would be lost. Nothing was relayed. SQLite "
                "cannot change a primary key, so rename the table, create it again, and copy the rows: "
                f"{one_line(outbox_table_sql('sqlite', self.table))}"
            )

    def _keeps_ids(self) -> bool:
        definition = self._database.scalar(
            "SELECT sql FROM sqlite_master WHERE type = 'table' AND lower(name) = lower($1)",
            self._plain_name,
        )
        if definition is None:
            return False
        # SQLite makes sqlite_sequence for a table with AUTOINCREMENT and for no other.
        with closing(sqlite3.connect(":memory:")) as scratch:
            try:
                scratch.execute(definition)
                found = scratch.execute("SELECT count(*) FROM sqlite_master WHERE name = 'sqlite_sequence'").fetchone()
            except sqlite3.Error:
                return False
        keys = [
            row[1] for row in self._database.execute(f"PRAGMA table_info({quote(self._plain_name)})").rows if row[5]
        ]
        return bool(found[0]) and keys == [self._options.id]

    def make_waker(self) -> Waker:
        return SqliteWaker(self._database.path)

    def close(self) -> None:
        self._database.close()

    def is_behind(self, position: Position) -> bool:
        last = self._database.scalar("SELECT seq FROM sqlite_sequence WHERE lower(name) = lower($1)", self._plain_name)
        return int(last or 0) < int(position["after"])

    def _check_unchanged(self, position: Position | None) -> None:
        """For statements inside of the same transaction: raises if the file was put back to an earlier state."""
        if self._find_file() != self._file:
            raise DatabaseUnreachable(
                f"Another file is at {self._database.path!r}, or none. Whether the relay may go on there is found out "
                "next.",
                is_transient=True,
            )
        if position is not None and self.is_behind(position):
            raise ConfigError(
                f"The file {self._database.path!r} has gone back: rows of {self.table!r} up to {position['after']} "
                "were relayed, and it has not given out that id. It was put back to an earlier state. Nothing more "
                f"was relayed. {self.advice_after_restore(position)}"
            )

    def next(self, position: Position | None, rows_max: int) -> Portion:
        with self._database.snapshot():
            self._check_unchanged(position)
            return self._next(position, rows_max)

    def _next(self, position: Position | None, rows_max: int) -> Portion:
        after = 0 if position is None else int(position["after"])
        columns = self._chosen
        key = quote(columns.id)
        parts = [columns.value, *(one for one in (columns.key, columns.headers) if one is not None)]
        size = " + ".join(f"coalesce(length(CAST({quote(part)} AS BLOB)), 0)" for part in parts)
        waiting = self._database.execute(
            f"SELECT {key}, {size} FROM {self._name} WHERE {key} > $1 ORDER BY {key} LIMIT {rows_max}", after
        ).rows
        if not waiting:
            return nothing_due({"after": after})
        count = count_fitting(np.array([found[1] for found in waiting], np.int64), rows_max)
        last = int(waiting[count - 1][0])
        rows = self._read(after, last)

        def position_at(done: int) -> Position:
            return {"after": last if done >= rows.num_rows else rows.column("id")[done - 1].as_py()}

        return Portion(rows, position_at, has_more=count < len(waiting) or count == rows_max)

    def _read(self, after: int, last: int) -> pa.Table:
        columns = self._chosen
        names = [columns.id, columns.value, columns.key, columns.headers, columns.timestamp, *columns.topic]
        wanted = ", ".join("NULL" if name is None else quote(name) for name in names)
        key = quote(columns.id)
        found = self._database.execute(
            f"SELECT {wanted} FROM {self._name} WHERE {key} > $1 AND {key} <= $2 ORDER BY {key}", after, last
        ).rows
        ids, values, keys, headers, times, *topics = zip(*found, strict=True) if found else [()] * len(names)
        arrays: dict[str, pa.Array] = {
            "id": pa.array(ids, pa.int64()),
            "value": pa.array(map(_bytes, values), pa.binary()),
            "key": pa.array(map(_bytes, keys), pa.binary()),
            "headers": pa.array(map(_text, headers), pa.string()),
            "timestamp": pa.array(map(_milliseconds, times), pa.int64()),
        }
        for name, values_of in zip(columns.topic, topics, strict=True):
            arrays[TOPIC_COLUMN + name] = pa.array(map(_text, values_of), pa.string())
        return pa.table(arrays)

    def delete_done(self, position: Position) -> int:
        deleted, key = 0, quote(self._chosen.id)
        while True:
            with self._database.transaction():
                self._check_unchanged(position)
                changed = self._database.execute(
                    f"DELETE FROM {self._name} WHERE {key} IN (SELECT {key} FROM {self._name} WHERE {key} <= $1 "
                    f"ORDER BY {key} LIMIT {_DELETED_AT_ONCE})",
                    int(position["after"]),
                ).changed
            deleted += changed
            if changed < _DELETED_AT_ONCE:
                return deleted

    def advice_after_restore(self, position: Position) -> str:
        return (
            "If the file is new or comes from an older backup: delete the rows that were relayed, if they are still "
            f"there (those up to {position['after']} by the ids of the old file), and pass "
            'resume="all", which relays every row of the table.'
        )

    @property
    def _chosen(self) -> Columns:
        assert self._columns is not None
        return self._columns

    @property
    def _name(self) -> str:
        return quote_table(self.table)

    @property
    def _plain_name(self) -> str:
        return self.table.rpartition(".")[2]


def _bytes(value: Any) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    return str(value).encode()


def _text(value: Any) -> str | None:
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return None if value is None else str(value)


def _milliseconds(value: Any) -> int | None:
    """A number is milliseconds already; text is ISO 8601, in UTC if it names no zone. -1 for anything else.

    >>> _milliseconds("1970-01-01 00:00:01"), _milliseconds(5), _milliseconds(None), _milliseconds("soon")
    (1000, 5, None, -1)
    """
    if value is None or isinstance(value, int):
        return value
    try:
        at = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return -1
    return int((at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp() * 1000)
