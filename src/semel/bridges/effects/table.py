"""The table `semel_effects`: one row for each effect, read and written under a lock on that row."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from semel.bridges.database import Database
from semel.bridges.effects.rules import ClaimDecision, Effect, EffectState
from semel.errors import DatabaseError, InvalidState

TABLE: Final = "semel_effects"
_DEFINITION: Final = (
    "name TEXT NOT NULL, key TEXT NOT NULL, state TEXT NOT NULL, attempts INTEGER NOT NULL, epoch BIGINT NOT NULL, "
    "owner TEXT NOT NULL, changed_ms BIGINT NOT NULL, due_ms BIGINT NOT NULL, error TEXT, result TEXT, "
    "is_reported INTEGER NOT NULL, topic TEXT, partition INTEGER, record_offset BIGINT, PRIMARY KEY (name, key)"
)
_COLUMNS: Final = (
    "key, state, attempts, epoch, owner, changed_ms, due_ms, error, result, is_reported, topic, partition, "
    "record_offset"
)
_CLOCKS: Final = {"Postgres": "SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint"}
"""A server's clock is the same for workers on all machines. A file has one machine, and its clock will do."""

Decide = Callable[[Effect | None, int], ClaimDecision]
Change = Callable[[Effect, int], Effect | None]


class EffectsTable:
    """The rows of one name, through a connection of its own; for one thread. The table is made if it is not there."""

    def __init__(self, database: Database, name: str) -> None:
        self._database = database
        self._name = name
        self._is_there = False

    def close(self) -> None:
        self._database.close()

    def claim(self, key: str, decide: Decide) -> tuple[ClaimDecision, bool, int]:
        """Decide with the row locked, and commit it. Returns the decision, whether the row changed, and the time."""
        self._ensure_table()
        with self._database.transaction():
            before = self._lock(key)
            now_ms = self._now_ms()
            decision = decide(before, now_ms)
            if before is None:
                if self._insert(decision.effect):
                    return decision, True, now_ms
                # Another worker was quicker. Its row is committed, since the insert has waited for that.
                before, now_ms = self._lock(key), self._now_ms()
                decision = decide(before, now_ms)
            if decision.effect != before:
                self._update(decision.effect)
        return decision, decision.effect != before, now_ms

    def change(self, key: str, decide: Change) -> Effect | None:
        """Change a row with the row locked. Returns it as it is then, or None if it could not be changed."""
        self._ensure_table()
        with self._database.transaction():
            before = self._lock(key)
            if before is None:
                raise InvalidState(f"There is no effect {key!r} of the name {self._name!r}. Nothing was changed.")
            after = decide(before, self._now_ms())
            if after is not None and after != before:
                self._update(after)
        return after

    def mark_reported(self, key: str) -> None:
        """The dead letter is in its topic."""
        self.change(key, lambda effect, _: replace(effect, is_reported=True) if effect.state == "dead" else None)

    def find(self, state: EffectState) -> list[Effect]:
        """The effects in this state, oldest first."""
        return self._select("AND state = $2 ORDER BY changed_ms, key", state)

    def find_reopened(self) -> list[Effect]:
        """Those that a person wants to be called again; a failure of a worker counts at least one attempt."""
        return self._select("AND state = 'failed' AND attempts = 0 ORDER BY changed_ms, key")

    def get(self, key: str) -> Effect | None:
        found = self._select("AND key = $2", key)
        return found[0] if found else None

    def forget(self, older_than_ms: int) -> int:
        """Delete effects that were done so long ago. Returns how many."""
        self._ensure_table()
        return self._database.execute(
            f"DELETE FROM {TABLE} WHERE name = $1 AND state = 'done' AND changed_ms < $2",
            self._name,
            self._now_ms() - older_than_ms,
        ).changed

    # -- statements --------------------------------------------------------------------------------------------------

    def _ensure_table(self) -> None:
        if self._is_there:
            return
        if self._database.columns(TABLE) is None:
            try:
                with self._database.transaction():
                    self._database.execute(f"CREATE TABLE IF NOT EXISTS {TABLE} ({_DEFINITION})")
                    # Most rows are done, and nobody looks for those.
                    self._database.execute(f"CREATE INDEX IF NOT EXISTS {TABLE}_by_state ON {TABLE} (name, state)")
            except DatabaseError:
                if self._database.columns(TABLE) is None:  # otherwise another worker was quicker
                    raise
        self._is_there = True

    def _now_ms(self) -> int:
        clock = _CLOCKS.get(self._database.kind)
        return int(time.time() * 1000) if clock is None else int(self._database.scalar(clock))

    def _lock(self, key: str) -> Effect | None:
        found = self._select(f"AND key = $2 {self._database.lock_row}", key)
        return found[0] if found else None

    def _select(self, condition: str, *values: object) -> list[Effect]:
        self._ensure_table()
        query = f"SELECT {_COLUMNS} FROM {TABLE} WHERE name = $1 {condition}"
        return [_effect(row) for row in self._database.execute(query, self._name, *values).rows]

    def _insert(self, effect: Effect) -> bool:
        marks = ", ".join(f"${number}" for number in range(1, len(_values(effect)) + 2))
        statement = f"INSERT INTO {TABLE} (name, {_COLUMNS}) VALUES ({marks}) ON CONFLICT DO NOTHING"
        return self._database.execute(statement, self._name, *_values(effect)).changed == 1

    def _update(self, effect: Effect) -> None:
        _, *values = _values(effect)
        names = _COLUMNS.split(", ")[1:]
        changes = ", ".join(f"{name} = ${number}" for number, name in enumerate(names, 1))
        self._database.execute(
            f"UPDATE {TABLE} SET {changes} WHERE name = ${len(names) + 1} AND key = ${len(names) + 2}",
            *values,
            self._name,
            effect.key,
        )


def _values(effect: Effect) -> list[Any]:
    return [
        effect.key,
        effect.state,
        effect.attempts,
        effect.epoch,
        effect.owner,
        effect.changed_ms,
        effect.due_ms,
        effect.error,
        effect.result,
        int(effect.is_reported),
        effect.topic,
        effect.partition,
        effect.offset,
    ]


def _effect(row: tuple[Any, ...]) -> Effect:
    key, state, attempts, epoch, owner, changed_ms, due_ms, error, result, is_reported, *origin = row
    topic, partition, offset = origin
    return Effect(
        key=key,
        state=state,
        attempts=attempts,
        epoch=epoch,
        owner=owner,
        changed_ms=changed_ms,
        due_ms=due_ms,
        error=error,
        result=result,
        is_reported=bool(is_reported),
        topic=topic,
        partition=partition,
        offset=offset,
    )
