"""Where an inbox stands, kept in the reader's own database, in the same transaction as its results.

One row for each partition, moved on only from the place where the reader believes it to be: of two readers of one name,
or of one that comes back after a pause, the second finds the row moved, and its results are rolled back with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, Protocol

from semel.client.partitions import TopicPartition
from semel.errors import ConfigError, InboxOvertaken, InvalidState

BEGIN_BLOCK: Final = "SAVEPOINT semel_delivery"
END_BLOCK: Final = "RELEASE SAVEPOINT semel_delivery"
"""Fails if the transaction that the block began in is not there any more, or cannot be committed."""


class Result(NamedTuple):
    """What a statement gave: the rows of a query, or how many rows it changed."""

    rows: list[tuple[Any, ...]]
    changed: int


class Position(NamedTuple):
    """The next offset to read, and of which topic it is; None where that is not known (Kafka before 2.8)."""

    next_offset: int
    topic_id: str | None = None


Moves = Mapping[TopicPartition, tuple[Position, Position]]
"""From where the reader believes each partition to be, to where it is then."""


class PositionStore(Protocol):
    """A database that an inbox can live in. What `transaction` gives is for the user's own statements."""

    def load(self, inbox: str) -> dict[TopicPartition, Position]:
        """The position of every partition that has one."""
        ...

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        """A database transaction: committed at the end of the block, rolled back if it raises."""
        yield

    def move(self, handle: Any, inbox: str, moves: Moves) -> None:
        """Inside of a transaction, each partition from one position to another; `InboxOvertaken` if it is not there."""
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


def run_key(name: str) -> str:
    """Where the ledger has a pipeline of `semel.run(to=...)`.

    None of Spark's has it: their names hold no `/`, and a job's is `name/job_id`.
    """
    return f"/run/{name}"


class SqlPositions:
    """Positions in a table `semel_inbox`. Every database gives `_execute` and `transaction` in its own way."""

    def _execute(self, statement: str, *values: object) -> Result:
        """Parameters are written `$1`, `$2` and so on, each once and in their order."""
        raise NotImplementedError

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        raise NotImplementedError
        yield

    def _check_no_run(self, inbox: str) -> None:
        """Raise if the positions of this name are those of `semel.run(to=...)`, in a database that has its ledger."""
        if self._execute("SELECT 1 FROM semel_ledger WHERE key = $1", run_key(inbox)).rows:
            raise ConfigError(
                f"The name {inbox!r} is used by semel.run(to=...) in this database, and both would share one position: "
                "each would lack what the other has read. Nothing was read. Give the inbox another name=."
            )

    def load(self, inbox: str) -> dict[TopicPartition, Position]:
        rows = self._execute(
            "SELECT topic, partition, next_offset, topic_id FROM semel_inbox WHERE inbox = $1", inbox
        ).rows
        return {
            TopicPartition(topic, partition): Position(offset, topic_id) for topic, partition, offset, topic_id in rows
        }

    def move(self, handle: Any, inbox: str, moves: Moves) -> None:
        # In one order everywhere: two readers that move the same partitions must not wait for each other.
        for (topic, partition), (start, end) in sorted(moves.items()):
            # The second of two readers waits here until the first has committed, and then finds the row moved.
            moved = self._execute(
                "UPDATE semel_inbox SET next_offset = $1, topic_id = $2 WHERE inbox = $3 AND topic = $4 "
                "AND partition = $5 AND next_offset = $6 AND coalesce(topic_id, '') = coalesce($7, '')",
                *(*end, inbox, topic, partition, *start),
            ).changed
            if not moved:
                moved = self._execute(
                    "INSERT INTO semel_inbox (inbox, topic, partition, next_offset, topic_id) "
                    "VALUES ($1, $2, $3, $4, $5) ON CONFLICT DO NOTHING",
                    *(inbox, topic, partition, *end),
                ).changed
            if not moved:
                raise overtaken(inbox, topic, partition, start.next_offset)
