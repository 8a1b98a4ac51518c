"""`format("semel")` as a place to write to: tasks encode their rows, and one process beside the driver writes them.

Spark makes a writer in a process that plans, sends it to the tasks, and hands what they return to a third process that
commits. Nothing is written inside a transaction by a task, which Spark may run twice. What a task returns is its rows
as compressed batches: in a file, if the driver's folder for temporary files is the task's too, and otherwise in the
message that Spark carries.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from semel.spark import format_commit
from semel.spark.blobs import ANY_SLOT, BLOB_SCHEMA
from semel.spark.columns import record_columns
from semel.spark.connections import shared_cluster
from semel.spark.dead_letters import DeadLetterTerms, make_terms
from semel.spark.encode import Encode
from semel.spark.options import SinkOptions
from semel.spark.spool import drop_batch, is_visible, new_batch
from semel.spark.workers import ease_worker, read_promptly

_BATCH: Final = "streaming.sql.batchId"
_RUN: Final = "spark.jobGroup.id"
"""Local properties that Spark's streaming queries give to the tasks of their jobs."""


class Blob(NamedTuple):
    """One encoded batch of a task, as `read_manifest` and `read_pieces` take it: the fields of `BLOB_SCHEMA`."""

    slot: int
    topic: str
    partition: int
    map: int
    number: int
    digest: int
    records: int
    bytes: int
    data: bytes | None
    is_small: bool | None
    file: str | None
    at: int | None
    input_bytes: int
    dead_letters: int | None
    example: str | None
    error: bytes | None


@dataclass(frozen=True, slots=True)
class TaskRows(WriterCommitMessage):
    """What one task returns."""

    blobs: list[Blob]
    spool: str
    """Where the task's files are, if it has any."""
    run: str | None
    """The run of the query that the task belongs to."""


@dataclass(slots=True)
class _Work:
    """What the tasks of one micro-batch or job are told."""

    options: SinkOptions
    columns: Sequence[str]
    named: str
    """The job. A micro-batch is named by its number, which only the tasks know."""
    spool: str = ""
    terms: DeadLetterTerms | None = None
    is_prepared: bool = False

    def __getstate__(self) -> dict[str, Any]:
        # Spark makes a writer where it plans and where it commits, and says nowhere which of the two this is. Only the
        # one that plans is sent to tasks.
        if not self.is_prepared:
            self._prepare()
        return {name: getattr(self, name) for name in self.__slots__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    def _prepare(self) -> None:
        cluster = shared_cluster(self.options.settings)
        topics = [] if self.options.topic is None else [self.options.topic]
        self.terms = make_terms(self.options, cluster, topics, None, self.named or None)
        self.spool = new_batch()
        self.is_prepared = True

    def run(self, batches: Iterator[pa.RecordBatch]) -> TaskRows:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None, "Spark writes in tasks"
        batch = None if self.named else _whole(context.getLocalProperty(_BATCH))
        terms = self.terms
        if terms is not None and batch is not None:
            terms = DeadLetterTerms(terms.topic, terms.limit, terms.pipeline, batch, None, terms.rules)
        encode = Encode(
            self.options.settings,
            self.options.topic,
            {},
            ANY_SLOT,
            int(time.time() * 1000),
            f"{self.options.name}-{self.named or batch}",
            self.spool if is_visible(self.spool) else None,
            dead_letters=terms,
        )
        try:
            rows = encode.encode_all(self._chosen(read_promptly(batches)), context.partitionId())
            run = None if self.named else context.getLocalProperty(_RUN)
            return TaskRows([_blob(row) for row in rows], self.spool, run)
        finally:
            ease_worker()

    def _chosen(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The columns of a record, under the names that they have in one."""
        for batch in batches:
            places = {name.lower(): place for place, name in enumerate(batch.schema.names)}
            arrays = [batch.column(places[name]) for name in self.columns]
            yield pa.RecordBatch.from_arrays(arrays, names=list(self.columns))

    def drop(self) -> None:
        drop_batch(self.spool)


class StreamWriter(DataSourceStreamArrowWriter):
    """For one micro-batch; Spark makes another for the next."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        self._work = _Work(options, record_columns(schema, options.topic), "")

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskRows:
        return self._work.run(iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        rows = [message for message in messages if isinstance(message, TaskRows)]
        blobs = [blob for message in rows for blob in message.blobs]
        try:
            format_commit.commit_batch(self._work.options, blobs, _run_of(rows), batchId)
        finally:
            _drop_files(rows)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        _drop_files([message for message in messages if isinstance(message, TaskRows)])


class JobWriter(DataSourceArrowWriter):
    """For one job."""

    def __init__(self, options: SinkOptions, schema: StructType, job_id: str) -> None:
        self._work = _Work(options, record_columns(schema, options.topic), job_id)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskRows:
        return self._work.run(iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        rows = [message for message in messages if isinstance(message, TaskRows)]
        try:
            format_commit.commit_job(self._work.options, [blob for one in rows for blob in one.blobs], self._work.named)
        finally:
            self._work.drop()

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        self._work.drop()


def _blob(row: Any) -> Blob:
    found = {name: row.get(name) for name in BLOB_SCHEMA.names}
    if found["data"] is not None:
        found["data"] = bytes(found["data"])
    return Blob(**found)


def _run_of(rows: Sequence[TaskRows]) -> str | None:
    return next((message.run for message in rows if message.run is not None), None)


def _drop_files(rows: Sequence[TaskRows]) -> None:
    """The committing process has a writer of its own, which knows the folder from the messages alone."""
    for folder in {message.spool for message in rows}:
        drop_batch(folder)


def _whole(text: str | None) -> int | None:
    return None if text is None else int(text)
