"""From rows to records: the topic of each, its headers, and which rows cannot be written. No IO but questions about
topics."""
# pyarrow comes without types, so what it returns is unknown to the checker.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from semel.client.config import ProducerConfig
from semel.client.topic_rules import TopicLookup
from semel.errors import ConfigError
from semel.records.schema import HEADERS_TYPE, TIMESTAMP_TYPE
from semel.spark.bad_rows import BadRow, find_bad_rows

TOPIC_COLUMN: Final = "topic:"
"""Before the name of a column that the topic is made of."""


@dataclass(frozen=True, slots=True)
class TopicTemplate:
    """`"orders"`, `"{topic}"` or `"events.{aggregate_type}"`: names of columns stand in braces."""

    text: str
    parts: tuple[tuple[str, str | None], ...]
    """Literal text, and the column that follows it."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """
        >>> TopicTemplate.parse("events.{kind}").columns
        ('kind',)
        """
        if not isinstance(text, str) or not text:
            raise ConfigError(f'topic={text!r} names no topic: write "orders", "{{topic}}" or "events.{{kind}}".')
        try:
            found = list(string.Formatter().parse(text))
        except ValueError as error:
            raise ConfigError(f"topic={text!r} cannot be read ({error}): write columns in braces.") from error
        for _, column, form, conversion in found:
            if column is not None and (not column or form or conversion):
                raise ConfigError(f"topic={text!r} cannot be read: in braces stands the name of a column, no more.")
        return cls(text, tuple((literal, column) for literal, column, _, _ in found))

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(column for _, column in self.parts if column is not None))

    @property
    def fixed(self) -> str | None:
        """The topic of all rows, if it is the same for all."""
        return None if self.columns else "".join(literal for literal, _ in self.parts)

    def topic_for(self, value_of: Callable[[str], str | None]) -> str | None:
        """The topic of one row; None where a column that it is made of is null.

        >>> TopicTemplate.parse("events.{kind}").topic_for({"kind": "order"}.get)
        'events.order'
        """
        found = [value_of(column) if column is not None else "" for _, column in self.parts]
        pieces = [literal + value for (literal, _), value in zip(self.parts, found, strict=True) if value is not None]
        return "".join(pieces) if len(pieces) == len(found) else None

    def topics(self, rows: pa.Table) -> pa.ChunkedArray | pa.Array:
        """The topic of each row; null where a column that it is made of is null."""
        if self.fixed is not None:
            return pa.array([self.fixed] * rows.num_rows, pa.string())
        pieces: list[Any] = []
        for literal, column in self.parts:
            pieces += [pa.scalar(literal)] if literal else []
            pieces += [rows.column(TOPIC_COLUMN + column)] if column is not None else []
        how = pc.JoinOptions(null_handling="emit_null")
        return pc.call_function("binary_join_element_wise", [*pieces, pa.scalar("")], options=how)


@dataclass(frozen=True, slots=True)
class Routed:
    """What becomes of rows: `records` has a row for each, those that cannot be written too."""

    records: pa.Table
    bad: list[BadRow]

    def without_bad(self) -> pa.Table:
        if not self.bad:
            return self.records
        is_good = [True] * self.records.num_rows
        for row, _ in self.bad:
            is_good[row] = False
        return self.records.filter(pa.array(is_good))


def route(rows: pa.Table, template: TopicTemplate, lookup: TopicLookup, config: ProducerConfig, now_ms: int) -> Routed:
    """`now_ms` is the time of rows that have none.

    A source may have found topics, headers and what is wrong with a row already: in `topic`, in `headers` as records
    have them, and in `problem`.
    """
    has_topics = "topic" in rows.column_names
    bad = _problems(rows) if "problem" in rows.column_names else {}
    topics = rows.column("topic") if has_topics else template.topics(rows)
    columns = {"topic": topics, "key": rows.column("key"), "value": rows.column("value")}
    times = pc.fill_null(rows.column("timestamp"), now_ms).to_numpy()
    if (is_early := times < 0).any():
        bad |= dict.fromkeys(np.flatnonzero(is_early).tolist(), "Its timestamp cannot be read, or is before 1970.")
        times = np.where(is_early, now_ms, times)
    columns["timestamp"] = pa.array(times, pa.int64()).cast(TIMESTAMP_TYPE)
    texts = rows.column("headers")
    if texts.type == HEADERS_TYPE:
        columns["headers"] = texts
    elif texts.null_count < rows.num_rows:
        columns["headers"] = _headers(texts.to_pylist(), bad)
    records = pa.table(columns)
    for row, reason in find_bad_rows(records, None, lookup, config):
        bad.setdefault(row, reason)
    return Routed(records, [BadRow(row, bad[row]) for row in sorted(bad)])


def _problems(rows: pa.Table) -> dict[int, str]:
    return {row: reason for row, reason in enumerate(rows.column("problem").to_pylist()) if reason is not None}


def _headers(texts: list[str | None], bad: dict[int, str]) -> pa.Array:
    found: list[list[dict[str, Any]] | None] = []
    for row, text in enumerate(texts):
        try:
            found.append(None if text is None else parse_headers(text))
        except ValueError as error:
            bad[row] = str(error)
            found.append(None)
    return pa.array(found, HEADERS_TYPE)


def parse_headers(text: str) -> list[dict[str, Any]]:
    """
    >>> parse_headers('{"trace": "7", "retry": 2, "empty": null}')
    [{'key': 'trace', 'value': b'7'}, {'key': 'retry', 'value': b'2'}, {'key': 'empty', 'value': None}]
    """
    try:
        headers = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError("Its headers are not JSON.") from error
    if headers is None:
        return []
    if not isinstance(headers, dict):
        raise ValueError('Its headers are not an object of JSON, such as {"trace": "7"}.')
    try:
        return [{"key": _utf8(name).decode(), "value": _content(value)} for name, value in headers.items()]
    except UnicodeEncodeError as error:
        raise ValueError("Its headers hold text that UTF-8 cannot carry.") from error


def _content(value: Any) -> bytes | None:
    if value is None:
        return None
    return _utf8(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _utf8(text: str) -> bytes:
    return text.encode()
