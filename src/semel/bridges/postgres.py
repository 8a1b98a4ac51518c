"""Postgres: the user's own connection for an inbox, and ours for a target.

Nothing of a driver is imported for the first: `%s` for parameters and a transaction that begins by itself, as PEP 249
has it, are all that is asked for. Ours is ADBC's, which sends Arrow tables by binary COPY: it loads rows three to five
times as fast as text, and takes a tenth of the processor time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

import pyarrow as pa

from semel.bridges.database import TABLES, Column, Database
from semel.bridges.failpoints import reach
from semel.bridges.merge import literal, quote, quote_table
from semel.bridges.positions import BEGIN_BLOCK, END_BLOCK, Position, Result, SqlPositions, ended_in_block
from semel.bridges.postgres_columns import COLUMNS, DEFAULT_COLLATION
from semel.bridges.postgres_url import check_url, hide_password, hide_quoted, place_of, with_timeouts
from semel.bridges.retries import LOG
from semel.bridges.value_ranges import check_ranges
from semel.client.partitions import TopicPartition
from semel.errors import (
    AuthenticationFailed,
    ConfigError,
    DatabaseError,
    DatabaseUnreachable,
    InvalidState,
    SemelError,
    ValueDoesNotFit,
)

_MAKE: Final = f"CREATE TABLE IF NOT EXISTS semel_inbox ({TABLES['semel_inbox']})"
_HAS_TOPIC_IDS: Final = (
    "SELECT count(*) FROM pg_attribute WHERE attrelid = 'semel_inbox'::regclass AND attname = 'topic_id' "
    "AND NOT attisdropped"
)
_TAKE_TURN: Final = f"SELECT pg_advisory_xact_lock({0x5E6E1})"
"""Of two that make a table at the same time, the second waits: IF NOT EXISTS alone fails for one of them."""
_PARAMETER: Final = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|\$(\d+)""")
"""A parameter, or text and names in quotes, where a dollar sign means nothing."""

_STAGED: Final = "semel_staged"
_JOIN_MEMORY: Final = "64MB"
"""work_mem for a merge, unless the server's own is larger. More is sorted and joined in files."""
_IDLE_S: Final = 15
"""A process that is stopped in the middle of a transaction keeps its successor waiting for so long."""
_LOCK_ID: Final = "hashtextextended($1, 0)"
_LOCK_NOT_AVAILABLE: Final = "55P03"
_NO_RIGHT: Final = "42501"
_CANNOT_COERCE: Final = "42846"
_INT64: Final = range(-(2**63), 2**63)


class PostgresConnection(Protocol):
    """What PEP 249 says of a connection, and no more."""

    def cursor(self) -> Any: ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...


class PostgresPositions(SqlPositions):
    """Positions in a table `semel_inbox`, which is made if it is not there.

    >>> with Inbox(PostgresPositions(connection), ...) as inbox:  # doctest: +SKIP
    ...     for delivery in inbox:
    ...         with delivery as connection:
    ...             connection.execute(...)
    """

    def __init__(self, connection: PostgresConnection) -> None:
        self._connection = connection
        with self.transaction():
            # Where it is there, no right to make one is needed.
            if self._one("SELECT to_regclass('semel_inbox')") is None:
                self._execute(_TAKE_TURN)
                self._execute(_MAKE)
            elif not self._one(_HAS_TOPIC_IDS):  # a table that an earlier release made
                self._execute("ALTER TABLE semel_inbox ADD COLUMN IF NOT EXISTS topic_id text")

    def load(self, inbox: str) -> dict[TopicPartition, Position]:
        with self.transaction():
            if self._one("SELECT has_table_privilege(to_regclass('semel_ledger'), 'SELECT')"):
                self._check_no_run(inbox)
            return super().load(inbox)

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        self._begin()
        try:
            self._execute(BEGIN_BLOCK)
            yield self._connection
            self._end_block()
            reach("before_commit")
        except BaseException as error:
            self._roll_back(error)
            raise
        self._connection.commit()
        reach("after_commit")

    # -- the transaction -------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if getattr(self._connection, "autocommit", False):
            raise ConfigError(
                "The connection commits every statement by itself (autocommit), so results and position could not be "
                "kept together; nothing was read. Give the inbox a connection with autocommit off."
            )
        if self._one("SELECT txid_current_if_assigned()") is not None:
            raise InvalidState("The connection has a transaction open already: commit it before the next delivery.")
        self._connection.rollback()  # a query alone opens one too, and might see the database as it was then

    def _end_block(self) -> None:
        try:
            self._execute(END_BLOCK)
        except Exception as error:
            raise ended_in_block() from error

    def _roll_back(self, reason: BaseException) -> None:
        try:
            self._connection.rollback()
        except Exception as second:  # the connection is gone, and the server rolls back by itself
            reason.add_note(f"The rollback was not confirmed ({second}).")

    # -- statements ------------------------------------------------------------------------------------------------

    def _execute(self, statement: str, *values: object) -> Result:
        cursor = self._connection.cursor()
        cursor.execute(_PARAMETER.sub(lambda found: "%s" if found.group(1) else found.group(), statement), values)
        return Result([] if cursor.description is None else cursor.fetchall(), cursor.rowcount)

    def _one(self, query: str) -> Any:
        return self._execute(query).rows[0][0]


class PostgresDatabase(Database):
    """A connection by URI (`postgresql://user@host/database`), opened when it is first used."""

    kind = "Postgres"
    lock_row = "FOR UPDATE"
    schema_advice = "Create it by CREATE SCHEMA, or name another one."
    name_bytes_max = 63

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._connection: Any = None
        self._cursor: Any = None
        self._staged_schema: pa.Schema | None = None

    def __repr__(self) -> str:
        return f"PostgresDatabase({hide_password(self.uri)!r})"

    def _open(self) -> Any:
        if self._cursor is None:
            self._check_may_open()
            check_url(self.uri)
            driver = _import_driver()
            with self._translated():
                # Transactions are begun by our own statements: a driver that begins one ahead sits in it while idle.
                self._connection = driver.connect(with_timeouts(self.uri), autocommit=True)
                self._cursor = self._connection.cursor()
                # ADBC would wrap queries in COPY, where a row cannot be locked.
                self._cursor.adbc_statement.set_options(**{"adbc.postgresql.use_copy": "false"})
                self._cursor.execute("SET standard_conforming_strings = on")
        return self._cursor

    def close(self) -> None:
        cursor, connection, self._cursor, self._connection = self._cursor, self._connection, None, None
        self._staged_schema = None
        for one in (cursor, connection):
            if one is not None:
                one.close()

    def _begin(self) -> None:
        # In a stricter one, what was committed while we waited for our turn could not be seen.
        self._execute("BEGIN ISOLATION LEVEL READ COMMITTED")

    def _wait_for_turn(self) -> None:
        self._execute(_TAKE_TURN)

    def _execute(self, statement: str, *values: object) -> Result:
        cursor = self._open()
        with self._translated():
            # With parameters ADBC does not tell how many rows a statement changed.
            cursor.execute(fill_in(statement, values))
            rows = cursor.fetchall() if cursor.description else []
            return Result(rows, cursor.rowcount)

    def query(self, statement: str) -> pa.Table:
        """The rows of a query as Arrow columns. All of them are in memory."""
        cursor = self._open()
        with self._translated():
            cursor.execute(statement)
            return cursor.fetch_arrow_table()

    def stage(self, table: pa.Table | pa.RecordBatchReader) -> str:
        if self._staged_schema is None or not table.schema.equals(self._staged_schema):
            self._staged_schema = None  # it is made in this transaction, which may be rolled back
            self._execute(f"DROP TABLE IF EXISTS pg_temp.{_STAGED}")
            self._execute(f"CREATE TEMPORARY TABLE {_STAGED} ({self.column_list(table.schema)}) ON COMMIT DELETE ROWS")
        self.copy(table, _STAGED, temporary=True)
        return f"pg_temp.{_STAGED}"

    def copy(self, table: pa.Table | pa.RecordBatchReader, name: str, **options: Any) -> int:
        """Load rows by binary COPY into a table whose columns have the types of `column_list`."""
        cursor = self._open()
        if isinstance(table, pa.Table):
            check_ranges(table, self.kind)  # the driver ends the connection over such a value
        with self._translated():
            return cursor.adbc_ingest(name, table, mode="append", **options)

    def column_list(self, schema: pa.Schema) -> str:
        return ", ".join(f"{quote(field.name)} {self.sql_type(field.type)}" for field in schema)

    def columns(self, table: str) -> dict[str, Column] | None:
        found = self._execute(COLUMNS, quote_table(table)).rows
        return {name: Column(*column) for name, *column in found} or None

    def has_schema(self, schema: str) -> bool:
        return self.scalar("SELECT 1 FROM pg_namespace WHERE nspname = $1", schema) is not None

    def full_name(self, table: str) -> str:
        found = self._execute(
            "SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE c.oid = to_regclass($1)",
            quote_table(table),
        ).rows
        if not found and "." not in table:
            found = [(self.scalar("SELECT current_schema()") or "", table)]
        return ".".join(map(quote, found[0])) if found else quote_table(table)

    def is_unique(self, table: str, key: Sequence[str]) -> bool:
        indexes = self._execute(
            "SELECT i.indexrelid, a.attname, a.attnotnull FROM pg_index i JOIN pg_attribute a "
            "ON a.attrelid = i.indrelid AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1]) "
            "WHERE i.indrelid = to_regclass($1) AND i.indisunique AND i.indisvalid AND i.indimmediate "
            "AND i.indpred IS NULL AND i.indexprs IS NULL",
            quote_table(table),
        ).rows
        by_index: dict[int, set[tuple[str, bool]]] = {}
        for index, name, is_required in indexes:
            by_index.setdefault(index, set()).add((name, is_required))
        return {(name, True) for name in key} in by_index.values()

    def limit_idle(self) -> None:
        self._execute(f"SET LOCAL idle_in_transaction_session_timeout = '{_IDLE_S}s'")

    def allow_idle(self) -> None:
        self._execute("SET LOCAL idle_in_transaction_session_timeout = 0")

    def keep_columns(self, table: str) -> None:
        # Takes the lock of an INSERT, and like it needs no more than the right to one column. LOCK TABLE needs more.
        self._execute(f"EXPLAIN (COSTS OFF) INSERT INTO {quote_table(table)} DEFAULT VALUES")

    def hold_pipeline(self, key: str) -> None:
        self._execute(f"SELECT pg_advisory_xact_lock({_LOCK_ID})", f"semel owner {key}")

    def take_pipeline(self, key: str) -> bool:
        self._execute("SET LOCAL statement_timeout = 0")
        self._execute(f"SET LOCAL lock_timeout = '{_IDLE_S}s'")
        try:
            self.hold_pipeline(key)
        except DatabaseError as error:
            if error.sqlstate != _LOCK_NOT_AVAILABLE:
                raise
            return False
        self._execute("SET LOCAL lock_timeout TO DEFAULT")
        self._execute("SET LOCAL statement_timeout TO DEFAULT")
        return True

    def end_stopped_owner(self, key: str) -> None:
        # A lock names its session, so none of another process can be hit that has got the same id since. "Client" is a
        # session that waits for its process, in a COPY too. One that works will be done, and is waited for.
        held = (
            f"SELECT l.pid FROM pg_locks l, (SELECT {_LOCK_ID} AS id) wanted "
            "WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 "
            "AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
            "AND l.classid::bigint = (wanted.id >> 32) & 4294967295 AND l.objid::bigint = wanted.id & 4294967295"
        )
        try:
            ended = self._execute(
                "SELECT a.pid, pg_terminate_backend(a.pid) FROM pg_stat_activity a "
                f"WHERE a.wait_event_type = 'Client' AND a.pid IN ({held})",
                f"semel owner {key}",
            ).rows
        except DatabaseError as error:
            if error.sqlstate != _NO_RIGHT:
                raise
            LOG.warning("An older process is stopped in its transaction, and its session cannot be ended: %s", error)
            return
        for pid, _ in ended:
            LOG.warning(
                "An older process has kept its transaction open for more than %d s without going on. Its session (%d) "
                "was ended, and its transaction is rolled back.",
                _IDLE_S,
                pid,
            )

    def load_into(self, table: str, rows: pa.Table | pa.RecordBatchReader) -> bool:
        found = self._loadable(table)  # asked each time, as the table may be gone
        for schema, name in found:
            self.copy(rows, name, db_schema_name=schema)
        return bool(found)

    def can_load_into(self, table: str) -> bool:
        return bool(self._loadable(table))

    def _loadable(self, table: str) -> list[tuple[str, str]]:
        """Its schema and name, if COPY does there what INSERT does. It knows neither rules nor row-level security."""
        return self._execute(
            "SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE c.oid = to_regclass($1) AND c.relkind IN ('r', 'p') AND NOT c.relhasrules "
            "AND NOT row_security_active(c.oid)",
            quote_table(table),
        ).rows

    def is_empty(self, table: str) -> bool:
        found = self.scalar(
            "SELECT pg_relation_size(oid) = 0 FROM pg_class WHERE oid = to_regclass($1) AND relkind = 'r'",
            quote_table(table),
        )
        return bool(found)

    def begin_join(self, table: str, columns: Sequence[str]) -> bool:
        # MERGE differs from INSERT in what rules, triggers, row-level security and child tables make of it, and came
        # with Postgres 15. Columns with a collation of their own cannot be compared with staged ones.
        names = ", ".join(map(literal, columns))
        is_plain = self._execute(
            "SELECT c.oid FROM pg_class c WHERE c.oid = to_regclass($1) AND c.relkind = 'r' AND NOT c.relhasrules "
            "AND NOT c.relhassubclass AND NOT row_security_active(c.oid) "
            "AND current_setting('server_version_num')::int >= 150000 "
            "AND NOT EXISTS (SELECT 1 FROM pg_trigger t WHERE t.tgrelid = c.oid AND NOT t.tgisinternal) "
            "AND NOT EXISTS (SELECT 1 FROM pg_attribute a WHERE a.attrelid = c.oid "
            f"AND a.attname IN ({names}) AND a.attcollation NOT IN (0, {DEFAULT_COLLATION}))",
            quote_table(table),
        ).rows
        if is_plain:
            self._execute(
                "SELECT set_config('work_mem', $1, true) WHERE "
                f"pg_size_bytes(current_setting('work_mem')) < pg_size_bytes('{_JOIN_MEMORY}')",
                _JOIN_MEMORY,
            )
        return bool(is_plain)

    def check_constraints(self) -> None:
        self._execute("SET CONSTRAINTS ALL IMMEDIATE")

    def wait_for_scope(self, scope: str) -> None:
        self._execute("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", f"semel {scope}")

    def missing_rights(self, table: str, rights: Sequence[str]) -> list[str]:
        relation = f"to_regclass({literal(quote_table(table))})"
        held = ", ".join(
            f"has_{'table' if one == 'DELETE' else 'any_column'}_privilege({relation}, '{one}')" for one in rights
        )
        [found] = self._execute(f"SELECT {held}").rows
        return [right for right, is_held in zip(rights, found, strict=True) if not is_held]

    def sql_type(self, kind: pa.DataType) -> str:
        if pa.types.is_list(kind):
            return self.sql_type(kind.value_type) + "[]"
        if pa.types.is_decimal(kind):
            return f"numeric({kind.precision},{kind.scale})"
        if pa.types.is_timestamp(kind):
            return "timestamp without time zone" if kind.tz is None else "timestamp with time zone"
        return _TYPES[kind]

    def cast_for(self, kind: pa.DataType, column: Column) -> str | None:
        return None if self.sql_type(kind) == column.type else column.type

    def find_changed(self, name: str, kind: pa.DataType, column: Column) -> str | None:
        # Of two equal keys jsonb keeps the last. Servers before Postgres 16 cannot tell.
        if not pa.types.is_string(kind) or column.base_type != "jsonb" or self._version() < 160000:
            return None
        return f"CASE WHEN {quote(name)} IS JSON THEN NOT {quote(name)} IS JSON WITH UNIQUE KEYS END"

    def _version(self) -> int:
        return int(self.scalar("SELECT current_setting('server_version_num')"))

    def can_cast(self, own_type: str, column: Column) -> bool:
        if (own_type, column.base_type) == ("integer", "boolean"):
            return False  # Postgres has one, which makes 5 true
        if own_type.startswith("bytea") and own_type != column.base_type:
            return False  # Postgres would write the text \x68656c6c6f
        try:
            # Of no row: a domain may refuse null.
            self._execute(f"SELECT CAST(v AS {column.type}) FROM (SELECT CAST(NULL AS {own_type}) AS v LIMIT 0) AS n")
        except DatabaseError as error:
            if error.sqlstate != _CANNOT_COERCE:
                raise
            return False
        return True

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not type(error).__module__.startswith("adbc_driver_manager"):
                raise
            raised = translate_error(error, self.uri, is_connecting=self._connection is None)
            if isinstance(raised, DatabaseUnreachable):
                self.close()
            raise raised from error


_TYPES: Final = {
    pa.bool_(): "boolean",
    pa.int16(): "smallint",
    pa.int32(): "integer",
    pa.int64(): "bigint",
    pa.float32(): "real",
    pa.float64(): "double precision",
    pa.string(): "text",
    pa.binary(): "bytea",
    pa.date32(): "date",
    pa.time64("us"): "time without time zone",
    pa.duration("us"): "interval",
}


def _import_driver() -> Any:
    try:
        import adbc_driver_postgresql.dbapi as driver
    except ImportError as error:
        raise ConfigError("Writing to Postgres needs its drivers: pip install 'semel[postgres]'.") from error
    return driver


def fill_in(statement: str, values: Sequence[object]) -> str:
    """The statement with its parameters; one without any is left alone, as it may be the user's own.

    >>> fill_in("SELECT 'costs $5', $1", ["x"])
    "SELECT 'costs $5', 'x'"
    """
    if not values:
        return statement
    return _PARAMETER.sub(
        lambda found: _sql_value(values[int(found.group(1)) - 1]) if found.group(1) else found.group(), statement
    )


def _sql_value(value: object) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and value in _INT64:
        return str(value)
    if isinstance(value, str) and "\0" not in value:
        return literal(value)
    raise ConfigError(f"A value of type {type(value).__name__} cannot be part of a statement.")


_LOST: Final = ("08", "57P", "25P03")
_CONFLICTS: Final = {
    "40001": "another transaction has changed the same rows",
    "40P01": "it was in a deadlock with another transaction",
    "55P03": "another transaction held a lock for longer than lock_timeout",
    "57014": "a statement took longer than statement_timeout, or somebody has cancelled it",
    "25006": "the server is a standby that takes no writes now",
}
_REFUSALS: Final = ("22", "23", "44000", "54000", "54001", "P0")
"""Values and constraints, a view's CHECK OPTION, a row too large for a page or an index, or nested too deeply to be
read, and what a trigger raises."""
_OWN_CLASSES: Final = (
    "00 01 02 03 08 09 0A 0B 0F 0L 0P 0Z 10 20 21 22 23 24 25 26 27 28 2B 2D 2F 34 38 39 3B 3D 3F 40 42 44 53 54 55 57 "
    "58 72 F0 HV P0 XX"
)
"""The classes of Postgres' own codes. One of another class was chosen by the user, for RAISE in a trigger."""
_FULL: Final = {"53100": "its disk is full", "53200": "it is out of memory", "53300": "it has no connection left"}


_NO_LOGIN: Final = re.compile(
    r'authentication failed|no password supplied|no pg_hba.conf entry|role ".*" does not exist|permission denied'
)
_NO_DATABASE: Final = re.compile(r'database ".*" does not exist')
"""A connection that is refused has no SQLSTATE, only text."""


def translate_error(error: Exception, uri: str, *, is_connecting: bool) -> SemelError:
    state: str | None = getattr(error, "sqlstate", None)
    text = _short(str(error))
    if state is None:
        text = hide_quoted(text)
    where = f"Postgres ({place_of(uri)})"
    if state in ("28P01", "28000") or (state is None and _NO_LOGIN.search(text)):
        return AuthenticationFailed(f"{where} refused the login: {text}. Nothing was written. Check user and password.")
    if state == "3D000" or (state is None and _NO_DATABASE.search(text)):
        return DatabaseError(f"{where} has no such database: {text}. Nothing was written. Create it.", sqlstate="3D000")
    if is_connecting and (state is None or state.startswith(_LOST)):
        return DatabaseUnreachable(f"{where} cannot be reached: {text}.", sqlstate=state, is_transient=True)
    if state is None or state.startswith(_LOST):
        return DatabaseUnreachable(
            f"{where} has gone, or the connection was lost: {text}. A transaction under way was rolled back, "
            "or its commit is found when the connection is back.",
            sqlstate=state,
            is_transient=True,
        )
    if state in _CONFLICTS:
        return DatabaseError(
            f"{where} has rolled the transaction back: {_CONFLICTS[state]} ({text}).", sqlstate=state, is_transient=True
        )
    if state in _FULL:
        return DatabaseError(
            f"{where} could not go on: {_FULL[state]} ({text}). The transaction was rolled back, and nothing is lost.",
            sqlstate=state,
            is_transient=True,
        )
    if state.startswith(_REFUSALS) or state[:2] not in _OWN_CLASSES:
        return ValueDoesNotFit(f"{where} refused a row: {text}.", sqlstate=state)
    if state == "42501":
        return DatabaseError(
            f"{where} does not allow this: {text}. Nothing was written. Grant the right.", sqlstate=state
        )
    if state == "42P01":
        return DatabaseError(
            f"{where} has no such table: {text}. The transaction was rolled back, and the records are read again when "
            "the table is back.",
            sqlstate=state,
        )
    return DatabaseError(f"{where} refused a statement: {text}. The transaction was rolled back.", sqlstate=state)


def _short(text: str) -> str:
    """The server's own words, without the driver's."""
    found = re.search(r"(?:ERROR|FATAL): +(.*)", text)
    detail = re.search(r"DETAIL: +(.*)", text)
    short = (found.group(1) if found else text.partition(": ")[2] or text).strip().split("\n")[0]
    return (f"{short} ({detail.group(1).strip()})" if detail else short)[:500].rstrip(".")
