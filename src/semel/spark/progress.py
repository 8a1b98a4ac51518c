"""What a micro-batch cost: figures for each, as a value, and as one line of JSON in the log."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from semel.metrics.parts import SINK, SINK_BATCH, SINK_BYTES, SINK_PREPARING
from semel.observe import Work
from semel.spark.input_offsets import running_query

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

IN_SPARKS_PROGRESS: Final = {
    "semelEncode": "encode_ms",
    "semelWrite": "write_ms",
    "semelCommit": "commit_ms",
    "semelOpen": "open_ms",
}
"""Which of the times below Spark shows under which name among its own."""
LOG: Final = logging.getLogger("semel.spark")


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """One micro-batch or job.

    >>> BatchProgress("orders", batch_id=3, records=10).records
    10
    """

    pipeline: str
    batch_id: int | None = None
    """None for a job."""
    job_id: str | None = None
    records: int = 0
    """Everything that was written, one for each row, dead letters among them."""
    dead_letters: int = 0
    """Rows that could not be written and went to the dead-letter topic instead."""
    deleted: int = 0
    """Rows of a database's table that were deleted."""
    repeats: int = 0
    """Rows whose event id the database had already, so that they were not written."""
    input_bytes: int = 0
    """The rows in Arrow's form, as the sink got them."""
    bytes: int = 0
    """Encoded and compressed, as they went over the wire."""
    partitions: int = 0
    encode_ms: int = 0
    """The user's own computing, and turning its rows into record batches or staging them in the database."""
    write_ms: int = 0
    """The writing inside the transaction; for a database, the merge of the staged rows."""
    commit_ms: int = 0
    open_ms: int = 0
    """From the start of the writing to the commit: at most so long readers of committed records had to wait."""
    attempts: int = 0
    skipped: bool = False
    """It had been committed before; nothing was written."""


def log_event(event: str, level: int = logging.INFO, **fields: object) -> None:
    """One line of JSON, for people and machines."""
    if LOG.isEnabledFor(level):
        text = json.dumps({"event": event, **fields}, default=str)
        LOG.log(level, text, extra={"semel_event": event, "semel_fields": fields})


def report_skipped(progress: BatchProgress) -> None:
    """To log and metrics: it had been committed before."""
    log_event("batch skipped", **asdict(progress))
    SINK.ended(progress.pipeline, "skipped")
    _count_batch(progress)


def report_committed(progress: BatchProgress, work: Work) -> None:
    """To log, metrics and trace."""
    work.note(attempts=progress.attempts)
    work.committed(progress.records, dead_letters=progress.dead_letters, seconds=progress.open_ms / 1000)
    log_event("batch committed", **asdict(progress))
    SINK_BYTES.add(progress.pipeline, amount=progress.bytes)
    SINK_PREPARING.observe(progress.pipeline, value=progress.encode_ms / 1000)
    _count_batch(progress)


def _count_batch(progress: BatchProgress) -> None:
    if progress.batch_id is not None:
        SINK_BATCH.set(progress.pipeline, value=progress.batch_id)


def report_times(df: DataFrame, progress: BatchProgress) -> None:
    """Let Spark's own progress of this micro-batch show its times, for listeners too.

    Not through Spark Connect, and not before Spark 4.0, which took no times from others. It is a matter between parts
    of Spark, so a version may refuse it; the micro-batch is committed, and must not fail for that.
    """
    spark: Any = df.sparkSession
    if not hasattr(spark, "_jsparkSession") or spark.version.startswith("3."):
        return
    try:
        query = running_query(spark)
        if query is not None:
            durations = query.getLatestExecutionContext()
            for name, field in IN_SPARKS_PROGRESS.items():
                durations.reportTimeTaken(name, getattr(progress, field))
    except Exception as error:
        log_event("times not shown in Spark's progress", logging.DEBUG, pipeline=progress.pipeline, error=str(error))
