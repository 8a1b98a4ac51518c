"""What the user's function makes of records, cut so that the records whose rows are refused can be found.

A portion is some records and the rows for them. A portion that is refused is cut in half, down to single records.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import pyarrow as pa

from semel.bridges.ragged_rows import columns_of
from semel.bridges.row_columns import RowColumns
from semel.errors import ConfigError, RecordFailed, ValueDoesNotFit
from semel.session.dead_letter_box import origin
from semel.session.function_steps import refuse_row_function
from semel.session.outputs import WrongProgram
from semel.session.row_pace import RowPace
from semel.session.transaction import Row, origins, rows_of

Failed = list[tuple[Row, BaseException]]
"""Records that cannot be processed, with their errors."""


class Portion(Protocol):
    """Some records, and the rows to write for them."""

    @property
    def made(self) -> pa.Table | None: ...

    @property
    def columns(self) -> Sequence[frozenset[str]] | None:
        """Which columns each of the rows has; None if all have all of them."""
        ...

    @property
    def count(self) -> int:
        """How many records."""
        ...

    @property
    def runs_again(self) -> bool:
        """Whether the function runs again, and takes its time, for each half."""
        ...

    def first(self) -> Row: ...

    def halves(self, failed: Failed) -> Iterator[Portion]:
        """In the order of the records. Those at which the function fails now are added to `failed`."""
        ...


class Function:
    """The user's function, by table or by row. Without `keeps_failed` the first record that fails is an error."""

    def __init__(
        self,
        transform: Callable[[Any], Any],
        by: Literal["table", "row"],
        *,
        keeps_failed: bool,
        event_id: Collection[str] = (),
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._transform = transform
        self._by = by
        self._keeps_failed = keeps_failed
        self._columns = RowColumns(event_id=event_id)
        self._pace = RowPace(is_stopping)

    @property
    def records_max(self) -> int | None:
        """How many records the next portion should have; None if any number will do."""
        return self._pace.limit if self._by == "row" else None

    def run(self, records: pa.Table, failed: Failed) -> Portion:
        if self._by == "row":
            return self._run_on_rows(records, failed)
        return _TablePortion(self, *self.run_on_table(records, failed))

    # -- by table ----------------------------------------------------------------------------------------------------

    def run_on_table(self, records: pa.Table, failed: Failed) -> tuple[pa.Table, pa.Table | None]:
        """The records at which the function has not failed, and what it has made of them."""
        try:
            made = self._transform(records)
            if made is not None and not isinstance(made, pa.Table):
                raise TypeError(f"the function returned {type(made).__name__}: return a pyarrow.Table, or None")
            return records, made
        except Exception as error:
            _check_by(error)
            if not self._keeps_failed:
                raise RecordFailed(
                    f"{type(error).__name__} in a table of {records.num_rows} records ({origins(records)}): {error}. "
                    f"{_WHAT_NOW}"
                ) from error
            return self._run_on_halves(records, error, failed)

    def _run_on_halves(self, records: pa.Table, error: Exception, failed: Failed) -> tuple[pa.Table, pa.Table | None]:
        if records.num_rows == 1:
            failed.append((next(rows_of(records)), error))
            return records.slice(0, 0), None
        halves = [self.run_on_table(half, failed) for half in _cut(records)]
        made = [one for _, one in halves if one is not None]
        kept = pa.concat_tables([kept for kept, _ in halves])
        return kept, pa.concat_tables(made, promote_options="permissive") if made else None

    # -- by row ------------------------------------------------------------------------------------------------------

    def _run_on_rows(self, records: pa.Table, failed: Failed) -> Portion:
        rows: list[Row] = []
        made: list[Mapping[str, Any]] = []
        ends: list[int] = []
        for row in self._pace.rows(records):
            try:
                made += _dictionaries(self._transform(row))
            except Exception as error:
                self._fail(row, error, failed)
                continue
            rows.append(row)
            ends.append(len(made))
        try:
            table = self._columns.table(made)
        except ValueDoesNotFit:
            rows, made, ends = self._without_misfits(rows, made, ends, failed)
            table = self._columns.table(made)
        return _RowPortion(rows, table, columns_of(made), ends)

    def _without_misfits(
        self, rows: list[Row], made: list[Mapping[str, Any]], ends: list[int], failed: Failed
    ) -> tuple[list[Row], list[Mapping[str, Any]], list[int]]:
        """Leave out the records of which any row does not fit."""
        errors = {bisect_right(ends, at): error for at, error in sorted(self._columns.find_misfits(made).items())[::-1]}
        kept_rows: list[Row] = []
        kept_made: list[Mapping[str, Any]] = []
        kept_ends: list[int] = []
        for number, (row, begin, end) in enumerate(zip(rows, [0, *ends], ends, strict=False)):
            if number in errors:
                self._fail(row, errors[number], failed)
                continue
            kept_rows.append(row)
            kept_made += made[begin:end]
            kept_ends.append(len(kept_made))
        return kept_rows, kept_made, kept_ends

    def _fail(self, row: Row, error: Exception, failed: Failed) -> None:
        if not self._keeps_failed:
            raise RecordFailed(
                f"{type(error).__name__} at {origin(row)}: {str(error).rstrip('.')}. {_WHAT_NOW}",
                topic=row.topic,
                partition=row.partition,
                offset=row.offset,
            ) from error
        failed.append((row, error))


def _check_by(error: Exception) -> None:
    try:
        refuse_row_function(error)
    except WrongProgram as wrong:
        raise ConfigError(str(wrong)) from error


_WHAT_NOW = (
    "The transaction was rolled back and nothing of it was written; its records come again after a restart. Fix the "
    'cause, or give the target dead_letter="table" to put such records aside.'
)


@dataclass(frozen=True, slots=True)
class _TablePortion:
    """Which row is for which record is not known here, so the function runs again on each half."""

    function: Function
    records: pa.Table
    made: pa.Table | None
    runs_again: bool = True
    columns: None = None

    @property
    def count(self) -> int:
        return self.records.num_rows

    def first(self) -> Row:
        return next(rows_of(self.records.slice(0, 1)))

    def halves(self, failed: Failed) -> Iterator[Portion]:
        for half in _cut(self.records):
            yield _TablePortion(self.function, *self.function.run_on_table(half, failed))


@dataclass(frozen=True, slots=True)
class _RowPortion:
    rows: Sequence[Row]
    table: pa.Table
    """The rows of this portion and of those that it was cut from."""
    table_columns: Sequence[frozenset[str]]
    """Which columns each row of `table` has."""
    ends: Sequence[int]
    """For each record, where its rows end in `table`."""
    begin: int = 0
    runs_again: bool = False

    @property
    def made(self) -> pa.Table:
        return self.table.slice(self.begin, self._end - self.begin)

    @property
    def columns(self) -> Sequence[frozenset[str]]:
        return self.table_columns[self.begin : self._end]

    @property
    def _end(self) -> int:
        return self.ends[-1] if self.rows else self.begin

    @property
    def count(self) -> int:
        return len(self.rows)

    def first(self) -> Row:
        return self.rows[0]

    def halves(self, failed: Failed) -> Iterator[Portion]:
        half = len(self.rows) // 2
        yield replace(self, rows=self.rows[:half], ends=self.ends[:half])
        yield replace(self, rows=self.rows[half:], ends=self.ends[half:], begin=self.ends[half - 1])


def _cut(records: pa.Table) -> tuple[pa.Table, pa.Table]:
    half = records.num_rows // 2
    return records.slice(0, half), records.slice(half)


def _dictionaries(returned: Any) -> list[Mapping[str, Any]]:
    """What a function of rows has returned: a dictionary, several, or None."""
    if returned is None:
        return []
    found = returned
    if isinstance(returned, Mapping):
        found = [returned]
    elif isinstance(returned, Iterable) and not isinstance(returned, str | bytes):
        found = list(returned)
    if isinstance(found, list) and all(isinstance(one, Mapping) for one in found):
        if not all(found):
            raise ValueError("the function returned a dictionary without columns: return None to write nothing")
        return found
    raise TypeError(
        f"the function returned {type(returned).__name__}: return a dictionary from column to value, a list of them, "
        "or None to write nothing"
    )
