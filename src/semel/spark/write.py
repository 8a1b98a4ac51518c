"""Stage 2, in Spark's tasks: blobs into their partitions, inside the transaction that the driver owns.

A task may run twice, at the same time even. Every attempt writes the manifest's blobs under the manifest's sequences,
so a leader stores each once; and it starts where the leader stands, since a leader recognises only the last repeats.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import pyarrow as pa

from semel.client.admin import Admin
from semel.client.cluster import TRANSPORT_ERRORS
from semel.client.partitions import TopicPartition
from semel.client.sender import Stored
from semel.client.shared import SharedTransaction, SharedWriter
from semel.errors import KafkaError, SemelError, TransactionAborted
from semel.records import EncodedBatch
from semel.spark.blobs import Manifest, pack_error
from semel.spark.connections import shared_cluster
from semel.spark.failpoints import reach
from semel.spark.workers import ease_worker, read_promptly
from semel.wire import ErrorCode

WRITTEN_SCHEMA: Final = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("records", pa.int64()),
        ("base_offset", pa.int64()),  # -1: an earlier attempt has written it
        ("attempt", pa.int32()),
        ("write_ms", pa.int64()),
        ("error", pa.binary()),
    ]
)
WRITTEN_DDL: Final = (
    "topic string, partition int, records long, base_offset long, attempt int, write_ms long, error binary"
)


class BlobsChanged(TransactionAborted):
    """Spark lost encoded data and made it anew: what was written so far cannot be continued with it."""


class _Blob(NamedTuple):
    partition: TopicPartition
    sequence: int
    batch: EncodedBatch


@dataclass(slots=True)
class _Progress:
    """How far one partition has come: blobs seen, and records that are certainly stored."""

    seen: int = 0
    stored_to: int = 0
    base_offset: int = -1


@dataclass(frozen=True, slots=True)
class Write:
    """The function for `mapInArrow`: blobs in, one row for each partition out."""

    settings: Mapping[str, object] = field(repr=False)
    shared: SharedTransaction
    manifest: Manifest

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None, "mapInArrow runs its function inside a task"
        try:
            yield from self.write(read_promptly(batches), context.attemptNumber())
        finally:
            ease_worker()

    def write(self, batches: Iterator[pa.RecordBatch], attempt: int) -> Iterator[pa.RecordBatch]:
        task = _Task(self, attempt)
        started = time.monotonic()
        try:
            for batch in batches:
                task.write_all(task.checked(batch))
            task.check_complete()
        except TRANSPORT_ERRORS:
            raise  # the next attempt may have better luck
        except SemelError as error:
            yield _written([{"attempt": attempt, "error": pack_error(error)}])
            return
        finally:
            task.close()
        write_ms = int((time.monotonic() - started) * 1000)
        yield _written(
            [
                {
                    "topic": named.topic,
                    "partition": named.partition,
                    "records": progress.stored_to,
                    "base_offset": progress.base_offset,
                    "attempt": attempt,
                    "write_ms": write_ms,
                }
                for named, progress in task.progress.items()
            ]
        )


@dataclass(slots=True)
class _Task:
    """One attempt at writing the partitions of one task."""

    job: Write
    attempt: int
    progress: dict[TopicPartition, _Progress] = field(default_factory=dict[TopicPartition, _Progress])
    _writer: SharedWriter | None = None
    _begun: set[TopicPartition] = field(default_factory=set[TopicPartition])

    def checked(self, batch: pa.RecordBatch) -> list[_Blob]:
        """The blobs of one Arrow batch, each certain to be the one that the manifest has at this place."""
        meta = batch.select(["topic", "partition", "digest", "records"]).to_pylist()
        data = batch.column("data")
        return [self._check(row, memoryview(data[index].as_buffer())) for index, row in enumerate(meta)]

    def _check(self, row: Mapping[str, Any], data: memoryview) -> _Blob:
        named = TopicPartition(row["topic"], row["partition"])
        expected = self.job.manifest.partitions.get(named)
        if named not in self.progress:
            # A first attempt begins at the beginning. Any other asks, for its predecessor may have come far.
            self.progress[named] = _Progress(stored_to=self._ask_position(named) if self.attempt else 0)
        progress = self.progress[named]
        if expected is None or expected.digests[progress.seen : progress.seen + 1] != [row["digest"]]:
            raise BlobsChanged(
                f"Spark has made the data for {named.topic}-{named.partition} anew since it was counted, and it came "
                "out different, so this transaction cannot go on. Nothing of it will be seen; the micro-batch is "
                "written again.",
                code=ErrorCode.transaction_abortable,
            )
        sequence = expected.sequences[progress.seen]
        progress.seen += 1
        return _Blob(named, sequence, EncodedBatch(data, row["records"]))

    def check_complete(self) -> None:
        for named, progress in self.progress.items():
            expected = self.job.manifest.partitions[named]
            if progress.seen != len(expected.digests) or progress.stored_to != expected.records:
                raise BlobsChanged(
                    f"{progress.stored_to} of {expected.records} records for {named.topic}-{named.partition} were "
                    "there to be written, so this transaction cannot be committed. The micro-batch is written again.",
                    code=ErrorCode.transaction_abortable,
                )

    def write_all(self, blobs: list[_Blob]) -> None:
        """Write these blobs, or as many of them as no other attempt of this task has written."""
        while True:
            wanted = [blob for blob in blobs if blob.sequence >= self.progress[blob.partition].stored_to]
            if not wanted:
                return
            try:
                self._send(wanted)
                return
            except KafkaError as error:
                if error.code != ErrorCode.out_of_order_sequence_number or not self._catch_up(wanted):
                    raise

    def _send(self, blobs: list[_Blob]) -> None:
        writer, pipeline = self._open(), self.job.shared.transactional_id
        for blob in blobs:
            reach("before_produce", pipeline)
            first = None if blob.partition in self._begun else blob.sequence
            writer.send_encoded(*blob.partition, blob.batch, first_sequence=first)
            self._begun.add(blob.partition)
        self._note(writer.flush())
        for blob in blobs:
            self.progress[blob.partition].stored_to = blob.sequence + blob.batch.record_count
            reach("after_produce", pipeline)

    def _note(self, stored: list[Stored]) -> None:
        for batch in stored:
            progress = self.progress[TopicPartition(batch.topic, batch.partition)]
            if progress.base_offset < 0:
                progress.base_offset = batch.base_offset

    def _catch_up(self, blobs: list[_Blob]) -> bool:
        """Another attempt was faster: go on where the leaders stand now. False if they stand where they stood."""
        self.close()
        has_moved = False
        for named in {blob.partition for blob in blobs}:
            position = self._ask_position(named)
            progress = self.progress[named]
            has_moved = has_moved or position > progress.stored_to
            progress.stored_to = max(position, progress.stored_to)
        return has_moved

    def _ask_position(self, named: TopicPartition) -> int:
        """How many records of this transaction the leader has."""
        try:
            producers = Admin(shared_cluster(self.job.settings)).describe_producers(*named)
        except TRANSPORT_ERRORS:
            raise
        except SemelError as error:
            raise TransactionAborted(
                f"A second attempt at writing {named.topic}-{named.partition} cannot learn how far the first one came "
                f"({error}), so this transaction cannot go on. The micro-batch is written again.",
                code=ErrorCode.transaction_abortable,
            ) from error
        for producer in producers:
            if (producer.producer_id, producer.producer_epoch) == self.job.shared.identity:
                return producer.last_sequence + 1
        return 0

    def _open(self) -> SharedWriter:
        if self._writer is None:
            cluster = shared_cluster(self.job.settings)
            self._writer = SharedWriter(self.job.shared, self.job.settings, cluster=cluster)
            self._begun.clear()
        return self._writer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _written(rows: list[Mapping[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([dict(row) for row in rows], schema=WRITTEN_SCHEMA)
