"""The event ids that mode "dedup" remembers: of which table, for how long, and when they are forgotten."""

from __future__ import annotations

import time

from semel.bridges.database import Database
from semel.bridges.merge import (
    HORIZON,
    ROW,
    SEEN,
    TIME,
    Memory,
    Rule,
    Staged,
    expire,
    literal,
    next_horizon,
    quote,
    quote_table,
    scope_of,
)
from semel.bridges.retries import LOG
from semel.errors import ValueDoesNotFit


class EventIds:
    """The ids of one table and key, within transactions that the caller begins and ends."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._newest_ms: int | None = None
        """The newest event of the present transaction that is not ahead of the clock."""

    def forget(self) -> None:
        """What a transaction that was rolled back has left here."""
        self._newest_ms = None

    def open(self, database: Database) -> Memory:
        """Where the table's event ids are. Other writers of them wait until the transaction ends."""
        rule = self._rule
        scope, older = scope_of(database.full_name(rule.table), rule.key), literal(rule.table)
        database.wait_for_scope(scope)
        has_older = database.scalar(
            f"SELECT count(*) FROM (SELECT 1 WHERE EXISTS (SELECT 1 FROM {SEEN} WHERE scope = {older}) "
            f"OR EXISTS (SELECT 1 FROM {HORIZON} WHERE scope = {older})) AS found"
        )
        return Memory(scope, rule.table if has_older else None, database.text_length)

    def _horizon(self, database: Database, memory: Memory) -> int | None:
        if self._rule.keep is None:
            return None
        found = database.execute(
            f"SELECT horizon FROM {HORIZON} WHERE scope IN ({memory.scopes}) {database.lock_row}"
        ).rows
        return max((int(horizon) for (horizon,) in found), default=None)

    def check_not_late(self, database: Database, memory: Memory, staged: Staged) -> int | None:
        """The horizon. Raises if an event is older."""
        horizon_ms = self._horizon(database, memory)
        if horizon_ms is None:
            return None
        late = database.execute(
            f"SELECT {', '.join(quote(name) for name in self._rule.key)}, {quote(TIME)} "
            f"FROM {staged.relation} AS staged WHERE {quote(TIME)} < {horizon_ms} ORDER BY {quote(ROW)} LIMIT 1"
        ).rows
        if late:
            *event_id, at_ms = late[0]
            raise ValueDoesNotFit(
                f"Event {event_id} of {at_ms} ms is older than keep={self._rule.keep} allows: its id may have expired, "
                "so nobody can tell whether it is a repeat. Raise keep=, or drop events that are so late."
            )
        return horizon_ms

    def note_newest(self, database: Database, staged: Staged) -> None:
        """After rows were written: `finish` moves the horizon up to `keep` before the newest of them."""
        if self._rule.keep is None:
            return
        newest = database.scalar(
            f"SELECT max({quote(TIME)}) FROM {staged.relation} AS staged "
            f"WHERE {quote(TIME)} <= {int(time.time() * 1000)}"
        )
        if newest is not None:
            self._newest_ms = max(int(newest), self._newest_ms or int(newest))

    def finish(self, database: Database) -> None:
        """Forget ids that are too old, now that all rows of the transaction are written."""
        newest, self._newest_ms = self._newest_ms, None
        if self._rule.keep is None or newest is None:
            return
        memory = self.open(database)
        horizon = self._horizon(database, memory)
        moved = next_horizon(horizon, newest, self._rule.keep)
        if moved is not None and moved != horizon:
            for statement in expire(memory, moved):
                database.execute(statement.sql)

    def warn_if_empty(self, database: Database) -> None:
        """For a pipeline that begins: an empty table whose ids are remembered may have been emptied or made again."""
        rule = self._rule
        if rule.mode != "dedup" or rule.statement is not None or database.columns(rule.table) is None:
            return
        with database.transaction():
            memory = self.open(database)
            is_known = database.execute(f"SELECT 1 FROM {SEEN} WHERE scope IN ({memory.scopes}) LIMIT 1").rows
            can_read = not database.missing_rights(rule.table, ["SELECT"])
            if is_known and can_read and not database.execute(f"SELECT 1 FROM {quote_table(rule.table)} LIMIT 1").rows:
                LOG.warning(
                    "Table %r is empty, and event ids that it had before are remembered: rows with these ids are "
                    "dropped as repeats. If it was emptied or made again to be filled anew, stop, run DELETE FROM %s "
                    "WHERE scope IN (%s), and start again under a new name.",
                    rule.table,
                    SEEN,
                    memory.scopes,
                )

    def restart(self, database: Database) -> None:
        """Forget the event ids of an empty table, which is to be filled again: all of its rows would be repeats.

        Where the table has rows, its ids stay. Where nobody can tell, a warning says what to do.
        """
        rule = self._rule
        if rule.mode != "dedup":
            return
        memory = self.open(database)
        if rule.statement is not None or database.missing_rights(rule.table, ["SELECT"]):
            LOG.warning(
                "Event ids that table %r had before are remembered, and their records are dropped as repeats. If their "
                "results are gone, stop, run DELETE FROM %s WHERE scope IN (%s), and start again.",
                rule.table,
                SEEN,
                memory.scopes,
            )
            return
        is_there = database.columns(rule.table) is not None
        if not is_there or not database.execute(f"SELECT 1 FROM {quote_table(rule.table)} LIMIT 1").rows:
            for table in (SEEN, HORIZON):
                database.execute(f"DELETE FROM {table} WHERE scope IN ({memory.scopes})")
