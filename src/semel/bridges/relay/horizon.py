"""Which rows of an outbox in Postgres are due, and in which order. Pure: the decision, without a database.

Ids are given out when a row is written, and rows become visible when their transaction commits: a relay that goes on
from the highest id it has seen loses every row that commits later with a lower id. A bound on transaction ids (`xmin`
of a snapshot) does not lose rows, but holds all of them back while one transaction is open anywhere.

So the horizon is a pair of snapshots. Due are the rows whose transaction had ended in the later one and had not in the
earlier one. The next pair begins where this one ended, so each transaction is in exactly one interval. Inside an
interval rows go by id. A transaction that wrote after another one had committed has the higher ids, and is in the same
interval or in a later one, so the events of an aggregate keep their order. By transaction id they would not: a
transaction may get its id early and write late.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Self

from semel.bridges.relay.snapshots import NOTHING, Snapshot

IN_PROGRESS_MAX: Final = 10_000
"""A snapshot with more open transactions is not used, so that the progress record stays below half a megabyte.

It cannot be shortened. A cut at a lower id would show a transaction without another one that it had waited for, and
turn their events around.
"""


@dataclass(frozen=True, slots=True)
class Horizon:
    """How far a relay has come. Between two intervals `until` is None; inside of one, rows up to `after` are done."""

    relayed: Snapshot = NOTHING
    """Rows of all transactions that it sees are done."""
    until: Snapshot | None = None
    """Where the interval that is being relayed ends."""
    after: int | None = None
    """The id of the last row of that interval that is done."""

    def encode(self) -> dict[str, Any]:
        return {"relayed": str(self.relayed), "until": self.until and str(self.until), "after": self.after}

    @classmethod
    def decode(cls, position: dict[str, Any]) -> Self:
        """
        >>> Horizon.decode(Horizon(Snapshot(3, 5), Snapshot(5, 9, (5,)), 17).encode()).until
        Snapshot(xmin=5, xmax=9, in_progress=(5,))
        """
        until = position.get("until")
        return cls(Snapshot.parse(position["relayed"]), until and Snapshot.parse(until), position.get("after"))

    @property
    def newest(self) -> Snapshot:
        """The latest snapshot that it has seen. A server that stands before it is not the same, or was put back."""
        return self.relayed if self.until is None else self.until

    def is_done(self, xid: int, row_id: int) -> bool:
        """Whether a row that its transaction has committed was relayed. Only such rows may be deleted."""
        if self.relayed.sees(xid):
            return True
        return self.until is not None and self.until.sees(xid) and self.after is not None and row_id <= self.after


@dataclass(frozen=True, slots=True)
class Interval:
    """The rows to relay next, in the order of their ids."""

    since: Snapshot
    until: Snapshot
    after: int | None

    @property
    def ended(self) -> list[int]:
        """The transactions that were open at the beginning of the interval and had ended when it ends.

        Together with the ids from `since.xmax` to `until.xmax` these are all that can be due, which an index finds.
        """
        return [xid for xid in self.since.in_progress if self.until.sees(xid)]

    def is_due(self, xid: int, row_id: int) -> bool:
        """
        >>> interval = Interval(Snapshot.parse("10:12:10"), Snapshot.parse("11:14:12"), None)
        >>> [xid for xid in range(9, 15) if interval.is_due(xid, 1)]
        [10, 13]
        """
        is_new = self.until.sees(xid) and not self.since.sees(xid)
        return is_new and (self.after is None or row_id > self.after)

    @property
    def may_hold_rows(self) -> bool:
        """Whether any transaction has ended in it."""
        return bool(self.ended) or self.until.xmax > self.since.xmax


def decide_interval(horizon: Horizon, now: Snapshot) -> Interval:
    """An interval that was begun is finished first, with the end that it had: its rows have an order among them."""
    return Interval(horizon.relayed, now if horizon.until is None else horizon.until, horizon.after)


def after_row(interval: Interval, row_id: int) -> Horizon:
    """Where a relay stands when all due rows up to this one are done."""
    return Horizon(interval.since, interval.until, row_id)


def after_interval(interval: Interval) -> Horizon:
    return Horizon(interval.until)
