"""A model of Postgres: transactions with ids, savepoints, locks on aggregates, and snapshots. Slow and obvious."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from semel.bridges.relay.snapshots import Snapshot


@dataclass(frozen=True)
class ModelRow:
    id: int
    xid: int
    """Of the top-level transaction, as `pg_current_xact_id()` gives it."""
    aggregate: int
    number: int
    """Counts the events of the aggregate from 1."""


@dataclass
class Transaction:
    xid: int | None = None
    """None until the first write."""
    highest_xid: int = 0
    rows: list[ModelRow] = field(default_factory=list[ModelRow])
    savepoints: list[int] = field(default_factory=list[int])
    """How many rows there were at each savepoint."""
    locked: set[int] = field(default_factory=set[int])


class Server:
    """Aggregates are locked by the transaction that writes their events, as an application does by their own row."""

    def __init__(self, rng: random.Random, aggregates: int = 4) -> None:
        self.rng = rng
        self.next_id = 1
        self.next_xid = 700
        self.latest_ended = 699
        self.committed: list[ModelRow] = []
        self.open: list[Transaction] = []
        self.numbers = dict.fromkeys(range(aggregates), 0)

    def step(self) -> None:
        """One random thing that a client does."""
        choice = self.rng.random()
        if choice < 0.2 or not self.open:
            self.open.append(Transaction())
            return
        transaction = self.rng.choice(self.open)
        if choice < 0.3:
            self._take_xid(transaction)  # a write to another table: the id comes early, the event late
        elif choice < 0.65:
            self._write(transaction)
        elif choice < 0.72:
            self._take_xid(transaction)
            transaction.highest_xid = self.next_xid  # a savepoint that writes has an id too, which is in no snapshot
            self.next_xid += 1
            transaction.savepoints.append(len(transaction.rows))
        elif choice < 0.79 and transaction.savepoints:
            kept = transaction.savepoints.pop()
            del transaction.rows[kept:]
        elif choice < 0.95:
            self._end(transaction, commits=True)
        else:
            self._end(transaction, commits=False)

    def finish(self) -> None:
        while self.open:
            self._end(self.open[0], commits=True)

    def snapshot(self) -> Snapshot:
        """`xmax` follows the latest id that has ended: transactions with higher ids may be open and are not listed."""
        xmax = self.latest_ended + 1
        running = sorted(one.xid for one in self.open if one.xid is not None and one.xid < xmax)
        return Snapshot(running[0] if running else xmax, xmax, tuple(running))

    def _take_xid(self, transaction: Transaction) -> int:
        if transaction.xid is None:
            transaction.xid = transaction.highest_xid = self.next_xid
            self.next_xid += 1
        return transaction.xid

    def _write(self, transaction: Transaction) -> None:
        free = [one for one in self.numbers if not any(one in other.locked for other in self.open)]
        aggregate = self.rng.choice([*free, *sorted(transaction.locked)] or [-1])
        if aggregate < 0:
            return  # it would wait for another transaction
        transaction.locked.add(aggregate)
        before = sum(row.aggregate == aggregate for row in transaction.rows)
        number = self.numbers[aggregate] + before + 1
        transaction.rows.append(ModelRow(self.next_id, self._take_xid(transaction), aggregate, number))
        self.next_id += 1  # ids of rows that are rolled back are never given out again

    def _end(self, transaction: Transaction, *, commits: bool) -> None:
        self.open.remove(transaction)
        self.latest_ended = max(self.latest_ended, transaction.highest_xid)
        if not commits:
            return
        for row in transaction.rows:
            self.numbers[row.aggregate] = max(self.numbers[row.aggregate], row.number)
        self.committed += transaction.rows
