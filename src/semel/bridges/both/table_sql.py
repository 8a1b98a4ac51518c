"""The two tables of `semel.both`, as SQL to run."""

from __future__ import annotations

from typing import Final, Literal

from semel.errors import ConfigError

Kind = Literal["postgres", "sqlite"]

_TYPES: Final = {
    "postgres": ("text", "integer", "bytea"),
    "sqlite": ("TEXT", "INTEGER", "BLOB"),
}


def both_table_sql(kind: Kind = "postgres") -> str:
    """The statements that make the tables for `semel.both`.

    >>> print(both_table_sql("sqlite"))
    CREATE TABLE semel_both (
      name TEXT PRIMARY KEY,
      claim TEXT NOT NULL,
      decision TEXT
    );
    CREATE TABLE semel_both_records (
      decision TEXT NOT NULL,
      number INTEGER NOT NULL,
      topic TEXT NOT NULL,
      partition INTEGER NOT NULL,
      record_count INTEGER NOT NULL,
      batch BLOB NOT NULL,
      PRIMARY KEY (decision, number)
    );
    """
    return "\n".join(f"{statement};" for statement in statements(kind))


def statements(kind: Kind) -> tuple[str, str]:
    """The same one by one."""
    if kind not in _TYPES:
        raise ConfigError(f'{kind!r} is not supported: write "postgres" or "sqlite".')
    text, integer, binary = _TYPES[kind]
    decisions = (f"name {text} PRIMARY KEY", f"claim {text} NOT NULL", f"decision {text}")
    records = (
        f"decision {text} NOT NULL",
        f"number {integer} NOT NULL",
        f"topic {text} NOT NULL",
        f"partition {integer} NOT NULL",
        f"record_count {integer} NOT NULL",
        f"batch {binary} NOT NULL",
        "PRIMARY KEY (decision, number)",
    )
    return _create("semel_both", decisions), _create("semel_both_records", records)


def _create(table: str, columns: tuple[str, ...]) -> str:
    lines = ",\n".join(f"  {column}" for column in columns)
    return f"CREATE TABLE {table} (\n{lines}\n)"
