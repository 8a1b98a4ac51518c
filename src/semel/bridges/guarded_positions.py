"""A run's positions in its database, guarded: by the epoch of its owner, and against a database that has changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from semel.bridges.database import HOME, POSITIONS, Database
from semel.bridges.failpoints import reach
from semel.bridges.positions import Moves, Position
from semel.bridges.retries import LOG
from semel.bridges.run_owner import confirm
from semel.bridges.starting_point import describe_ahead
from semel.client.partitions import TopicPartition
from semel.errors import DatabaseError


class GuardedPositions:
    """The `PositionStore` of one run. It outlives connections, so it notices a database that is not the same."""

    def __init__(self, database: Database, name: str, *, epoch: int, home: str) -> None:
        self._database = database
        self._name = name
        self._epoch = epoch
        self._home = home
        self._moving: dict[TopicPartition, int] = {}
        self.known: dict[TopicPartition, int] = {}
        """The next offsets that this run has seen committed."""

    def load(self, inbox: str) -> dict[TopicPartition, Position]:
        self._check_home()
        confirm(self._database, self._name, self._epoch)
        found = self._database.load(inbox)
        gone = self.known.keys() - found.keys()
        if gone:
            topic, partition = min(gone)
            raise self._changed(f"has lost the position of {topic}-{partition}")
        behind = {
            place: (found[place].next_offset, offset)
            for place, offset in self.known.items()
            if found[place].next_offset < offset
        }
        if behind:
            LOG.warning(
                "The database has gone back since this run has written to it: it was restored, or a standby took over "
                "that had not received everything. Pipeline %r goes back with it, and writes those rows again: %s.",
                self._name,
                describe_ahead(behind),
            )
        self.known = {place: at.next_offset for place, at in found.items()}
        return found

    def _check_home(self) -> None:
        if any(self._database.columns(table) is None for table in (HOME, POSITIONS)):
            raise self._changed("has none of Semel's tables")
        if self._database.scalar(f"SELECT id FROM {HOME}") != self._home:
            raise self._changed("has other tables of Semel's than before")

    def _changed(self, fault: str) -> DatabaseError:
        return DatabaseError(
            f"The {self._database.kind} database {fault}, so this is not the one that pipeline {self._name!r} has "
            "written to until now: a failover to a server without them, or they were dropped. The pipeline stops, and "
            "nothing was written there. Connect to the right database. Or start again, which compares this one with "
            "the offsets of Kafka's group and tells the choices."
        )

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        self._moving = {}
        with self._database.transaction() as database:
            database.limit_idle()  # a process that is stopped here must not keep its successor waiting for ever
            confirm(database, self._name, self._epoch)
            yield database
            reach("before_commit")
        reach("after_commit")
        self.known |= self._moving

    def move(self, handle: Any, inbox: str, moves: Moves) -> None:
        self._database.move(handle, inbox, moves)
        self._moving = {place: end.next_offset for place, (_, end) in moves.items()}
