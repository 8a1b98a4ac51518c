"""The database side: decisions and records in the user's own database, in the user's own transactions.

One row for each name. `claim` says which producer may write a decision: a new owner puts its own token there, after
which none of an earlier owner can appear. `decision` is there from the commit of the database until Kafka has confirmed
its own. The row's lock puts all of that in order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from semel.bridges.both.decision import Decision, StoredBatch
from semel.bridges.both.table_sql import Kind, both_table_sql, statements
from semel.bridges.positions import Result
from semel.errors import ConfigError, DatabaseUnreachable, InvalidState, TransactionAborted

BEGIN_BLOCK: Final = "SAVEPOINT semel_both"
END_BLOCK: Final = "RELEASE SAVEPOINT semel_both"
"""Fails if the transaction that the block began in is not there any more, or cannot be committed."""


class Row(NamedTuple):
    """The row of a name."""

    claim: str
    decision: Decision | None


class CommitLost(DatabaseUnreachable):
    """Whether the database has committed must be looked up."""


class Store(ABC):
    """A connection of the user's, and the tables behind it."""

    kind: Kind
    lock_row: str = ""
    """What makes a SELECT wait until nobody else is changing the row."""

    # -- what each database does in its own way --------------------------------------------------------------------

    @property
    @abstractmethod
    def place(self) -> str:
        """Which database it is, as far as the connection tells."""

    @abstractmethod
    def check(self) -> None:
        """Raise if a block cannot begin on this connection as it is."""

    @abstractmethod
    def begin(self) -> None:
        """Open the transaction of a block."""

    @abstractmethod
    def commit(self) -> None:
        """Raises `CommitLost` if it may have been carried out all the same; after other errors it was not."""

    @abstractmethod
    def rollback(self, reason: BaseException | None) -> None:
        """Never raises because of a lost connection: the server rolls back by itself then."""

    @abstractmethod
    def reopen(self) -> Store:
        """The same database by a connection of its own, which must be closed."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _execute(self, statement: str, *values: object) -> Result:
        """Parameters are written `$1`, `$2` and so on, each once and in their order."""

    @abstractmethod
    def _execute_many(self, statement: str, rows: Sequence[Sequence[object]]) -> None: ...

    @abstractmethod
    def _has_tables(self) -> bool: ...

    @abstractmethod
    def _begin_own(self) -> None:
        """Open a transaction for what is not the user's."""

    def _take_turn(self) -> None:  # noqa: B027
        """Let one program at a time make tables."""

    def _before_commit(self) -> None:  # noqa: B027
        """Whatever makes sure that a committed transaction survives a crash of the server."""

    # -- tables ----------------------------------------------------------------------------------------------------

    def make_tables(self, *, create: bool) -> None:
        """Make the tables if they are not there, or say how."""
        with self._own_transaction():
            if self._has_tables():
                return
            if not create:
                raise ConfigError(
                    "The database has no tables for semel.both; nothing was written. Run the following once, or pass "
                    f"create_tables=True:\n{both_table_sql(self.kind)}"
                )
            self._take_turn()
            for statement in statements(self.kind):
                self._execute(statement.replace("CREATE TABLE", "CREATE TABLE IF NOT EXISTS"))

    # -- inside the user's transaction -----------------------------------------------------------------------------

    def look(self, name: str) -> Row | None:
        return self._row(name, "")

    def keep(self, decision_id: str, batches: Sequence[StoredBatch]) -> None:
        """The records, for the case that Kafka aborts them."""
        rows = [(decision_id, number, *batch) for number, batch in enumerate(batches)]
        self._execute_many(
            "INSERT INTO semel_both_records (decision, number, topic, partition, record_count, batch) "
            "VALUES ($1, $2, $3, $4, $5, $6)",
            rows,
        )

    def decide(self, name: str, token: str, decision: Decision) -> None:
        """Write the decision, unless another owner has claimed the name since."""
        self._before_commit()
        decided = self._execute(
            "UPDATE semel_both SET decision = $1 WHERE name = $2 AND claim = $3 AND decision IS NULL",
            *(decision.encode(), name, token),
        ).changed
        if not decided:
            raise overtaken(name)

    def end_block(self) -> None:
        """Raise if the transaction that was begun cannot be committed whole."""
        try:
            self._execute(END_BLOCK)
        except Exception as error:
            raise InvalidState(
                "The transaction of this block cannot be committed whole: a statement in it failed and was passed "
                "over, or the block called commit(), rollback() or executescript() itself. What was not committed "
                "there is rolled back, and no record is in Kafka. Leave the end of the transaction to the end of "
                "the block."
            ) from error

    # -- transactions of their own ---------------------------------------------------------------------------------

    def claim(self, name: str, token: str) -> Decision | None:
        """Let nobody but this token decide from now on; returns the decision that is not finished, if any.

        Waits for a transaction that is writing a decision: until it has ended nobody knows whether there is one.
        """
        with self._own_transaction():
            self._execute(
                "INSERT INTO semel_both (name, claim) VALUES ($1, $2) "
                "ON CONFLICT (name) DO UPDATE SET claim = excluded.claim",
                *(name, token),
            )
            found = self._row(name, "")
        return None if found is None else found.decision

    def look_locked(self, name: str) -> Row | None:
        """The row as it is when every transaction that was changing it has ended."""
        with self._own_transaction():
            return self._row(name, self.lock_row)

    def unfinished(self) -> list[str]:
        """The names with a decision that Kafka has not confirmed."""
        with self._own_transaction():
            rows = self._execute("SELECT name FROM semel_both WHERE decision IS NOT NULL ORDER BY name").rows
        return [_text(name) for (name,) in rows]

    def batches(self, decision_id: str) -> list[StoredBatch]:
        with self._own_transaction():
            rows = self._execute(
                "SELECT topic, partition, record_count, batch FROM semel_both_records WHERE decision = $1 "
                "ORDER BY number",
                decision_id,
            ).rows
        return [StoredBatch(_text(topic), partition, count, bytes(data)) for topic, partition, count, data in rows]

    def decide_again(self, name: str, token: str, old: Decision, new: Decision) -> None:
        """The records of a decision are in another Kafka transaction now."""
        with self._own_transaction():
            self._before_commit()
            changed = self._execute(
                "UPDATE semel_both SET decision = $1 WHERE name = $2 AND claim = $3 AND decision = $4",
                *(new.encode(), name, token, old.encode()),
            ).changed
            if not changed:
                raise overtaken(name)

    def forget(self, name: str, decision: Decision) -> None:
        """Kafka has confirmed: delete the decision and its records. Does nothing if somebody else has done so."""
        with self._own_transaction():
            changed = self._execute(
                "UPDATE semel_both SET decision = NULL WHERE name = $1 AND decision = $2", name, decision.encode()
            ).changed
            if changed:
                self._execute("DELETE FROM semel_both_records WHERE decision = $1", decision.id)

    def _row(self, name: str, lock: str) -> Row | None:
        rows = self._execute(f"SELECT claim, decision FROM semel_both WHERE name = $1 {lock}", name).rows
        if not rows:
            return None
        claim, decision = rows[0]
        return Row(_text(claim), None if decision is None else Decision.decode(_text(decision)))

    @contextmanager
    def _own_transaction(self) -> Iterator[None]:
        self._begin_own()
        try:
            yield
        except BaseException as error:
            self.rollback(error)
            raise
        self.commit()


def _text(given: Any) -> str:
    """A connection may be told to return text as bytes."""
    return given.decode() if isinstance(given, bytes) else given


def overtaken(name: str) -> TransactionAborted:
    return TransactionAborted(
        f"Another program has claimed the name {name!r} since this block began, so the database was rolled back and "
        "no record is in Kafka. Let one program use a name at a time; if this is the one, run the block again."
    )
