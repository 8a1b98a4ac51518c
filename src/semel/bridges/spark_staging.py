"""Staging, in Spark's tasks: the rows of one attempt go to a table of its own, or to the driver if they are few.

The driver uses only what the job has returned, so a second attempt of a task, a speculative one or one whose executor
was lost leaves at most a table behind that nobody reads. It is registered before it is made, so that it can be dropped.
"""

from __future__ import annotations

import pickle
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from semel.bridges.database import STAGING
from semel.bridges.dead_letter_table import DeadLetterTable, RefusedRow
from semel.bridges.merge import Rule, quote
from semel.bridges.postgres import PostgresDatabase
from semel.bridges.spark_head_start import Announcer
from semel.bridges.spark_row_checks import find_misfits, misfit, put_aside
from semel.bridges.table_writer import prepare
from semel.errors import DatabaseError, SemelError
from semel.spark.blobs import pack_error
from semel.spark.failpoints import reach
from semel.spark.spool import SpoolFile
from semel.spark.workers import ease_worker, read_promptly

if TYPE_CHECKING:
    from semel.bridges.targets import DatabaseTarget

INLINE_BYTES: Final = 128 * 1024
"""Up to here a task hands its rows to the driver: a connection and a table would cost more."""

SPOOL_BYTES: Final = 256 * 1024 * 1024
"""What a task leaves in a file at most, if it can load the rest by itself. Disks for temporary files may be small."""

PART_SCHEMA: Final = pa.schema(
    [
        ("rows", pa.int64()),
        ("bytes", pa.int64()),
        ("staged", pa.string()),
        ("file", pa.string()),
        ("at", pa.int64()),
        ("data", pa.binary()),
        ("refused", pa.binary()),
        ("error", pa.binary()),
    ]
)
PART_DDL: Final = (
    "rows long, bytes long, staged string, file string, at long, data binary, refused binary, error binary"
)
"""One part of a task's rows: in the table `staged`, in a file, or in `data`; or rows that go to the dead-letter table;
or the error that ended the task."""


@dataclass(frozen=True, slots=True)
class StagingTerms:
    """What a task must know to stage rows of one output."""

    target: DatabaseTarget = field(repr=False)
    rule: Rule
    columns: Sequence[str]
    schema: pa.Schema = field(repr=False)
    """As rows are staged."""
    pipeline: str
    owner: str
    """The key in the ledger."""
    epoch: int
    batch: int
    spool: str | None = None
    """A folder that the driver can read."""
    announce: str | None = None
    """Where the driver wants to hear of what is in there at once."""
    letters: DeadLetterTable | None = None
    """None if a row that does not fit is an error."""


@dataclass(frozen=True, slots=True)
class StageRows:
    """The function for `mapInArrow`: rows in, and out of it where they are staged."""

    terms: StagingTerms

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            for part in self.stage(read_promptly(batches)):
                yield pa.RecordBatch.from_pylist([part], schema=PART_SCHEMA)
        finally:
            ease_worker()

    def stage(self, batches: Iterator[pa.RecordBatch]) -> Iterator[dict[str, Any]]:
        """The parts of one attempt."""
        refused: list[RefusedRow] = []
        try:
            yield from self._stage(self._prepared(batches, refused))
            if refused:
                yield {"rows": 0, "bytes": 0, "refused": pickle.dumps(refused)}
        except SemelError as error:
            # As an exception Spark would hand on only its text, and repeat the task.
            yield {"rows": 0, "bytes": 0, "error": pack_error(error)}

    def _prepared(self, batches: Iterator[pa.RecordBatch], refused: list[RefusedRow]) -> Iterator[pa.RecordBatch]:
        terms, count = self.terms, 0
        for batch in batches:
            if batch.num_rows:
                rows = self._without_misfits(pa.Table.from_batches([batch]).select(list(terms.columns)), count, refused)
                yield from prepare(rows, terms.rule, first_row=count).cast(terms.schema).to_batches()
                count += batch.num_rows

    def _without_misfits(self, rows: pa.Table, first_row: int, refused: list[RefusedRow]) -> pa.Table:
        misfits = find_misfits(rows, self.terms.rule, takes_nul=not self.terms.target.is_staged_by_tasks)
        if not misfits:
            return rows
        letters = self.terms.letters
        if letters is None:
            number = min(misfits)
            raise misfit(rows, number, misfits[number], first_row)

        def add(row: RefusedRow) -> None:
            refused.append(row)
            letters.check_count(refused)

        return put_aside(rows, misfits, first_row, add)

    def _stage(self, batches: Iterator[pa.RecordBatch]) -> Iterator[dict[str, Any]]:
        first: list[pa.RecordBatch] = []
        first_bytes = 0
        for batch in batches:
            first.append(batch)
            first_bytes += batch.nbytes
            if first_bytes > INLINE_BYTES:
                break
        everything = chain(first, batches)
        if first_bytes <= INLINE_BYTES:
            if first:
                [whole] = pa.Table.from_batches(first).combine_chunks().to_batches()
                yield _inline(whole)
        elif self.terms.spool is not None:
            yield from self._spooled(everything, self.terms.spool)
        elif self.terms.target.is_staged_by_tasks:
            yield self._load(everything)
        else:
            yield from map(_inline, everything)

    def _load(self, batches: Iterator[pa.RecordBatch]) -> dict[str, Any]:
        """Into a table of this attempt alone."""
        terms, name = self.terms, f"semel_staged_{secrets.token_hex(12)}"
        counted = _Counted(batches)
        with terms.target.open() as database:
            assert isinstance(database, PostgresDatabase), "other databases are not staged by tasks"
            self._make_table(database, name)
            reach("before_load", terms.pipeline)
            try:
                database.copy(pa.RecordBatchReader.from_batches(terms.schema, counted), name)
            except DatabaseError:
                if counted.failure is not None:
                    raise counted.failure from None  # the driver knows only that its input ended
                raise
            reach("after_load", terms.pipeline)
        return {"rows": counted.rows, "bytes": counted.bytes, "staged": name}

    def _make_table(self, database: PostgresDatabase, name: str) -> None:
        """Each statement commits by itself. A transaction that makes an unlogged table must not be rolled back: if the
        server crashes right after that, it cannot start again ("could not create file: File exists"; seen with Postgres
        16 and 18)."""
        terms = self.terms
        database.execute(
            f"INSERT INTO {STAGING} (name, owner, epoch, batch, created_ms) VALUES ($1, $2, $3, $4, $5)",
            *(name, terms.owner, terms.epoch, terms.batch, int(time.time() * 1000)),
        )
        # Unlogged: half of the work, and a crash of the server only means to stage again.
        database.execute(f"CREATE UNLOGGED TABLE {quote(name)} ({database.column_list(terms.schema)})")

    def _spooled(self, batches: Iterator[pa.RecordBatch], folder: str) -> Iterator[dict[str, Any]]:
        can_load, spooled = self.terms.target.is_staged_by_tasks, 0
        parts: list[dict[str, Any]] = []
        with SpoolFile(folder, secrets.token_hex(12)) as file, Announcer(self.terms.announce) as announcer:
            for batch in batches:
                if not parts:
                    reach("before_load", self.terms.pipeline)
                data = memoryview(batch.serialize())
                part = {"rows": batch.num_rows, "bytes": data.nbytes, "file": file.path, "at": file.append(data)}
                parts.append(part)
                announcer.tell(part)
                spooled += data.nbytes
                if can_load and spooled >= SPOOL_BYTES:
                    break
        reach("after_load", self.terms.pipeline)
        yield from parts
        rest = next(batches, None) if can_load else None
        if rest is not None:
            yield self._load(chain([rest], batches))


class _Counted:
    """Passes batches on, counts them, and keeps the error that ended them."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self.rows = 0
        self.bytes = 0
        self.failure: BaseException | None = None

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        try:
            for batch in self._batches:
                self.rows += batch.num_rows
                self.bytes += batch.nbytes
                yield batch
        except Exception as error:
            self.failure = error
            raise


def _inline(batch: pa.RecordBatch) -> dict[str, Any]:
    data = batch.serialize().to_pybytes()
    return {"rows": batch.num_rows, "bytes": len(data), "data": data}
