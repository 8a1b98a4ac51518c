"""What each mode should make of rows: the obvious model, one row after the other, in plain Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from semel.bridges.merge import Rule

Row = Mapping[str, Any]


class Refused(Exception):
    """The whole batch, because of one of its rows."""


class TableModel:
    """A table and what belongs to it. `write` changes all or nothing."""

    def __init__(self, rule: Rule, columns: Sequence[str], now_ms: int) -> None:
        self.rule = rule
        self._columns = [name for name in columns if name not in rule.extra_columns]
        self._now_ms = now_ms
        self._rows: list[Row] = []
        self._by_key: dict[tuple[Any, ...], Row] = {}
        self._deleted: dict[tuple[Any, ...], int] = {}
        self._seen: dict[tuple[Any, ...], int] = {}
        """Event ids, with the time of the event that was written."""
        self._horizon: int | None = None

    @property
    def contents(self) -> list[tuple[Any, ...]]:
        """Without the column that deletes; in one order."""
        rows = self._rows if self.rule.mode in ("append", "dedup") else self._by_key.values()
        return sorted((tuple(row[name] for name in self._columns) for row in rows), key=repr)

    def write(self, batch: Sequence[Row]) -> None:
        self._check(batch)
        for row in batch:
            getattr(self, f"_{self.rule.mode}")(row)
        if self.rule.keep is not None and batch:
            times = [row[self.rule.event_time or ""] for row in batch]
            newest = max((time for time in times if time <= self._now_ms), default=None)
            if newest is None:
                return
            reached = newest - int(self.rule.keep.total_seconds() * 1000)
            horizon = self._horizon = reached if self._horizon is None else max(reached, self._horizon)
            # From now on an event of such a time is refused, so its id need not be known any more.
            self._seen = {key: at for key, at in self._seen.items() if at >= horizon}

    def _check(self, batch: Sequence[Row]) -> None:
        rule = self.rule
        for row in batch:
            if any(row[name] is None for name in rule.key):
                raise Refused("a key is null")
            if rule.version is not None and row[rule.version] is None:
                raise Refused("a version is null")
            if rule.event_time is not None and row[rule.event_time] is None:
                raise Refused("an event time is null")
            if rule.event_time is not None and self._horizon is not None and row[rule.event_time] < self._horizon:
                raise Refused("an event is too late")

    def _key(self, row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in self.rule.key)

    def _append(self, row: Row) -> None:
        self._rows.append(row)

    def _dedup(self, row: Row) -> None:
        if self._key(row) not in self._seen:
            self._seen[self._key(row)] = row[self.rule.event_time] if self.rule.event_time is not None else 0
            self._rows.append(row)

    def _upsert(self, row: Row) -> None:
        if self.rule.delete is not None and row[self.rule.delete]:
            self._by_key.pop(self._key(row), None)
        else:
            self._by_key[self._key(row)] = row

    def _newest(self, row: Row) -> None:
        key, version = self._key(row), row[self.rule.version or ""]
        there = self._by_key.get(key)
        is_newer = there is None or there[self.rule.version or ""] < version
        if self.rule.delete is not None and row[self.rule.delete]:
            self._deleted[key] = max(version, self._deleted.get(key, version))
            if is_newer:
                self._by_key.pop(key, None)
        elif is_newer and self._deleted.get(key, version - 1) < version:
            self._by_key[key] = row
