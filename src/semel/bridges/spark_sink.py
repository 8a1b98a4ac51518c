"""The sink for streaming queries into a database: a callable for `foreachBatch` that writes each micro-batch once."""

from __future__ import annotations

import re
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import EllipsisType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, get_args
from urllib.parse import quote as quote_name

from semel.bridges.database import Database
from semel.bridges.spark_lag import InputLag
from semel.bridges.spark_ledger import DatabaseLedger
from semel.bridges.spark_leftovers import drop_abandoned
from semel.bridges.spark_once import OneMerge, Owner, Retrying
from semel.bridges.spark_tables import TableOutput, TableWriters, check_same_table, check_tables_there, make_output
from semel.bridges.targets import DatabaseTarget
from semel.client.settings import parse_config
from semel.errors import ConfigError, InvalidState
from semel.metrics.parts import SINK
from semel.observe import Pipeline
from semel.spark.calls import Calls
from semel.spark.checkpoint import CheckpointFiles, HadoopFiles, read_home
from semel.spark.failpoints import reach
from semel.spark.input_offsets import read_input, read_query_id, running_query
from semel.spark.lag import BOOTSTRAP, kafka_sources
from semel.spark.ledger import Entry
from semel.spark.options import Resume
from semel.spark.progress import BatchProgress, report_skipped, report_times
from semel.spark.replays import Question, checkpoint_is_new, decide
from semel.spark.rows import PlainRows
from semel.spark.sink import is_stateful
from semel.spark.stream import count_rows, start_query

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

_REMEMBERED: Final = 100
_AGGREGATE: Final = re.compile(r"^\W*Aggregate ", re.MULTILINE)
"""A groupBy, in the text of a plan."""


class DatabaseSink:
    """Writes each micro-batch in one transaction of a database, together with the query's progress.

    >>> sink = DatabaseSink(name="orders", to=semel.Postgres(url, table="orders"))  # doctest: +SKIP
    >>> df.writeStream.foreachBatch(sink).option("checkpointLocation", path).start()  # doctest: +SKIP

    Several tables of the database go into one transaction by `batch`. One sink serves one query, and is called for
    every batch, also for an empty one. `name` belongs to one running query: when a second one of that name writes its
    first batch, the first one stops. `resume` says how to go on where the database does not know the checkpoint:
    "committed" after the last committed batch (start the source at `committed_offsets`), "checkpoint" as the checkpoint
    says. `group` (by default the name) is the consumer group under which the lag of a query from Kafka can be seen;
    None commits no offsets. Through Spark Connect pass `checkpoint` too, and `input_settings`, the settings of the
    input's brokers under Kafka's names, for the lag.
    """

    def __init__(
        self,
        *,
        name: str,
        to: DatabaseTarget,
        checkpoint: str | None = None,
        resume: Resume | None = None,
        group: str | EllipsisType | None = ...,
        input_settings: Mapping[str, object] | Sequence[Mapping[str, object]] | None = None,
        on_progress: Callable[[BatchProgress], None] | None = None,
    ) -> None:
        check_name(name)
        if group == "":
            raise ConfigError("group is empty: name the group, leave it out for the pipeline's name, or pass None.")
        if resume is not None and resume not in get_args(Resume):
            raise ConfigError(f"resume={resume!r} is not understood: write {' or '.join(map(repr, get_args(Resume)))}.")
        self.name = name
        self.target = to
        self._checkpoint = checkpoint
        self._resume: Resume | None = resume
        self._group = name if isinstance(group, EllipsisType) else group
        self._input_settings = _checked_settings(input_settings)
        self._on_progress = on_progress
        self._start_over()

    def _start_over(self) -> None:
        self.recent: deque[BatchProgress] = deque(maxlen=_REMEMBERED)
        """The last hundred micro-batches that this object has seen."""
        self._calls = Calls(self.name, "DatabaseSink", self.target.place)
        self._owner: Owner | None = None
        self.writers = TableWriters()
        self._retries = Retrying(self.target.retry_s)
        self._database = self.target.open()
        self._lag = InputLag(self.name, self._group, self._input_settings)
        # Nobody tells a sink that its query has ended: the connections go with the last reference to it.
        weakref.finalize(self, self._database.close)
        weakref.finalize(self, self._lag.close)

    def __getstate__(self) -> dict[str, Any]:
        # Spark Connect runs it in another process: only what the user has said goes there.
        return {
            "name": self.name,
            "target": self.target,
            "_checkpoint": self._checkpoint,
            "_resume": self._resume,
            "_group": self._group,
            "_input_settings": self._input_settings,
            "_on_progress": self._on_progress,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_over()

    def __repr__(self) -> str:
        return f"DatabaseSink(name={self.name!r}, to={self.target!r})"

    def __call__(self, df: DataFrame, batch_id: int) -> None:
        """Write a micro-batch, unless it has been committed before."""
        with self.batch(batch_id) as batch:
            batch.write(df)

    def batch(self, batch_id: int) -> DatabaseBatch:
        """Several tables of the database in one transaction, which is written at the end of the block.

        >>> def each(df, batch_id):
        ...     with sink.batch(batch_id) as batch:
        ...         batch.write(df.select("id", "customer"))
        ...         batch.write(df.selectExpr("id", "explode(lines) line"), to=semel.Postgres(url, table="lines"))
        """
        return DatabaseBatch(self, batch_id)

    def check(self, df: DataFrame) -> None:
        """Find mistakes that can be found before the first batch. Stops no other run of the pipeline."""
        with self.target.open() as database:
            database.ensure_tables()
            output = make_output(df, self.target, TableWriters())
            if self._checkpoint is not None:
                self._check_checkpoint(database, output, HadoopFiles(df.sparkSession), self._checkpoint)
            output.check_at_start(database)

    def _check_checkpoint(
        self, database: Database, output: TableOutput, files: CheckpointFiles, checkpoint: str
    ) -> None:
        """What the first batch would be refused for, if it can be told now: Spark then shows no trace of its own."""
        metadata = files.read(f"{checkpoint}/metadata")
        query = None if metadata is None else read_query_id(metadata)
        standing = DatabaseLedger(database, self.name, self.name, query).read()
        if query is None and standing.latest is not None and self._resume is None:
            raise checkpoint_is_new(self.name)
        check_same_table(self.name, standing.mine, self.target.options.rule.table, self._resume)
        check_tables_there(database, self.name, standing.mine or standing.latest, [output], self._resume)

    def close(self) -> None:
        """Close the connections. They open again with the next batch."""
        self._owner = None
        self._lag.close()
        self.writers = TableWriters()  # tables may have changed when it goes on
        self._database.close()

    # -- one batch -------------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Begin a batch; `write_outputs` and `release` must follow in the same thread."""
        self._calls.claim()

    def release(self) -> None:
        self._calls.release()

    def write_outputs(self, outputs: Sequence[TableOutput], batch_id: int) -> None:
        """Write those outputs of a micro-batch that have not been committed before."""
        df = outputs[0].df
        batch_input = read_input(df, batch_id, self._checkpoint)
        self._calls.check(batch_input, batch_id)
        asked = Question(
            self.name,
            batch_id,
            batch_input,
            self._resume,
            is_home=True,
            is_stateful=lambda: is_stateful(df),
            is_database=True,
            done=self._calls.last_of(batch_input),
        )
        self._retries = Retrying(self.target.retry_s, stopping(df))
        try:
            progress = self._write_or_skip(asked, outputs)
        except ConfigError as error:
            Pipeline(SINK, self.name).failed(error)
            self.close()
            raise error.with_traceback(None) from None  # Spark shows the whole trace above the sentence
        except BaseException as error:
            Pipeline(SINK, self.name).failed(error)
            self.close()  # the next call owns the pipeline again, and reads the ledger
            raise
        self._calls.finish(batch_input, batch_id)
        self._lag.commit(df, batch_input.ends)
        self.recent.append(progress)
        report_times(df, progress)
        if self._on_progress is not None:
            self._on_progress(progress)
        reach("before_return", self.name)

    def _write_or_skip(self, asked: Question, outputs: Sequence[TableOutput]) -> BatchProgress:
        if self._owner is None:
            asked = self._look(asked)
            self._retries.call(lambda: self._check(outputs, asked))
            self._owner = self._retries.call(lambda: self._take_over(asked))
        owner = self._owner
        standing = self._retries.call(owner.ledger.read)
        written = decide(asked, standing.mine, standing.latest)
        for output in outputs:
            if written.has(output.name):
                # It is there, yet state stores and the watermark must move on as they would have.
                PlainRows(output.df).compute()
        missing = [output for output in outputs if not written.has(output.name)]
        if not missing:
            progress = BatchProgress(self.name, asked.batch, skipped=True)
            report_skipped(progress)
            return progress
        entry = Entry(
            query=asked.input.query,
            batch=asked.batch,
            offsets=asked.input.digest,
            ends=[replace(end, start=None) for end in asked.input.ends],
            pipeline=self.name,
            table=self.target.options.rule.table,
        )
        merge = OneMerge(
            owner,
            missing,
            entry,
            BatchProgress(self.name, asked.batch),
            lambda standing: decide(asked, standing.mine, standing.latest),
            self._retries,
        )
        done = merge.run()
        for output in missing:
            output.writer.may_create = False
        return done

    def _look(self, asked: Question) -> Question:
        """Whether this checkpoint may go on here. A run that may not stops no other one."""
        reach("before_ledger", self.name)
        return self._retries.call(lambda: self._looked(asked))

    def _looked(self, asked: Question) -> Question:
        self._database.ensure_tables()
        ledger = self._ledger(asked)
        here, standing = ledger.home(), ledger.read()
        files, checkpoint = asked.input.files, asked.input.checkpoint
        note = f"semel-database-{quote_name(self.name)}.json"  # a query may write to several places, each with its own
        noted = read_home(files, checkpoint, note)
        asked = replace(asked, is_home=None if noted is None else noted.is_same(here))
        decide(asked, standing.mine, standing.latest)
        check_same_table(self.name, standing.mine, self.target.options.rule.table, self._resume)
        if not asked.is_home:
            here.write(files, checkpoint, note)
        return asked

    def _take_over(self, asked: Question) -> Owner:
        ledger = self._ledger(asked)
        epoch = ledger.take_over()
        if self.target.is_staged_by_tasks:
            drop_abandoned(self._database, self.name, epoch)
        return Owner(self._database, ledger, self.name, self.name, epoch)

    def _ledger(self, asked: Question) -> DatabaseLedger:
        return DatabaseLedger(self._database, self.name, self.name, asked.input.query)

    def _check(self, outputs: Sequence[TableOutput], asked: Question) -> None:
        standing = self._ledger(asked).read()
        check_tables_there(self._database, self.name, standing.mine or standing.latest, outputs, self._resume)
        for output in outputs:
            output.check_at_start(self._database)


class DatabaseBatch:
    """The outputs of one micro-batch; `DatabaseSink.batch` makes it."""

    def __init__(self, sink: DatabaseSink, batch_id: int) -> None:
        self._sink = sink
        self._batch_id = batch_id
        self._outputs: list[TableOutput] | None = None

    def __enter__(self) -> Self:
        if self._outputs is not None:
            raise InvalidState("This batch was used before: call sink.batch(batch_id) for each micro-batch.")
        self._sink.claim()
        self._outputs = []
        return self

    def write(self, df: DataFrame, *, to: DatabaseTarget | None = None) -> None:
        """Add an output: into the sink's own table, or into another one of the same database."""
        if self._outputs is None:
            raise InvalidState("A batch is written inside of its block: `with sink.batch(batch_id) as batch: ...`.")
        target = self._sink.target if to is None else to
        if target.place != self._sink.target.place:
            raise ConfigError(
                "This table is in another database than the sink's, and a transaction lives in one; nothing was "
                "written. Give that database a DatabaseSink of its own, or write its address in the same way."
            )
        self._outputs.append(make_output(df, target, self._sink.writers, self._outputs))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        outputs, self._outputs = self._outputs, None
        try:
            if error is None and outputs:
                self._sink.write_outputs(outputs, self._batch_id)
        finally:
            self._sink.release()


def write_stream_into(
    target: DatabaseTarget,
    df: DataFrame,
    *,
    name: str,
    checkpoint: str,
    trigger: Mapping[str, Any] | None = None,
    output_mode: str | None = None,
    resume: Resume | None = None,
    group: str | EllipsisType | None = ...,
    input_settings: Mapping[str, object] | None = None,
    on_progress: Callable[[BatchProgress], None] | None = None,
    **unknown: Any,
) -> StreamingQuery:
    """What `semel.write_stream(df, to=target, ...)` does."""
    check_known(unknown)
    is_classic = hasattr(df.sparkSession, "_jsparkSession")
    _check_output_mode(target, output_mode, has_aggregate=is_classic and _has_aggregate(df))
    sink = DatabaseSink(
        name=name,
        to=target,
        checkpoint=checkpoint,
        resume=resume,
        group=group,
        input_settings=input_settings if is_classic or input_settings is not None else kafka_sources(df),
        on_progress=on_progress,
    )
    if is_classic:
        sink.check(df)  # through Spark Connect the sink lives elsewhere, and this process may not reach the database
    return start_query(count_rows(df).writeStream.foreachBatch(sink), name, checkpoint, trigger, output_mode)


def _check_output_mode(target: DatabaseTarget, output_mode: str | None, *, has_aggregate: bool) -> None:
    """Refuse results that come again in later batches where the mode cannot replace the earlier ones."""
    rule, mode = target.options.rule, (output_mode or "").lower()
    comes_again = mode == "complete" or (mode == "update" and has_aggregate)
    if not comes_again or rule.mode in ("upsert", "newest") or rule.statement is not None:
        return
    repeated = "the whole result" if mode == "complete" else "a changed result"
    outcome = "would be inserted again" if rule.mode == "append" else "would keep its first value"
    raise ConfigError(
        f'output_mode="{mode}" gives {repeated} with each batch, and in mode="{rule.mode}" of table {rule.table!r} it '
        f'{outcome}. Nothing was written. Pass mode="upsert" with the grouping columns as key=[...] to the target. To '
        "keep every interim result on purpose, call a semel.DatabaseSink in your own foreachBatch."
    )


def _has_aggregate(df: DataFrame) -> bool:
    plan: Any = df
    return _AGGREGATE.search(plan._jdf.queryExecution().analyzed().treeString()) is not None


def _checked_settings(
    given: Mapping[str, object] | Sequence[Mapping[str, object]] | None,
) -> list[dict[str, object]]:
    several = [] if given is None else [given] if isinstance(given, Mapping) else list(given)
    for settings in several:
        if BOOTSTRAP not in settings:
            raise ConfigError("input_settings= has no bootstrap.servers: write {'bootstrap.servers': 'host:9092'}.")
        parse_config(settings)
    return [dict(settings) for settings in several]


def stopping(df: DataFrame) -> Callable[[], bool]:
    """Whether somebody has called stop() on the running query, as far as Spark tells: not through Spark Connect."""
    spark: Any = df.sparkSession
    query = running_query(spark) if hasattr(spark, "_jsparkSession") else None
    return (lambda: False) if query is None else (lambda: not query.isActive())


def check_name(name: str) -> None:
    if not name or "/" in name:
        raise ConfigError(
            f"name={name!r} cannot name a pipeline: it must not be empty and must not hold '/'. In the ledger a job is "
            "name/job_id."
        )


def check_known(unknown: Mapping[str, Any]) -> None:
    """Refuse options that mean something for Kafka only, or nothing at all."""
    if unknown:
        raise ConfigError(
            f"{next(iter(unknown))}= is not an option for a database; nothing was written. What rows become is said by "
            "the options of the target."
        )
