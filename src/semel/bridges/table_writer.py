"""Rows into one table of a database, within a transaction that the caller begins and ends."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import pyarrow as pa
import pyarrow.compute as pc

from semel.bridges.arrow_rows import normal_schema, normal_type, normalise, with_order
from semel.bridges.column_names import check_addable, check_some_in_common, check_types_used, other_case
from semel.bridges.database import OF_ONE_VALUE, TWICE, Column, Database
from semel.bridges.event_ids import EventIds
from semel.bridges.exact_casts import (
    field_that_changes,
    find_changed,
    has_longer_text,
    is_assigned,
    zone_mismatch,
)
from semel.bridges.failpoints import reach
from semel.bridges.merge import (
    RESERVED,
    Memory,
    Rule,
    Staged,
    Statement,
    can_join,
    find_ambiguous,
    merge,
    quote,
    quote_table,
    tombstones_of,
)
from semel.bridges.ragged_rows import part_table
from semel.errors import ConfigError, DatabaseError, InvalidState, ValueDoesNotFit

NewColumns = Literal["refuse", "add", "ignore"]

_PLANS_MAX: Final = 20
"""Of how many schemas to remember the checks: rows from dictionaries may change theirs from batch to batch."""
_DIGITS: Final = re.compile(r"\(\d+,\d+\)")
"""Those of a decimal."""


@dataclass(frozen=True, slots=True)
class TableOptions:
    """Which table rows go to, how, and what happens if its columns are not those of the rows."""

    rule: Rule
    create: bool = False
    """Make the table if it is not there, with types from the rows."""
    new_columns: NewColumns = "refuse"
    """For columns of the rows that the table does not have."""
    types: Mapping[str, str] = field(default_factory=dict[str, str])
    """Types of columns that are created, where the default is not wanted: {"payload": "jsonb"}."""

    def __post_init__(self) -> None:
        if self.new_columns not in ("refuse", "add", "ignore"):
            raise ConfigError(f'new_columns={self.new_columns!r} is not supported: write "refuse", "add" or "ignore".')


@dataclass(frozen=True, slots=True)
class WriteCounts:
    """What became of the rows of a batch."""

    rows: int = 0
    """How many came."""
    written: int = 0
    """How many were inserted or updated; with `statement`, how many rows it says it has changed."""
    deleted: int = 0
    repeats: int = 0
    """How many had an event id that was there before."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """How rows of one schema are written."""

    schema: pa.Schema
    columns: list[str]
    casts: dict[str, str]
    changed: dict[str, str]
    """By column, a condition that finds values which its type would change."""
    table: dict[str, Column]
    collations: dict[str, str] = field(default_factory=dict[str, str])
    compared: dict[str, str] = field(default_factory=dict[str, str])

    def staged(self, sources: Sequence[str], *, is_ordered: bool) -> Staged:
        return Staged(sources, self.columns, self.casts, is_ordered, self.collations, self.compared)


class TableWriter:
    """Checks the table, and writes to it. One for each connection; `check` comes first.

    With `types_are_guessed`, the rows' types come from some of their values, and others may have more digits.
    """

    def __init__(self, options: TableOptions, *, types_are_guessed: bool = False) -> None:
        self.options = options
        self._types_are_guessed = types_are_guessed
        self._rule = options.rule
        self._plan: _Plan | None = None
        self._plans: list[_Plan] = []
        self._event_ids = EventIds(options.rule)
        self.may_create = options.create
        """False once rows are known to be in the table: a new one in its place would lack them."""

    @property
    def columns(self) -> list[str]:
        """Those columns of the rows that are written, and `delete`."""
        return [] if self._plan is None else self._plan.columns

    # -- the table ---------------------------------------------------------------------------------------------------

    def check_table(self, database: Database) -> None:
        """What can be known before there are rows: the table is there, may be written to and has the mode's columns."""
        rule = self._rule
        if rule.mode == "upsert" and rule.version is not None:
            raise ConfigError(
                'version= has a meaning with mode="upsert" for Spark only, whose rows have no order; nothing was read. '
                'Leave it out to keep the last row of each key, or use mode="newest" to keep the one with the highest '
                "version."
            )
        if rule.statement is not None:
            return
        keeps_deleted = rule.mode == "newest" and rule.delete is not None
        database.check_names(tombstones_of(rule.table) if keeps_deleted else rule.table)
        database.check_schema(rule.table)
        table = database.columns(rule.table)
        if table is None:
            if not self.options.create:
                raise self._no_table(database)
            return
        named = [*rule.key, rule.version, rule.event_time]
        missing = [name for name in named if name is not None and name not in table]
        if missing:
            raise ConfigError(
                f"Table {rule.table!r} has no column {missing[0]!r}, which mode={rule.mode!r} is given; it has "
                f"{', '.join(table)}. Nothing was read or written."
            )
        self._check_rights(database)
        self._check_key(database)

    def _check_rights(self, database: Database) -> None:
        rule = self._rule
        rights = ["INSERT"]
        if rule.mode in ("upsert", "newest"):
            rights += ["SELECT", "UPDATE"]
        if rule.delete is not None:
            rights.append("DELETE")
        missing = database.missing_rights(rule.table, rights)
        if missing:
            raise DatabaseError(
                f"This user has no right to {' and '.join(missing)} on table {rule.table!r}, which "
                f'mode="{rule.mode}" needs. Nothing was written. Grant it.',
                sqlstate="42501",
            )

    def ensure(self, database: Database, schema: pa.Schema) -> None:
        """`check`, unless rows of this schema were checked before."""
        for plan in self._plans:
            if plan.schema.equals(schema):
                self._plan = plan
                return
        self.check(database, schema)

    def check(self, database: Database, schema: pa.Schema) -> None:
        """Compare the rows' columns with the table's; make or extend the table if the options say so."""
        rule = self._rule
        normal = normal_schema(schema)
        self._check_named(normal)
        self._check_types(database, normal)
        if rule.statement is not None or self.options.new_columns != "ignore":
            database.check_names(*normal.names)
        wanted = [one for one in normal if one.name not in rule.extra_columns]
        table: dict[str, Column] = {}
        ignored: set[str] = set()
        if rule.statement is None:
            table = self._table_for(database, wanted, schema)
            ignored = set() if self.options.new_columns == "refuse" else {f.name for f in wanted} - set(table)
            if ignored:
                check_some_in_common([one.name for one in wanted], rule.table, table)
            self._check_columns(database, [one for one in wanted if one.name not in ignored], table)
        if rule.mode == "newest" and rule.delete is not None:
            self._make_tombstones(database, table)
        columns = [one.name for one in normal if one.name not in ignored]
        self._plan = self._make_plan(database, schema, [one for one in normal if one.name in table], columns, table)
        self._plans = [self._plan, *self._plans][:_PLANS_MAX]

    def _make_plan(
        self,
        database: Database,
        schema: pa.Schema,
        fields: Sequence[pa.Field],
        columns: list[str],
        table: dict[str, Column],
    ) -> _Plan:
        casts: dict[str, str] = {}
        changed: dict[str, str] = {}
        keys = {*self._rule.key, self._rule.version} if self._rule.mode in ("upsert", "newest") else set[str]()
        for one in fields:
            kind = database.cast_for(one.type, table[one.name])
            condition = database.find_changed(one.name, one.type, table[one.name])
            if condition is not None:
                changed[one.name] = condition
            if kind is None:
                continue
            own, base = database.sql_type(one.type), table[one.name].base_type
            condition = find_changed(one.name, one.type, own, base)
            if condition is not None:
                changed[one.name] = condition
            if is_assigned(one.type, base):
                if base.startswith("character(") and one.name in keys:
                    casts[one.name] = "bpchar"  # compares without the blanks at the end, and cuts nothing off
                continue
            if zone_mismatch(one.type, base):
                raise ConfigError(
                    f"Column {one.name!r} of the rows is {one.type} and that of table {self._rule.table!r} is {kind}: "
                    "what one means in the other depends on a time zone. Nothing was written. Cast it in your function."
                )
            if not database.can_cast(own, table[one.name]):
                raise ConfigError(
                    f"Column {one.name!r} of the rows is {one.type} and that of table {self._rule.table!r} is {kind}: "
                    f"{database.kind} has no conversion from one to the other. Nothing was written. Convert it in your "
                    "function or query; decode bytes; text goes into any type that can read it, such as that of "
                    "json.dumps() into jsonb."
                )
            field_type = field_that_changes(one.type, base)
            if field_type is not None:
                raise ConfigError(
                    f"Column {one.name!r} of the rows is {one.type} and that of table {self._rule.table!r} is {kind}: "
                    f"it has a field of type {field_type}, for which {database.kind} would round or cut off values in "
                    "silence. Nothing was written. Give the column another type, or write by statement=."
                )
            casts[one.name] = kind
        compared = {one.name: database.compared(one.name, one.type, table[one.name]) for one in fields}
        return _Plan(
            schema,
            columns,
            casts,
            changed,
            table,
            {name: table[name].collation or "" for name in keys & set(table) if table[name].collation is not None},
            {name: value for name, value in compared.items() if value is not None and name in keys},
        )

    def _check_named(self, schema: pa.Schema) -> None:
        rule = self._rule
        named = [*rule.key, rule.version, rule.event_time, rule.delete]
        missing = [name for name in named if name is not None and name not in schema.names]
        if missing:
            raise ConfigError(
                f"The rows have no column {missing[0]!r}, which mode={rule.mode!r} of table {rule.table!r} needs; they "
                f"have {', '.join(schema.names)}. Nothing was written."
            )
        taken = [name for name in schema.names if name in RESERVED]
        if taken:
            raise ConfigError(f"The column name {taken[0]!r} is used by Semel itself: rename it. Nothing was written.")
        if rule.delete is not None and not pa.types.is_boolean(schema.field(rule.delete).type):
            raise ConfigError(f"delete={rule.delete!r} must be a boolean column. Nothing was written.")

    def _check_types(self, database: Database, schema: pa.Schema) -> None:
        """What is compared must compare in the same way whatever the connection's settings."""
        rule = self._rule
        if rule.version is not None and not database.can_order(schema.field(rule.version).type):
            raise ConfigError(
                f"version={rule.version!r} is a column of type {schema.field(rule.version).type}, which "
                f"{database.kind} does not put in order. Nothing was written. Use an integer or a timestamp."
            )
        for name in rule.key if rule.mode == "dedup" else ():
            kind = schema.field(name).type
            if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_boolean(kind)):
                raise ConfigError(
                    f"The event id {name!r} is a column of type {kind}, whose text may differ from connection to "
                    "connection. Nothing was written. Make it text or an integer in your function."
                )

    def _no_table(self, database: Database) -> ConfigError:
        if self.options.create:
            return ConfigError(
                f"{database.kind} has no table {self._rule.table!r} any more: it was dropped or renamed "
                "while rows were written to it. A new one would lack them, so none was made, and nothing of this batch "
                "was written. Restore the table or its name. Or start again, which tells the other choices."
            )
        return ConfigError(
            f"{database.kind} has no table {self._rule.table!r}; nothing was written. Create it, or pass create=True."
        )

    def _table_for(self, database: Database, wanted: Sequence[pa.Field], schema: pa.Schema) -> dict[str, Column]:
        rule = self._rule
        database.check_schema(rule.table)
        table = database.columns(rule.table)
        if table is None:
            if not self.may_create:
                raise self._no_table(database)
            self._create(database, wanted, schema)
        elif self.options.new_columns == "add" and any(one.name not in table for one in wanted):
            self._add_columns(database, wanted, schema)
        return database.columns(rule.table) or {}

    def _add_columns(self, database: Database, wanted: Sequence[pa.Field], schema: pa.Schema) -> None:
        name = self._rule.table
        with database.turn(name):
            table = database.columns(name) or {}  # another pipeline may have added them while we waited
            for one in wanted:
                if one.name not in table:
                    check_addable(one.name, name, table)
                    kind = self._type_of(database, one, schema)
                    database.execute(f"ALTER TABLE {quote_table(name)} ADD COLUMN {quote(one.name)} {kind}")

    def _create(self, database: Database, wanted: Sequence[pa.Field], schema: pa.Schema) -> None:
        rule = self._rule
        if self.options.new_columns != "add":  # then they may come later
            check_types_used(self.options.types, [one.name for one in wanted])
        definitions = [
            f"{quote(one.name)} {self._type_of(database, one, schema)}" + (" NOT NULL" if one.name in rule.key else "")
            for one in wanted
        ]
        if rule.mode in ("upsert", "newest"):
            definitions.append(f"PRIMARY KEY ({', '.join(quote(name) for name in rule.key)})")
        with database.turn(rule.table):
            if database.columns(rule.table) is not None:
                return  # another pipeline has made it while we waited
            database.execute(f"CREATE TABLE {quote_table(rule.table)} ({', '.join(definitions)})")
            # Ids that a table of this name had before it was dropped would make repeats of all its rows.
            self._event_ids.restart(database)

    def _type_of(self, database: Database, one: pa.Field, schema: pa.Schema) -> str:
        named = self.options.types.get(one.name)
        if named is None and pa.types.is_null(schema.field(one.name).type):
            raise ConfigError(
                f"Column {one.name!r} is null in all rows of the first batch, so its type is not known; nothing was "
                f'written. Name it, such as types={{"{one.name}": "text"}}, or create the table yourself.'
            )
        kind = named or database.sql_type(one.type)
        return _DIGITS.sub("", kind) if named is None and self._types_are_guessed else kind

    def _check_columns(self, database: Database, wanted: Sequence[pa.Field], table: Mapping[str, Column]) -> None:
        rule = self._rule
        for one in wanted:
            if one.name not in table:
                raise ConfigError(
                    f"The rows have a column {one.name!r} ({one.type}) and table {rule.table!r} has none; nothing was "
                    f"written.{other_case(one.name, table)} Add it, drop it from the rows, or pass "
                    'new_columns="add" or "ignore".'
                )
            if table[one.name].is_generated:
                raise ConfigError(
                    f"The rows have values for column {one.name!r} of table {rule.table!r}, which is GENERATED ALWAYS: "
                    f"{database.kind} makes its values and takes none. Nothing was written. Drop it from the rows, or "
                    "change the column."
                )
        names = {one.name for one in wanted}
        for name, column in table.items():
            if column.is_required and name not in names:
                raise ConfigError(
                    f"Table {rule.table!r} needs a value for column {name!r} ({column.type}), and the rows have none; "
                    "nothing was written. Add it to the rows, or give the column a default."
                )
        self._check_key(database)

    def _check_key(self, database: Database) -> None:
        rule = self._rule
        if rule.mode not in ("upsert", "newest"):
            return
        if not database.is_unique(rule.table, rule.key):
            raise ConfigError(
                f"Table {rule.table!r} has no primary key or unique index on exactly ({', '.join(rule.key)}) with "
                f'columns that are NOT NULL, and not DEFERRABLE, which mode="{rule.mode}" needs; nothing was written. '
                "Add one."
            )
        fault = database.key_fault(rule.table, rule.key)
        if fault is not None:
            raise ConfigError(f"The {fault} Nothing was written.")

    def _make_tombstones(self, database: Database, table: Mapping[str, Column]) -> None:
        rule = self._rule
        if database.columns(tombstones_of(rule.table)) is not None:
            return
        named = [*rule.key, rule.version or ""]
        definitions = [f"{quote(name)} {_type_in(table[name])} NOT NULL" for name in named]
        with database.turn(tombstones_of(rule.table)):
            database.execute(
                f"CREATE TABLE IF NOT EXISTS {quote_table(tombstones_of(rule.table))} "
                f"({', '.join(definitions)}, PRIMARY KEY ({', '.join(quote(name) for name in rule.key)}))"
            )

    # -- rows --------------------------------------------------------------------------------------------------------

    def write(self, database: Database, table: pa.Table) -> WriteCounts:
        """Write rows whose order counts: a later one of a key wins over an earlier one."""
        counts = self.write_part(database, table)
        self.finish(database)
        return counts

    def part(self, rows: pa.Table, columns: Sequence[frozenset[str]] | None) -> list[pa.Table]:
        """Rows of which each has only some of the columns, as tables to be written one after the other by `write_part`.
        `ensure` comes first, and once more for each of them.

        `columns` has those of each row; None if all have all of them.
        """
        rule, plan = self._rule, self._plan
        if columns is None or plan is None or rule.statement is not None:
            return [rows]
        named = {*rule.key, rule.version, rule.event_time, rule.delete}
        always = named | {name for name, column in plan.table.items() if column.is_required}
        written = set(plan.columns)
        written_of = {own: (own | always) & written for own in set(columns)}
        found = [written_of[own] for own in columns]
        if not all(found):
            row = found.index(frozenset())
            raise ValueDoesNotFit(f"Row {row}: it has none of the columns of table {rule.table!r}.", row=row)
        return part_table(rows, found, self._keys(rows) if len(set(found)) > 1 else None)

    def _keys(self, rows: pa.Table) -> Sequence[Hashable] | None:
        """Two rows have the same one here if their keys are equal in the table, whose order counts then."""
        if not self._rule.key:
            return None
        types = {name: rows.schema.field(name).type for name in self._rule.key}
        if not all(self.compares_as_staged(name) and _is_equal_as_in_python(kind) for name, kind in types.items()):
            return [None] * rows.num_rows  # any two may be equal
        return list(zip(*(rows.column(name).to_pylist() for name in types), strict=True))

    def write_part(self, database: Database, table: pa.Table) -> WriteCounts:
        """Some of the rows of a transaction. `finish` comes after the last of them."""
        if table.num_rows == 0:
            return WriteCounts()
        plan = self._keep_plan(database, self._plan_for(table))
        if self._load(database, plan, table):
            return WriteCounts(table.num_rows, table.num_rows)
        source = database.stage(prepare(table.select(plan.columns), self._rule))
        reach("after_stage")
        counts = self._merge(database, plan, [source], table.num_rows, is_ordered=True)
        reach("after_merge")
        return counts

    @property
    def may_load(self) -> bool:
        """Whether rows can ever go straight into the table: no conversion has to look at them, and no rule but that of
        a first upsert, where the key's unique index sees whether it is one."""
        is_plain = self._rule.is_plain_append or self._rule.is_plain_upsert
        return is_plain and self._plan is not None and not self._plan.casts

    def can_load(self, database: Database) -> bool:
        """Whether they are likely to go straight into the table now."""
        table = self._rule.table
        is_new = self._rule.is_plain_append or (self.may_load and database.is_empty(table))
        return self.may_load and is_new and database.can_load_into(table)

    def load(self, database: Database, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> WriteCounts | None:
        """Rows as they are staged, straight into the table. None if it does not take them so; then none was read."""
        plan = self._checked_again(database)
        if not self.can_load(database):
            return None
        loaded = _Loaded(batches, plan)
        rows = pa.RecordBatchReader.from_batches(pa.schema([schema.field(name) for name in plan.columns]), loaded)
        try:
            if not database.load_into(self._rule.table, rows):
                return None
        except (DatabaseError, ValueDoesNotFit) as error:
            if loaded.failure is not None:
                raise loaded.failure from None  # the driver knows only that its input ended
            raise self._explain(error) if isinstance(error, ValueDoesNotFit) else error from error
        return WriteCounts(loaded.rows, loaded.rows)

    def _load(self, database: Database, plan: _Plan, table: pa.Table) -> bool:
        """Rows that need no rule go straight into the table, which is half the work."""
        if not self._rule.is_plain_append or plan.casts:
            return False
        rows = normalise(table.select(plan.columns))
        if any(has_longer_text(rows.column(name), plan.table[name].base_type) for name in plan.changed):
            return False  # so that it is found, with its column
        reach("after_stage")
        try:
            is_loaded = database.load_into(self._rule.table, rows)
        except ValueDoesNotFit as error:
            raise self._explain(error) from error
        if is_loaded:
            reach("after_merge")
        return is_loaded

    def finish(self, database: Database) -> None:
        """Forget event ids that are too old, now that all rows of the transaction are written."""
        self._event_ids.finish(database)

    def merge(self, database: Database, sources: Sequence[str], rows: int, *, is_ordered: bool = True) -> WriteCounts:
        """Put staged rows into the table. `rows` is how many there must be."""
        self.forget()
        counts = self.merge_part(database, sources, rows, is_ordered=is_ordered)
        self.finish(database)
        return counts

    def merge_part(
        self, database: Database, sources: Sequence[str], rows: int, *, is_ordered: bool = True
    ) -> WriteCounts:
        """`merge` for some of the rows of a transaction. `finish` comes after the last of them."""
        return self._merge(database, self._checked_again(database), sources, rows, is_ordered=is_ordered)

    def _checked_again(self, database: Database) -> _Plan:
        """The plan for rows that are staged already."""
        if self._plan is None:
            raise InvalidState("The table was not checked: call check() first.")
        staged_columns = self._plan.columns
        plan = self._keep_plan(database, self._plan)
        if not set(plan.columns) <= set(staged_columns):
            raise DatabaseError(
                f"Table {self._rule.table!r} has got columns since the rows were staged. Nothing was written; "
                "the batch is staged again.",
                is_transient=True,
            )
        return plan

    def compares_as_staged(self, name: str) -> bool:
        """Whether the table compares values of a column just as the staged ones compare."""
        return self._plan is None or self._plan.staged([], is_ordered=False).comparable(name) == quote(name)

    def forget(self) -> None:
        """What a transaction that was rolled back has left here."""
        self._event_ids.forget()

    def begin_new(self, database: Database) -> None:
        """Say what a pipeline without a position should know about the table."""
        self._event_ids.warn_if_empty(database)

    def restart(self, database: Database) -> None:
        """Prepare the table for a pipeline that reads everything again. Within a transaction."""
        self._event_ids.restart(database)

    def _plan_for(self, table: pa.Table) -> _Plan:
        if self._plan is None or not table.schema.equals(self._plan.schema):
            raise ConfigError(
                f"The rows for table {self._rule.table!r} have other columns than before: {table.schema.names}. "
                "Nothing of this batch was written. Give every batch the same columns and types."
            )
        return self._plan

    def _keep_plan(self, database: Database, plan: _Plan) -> _Plan:
        """The plan, or a new one if the table was altered since it was made: binary COPY sends values as the bits of
        one type, and a cast to a former type rounds for another one."""
        if self._rule.statement is not None:
            return plan
        database.keep_columns(self._rule.table)
        if database.columns(self._rule.table) == plan.table:
            return plan
        self._plan, self._plans = None, []
        self.check(database, plan.schema)
        return self._plan_for(plan.schema.empty_table())

    def _merge(
        self, database: Database, plan: _Plan, sources: Sequence[str], rows: int, *, is_ordered: bool
    ) -> WriteCounts:
        staged = plan.staged(sources, is_ordered=is_ordered)
        ids = self._event_ids
        memory = ids.open(database) if self._rule.mode == "dedup" else None
        horizon = None if memory is None else ids.check_not_late(database, memory, staged)
        if self._rule.mode == "newest" and self._rule.delete is not None:
            # Another transaction's deletion must be seen by a row that is older, and the other way round; neither
            # sees what the other has not committed. So those that write into this table take turns.
            database.wait_for_scope(f"newest {database.full_name(self._rule.table)}")
        try:
            self._check_unchanged(database, plan, staged)
            counts = self._write_staged(database, plan, staged, memory, horizon)
        except ValueDoesNotFit as error:
            raise self._explain(error) from error
        if self._rule.statement is not None or counts["written"] + counts["deleted"] != rows:
            self._check_whole(database, staged, rows)
        ids.note_newest(database, staged)
        is_plain_dedup = self._rule.mode == "dedup" and self._rule.statement is None
        return WriteCounts(rows, **counts, repeats=rows - counts["written"] if is_plain_dedup else 0)

    def _check_whole(self, database: Database, staged: Staged, rows: int) -> None:
        """After the write, which is rolled back then: mostly the number of changed rows tells as much."""
        found = int(database.scalar(f"SELECT count(*) FROM {staged.relation} AS staged"))
        if found != rows:
            raise DatabaseError(
                f"{rows} rows were staged for table {self._rule.table!r} and {found} are there: the database was "
                "restarted since, which empties staging tables. Nothing was written; the batch is staged again.",
                is_transient=True,
            )

    def _write_staged(
        self, database: Database, plan: _Plan, staged: Staged, memory: Memory | None, horizon: int | None
    ) -> dict[str, int]:
        if self._can_join(database, plan, staged):
            try:
                with database.savepoint():
                    return self._run_statements(database, merge(self._rule, staged, by_join=True))
            except DatabaseError as error:
                if error.sqlstate not in TWICE:
                    raise
                # Two rows of one key in the batch, or another writer was quicker: the statements below tell.
        self._check_unambiguous(database, staged)
        return self._run_statements(database, merge(self._rule, staged, memory=memory, horizon_ms=horizon))

    def _can_join(self, database: Database, plan: _Plan, staged: Staged) -> bool:
        compared = [*self._rule.key, *([self._rule.version] if self._rule.version is not None else [])]
        return (
            can_join(self._rule, staged)
            and all(
                database.cast_for(normal_type(plan.schema.field(name).type), plan.table[name]) is None
                for name in compared
            )
            and database.begin_join(self._rule.table, compared)
        )

    def _run_statements(self, database: Database, statements: Sequence[Statement]) -> dict[str, int]:
        counts = {"written": 0, "deleted": 0}
        for statement in statements:
            changed = database.execute(statement.sql).changed
            if statement.counts is not None:
                counts[statement.counts] += max(changed, 0)
        return counts

    def check_unambiguous(self, database: Database, sources: Sequence[str]) -> None:
        """Raises if nothing says which of two staged rows counts. `merge` does that too, for the rows that it gets."""
        if self._plan is None:
            raise InvalidState("The table was not checked: call check() first.")
        try:
            with database.savepoint():
                self._check_unambiguous(database, self._plan.staged(sources, is_ordered=False))
        except ValueDoesNotFit:  # a key that the column does not take
            self._check_unambiguous(database, Staged(sources, self.columns, is_ordered=False))

    def _check_unambiguous(self, database: Database, staged: Staged) -> None:
        ambiguous = find_ambiguous(self._rule, staged)
        if ambiguous is not None and (twice := database.execute(ambiguous).rows):
            raise ConfigError(
                f"Two rows of one batch have the key {dict(zip(self._rule.key, twice[0], strict=True))}, and nothing "
                f"says which one table {self._rule.table!r} should keep; nothing was written. Name a column that says "
                "it by version=, or keep one row of each key in the query."
            )

    def _check_unchanged(self, database: Database, plan: _Plan, staged: Staged) -> None:
        for name, condition in plan.changed.items():
            found = database.scalar(
                f"SELECT CAST({quote(name)} AS text) FROM {staged.relation} AS staged WHERE {condition} LIMIT 1"
            )
            if found is not None:
                raise ValueDoesNotFit(
                    f"column {name!r}: {found} of type {normal_type(plan.schema.field(name).type)} cannot be kept "
                    f"exactly as {plan.table[name].full_type}. Round or cast it in your function.",
                    column=name,
                )

    def name_column(self, database: Database, row: pa.Table, error: ValueDoesNotFit) -> ValueDoesNotFit:
        """The same error of one row with the name of its column, where the database has not given it.

        Inside of a transaction; what it tries is undone.
        """
        plan = self._plan
        if error.column is not None or plan is None or not (error.sqlstate or "").startswith(OF_ONE_VALUE):
            return error
        for name in (name for name in plan.columns if name in plan.table):
            kind = plan.table[name].type
            try:
                with database.savepoint():
                    source = database.stage(normalise(row.select([name])))
                    staged = Staged([source], [name], plan.casts)
                    database.execute(f"CREATE TEMPORARY TABLE semel_probe ({quote(name)} {kind})")
                    database.execute(f"INSERT INTO semel_probe SELECT {staged.select([name])} FROM {source}")
                    database.execute("DROP TABLE semel_probe")
            except ValueDoesNotFit:
                own = row.schema.field(name).type
                text = f"{error} The column is {name!r}: a value of type {own} for a column of type {kind}."
                return ValueDoesNotFit(text, row=error.row, column=name, sqlstate=error.sqlstate)
        return error

    def _explain(self, error: ValueDoesNotFit) -> ValueDoesNotFit:
        return ValueDoesNotFit(
            f"A row does not fit table {self._rule.table!r}: {error}",
            row=error.row,
            column=error.column,
            sqlstate=error.sqlstate,
        )


class _Loaded:
    """Batches on their way into the table, with its columns alone. Keeps the error that ended them."""

    def __init__(self, batches: Iterable[pa.RecordBatch], plan: _Plan) -> None:
        self._batches = batches
        self._plan = plan
        self.rows = 0
        self.failure: Exception | None = None

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        plan = self._plan
        try:
            for batch in self._batches:
                for name in plan.changed:
                    if has_longer_text(pa.chunked_array([batch.column(name)]), plan.table[name].base_type):
                        raise ValueDoesNotFit(f"column {name!r}: a text is too long for it.", column=name)
                self.rows += batch.num_rows
                yield batch.select(plan.columns)
        except Exception as error:
            self.failure = error
            raise


def _is_equal_as_in_python(kind: pa.DataType) -> bool:
    """Not so NaN, which is equal to itself in databases."""
    return not (pa.types.is_floating(kind) or pa.types.is_nested(kind))


def _type_in(column: Column) -> str:
    return column.type if column.collation is None else f"{column.type} COLLATE {column.collation}"


def prepare(table: pa.Table, rule: Rule, *, first_row: int = 0) -> pa.Table:
    """Rows as they are staged."""
    normal = normalise(table)
    needed = {**dict.fromkeys(rule.key, "key"), **({rule.version: "version"} if rule.version is not None else {})}
    for name, role in needed.items():
        if normal.column(name).null_count:
            row = pc.index(normal.column(name).is_null(), True).as_py()
            raise ValueDoesNotFit(
                f"Row {first_row + row}, column {name!r}: the {role} is null. Drop such rows, or fill the {role}.",
                row=first_row + row,
                column=name,
            )
    return with_order(normal, rule, first_row=first_row)
