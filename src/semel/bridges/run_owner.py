"""Which process may write for a pipeline: the one that started last. The others find that out inside their transaction.

The positions alone would stop the second of two writers too. But then it is chance which of them goes on; with an epoch
it is always the newer one, as with Kafka's transactional.id.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Final, NamedTuple

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


class TableNote(NamedTuple):
    """What is remembered of a pipeline's table."""

    table: str
    was_there: bool = False
    """Whether the pipeline has seen it. A position alone does not tell: the function may have returned nothing yet."""


def read_note(database: Database, name: str) -> TableNote | None:
    text = database.scalar(f"SELECT entry FROM {LEDGER} WHERE key = $1", run_key(name)) or database.scalar(
        f"SELECT entry FROM {LEDGER} WHERE {_IS_OLD}", _old_key(name), name
    )
    return None if text is None else _decoded(text)


def _decoded(text: str) -> TableNote:
    entry = json.loads(text)
    return TableNote(str(entry["table"]), bool(entry.get("was_there")))


def check_table(database: Database, name: str, table: str, resume: str | None, *, is_there: bool) -> None:
    """Refuse another table than the one that the pipeline's position speaks of, and an empty one in place of it: rows
    from before would be missing."""
    note = read_note(database, name)
    if note is None or resume is not None:
        return
    reached = ", ".join(
        f"{topic}-{partition} at {at.next_offset}" for (topic, partition), at in sorted(database.load(name).items())
    )
    if not reached:
        return
    if not is_same_table(note.table, table):
        raise ConfigError(
            f"Pipeline {name!r} has written into table {note.table!r} until now and stands in {reached}, so table "
            f"{table!r} would get none of the records before. Nothing was read. For another pipeline use another name. "
            f'If {table!r} takes over from {note.table!r}, pass resume="database" once: it goes on from that position.'
        )
    if note.was_there and not is_there:
        raise ConfigError(
            f"Pipeline {name!r} stands in {reached}, and its table {table!r} is not there any more: it was dropped or "
            "renamed. A new one would get none of the records before, so none was made and nothing was read. Restore "
            "the table or its name. To fill a new one from the beginning, use another name=. To go on from the "
            'position with an empty table, pass resume="database" once.'
        )


def find_other_writer(database: Database, name: str, table: str, topic_ids: Mapping[str, str | None]) -> str | None:
    """Another pipeline that has read one of these topics into the same table."""
    for topic, topic_id in sorted(topic_ids.items()):
        found = database.execute(
            f"SELECT DISTINCT at.inbox, owner.entry FROM {POSITIONS} at JOIN {LEDGER} owner "
            "ON owner.key = '/run/' || at.inbox WHERE at.topic = $1 AND at.topic_id = $2 AND at.inbox <> $3 "
            "ORDER BY at.inbox",
            topic,
            topic_id,
            name,
        )
        for other, entry in found.rows:
            if entry is not None and is_same_table(_decoded(entry).table, table):
                return str(other)
    return None


def refuse_other_writer(name: str, other: str, table: str) -> ConfigError:
    return ConfigError(
        f"Pipeline {other!r} has read the same topic into table {table!r}, and pipeline {name!r} has no position: it "
        "would write the records from the beginning into the table again. Nothing was read. If the pipeline was "
        f"renamed, write name={other!r} again: its position belongs to the name. If {name!r} is a second pipeline that "
        'writes other rows of the same records, pass resume="database" once, or start="latest".'
    )


def note_table(database: Database, name: str, table: str, *, was_there: bool) -> None:
    """Remember the table of a pipeline that this process has claimed."""
    entry = json.dumps({"table": table, "was_there": was_there})
    database.execute(f"UPDATE {LEDGER} SET entry = $1 WHERE key = $2", entry, run_key(name))


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
