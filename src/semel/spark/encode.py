"""Stage 1, in Spark's tasks: rows become compressed record batches for their partitions, outside of any transaction.

All of the user's computing happens while this reads its input, so none of it can hold a transaction open.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from semel.client.config import ProducerConfig
from semel.client.routing import encode_for_partitions
from semel.client.settings import parse_config
from semel.errors import SemelError
from semel.records import EncodedBatch, StickyPartitioner
from semel.spark.blobs import Slots, blob_batch, pack_error
from semel.spark.connections import shared_cluster
from semel.spark.workers import ease_worker

BUFFER_BYTES: Final = 32 * 1024 * 1024
"""Rows that are gathered before they are sorted by partition: enough for full batches to a few dozen partitions."""

_YIELD_BYTES: Final = 1024 * 1024
_MARKS: Final = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class Encode:
    """The function for `mapInArrow`: tables of rows in, blobs out."""

    settings: Mapping[str, object]
    topic: str | None
    partition_counts: Mapping[str, int]
    """Of the topics that the driver knows; others are asked for."""
    slots: Slots
    now_ms: int
    seed: str
    buffer_bytes: int = BUFFER_BYTES

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None, "mapInArrow runs its function inside a task"
        try:
            yield from self.encode(batches, context.partitionId())
        finally:
            ease_worker()

    def encode(self, batches: Iterator[pa.RecordBatch], map_task: int) -> Iterator[pa.RecordBatch]:
        config = parse_config(self.settings).producer
        # Without a key a record may go anywhere, yet a repeat of this task should send it to the same place.
        sticky = StickyPartitioner(random.Random(f"{self.seed}-{map_task}"), batch_bytes=config.batch_bytes)
        number = 0
        for table in _gather(batches, self.buffer_bytes):
            waiting: list[Mapping[str, Any]] = []
            waiting_bytes = 0
            try:
                for topic, partition, batch in self._encode_table(table, config, sticky):
                    waiting.append(self._row(topic, partition, map_task, number, batch))
                    waiting_bytes += len(batch.data)
                    number += 1
                    if waiting_bytes >= _YIELD_BYTES:
                        yield blob_batch(waiting)
                        waiting, waiting_bytes = [], 0
            except SemelError as error:
                yield blob_batch([{"slot": 0, "map": map_task, "number": number, "error": pack_error(error)}])
                return
            if waiting:
                yield blob_batch(waiting)

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
        return len(shared_cluster(self.settings).leaders(topic)) if known is None else known

    def _row(self, topic: str, partition: int, map_task: int, number: int, batch: EncodedBatch) -> Mapping[str, Any]:
        return {
            "slot": self.slots.slot(topic, partition),
            "topic": topic,
            "partition": partition,
            "map": map_task,
            "number": number,
            "mark": _MARKS.getrandbits(63),
            "records": batch.record_count,
            "data": batch.data,
        }


def _gather(batches: Iterator[pa.RecordBatch], enough_bytes: int) -> Iterator[pa.Table]:
    gathered: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if batch.num_rows:
            gathered.append(batch)
            size += batch.nbytes
        if size >= enough_bytes:
            yield pa.Table.from_batches(gathered)
            gathered, size = [], 0
    if gathered:
        yield pa.Table.from_batches(gathered)
