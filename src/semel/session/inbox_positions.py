"""Where an inbox stands, kept in the reader's own database, in the same transaction as its results.

One row for each partition, moved on only from the place where the reader believes it to be: of two readers of one name,
or of one that comes back after a pause, the second finds the row moved, and its results are rolled back with it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Protocol

from semel.client.partitions import TopicPartition
from semel.errors import InboxOvertaken, InvalidState

BEGIN_BLOCK: Final = "SAVEPOINT semel_delivery"
END_BLOCK: Final = "RELEASE SAVEPOINT semel_delivery"
"""Fails if the transaction that the block began in is not there any more, or cannot be committed."""


class PositionStore(Protocol):
    """A database that an inbox can live in. What `transaction` gives is for the user's own statements."""

    def load(self, inbox: str) -> dict[TopicPartition, int]:
        """The next offset of every partition that has one."""
        ...

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        """A database transaction: committed at the end of the block, rolled back if it raises."""
        yield

    def move(self, handle: Any, inbox: str, moves: Mapping[TopicPartition, tuple[int, int]]) -> None:
        """Inside of a transaction, each partition from one offset to another; `InboxOvertaken` if it is not there."""
        ...


def overtaken(inbox: str, topic: str, partition: int, start: int) -> InboxOvertaken:
    return InboxOvertaken(
        f"Another reader of inbox {inbox!r} has gone on in {topic}-{partition} from offset {start}, so the results of "
        "this delivery were rolled back and nothing is repeated. Let one of them read at a time, or give each a name "
        "of its own."
    )


def ended_in_block() -> InvalidState:
    return InvalidState(
        "The transaction of this delivery could not be committed whole: a statement in its block failed and was passed "
        "over, or the block called commit() or rollback() itself. What was not committed there is rolled back, and the "
        "inbox goes on from the position in the database. Leave the end of the transaction to the end of the block."
    )


class SqlitePositions:
    """Positions in a table `semel_inbox` of a SQLite database, which is made if it is not there.

    >>> store = SqlitePositions(sqlite3.connect(":memory:"))
    >>> with store.transaction() as connection:
    ...     store.move(connection, "billing", {TopicPartition("orders", 0): (0, 5)})
    >>> store.load("billing")
    {TopicPartition(topic='orders', partition=0): 5}
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        with connection:
            connection.execute(
                "CREATE TABLE IF NOT EXISTS semel_inbox (inbox TEXT NOT NULL, topic TEXT NOT NULL, "
                "partition INTEGER NOT NULL, next_offset INTEGER NOT NULL, PRIMARY KEY (inbox, topic, partition))"
            )

    def load(self, inbox: str) -> dict[TopicPartition, int]:
        rows = self._connection.execute(
            "SELECT topic, partition, next_offset FROM semel_inbox WHERE inbox = ?", (inbox,)
        )
        return {TopicPartition(topic, partition): offset for topic, partition, offset in rows}

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        connection = self._connection
        if connection.in_transaction:
            raise InvalidState("The connection has a transaction open already: commit it before the next delivery.")
        connection.execute("BEGIN IMMEDIATE")
        try:
            connection.execute(BEGIN_BLOCK)
            yield connection
            _end_block(connection)
        except BaseException:
            connection.rollback()
            raise
        connection.commit()

    def move(self, handle: sqlite3.Connection, inbox: str, moves: Mapping[TopicPartition, tuple[int, int]]) -> None:
        for (topic, partition), (start, end) in moves.items():
            moved = handle.execute(
                "UPDATE semel_inbox SET next_offset = ? "
                "WHERE inbox = ? AND topic = ? AND partition = ? AND next_offset = ?",
                (end, inbox, topic, partition, start),
            ).rowcount
            if not moved:
                moved = handle.execute(
                    "INSERT OR IGNORE INTO semel_inbox VALUES (?, ?, ?, ?)", (inbox, topic, partition, end)
                ).rowcount
            if not moved:
                raise overtaken(inbox, topic, partition, start)


def _end_block(connection: sqlite3.Connection) -> None:
    try:
        connection.execute(END_BLOCK)
    except sqlite3.OperationalError as error:
        raise ended_in_block() from error
