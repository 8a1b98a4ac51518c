"""The ledger of Spark's pipelines in a database: what was committed last, and which run may commit next.

An entry is written in the transaction of the rows that it speaks of, so it is there exactly if they are. It is kept by
the pipeline's name and by the id of the query; of a job, by name/job_id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from semel.bridges.database import LEDGER, Database
from semel.bridges.run_owner import home_of
from semel.errors import DatabaseError
from semel.spark.checkpoint import Home
from semel.spark.ledger import Entry, query_key
from semel.spark.owner import fenced

_READ: Final = f"SELECT key, entry, epoch FROM {LEDGER} WHERE key = $1 OR key = $2 ORDER BY key"


@dataclass(frozen=True, slots=True)
class Standing:
    """What the ledger says about a pipeline and a query."""

    latest: Entry | None
    """The last entry of the pipeline, whichever query wrote it."""
    mine: Entry | None
    """The last entry of the query."""
    epoch: int
    """Of the run that may write. 0 if the pipeline has never run."""


class DatabaseLedger:
    """The rows of one pipeline (`key` is its name) and of one of its queries, or of one job (`key` is name/job_id)."""

    def __init__(self, database: Database, pipeline: str, key: str, query: str | None = None) -> None:
        self._database = database
        self._pipeline = pipeline
        self._key = key
        self._query_key = None if query is None else query_key(query)

    def home(self) -> Home:
        """Tells this ledger from that of another database, and from one that was made again."""
        return Home(home_of(self._database), LEDGER, None)

    def read(self) -> Standing:
        return self._standing(_READ)

    def take_over(self) -> int:
        """Make this run the owner: earlier ones cannot commit any more. Returns its epoch."""
        while (epoch := self._try_take_over()) is None:
            self._database.end_stopped_owner(self._key)
        return epoch

    def _try_take_over(self) -> int | None:
        """None if an earlier run has kept its transaction open for too long."""
        database = self._database
        with database.transaction():
            if not database.take_pipeline(self._key):
                return None
            database.execute(
                f"INSERT INTO {LEDGER} AS owner (key, epoch) VALUES ($1, 1) "
                "ON CONFLICT (key) DO UPDATE SET epoch = owner.epoch + 1",
                self._key,
            )
            if self._query_key is not None:
                # A row that is not there cannot be locked.
                database.execute(
                    f"INSERT INTO {LEDGER} (key, epoch) VALUES ($1, 0) ON CONFLICT (key) DO NOTHING", self._query_key
                )
            return self.read().epoch

    def lock(self, epoch: int) -> Standing:
        """Inside of a transaction: what holds until it ends. Raises if another run has taken over."""
        self._database.hold_pipeline(self._key)
        standing = self._standing(f"{_READ} {self._database.lock_row}")
        if standing.epoch == 0 or standing.epoch < epoch:
            raise self._changed("is not what it was")
        if standing.epoch != epoch:
            raise fenced(self._pipeline)
        return standing

    def write(self, entry: Entry) -> None:
        """In the transaction of the rows."""
        text = entry.encode().decode()
        for key in (self._key, self._query_key):
            if key is not None:
                self._database.execute(f"UPDATE {LEDGER} SET entry = $1 WHERE key = $2", text, key)

    def _changed(self, fault: str) -> DatabaseError:
        return DatabaseError(
            f"The ledger of pipeline {self._pipeline!r} {fault}: the database was restored, or this is another server. "
            "Nothing of this batch was written. Start the pipeline again: it then finds out what is there."
        )

    def _standing(self, query: str) -> Standing:
        try:
            found = self._database.execute(query, self._key, self._query_key or self._key).rows
        except DatabaseError as error:
            if not error.is_transient and self._database.columns(LEDGER) is None:
                raise self._changed("is gone") from error
            raise
        rows = {
            key: (None if entry is None else Entry.decode(entry.encode()), int(epoch)) for key, entry, epoch in found
        }
        latest, epoch = rows.get(self._key, (None, 0))
        mine, _ = rows.get(self._query_key or "", (None, 0))
        return Standing(latest, mine, epoch)
