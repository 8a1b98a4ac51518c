"""The tables of the demo, in Postgres or SQLite: one for each pipeline, with a row for each order."""

from __future__ import annotations

import sqlite3
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from semel.bridges.targets import DatabaseTarget, Postgres, SQLite
from semel.demo.orders import SALES, Sale
from semel.demo.pipeline_names import PIPELINES

Kind = Literal["postgres", "sqlite"]
_COLUMNS: Final = "order_number bigint NOT NULL, product text NOT NULL, category text NOT NULL, cents bigint NOT NULL"
_BUSY_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Tables:
    """Where they are. Goes to the driver as JSON, and from there to Spark's tasks.

    >>> Tables("sqlite", "/data").insert_into("plain")
    'INSERT INTO plain_sales (order_number, product, category, cents) VALUES (?, ?, ?, ?)'
    """

    kind: Kind
    place: str
    """A connection string, or the folder of the SQLite files: one for each pipeline, so that they do not wait for each
    other's locks."""

    def connect(self, pipeline: str) -> Any:
        """A connection as PEP 249 has it, for those who write their own SQL."""
        if self.kind == "sqlite":
            return sqlite3.connect(self._file(pipeline), timeout=_BUSY_S)
        import psycopg

        return psycopg.connect(self.place)

    @property
    def mark(self) -> str:
        """Where a value goes in a statement."""
        return "?" if self.kind == "sqlite" else "%s"

    def address(self, pipeline: str) -> str:
        """As commands of Semel take it."""
        return str(self._file(pipeline)) if self.kind == "sqlite" else self.place

    def insert_into(self, pipeline: str) -> str:
        marks = ", ".join([self.mark] * len(Sale._fields))
        return f"INSERT INTO {table_of(pipeline)} ({', '.join(Sale._fields)}) VALUES ({marks})"

    def target(self, pipeline: str) -> DatabaseTarget:
        """The same table for Semel's sink."""
        if self.kind == "sqlite":
            return SQLite(self._file(pipeline), table=table_of(pipeline))
        return Postgres(self.place, table=table_of(pipeline))

    def create(self) -> None:
        for pipeline in PIPELINES:
            self._execute(pipeline, f"CREATE TABLE {table_of(pipeline)} ({_COLUMNS})")

    def read(self, pipeline: str) -> Counter[Sale]:
        """All rows of a pipeline's table."""
        rows = self._execute(pipeline, f"SELECT {', '.join(Sale._fields)} FROM {table_of(pipeline)}")
        return Counter(Sale(*row) for row in rows)

    def _execute(self, pipeline: str, statement: str) -> list[Any]:
        connection = self.connect(pipeline)
        try:
            cursor = connection.cursor()
            cursor.execute(statement)
            rows: list[Any] = [] if cursor.description is None else cursor.fetchall()
            connection.commit()
            return rows
        finally:
            connection.close()

    def _file(self, pipeline: str) -> Path:
        return Path(self.place) / f"{pipeline}.db"


def table_of(pipeline: str) -> str:
    """
    >>> table_of("semel")
    'semel_sales'
    """
    return f"{pipeline}_{SALES}"
