"""SQLite, by the user's own `sqlite3` connection."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Final

from semel.bridges.both.store import BEGIN_BLOCK, CommitLost, Store
from semel.bridges.positions import Result
from semel.bridges.sqlite import check_atomic
from semel.errors import ConfigError, InvalidState

_BUSY_S: Final = 30.0
_FULL: Final = 2


class SqliteStore(Store):
    """BEGIN and COMMIT are sent as statements, which does the same whatever the connection's mode is."""

    kind = "sqlite"

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @property
    def place(self) -> str:
        return next((path for _, name, path in self._execute("PRAGMA database_list").rows if name == "main"), "")

    def check(self) -> None:
        connection = self._connection
        if getattr(connection, "autocommit", None) is False:
            raise ConfigError(
                "This connection was opened with autocommit=False, where a transaction is open all the time, so that "
                "nobody can tell what of it belongs to the block. Open it without that argument. Nothing was written."
            )
        if connection.in_transaction:
            raise InvalidState(
                "The connection has a transaction open already; nothing was written. Commit it, or roll it back, "
                "before the block."
            )
        if not self.place:
            raise ConfigError("semel.both needs a database in a file: one in memory is gone with the process.")
        (level,) = self._execute("PRAGMA synchronous").rows[0]
        if level < _FULL:
            raise ConfigError(
                "With this PRAGMA synchronous a loss of power can undo a transaction that the database has committed, "
                "and its records would be in Kafka alone. Set PRAGMA synchronous=FULL on this connection."
            )

        check_atomic(connection)

    def end_block(self) -> None:
        super().end_block()
        check_atomic(self._connection)  # a file may have been attached in the block

    def begin(self) -> None:
        # Every block writes in the end; a transaction that turns into a writer later may be refused.
        self._begin_own()
        self._execute(BEGIN_BLOCK)

    def _begin_own(self) -> None:
        self._execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        try:
            self._execute("COMMIT")
        except sqlite3.Error as error:
            if self._connection.in_transaction:
                raise  # SQLite is sure that it has not committed
            raise CommitLost(f"SQLite could not tell how a commit ended: {error}") from error

    def rollback(self, reason: BaseException | None) -> None:
        try:
            if self._connection.in_transaction:
                self._execute("ROLLBACK")
        except sqlite3.Error as error:
            if reason is None:
                raise
            reason.add_note(f"The rollback was not confirmed ({error}).")

    def reopen(self) -> Store:
        return SqliteStore(sqlite3.connect(self.place, timeout=_BUSY_S))

    def close(self) -> None:
        self._connection.close()

    def _has_tables(self) -> bool:
        found = self._execute(
            "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name IN ('semel_both', 'semel_both_records')"
        ).rows
        return found == [(2,)]

    def _cursor(self) -> sqlite3.Cursor:
        cursor = self._connection.cursor()
        cursor.row_factory = None
        return cursor

    def _execute(self, statement: str, *values: object) -> Result:
        cursor = self._cursor()
        cursor.execute(statement, {str(number): value for number, value in enumerate(values, 1)})
        return Result(cursor.fetchall(), cursor.rowcount)

    def _execute_many(self, statement: str, rows: Sequence[Sequence[object]]) -> None:
        self._cursor().executemany(
            statement, [{str(number): value for number, value in enumerate(row, 1)} for row in rows]
        )
