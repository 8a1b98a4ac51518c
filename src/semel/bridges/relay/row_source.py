"""What a relay asks of a database: rows in their order, and where it stands after them.

The outbox tables of Postgres and SQLite are read in this way, and changes by capture: routing, progress and everything
about Kafka know only what is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from semel.bridges.relay.routes import Routed
from semel.bridges.relay.waking import Clock, Waker

Position = Mapping[str, Any]
"""How far a source was relayed, in its own terms, as it goes into the progress record. It must be JSON."""

Identity = Mapping[str, Any]
"""What a position belongs to. In another database or table the same position means nothing."""

PORTION_BYTES_MAX: Final = 8 * 1024 * 1024
"""How much of a table is in memory at a time, unless a single row is larger."""


@dataclass(frozen=True, slots=True)
class Portion:
    """The next rows, for one Kafka transaction or several.

    Columns of `rows`: `id` (int64), `value` and `key` (binary), `headers` (JSON text), `timestamp` (milliseconds,
    int64), and one of text for each column that the topic is made of, under its own name after "topic:".
    """

    rows: pa.Table
    position_at: Callable[[int], Position]
    """Where the source stands when so many of the rows are done."""
    is_idle: bool = False
    """Nothing is due now."""
    has_more: bool = False
    """More rows were due when these were read, so that they may be read while these are written."""

    @property
    def end(self) -> Position:
        return self.position_at(self.rows.num_rows)

    def events(self, count: int) -> int:
        """How many of the first `count` rows are the user's own."""
        return count

    def finish(self, routed: Routed, count: int) -> tuple[Routed, Position]:
        """The first `count` rows as they are published, and where the source stands after them."""
        return routed, self.position_at(count)


def nothing_due(position: Position, *, is_idle: bool = True) -> Portion:
    return Portion(pa.table({}), lambda _: position, is_idle)


class RowSource(ABC):
    """One connection, used by one thread at a time. It opens when it is first used, and again after it was lost."""

    table: str
    """As the user has written it."""
    heartbeat_s: float | None = None
    """How often a position is written that has moved though no row came. None for a source that needs none."""

    @abstractmethod
    def prepare(self) -> Identity:
        """Check everything that can be wrong with the database and the table. Called again after each lost
        connection, since the next one may lead to another server."""

    @abstractmethod
    def is_behind(self, position: Position) -> bool:
        """Whether the database stands before this position: it was put back to an earlier state."""

    @abstractmethod
    def next(self, position: Position | None, rows_max: int) -> Portion:
        """The rows after `position`, at most `rows_max` of them; from the beginning with None."""

    @abstractmethod
    def delete_done(self, position: Position) -> int:
        """Delete rows that were relayed according to `position`, and no others. Returns how many."""

    @abstractmethod
    def advice_after_restore(self, position: Position) -> str:
        """What to do with the table if it comes from a backup, as sentences."""

    def make_waker(self) -> Waker:
        """What tells of new rows before it is time to look for them."""
        return Clock()

    def committed(self, position: Position) -> None:  # noqa: B027
        """Everything up to `position` is in Kafka."""

    @abstractmethod
    def close(self) -> None: ...


def count_fitting(sizes: npt.NDArray[np.int64], rows_max: int, bytes_max: int = PORTION_BYTES_MAX) -> int:
    """How many rows from the beginning fit into one portion; at least one.

    >>> count_fitting(np.array([10, 10, 10]), 100, bytes_max=25), count_fitting(np.array([99, 1]), 100, bytes_max=25)
    (2, 1)
    """
    within = int(np.searchsorted(np.cumsum(sizes), bytes_max, side="right"))
    return max(1, min(within, rows_max, len(sizes)))
