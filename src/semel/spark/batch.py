"""`write_batch`: a DataFrame to Kafka or a database, once for each job id however often it is run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from semel.client.dead_letters import DEAD_LETTER_MAX
from semel.errors import ConfigError, InvalidState
from semel.metrics.parts import SINK
from semel.observe import Pipeline
from semel.spark.columns import record_columns
from semel.spark.ledger import Entry
from semel.spark.once import OneWrite
from semel.spark.options import DEFAULT_LEDGER, SinkOptions, make_options
from semel.spark.outputs import Output, check_same_kind, combine, name_output, named_topics
from semel.spark.owner import PipelineOwner, check_writable
from semel.spark.progress import BatchProgress, log_event, report_skipped
from semel.spark.replays import NOTHING, Written
from semel.spark.rows import PlainRows
from semel.spark.target import Target, check_one_target

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


_written: dict[tuple[str, str], dict[str, int]] = {}
"""What this process has written or skipped, by job and output: a hash of the DataFrame's plan."""


def write_batch(
    df: DataFrame | Mapping[str, DataFrame],
    *,
    name: str,
    job_id: str,
    to: Target | None = None,
    bootstrap: str | None = None,
    topic: str | None = None,
    ledger: str = DEFAULT_LEDGER,
    writers: int | None = None,
    attempts: int = 3,
    dead_letter: str | None = None,
    dead_letter_max: int = DEAD_LETTER_MAX,
    settings: Mapping[str, object] | None = None,
    **more_settings: object,
) -> BatchProgress:
    """Write all rows in one transaction, unless a job of this name and id has been committed before.

    They go to Kafka, or to the target `to`. Rows and settings are as in `KafkaSink`. For several outputs in Kafka pass
    a mapping from topics to DataFrames: all go into one transaction. Jobs with other ids can run at the same time;
    a second run of the same one stops the first. The ledger remembers a job for 400 days.

    >>> write_batch(df, name="daily-report", job_id="2026-11-15", bootstrap="127.0.0.1:9092",
    ...             topic="reports").skipped  # doctest: +SKIP
    False
    """
    check_one_target(to, bootstrap, topic)
    if not job_id:
        raise ConfigError("job_id is empty: name what this run stands for, such as the day that it reports.")
    if to is not None:
        mine = {"ledger": (ledger, DEFAULT_LEDGER), "writers": (writers, None), "attempts": (attempts, 3)}
        mine |= {"dead_letter": (dead_letter, None), "dead_letter_max": (dead_letter_max, DEAD_LETTER_MAX)}
        given = {option: value for option, (value, default) in mine.items() if value != default}
        return to.write_batch(df, name=name, job_id=job_id, **given, **(settings or {}), **more_settings)
    assert bootstrap is not None, "check_one_target has seen to that"
    options = make_options(
        name=name,
        bootstrap=bootstrap,
        topic=topic,
        settings=settings,
        more_settings=more_settings,
        group=None,
        ledger=ledger,
        writers=writers,
        attempts=attempts,
        dead_letter=dead_letter,
        dead_letter_max=dead_letter_max,
    )
    outputs = _outputs(df, topic)
    owner = PipelineOwner(options, f"{name}/{job_id}")
    try:
        progress = _write_or_skip(options, owner, outputs, job_id)
    except Exception as error:
        Pipeline(SINK, name).failed(error)
        raise
    finally:
        owner.close()
    for output in outputs:
        remember_plan(name, job_id, output.name, output.rows.df)
    return progress


def _outputs(df: DataFrame | Mapping[str, DataFrame], topic: str | None) -> list[Output]:
    if isinstance(df, Mapping) and topic is not None:
        raise ConfigError("topic= and a mapping from topics to DataFrames name two topics: leave topic= out.")
    given = df.items() if isinstance(df, Mapping) else [(topic, df)]
    outputs: list[Output] = []
    for target, rows in given:
        if rows.isStreaming:
            raise ConfigError("This DataFrame streams; nothing was written. Use semel.write_stream for it.")
        record_columns(rows.schema, target)
        outputs.append(Output(name_output(target, []), PlainRows(rows), target))
    if not outputs:
        raise ConfigError("There is no DataFrame to write: the mapping from topics is empty.")
    return outputs


def _write_or_skip(options: SinkOptions, owner: PipelineOwner, outputs: Sequence[Output], job_id: str) -> BatchProgress:
    written, records = committed_outputs(owner)
    missing = [output for output in outputs if not written.has(output.name)]
    for output in outputs:
        if written.has(output.name):
            check_same_plan(options.name, job_id, output.name, output.rows.df)
    if not missing:
        progress = BatchProgress(options.name, job_id=job_id, records=records, skipped=True)
        report_skipped(progress)
        return progress
    check_same_kind(f"{options.name}/{job_id}", written.outputs, [output.name for output in missing])
    for output in missing:
        if output.topic is not None:
            check_writable(owner.cluster, output.topic)
    entry = Entry(
        outputs=sorted(written.outputs | {output.name for output in missing}),
        pipeline=options.name,
        records=records,
    )
    rows, topic = combine(missing)
    progress = BatchProgress(options.name, job_id=job_id)
    return OneWrite(options, owner, entry, progress, rows, topic, named_topics(missing)).run()


def committed_outputs(owner: PipelineOwner) -> tuple[Written, int]:
    """What of a job was committed before, and how many records that were."""
    committed = owner.committed
    if committed is None:
        return NOTHING, 0
    written = Written(all=True) if committed.outputs is None else Written(frozenset(committed.outputs))
    return written, committed.records


def check_same_plan(name: str, job_id: str, output: str, df: DataFrame) -> None:
    """The ledger says that this output of the job was written: by another DataFrame of this very program, or before?"""
    plan, before = _plan_hash(df), _written.get((name, job_id), {}).get(output)
    if plan is not None and before is not None and plan != before:
        raise InvalidState(
            f"Job {job_id!r} of {name!r} has written its output {output!r} already, from another DataFrame in "
            "this program; this one was not written. Write all outputs of a job in one call, with a mapping from "
            "topics to DataFrames or a union, or give this one another job_id."
        )


def remember_plan(name: str, job_id: str, output: str, df: DataFrame) -> None:
    """For `check_same_plan`."""
    plan = _plan_hash(df)
    if plan is not None:
        _written.setdefault((name, job_id), {})[output] = plan


def _plan_hash(df: DataFrame) -> int | None:
    """Equal for equal plans in one process; None where Spark does not tell."""
    try:
        return df.semanticHash()
    except Exception as error:
        log_event("Spark does not compare plans", logging.DEBUG, error=str(error))
        return None
