"""`write_batch`: a DataFrame to Kafka, once for each job id however often it is run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from semel.errors import ConfigError
from semel.spark.columns import record_columns
from semel.spark.ledger import Entry
from semel.spark.once import OneWrite
from semel.spark.options import DEFAULT_LEDGER, make_options
from semel.spark.owner import PipelineOwner
from semel.spark.progress import BatchProgress, log_progress
from semel.spark.rows import PlainRows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def write_batch(
    df: DataFrame,
    *,
    name: str,
    job_id: str,
    bootstrap: str,
    topic: str | None = None,
    ledger: str = DEFAULT_LEDGER,
    writers: int | None = None,
    attempts: int = 3,
    settings: Mapping[str, object] | None = None,
    **more_settings: object,
) -> BatchProgress:
    """Write all rows in one transaction, unless a job of this name and id has been committed before.

    Rows and settings are as in `KafkaSink`. Jobs with other ids can run at the same time; a second run of the same one
    stops the first.

    >>> write_batch(df, name="daily-report", job_id="2026-11-15", bootstrap="127.0.0.1:9092",
    ...             topic="reports").skipped  # doctest: +SKIP
    False
    """
    if df.isStreaming:
        raise ConfigError("This DataFrame streams; nothing was written. Use semel.write_stream for it.")
    if not job_id:
        raise ConfigError("job_id is empty: name what this run stands for, such as the day that it reports.")
    options = make_options(
        name=name,
        bootstrap=bootstrap,
        topic=topic,
        settings=settings,
        more_settings=more_settings,
        ledger=ledger,
        writers=writers,
        attempts=attempts,
    )
    record_columns(df.schema, topic)
    progress = BatchProgress(name, job_id=job_id)
    owner = PipelineOwner(options, f"{name}/{job_id}")
    try:
        if owner.committed is not None:
            progress = BatchProgress(name, job_id=job_id, records=owner.committed.records, skipped=True)
            log_progress(progress)
            return progress
        if topic is not None:
            owner.check_writable(topic)
        return OneWrite(options, owner, PlainRows(df), Entry(), {}, progress).run()
    finally:
        owner.close()
