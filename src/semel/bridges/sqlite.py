"""SQLite, by Python's own `sqlite3`: the user's connection for an inbox, and our own for a target."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from semel.bridges.database import LEDGER, TABLES, Column, Database
from semel.bridges.failpoints import reach
from semel.bridges.merge import quote
from semel.bridges.positions import BEGIN_BLOCK, END_BLOCK, Position, Result, SqlPositions, ended_in_block
from semel.bridges.value_ranges import check_ranges
from semel.client.partitions import TopicPartition
from semel.errors import ConfigError, DatabaseError, DatabaseUnreachable, InvalidState, ValueDoesNotFit

_BUSY_S: Final = 60.0
"""How long to wait for another writer."""
_STAGED: Final = "semel_staged"
_ROWS_AT_ONCE: Final = 10_000
_NUMBER: Final = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)
"""Text that SQLite stores as a number, in a column of numbers."""
_PLAIN_NUMBER: Final = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?", re.ASCII)
_INT64: Final = range(-(2**63), 2**63)
_NO_COLLATION: Final = re.compile("no such collation sequence: (.*)")
_GENERATED: Final = (2, 3)
"""How `table_xinfo` marks columns that SQLite computes."""
_BINARY: Final = "BINARY"
_SAFE_COLLATIONS: Final = (_BINARY, "NOCASE")
"""Not RTRIM: an automatic index has a Bloom filter that hashes the length of text, as seen with SQLite 3.40. Not one of
the user's own program, which our connection does not have."""


def _run(connection: sqlite3.Connection, statement: str, values: Sequence[object]) -> Result:
    cursor = connection.execute(statement, {str(number): value for number, value in enumerate(values, 1)})
    return Result(cursor.fetchall(), cursor.rowcount)


def check_atomic(connection: sqlite3.Connection) -> None:
    """Raise if a crash could leave a commit of this connection half done.

    SQLite commits several files as one by a journal on disk that they share. Files in WAL mode have none: they are
    committed one after the other. A file that is attached read-only does no harm. Nothing that is open is changed.
    """
    cursor = connection.cursor()
    cursor.row_factory = None
    listed = [(_text(name), _text(path)) for _, name, path in cursor.execute("PRAGMA database_list").fetchall()]
    modes = {
        name: _text(cursor.execute(f"PRAGMA {quote(name)}.journal_mode").fetchone()[0]) for name, path in listed if path
    }
    for name, mode in modes.items():
        if mode in ("memory", "off"):
            raise ConfigError(
                f"Database {name!r} of this connection has PRAGMA journal_mode={mode}, where a crash in the middle of "
                "a commit leaves half of it. Nothing was read or written. Use DELETE or WAL."
            )
    attached = [name for name in modes if name != "main"]
    if not attached or (modes.get("main") not in (None, "wal") and "wal" not in modes.values()):
        return
    for name in attached:
        if _is_writable(cursor, name):
            raise ConfigError(
                f"Database {name!r} is attached to this connection, and SQLite commits files in WAL mode one after the "
                "other: a crash in between would leave half of a transaction. Nothing was read or written. Keep "
                "everything in one file, use PRAGMA journal_mode=DELETE for all of them, or attach a file that is only "
                "read as 'file:...?mode=ro'."
            )


def _is_writable(cursor: sqlite3.Cursor, name: str) -> bool:
    cursor.execute("SAVEPOINT semel_probe")
    try:
        (version,) = cursor.execute(f"PRAGMA {quote(name)}.user_version").fetchone()
        cursor.execute(f"PRAGMA {quote(name)}.user_version = {version}")
    except sqlite3.OperationalError as error:
        if not getattr(error, "sqlite_errorname", "").startswith("SQLITE_READONLY"):
            raise
        return False
    finally:
        cursor.execute("ROLLBACK TO SAVEPOINT semel_probe")
        cursor.execute("RELEASE SAVEPOINT semel_probe")
    return True


def _text(given: Any) -> str:
    """A connection may be told to return text as bytes."""
    return given.decode() if isinstance(given, bytes) else given


class SqlitePositions(SqlPositions):
    """An inbox's positions, through the reader's own connection. The table is made if it is not there.

    >>> from semel.bridges.positions import Position
    >>> from semel.client.partitions import TopicPartition
    >>> database = sqlite3.connect(":memory:")
    >>> store = SqlitePositions(database)
    >>> with store.transaction() as connection:
    ...     store.move(connection, "billing", {TopicPartition("orders", 0): (Position(0), Position(5))})
    >>> store.load("billing")
    {TopicPartition(topic='orders', partition=0): Position(next_offset=5, topic_id=None)}
    >>> database.close()
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        with connection:
            connection.execute(f"CREATE TABLE IF NOT EXISTS semel_inbox ({TABLES['semel_inbox']})")
            self._add_topic_ids()

    def load(self, inbox: str) -> dict[TopicPartition, Position]:
        has_ledger = self._execute("SELECT count(*) FROM sqlite_master WHERE name = $1", LEDGER).rows[0][0]
        if has_ledger:
            self._check_no_run(inbox)
        return super().load(inbox)

    def _add_topic_ids(self) -> None:
        """To a table that an earlier release made."""
        if "topic_id" not in self._columns():
            try:
                self._connection.execute("ALTER TABLE semel_inbox ADD COLUMN topic_id TEXT")
            except sqlite3.OperationalError:
                if "topic_id" not in self._columns():  # otherwise another reader was quicker
                    raise

    def _columns(self) -> set[str]:
        return {row[1] for row in self._connection.execute("PRAGMA table_info(semel_inbox)")}

    def _execute(self, statement: str, *values: object) -> Result:
        return _run(self._connection, statement, values)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        connection = self._connection
        if connection.in_transaction:
            raise InvalidState("The connection has a transaction open already: commit it before the next delivery.")
        check_atomic(connection)
        connection.execute("BEGIN IMMEDIATE")
        try:
            connection.execute(BEGIN_BLOCK)
            yield connection
            _end_block(connection)
            check_atomic(connection)  # a file may have been attached in the block
            reach("before_commit")
        except BaseException:
            connection.rollback()
            raise
        connection.commit()
        reach("after_commit")


def _end_block(connection: sqlite3.Connection) -> None:
    try:
        connection.execute(END_BLOCK)
    except sqlite3.OperationalError as error:
        raise ended_in_block() from error


class SqliteDatabase(Database):
    """A database in a file. Writers wait for each other, up to a minute."""

    kind = "SQLite"
    # length() stops at NUL. Bytes are counted only then: ids that were remembered before have counted characters.
    text_length = "CASE WHEN instr({text}, char(0)) THEN length(CAST({text} AS BLOB)) ELSE length({text}) END"
    schema_advice = "The file is the schema `main`: leave the part before the dot out."

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        if self.path in ("", ":memory:"):
            raise ConfigError("A SQLite target needs a file: what is in memory is gone with the process.")
        self._connection: sqlite3.Connection | None = None

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self._check_may_open()
            with _translated(self.path):
                # Transactions are begun and ended by our own statements. One thread at a time uses it, but Spark may
                # call from another one later.
                self._connection = sqlite3.connect(
                    self.path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
                )
                self._connection.create_function("semel_is_changed", 1, is_changed, deterministic=True)
        return self._connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _begin(self) -> None:
        self._execute("BEGIN IMMEDIATE")

    def _execute(self, statement: str, *values: object) -> Result:
        connection = self._open()
        with _translated(self.path):
            return _run(connection, statement, values)

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """For queries that must see the file in one state. Others may write meanwhile if the file is in WAL mode."""
        self._execute("BEGIN")
        try:
            yield
            self._execute("COMMIT")
        except BaseException as error:
            self._roll_back(error)
            raise

    def stage(self, table: pa.Table | pa.RecordBatchReader) -> str:
        batches = table.to_batches(max_chunksize=_ROWS_AT_ONCE) if isinstance(table, pa.Table) else table
        return self._stage(table.schema, batches, _STAGED)

    def stage_batches(self, schema: pa.Schema, batches: Iterable[pa.RecordBatch], name: str) -> str:
        self._execute("BEGIN")  # takes no lock on the file, as only a temporary table is written
        try:
            staged = self._stage(schema, batches, name)
            self._execute("COMMIT")
        except BaseException as error:
            self._roll_back(error)
            raise
        return staged

    def _stage(self, schema: pa.Schema, batches: Iterable[pa.RecordBatch], name: str) -> str:
        names = ", ".join(quote(column) for column in schema.names)
        self._execute(f"DROP TABLE IF EXISTS temp.{quote(name)}")
        self._execute(f"CREATE TEMPORARY TABLE {quote(name)} ({names})")
        marks = ", ".join("?" * len(schema))
        connection = self._open()
        with _translated(self.path):
            for batch in batches:
                check_ranges(batch, self.kind)
                columns = [_values(column) for column in batch.columns]
                connection.executemany(f"INSERT INTO temp.{quote(name)} VALUES ({marks})", zip(*columns, strict=True))
        return f"temp.{quote(name)}"

    def columns(self, table: str) -> dict[str, Column] | None:
        found = self._execute(_pragma("table_xinfo", table)).rows
        collations = self._collations(table) if found else {}
        return {
            row[1]: Column(
                row[2], bool(row[3]) and row[4] is None, collations.get(row[1]), is_generated=row[6] in _GENERATED
            )
            for row in found
        } or None

    def has_schema(self, schema: str) -> bool:
        return schema.lower() in (row[1].lower() for row in self._execute("PRAGMA database_list").rows)

    def _collations(self, table: str) -> dict[str, str]:
        schema, _, plain = table.rpartition(".")
        definition = self.scalar(
            f"SELECT sql FROM {quote(schema or 'main')}.sqlite_master WHERE type = 'table' AND lower(name) = lower($1)",
            plain,
        )
        return {} if definition is None else _collations_in(definition)

    def full_name(self, table: str) -> str:
        schema, _, plain = table.rpartition(".")
        schema = (schema or "main").lower()
        found = self.scalar(f"SELECT name FROM {quote(schema)}.sqlite_master WHERE lower(name) = lower($1)", plain)
        return f"{quote(schema)}.{quote(found or plain)}"

    def is_unique(self, table: str, key: Sequence[str]) -> bool:
        found = self._execute(_pragma("table_xinfo", table)).rows
        wanted = set(key)
        if {row[1] for row in found if row[5]} == wanted:
            return True  # the primary key, whose columns may hold null in SQLite only if nobody said otherwise
        required = {row[1] for row in found if row[3]}
        return wanted <= required and bool(self._unique_indexes(table, wanted))

    def _unique_indexes(self, table: str, key: Collection[str]) -> list[dict[str, str]]:
        """Of each unique index on exactly these columns, their collations."""
        indexes: list[dict[str, str]] = []
        for _, name, is_unique, _, is_partial in self._execute(_pragma("index_list", table)).rows:
            parts = self._execute(f"PRAGMA index_xinfo({quote(name)})").rows
            collations = {row[2]: row[4].upper() for row in parts if row[5]}
            if is_unique and not is_partial and set(collations) == set(key):
                indexes.append(collations)
        return indexes

    def key_fault(self, table: str, key: Sequence[str]) -> str | None:
        columns = self.columns(table) or {}
        for name in key:
            own = (columns[name].collation or _BINARY).strip('"').upper()
            if own not in _SAFE_COLLATIONS:
                return (
                    f"key column {name!r} of table {table!r} has COLLATE {own}, by which SQLite does not find every "
                    f"equal key. Give it {' or '.join(_SAFE_COLLATIONS)}."
                )
            for index in self._unique_indexes(table, key):
                if index[name] != own:
                    return (
                        f"key column {name!r} of table {table!r} is compared by {index[name]} in its unique index and "
                        f"by {own} elsewhere, so that two keys may count as one. Give both the same COLLATE."
                    )
        return None

    def sql_type(self, kind: pa.DataType) -> str:
        if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
            return "INTEGER"
        if pa.types.is_floating(kind):
            return "REAL"
        return "BLOB" if pa.types.is_binary(kind) else "TEXT"

    def can_order(self, kind: pa.DataType) -> bool:
        return not (pa.types.is_decimal(kind) or pa.types.is_duration(kind) or pa.types.is_list(kind))

    def cast_for(self, kind: pa.DataType, column: Column) -> str | None:
        return None  # SQLite stores each value with its own type

    def find_changed(self, name: str, kind: pa.DataType, column: Column) -> str | None:
        affinity = affinity_of(column.type)
        if pa.types.is_floating(kind) and affinity == "TEXT":
            return f"CAST(CAST({quote(name)} AS TEXT) AS REAL) IS NOT {quote(name)}"
        is_text = pa.types.is_string(kind) or pa.types.is_decimal(kind) or pa.types.is_duration(kind)
        if not is_text or affinity in ("TEXT", "BLOB") or (affinity == "REAL" and not pa.types.is_string(kind)):
            return None
        return f"semel_is_changed({quote(name)})"

    def compared(self, name: str, kind: pa.DataType, column: Column) -> str | None:
        # Its column changes a value on the way in: a number to text, or text that looks like a number to one.
        value, own, affinity = quote(name), self.sql_type(kind), affinity_of(column.type)
        if affinity in ("INTEGER", "NUMERIC", "REAL") and own == "TEXT":
            number = f"CAST({value} AS NUMERIC)"
            value = f"CASE WHEN {number} = {value} THEN {number} ELSE {value} END"
        elif affinity == "TEXT" and own in ("INTEGER", "REAL"):
            value = f"CAST({value} AS TEXT)"
        if column.collation is not None:
            value += f" COLLATE {column.collation}"
        return None if value == quote(name) else value


def affinity_of(declared: str) -> str:
    """What a column with such a type makes of values, by the rules of https://sqlite.org/datatype3.html.

    >>> affinity_of("DECIMAL(20,2)"), affinity_of("bigint"), affinity_of("VARCHAR(5)")
    ('NUMERIC', 'INTEGER', 'TEXT')
    """
    declared = declared.upper()
    for parts, affinity in (
        (("INT",), "INTEGER"),
        (("CHAR", "CLOB", "TEXT"), "TEXT"),
        (("BLOB",), "BLOB"),
        (("REAL", "FLOA", "DOUB"), "REAL"),
    ):
        if any(part in declared for part in parts):
            return affinity
    return "NUMERIC" if declared else "BLOB"


def is_changed(text: object) -> bool:
    """Whether text becomes a number of another value, or loses its leading zeros, in a column of numbers.

    >>> [is_changed(text) for text in ("0123", "12345678901234567.89", "12.50", "abc")]
    [True, True, False, False]
    """
    if not isinstance(text, str) or not _NUMBER.fullmatch(text):
        return False  # stays as it is
    if not _PLAIN_NUMBER.fullmatch(text):
        return True
    # By Decimal, as int() reads no more than 4,300 digits.
    if "." not in text and _INT64[0] <= Decimal(text) <= _INT64[-1]:
        return False
    return Decimal(text) != Decimal(repr(float(text)))


@lru_cache(maxsize=64)
def _collations_in(definition: str) -> dict[str, str]:
    """The columns with a collation of their own, which SQLite tells of an index only.

    >>> _collations_in("CREATE TABLE t (a TEXT COLLATE NOCASE, b TEXT)")
    {'a': '"NOCASE"'}
    """
    found: dict[str, str] = {}
    with closing(sqlite3.connect(":memory:")) as scratch:
        try:
            _create(scratch, definition)
            [(table,)] = scratch.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' AND sql = ?", [definition]
            )
            for row in scratch.execute(f"PRAGMA table_xinfo({quote(table)})").fetchall():
                scratch.execute(f"CREATE INDEX semel_index ON {quote(table)} ({quote(row[1])})")
                collation = scratch.execute("PRAGMA index_xinfo(semel_index)").fetchone()[4]
                scratch.execute("DROP INDEX semel_index")
                if collation.upper() != "BINARY":
                    found[row[1]] = quote(collation)
        except sqlite3.Error:
            return {}  # a virtual table, or functions that this connection does not have
    return found


def _create(scratch: sqlite3.Connection, definition: str) -> None:
    """Make a table whose columns may have collations of the user's own program."""
    while True:
        try:
            scratch.execute(definition)
        except sqlite3.OperationalError as error:
            missing = _NO_COLLATION.search(str(error))
            if missing is None:
                raise
            scratch.create_collation(missing.group(1), lambda one, other: (one > other) - (one < other))
        else:
            return


def _pragma(name: str, table: str) -> str:
    schema, dot, plain = table.rpartition(".")
    return f"PRAGMA {quote(schema) + dot if schema else ''}{name}({quote(plain)})"


def _values(column: pa.Array) -> list[Any]:
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_string(kind) or pa.types.is_binary(kind):
        return column.to_pylist()
    return [_value(value) for value in column.to_pylist()]


def _value(value: Any) -> Any:
    """What SQLite has no type for becomes text: ISO 8601, which sorts and compares; plain decimals; JSON."""
    if isinstance(value, datetime):
        return value.isoformat(sep=" ")
    if isinstance(value, (date, time)):
        return value.isoformat()
    if isinstance(value, timedelta):
        return format(Decimal(value // timedelta(microseconds=1)) / 1_000_000, "f")
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, list):
        return json.dumps([_value(item) for item in value])
    if isinstance(value, bool):
        return int(value)
    return value


@contextmanager
def _translated(path: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise _translate(error, path) from error


def _translate(error: sqlite3.Error, path: str) -> DatabaseError:
    name = getattr(error, "sqlite_errorname", "") or type(error).__name__
    text = str(error)
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return DatabaseError(
            f"SQLite database {path!r} is locked by another writer ({text}); the transaction was rolled back.",
            sqlstate=name,
            is_transient=True,
        )
    if name.startswith("SQLITE_FULL"):
        return DatabaseError(
            f"The disk of SQLite database {path!r} is full; the transaction was rolled back, and nothing is lost. Make "
            "room.",
            sqlstate=name,
            is_transient=True,
        )
    if name.startswith(("SQLITE_CONSTRAINT", "SQLITE_MISMATCH", "SQLITE_TOOBIG")):
        return ValueDoesNotFit(f"SQLite refused a row: {text}.", sqlstate=name)
    if name.startswith("SQLITE_CANTOPEN") and not Path(path).absolute().parent.is_dir():
        folder = str(Path(path).absolute().parent)
        return DatabaseUnreachable(
            f"SQLite database {path!r} cannot be made: there is no folder {folder!r}. Create it; nothing was written.",
            sqlstate=name,
        )
    if name.startswith(("SQLITE_CANTOPEN", "SQLITE_IOERR", "SQLITE_NOTADB", "SQLITE_CORRUPT", "SQLITE_READONLY")):
        return DatabaseUnreachable(
            f"SQLite database {path!r} cannot be used: {text}. What was committed before is not affected.",
            sqlstate=name,
        )
    return DatabaseError(f"SQLite refused a statement: {text}. The transaction was rolled back.", sqlstate=name)
