"""Which of the staged rows a table refuses, and in which column. A database's own words seldom tell either."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from semel.bridges.database import OF_ONE_VALUE, Database
from semel.bridges.exact_casts import is_assigned
from semel.bridges.merge import ROW, TIME, Staged, quote
from semel.bridges.table_writer import TableWriter, WriteCounts
from semel.errors import DatabaseError, ValueDoesNotFit

_PROBE: Final = "semel_probe"
_NUMBERED: Final = "semel_numbered"


@dataclass(frozen=True, slots=True)
class MisfitSearch:
    """Merges staged rows and leaves out those that the table refuses. Inside of a transaction.

    All rows are tried at once. If that fails, they are numbered and tried by halves, down to single rows: one bad row
    among n costs some 2 log n savepoints. Rows of one key are numbered in the order of their versions, so that halves
    give the same result as the whole.
    """

    database: Database
    writer: TableWriter
    schema: pa.Schema
    """Of the staged rows."""
    refuse: Callable[[dict[str, Any], ValueDoesNotFit], None]
    """Called with each row that is refused, and its error. Raises to end the search."""

    def merge(self, sources: Sequence[str], rows: int) -> WriteCounts:
        self.writer.forget()
        counts = self._try(sources, rows)
        if isinstance(counts, ValueDoesNotFit):
            self.writer.check_unambiguous(self.database, sources)  # halves would not show it
            self._number(sources)
            counts = self._merge_halves(0, rows, counts)
            self.database.execute(f"DROP TABLE {_NUMBERED}")
        self.writer.finish(self.database)
        return counts

    def _try(self, sources: Sequence[str], rows: int) -> WriteCounts | ValueDoesNotFit:
        try:
            with self.database.savepoint():
                counts = self.writer.merge_part(self.database, sources, rows, is_ordered=False)
                self.database.check_constraints()
                return counts
        except ValueDoesNotFit as error:
            return error

    def _number(self, sources: Sequence[str]) -> None:
        """Into a temporary table, as an index on an unlogged one could keep a server that crashes from starting."""
        staged = Staged(sources, [])
        version = self.writer.options.rule.version
        if version is not None and not self.writer.compares_as_staged(version):
            # A conversion could fail for the very row that is looked for.
            raise DatabaseError(
                f"A row does not fit table {self.writer.options.rule.table!r}. It can be found and put aside only if "
                f"the version {version!r} has the type of its column: cast it in the query. Nothing of this batch was "
                "written."
            )
        order = f"{quote(version)}, {quote(ROW)}" if version is not None else quote(ROW)
        names = ", ".join(quote(name) for name in self.schema.names if name != ROW)
        self.database.execute(f"DROP TABLE IF EXISTS {_NUMBERED}")
        self.database.execute(
            f"CREATE TEMPORARY TABLE {_NUMBERED} AS SELECT {names}, row_number() OVER (ORDER BY {order}) AS {ROW} "
            f"FROM {staged.relation} AS staged"
        )
        self.database.execute(f"CREATE INDEX semel_by_number ON {_NUMBERED} ({ROW})")

    def _merge_halves(self, after: int, last: int, error: ValueDoesNotFit) -> WriteCounts:
        """Merge the rows numbered `after` + 1 to `last`, which were refused as a whole."""
        if last - after == 1:
            source = _between(after, last)
            named = name_column(self.database, self.writer.options.rule.table, self.schema, [source], error)
            self.refuse(self._row(source), named)
            return WriteCounts()
        middle = (after + last) // 2
        halves = [self._merge_part(after, middle), self._merge_part(middle, last)]
        return WriteCounts(
            rows=sum(half.rows for half in halves),
            written=sum(half.written for half in halves),
            deleted=sum(half.deleted for half in halves),
            repeats=sum(half.repeats for half in halves),
        )

    def _merge_part(self, after: int, last: int) -> WriteCounts:
        counts = self._try([_between(after, last)], last - after)
        return self._merge_halves(after, last, counts) if isinstance(counts, ValueDoesNotFit) else counts

    def _row(self, source: str) -> dict[str, Any]:
        names = [name for name in self.schema.names if name not in (ROW, TIME)]
        [values] = self.database.execute(f"SELECT {', '.join(map(quote, names))} FROM {source}").rows
        return dict(zip(names, values, strict=True))


def _between(after: int, last: int) -> str:
    return f"(SELECT * FROM {_NUMBERED} WHERE {ROW} > {after} AND {ROW} <= {last}) AS part"


def name_column(
    database: Database, table: str, schema: pa.Schema, sources: Sequence[str], error: ValueDoesNotFit
) -> ValueDoesNotFit:
    """The same error with the column and both types, if it has none. Inside of a transaction; what it tries is undone.

    Each column alone goes to a temporary table with the type of the user's table.
    """
    if error.column is not None or not (error.sqlstate or "").startswith(OF_ONE_VALUE):
        return error
    columns = database.columns(table) or {}
    for one in (one for one in schema if one.name in columns):
        kind = columns[one.name].type
        if database.cast_for(one.type, columns[one.name]) is None:
            continue
        casts = {} if is_assigned(one.type, columns[one.name].base_type) else {one.name: kind}
        if not _fits(database, Staged(sources, [one.name], casts), one.name, kind):
            return ValueDoesNotFit(
                f"Column {one.name!r}, {one.type} in the rows and {kind} in the table. {error}",
                column=one.name,
                sqlstate=error.sqlstate,
            )
    return error


def _fits(database: Database, staged: Staged, name: str, kind: str) -> bool:
    try:
        with database.savepoint():
            database.execute(f"CREATE TEMPORARY TABLE {_PROBE} ({quote(name)} {kind})")
            database.execute(f"INSERT INTO {_PROBE} SELECT {staged.select([name])} FROM {staged.relation} AS staged")
            database.execute(f"DROP TABLE {_PROBE}")
    except ValueDoesNotFit:
        return False
    return True
