"""Where a pipeline writes to, as an object: `to=semel.Postgres(...)`, `to=semel.SQLite(...)`, `to=semel.Kafka(...)`.

The calls stay the same for every target: `semel.run`, `semel.write_stream` and `semel.write_batch` hand over to the
methods of the same names here.
"""

from __future__ import annotations

import difflib
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from semel.bridges.addresses import check_postgres_url, check_sqlite_path
from semel.bridges.database import Database
from semel.bridges.merge import Mode, Rule
from semel.bridges.postgres import PostgresDatabase
from semel.bridges.postgres_url import hide_password
from semel.bridges.sqlite import SqliteDatabase
from semel.bridges.table_writer import NewColumns, TableOptions
from semel.client.dead_letters import DEAD_LETTER_MAX
from semel.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from semel.session.runner import RowTransform, RunReport, TableTransform
    from semel.spark.progress import BatchProgress


_OPTIONS: Final = """
    table            the table, with its schema where it needs one: "orders", "sales.orders"
    mode             "append" (the default), "upsert", "dedup" or "newest"
    key              the columns that tell rows apart, as a list; with "dedup", the event id
    version          the column that says which of two rows of a key is newer
    delete           a boolean column: where it is true, the row's key is deleted
    event_time, keep how long event ids are remembered (a timedelta), by which column
    statement        your own SQL instead of a plain insert; it reads the rows from `rows`
    create           True makes a missing table
    types            types of columns that are created, by column: {"payload": "jsonb"}
    new_columns      for columns that the table does not have: "refuse" (the default), "add" or "ignore"
    dead_letter      the table for rows that do not fit, which are an error otherwise
    dead_letter_max  how many such rows a run or a batch may have (1,000)
    retry_s          for how many seconds a lost connection, a deadlock or a full disk is tried again (300)
"""


class DatabaseTarget(ABC):
    __doc__ = f"""A table of a database. The pipeline's progress is in the same database and the same transaction.
{_OPTIONS}"""

    def __init__(
        self,
        *,
        table: str,
        mode: Mode = "append",
        key: Sequence[str] = (),
        version: str | None = None,
        event_time: str | None = None,
        keep: timedelta | None = None,
        delete: str | None = None,
        statement: str | None = None,
        create: bool = False,
        new_columns: NewColumns = "refuse",
        types: Mapping[str, str] | None = None,
        dead_letter: str | None = None,
        dead_letter_max: int = DEAD_LETTER_MAX,
        retry_s: float = 300.0,
    ) -> None:
        if isinstance(key, str):
            raise ConfigError(f'key={key!r} must be a list of columns, such as ["{key}"].')
        rule = Rule(table, mode, tuple(key), version, event_time, keep, delete, statement)
        self.options = TableOptions(rule, create, new_columns, dict(types or {}))
        self.dead_letter = dead_letter
        self.dead_letter_max = dead_letter_max
        self.retry_s = retry_s

    is_staged_by_tasks: bool = False
    """Whether Spark's tasks can load rows by themselves, each over its own connection."""

    @property
    @abstractmethod
    def place(self) -> str:
        """The database, without the table."""

    @abstractmethod
    def open(self) -> Database:
        """A connection of its own, which the caller closes."""

    def run(
        self,
        transform: TableTransform | RowTransform,
        *,
        by: Literal["table", "row"] = "table",
        stop: threading.Event | None = None,
        idle_ms: float | None = None,
        **options: Any,
    ) -> RunReport:
        """What `semel.run(transform, to=self, ...)` does."""
        from semel.bridges.run_into import run_into

        self._check_not_mine(options)
        missing = [name for name in ("topics", "name") if name not in options]
        if missing:
            raise ConfigError(f"semel.run() needs {' and '.join(f'{name}=' for name in missing)}. Nothing was read.")
        return run_into(self, transform, by=by, stop=stop, idle_ms=idle_ms, **options)

    def write_stream(self, df: DataFrame, *, name: str, checkpoint: str, **options: Any) -> StreamingQuery:
        """What `semel.write_stream(df, to=self, ...)` does."""
        from semel.bridges.spark_sink import write_stream_into

        self._check_not_mine(options)
        return write_stream_into(self, df, name=name, checkpoint=checkpoint, **options)

    def write_batch(self, df: DataFrame, *, name: str, job_id: str, **options: Any) -> BatchProgress:
        """What `semel.write_batch(df, to=self, ...)` does."""
        from semel.bridges.spark_job import write_batch_into

        self._check_not_mine(options)
        return write_batch_into(self, df, name=name, job_id=job_id, **options)

    def _check_not_mine(self, options: Mapping[str, Any]) -> None:
        """Refuse options of a call that are the target's."""
        wrong = next((name for name in options if name in _target_options()), None)
        if wrong is not None:
            raise ConfigError(
                f"{wrong}= is an option of the target and not of this call: write "
                f"semel.{type(self).__name__}(..., {wrong}=...). Nothing was read or written."
            )

    def committed_offsets(self, *, name: str, bootstrap: str | None = None, **settings: Any) -> str:
        """What `semel.committed_offsets(to=self, ...)` does."""
        from semel.bridges.spark_committed import committed_offsets_in

        return committed_offsets_in(self, name=name, bootstrap=bootstrap, **settings)


def _target_options() -> list[str]:
    return [name for name in signature(DatabaseTarget.__init__).parameters if name != "self"]


def _check_options(target: str, options: Mapping[str, Any]) -> None:
    known = _target_options()
    for name in options:
        if name == "schema":
            raise ConfigError('schema= is no option of a target: write table="sales.orders" for a table of a schema.')
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            advice = f"did you mean {close[0]}=?" if close else f"it has {', '.join(f'{one}=' for one in known)}."
            raise ConfigError(f"{name}= is no option of semel.{target}: {advice}")
    if not isinstance(options.get("table"), str):
        raise ConfigError(f'semel.{target} needs the table to write to: table="orders".')


class Postgres(DatabaseTarget):
    __doc__ = f"""A table in Postgres, by URL: postgresql://user:password@host/database.

    >>> Postgres("postgresql://me:secret@db/shop", table="orders", mode="upsert", key=["id"])
    Postgres('postgresql://me:***@db/shop', table='orders', mode='upsert')
{_OPTIONS}"""

    is_staged_by_tasks = True

    def __init__(self, url: str, **options: Any) -> None:
        check_postgres_url(url)
        _check_options("Postgres", options)
        super().__init__(**options)
        self.url = url

    @property
    def place(self) -> str:
        return self.url

    def open(self) -> PostgresDatabase:
        return PostgresDatabase(self.url)

    def __repr__(self) -> str:
        rule = self.options.rule
        return f"Postgres({hide_password(self.url)!r}, table={rule.table!r}, mode={rule.mode!r})"


class SQLite(DatabaseTarget):
    __doc__ = f"""A table in a SQLite file, by its path.

    >>> SQLite("app.db", table="orders")
    SQLite('app.db', table='orders', mode='append')
{_OPTIONS}"""

    def __init__(self, path: str | Path, **options: Any) -> None:
        check_sqlite_path(path)
        _check_options("SQLite", options)
        super().__init__(**options)
        self.path = str(path)

    @property
    def place(self) -> str:
        return self.path

    def open(self) -> SqliteDatabase:
        return SqliteDatabase(self.path)

    def __repr__(self) -> str:
        rule = self.options.rule
        return f"SQLite({self.path!r}, table={rule.table!r}, mode={rule.mode!r})"


class Kafka:
    """A topic, as a target like the others.

    >>> Kafka("127.0.0.1:9092", topic="out")
    Kafka('127.0.0.1:9092', topic='out')
    """

    def __init__(self, bootstrap: str, *, topic: str | None = None, **settings: Any) -> None:
        self.bootstrap = bootstrap
        self.topic = topic
        self._settings = settings

    def __repr__(self) -> str:
        return f"Kafka({self.bootstrap!r}, topic={self.topic!r})"

    def run(self, transform: TableTransform | RowTransform, **options: Any) -> RunReport:
        """What `semel.run(transform, to=self, ...)` does: one transaction holds output and input offsets."""
        from semel.session.runner import run

        given = options.setdefault("bootstrap", self.bootstrap)
        if given != self.bootstrap:
            raise ConfigError(
                f"bootstrap={given!r} and the target's {self.bootstrap!r} are two addresses: a transaction lives in "
                "one cluster. Leave bootstrap= out, or write it in the same way in both places."
            )
        return run(transform, to=self.topic, **self._settings, **options)

    def write_stream(self, df: DataFrame, **options: Any) -> StreamingQuery:
        """What `semel.write_stream(df, to=self, ...)` does."""
        from semel.spark.stream import write_stream

        return write_stream(df, bootstrap=self.bootstrap, topic=self.topic, **self._settings, **options)

    def write_batch(self, df: DataFrame, **options: Any) -> BatchProgress:
        """What `semel.write_batch(df, to=self, ...)` does."""
        from semel.spark.batch import write_batch

        return write_batch(df, bootstrap=self.bootstrap, topic=self.topic, **self._settings, **options)

    def committed_offsets(self, *, bootstrap: str | None = None, **options: Any) -> str:
        """What `semel.committed_offsets(to=self, ...)` does."""
        from semel.spark.committed import committed_offsets

        return committed_offsets(bootstrap=bootstrap or self.bootstrap, **self._settings, **options)
