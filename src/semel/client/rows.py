"""Single records: gathered by topic, and turned into batches once they leave. No IO.

Many of them become a table, a few are encoded one by one: for a message or two Arrow costs more than it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa

from semel.client.config import ProducerConfig
from semel.client.routing import wrong_partition
from semel.errors import ConfigError, RecordTooLarge
from semel.records import EncodedBatch, StickyPartitioner
from semel.records.few import FEW_ROWS, encode_few
from semel.records.reference import Record

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


@dataclass(slots=True)
class RowBuffer:
    """Single records, gathered by topic until they are worth a batch."""

    _rows: dict[str, list[Row]] = field(default_factory=dict[str, list[Row]])
    _bytes: dict[str, int] = field(default_factory=dict[str, int])

    def add(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        headers: Collection[tuple[str, bytes | None]],
        partition: int | None,
        timestamp_ms: int,
    ) -> int:
        """Take one record; returns how many bytes wait for its topic."""
        rows = self._rows.get(topic)
        if rows is None:
            rows = self._rows[topic] = []
            self._bytes[topic] = 0
        rows.append(Row(value, key, [(name, content) for name, content in headers], partition, timestamp_ms))
        self._bytes[topic] += len(value or b"") + len(key or b"") + _ROW_OVERHEAD_BYTES
        return self._bytes[topic]

    def take(self) -> dict[str, list[Row]]:
        """Everything gathered, by topic; the buffer is empty afterwards."""
        taken, self._rows, self._bytes = self._rows, {}, {}
        return taken

    def clear(self) -> None:
        self._rows.clear()
        self._bytes.clear()


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
        return encode_few(records, batch_bytes_max=config.batch_bytes, **how)
    return encode_few(records, batch_bytes_max=config.request_bytes_max, **how)
