"""The outbox table as Semel likes it, as SQL to run."""

from __future__ import annotations

from typing import Literal

from semel.bridges.merge import quote_table
from semel.bridges.relay.waking import CHANNEL
from semel.errors import ConfigError

XID_DEFAULT = "pg_current_xact_id()"


def outbox_table_sql(
    kind: Literal["postgres", "sqlite"] = "postgres", table: str = "outbox", *, wake: bool = False
) -> str:
    """The statements that make an outbox table for `semel.relay`. Add columns of your own as you like.

    `wake=True` adds a trigger to Postgres' that wakes an idle relay at once, whoever writes the rows. Commits with a
    notification take turns in Postgres, so leave it out where thousands of them come in a second.

    `value` may just as well be `json`, `jsonb` or `bytea`.

    >>> print(outbox_table_sql("sqlite"))
    CREATE TABLE "outbox" (
      id INTEGER PRIMARY KEY AUTOINCREMENT,
      topic TEXT NOT NULL,
      key TEXT,
      value TEXT,
      headers TEXT,
      created_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
    );
    """
    if kind == "sqlite":
        columns = [
            "id INTEGER PRIMARY KEY AUTOINCREMENT",
            "topic TEXT NOT NULL",
            "key TEXT",
            "value TEXT",
            "headers TEXT",
            "created_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP",
        ]
        return _create(table, columns)
    if kind != "postgres":
        raise ConfigError(f'{kind!r} is not supported: write "postgres" or "sqlite".')
    columns = [
        "id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
        "topic text NOT NULL",
        "key text",
        "value text",
        "headers jsonb",
        "created_at timestamptz NOT NULL DEFAULT now()",
        f"semel_xid xid8 NOT NULL DEFAULT {XID_DEFAULT}",
    ]
    made = f"{_create(table, columns)}\n{index_sql(table, 'semel_xid')}"
    return f"{made}\n{_trigger_sql(table)}" if wake else made


def _trigger_sql(table: str) -> str:
    return (
        "CREATE OR REPLACE FUNCTION semel_wake_relay() RETURNS trigger LANGUAGE plpgsql AS\n"
        f"  $$ BEGIN PERFORM pg_notify('{CHANNEL}', ''); RETURN NULL; END $$;\n"
        f"CREATE TRIGGER semel_wake_relay AFTER INSERT ON {quote_table(table)}\n"
        "  FOR EACH STATEMENT EXECUTE FUNCTION semel_wake_relay();"
    )


def _create(table: str, columns: list[str]) -> str:
    lines = ",\n".join(f"  {column}" for column in columns)
    return f"CREATE TABLE {quote_table(table)} (\n{lines}\n);"


def index_sql(table: str, column: str) -> str:
    return f"CREATE INDEX ON {quote_table(table)} ({column});"


def one_line(sql: str) -> str:
    """For messages."""
    return " ".join(sql.split())
