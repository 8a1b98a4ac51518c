"""The outputs of a micro-batch or job: DataFrames and the tables they go to, checked against each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from semel.bridges.database import Database
from semel.bridges.dead_letter_table import DeadLetterTable
from semel.bridges.run_owner import is_same_table
from semel.bridges.table_writer import TableOptions, TableWriter, prepare
from semel.bridges.targets import DatabaseTarget
from semel.errors import ConfigError
from semel.spark.ledger import Entry
from semel.spark.options import Resume

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType


@dataclass(frozen=True, slots=True)
class TableOutput:
    """One write of a batch."""

    name: str
    """What the ledger calls it: its table, with a number where a batch writes to one table several times."""
    df: DataFrame
    target: DatabaseTarget
    writer: TableWriter = field(repr=False)

    def check(self, database: Database) -> None:
        """Compare columns and table, unless that was done before."""
        self.writer.ensure(database, arrow_schema(self.df.schema))

    @property
    def table(self) -> str:
        return self.target.options.rule.table

    def is_lost(self, database: Database) -> bool:
        """Whether its table is not there, for an output that was written before. With a statement, none is known."""
        return self.target.options.rule.statement is None and database.columns(self.table) is None

    def check_at_start(self, database: Database) -> None:
        """The same, and the dead-letter table, which is made if it is not there."""
        self.check(database)
        letters = self.dead_letters("")
        if letters is not None:
            letters.prepare(database)

    def dead_letters(self, pipeline: str) -> DeadLetterTable | None:
        """For one batch; None if rows that do not fit are an error."""
        target = self.target
        if target.dead_letter is None:
            return None
        return DeadLetterTable(
            target.dead_letter,
            target.dead_letter_max,
            pipeline=pipeline,
            target=target.options.rule.table,
            things="rows",
        )

    def staged_schema(self) -> pa.Schema:
        """The columns and types of staged rows; `check` comes first."""
        rows = arrow_schema(self.df.schema).empty_table().select(self.writer.columns)
        return prepare(rows, self.target.options.rule).schema


class TableWriters:
    """One writer for each table and mode, which remembers what it has checked."""

    def __init__(self) -> None:
        self._writers: list[TableWriter] = []

    def of(self, options: TableOptions) -> TableWriter:
        found = next((writer for writer in self._writers if writer.options == options), None)
        if found is None:
            found = TableWriter(options)
            self._writers.append(found)
        return found


def make_output(
    df: DataFrame, target: DatabaseTarget, writers: TableWriters, earlier: Sequence[TableOutput] = ()
) -> TableOutput:
    """One more write of a batch. Its name is the same in a replay, which makes the same writes."""
    table = target.options.rule.table
    count = sum(output.target.options.rule.table == table for output in earlier)
    name = table if count == 0 else f"{table}#{count + 1}"
    output = TableOutput(name, df, target, writers.of(target.options))
    output.dead_letters("")  # raises if there can be none
    return output


def check_same_table(pipeline: str, committed: Entry | None, table: str, resume: Resume | None) -> None:
    """Refuse a sink whose table is not that of the query's batches until now: it would lack their rows."""
    if committed is None or resume == "checkpoint":
        return
    # An earlier release did not note the sink's own table. The last batch may have had a part of its tables only.
    before = [committed.table, *(name.partition("#")[0] for name in committed.outputs or ())]
    before = [name for name in before if name]
    if before and not any(is_same_table(name, table) for name in before):
        raise ConfigError(
            f"Pipeline {pipeline!r} has written into table {before[0]!r} up to batch {committed.batch}, so table "
            f"{table!r} would get none of the rows before. Nothing was written. For another pipeline use another name "
            f'and checkpoint. If {table!r} takes over from {before[0]!r}, pass resume="checkpoint" once: the query '
            "goes on from its checkpoint."
        )


def check_tables_there(
    database: Database, pipeline: str, committed: Entry | None, outputs: Sequence[TableOutput], resume: Resume | None
) -> None:
    """Refuse to make a table again that the last batch was written to: the new one would lack the rows before."""
    if committed is None or resume == "checkpoint":
        return
    for output in outputs:
        if output.name in (committed.outputs or ()) and output.is_lost(database):
            raise ConfigError(
                f"Pipeline {pipeline!r} has written up to batch {committed.batch} into table {output.table!r}, which "
                "is not there any more: it was dropped or renamed. A new one would get none of the rows before, so "
                "none was made and nothing was written. Restore the table or its name. To fill a new one from the "
                "beginning, use another name and checkpoint. To go on from the checkpoint with an empty table, pass "
                'resume="checkpoint" once.'
            )


def arrow_schema(schema: StructType) -> pa.Schema:
    """Spark's columns as the tasks get them. Raises for types that Arrow does not have, and for two equal names."""
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import to_arrow_schema

    # Newer versions ask for the zone; whichever it is, values come as instants.
    zone: dict[str, Any] = {"timezone": "UTC"} if "timezone" in signature(to_arrow_schema).parameters else {}
    names = [name.lower() for name in schema.names]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"The rows have two columns {twice!r}: rename or drop one. Nothing was written.")
    try:
        return to_arrow_schema(schema, **zone)
    except PySparkException as error:
        raise ConfigError(f"A column cannot be written to a database: {str(error)[:300]} Cast it.") from error
