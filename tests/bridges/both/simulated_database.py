"""A database in memory: what is committed, and the lock of the one row that matters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from semel.bridges.both.decision import Decision, StoredBatch
from semel.bridges.both.store import CommitLost, Row, Store, overtaken
from semel.errors import DatabaseError


@dataclass
class Tables:
    orders: frozenset[int] = frozenset()
    records: frozenset[tuple[str, int, StoredBatch]] = frozenset()
    claim: str | None = None
    decision: str | None = None


class Database:
    """What is committed, and the lock of the one row that matters."""

    def __init__(self) -> None:
        self.tables = Tables()
        self.committed: list[int] = []
        """Orders as they were committed."""
        self.locked_by: SimulatedStore | None = None


class SimulatedStore(Store):
    """Read committed, as a Postgres with one row lock. A lock that another holds is an error at once."""

    kind = "postgres"

    def __init__(self, database: Database, happen: Callable[[str], str]) -> None:
        self.database = database
        self._happen = happen
        self._orders: set[int] | None = None
        self._records: set[tuple[str, int, StoredBatch]] = set()
        self._changes: dict[str, str | None] = {}
        self._dropped_records: set[str] = set()
        self.is_dead = False

    place = "here"  # type: ignore[assignment]

    def check(self) -> None:
        self._alive()

    def make_tables(self, *, create: bool) -> None:
        pass

    def _alive(self, where: str = "a statement") -> None:
        self._happen(where)
        if self.is_dead:
            raise DatabaseError("The connection is gone.", is_transient=True)

    def insert(self, order: int) -> None:
        self._alive()
        assert self._orders is not None
        self._orders.add(order)

    def begin(self) -> None:
        self._alive()
        self._orders, self._records, self._changes, self._dropped_records = set(), set(), {}, set()

    def end_block(self) -> None:
        self._alive()

    def _lock(self) -> None:
        if self.database.locked_by not in (None, self):
            raise DatabaseError("Another transaction holds the row.", is_transient=True)
        self.database.locked_by = self

    def _apply(self) -> None:
        tables = self.database.tables
        assert self._orders is not None
        self.database.committed += sorted(self._orders)
        records = frozenset(r for r in tables.records | self._records if r[0] not in self._dropped_records)
        self.database.tables = replace(tables, orders=tables.orders | self._orders, records=records, **self._changes)
        self._release()

    def _release(self) -> None:
        self._orders = None
        if self.database.locked_by is self:
            self.database.locked_by = None

    def die(self) -> None:
        """The server notices that the connection is gone, and rolls back."""
        self.is_dead = True
        self._release()

    def commit(self) -> None:
        if self.is_dead:
            raise CommitLost("lost")
        match self._happen("database commit"):
            case "lost, done":
                self._apply()
                self.is_dead = True
                raise CommitLost("lost")
            case "lost, not done":
                self.die()
                raise CommitLost("lost")
            case "failed":
                self._release()
                raise DatabaseError("A constraint failed at the end.")
            case _:
                self._apply()

    def rollback(self, reason: BaseException | None) -> None:
        self._happen("rollback")
        self._release()

    def reopen(self) -> Store:
        if self._happen("reopen") == "failed":
            raise DatabaseError("No connection.", is_transient=True)
        return SimulatedStore(self.database, self._happen)

    def close(self) -> None:
        self._release()

    def look(self, name: str) -> Row | None:
        tables = self.database.tables
        if tables.claim is None:
            return None
        return Row(tables.claim, None if tables.decision is None else Decision.decode(tables.decision))

    def keep(self, decision_id: str, batches: Sequence[StoredBatch]) -> None:
        self._records = {(decision_id, number, batch) for number, batch in enumerate(batches)}

    def decide(self, name: str, token: str, decision: Decision) -> None:
        self._alive()
        self._lock()
        tables = self.database.tables
        if tables.claim != token or tables.decision is not None:
            raise overtaken(name)
        self._changes = {"decision": decision.encode()}
        self._happen("decision written")

    @contextmanager
    def _own(self) -> Iterator[None]:
        self.begin()
        try:
            self._lock()
            yield
        except BaseException:
            self._release()
            raise
        self.commit()

    def claim(self, name: str, token: str) -> Decision | None:
        with self._own():
            self._changes = {"claim": token}
            row = self.look(name)
        return None if row is None else row.decision

    def look_locked(self, name: str) -> Row | None:
        with self._own():
            return self.look(name)

    def batches(self, decision_id: str) -> list[StoredBatch]:
        found = sorted((number, batch) for kept, number, batch in self.database.tables.records if kept == decision_id)
        return [batch for _, batch in found]

    def decide_again(self, name: str, token: str, old: Decision, new: Decision) -> None:
        with self._own():
            tables = self.database.tables
            if tables.claim != token or tables.decision != old.encode():
                raise overtaken(name)
            self._changes = {"decision": new.encode()}

    def forget(self, name: str, decision: Decision) -> None:
        with self._own():
            if self.database.tables.decision == decision.encode():
                self._changes = {"decision": None}
                self._dropped_records = {decision.id}

    def _execute(self, statement: str, *values: object) -> Any:
        raise NotImplementedError

    _execute_many = _has_tables = _begin_own = _execute  # type: ignore[assignment]
