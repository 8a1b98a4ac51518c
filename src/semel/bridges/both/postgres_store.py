"""Postgres, by the user's own psycopg 3 connection."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import psycopg
from psycopg.conninfo import make_conninfo
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row

from semel.bridges.both.store import BEGIN_BLOCK, CommitLost, Store
from semel.bridges.positions import Result
from semel.errors import DatabaseError, InvalidState

_LOCK_S: Final = 30
"""How long to wait for a transaction that may be writing a decision."""
_PARAMETER: Final = re.compile(r"\$\d+")
_TAKE_TURN: Final = f"SELECT pg_advisory_xact_lock({0x5E6E2})"
_DURABLE: Final = (
    "SELECT set_config('synchronous_commit', CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on' "
    "ELSE current_setting('synchronous_commit') END, true)"
)


class PostgresStore(Store):
    """Works with autocommit on and off: the block has a transaction of its own in either case."""

    kind = "postgres"
    lock_row = "FOR UPDATE"

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        # Kept, because a connection that is gone does not tell any more where it led to.
        self._address: dict[str, str] = {}
        self._dsn = ""
        if not connection.closed:
            info = connection.info
            known = {**info.get_parameters(), "password": info.password}
            self._address = {name: value for name, value in known.items() if value and name != "connect_timeout"}
            self._dsn = info.dsn

    @property
    def place(self) -> str:
        return self._dsn

    def check(self) -> None:
        if self._connection.closed:
            raise InvalidState("The connection is closed; nothing was written. Open a new one.")
        if self._connection.info.transaction_status != TransactionStatus.IDLE:
            raise InvalidState(
                "The connection has a transaction open already (a SELECT opens one too); nothing was written. Commit "
                "it, or roll it back, before the block."
            )
        self._check_no_pipeline()

    def _check_no_pipeline(self) -> None:
        if self._connection.pgconn.pipeline_status != PipelineStatus.OFF:
            raise InvalidState(
                "The connection is in pipeline mode, where a commit returns before the server has carried it out, so "
                "nothing was committed. Begin and end a pipeline inside of the block."
            )

    def begin(self) -> None:
        self._open()
        self._execute(BEGIN_BLOCK)

    def _open(self) -> None:
        if self._connection.autocommit:
            self._execute("BEGIN")  # with autocommit off, psycopg does it before the first statement

    def _begin_own(self) -> None:
        self._open()
        # What another transaction has just committed must be seen, whatever the user's own transactions ask for.
        self._execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        # Records that row-level security hides from this user are an error then, and not forgotten.
        self._execute("SET LOCAL row_security = off")
        self._execute(f"SET LOCAL lock_timeout = '{_LOCK_S}s'")

    def _take_turn(self) -> None:
        self._execute(_TAKE_TURN)  # of two at the same time IF NOT EXISTS alone fails for one

    def _before_commit(self) -> None:
        # Where commits need not be durable, a crash of the server could undo one whose records are in Kafka.
        self._execute(_DURABLE)

    def commit(self) -> None:
        connection = self._connection
        self._check_no_pipeline()
        try:
            connection.commit()
        except BaseException as error:
            # Where the connection is still there, the server has said that it rolled back, such as for a constraint
            # that is checked at the end.
            if connection.closed or connection.info.transaction_status != TransactionStatus.IDLE:
                raise CommitLost(f"The answer to a commit was lost: {error}") from error
            if not isinstance(error, psycopg.Error):  # such as Ctrl-C, after which psycopg may have waited for the end
                raise CommitLost("A commit was interrupted.") from error
            raise

    def rollback(self, reason: BaseException | None) -> None:
        try:
            self._connection.rollback()
        except psycopg.Error as error:
            if reason is None:
                raise
            reason.add_note(f"The rollback was not confirmed ({error}); the server rolls back by itself.")

    def reopen(self) -> Store:
        return PostgresStore(psycopg.connect(make_conninfo(connect_timeout=_LOCK_S, **self._address)))

    def close(self) -> None:
        self._connection.close()

    def _has_tables(self) -> bool:
        found = self._execute(
            "SELECT to_regclass('semel_both') IS NOT NULL AND to_regclass('semel_both_records') IS NOT NULL"
        ).rows
        return found == [(True,)]

    def _execute(self, statement: str, *values: object) -> Result:
        with psycopg.Cursor(self._connection, row_factory=tuple_row) as cursor:
            try:
                cursor.execute(_PARAMETER.sub("%s", statement).encode(), values or None)
            except psycopg.errors.LockNotAvailable as error:
                raise DatabaseError(
                    f"Another transaction holds the row of this name in semel_both for longer than {_LOCK_S} s, so "
                    "whether it will commit is not known. Nothing was changed. Most likely its program hangs: end it, "
                    "or its session with pg_terminate_backend(), and try again.",
                    sqlstate=error.sqlstate,
                    is_transient=True,
                ) from error
            return Result([] if cursor.description is None else cursor.fetchall(), cursor.rowcount)

    def _execute_many(self, statement: str, rows: Sequence[Sequence[object]]) -> None:
        with psycopg.Cursor(self._connection) as cursor:
            cursor.executemany(_PARAMETER.sub("%s", statement).encode(), rows)
