"""Which process may write for a pipeline: the one that started last. The others find that out inside their transaction.

The positions alone would stop the second of two writers too. But then it is chance which of them goes on; with an epoch
it is always the newer one, as with Kafka's transactional.id.
"""

from __future__ import annotations

import json
import uuid
from typing import Final

from semel.bridges.database import HOME, LEDGER, POSITIONS, Database
from semel.bridges.positions import run_key
from semel.errors import ConfigError, InboxOvertaken

_IS_OLD: Final = (
    "key = $1 AND (entry LIKE '{\"table\"%' "
    f"OR (entry IS NULL AND EXISTS (SELECT 1 FROM {POSITIONS} WHERE inbox = $2)))"
)
"""The row of a session, and not that of a pipeline of Spark's."""


def claim(database: Database, name: str) -> int:
    """Take over the pipeline. Its earlier owners cannot commit any more."""
    while (epoch := _try_claim(database, name)) is None:
        database.end_stopped_owner(run_key(name))
    return epoch


def _try_claim(database: Database, name: str) -> int | None:
    """None if an earlier owner has kept its transaction open for too long."""
    with database.transaction():
        if not database.take_pipeline(run_key(name)):
            return None
        database.execute(
            f"INSERT INTO {LEDGER} AS owner (key, epoch) VALUES ($1, 1) "
            "ON CONFLICT (key) DO UPDATE SET epoch = owner.epoch + 1",
            run_key(name),
        )
        epoch = int(database.scalar(f"SELECT epoch FROM {LEDGER} WHERE key = $1", run_key(name)))
        if epoch == 1:
            _replace_old_key(database, name)
        return epoch


def _replace_old_key(database: Database, name: str) -> None:
    """Take over from an earlier release: its table is remembered, and its processes find their row gone and stop."""
    found = database.execute(f"SELECT entry FROM {LEDGER} WHERE {_IS_OLD} {database.lock_row}", _old_key(name), name)
    for (entry,) in found.rows:
        database.execute(f"UPDATE {LEDGER} SET entry = $1 WHERE key = $2", entry, run_key(name))
        database.execute(f"DELETE FROM {LEDGER} WHERE key = $1", _old_key(name))


def confirm(database: Database, name: str, epoch: int) -> None:
    """Inside of a transaction: raises if another process has taken over, and keeps others waiting until it ends."""
    database.hold_pipeline(run_key(name))
    found = database.scalar(f"SELECT epoch FROM {LEDGER} WHERE key = $1 {database.lock_row}", run_key(name))
    if found is None or int(found) != epoch:
        raise InboxOvertaken(
            f"Another process has been started for pipeline {name!r} and has taken over, so this one stops. Its last "
            "batch was rolled back and nothing is repeated. Let one run at a time, or give each its own name."
        )


def check_no_inbox(database: Database, name: str, resume: str | None) -> None:
    """Refuse to go on from positions that no run has written: they are an inbox's, whose results are elsewhere."""
    if resume is not None or not database.load(name):
        return
    is_run = database.scalar(f"SELECT 1 FROM {LEDGER} WHERE key = $1", run_key(name)) or database.scalar(
        f"SELECT 1 FROM {LEDGER} WHERE {_IS_OLD}", _old_key(name), name
    )
    if not is_run:
        raise ConfigError(
            f"The name {name!r} is used by an Inbox in this database, or semel_ledger was emptied. Both would share "
            "one position, and the table would lack what the inbox has read. Nothing was read. Use another name=. If "
            'this pipeline is to take over from the inbox, pass resume="database" once: it goes on from that position.'
        )


def check_table(database: Database, name: str, table: str, resume: str | None) -> None:
    """Refuse another table than the one that the pipeline's position speaks of: rows from before would be missing."""
    text = database.scalar(f"SELECT entry FROM {LEDGER} WHERE key = $1", run_key(name)) or database.scalar(
        f"SELECT entry FROM {LEDGER} WHERE {_IS_OLD}", _old_key(name), name
    )
    before = table if text is None else str(json.loads(text)["table"])
    if is_same_table(before, table) or resume is not None:
        return
    reached = ", ".join(
        f"{topic}-{partition} at {at.next_offset}" for (topic, partition), at in sorted(database.load(name).items())
    )
    if reached:
        raise ConfigError(
            f"Pipeline {name!r} has written into table {before!r} until now and stands in {reached}, so table "
            f"{table!r} would get none of the records before. Nothing was read. For another pipeline use another name. "
            f'If {table!r} takes over from {before!r}, pass resume="database" once: it goes on from that position.'
        )


def note_table(database: Database, name: str, table: str) -> None:
    """Remember the table of a pipeline that this process has claimed."""
    database.execute(f"UPDATE {LEDGER} SET entry = $1 WHERE key = $2", json.dumps({"table": table}), run_key(name))


def is_same_table(one: str, other: str) -> bool:
    """Whether two names may mean one table: a schema that is left out may be any.

    >>> is_same_table("public.orders", "orders"), is_same_table("a.orders", "b.orders")
    (True, False)
    """
    (schema, _, plain), (other_schema, _, other_plain) = one.rpartition("."), other.rpartition(".")
    return plain == other_plain and (schema == other_schema or not schema or not other_schema)


def home_of(database: Database) -> str:
    """The id of this set of Semel's tables, made at the first call. A restored copy of a database keeps it."""
    with database.transaction():
        database.execute(
            f"INSERT INTO {HOME} (only_row, id) VALUES (1, $1) ON CONFLICT DO NOTHING",
            uuid.uuid4().hex,
        )
        return str(database.scalar(f"SELECT id FROM {HOME}"))


def _old_key(name: str) -> str:
    """What earlier releases used. Spark's pipeline `run x` has it too."""
    return f"run {name}"
