"""What Semel asks of a database. Another kind of database is one file with one subclass of `Database`.

A `Database` is one connection, used by one thread. It opens when it is first used, and again after it was lost: every
table that says what was done is in the database itself, so a new connection finds out where to go on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Self

import pyarrow as pa

from semel.bridges.merge import HORIZON, SEEN
from semel.bridges.positions import Result, SqlPositions
from semel.errors import ConfigError, DatabaseError, DatabaseUnreachable, InvalidState, ValueDoesNotFit

POSITIONS: Final = "semel_inbox"
LEDGER: Final = "semel_ledger"
HOME: Final = "semel_home"
STAGING: Final = "semel_staging"

TABLES: Final = {
    POSITIONS: (
        "inbox TEXT NOT NULL, topic TEXT NOT NULL, partition INTEGER NOT NULL, next_offset BIGINT NOT NULL, "
        "topic_id TEXT, PRIMARY KEY (inbox, topic, partition)"
    ),
    # What was committed under a key, as JSON, and the epoch of the run that may write there.
    LEDGER: "key TEXT PRIMARY KEY, entry TEXT, epoch BIGINT NOT NULL",
    # One row with a random id: tells this ledger from one that was made again.
    HOME: "only_row INTEGER PRIMARY KEY CHECK (only_row = 1), id TEXT NOT NULL",
    # Tables with rows of Spark's tasks that are not merged yet, where tasks stage rows by themselves.
    STAGING: (
        "name TEXT PRIMARY KEY, owner TEXT NOT NULL, epoch BIGINT NOT NULL, batch BIGINT NOT NULL, "
        "created_ms BIGINT NOT NULL"
    ),
    SEEN: "scope TEXT NOT NULL, event_id TEXT NOT NULL, event_time BIGINT NOT NULL, PRIMARY KEY (scope, event_id)",
    HORIZON: "scope TEXT PRIMARY KEY, horizon BIGINT NOT NULL",
}
"""Semel's own tables, in SQL that every database here understands."""


TWICE: Final = ("21000", "23505")
"""SQLSTATEs of a statement that met two rows of one key: in what it writes, or one that is in the table already."""

_MADE_MEANWHILE: Final = ("23505", "42P07", "42701", "42710")
"""What Postgres says when a table, its type or a column is there since another program's statement a moment ago."""

OF_ONE_VALUE: Final = ("22", "23502", "23514")
"""SQLSTATEs of a value that its type refuses, where the database does not say which column it is. The last two are also
those of NOT NULL and CHECK, which a domain may have."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the user's table."""

    type: str
    """As the database writes it."""
    is_required: bool
    """Whether a row must have a value: NOT NULL and no default."""
    collation: str | None = None
    """How its text compares, quoted, if that is not the database's default."""
    base: str | None = None
    """What the type is made of, if it has a name of its own, such as the type under a domain: see `exact_casts`."""
    is_generated: bool = False
    """Whether the database makes its values, and takes none: GENERATED ALWAYS."""

    @property
    def base_type(self) -> str:
        """The type by whose rules values are kept or changed."""
        return self.base or self.type

    @property
    def full_type(self) -> str:
        """For messages: both."""
        return self.type if self.base_type == self.type else f"{self.type} ({self.base})"


class Database(SqlPositions, ABC):
    """One connection. Errors of the driver leave it as `DatabaseError`, with what they mean for the data."""

    kind: str
    """For messages: "Postgres"."""
    lock_row: str = ""
    """What makes a SELECT lock the rows it finds, where a transaction does not lock everything anyway."""

    text_length: str = "length({text})"
    """The SQL for the length of all of a text."""

    schema_advice: str
    """What to do about a schema that is not there."""
    name_bytes_max: int | None = None
    """Longer names are cut off by the database without an error; None if there is no limit."""

    _is_in_transaction = False

    # -- what each kind of database has its own way for -------------------------------------------------------------

    @abstractmethod
    def _execute(self, statement: str, *values: object) -> Result: ...

    @abstractmethod
    def _begin(self) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Roll back what is open and close the connection. It opens again when it is used."""

    @abstractmethod
    def stage(self, table: pa.Table | pa.RecordBatchReader) -> str:
        """Load rows into a temporary table within the present transaction, and return its quoted name."""

    @abstractmethod
    def columns(self, table: str) -> dict[str, Column] | None:
        """The columns of a table in their order; None if there is no such table."""

    @abstractmethod
    def has_schema(self, schema: str) -> bool: ...

    @abstractmethod
    def full_name(self, table: str) -> str:
        """The quoted name of a table with its schema, as the database has it; where it would be made if it is not
        there."""

    @abstractmethod
    def is_unique(self, table: str, key: Sequence[str]) -> bool:
        """Whether the database holds these columns, in any order, to be unique and not null."""

    @abstractmethod
    def sql_type(self, kind: pa.DataType) -> str:
        """The type of a column for values of a type that `arrow_rows.normal_type` gives."""

    @abstractmethod
    def cast_for(self, kind: pa.DataType, column: Column) -> str | None:
        """The type that staged values must be cast to for a column; None if they fit as they are."""

    def find_changed(self, name: str, kind: pa.DataType, column: Column) -> str | None:
        """A condition that is true for staged values that the column changes though `cast_for` asks for no cast."""
        return None

    def key_fault(self, table: str, key: Sequence[str]) -> str | None:
        """Why two rows of a unique key might count as one in one place and as two in another; None if they cannot."""
        return None

    def compared(self, name: str, kind: pa.DataType, column: Column) -> str | None:
        """An expression for what the column compares in place of a staged value; None if the value that is written
        compares in the same way."""
        return None

    # -- for all of them ---------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_names(self, *names: str) -> None:
        """Raises if a name of a table or column would be cut off, so that it might be that of another one."""
        for name in names:
            size = max(len(part.encode()) for part in name.split("."))
            if self.name_bytes_max is not None and size > self.name_bytes_max:
                raise ConfigError(
                    f"The name {name!r} has {size} bytes, and {self.kind} cuts names off after {self.name_bytes_max}; "
                    "nothing was written. Use a shorter one."
                )

    def check_schema(self, table: str) -> None:
        """Raises if a table is named with a schema that is not there."""
        schema, dot, _ = table.rpartition(".")
        if dot and not self.has_schema(schema):
            raise ConfigError(
                f"{self.kind} has no schema {schema!r} for table {table!r}; nothing was written. {self.schema_advice}"
            )

    def execute(self, statement: str, *values: object) -> Result:
        """Run one statement. Parameters are written `$1`, `$2`, each once and in their order."""
        return self._execute(statement, *values)

    @contextmanager
    def transaction(self) -> Iterator[Self]:
        """Committed at the end of the block, rolled back if it raises."""
        if self._is_in_transaction:
            raise InvalidState("A transaction is open already: end it before the next one.")
        self._begin()
        self._is_in_transaction = True
        try:
            yield self
            self._execute("COMMIT")
        except BaseException as error:
            self._roll_back(error)
            raise
        finally:
            self._is_in_transaction = False

    def _roll_back(self, reason: BaseException) -> None:
        try:
            self._execute("ROLLBACK")
        except DatabaseError as second:
            reason.add_note(f"The rollback was not confirmed: {second}")
            self.close()

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """What the block did is undone if it raises; the transaction goes on."""
        self._execute("SAVEPOINT semel_try")
        try:
            yield
        except DatabaseError as error:
            # Only a refused row leaves a transaction to go on with; after anything else the whole of it is rolled back.
            if isinstance(error, ValueDoesNotFit) or error.sqlstate in TWICE:
                self._execute("ROLLBACK TO SAVEPOINT semel_try")
                self._execute("RELEASE SAVEPOINT semel_try")
            raise
        self._execute("RELEASE SAVEPOINT semel_try")

    def ensure_tables(self) -> None:
        """Make those of Semel's own tables that are not there. Where all are there, no right to make them is needed."""
        there = {name: self.columns(name) for name in TABLES}
        missing = [name for name, columns in there.items() if columns is None]
        if "topic_id" not in (there[POSITIONS] or {"topic_id": None}):  # a table that an earlier release made
            self._execute(f"ALTER TABLE {POSITIONS} ADD COLUMN topic_id TEXT")
        if not missing:
            return
        with self.transaction():
            self._wait_for_turn()
            for name in missing:
                self._execute(f"CREATE TABLE IF NOT EXISTS {name} ({TABLES[name]})")

    @contextmanager
    def turn(self, table: str) -> Iterator[None]:
        """Let one program at a time make or extend a table: IF NOT EXISTS alone fails for one of two in Postgres."""
        with nullcontext() if self._is_in_transaction else self.transaction():
            self.wait_for_scope(f"make {self.full_name(table)}")
            try:
                yield
            except DatabaseError as error:
                if error.sqlstate not in _MADE_MEANWHILE:
                    raise
                raise DatabaseError(
                    f"Another program has made or extended table {table!r} at the same moment. The transaction was "
                    "rolled back and is tried again.",
                    sqlstate=error.sqlstate,
                    is_transient=True,
                ) from error

    def _check_may_open(self) -> None:
        """A new connection in the middle of a transaction would run the rest of its statements outside of it."""
        if self._is_in_transaction:
            raise DatabaseUnreachable(
                f"The connection to {self.kind} was lost in the middle of a transaction, which is rolled back.",
                is_transient=True,
            )

    def limit_idle(self) -> None:
        """Let the database roll the open transaction back if its owner falls asleep in it, holding locks."""

    def allow_idle(self) -> None:
        """Take `limit_idle` back for the rest of the transaction, since its owner has other work to do in between."""

    def hold_pipeline(self, key: str) -> None:
        """Inside of a transaction: let others see which session has it, where `take_pipeline` can then end it."""

    def take_pipeline(self, key: str) -> bool:
        """The same for a successor; false if another transaction has kept it waiting for too long. Then roll back."""
        return True

    def end_stopped_owner(self, key: str) -> None:
        """End the transaction that holds a pipeline, if its process does nothing in it: it may be stopped for ever."""

    def stage_batches(self, schema: pa.Schema, batches: Iterable[pa.RecordBatch], name: str) -> str:
        """Load rows into a temporary table of this name, outside of a transaction; returns its quoted name."""
        raise NotImplementedError(f"{self.kind} stages rows within its transaction.")

    def can_load_into(self, table: str) -> bool:
        """Whether `load_into` can be of use here."""
        return False

    def load_into(self, table: str, rows: pa.Table | pa.RecordBatchReader) -> bool:
        """Insert rows straight into a table whose types are theirs, without staging; false where that cannot be."""
        return False

    def is_empty(self, table: str) -> bool:
        """Whether a table has never had rows, or has been truncated since; false where that is not known at once."""
        return False

    def keep_columns(self, table: str) -> None:
        """Let nobody change the table's columns before the transaction, or its savepoint, ends."""

    def begin_join(self, table: str, columns: Sequence[str]) -> bool:
        """Prepare the present transaction for a MERGE that compares these columns; false where it must not be used."""
        return False

    def check_constraints(self) -> None:
        """Check now what the database would otherwise check at the commit, where no row could be blamed."""

    def wait_for_scope(self, scope: str) -> None:
        """Let one transaction at a time go on here, where a transaction does not lock everything anyway."""

    def can_order(self, kind: pa.DataType) -> bool:
        """Whether values of a type, as they are stored, compare as they should."""
        return True

    def can_cast(self, own_type: str, column: Column) -> bool:
        """Whether there is a conversion to a column's type that keeps what values mean."""
        return True

    def missing_rights(self, table: str, rights: Sequence[str]) -> list[str]:
        """Those of SELECT, INSERT, UPDATE and DELETE that this user does not have on the table."""
        return []

    def _wait_for_turn(self) -> None:
        """Where two that make a table at the same time would disturb each other."""

    def scalar(self, query: str, *values: object) -> Any:
        """The first column of the first row, or None."""
        rows = self._execute(query, *values).rows
        return rows[0][0] if rows else None
