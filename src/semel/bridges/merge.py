"""The SQL that turns staged rows into changes of a table, for each mode. Pure: values in, statements out.

The same text runs on Postgres and SQLite. Staged rows have the user's columns and, where a mode needs them, the two
columns below.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, Literal

from semel.errors import ConfigError

Mode = Literal["append", "upsert", "dedup", "newest"]
MODES: Final[Mapping[str, str]] = {
    "append": "inserts every row once; costs one insert a row",
    "upsert": "keeps the last row of each key; costs a look-up in the key's index for each row",
    "dedup": "inserts the first row of each event id; costs a second table with the ids, and its index",
    "newest": "keeps the row with the highest version of each key, in whatever order rows come; costs as upsert",
}
"""What each mode promises, and what it costs."""

ROW: Final = "semel_row"
"""The order of the staged rows."""
TIME: Final = "semel_time"
"""The event time in milliseconds since 1970, where ids expire."""

RESERVED: Final = frozenset({ROW, TIME, "semel_rank"})
"""Names of columns that the rows must not have."""

SEEN: Final = "semel_seen"
HORIZON: Final = "semel_horizon"
_FRESH: Final = "semel_fresh"
_WITH: Final = re.compile(r"\s*WITH\s+(RECURSIVE\s+)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Rule:
    """How rows become changes of a table.

    >>> Rule("orders", mode="upsert", key=("id",)).key
    ('id',)
    """

    table: str
    mode: Mode = "append"
    key: tuple[str, ...] = ()
    """The columns that name a row; of "dedup", the event id."""
    version: str | None = None
    """The column that says which of two rows with one key is newer."""
    event_time: str | None = None
    keep: timedelta | None = None
    """How long event ids are remembered, counted by `event_time`. None: for ever."""
    delete: str | None = None
    """A boolean column: where it is true, the row deletes its key."""
    statement: str | None = None
    """The user's own SQL, which reads the staged rows from `rows`."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"mode={self.mode!r} is not supported: write one of {', '.join(MODES)}.")
        needs_key = self.mode != "append"
        if needs_key and not self.key:
            named = "the event id's column" if self.mode == "dedup" else "the columns that name a row"
            raise ConfigError(f'mode="{self.mode}" needs key=[...], {named}; nothing was written.')
        if not needs_key and self.key:
            raise ConfigError('key= has no meaning with mode="append": leave it out, or use mode="upsert".')
        if self.mode == "newest" and self.version is None:
            raise ConfigError(
                'mode="newest" needs version=, the column that says which row is newer, such as the record\'s offset.'
            )
        if self.version is not None and self.mode not in ("upsert", "newest"):
            raise ConfigError(f'version= has no meaning with mode="{self.mode}": leave it out.')
        if self.delete is not None and self.mode not in ("upsert", "newest"):
            raise ConfigError(f'delete= needs mode="upsert" or "newest": mode="{self.mode}" does not delete rows.')
        if (self.keep is None) != (self.event_time is None) or (self.keep is not None and self.mode != "dedup"):
            raise ConfigError('keep= and event_time= belong together, and to mode="dedup": give both or neither.')
        if self.statement is not None and self.mode not in ("append", "dedup"):
            raise ConfigError('statement= replaces the write of mode="append" or "dedup": use one of these.')

    @property
    def is_plain_append(self) -> bool:
        """Whether rows are inserted as they are."""
        return self.mode == "append" and self.statement is None

    @property
    def is_plain_upsert(self) -> bool:
        """Whether rows are inserted as they are while none of their keys is in the table, and none comes twice."""
        return self.mode == "upsert" and self.version is None and self.delete is None

    @property
    def extra_columns(self) -> set[str]:
        """The columns of the rows that are not columns of the table."""
        return {self.delete} if self.delete is not None else set()


@dataclass(frozen=True, slots=True)
class Statement:
    """One SQL statement, and whether its row count is the number of rows that were written or deleted."""

    sql: str
    counts: Literal["written", "deleted"] | None = None


@dataclass(frozen=True, slots=True)
class Staged:
    """Rows that are in the database already, and how they are read."""

    sources: Sequence[str]
    """The tables that hold them, quoted."""
    columns: Sequence[str]
    """The user's columns, `delete` among them."""
    types: Mapping[str, str] = field(default_factory=dict[str, str])
    """The target's type of each column that must be converted."""
    is_ordered: bool = True
    """Whether a later row counts more than an earlier one; false for Spark, whose rows have no order."""
    collations: Mapping[str, str] = field(default_factory=dict[str, str])
    """The target's collation of each key and version that must be given it."""
    compared: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the target compares in place of a key's or version's own value, where `value` is not that."""

    @property
    def relation(self) -> str:
        return "(" + " UNION ALL ".join(f"SELECT * FROM {source}" for source in self.sources) + ")"

    def select(self, columns: Sequence[str]) -> str:
        values = {name: self.value(name) for name in columns}
        return ", ".join(
            quote(name) if value == quote(name) else f"{value} AS {quote(name)}" for name, value in values.items()
        )

    def value(self, name: str) -> str:
        """A column's value as the target takes it."""
        value = f"CAST({quote(name)} AS {self.types[name]})" if name in self.types else quote(name)
        return f"{value} COLLATE {self.collations[name]}" if name in self.collations else value

    def comparable(self, name: str) -> str:
        """A key or version such that two of them are equal, or one the greater, if they are so in the target."""
        return self.compared.get(name) or self.value(name)


@dataclass(frozen=True, slots=True)
class Memory:
    """Under which names event ids are remembered in `semel_seen` and `semel_horizon`."""

    scope: str
    older: str | None = None
    """What an earlier release wrote, if it has left ids: the table's name alone. They are read, and expire."""

    text_length: str = "length({text})"
    """The SQL for the length of text, by which ids of several columns are told apart."""

    @property
    def scopes(self) -> str:
        """As a list for IN."""
        return ", ".join(literal(one) for one in (self.scope, self.older) if one is not None)


def scope_of(full_name: str, key: Sequence[str]) -> str:
    """The name for the ids of one table and one kind of id.

    >>> scope_of('"public"."orders"', ["id"])
    '"public"."orders" ("id")'
    """
    return f"{full_name} ({_names(key)})"


def quote(name: str) -> str:
    """
    >>> quote('odd"name')
    '"odd""name"'
    """
    return '"' + name.replace('"', '""') + '"'


def quote_table(name: str) -> str:
    """A dot separates schema and table.

    >>> quote_table("shop.orders")
    '"shop"."orders"'
    """
    return ".".join(quote(part) for part in name.split("."))


def literal(text: str) -> str:
    """
    >>> literal("it's")
    "'it''s'"
    """
    return "'" + text.replace("'", "''") + "'"


def tombstones_of(table: str) -> str:
    """Where mode "newest" remembers the versions of deleted rows, so that an older row cannot bring them back."""
    return table + "_semel_deleted"


def merge(
    rule: Rule,
    staged: Staged,
    *,
    memory: Memory | None = None,
    horizon_ms: int | None = None,
    by_join: bool = False,
) -> list[Statement]:
    """The statements for one batch, in their order. They belong into one transaction with the batch's progress.

    "dedup" needs `memory`. With `by_join`, "upsert" and "newest" join the staged rows with the table and write by
    MERGE.
    """
    if rule.mode == "dedup":
        assert memory is not None
        return _dedup(rule, staged, memory, horizon_ms)
    if rule.mode == "append":
        return [_write(rule, staged, staged.relation)]
    return _upsert(rule, staged, by_join=by_join)


def _write(rule: Rule, staged: Staged, relation: str) -> Statement:
    if rule.statement is not None:
        rows = f"rows AS (SELECT {staged.select(staged.columns)} FROM {relation} AS staged)"
        opening = _WITH.match(rule.statement)
        if opening is None:
            return Statement(f"WITH {rows} {rule.statement}", "written")
        recursive = opening.group(1) or ""
        return Statement(f"WITH {recursive}{rows}, {rule.statement[opening.end() :]}", "written")
    return Statement(
        f"INSERT INTO {quote_table(rule.table)} ({_names(staged.columns)}) "
        f"SELECT {staged.select(staged.columns)} FROM {relation} AS staged",
        "written",
    )


def _upsert(rule: Rule, staged: Staged, *, by_join: bool) -> list[Statement]:
    columns = [name for name in staged.columns if name != rule.delete]
    last = _last_of_key(rule, staged)
    table = quote_table(rule.table)
    statements: list[Statement] = []
    is_newest = rule.mode == "newest"
    version = quote(rule.version) if rule.version is not None else ""
    older = f"(target.{version} IS NULL OR target.{version} < {{new}}.{version})" if is_newest else "true"
    alive = "true"
    if rule.delete is not None:
        gone = f"{quote(rule.delete)} IS TRUE"
        alive = f"{quote(rule.delete)} IS NOT TRUE"
        if is_newest:
            tombstones = quote_table(tombstones_of(rule.table))
            kept = [*rule.key, rule.version or ""]
            alive += (
                f" AND NOT EXISTS (SELECT 1 FROM {tombstones} AS tomb WHERE {_same('tomb', 'last', rule.key)} "
                f"AND tomb.{version} >= last.{version})"
            )
            statements.append(
                Statement(
                    f"INSERT INTO {tombstones} AS target ({_names(kept)}) SELECT {_names(kept)} FROM {last} AS last "
                    f"WHERE {gone} ON CONFLICT ({_names(rule.key)}) DO UPDATE SET {version} = excluded.{version} "
                    f"WHERE target.{version} < excluded.{version}"
                )
            )
        statements.append(
            Statement(
                f"DELETE FROM {table} AS target WHERE EXISTS (SELECT 1 FROM {last} AS last WHERE {gone} "
                f"AND {_same('target', 'last', rule.key)} AND {older.format(new='last')})",
                "deleted",
            )
        )
    changed = [name for name in columns if name not in rule.key]
    changes = ", ".join(f"{quote(name)} = excluded.{quote(name)}" for name in changed)
    alive_rows = f"SELECT {_names(columns)} FROM {last} AS last WHERE {alive}"
    if by_join:
        # In the order of the key: neighbours in the index are written one after the other.
        is_older = f" AND {older.format(new='excluded')}" if is_newest else ""
        values = ", ".join(f"excluded.{quote(name)}" for name in columns)
        sql = (
            f"MERGE INTO {table} AS target USING ({alive_rows} ORDER BY {_names(rule.key)}) AS excluded "
            f"ON {_same('target', 'excluded', rule.key)} WHEN MATCHED{is_older} THEN UPDATE SET {changes} "
            f"WHEN NOT MATCHED THEN INSERT ({_names(columns)}) VALUES ({values})"
        )
    else:
        action = f"UPDATE SET {changes} WHERE {older.format(new='excluded')}" if changed else "NOTHING"
        sql = (
            f"INSERT INTO {table} AS target ({_names(columns)}) {alive_rows} "
            f"ON CONFLICT ({_names(rule.key)}) DO {action}"
        )
    statements.append(Statement(sql, "written"))
    return statements


def _last_of_key(rule: Rule, staged: Staged) -> str:
    """One row for each key: the newest by version. Of equal ones the last, or with "newest" the first, so that it does
    not matter whether they come in one batch or in two."""
    columns = staged.select(staged.columns)
    if rule.version is None and not staged.is_ordered:
        return f"(SELECT {columns} FROM {staged.relation} AS staged)"  # `find_ambiguous` has found no key twice
    order = [quote(ROW) + (" ASC" if rule.mode == "newest" else " DESC")]
    if rule.version is not None:
        order.insert(0, staged.comparable(rule.version) + " DESC")
    key = ", ".join(staged.comparable(name) for name in rule.key)
    return (
        f"(SELECT * FROM (SELECT {columns}, row_number() OVER (PARTITION BY {key} "
        f"ORDER BY {', '.join(order)}) AS semel_rank FROM {staged.relation} AS staged) AS ranked WHERE semel_rank = 1)"
    )


def can_join(rule: Rule, staged: Staged) -> bool:
    """Whether `merge` may write by a join: there is something to update, and two rows of one key make it fail."""
    has_changes = any(name not in (*rule.key, rule.delete) for name in staged.columns)
    # Of two rows with one key, one that deletes and one that does not, MERGE would see only the second.
    is_certain = rule.delete is None or find_ambiguous(rule, staged) is None
    return rule.mode in ("upsert", "newest") and has_changes and is_certain


def find_ambiguous(rule: Rule, staged: Staged) -> str | None:
    """A query for a key that has two rows where nothing says which one counts. None if there can be none."""
    if rule.mode != "upsert" or rule.version is not None or staged.is_ordered:
        return None
    key = [staged.comparable(name) for name in rule.key]
    shown = (
        quote(name) if value == quote(name) else f"CAST({value} AS TEXT)"
        for name, value in zip(rule.key, key, strict=True)
    )
    return (
        f"SELECT {', '.join(shown)} FROM {staged.relation} AS staged GROUP BY {', '.join(key)} "
        "HAVING count(*) > 1 LIMIT 1"
    )


def _dedup(rule: Rule, staged: Staged, memory: Memory, horizon_ms: int | None) -> list[Statement]:
    """First the rows with new ids into a table of their own, then their ids into the list, then the rows."""
    scope = literal(memory.scope)
    fresh_types = Staged([_FRESH], staged.columns, staged.types, staged.is_ordered)
    time = quote(TIME) if rule.keep is not None else "0"
    horizon = f" AND {quote(TIME)} >= {horizon_ms}" if horizon_ms is not None else ""
    return [
        Statement(f"DROP TABLE IF EXISTS {_FRESH}"),
        Statement(
            f"CREATE TEMPORARY TABLE {_FRESH} AS SELECT * FROM (SELECT staged.*, row_number() OVER "
            f"(PARTITION BY {_event_id(rule, 'staged', memory)} ORDER BY {quote(ROW)}) AS semel_rank "
            f"FROM {staged.relation} AS staged) AS ranked WHERE semel_rank = 1{horizon} AND NOT EXISTS "
            f"(SELECT 1 FROM {SEEN} AS seen WHERE seen.scope IN ({memory.scopes}) "
            f"AND seen.event_id = {_event_id(rule, 'ranked', memory)})"
        ),
        Statement(
            f"INSERT INTO {SEEN} (scope, event_id, event_time) "
            f"SELECT {scope}, {_event_id(rule, _FRESH, memory)}, {time} FROM {_FRESH}"
        ),
        _write(rule, fresh_types, _FRESH),
    ]


def expire(memory: Memory, horizon_ms: int) -> list[Statement]:
    """Forget ids below the horizon, which rows can no longer have: rows below it are refused from now on."""
    return [
        Statement(
            f"INSERT INTO {HORIZON} AS target (scope, horizon) VALUES ({literal(memory.scope)}, {horizon_ms}) "
            "ON CONFLICT (scope) DO UPDATE SET horizon = excluded.horizon WHERE target.horizon < excluded.horizon"
        ),
        Statement(f"DELETE FROM {SEEN} WHERE scope IN ({memory.scopes}) AND event_time < {horizon_ms}"),
    ]


def next_horizon(horizon_ms: int | None, newest_ms: int | None, keep: timedelta) -> int | None:
    """Ids older than `keep` before the newest event are forgotten. The horizon never goes back.

    `newest_ms` leaves out events that are dated ahead of the clock: one of them would let the ids of others expire.

    >>> next_horizon(5_000, 50_000, timedelta(seconds=10))
    40000
    >>> next_horizon(5_000, None, timedelta(seconds=10))
    5000
    """
    if newest_ms is None:
        return horizon_ms
    reached = newest_ms - int(keep.total_seconds() * 1000)
    return reached if horizon_ms is None else max(reached, horizon_ms)


def _event_id(rule: Rule, relation: str, memory: Memory) -> str:
    """The id as text; several columns are joined with their lengths, so that no two ids look alike."""
    texts = [f"CAST({relation}.{quote(name)} AS TEXT)" for name in rule.key]
    if len(texts) == 1:
        return texts[0]
    return " || ':' || ".join(f"{memory.text_length.format(text=text)} || ':' || {text}" for text in texts)


def _names(columns: Sequence[str]) -> str:
    return ", ".join(quote(name) for name in columns)


def _same(left: str, right: str, columns: Sequence[str]) -> str:
    return " AND ".join(f"{left}.{quote(name)} = {right}.{quote(name)}" for name in columns)
