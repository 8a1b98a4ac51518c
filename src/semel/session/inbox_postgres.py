"""An inbox's positions in a Postgres database, through the reader's own DB-API connection to it, such as psycopg's.

Nothing of a driver is imported here: `%s` for parameters and a transaction that begins by itself, as PEP 249 has it,
are all that is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Protocol

from semel.client.partitions import TopicPartition
from semel.errors import ConfigError, InvalidState
from semel.session.inbox_positions import BEGIN_BLOCK, END_BLOCK, ended_in_block, overtaken

_MAKE: Final = (
    "CREATE TABLE IF NOT EXISTS semel_inbox (inbox text NOT NULL, topic text NOT NULL, partition integer NOT NULL, "
    "next_offset bigint NOT NULL, PRIMARY KEY (inbox, topic, partition))"
)
_LOCK: Final = 0x5E6E1
"""Of two that make the table at the same time, the second waits: IF NOT EXISTS alone fails for one of them."""


class PostgresConnection(Protocol):
    """What PEP 249 says of a connection, and no more."""

    def cursor(self) -> Any: ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...


class PostgresPositions:
    """Positions in a table `semel_inbox`, which is made if it is not there.

    >>> with Inbox(PostgresPositions(connection), ...) as inbox:  # doctest: +SKIP
    ...     for delivery in inbox:
    ...         with delivery as connection:
    ...             connection.execute(...)
    """

    def __init__(self, connection: PostgresConnection) -> None:
        self._connection = connection
        with self.transaction():
            # Where it is there, no right to make one is needed.
            if self._one("SELECT to_regclass('semel_inbox')") is None:
                self._execute("SELECT pg_advisory_xact_lock(%s)", _LOCK)
                self._execute(_MAKE)

    def load(self, inbox: str) -> dict[TopicPartition, int]:
        with self.transaction():
            rows = self._execute("SELECT topic, partition, next_offset FROM semel_inbox WHERE inbox = %s", inbox)
            return {TopicPartition(topic, partition): offset for topic, partition, offset in rows.fetchall()}

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        self._begin()
        try:
            self._execute(BEGIN_BLOCK)
            yield self._connection
            self._end_block()
        except BaseException as error:
            self._roll_back(error)
            raise
        self._connection.commit()

    def move(self, handle: Any, inbox: str, moves: Mapping[TopicPartition, tuple[int, int]]) -> None:
        # In one order everywhere: two readers that move the same partitions must not wait for each other.
        for (topic, partition), (start, end) in sorted(moves.items()):
            # Whoever is second waits here until the first has committed, and then finds the row moved.
            moved = self._execute(
                "UPDATE semel_inbox SET next_offset = %s "
                "WHERE inbox = %s AND topic = %s AND partition = %s AND next_offset = %s",
                *(end, inbox, topic, partition, start),
            ).rowcount
            if not moved:
                moved = self._execute(
                    "INSERT INTO semel_inbox VALUES (%s, %s, %s, %s) ON CONFLICT DO NOTHING",
                    *(inbox, topic, partition, end),
                ).rowcount
            if not moved:
                raise overtaken(inbox, topic, partition, start)

    # -- the transaction -------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if getattr(self._connection, "autocommit", False):
            raise ConfigError(
                "The connection commits every statement by itself (autocommit), so results and position could not be "
                "kept together; nothing was read. Give the inbox a connection with autocommit off."
            )
        if self._one("SELECT txid_current_if_assigned()") is not None:
            raise InvalidState("The connection has a transaction open already: commit it before the next delivery.")
        self._connection.rollback()  # a query alone opens one too, and might see the database as it was then

    def _end_block(self) -> None:
        try:
            self._execute(END_BLOCK)
        except Exception as error:
            raise ended_in_block() from error

    def _roll_back(self, reason: BaseException) -> None:
        try:
            self._connection.rollback()
        except Exception as second:  # the connection is gone, and the server rolls back by itself
            reason.add_note(f"The rollback was not confirmed ({second}).")

    # -- statements ------------------------------------------------------------------------------------------------

    def _execute(self, statement: str, *values: object) -> Any:
        cursor = self._connection.cursor()
        cursor.execute(statement, values)
        return cursor

    def _one(self, query: str, *values: object) -> Any:
        return self._execute(query, *values).fetchone()[0]
