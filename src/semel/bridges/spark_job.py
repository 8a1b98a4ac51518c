"""`write_batch` into a database: a DataFrame, once for each job id however often it is run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from semel.bridges.database import Database
from semel.bridges.spark_ledger import DatabaseLedger, Standing
from semel.bridges.spark_leftovers import drop_abandoned, mark_running
from semel.bridges.spark_once import OneMerge, Owner, Retrying
from semel.bridges.spark_sink import check_known, check_name
from semel.bridges.spark_tables import TableOutput, TableWriters, make_output
from semel.bridges.targets import DatabaseTarget
from semel.errors import ConfigError
from semel.metrics.parts import SINK
from semel.observe import Pipeline
from semel.spark.batch import check_same_plan, remember_plan
from semel.spark.failpoints import reach
from semel.spark.ledger import Entry
from semel.spark.progress import BatchProgress, report_skipped
from semel.spark.replays import NOTHING, Written

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def write_batch_into(target: DatabaseTarget, df: DataFrame, *, name: str, job_id: str, **unknown: Any) -> BatchProgress:
    """What `semel.write_batch(df, to=target, ...)` does."""
    check_known(unknown)
    check_name(name)
    if not hasattr(df, "mapInArrow"):
        raise ConfigError("A database takes one DataFrame for each job, and this is none; nothing was written.")
    if df.isStreaming:
        raise ConfigError("This DataFrame streams; nothing was written. Use semel.write_stream for it.")
    with target.open() as database:
        try:
            progress = _write_or_skip(target, database, df, name, job_id)
        except Exception as error:
            Pipeline(SINK, name).failed(error)
            raise
    remember_plan(name, job_id, target.options.rule.table, df)
    return progress


def _write_or_skip(target: DatabaseTarget, database: Database, df: DataFrame, name: str, job_id: str) -> BatchProgress:
    output = make_output(df, target, TableWriters())
    key = f"{name}/{job_id}"
    ledger = DatabaseLedger(database, name, key)
    reach("before_ledger", name)
    database.ensure_tables()  # a database that cannot be reached is reported at once
    committed = ledger.read().latest
    if _written(committed).has(output.name):
        _check_table_there(database, output, name, job_id)
        check_same_plan(name, job_id, output.name, df)
        progress = BatchProgress(
            name, job_id=job_id, records=0 if committed is None else committed.records, skipped=True
        )
        report_skipped(progress)
        return progress
    output.check_at_start(database)
    retries = Retrying(target.retry_s)
    epoch = retries.call(ledger.take_over)
    if target.is_staged_by_tasks:
        retries.call(lambda: mark_running(database, key))
        drop_abandoned(database, key, epoch)

    def decide(standing: Standing) -> Written:
        return _written(standing.latest)

    owner = Owner(database, ledger, name, key, epoch)
    return OneMerge(owner, [output], Entry(pipeline=name), BatchProgress(name, job_id=job_id), decide, retries).run()


def _check_table_there(database: Database, output: TableOutput, name: str, job_id: str) -> None:
    """A job whose rows are gone must not be reported as done."""
    if output.is_lost(database):
        raise ConfigError(
            f"Job {job_id!r} of {name!r} was written before, and its table {output.table!r} is not there any more: it "
            "was dropped or renamed. Nothing was written. Restore the table or its name, or use another job_id= to "
            "write the rows again."
        )


def _written(committed: Entry | None) -> Written:
    return NOTHING if committed is None else Written(frozenset(committed.outputs or ()))
