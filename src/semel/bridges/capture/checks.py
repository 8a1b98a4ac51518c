"""What must be true of the server, the tables, the publication and the slot, asked by SQL before a capture begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from semel.bridges.capture.changes import TableFormat
from semel.bridges.capture.lsn import parse_lsn
from semel.bridges.capture.options import CaptureOptions
from semel.bridges.capture.pgoutput import Relation, RelationColumn
from semel.bridges.capture.rows import check_routing
from semel.bridges.merge import literal, quote, quote_table
from semel.bridges.postgres import PostgresDatabase
from semel.bridges.relay.options import choose_columns
from semel.bridges.relay.postgres_checks import server_identity
from semel.errors import ConfigError, DatabaseError

_VERSION_MIN: Final = 130_000
_FAILOVER_MIN: Final = 170_000
_PARTS_MIN: Final = 150_000
"""Publications with some of the columns or rows of a table."""
_IS_KEY: Final = (
    "EXISTS (SELECT 1 FROM pg_index i WHERE i.indrelid = a.attrelid AND a.attnum = ANY (i.indkey) "
    "AND CASE c.relreplident WHEN 'i' THEN i.indisreplident ELSE i.indisprimary END)"
)
_NOTHING: Final = " Nothing was captured."
_NO_RIGHT: Final = "42501"
_IS_THERE: Final = "42710"


@dataclass(frozen=True, slots=True)
class CapturedTable:
    """A table as it is now."""

    oid: int
    schema: str
    name: str
    is_partitioned: bool
    identity: str
    """As in `Relation.identity`."""

    @property
    def full_name(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def quoted(self) -> str:
        return f"{quote(self.schema)}.{quote(self.name)}"


@dataclass(frozen=True, slots=True)
class SlotState:
    """A replication slot as Postgres shows it."""

    plugin: str | None
    database: str | None
    active_pid: int | None
    active_name: str | None
    """The application name of the connection that uses it."""
    confirmed_lsn: int | None
    lost_because: str | None
    """Set if the server has removed log that the slot needs."""


def check_capture_server(database: PostgresDatabase, options: CaptureOptions) -> tuple[int, dict[str, Any]]:
    """The version of the server, and what tells it from others."""
    [(version, is_standby, wal_level, encoding)] = database.execute(
        "SELECT current_setting('server_version_num')::int, pg_is_in_recovery(), current_setting('wal_level'), "
        "current_setting('server_encoding')"
    ).rows
    if version < _VERSION_MIN:
        raise ConfigError(f"Change capture needs Postgres 13 or newer; this is {version // 10_000}.{_NOTHING}")
    if is_standby:
        raise ConfigError(
            f"This Postgres is a standby, and change capture needs the primary.{_NOTHING} Use the primary's address, "
            "or add target_session_attrs=read-write to the URL."
        )
    if wal_level != "logical":
        raise ConfigError(
            f"wal_level of this Postgres is {wal_level!r}, so its log does not have what changed in rows.{_NOTHING} "
            "Run ALTER SYSTEM SET wal_level = 'logical'; and restart the server."
        )
    if encoding == "SQL_ASCII":
        raise ConfigError(
            f"This database has the encoding SQL_ASCII, so nobody knows how its texts are to be read.{_NOTHING} Use a "
            "database with the encoding UTF8."
        )
    if options.failover and version < _FAILOVER_MIN:
        raise ConfigError(
            f"failover=True needs Postgres 17 or newer; this is {version // 10_000}.{_NOTHING} Leave it out; after a "
            "failover, start under another name, which takes a new snapshot."
        )
    return version, server_identity(database)


def check_tables(database: PostgresDatabase, options: CaptureOptions) -> list[CapturedTable]:
    """The tables by their full names, in order. Raises if changes could be lost or could not be told apart."""
    found = {table.oid: table for table in (_find(database, options, name) for name in options.tables)}
    for table in found.values():
        _check_columns(database, options, table)
    return sorted(found.values(), key=lambda table: table.full_name)


def _find(database: PostgresDatabase, options: CaptureOptions, name: str) -> CapturedTable:
    found = database.execute(
        "SELECT c.oid::bigint, n.nspname::text, c.relname::text, c.relkind::text, c.relpersistence::text, "
        "c.relreplident::text, EXISTS (SELECT 1 FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary "
        "AND i.indisvalid), has_table_privilege(c.oid, 'SELECT'), row_security_active(c.oid) FROM pg_class c "
        "JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = to_regclass($1)",
        quote_table(name),
    ).rows
    if not found:
        raise ConfigError(f"There is no table {name!r} in this database.{_NOTHING} Create it, or mend its name.")
    [(oid, schema, table, kind, persistence, identity, has_key, may_read, is_filtered)] = found
    full = f"{quote(schema)}.{quote(table)}"
    if kind not in ("r", "p"):
        raise ConfigError(
            f"{name!r} is not an ordinary or partitioned table, so its rows are not in the log.{_NOTHING}"
        )
    if persistence != "p":
        raise ConfigError(
            f"Table {name!r} is temporary or unlogged, so its changes are not in Postgres' log.{_NOTHING} Run: ALTER "
            f"TABLE {full} SET LOGGED;"
        )
    if not options.is_outbox and (identity == "n" or (identity == "d" and not has_key)):
        raise ConfigError(
            f"Table {name!r} has no primary key and no replica identity: Postgres would refuse UPDATE and DELETE in it "
            f"as soon as it is captured, since nothing says which row was meant.{_NOTHING} Give it a primary key, or "
            f"run: ALTER TABLE {full} REPLICA IDENTITY FULL;"
        )
    if options.snapshot and not may_read:
        raise ConfigError(
            f"This role may not read table {name!r}, and the snapshot at the beginning does.{_NOTHING} Run: GRANT "
            f"SELECT ON {full} TO ...;"
        )
    if options.snapshot and is_filtered:
        raise ConfigError(
            f"Row-level security hides rows of {name!r} from this role, so the snapshot would lack them.{_NOTHING} "
            "Use a role with BYPASSRLS."
        )
    return CapturedTable(oid, schema, table, kind == "p", identity)


def _check_columns(database: PostgresDatabase, options: CaptureOptions, table: CapturedTable) -> None:
    rows = database.execute(
        f"SELECT a.attname::text, {_IS_KEY} FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid "
        f"WHERE a.attrelid = {table.oid} AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''"
    ).rows
    columns = {name for name, _ in rows}
    if options.is_outbox:
        choose_columns(options.relay, columns)
    known = columns if table.identity == "f" else {name for name, is_key in rows if is_key}
    check_routing(options, table.full_name, columns, known)


# -- the publication -------------------------------------------------------------------------------------------------


def find_publication(database: PostgresDatabase, options: CaptureOptions, tables: list[CapturedTable]) -> int | None:
    """Its id; None if there is none. Raises if it does not publish what is to be captured."""
    name = literal(options.publication)
    found = database.execute(
        "SELECT oid::bigint, pubinsert, pubupdate AND pubdelete AND pubtruncate FROM pg_publication "
        f"WHERE pubname = {name}"
    ).rows
    if not found:
        return None
    [(oid, has_inserts, has_changes)] = found
    if not has_inserts or not (has_changes or options.is_outbox):
        raise ConfigError(
            f"Publication {options.publication!r} leaves out some kinds of changes.{_NOTHING} Run: ALTER PUBLICATION "
            f"{quote(options.publication)} SET (publish = 'insert, update, delete, truncate');"
        )
    published = {
        (schema, table)
        for schema, table in database.execute(
            f"SELECT schemaname::text, tablename::text FROM pg_publication_tables WHERE pubname = {name}"
        ).rows
    }
    if published != {(table.schema, table.name) for table in tables}:
        raise ConfigError(
            f"Publication {options.publication!r} has the tables {', '.join(sorted(map('.'.join, published))) or '-'}, "
            f"and {', '.join(table.full_name for table in tables)} are to be captured.{_NOTHING} Run: ALTER "
            f"PUBLICATION {quote(options.publication)} SET TABLE {', '.join(table.quoted for table in tables)}; or "
            "name another one by publication=."
        )
    return oid


def make_publication(database: PostgresDatabase, options: CaptureOptions, tables: list[CapturedTable]) -> None:
    publish = "insert" if options.is_outbox else "insert, update, delete, truncate"
    statement = (
        f"CREATE PUBLICATION {quote(options.publication)} FOR TABLE {', '.join(table.quoted for table in tables)} "
        f"WITH (publish = '{publish}', publish_via_partition_root = true)"
    )
    try:
        database.execute(statement)
    except DatabaseError as error:
        if error.sqlstate == _IS_THERE:
            return  # a capture of the same name that began at the same time has made it
        if error.sqlstate != _NO_RIGHT:
            raise
        raise ConfigError(
            f"This role may not make a publication ({error}){_NOTHING} Let the owner of the tables run: {statement};"
        ) from error


def published_rows(
    database: PostgresDatabase, options: CaptureOptions, table: CapturedTable
) -> tuple[TableFormat, str]:
    """How rows of a table come in the stream, and the query that gives the same of those that are there."""
    version = int(database.scalar("SELECT current_setting('server_version_num')"))
    named = "a.attname = ANY (p.attnames)" if version >= _PARTS_MIN else "true"
    rowfilter = "p.rowfilter" if version >= _PARTS_MIN else "NULL::text"
    rows = database.execute(
        f"SELECT a.attname::text, a.atttypid::bigint, {_IS_KEY}, {rowfilter} "
        "FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid, pg_publication_tables p "
        f"WHERE a.attrelid = {table.oid} AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '' "
        f"AND p.pubname = {literal(options.publication)} AND p.schemaname = {literal(table.schema)} "
        f"AND p.tablename = {literal(table.name)} AND {named} ORDER BY a.attnum"
    ).rows
    columns = tuple(RelationColumn(name, kind, is_key or table.identity == "f") for name, kind, is_key, _ in rows)
    relation = Relation(table.oid, table.schema, table.name, table.identity, columns)
    where = next((str(text) for *_, text in rows if text is not None), "true")
    only = "" if table.is_partitioned else "ONLY "
    query = f"SELECT {', '.join(quote(column.name) for column in columns)} FROM {only}{table.quoted} WHERE {where}"
    return TableFormat(relation, find_key(database, relation)), query


def find_key(database: PostgresDatabase, relation: Relation) -> list[str] | None:
    """The primary key of a table that logs whole rows."""
    if relation.identity != "f":
        return None
    found = database.execute(
        "SELECT a.attname::text FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid "
        "AND a.attnum = ANY (i.indkey) WHERE i.indrelid = to_regclass($1) AND i.indisprimary",
        f"{quote(relation.schema)}.{quote(relation.table)}",
    ).rows
    return [name for (name,) in found] or None


# -- the slot --------------------------------------------------------------------------------------------------------


def find_slot(database: PostgresDatabase, slot: str) -> SlotState | None:
    found = database.execute(
        "SELECT s.plugin::text, s.database::text, s.active_pid, a.application_name, s.confirmed_flush_lsn::text, "
        "s.wal_status, s.restart_lsn IS NULL, to_jsonb(s) ->> 'invalidation_reason' FROM pg_replication_slots s "
        "LEFT JOIN pg_stat_activity a ON a.pid = s.active_pid WHERE s.slot_name = $1",
        slot,
    ).rows
    if not found:
        return None
    [(plugin, name, pid, application, confirmed, status, is_empty, reason)] = found
    lost = reason or ("wal_removed" if status == "lost" or (is_empty and confirmed) else None)
    return SlotState(plugin, name, pid, application, parse_lsn(confirmed) if confirmed else None, lost)
