"""Stage 1, in Spark's tasks: rows become compressed record batches for their partitions, outside of any transaction.

All of the user's computing happens while this reads its input, so none of it can hold a transaction open.
"""

from __future__ import annotations

import hashlib
import random
import secrets
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import pyarrow as pa

from semel.client.cluster import Cluster
from semel.client.config import ProducerConfig
from semel.client.routing import encode_for_partitions
from semel.client.settings import parse_config
from semel.client.topic_rules import TopicLookup
from semel.errors import SemelError
from semel.records import EncodedBatch, StickyPartitioner
from semel.spark.blobs import Slots, blob_batch, pack_error
from semel.spark.connections import shared_cluster
from semel.spark.dead_letters import DeadLetterTerms
from semel.spark.row_sorting import Sorter, explain
from semel.spark.spool import SpoolFailed, SpoolFile
from semel.spark.workers import ease_worker, read_promptly

BUFFER_BYTES: Final = 32 * 1024 * 1024
"""Rows that are gathered before they are sorted by partition: enough for full batches to a few dozen partitions."""

_KEYLESS_BYTES: Final = 8 * 1024 * 1024
"""The same where nothing says which partition a row belongs to, so that they fill one after the other. Memory that is
used again while it is in the processor's cache is a tenth of this stage."""

SMALL_BYTES: Final = 128 * 1024
"""What a task may hand to the driver, which gets it from all tasks of a stage."""

_ROW_BYTES: Final = 8
"""What a row takes besides its data: where it ends, in each column."""
_PLACING: Final = frozenset({"key", "partition", "topic"})
_YIELD_BYTES: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Encode:
    """The function for `mapInArrow`: tables of rows in, blobs out."""

    settings: Mapping[str, object] = field(repr=False)
    topic: str | None
    partition_counts: Mapping[str, int]
    """Of the topics that the driver knows; others are asked for."""
    slots: Slots
    now_ms: int
    seed: str
    spool: str | None = None
    """A folder that the driver can read."""
    buffer_bytes: int = BUFFER_BYTES
    dead_letters: DeadLetterTerms | None = None
    """Without it a row that cannot be written is an error."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None, "mapInArrow runs its function inside a task"
        try:
            yield from self.encode(read_promptly(batches), context.partitionId())
        finally:
            ease_worker()

    def encode(self, batches: Iterator[pa.RecordBatch], map_task: int) -> Iterator[pa.RecordBatch]:
        """Rows for the blobs of one task: with the data of each, or with its place in a file."""
        rows = self._rows(batches, map_task)
        first, is_all = _first_small(rows)
        if is_all:
            yield from _in_chunks(iter([{**row, "is_small": True} for row in first]))
        elif self.spool is None:
            yield from _in_chunks(chain(first, rows))
        else:
            yield blob_batch(self._spooled(chain(first, rows), map_task))

    def encode_all(self, batches: Iterator[pa.RecordBatch], map_task: int) -> list[Mapping[str, Any]]:
        """The same rows at once, for a caller that holds them anyway."""
        rows = self._rows(batches, map_task)
        first, is_all = _first_small(rows)
        if is_all or self.spool is None:
            return [*first, *rows]
        return self._spooled(chain(first, rows), map_task)

    def _rows(self, batches: Iterator[pa.RecordBatch], map_task: int) -> Iterator[dict[str, Any]]:
        config = parse_config(self.settings).producer
        # Without a key a record may go anywhere, yet a repeat of this task should send it to the same place.
        seed = f"{self.seed}-{map_task}"
        sticky = StickyPartitioner(random.Random(seed), batch_bytes=config.batch_bytes)
        sorter = self._sorter(config, sticky, seed)
        number = 0
        for table in gather(batches, self.buffer_bytes):
            input_bytes = table.nbytes
            try:
                encoded = self._encode_table(table, config, sticky) if sorter is None else sorter.encode(table)
                for topic, partition, batch in encoded:
                    row = self._row(topic, partition, map_task, number, batch) | {"input_bytes": input_bytes}
                    if sorter is not None and topic == sorter.terms.topic:
                        row |= {"dead_letters": batch.record_count, "example": sorter.example}
                    yield row
                    number, input_bytes = number + 1, 0
            except SemelError as error:
                yield _failure(error if sorter else self._explain(error, table, config), map_task, number)
                return

    def _sorter(self, config: ProducerConfig, sticky: StickyPartitioner, seed: str) -> Sorter | None:
        if self.dead_letters is None:
            return None
        return Sorter(self.dead_letters, self.topic, self._cluster, config, sticky, self.now_ms, seed)

    def _explain(self, error: SemelError, table: pa.Table, config: ProducerConfig) -> SemelError:
        # What is not there has been waited for already.
        return explain(error, table, self.topic, TopicLookup(self._cluster, missing_patience_ms=0), config)

    def _cluster(self) -> Cluster:
        return shared_cluster(self.settings)

    def _spooled(self, rows: Iterator[dict[str, Any]], map_task: int) -> list[Mapping[str, Any]]:
        """The rows, with their data in a file."""
        assert self.spool is not None
        placed: list[Mapping[str, Any]] = []
        try:
            with SpoolFile(self.spool, f"{map_task}-{secrets.token_hex(8)}") as file:
                for row in rows:
                    data = row.pop("data", None)
                    if data is not None:
                        row.update(file=file.path, at=file.append(data))
                    placed.append(row)
        except SpoolFailed as error:
            placed.append(_failure(error, map_task, len(placed)))
        return placed

    def _encode_table(
        self, table: pa.Table, config: ProducerConfig, sticky: StickyPartitioner
    ) -> Iterator[tuple[str, int, EncodedBatch]]:
        return encode_for_partitions(
            self.topic,
            table,
            None,
            partition_count=self._partition_count,
            sticky=sticky,
            config=config,
            now_ms=self.now_ms,
        )

    def _partition_count(self, topic: str) -> int:
        known = self.partition_counts.get(topic)
        return len(self._cluster().leaders(topic)) if known is None else known

    def _row(self, topic: str, partition: int, map_task: int, number: int, batch: EncodedBatch) -> dict[str, Any]:
        return {
            "slot": self.slots.slot(topic, partition),
            "topic": topic,
            "partition": partition,
            "map": map_task,
            "number": number,
            "digest": _digest(batch.data) if self.spool is None else 0,
            "records": batch.record_count,
            "bytes": len(batch.data),
            "data": batch.data,
        }


def _first_small(rows: Iterator[dict[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
    """As many rows as are surely small, and whether these are all."""
    first: list[dict[str, Any]] = []
    first_bytes = 0
    for row in rows:
        first.append(row)
        first_bytes += row.get("bytes", 0)
        if first_bytes > SMALL_BYTES:
            return first, False
    return first, True


def _digest(data: memoryview) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:8], signed=True)


def _failure(error: SemelError, map_task: int, number: int) -> dict[str, Any]:
    return {"slot": 0, "map": map_task, "number": number, "is_small": True, "error": pack_error(error)}


def _in_chunks(rows: Iterator[Mapping[str, Any]]) -> Iterator[pa.RecordBatch]:
    waiting: list[Mapping[str, Any]] = []
    waiting_bytes = 0
    for row in rows:
        waiting.append(row)
        waiting_bytes += row.get("bytes", 0)
        if waiting_bytes >= _YIELD_BYTES:
            yield blob_batch(waiting)
            waiting, waiting_bytes = [], 0
    if waiting:
        yield blob_batch(waiting)


def gather(batches: Iterator[pa.RecordBatch], buffer_bytes: int) -> Iterator[pa.Table]:
    """The rows in tables of about so many bytes.

    A table ends with the row that fills it, wherever Spark's portions end: rows that were lost, and that Spark computes
    anew and hands over in other portions, become the same blobs again.
    """
    gathered: list[pa.RecordBatch] = []
    room = 0
    for batch in batches:
        while batch.num_rows:
            if not gathered:
                room = min(buffer_bytes, _KEYLESS_BYTES) if _PLACING.isdisjoint(batch.schema.names) else buffer_bytes
            weight = _weight(batch)
            if weight < room:
                gathered.append(batch)
                room -= weight
                break
            rows = 1 + bisect_left(range(1, batch.num_rows), room, key=lambda rows: _weight(batch.slice(0, rows)))
            yield pa.Table.from_batches([*gathered, batch.slice(0, rows)])
            gathered, batch = [], batch.slice(rows)
    if gathered:
        yield pa.Table.from_batches(gathered)


def _weight(batch: pa.RecordBatch) -> int:
    """The bytes of all rows, the same however they are divided among batches."""
    return _ROW_BYTES * batch.num_rows + sum(_data_bytes(column) for column in batch.columns)


def _data_bytes(array: pa.Array) -> int:
    if not len(array):
        return 0
    if pa.types.is_list(array.type):
        return _data_bytes(array.flatten())
    if pa.types.is_struct(array.type):
        return sum(_data_bytes(field) for field in array.flatten())
    if pa.types.is_integer(array.type):
        return 4 * len(array)
    is_large = pa.types.is_large_binary(array.type) or pa.types.is_large_string(array.type)
    ends = memoryview(array.buffers()[1]).cast("q" if is_large else "i")
    return ends[array.offset + len(array)] - ends[array.offset]
