"""One micro-batch or job into a database, exactly once: stage its rows, then merge them in a single transaction.

This runs on the driver. The ledger's row is locked first and decides whether there is anything to write, so a repeat
after a lost answer, a second driver or a replay by Spark can change nothing. Whatever fails before the commit leaves no
trace but staging tables, which are used again if they are whole.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import pyarrow as pa

from semel.bridges.database import Database
from semel.bridges.dead_letter_table import DeadLetterTable
from semel.bridges.retries import Retries
from semel.bridges.spark_head_start import HeadStartLost, RunningJob, has_been_slow, note_slow
from semel.bridges.spark_ledger import DatabaseLedger, Standing
from semel.bridges.spark_leftovers import drop_merged
from semel.bridges.spark_misfits import MisfitSearch
from semel.bridges.spark_parts import (
    CountedParts,
    StagedRows,
    batches_of,
    collected,
    is_temporary,
    source_of,
    temporary_name,
)
from semel.bridges.spark_row_checks import of_batch, refused_row, short_json
from semel.bridges.spark_staging import PART_DDL, StageRows, StagingTerms
from semel.bridges.spark_tables import TableOutput
from semel.bridges.table_writer import WriteCounts
from semel.errors import DatabaseError, ValueDoesNotFit
from semel.metrics.parts import SINK
from semel.observe import Pipeline, Work
from semel.spark.failpoints import reach
from semel.spark.ledger import Entry
from semel.spark.progress import BatchProgress, log_event, report_committed
from semel.spark.replays import Written
from semel.spark.short_rows import collect_mapped
from semel.spark.spool import batch_folder

_LOCAL_MASTER: Final = re.compile(r"local(\[.*\])?")
_MANY_ROWS: Final = 5_000_000
_LONG_MERGE_S: Final = 60.0
_NO_SUCH_TABLE: Final = "42P01"
_STATEMENT_TIMEOUT: Final = "57014"

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Retrying:
    """How long a lost connection or a conflict is tried again."""

    retry_s: float
    is_stopping: Callable[[], bool] = lambda: False
    """Whether the user wants the query to end."""

    def begin(self) -> Retries:
        return Retries(self.retry_s, self.is_stopping)

    def wait(self, retries: Retries, error: DatabaseError) -> None:
        """Until the next try; raises if there is none."""
        retries.failed(error)
        if self.is_stopping():
            raise error

    def call(self, step: Callable[[], Result]) -> Result:
        """What `step` returns, when it has succeeded."""
        retries = self.begin()
        while True:
            try:
                result = step()
            except DatabaseError as error:
                self.wait(retries, error)
            else:
                retries.succeeded()
                return result


@dataclass(frozen=True, slots=True)
class Owner:
    """A run of a pipeline that may write: its connection, and its place in the ledger."""

    database: Database
    ledger: DatabaseLedger
    pipeline: str
    key: str
    """In the ledger: the pipeline's name, or name/job_id."""
    epoch: int


@dataclass(frozen=True, slots=True)
class OneMerge:
    """One micro-batch or job, to be written in a single transaction."""

    owner: Owner
    outputs: Sequence[TableOutput]
    entry: Entry
    progress: BatchProgress
    decide: Callable[[Standing], Written]
    """Which outputs are there already, as the locked ledger says; raises if this run must not go on."""
    retries: Retrying

    def run(self) -> BatchProgress:
        """Stage, merge and commit; again after a lost connection or a conflict."""
        progress = self.progress
        pipeline = Pipeline(SINK, self.owner.pipeline)
        with pipeline.begin(batch_id=progress.batch_id, job_id=progress.job_id, run=self.owner.epoch) as work:
            done = self._run(work)
            report_committed(done, work)
            return done

    def _run(self, work: Work) -> BatchProgress:
        retries = self.retries.begin()
        started, attempt = time.monotonic(), 0
        may_load, done = True, None
        staged: list[StagedRows] = []
        with self._spool() as spool:
            while True:
                attempt += 1
                try:
                    if not staged or (attempt > 1 and not self._are_whole(staged)):
                        if attempt > 1:
                            self._drop_loaded()  # a disk that is full must not fill up with what failed
                        staged, ahead = self._stage_all(spool, may_start=attempt == 1)
                        reach("after_stage", self.owner.pipeline)
                        done = None if ahead is None else ahead.result()
                    done = done or self._merge(staged, may_load=may_load)
                    break
                except ValueDoesNotFit as error:
                    if may_load and any(one.output.writer.may_load and one.few for one in staged):
                        may_load = False  # staged, the rows that do not fit are found
                        continue
                    raise self._explain(staged, error) from error
                except DatabaseError as error:
                    if _is_staging_lost(error):
                        staged = []
                        error = DatabaseError(str(error), sqlstate=error.sqlstate, is_transient=True)
                    self.retries.wait(retries, error)
                    work.failed_once(error)
        ended = time.monotonic()
        retries.succeeded()
        self._drop_staged(staged)
        staging_ms = int((ended - started) * 1000) - done.open_ms
        progress = replace(done, encode_ms=staging_ms, attempts=attempt)
        self._warn_if_large(progress)
        return progress

    # -- stage 1 -----------------------------------------------------------------------------------------------------

    def _spool(self) -> AbstractContextManager[str | None]:
        """A folder for rows that the driver stages, if tasks and driver share a machine."""
        spark: Any = self.outputs[0].df.sparkSession
        is_local = _LOCAL_MASTER.fullmatch(spark.conf.get("spark.master", ""))
        can_load = self.outputs[0].target.is_staged_by_tasks
        # Through Spark Connect, "local" is the machine of the server.
        if not is_local or (can_load and type(spark).__module__.startswith("pyspark.sql.connect")):
            return nullcontext()
        rules = [one.target.options.rule for one in self.outputs]
        if can_load and not any(rule.is_plain_append or rule.is_plain_upsert for rule in rules):
            return nullcontext()
        return batch_folder(spark.conf.get("spark.local.dir", "").split(",")[0] or None)

    def _stage_all(
        self, spool: str | None, *, may_start: bool
    ) -> tuple[list[StagedRows], Future[BatchProgress | None] | None]:
        """The rows of all outputs, and what became of a head start if there was one."""
        job = self._running_job(spool) if may_start and spool is not None else None
        if job is None:
            return [self._stage(output, spool) for output in self.outputs], None
        staged: list[StagedRows] = []
        [output] = self.outputs
        with job, ThreadPoolExecutor(1) as threads:
            ahead = threads.submit(self._load_running, output, job)
            try:
                staged.append(self._stage(output, spool, job.address))
            finally:
                job.end(staged[0] if staged else None)
        return staged, ahead

    def _running_job(self, spool: str) -> RunningJob | None:
        """For a head start, if this batch can have one: a connection loads into one table at a time."""
        output = self.outputs[0]
        if len(self.outputs) > 1 or not output.target.is_staged_by_tasks or has_been_slow(self.owner.pipeline):
            return None
        output.check(self.owner.database)
        return RunningJob.listening(spool, self.owner.pipeline) if self._can_load(output) else None

    def _can_load(self, output: TableOutput) -> bool:
        return output.writer.can_load(self.owner.database)

    def _load_running(self, output: TableOutput, job: RunningJob) -> BatchProgress | None:
        """The transaction of a job that is running. None if it must be begun again when the job has ended."""
        if not job.has_begun():
            return None
        rows = StagedRows(output, output.staged_schema(), {}, [], 0, 0, [], is_running=True)

        def parts() -> Iterator[Any]:
            yield from job
            rows.end(job.staged)

        rows.few = parts()
        try:
            return self._merge([rows])
        except HeadStartLost as lost:
            log_event("rows are loaded after the job", logging.DEBUG, pipeline=self.owner.pipeline, reason=str(lost))
            return None
        except DatabaseError as error:
            if error.sqlstate == _STATEMENT_TIMEOUT:
                note_slow(self.owner.pipeline)  # the COPY lasted for as long as the job
            raise

    def _stage(self, output: TableOutput, spool: str | None, announce: str | None = None) -> StagedRows:
        """Run the user's plan once; its rows are in the database then, or the driver has them."""
        output.check(self.owner.database)
        schema, owner = output.staged_schema(), self.owner
        if spool is not None and output.target.is_staged_by_tasks and not self._can_load(output):
            spool = None
        terms = StagingTerms(
            output.target,
            output.target.options.rule,
            output.writer.columns,
            schema,
            owner.pipeline,
            owner.key,
            owner.epoch,
            -1 if self.progress.batch_id is None else self.progress.batch_id,
            spool,
            announce,
            output.dead_letters(owner.pipeline),
        )
        stage = StageRows(terms)
        if output.target.is_staged_by_tasks or spool is not None:
            parts = collect_mapped(output.df, stage, PART_DDL, name=f"{owner.pipeline}/{output.name}")
            return collected(output, schema, parts)
        # Many rows of a cluster for a database that only the driver can write to: one task's rows at a time.
        return self._stage_here(output, schema, output.df.mapInArrow(stage, PART_DDL).toLocalIterator())

    def _stage_here(self, output: TableOutput, schema: pa.Schema, parts: Iterable[Any]) -> StagedRows:
        counted = CountedParts(parts)
        source = self.owner.database.stage_batches(schema, batches_of(counted, schema), temporary_name(output))
        return StagedRows(output, schema, {source: counted.rows}, [], counted.rows, counted.bytes, counted.refused)

    def _are_whole(self, staged: Sequence[StagedRows]) -> bool:
        """Whether staging tables are as they were left: a crash of the server empties them."""
        database = self.owner.database
        for name, rows in (pair for one in staged for pair in one.tables.items()):
            if is_temporary(name) or database.columns(name) is None:
                return False
            if int(database.scalar(f"SELECT count(*) FROM {source_of(name)}")) != rows:
                return False
        return True

    # -- stage 2 -----------------------------------------------------------------------------------------------------

    def _merge(self, staged: Sequence[StagedRows], *, may_load: bool = True) -> BatchProgress:
        """One transaction, from its beginning to its end. With `may_load`, rows go straight into tables that take them
        as they are."""
        database, ledger, pipeline = self.owner.database, self.owner.ledger, self.owner.pipeline
        staged = [self._load_ahead(one) for one in staged]
        opened = time.monotonic()
        counts: list[WriteCounts] = []
        dead_letters = 0
        with database.transaction():
            database.limit_idle()
            standing = ledger.lock(self.owner.epoch)
            written = self.decide(standing)
            reach("after_lock", pipeline)
            missing = [one for one in staged if not written.has(one.output.name)]
            for one in missing:
                counted, refused = self._merge_output(one, may_load=may_load)
                counts.append(counted)
                dead_letters += refused
            reach("after_merge", pipeline)
            merged = time.monotonic()
            if any(one.is_running for one in staged):
                raise HeadStartLost("it was not waited for")
            if missing:
                ledger.write(self._entry(standing, written, missing, sum(one.rows for one in counts)))
            reach("before_commit", pipeline)
        reach("after_commit", pipeline)
        return replace(
            self.progress,
            records=sum(one.rows for one in (counts if missing else staged)),
            dead_letters=dead_letters,
            deleted=sum(one.deleted for one in counts),
            repeats=sum(one.repeats for one in counts),
            input_bytes=sum(one.bytes for one in staged),
            bytes=sum(one.bytes for one in staged),
            write_ms=int((merged - opened) * 1000),
            commit_ms=int((time.monotonic() - merged) * 1000),
            open_ms=int((time.monotonic() - opened) * 1000),
        )

    def _entry(self, standing: Standing, written: Written, missing: Sequence[StagedRows], rows: int) -> Entry:
        earlier = standing.latest if standing.mine is None else standing.mine
        records = earlier.records if earlier is not None and written.outputs else 0
        return replace(
            self.entry,
            outputs=sorted(written.outputs | {one.output.name for one in missing}),
            records=records + rows,
            at_ms=int(time.time() * 1000),
            producer_epoch=self.owner.epoch,
        )

    def _load_ahead(self, staged: StagedRows) -> StagedRows:
        """Rows that can be loaded before the database's one write lock is taken."""
        if staged.output.target.is_staged_by_tasks or not staged.few:
            return staged
        return replace(self._stage_here(staged.output, staged.schema, staged.few), refused=staged.refused)

    def _merge_output(self, staged: StagedRows, *, may_load: bool) -> tuple[WriteCounts, int]:
        """What was written, and how many rows went to the dead-letter table."""
        database, output = self.owner.database, staged.output
        output.check(database)
        letters = output.dead_letters(self.owner.pipeline)
        if may_load and staged.few and output.target.is_staged_by_tasks:
            counts = self._load(staged)
            if counts is not None:
                if letters is not None:
                    letters.check_count(staged.refused)
                    letters.write(database, of_batch(staged.refused, self._batch_name()))
                return counts, len(staged.refused)
        if letters is not None:
            return self._merge_and_put_aside(staged, letters)
        if staged.rows == 0:
            return WriteCounts(), 0
        return output.writer.merge(database, self._sources(staged), staged.rows, is_ordered=False), 0

    def _load(self, staged: StagedRows) -> WriteCounts | None:
        """Straight into the user's table what the driver has, and then what tasks have staged. None if it cannot be."""
        database, writer = self.owner.database, staged.output.writer
        can_merge_more = writer.options.rule.is_plain_append  # an upsert could not see a key that is in both twice
        if staged.tables and not can_merge_more:
            return None
        loaded = writer.load(database, staged.schema, batches_of(staged.few, staged.schema))
        if (loaded is None and staged.is_running) or (staged.tables and not can_merge_more):
            raise HeadStartLost("the table does not take rows as they are")
        missing = staged.rows - sum(staged.tables.values())
        if loaded is None:
            return None
        if loaded.rows != missing:
            raise DatabaseError(f"{missing} rows were to be loaded, and {loaded.rows} were read. Nothing was written.")
        if staged.tables:
            sources = [source_of(name) for name in staged.tables]
            writer.merge(database, sources, staged.rows - missing, is_ordered=False)
        return WriteCounts(staged.rows, staged.rows)

    def _merge_and_put_aside(self, staged: StagedRows, letters: DeadLetterTable) -> tuple[WriteCounts, int]:
        database, refused, counts = self.owner.database, list(staged.refused), WriteCounts()
        letters.check_count(refused)

        def refuse(row: dict[str, Any], error: ValueDoesNotFit) -> None:
            refused.append(refused_row(row, error))
            letters.check_count(refused)

        if staged.rows:
            search = MisfitSearch(database, staged.output.writer, staged.schema, refuse)
            counts = search.merge(self._sources(staged), staged.rows)
        letters.write(database, of_batch(refused, self._batch_name()))
        return counts, len(refused)

    def _batch_name(self) -> str:
        batch, job = self.progress.batch_id, self.progress.job_id
        return f"batch {batch}" if job is None else f"job {job}"

    def _sources(self, staged: StagedRows) -> list[str]:
        sources = [source_of(name) for name in staged.tables]
        if staged.few:
            rows = pa.RecordBatchReader.from_batches(staged.schema, batches_of(staged.few, staged.schema))
            sources.append(self.owner.database.stage(rows))
        return sources

    def _explain(self, staged: Sequence[StagedRows], error: ValueDoesNotFit) -> ValueDoesNotFit:
        """The same with the row and its column, if they can be found."""
        if error.row is not None:
            return error
        try:
            with self.owner.database.transaction():
                for one in (one for one in staged if one.rows):
                    MisfitSearch(self.owner.database, one.output.writer, one.schema, _raise_with_row).merge(
                        self._sources(one), one.rows
                    )
                raise DatabaseError("the rows fit when they were tried once more.")  # and nothing of that is kept
        except _RowFound as found:
            return found.error
        except DatabaseError as second:
            error.add_note(f"Which row it is could not be found out: {second}")
        return error

    def _drop_staged(self, staged: Sequence[StagedRows]) -> None:
        if any(one.tables for one in staged):
            self._drop_loaded()

    def _drop_loaded(self) -> None:
        """The tables that tasks of this batch have made."""
        if self.outputs[0].target.is_staged_by_tasks:
            batch = -1 if self.progress.batch_id is None else self.progress.batch_id
            drop_merged(self.owner.database, self.owner.key, self.owner.epoch, batch)

    def _warn_if_large(self, progress: BatchProgress) -> None:
        if progress.records > _MANY_ROWS or progress.write_ms > _LONG_MERGE_S * 1000:
            log_event(
                "a large batch: others wait for its locks, and a failure repeats all of it",
                logging.WARNING,
                pipeline=self.owner.pipeline,
                records=progress.records,
                merge_s=progress.write_ms / 1000,
                advice="make batches smaller: maxOffsetsPerTrigger or maxFilesPerTrigger on the source; split a job",
            )


class _RowFound(Exception):
    """Ends the search for a row that does not fit."""

    def __init__(self, error: ValueDoesNotFit) -> None:
        super().__init__(str(error))
        self.error = error


def _raise_with_row(row: dict[str, Any], error: ValueDoesNotFit) -> None:
    raise _RowFound(
        ValueDoesNotFit(
            f"{error} The row: {short_json(row)}. Nothing of this batch was written. Correct it in the query, or give "
            'the target dead_letter="table" to put such rows aside.',
            column=error.column,
            sqlstate=error.sqlstate,
        )
    )


def _is_staging_lost(error: DatabaseError) -> bool:
    """Whether a staging table is gone or not whole: a server that crashed, or somebody who has cleaned up."""
    if error.sqlstate is None:
        return error.is_transient and type(error) is DatabaseError
    return error.sqlstate == _NO_SUCH_TABLE and "semel_staged_" in str(error)
