"""From messages of pgoutput to change events: operation, key and values of a row as JSON. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from json.encoder import encode_basestring
from typing import Final, NamedTuple

from semel.bridges.capture.pgoutput import (
    UNCHANGED,
    Delete,
    Insert,
    Relation,
    Truncate,
    Unchanged,
    Update,
    Value,
    Values,
)

_BOOLEAN: Final = 16
_INTEGERS: Final = frozenset({20, 21, 23, 26})
_FLOATS: Final = frozenset({700, 701})
_NO_NUMBER: Final = frozenset({b"NaN", b"Infinity", b"-Infinity"})
"""JSON knows none of these, so they are text."""


class Change(NamedTuple):
    """One change of one row, or the truncation of one table."""

    operation: str
    """As in the header `semel.change.operation`."""
    table: TableFormat
    key: Values | None
    """In the order of `table.key`."""
    row: Values | None
    """In the order of the table's columns; of a deleted row perhaps the key alone."""
    problem: str | None = None
    """Why it cannot be written, as a sentence."""

    def text(self, column: str) -> str | None:
        """A value for routing; None if it is NULL or not known."""
        at = self.table.places.get(column)
        value = None if at is None or self.row is None else self.row[at]
        return value.decode() if isinstance(value, bytes) else None

    @property
    def unchanged(self) -> list[str]:
        """The columns that are not in the value, since they did not change."""
        if self.row is None or UNCHANGED not in self.row:
            return []
        return [name for name, at in self.table.places.items() if self.row[at] is UNCHANGED]

    def key_json(self) -> bytes | None:
        if not self.key:
            return None
        return _object(zip(self.table.key, self.key, strict=True), self.table)

    def value_json(self) -> bytes | None:
        if self.row is None:
            return None
        if self.operation == "delete" and not self.table.is_whole:
            return self.key_json()
        return _object(enumerate(self.row), self.table)


class TableFormat:
    """How rows of one table are written, until its columns change."""

    def __init__(self, relation: Relation, key: Collection[str] | None = None) -> None:
        """`key` is the primary key of a table that logs whole rows. Without one, the whole row is the key."""
        self.schema, self.name = relation.schema, relation.table
        self.is_whole = relation.identity == "f"
        self.columns = relation.columns
        self.places = {column.name: at for at, column in enumerate(relation.columns)}
        is_known = self.is_whole and key is not None and self.places.keys() >= set(key)
        chosen = [
            at for at, one in enumerate(relation.columns) if (one.name in (key or ()) if is_known else one.is_key)
        ]
        self.key: tuple[int, ...] = tuple(chosen)
        """Places of the columns of the key."""
        self.labels = [f"{encode_basestring(column.name)}: " for column in relation.columns]
        self.full_name = f"{relation.schema}.{relation.table}"

    def key_of(self, row: Values) -> Values | None:
        return tuple(row[at] for at in self.key) or None


def changes_of(message: Insert | Update | Delete | Truncate, tables: Mapping[int, TableFormat]) -> list[Change]:
    """The events of a message: an update that changes the key is a delete and an insert."""
    if isinstance(message, Truncate):
        return [Change("truncate", tables[oid], None, None) for oid in message.relations]
    table = tables[message.relation]
    if isinstance(message, Insert):
        return [Change("insert", table, table.key_of(message.new), message.new)]
    if isinstance(message, Delete):
        return [Change("delete", table, table.key_of(message.old), message.old)]
    if message.old is None:
        return [Change("update", table, table.key_of(message.new), message.new)]
    return _update(table, message.old, _fill(table, message.new, message.old, is_whole=message.is_old_whole))


def _update(table: TableFormat, old: Values, new: Values) -> list[Change]:
    key_before, key = table.key_of(old), table.key_of(new)
    if key_before == key:
        return [Change("update", table, key, new)]
    insert = Change("insert", table, key, new)
    if insert.unchanged:
        insert = insert._replace(
            problem=f"The key of a row of {table.full_name} was changed, and the values of "
            f"{', '.join(insert.unchanged)} are not in Postgres' log, since they are large and did not change. For "
            f"changes from now on, run ALTER TABLE {table.full_name} REPLICA IDENTITY FULL."
        )
    return [Change("delete", table, key_before, old), insert]


def _fill(table: TableFormat, new: Values, old: Values, *, is_whole: bool) -> Values:
    """Unchanged values that the old row tells. Large values of a key are there too, as the key is logged for them."""
    if UNCHANGED not in new:
        return new
    return tuple(
        old[at] if value is UNCHANGED and (is_whole or table.columns[at].is_key) else value
        for at, value in enumerate(new)
    )


def _object(values: Iterator[tuple[int, Value]] | enumerate[Value], table: TableFormat) -> bytes:
    labels, columns = table.labels, table.columns
    parts: Sequence[str] = [
        labels[at] + (_json(value, columns[at].type) if value is not None else "null")
        for at, value in values
        if not isinstance(value, Unchanged)
    ]
    return f"{{{', '.join(parts)}}}".encode()


def _json(value: bytes, kind: int) -> str:
    """Text, unless JSON has the type and keeps every digit. So types that nobody has heard of come as Postgres prints
    them, and can be read again by it."""
    if kind in _INTEGERS or (kind in _FLOATS and value not in _NO_NUMBER):
        return value.decode()
    if kind == _BOOLEAN:
        return "true" if value == b"t" else "false"
    return encode_basestring(value.decode())
