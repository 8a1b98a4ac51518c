"""`semel.relay`: rows of an outbox table into Kafka, each once, without marking rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from semel.bridges.addresses import check_postgres_url, check_sqlite_path, is_postgres_address
from semel.bridges.postgres import PostgresDatabase
from semel.bridges.relay.options import (
    DEFAULT_PROGRESS_TOPIC,
    POLL_MS,
    RETRY_S,
    ROWS_MAX,
    RelayOptions,
    Resume,
    make_options,
)
from semel.bridges.relay.postgres_source import PostgresSource
from semel.bridges.relay.row_source import RowSource
from semel.bridges.relay.runs import RelayReport, RelayRun
from semel.bridges.relay.sqlite_source import SqliteSource
from semel.bridges.relay.waking import Clock
from semel.bridges.sigterm_end import ends_on_sigterm
from semel.bridges.sqlite import SqliteDatabase
from semel.client.dead_letters import DEAD_LETTER_MAX
from semel.client.settings import merge_settings
from semel.errors import ConfigError


def relay(
    database: str | Path,
    *,
    name: str,
    table: str = "outbox",
    topic: str = "{topic}",
    id: str = "id",
    value: str = "value",
    key: str | None = None,
    headers: str | None = None,
    timestamp: str | None = None,
    xid: str = "semel_xid",
    delete: bool = False,
    dead_letter: str | None = None,
    dead_letter_max: int = DEAD_LETTER_MAX,
    resume: Resume | None = None,
    progress_topic: str = DEFAULT_PROGRESS_TOPIC,
    transaction_rows_max: int = ROWS_MAX,
    poll_ms: float = POLL_MS,
    wake: bool = True,
    retry_s: float = RETRY_S,
    stop: threading.Event | None = None,
    idle_ms: float | None = None,
    end_on_sigterm: bool = True,
    on_ready: Callable[[], None] | None = None,
    settings: Mapping[str, object] | None = None,
    **more_settings: Any,
) -> RelayReport:
    """Relay committed rows of a table into Kafka until `stop` is set, or until nothing has come for `idle_ms`.

    Each row is in its topic exactly once, also after a crash, and rows with one key keep their order. A second relay
    of the same `name` takes over from the first. `docs/relay.md` has a table to begin with, and the limits.

        database              postgresql://user:password@host/database, or the path of a SQLite file
        topic                 "orders"; or columns in braces: "{topic}" (the default), "events.{aggregate_type}"
        value, key            columns with these parts ("value", and "key" if there is one)
        headers               a column with JSON such as {"trace": "7"} ("headers" if there is one)
        timestamp             a column with the record's time ("created_at" if there is one)
        id                    a unique whole number that grows ("id")
        xid                   Postgres: the column with the id of the row's transaction ("semel_xid")
        delete                True deletes rows after they were relayed
        dead_letter           the topic for rows that cannot be written, at which the relay stops otherwise
        dead_letter_max       how many such rows a run may have (1,000)
        resume                what to do when the database is another one than before: "continue" or "all"
        progress_topic        where progress is kept ("semel-relay-progress")
        transaction_rows_max  how many rows a Kafka transaction may have (50,000)
        poll_ms               how often to look for new rows (100)
        wake                  look at once when the database tells of a commit (True)
        retry_s               for how many seconds a lost database or broker is tried again (300)

    Kafka's settings, such as `bootstrap`, are keywords or in `settings`.

    >>> relay("shop.db", name="shop", bootstrap="127.0.0.1:9092", idle_ms=1000)  # doctest: +SKIP
    RelayReport(rows=3, transactions=1, dead_letters=0, deleted=0)
    """
    options = make_options(
        name,
        merge_settings(settings, more_settings),
        table=table,
        topic=topic,
        id=id,
        value=value,
        key=key,
        headers=headers,
        timestamp=timestamp,
        xid=xid,
        delete=delete,
        dead_letter=dead_letter,
        dead_letter_max=dead_letter_max,
        resume=resume,
        progress_topic=progress_topic,
        rows_max=transaction_rows_max,
        poll_ms=poll_ms,
        retry_s=retry_s,
    )
    source = open_source(database, options)
    with ends_on_sigterm("relay", stop, watches=end_on_sigterm) as is_over:
        run = RelayRun(source, options, is_over, source.make_waker() if wake else Clock())
        run.go(idle_ms, on_ready)
    return run.report


def open_source(database: str | Path, options: RelayOptions) -> RowSource:
    """Nothing is connected before the source is used."""
    if isinstance(database, str) and is_postgres_address(database):
        check_postgres_url(database)
        return PostgresSource(PostgresDatabase(database), options)
    if not isinstance(database, str | Path):
        raise ConfigError(
            f"A {type(database).__qualname__} is no address of a database: write the URL of a Postgres database or the "
            "path of a SQLite file."
        )
    check_sqlite_path(database)
    return SqliteSource(SqliteDatabase(database), options)
