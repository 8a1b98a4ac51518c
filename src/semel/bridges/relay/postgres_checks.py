"""Everything that can be wrong with an outbox table in Postgres, and the server that it is on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from semel.bridges.merge import quote, quote_table
from semel.bridges.postgres import PostgresDatabase
from semel.bridges.relay.options import Columns, RelayOptions, choose_columns
from semel.bridges.relay.table_sql import XID_DEFAULT, index_sql, one_line, outbox_table_sql
from semel.bridges.retries import LOG
from semel.errors import ConfigError, DatabaseError

_VERSION_MIN: Final = 130_000
IDENTITY: Final = (
    "(SELECT system_identifier::text FROM pg_control_system()), pg_walfile_name(pg_current_wal_lsn()), "
    "(SELECT oid::bigint FROM pg_database WHERE datname = current_database())"
)
_INTEGERS: Final = ("bigint", "integer", "smallint")


_SEQUENCES: Final = (
    "SELECT DISTINCT seqrelid::regclass::text, seqcache, seqincrement, seqcycle FROM pg_sequence WHERE seqrelid IN ("
    # that of an identity, or of a column that owns its sequence
    "SELECT d.objid FROM pg_depend d JOIN pg_attribute a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid "
    "WHERE d.classid = 'pg_class'::regclass AND d.refclassid = 'pg_class'::regclass AND d.deptype IN ('a', 'i') "
    "AND d.refobjid = to_regclass($1) AND a.attname = $2 UNION ALL "
    # those that a default names, in partitions too
    "SELECT d.refobjid FROM pg_depend d JOIN pg_attrdef f ON d.classid = 'pg_attrdef'::regclass AND d.objid = f.oid "
    "JOIN pg_attribute a ON a.attrelid = f.adrelid AND a.attnum = f.adnum "
    "WHERE d.refclassid = 'pg_class'::regclass AND a.attname = $3 AND "
    "f.adrelid IN (SELECT relid FROM pg_partition_tree(to_regclass($4)) UNION ALL SELECT to_regclass($5)))"
)


class HiddenRows(ConfigError):
    """Row-level security applies to this user."""

    def __init__(self, table: str) -> None:
        super().__init__(
            f"Row-level security hides rows of {table!r} from this user, and those would be lost. Nothing more was "
            "relayed. Use the table's owner, or a role with BYPASSRLS."
        )


def check_server(database: PostgresDatabase) -> dict[str, Any]:
    """The identity of the server, whose transaction ids count here and nowhere else."""
    [(version, is_standby)] = database.execute(
        "SELECT current_setting('server_version_num')::int, pg_is_in_recovery()"
    ).rows
    if version < _VERSION_MIN:
        raise ConfigError(
            f"A relay needs Postgres 13 or newer, which has 64-bit transaction ids; this is {version // 10_000}. "
            "Nothing was relayed."
        )
    if is_standby:
        raise ConfigError(
            "This Postgres is a standby, and a relay needs the primary: on a standby pg_current_snapshot() reports "
            "open transactions as ended, so rows would be lost. Nothing was relayed. Use the primary's address, or add "
            "target_session_attrs=read-write to the URL."
        )
    return server_identity(database)


def server_identity(database: PostgresDatabase) -> dict[str, Any]:
    """What tells this server and database from others.

    A restore of a dump, and pg_upgrade, make another system identifier. A promoted standby and a restore to a point in
    time begin another timeline. The name of the current WAL file has the timeline at once; the control file has it
    only after the next checkpoint.
    """
    [found] = database.execute(f"SELECT {IDENTITY}").rows
    return identity_in(found)


def identity_in(found: Sequence[Any]) -> dict[str, Any]:
    """What `IDENTITY` selects, by its names."""
    system, wal_file, oid = found
    return {"kind": "postgres", "system": system, "timeline": int(wal_file[:8], 16), "database": oid}


def check_outbox(database: PostgresDatabase, options: RelayOptions) -> Columns:
    """The columns to read. Raises if rows could be lost or get out of order in this table."""
    table = options.table
    found = database.execute(
        "SELECT relkind::text, relpersistence::text, relhassubclass, row_security_active(oid) FROM pg_class "
        "WHERE oid = to_regclass($1)",
        quote_table(table),
    ).rows
    if not found:
        raise ConfigError(
            f"There is no table {table!r} in this database. Nothing was relayed. Create it: "
            f"{one_line(outbox_table_sql('postgres', table))}"
        )
    [(kind, persistence, has_children, is_filtered)] = found
    if kind not in ("r", "p") or (kind == "r" and has_children):
        raise ConfigError(f"{table!r} is not an ordinary or partitioned table. Nothing was relayed.")
    if persistence != "p":
        raise ConfigError(
            f"Table {table!r} is unlogged: Postgres empties it after a crash, and rows that were not relayed would be "
            f"lost. Nothing was relayed. Run: ALTER TABLE {quote_table(table)} SET LOGGED;"
        )
    _check_rights(database, options)
    if is_filtered:
        raise HiddenRows(table)
    available = database.columns(table) or {}
    columns = choose_columns(options, available)
    if available[columns.id].type not in _INTEGERS:
        raise ConfigError(
            f"Column {columns.id!r} of {table!r} is {available[columns.id].type}, and rows go in the order of a whole "
            f"number. Nothing was relayed. Run: ALTER TABLE {quote_table(table)} ADD COLUMN seq bigint GENERATED "
            'ALWAYS AS IDENTITY UNIQUE; and pass id="seq".'
        )
    if not database.is_unique(table, [columns.id]):
        raise ConfigError(
            f"Column {columns.id!r} of {table!r} is not unique, so a position between two rows could not be told. "
            f"Nothing was relayed. Run: ALTER TABLE {quote_table(table)} ADD PRIMARY KEY ({quote(columns.id)});"
        )
    _check_sequence(database, table, columns.id)
    _check_xid(database, options, available)
    return Columns(
        columns.id, columns.topic, columns.value, columns.key, columns.headers, columns.timestamp, options.xid
    )


def _check_rights(database: PostgresDatabase, options: RelayOptions) -> None:
    wanted = ["SELECT", "DELETE"] if options.delete else ["SELECT"]
    missing = database.missing_rights(options.table, wanted)
    if missing:
        user = database.scalar("SELECT quote_ident(current_user)")
        raise DatabaseError(
            f"This user may not {' and '.join(missing)} in {options.table!r}. Nothing was relayed. Run: "
            f"GRANT {', '.join(missing)} ON {quote_table(options.table)} TO {user};",
            sqlstate="42501",
        )


def _check_sequence(database: PostgresDatabase, table: str, column: str) -> None:
    """Ids that sessions take in advance, or that go down, would turn the events of an aggregate around."""
    name = quote_table(table)
    rows = database.execute(_SEQUENCES, name, column, column, name, name).rows
    for sequence, cache, increment, cycles in rows:
        if cache != 1 or increment < 1 or cycles:
            raise ConfigError(
                f"The sequence {sequence} of column {column!r} has CACHE {cache}, INCREMENT {increment}"
                f"{' and CYCLE' if cycles else ''}, so a later row may get a lower id and be relayed first. Nothing "
                f"was relayed. Run: ALTER SEQUENCE {sequence} CACHE 1 INCREMENT 1 NO CYCLE;"
            )
    default = database.scalar(
        "SELECT pg_get_expr(adbin, adrelid) FROM pg_attrdef d JOIN pg_attribute a ON a.attrelid = d.adrelid "
        "AND a.attnum = d.adnum WHERE adrelid = to_regclass($1) AND attname = $2 AND attgenerated = ''",
        name,
        column,
    )
    if default is not None and not rows:
        LOG.warning(
            "The ids of %r come from %s, and Semel cannot see whether they grow from one row to the next. No row is "
            "lost or repeated; but where a later row has a lower id, it may be relayed first.",
            table,
            default,
        )


def _check_xid(database: PostgresDatabase, options: RelayOptions, available: dict[str, Any]) -> None:
    table, name = quote_table(options.table), quote(options.xid)
    add = f"ALTER TABLE {table} ADD COLUMN {name} xid8 NOT NULL DEFAULT {XID_DEFAULT}; {index_sql(options.table, name)}"
    why = (
        "It holds the id of each row's transaction. Without it, rows that commit out of order would be lost: ids are "
        "given out before the commit, and the system column xmin has 32 bits and changes with savepoints."
    )
    if options.xid not in available:
        raise ConfigError(
            f"Table {options.table!r} has no column {options.xid!r}. {why} Nothing was relayed. Run: {add}"
        )
    [(kind, is_required, default)] = database.execute(
        "SELECT format_type(a.atttypid, a.atttypmod), a.attnotnull, pg_get_expr(d.adbin, d.adrelid) "
        "FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum "
        "WHERE a.attrelid = to_regclass($1) AND a.attname = $2",
        table,
        options.xid,
    ).rows
    if kind != "xid8":
        raise ConfigError(
            f"Column {options.xid!r} of {options.table!r} is {kind} and not xid8. {why} Nothing was relayed. Name "
            f"another column by xid=, or drop it and run: {add}"
        )
    others = database.scalar(
        "SELECT count(*) FROM pg_partition_tree(to_regclass($1)) p JOIN pg_attribute a ON a.attrelid = p.relid AND "
        "a.attname = $2 LEFT JOIN pg_attrdef d ON d.adrelid = p.relid AND d.adnum = a.attnum WHERE NOT a.attnotnull OR "
        f"pg_get_expr(d.adbin, d.adrelid) IS DISTINCT FROM '{XID_DEFAULT}'",
        table,
        options.xid,
    )
    if not is_required or default != XID_DEFAULT or others:
        raise ConfigError(
            f"Column {options.xid!r} of {options.table!r} must be NOT NULL and have the default {XID_DEFAULT}, in "
            "every partition too: a row with another value would be lost. Nothing was relayed. Run: "
            f"ALTER TABLE {table} ALTER COLUMN {name} SET DEFAULT {XID_DEFAULT}, ALTER COLUMN {name} SET NOT NULL;"
        )
    has_index = database.scalar(
        "SELECT count(*) FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0] "
        "WHERE i.indrelid = to_regclass($1) AND i.indisvalid AND i.indpred IS NULL AND a.attname = $2",
        table,
        options.xid,
    )
    if not has_index:
        LOG.warning(
            "Column %r of %r has no index, so every look for new rows reads the whole table. Run: %s",
            options.xid,
            options.table,
            index_sql(options.table, name),
        )
