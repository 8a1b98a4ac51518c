"""The records of a block, taken while it runs and encoded for their partitions. Nothing is sent before its end."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable

import pyarrow as pa

from semel.bridges.both.decision import StoredBatch
from semel.client.cluster import Cluster
from semel.client.config import ProducerConfig
from semel.client.routing import checked_table, encode_for_partitions
from semel.client.rows import Headers, RowBuffer, are_few, encode_few_rows, make_row, to_table
from semel.errors import InvalidState, SemelError
from semel.records import EncodedBatch, StickyPartitioner


class BlockRecords:
    """Keeps records in their order. One that is refused dooms the block, since it was meant to be part of it."""

    def __init__(self, cluster: Cluster, config: ProducerConfig) -> None:
        self._cluster = cluster
        self._config = config
        self._sticky = StickyPartitioner(random.Random(), batch_bytes=config.batch_bytes)
        self._rows = RowBuffer()
        self._batches: list[StoredBatch] = []
        self._refused: SemelError | None = None

    def add(
        self,
        topic: str,
        value: bytes | str | None,
        key: bytes | str | None,
        headers: Headers,
        partition: int | None,
        timestamp_ms: int | None,
    ) -> None:
        stamped = int(time.time() * 1000) if timestamp_ms is None else timestamp_ms
        try:
            row = make_row(topic, value, key, headers, partition, stamped, self._config.request_bytes_max)
            if self._rows.add(topic, row).topic_bytes >= self._config.batch_bytes:
                self._encode_rows()
        except SemelError as error:
            self._refused = self._refused or error
            raise

    def add_table(self, topic: str | None, table: pa.Table, partition: int | None) -> None:
        try:
            self._encode_rows()
            self._encode_table(topic, checked_table(table), partition)
        except SemelError as error:
            self._refused = self._refused or error
            raise

    def take(self) -> list[StoredBatch]:
        """All records, ready to be stored and sent."""
        if self._refused is not None:
            raise InvalidState(
                "A record of this block was refused, so the block cannot commit: the database is rolled back and no "
                f"record is in Kafka. Let the exception leave the block, or send a record that fits. Earlier: "
                f"{self._refused}"
            ) from self._refused
        self._encode_rows()
        return self._batches

    def _encode_rows(self) -> None:
        for topic, rows in self._rows.take().items():
            if not are_few(rows):
                self._encode_table(topic, to_table(topic, rows), None)
                continue
            self._keep(
                encode_few_rows(
                    topic, rows, partition_count=self._partition_count, sticky=self._sticky, config=self._config
                )
            )

    def _encode_table(self, topic: str | None, table: pa.Table, partition: int | None) -> None:
        self._keep(
            encode_for_partitions(
                topic,
                table,
                partition,
                partition_count=self._partition_count,
                sticky=self._sticky,
                config=self._config,
                now_ms=int(time.time() * 1000),
            )
        )

    def _keep(self, encoded: Iterable[tuple[str, int, EncodedBatch]]) -> None:
        # A copy: sending stamps a batch in place, and the one in the database must be as good for another producer.
        self._batches += [
            StoredBatch(topic, partition, batch.record_count, bytes(batch.data)) for topic, partition, batch in encoded
        ]

    def _partition_count(self, topic: str) -> int:
        return len(self._cluster.leaders(topic))
