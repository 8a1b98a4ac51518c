"""Single records: gathered by topic, and turned into batches once they leave. No IO.

Many of them become a table, a few are encoded one by one: for a message or two Arrow costs more than it saves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa

from semel.client.config import ProducerConfig
from semel.client.routing import wrong_partition
from semel.errors import ConfigError, RecordTooLarge
from semel.records import HEADER_BYTES, EncodedBatch, StickyPartitioner
from semel.records.arrow_encode import encode_records
from semel.records.reference import Record, write_record

Headers = Mapping[str, bytes | None] | Collection[tuple[str, bytes | None]]
"""Pairs of name and content, or a mapping where no name comes twice."""

_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_ROW_SCHEMA = pa.schema(
    [
        ("value", pa.binary()),
        ("key", pa.binary()),
        ("headers", _HEADERS),
        ("partition", pa.int32()),
        ("timestamp", pa.timestamp("ms", "UTC")),
    ]
)
FEW_ROWS = 32
"""So many take as long one by one as in a table."""
_ROW_OVERHEAD_BYTES = 16
_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1


class Row(NamedTuple):
    """One record as it was given to `send`."""

    value: bytes | None
    key: bytes | None
    headers: Sequence[tuple[str, bytes | None]]
    partition: int | None
    timestamp_ms: int


def make_row(
    topic: str, value: object, key: object, headers: Headers, partition: object, timestamp_ms: object, bytes_max: int
) -> Row:
    """The record as it will be encoded, or the reason why it never can be.

    >>> make_row("t", "text", None, {"trace": b"7"}, None, 0, 1000)
    Row(value=b'text', key=None, headers=[('trace', b'7')], partition=None, timestamp_ms=0)
    """
    if type(topic) is not str or not topic:
        raise ConfigError(f"A topic's name must be text, not {topic!r}; the record was not taken.")
    if value is not None and type(value) is not bytes:
        value = _as_bytes(topic, "value", value)
    if key is not None and type(key) is not bytes:
        key = _as_bytes(topic, "key", key)
    if partition is not None and (type(partition) is not int or not 0 <= partition <= _INT32_MAX):
        raise _wrong_type(topic, f"partition {partition!r} is not a whole number from 0 on")
    if type(timestamp_ms) is not int or abs(timestamp_ms) > _INT64_MAX:
        raise _wrong_type(topic, f"timestamp_ms {timestamp_ms!r} is not a whole number of 64 bits")
    row = Row(value, key, _pairs(topic, headers) if headers else [], partition, timestamp_ms)
    if row_bytes(row) > bytes_max // 2:
        _check_size(topic, row, bytes_max)
    return row


def row_bytes(row: Row) -> int:
    """About what the record takes in a batch."""
    size = len(row.value or b"") + len(row.key or b"") + _ROW_OVERHEAD_BYTES
    for name, content in row.headers:
        size += len(name) + len(content or b"")
    return size


def _as_bytes(topic: str, what: str, content: object) -> bytes:
    if isinstance(content, str):
        try:
            return content.encode()
        except UnicodeEncodeError as error:
            raise _wrong_type(topic, f"its {what} cannot be written as UTF-8 ({error.reason})") from error
    if isinstance(content, bytes | bytearray | memoryview):
        return bytes(content)
    kind = type(content).__name__
    raise _wrong_type(topic, f"its {what} is of type {kind}; write bytes, text or None, such as json.dumps(...)")


def _pairs(topic: str, headers: Headers) -> list[tuple[str, bytes | None]]:
    pairs: list[tuple[str, bytes | None]] = []
    try:
        given = [(name, content) for name, content in (headers.items() if isinstance(headers, Mapping) else headers)]
    except (TypeError, ValueError) as error:
        advice = 'headers must be pairs such as [("name", b"content")], or a mapping'
        raise _wrong_type(topic, f"{advice} ({error})") from error
    for name, content in given:
        if not isinstance(name, str):
            raise _wrong_type(topic, f"the name of a header must be text, not {name!r}")
        _as_bytes(topic, "header", name)
        pairs.append((name, None if content is None else _as_bytes(topic, f"header {name!r}", content)))
    return pairs


def _check_size(topic: str, row: Row, bytes_max: int) -> None:
    body = bytearray()
    write_record(body, Record(0, row.timestamp_ms, row.key, row.value, tuple(row.headers)), 0, row.timestamp_ms)
    size = len(body) + HEADER_BYTES
    if size > bytes_max:
        raise RecordTooLarge(
            f"A record for topic {topic!r} takes {size} bytes in a batch of its own, more than the limit of "
            f"{bytes_max}; it was not taken. Raise max.request.size here and max.message.bytes of the topic "
            "(message.max.bytes of the broker), or make the record smaller."
        )


def _wrong_type(topic: str, why: str) -> ConfigError:
    return ConfigError(f"A record for topic {topic!r} was not taken: {why}.")


class Added(NamedTuple):
    """What the buffer holds after a record was added."""

    topic_bytes: int
    """How many bytes wait for its topic."""
    is_first: bool
    """Whether nothing waited before it."""


@dataclass(slots=True)
class RowBuffer:
    """Single records, gathered by topic until they are worth a batch. One thread may add while another takes."""

    _rows: dict[str, list[Row]] = field(default_factory=dict[str, list[Row]])
    _bytes: dict[str, int] = field(default_factory=dict[str, int])
    _leaving: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_empty(self) -> bool:
        return not self._rows

    @property
    def record_count(self) -> int:
        """How many are here, or were taken and are in no batch yet."""
        with self._lock:
            return self._leaving + sum(map(len, self._rows.values()))

    def add(self, topic: str, row: Row) -> Added:
        size = row_bytes(row)
        with self._lock:
            is_first = not self._rows
            rows = self._rows.get(topic)
            if rows is None:
                rows = self._rows[topic] = []
                self._bytes[topic] = 0
            rows.append(row)
            self._bytes[topic] += size
            return Added(self._bytes[topic], is_first)

    def take(self) -> dict[str, list[Row]]:
        """Everything gathered, by topic; the buffer is empty afterwards. It counts until `note_gone`."""
        with self._lock:
            taken, self._rows, self._bytes = self._rows, {}, {}
            self._leaving += sum(map(len, taken.values()))
        return taken

    def note_gone(self, count: int) -> None:
        """So many of those that were taken are in batches now, or were refused."""
        with self._lock:
            self._leaving -= count

    def clear(self) -> None:
        with self._lock:
            self._rows, self._bytes = {}, {}


def are_few(rows: Sequence[Row]) -> bool:
    """Whether the rows are worth no table, and are of the types they should be, so that none of them is refused."""
    return len(rows) <= FEW_ROWS and all(map(_is_plain, rows))


def _is_plain(row: Row) -> bool:
    value, key, headers, partition, timestamp_ms = row
    return (
        (value is None or type(value) is bytes)
        and (key is None or type(key) is bytes)
        and (partition is None or (type(partition) is int and 0 <= partition <= _INT32_MAX))
        and (type(timestamp_ms) is int and abs(timestamp_ms) <= _INT64_MAX)
        and all(
            type(name) is str and name.isascii() and (content is None or type(content) is bytes)
            for name, content in headers
        )
    )


def to_table(topic: str, rows: Sequence[Row]) -> pa.Table:
    """The rows as a table that `encode_for_partitions` takes."""
    columns: list[Sequence[Any]] = list(zip(*rows, strict=True))
    columns[2] = [[{"key": name, "value": content} for name, content in headers] for headers in columns[2]]
    try:
        arrays = [pa.array(column, field.type) for column, field in zip(columns, _ROW_SCHEMA, strict=True)]
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError) as error:
        raise ConfigError(f"A record for topic {topic!r} has a field of the wrong type: {error}.") from error
    return pa.table(arrays, schema=_ROW_SCHEMA)


def encode_few_rows(
    topic: str,
    rows: Sequence[Row],
    *,
    partition_count: Callable[[str], int],
    sticky: StickyPartitioner,
    config: ProducerConfig,
) -> Iterator[tuple[str, int, EncodedBatch]]:
    """What `encode_for_partitions` makes of a table of these rows, which `are_few`."""
    count = partition_count(topic)
    by_partition: dict[int, list[Row]] = {}
    for row in rows:
        chosen = sticky.choose(row.key, row.value, count) if row.partition is None else row.partition
        by_partition.setdefault(chosen, []).append(row)
    if wrong := [row.partition for row in rows if row.partition is not None and row.partition >= count]:
        raise wrong_partition(topic, wrong[0], count)
    for partition in sorted(by_partition):
        records = [
            Record(number, row.timestamp_ms, row.key, row.value, tuple(row.headers))
            for number, row in enumerate(by_partition[partition])
        ]
        for batch in _encode(records, config):
            yield topic, partition, batch


def _encode(records: Sequence[Record], config: ProducerConfig) -> list[EncodedBatch]:
    """By the same limits as `encode_rows`."""
    how = {"compression": config.compression_type, "compression_level": config.compression_level}
    with suppress(RecordTooLarge):
        return encode_records(records, batch_bytes_max=config.batch_bytes, **how)
    return encode_records(records, batch_bytes_max=config.request_bytes_max, **how)
