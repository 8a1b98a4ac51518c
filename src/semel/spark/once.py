"""One micro-batch or job, written exactly once: encode, write inside one transaction, settle; again if that fails.

This runs on the driver. What has failed before the transaction is over leaves no trace; the encoded data is kept, so
that a repeat writes the same bytes under a new epoch without computing anything anew. The driver itself writes what it
can get hold of cheaply: little data, and all data of a Spark on one machine. Spark's tasks write the rest.
"""

from __future__ import annotations

import logging
import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from semel.client.partitions import TopicPartition
from semel.client.sender import Stored
from semel.client.shared import SharedTransaction
from semel.errors import (
    BrokerUnreachable,
    CommitUnknown,
    ConnectionLost,
    KafkaError,
    RequestTimedOut,
    SemelError,
    TransactionAborted,
)
from semel.metrics.parts import SINK
from semel.observe import Pipeline, Work
from semel.spark.blobs import BLOB_SCHEMA, Manifest, Piece, Slots, read_manifest, read_pieces, unpack_error
from semel.spark.dead_letters import DeadLetterTerms, check_count, make_terms, refused_for_size
from semel.spark.encode import Encode
from semel.spark.failpoints import reach
from semel.spark.feeding import feeding, feeding_few
from semel.spark.input_offsets import Input
from semel.spark.lag import LagRefused, addresses
from semel.spark.ledger import Entry
from semel.spark.options import SinkOptions
from semel.spark.owner import PipelineFenced, PipelineOwner
from semel.spark.progress import BatchProgress, log_event, report_committed
from semel.spark.rows import Rows
from semel.spark.spool import batch_folder
from semel.spark.write import WRITTEN_DDL, BlobsChanged, Write
from semel.wire import ErrorCode

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_CHUNK_BYTES: Final = 16 * 1024 * 1024
_CHUNK_ROWS_MAX: Final = 10_000
_LOCAL_MASTER: Final = re.compile(r"local(\[.*\])?")
_CANCELLED: Final = re.compile(r"SPARK_JOB_CANCELLED|Job \d+ (was )?cancelled", re.IGNORECASE)
_DATA_LOST: Final = re.compile(r"stage with indeterminate output was failed and retried")
_WRITERS_MAX: Final = 32
_CURABLE: Final = frozenset(
    {
        ErrorCode.invalid_producer_epoch,
        ErrorCode.producer_fenced,
        ErrorCode.out_of_order_sequence_number,
        ErrorCode.unknown_producer_id,
        ErrorCode.transaction_abortable,
        ErrorCode.invalid_txn_state,
    }
)


class WriteFailed(TransactionAborted):
    """Spark's tasks could not write a micro-batch."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A micro-batch as blobs, and their manifest."""

    manifest: Manifest
    pieces: list[Piece] | None
    """The blobs, if the driver has them."""
    blobs: DataFrame | None
    """The blobs where Spark keeps them, if it does."""
    writers: int
    encode_ms: int

    def release(self) -> None:
        if self.blobs is not None:
            self.blobs.unpersist()


@dataclass(frozen=True, slots=True)
class OneTransaction(ABC):
    """One micro-batch or job, to be written in a single transaction."""

    options: SinkOptions
    owner: PipelineOwner
    entry: Entry
    progress: BatchProgress

    @abstractmethod
    def _prepared(self) -> AbstractContextManager[Callable[[], Encoded]]:
        """What encodes the rows, each time in the same way, for as long as that may be needed."""

    @abstractmethod
    def _write_blobs(self, encoded: Encoded, shared: SharedTransaction) -> list[Stored]:
        """Write what is encoded in the open transaction."""

    def _offsets(self) -> Mapping[TopicPartition, int]:
        """The input offsets for the group."""
        return {}

    def run(self) -> BatchProgress:
        """Write and commit, repeating what failed up to `attempts` times. Raises the last failure."""
        progress = self.progress
        pipeline = Pipeline(SINK, self.options.name)
        with pipeline.begin(
            batch_id=progress.batch_id, job_id=progress.job_id, transactional_id=self.owner.transactional_id
        ) as work:
            done = self._run(work)
            report_committed(done, work)
            return done

    def _run(self, work: Work) -> BatchProgress:
        encoded: Encoded | None = None
        with self._prepared() as encode:
            try:
                for attempt in range(1, self.options.attempts + 1):
                    if encoded is None:
                        encoded = encode()
                        reach("after_encode", self.options.name)
                    try:
                        return self._write_with_lag(encoded, attempt, work)
                    except SemelError as error:
                        if not _is_curable(error) or attempt == self.options.attempts:
                            raise self._explain(error, attempt) from error
                        work.failed_once(error)
                        self._log_failure(error, attempt)
                        if isinstance(error, BlobsChanged):
                            encoded.release()
                            encoded = None
                raise AssertionError("the last attempt returns or raises")
            finally:
                if encoded is not None:
                    encoded.release()

    def _log_failure(self, error: SemelError, attempt: int) -> None:
        log_event(
            "batch failed, will be written again",
            logging.WARNING,
            pipeline=self.options.name,
            batch_id=self.progress.batch_id,
            job_id=self.progress.job_id,
            attempt=attempt,
            error=str(error),
        )

    def _explain(self, error: SemelError, attempt: int) -> SemelError:
        if isinstance(error, KafkaError) and error.code == ErrorCode.message_too_large:
            return refused_for_size(error, self.options)
        if isinstance(error, PipelineFenced | CommitUnknown) or attempt == 1:
            return error
        return WriteFailed(
            f"Pipeline {self.options.name!r} could not write in {attempt} attempts; each was aborted and nothing of "
            f"them will be seen. Start it again when the cause is gone. Last: {error}",
            code=error.code if isinstance(error, KafkaError) else ErrorCode.unknown_server_error,
        )

    def _write_with_lag(self, encoded: Encoded, attempt: int, work: Work) -> BatchProgress:
        try:
            return self._write(encoded, attempt, work)
        except LagRefused as error:
            self.owner.lag.switch_off(error, self.progress.batch_id)
            return self._write(encoded, attempt, work)

    def _write(self, encoded: Encoded, attempt: int, work: Work) -> BatchProgress:
        """One transaction, from its beginning to its end."""
        # Asked for before the transaction is open: a topic that has gone must not hold it up.
        offsets = self._offsets()
        opened = time.monotonic()
        shared = self.owner.begin()
        work.note(producer_id=shared.identity.producer_id, producer_epoch=shared.identity.producer_epoch)
        try:
            stored = self._write_blobs(encoded, shared)
            written = time.monotonic()
            records = self.entry.records + encoded.manifest.records
            entry = replace(self.entry, records=records, at_ms=int(time.time() * 1000))
            self.owner.settle(stored, entry, offsets)
        except BaseException as error:
            self._abort_after(error)
            raise
        return replace(
            self.progress,
            records=encoded.manifest.records,
            dead_letters=encoded.manifest.dead_letters,
            input_bytes=encoded.manifest.input_bytes,
            bytes=encoded.manifest.bytes,
            partitions=len(encoded.manifest.partitions),
            encode_ms=encoded.encode_ms,
            write_ms=int((written - opened) * 1000),
            commit_ms=_since(written),
            open_ms=_since(opened) if stored else _since(written),
            attempts=attempt,
        )

    def _abort_after(self, error: BaseException) -> None:
        if isinstance(error, PipelineFenced | CommitUnknown):
            return
        try:
            self.owner.abort()
        except PipelineFenced:
            raise
        except SemelError as second:
            error.add_note(
                f"The abort was not confirmed ({second}); the coordinator aborts it after transaction.timeout.ms."
            )


@dataclass(frozen=True, slots=True)
class OneWrite(OneTransaction):
    """Written by jobs of the sink's own: the first encodes the rows, and where the driver cannot, a second writes."""

    rows: Rows
    topic: str | None
    """None if the rows name their topics."""
    topics: Sequence[str]
    """All topics that the program names, also those in a column that was made of them."""
    batch_input: Input | None = None
    """None for a job."""
    row_bytes: float | None = None
    """How long the rows of this pipeline are on the average, if that is known."""

    # -- stage 1 ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _prepared(self) -> Iterator[Callable[[], Encoded]]:
        with self._spool() as spool, self.rows.encoded(encode := self._encoder(spool)) as blobs:
            yield lambda: self._encode(blobs, encode)

    def _spool(self) -> AbstractContextManager[str | None]:
        """A folder for encoded data, if tasks and driver share a machine, and nobody asked for tasks that write."""
        conf: Any = self.rows.df.sparkSession.conf
        if self.options.writers is not None or not _LOCAL_MASTER.fullmatch(conf.get("spark.master", "")):
            return nullcontext()
        return batch_folder(conf.get("spark.local.dir", "").split(",")[0] or None)

    def _encoder(self, spool: str | None) -> Encode:
        """What encodes this micro-batch, each time in the same way."""
        counts = {topic: self.owner.partition_count(topic) for topic in self.topics}
        return Encode(
            self.options.settings,
            self.topic,
            counts,
            Slots.make(self._writers(counts)),
            int(time.time() * 1000),
            f"{self.options.name}-{self.progress.batch_id}-{self.progress.job_id}",
            spool,
            dead_letters=self._dead_letter_terms(),
        )

    def _dead_letter_terms(self) -> DeadLetterTerms | None:
        return make_terms(self.options, self.owner.cluster, self.topics, self.progress.batch_id, self.progress.job_id)

    def _encode(self, blobs: DataFrame, encode: Encode) -> Encoded:
        """Run the user's plan once, and keep what comes out of it as blobs: with Spark, or in files."""
        from pyspark.sql import functions

        started = time.monotonic()
        is_kept = encode.spool is None
        if is_kept:
            blobs.persist()
            small = functions.when(functions.col("is_small"), functions.col("data")).alias("data")
            found = blobs.select(*(name for name in BLOB_SCHEMA.names if name != "data"), small)
        else:
            found = blobs
        try:
            with feeding(self.rows.df, self.row_bytes, self.options.producer_config.request_bytes_max):
                collected = found.collect()
            manifest = read_manifest(collected)
            check_count(manifest, encode.dead_letters)
            pieces = None if self.options.writers is not None else read_pieces(collected)
        except BaseException:
            if is_kept:
                blobs.unpersist()
            raise
        writers = len(encode.slots.values)
        return Encoded(manifest, pieces, blobs if is_kept else None, writers, _since(started))

    def _writers(self, partition_counts: Mapping[str, int]) -> int:
        """How many tasks write: no more than there are partitions, or cores as far as one can know."""
        spark: Any = self.rows.df.sparkSession
        if self.options.writers is not None:
            wanted = self.options.writers
        elif hasattr(spark, "_jsparkSession"):
            wanted = spark.sparkContext.defaultParallelism
        else:
            wanted = min(_WRITERS_MAX, int(spark.conf.get("spark.sql.shuffle.partitions")))
        return max(1, min(wanted, sum(partition_counts.values()) or wanted))

    # -- stage 2 ---------------------------------------------------------------------------------------------------

    def _offsets(self) -> Mapping[TopicPartition, int]:
        if self.batch_input is None:
            return {}
        df = self.rows.df
        return self.owner.lag.offsets(self.batch_input, self.owner.cluster, lambda: addresses(df))

    def _write_blobs(self, encoded: Encoded, shared: SharedTransaction) -> list[Stored]:
        if not encoded.manifest.partitions:
            return []
        if encoded.pieces is not None:
            return check_stored(self.owner.write(encoded.pieces), encoded.manifest)
        assert encoded.blobs is not None, "what the driver does not have, Spark has"
        return self._run_tasks(encoded.blobs, encoded, shared)

    def _run_tasks(self, blobs: DataFrame, encoded: Encoded, shared: SharedTransaction) -> list[Stored]:
        try:
            with feeding_few(self.rows.df.sparkSession, _chunk_rows(encoded.manifest)):
                job = Write(self.options.settings, shared, encoded.manifest)
                of_tasks = blobs.repartition(encoded.writers, "slot").sortWithinPartitions("map", "number")
                written = of_tasks.mapInArrow(job, WRITTEN_DDL).collect()
        except SemelError:
            raise
        except Exception as error:
            if _CANCELLED.search(str(error)):
                raise
            if _DATA_LOST.search(str(error)):
                raise BlobsChanged(
                    "Spark has lost encoded data with an executor and made it anew, so this transaction cannot go on. "
                    "Nothing of it will be seen; the micro-batch is written again.",
                    code=ErrorCode.transaction_abortable,
                ) from error
            raise WriteFailed(
                f"Spark's write tasks failed, so the transaction is aborted and nothing of it will be seen. "
                f"Last: {_first_line(error)}",
                code=ErrorCode.transaction_abortable,
            ) from error
        return check_written(written, encoded.manifest)


def check_written(rows: list[Any], manifest: Manifest) -> list[Stored]:
    """What the write tasks report, if it is the whole manifest; raises a task's error, or `BlobsChanged`."""
    for row in rows:
        if row.error is not None:
            raise unpack_error(row.error)
    return check_stored([Stored(row.topic, row.partition, row.base_offset, row.records) for row in rows], manifest)


def check_stored(stored: list[Stored], manifest: Manifest) -> list[Stored]:
    """What was stored, if it is the whole manifest and nothing else; raises `BlobsChanged` otherwise."""
    records: Counter[TopicPartition] = Counter()
    for batch in stored:
        records[TopicPartition(batch.topic, batch.partition)] += batch.record_count
    if records != {named: partition.records for named, partition in manifest.partitions.items()}:
        raise BlobsChanged(
            f"{records.total()} of {manifest.records} records were written, so this transaction cannot be committed; "
            "it is aborted and the micro-batch is written again.",
            code=ErrorCode.transaction_abortable,
        )
    return stored


def _is_curable(error: SemelError) -> bool:
    """Whether the same data under a new epoch may be written.

    A task that was told that it is fenced may only have been late; whether the pipeline is, the abort has found out.
    """
    if isinstance(error, PipelineFenced | LagRefused):
        return False
    if isinstance(error, TransactionAborted | BrokerUnreachable | ConnectionLost | RequestTimedOut):
        return True
    return isinstance(error, KafkaError) and error.code in _CURABLE


def _chunk_rows(manifest: Manifest) -> int:
    """How many blobs Spark hands to Python at a time: by its own default it would be ten thousand of a megabyte."""
    return max(1, min(_CHUNK_ROWS_MAX, _CHUNK_BYTES // max(1, manifest.blob_bytes_max)))


def _first_line(error: Exception) -> str:
    """The first line that says something: py4j begins with the name of the call, and goes on with the cause.

    >>> _first_line(Exception("An error occurred while calling o2.collect.\\n: java.lang.Error: no disk\\n\\tat ..."))
    'java.lang.Error: no disk'
    """
    lines = [line.strip().removeprefix(": ") for line in str(error).splitlines()]
    told = [line for line in lines if line and not line.startswith("An error occurred while calling ")]
    return (told or [type(error).__name__])[0][:500]


def _since(started: float) -> int:
    return int((time.monotonic() - started) * 1000)
