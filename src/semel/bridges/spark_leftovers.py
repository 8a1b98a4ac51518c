"""Staging tables that are no longer needed: of committed batches, of runs that are over, and of lost attempts."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Final

from semel.bridges.database import STAGING, Database
from semel.bridges.merge import literal, quote
from semel.errors import DatabaseError
from semel.spark.progress import log_event

_OLD_MS: Final = 3 * 24 * 3600 * 1000
"""A table this old is dropped, whichever run made it: no batch takes three days."""
_WAIT_MS: Final = 100
_LOCK_NOT_AVAILABLE: Final = "55P03"
_MARK_ID: Final = "hashtextextended($1, 0)"
_AT_ONCE: Final = 20
"""Each table takes a few entries of the server's lock table."""


def drop_merged(database: Database, owner: str, epoch: int, batch: int) -> None:
    """Drop what this run has staged up to a batch that is committed, and what lost attempts have left of it."""
    _drop(database, owner, "owner = $1 AND epoch <= $2 AND batch <= $3", owner, epoch, batch)


def drop_abandoned(database: Database, owner: str, epoch: int) -> None:
    """Drop what earlier runs and other jobs of this pipeline have left, and what nobody has cared for in days."""
    old_ms = int(time.time() * 1000) - _OLD_MS
    _drop(database, owner, "(owner = $1 AND epoch < $2) OR created_ms < $3", owner, epoch, old_ms)
    for other, its_epoch in _other_jobs(database, owner):
        _drop(database, other, "owner = $1 AND epoch <= $2", other, its_epoch)


def mark_running(database: Database, owner: str) -> None:
    """Keep other jobs of the pipeline from dropping what this one stages, for as long as its connection lasts.

    If the connection is lost and they drop it, the rows are staged again.
    """
    database.execute(f"SELECT pg_advisory_lock_shared({_MARK_ID})", _mark(owner))


def _other_jobs(database: Database, owner: str) -> list[tuple[str, int]]:
    """Jobs of the same pipeline that have staged rows and are not running, with their epochs. A job is name/job_id."""
    try:
        found = database.execute(
            f"SELECT owner, max(epoch) FROM {STAGING} WHERE starts_with(owner, $1) AND owner <> $2 GROUP BY owner",
            owner.partition("/")[0] + "/",
            owner,
        ).rows
        # Asked after the epochs: a job that starts now has a higher one.
        return [
            (other, int(epoch))
            for other, epoch in found
            if database.scalar(f"SELECT pg_try_advisory_xact_lock({_MARK_ID})", _mark(other))
        ]
    except DatabaseError as error:
        log_event("staging tables are dropped later", logging.WARNING, pipeline=owner, error=str(error))
        return []


def _mark(owner: str) -> str:
    return f"semel staging {owner}"


def _drop(database: Database, owner: str, condition: str, *values: object) -> None:
    """Best effort: what another transaction holds is dropped another time, and nobody waits for it."""
    try:
        names = [name for (name,) in database.execute(f"SELECT name FROM {STAGING} WHERE {condition}", *values).rows]
        for first in range(0, len(names), _AT_ONCE):
            some = names[first : first + _AT_ONCE]
            if not _try_drop(database, some):
                held = [name for name in some if not _try_drop(database, [name])]
                log_event("staging tables are in use and dropped later", logging.WARNING, pipeline=owner, tables=held)
    except DatabaseError as error:
        log_event("staging tables are dropped later", logging.WARNING, pipeline=owner, error=str(error))


def _try_drop(database: Database, names: Sequence[str]) -> bool:
    """False if somebody reads or loads one of them: an attempt that nobody waits for may still be at it."""
    try:
        with database.transaction():
            database.execute(f"SET LOCAL lock_timeout = {_WAIT_MS}")
            database.execute(f"DROP TABLE IF EXISTS {', '.join(map(quote, names))}")
            database.execute(f"DELETE FROM {STAGING} WHERE name IN ({', '.join(map(literal, names))})")
    except DatabaseError as error:
        if error.sqlstate != _LOCK_NOT_AVAILABLE:
            raise
        return False
    return True
