"""From change events to rows for Kafka: every change of whole tables, or the rows of an outbox. Pure."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from datetime import UTC, datetime
from typing import Final, NamedTuple

from semel.bridges.capture.changes import Change, TableFormat
from semel.bridges.capture.lsn import format_lsn
from semel.bridges.capture.options import CaptureOptions
from semel.bridges.capture.positions import End, Event
from semel.bridges.change_applier import OPERATION_HEADER, SCHEMA_HEADER, TABLE_HEADER, UNCHANGED_HEADER
from semel.bridges.relay.options import Columns, choose_columns
from semel.bridges.relay.routes import parse_headers
from semel.client.source_transactions import INDEX_HEADER, SOURCE_HEADER, TRANSACTION_HEADER, transactions_topic
from semel.errors import ConfigError

SEQUENCE_HEADER: Final = "semel.change.sequence"
"""Text that grows with every event, also where a table is captured again under another name."""
_ARRIVALS: Final = ("snapshot", "insert")

Headers = list[tuple[str, bytes | None]]


class EventRow(NamedTuple):
    """One record to be."""

    id: str
    """For messages."""
    topic: str | None
    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    headers: Headers
    problem: str | None = None

    @property
    def size(self) -> int:
        return len(self.key or b"") + len(self.value or b"") + 200


class RowMaker(ABC):
    """What becomes of a change, as the options say."""

    def __init__(self, options: CaptureOptions) -> None:
        self._template = options.relay.topic
        self._source = options.name.encode()
        self._ends = transactions_topic(options.name)
        self.options = options

    def takes(self, change: Change) -> bool:
        """Whether it is an event at all."""
        return True

    def row(self, event: Event[Change]) -> EventRow:
        made = self._make(event)
        if made.topic != self._ends:
            return made
        return made._replace(problem=f"{self._ends!r} is where the ends of transactions are, and takes no events.")

    @abstractmethod
    def _make(self, event: Event[Change]) -> EventRow: ...

    def end(self, end: End) -> EventRow:
        """Its value is known when all events are routed."""
        return EventRow(f"end of transaction {end.number}", self._ends, None, b"", end.begin.committed_at_ms, [])

    def _headers(self, event: Event[Change]) -> Headers:
        return [
            (SOURCE_HEADER, self._source),
            (TRANSACTION_HEADER, b"%d" % event.number),
            (INDEX_HEADER, b"%d" % event.index),
            (SEQUENCE_HEADER, sequence(event.begin.commit_lsn, event.index)),
        ]


def sequence(commit_lsn: int, index: int) -> bytes:
    """
    >>> sequence(4318771016, 3)
    b'00000001016B3748-00000003'
    """
    return b"%016X-%08X" % (commit_lsn, index)


def _id(event: Event[Change]) -> str:
    change = event.change
    return f"{event.index} of transaction {event.number} ({change.operation} at {format_lsn(event.begin.commit_lsn)})"


class TableRows(RowMaker):
    """Every change of the tables, for consumers that build a copy."""

    def __init__(self, options: CaptureOptions) -> None:
        super().__init__(options)
        self._is_fixed = {"schema", "table"}.issuperset(self._template.columns)
        self._topics: dict[TableFormat, str | None] = {}

    def _topic(self, change: Change) -> str | None:
        if not self._is_fixed:
            return self._template.topic_for(lambda name: _place(change, name))
        if change.table not in self._topics:
            self._topics[change.table] = self._template.topic_for(lambda name: _place(change, name))
        return self._topics[change.table]

    def _make(self, event: Event[Change]) -> EventRow:
        change = event.change
        headers = self._headers(event)
        headers += [
            (OPERATION_HEADER, change.operation.encode()),
            (SCHEMA_HEADER, change.table.schema.encode()),
            (TABLE_HEADER, change.table.name.encode()),
        ]
        if change.operation != "delete" and (unchanged := change.unchanged):
            headers.append((UNCHANGED_HEADER, json.dumps(unchanged).encode()))
        topic = self._topic(change)
        problem = change.problem
        if topic is None and problem is None:
            problem = "A column that its topic is made of is null, or is not known of this change."
        return EventRow(
            _id(event), topic, change.key_json(), change.value_json(), event.begin.committed_at_ms, headers, problem
        )


def _place(change: Change, name: str) -> str | None:
    if name == "schema":
        return change.table.schema
    return change.table.name if name == "table" else change.text(name)


class OutboxRows(RowMaker):
    """Rows that come into an outbox table. What becomes of them later means nothing."""

    def __init__(self, options: CaptureOptions) -> None:
        super().__init__(options)
        self._columns: Columns | None = None
        self._chosen_of: object = None

    def takes(self, change: Change) -> bool:
        return change.operation in _ARRIVALS

    def _make(self, event: Event[Change]) -> EventRow:
        change = event.change
        columns = self._choose(change)
        headers, problem = self._headers(event), None
        text = change.text(columns.headers) if columns.headers else None
        try:
            given: Headers = [] if text is None else [(one["key"], one["value"]) for one in parse_headers(text)]
        except ValueError as error:
            given, problem = [], str(error)
        at_ms = event.begin.committed_at_ms
        if columns.timestamp and (said := change.text(columns.timestamp)) is not None:
            at_ms = _parse_time(said, at_ms)
        return EventRow(
            change.text(columns.id) or _id(event),
            self._template.topic_for(change.text),
            self._content(change, columns.key),
            self._content(change, columns.value),
            at_ms,
            given + headers,
            problem,
        )

    def _choose(self, change: Change) -> Columns:
        """Again whenever the columns of the table have changed."""
        if self._columns is None or self._chosen_of is not change.table:
            self._columns, self._chosen_of = choose_columns(self.options.relay, change.table.places), change.table
        return self._columns

    def _content(self, change: Change, column: str | None) -> bytes | None:
        if column is None or change.row is None:
            return None
        at = change.table.places[column]
        value = change.row[at]
        if not isinstance(value, bytes):
            return None
        is_bytea = change.table.columns[at].type == _BYTEA
        return bytes.fromhex(value[2:].decode()) if is_bytea else value


_BYTEA: Final = 17


def _parse_time(text: str, otherwise_ms: int) -> int:
    """A `timestamptz`, a `timestamp` in UTC, or milliseconds. What has no milliseconds gets the time of the commit.

    >>> _parse_time("2026-11-19 01:02:03.5+00", 0), _parse_time("infinity", 7), _parse_time("5", 0)
    (1795050123500, 7, 5)
    """
    try:
        if text.lstrip("-").isdigit():
            return int(text)
        found = datetime.fromisoformat(text)
    except ValueError:
        return otherwise_ms
    at = found if found.tzinfo is not None else found.replace(tzinfo=UTC)
    return int(at.timestamp() * 1000)


def make_rows(options: CaptureOptions) -> RowMaker:
    return OutboxRows(options) if options.is_outbox else TableRows(options)


def check_routing(options: CaptureOptions, table: str, columns: set[str], known_of_deletes: set[str]) -> None:
    """Raise if the topic is made of columns that a delete of this table does not tell."""
    for name in options.relay.topic.columns:
        if options.is_outbox or name in ("schema", "table"):
            continue
        if name not in columns:
            raise ConfigError(
                f"Table {table} has no column {name!r}, of which topic= is made; it has {', '.join(sorted(columns))}. "
                "Nothing was captured. In braces stands schema, table, or a column that every table has."
            )
        if name not in known_of_deletes:
            raise ConfigError(
                f"topic= is made of column {name!r}, and Postgres' log does not tell it of deleted rows of {table}. "
                f"Nothing was captured. Run ALTER TABLE {table} REPLICA IDENTITY FULL, or choose another topic."
            )
