"""What may change under a relay while it runs: rights to see rows, the server behind a pooler, the file itself."""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from relay_scene import Outbox, broker, in_postgres, in_sqlite, server
from session_scene import wait_until

import semel
from semel.bridges.postgres import PostgresDatabase
from semel.bridges.relay.options import make_options
from semel.bridges.relay.postgres_source import PostgresSource
from semel.bridges.relay.runs import RelayRun
from semel.testing.embedded import EmbeddedBroker
from semel.testing.postgres import Postgres

__all__ = ["broker", "server"]


class Running:
    """A relay in a thread, and how it ended."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except semel.SemelError as error:
            self.error = error

    def wait(self) -> BaseException | None:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.error


def test_rows_that_row_level_security_begins_to_hide_are_not_skipped(server: Postgres, broker: EmbeddedBroker) -> None:
    """The relay stops, and relays them when it may see them again. None is deleted before it was relayed."""
    owner = in_postgres(server, broker)
    owner.make_table()
    role = owner.name.replace("-", "_")
    owner.do(f"CREATE ROLE {role} LOGIN", f"GRANT SELECT, DELETE ON outbox TO {role}")
    limited = Outbox("postgres", owner.address.replace("postgres@", f"{role}@"), broker.bootstrap)
    stop = threading.Event()
    running = Running(lambda: limited.relay(idle_ms=None, stop=stop, delete=True))
    owner.topic = limited.topic
    owner.write(1, 20)
    wait_until(lambda: len(limited.numbers()) == 20, "the first rows")
    owner.do("ALTER TABLE outbox ENABLE ROW LEVEL SECURITY")
    owner.write(21, 40)
    error = running.wait()
    assert isinstance(error, semel.SemelError)
    assert "Row-level security" in str(error) or "row-level security" in str(error)
    owner.do("ALTER TABLE outbox DISABLE ROW LEVEL SECURITY")
    owner.write(41, 60)
    limited.relay(delete=True)
    assert limited.has_each_once(60)


class Pooled(PostgresDatabase):
    """As behind a pooler: our connection stays, and transactions go to another server from some moment on."""

    def __init__(self, *uris: str) -> None:
        super().__init__(uris[0])
        self.servers = [PostgresDatabase(uri) for uri in uris]
        self.at = 0

    def _open(self) -> Any:
        return self.servers[self.at]._open()

    def close(self) -> None:
        for one in self.servers:
            one.close()


def test_another_server_behind_a_pooler_is_noticed(broker: EmbeddedBroker) -> None:
    """Its transactions stand where they may follow, so only its identity tells that rows would be lost."""
    with Postgres() as old, Postgres() as new:
        outbox, other = (Outbox("postgres", one.uri, broker.bootstrap) for one in (old, new))
        outbox.make_table()
        other.make_table()
        other.topic = outbox.topic
        outbox.write(1, 5)
        for number in range(101, 141):
            other.write(number, number)
        options = make_options(
            outbox.name,
            {"bootstrap.servers": broker.bootstrap},
            table="outbox",
            topic="{topic}",
            retry_s=30.0,
            delete=True,
        )
        database = Pooled(old.uri, new.uri)
        run = RelayRun(PostgresSource(database, options), options, lambda: False)
        running = Running(lambda: run.go(None))
        wait_until(lambda: len(outbox.numbers()) == 5, "the first rows")
        database.at = 1
        error = running.wait()
        assert isinstance(error, semel.ConfigError)
        assert "another server" in str(error)
        assert sorted(outbox.numbers()) == [1, 2, 3, 4, 5]
        assert other.ask("SELECT count(*) FROM outbox") == [(40,)]


@pytest.mark.parametrize(("way", "delete"), [("restored", True), ("restored", False), ("replaced", False)])
def test_a_file_that_is_put_back_while_the_relay_runs_is_noticed(
    tmp_path: Path, broker: EmbeddedBroker, way: str, delete: bool
) -> None:
    """By SQLite's own backup, or by another file at its path. Rows that then get used ids are not lost in silence."""
    outbox = in_sqlite(tmp_path, broker)
    outbox.make_table()
    outbox.write(1, 10)
    copy = tmp_path / "copy.db"
    with closing(sqlite3.connect(outbox.address)) as file, closing(sqlite3.connect(copy)) as kept:
        file.backup(kept)
    stop = threading.Event()
    running = Running(lambda: outbox.relay(idle_ms=None, stop=stop, delete=delete))
    outbox.write(11, 20)
    wait_until(lambda: len(outbox.numbers()) == 20, "the first rows")
    if way == "restored":
        with closing(sqlite3.connect(outbox.address)) as file, closing(sqlite3.connect(copy)) as kept:
            kept.backup(file)
    else:
        os.replace(shutil.copy(copy, tmp_path / "new.db"), outbox.address)
    error = running.wait()
    assert isinstance(error, semel.ConfigError)
    assert "put back to an earlier state" in str(error) or "another file" in str(error)
    assert sorted(outbox.numbers()) == list(range(1, 21))
    assert len(outbox.ask("SELECT * FROM outbox")) == 10


SEQUENCES = [
    ["CREATE SEQUENCE ids CACHE 50", "CREATE TABLE outbox (id bigint PRIMARY KEY DEFAULT nextval('ids'), {rest})"],
    [
        "CREATE SEQUENCE ids CACHE 50",
        "CREATE TABLE outbox (id bigint, {rest}, PRIMARY KEY (id)) PARTITION BY RANGE (id)",
        "CREATE TABLE outbox_1 PARTITION OF outbox FOR VALUES FROM (0) TO (1000)",
        "ALTER TABLE outbox_1 ALTER COLUMN id SET DEFAULT nextval('ids')",
    ],
]


@pytest.mark.parametrize("statements", SEQUENCES)
def test_a_sequence_that_the_column_does_not_own_is_looked_at_too(
    server: Postgres, broker: EmbeddedBroker, statements: list[str]
) -> None:
    """Its sessions take ids in advance, so a later row may have the lower one."""
    outbox = in_postgres(server, broker)
    rest = "topic text, key text, value text, semel_xid xid8 NOT NULL DEFAULT pg_current_xact_id()"
    outbox.do(*(statement.format(rest=rest) for statement in statements))
    with pytest.raises(semel.ConfigError, match="ALTER SEQUENCE ids CACHE 1 INCREMENT 1 NO CYCLE"):
        outbox.relay()
    outbox.do("ALTER SEQUENCE ids CACHE 1")
    outbox.relay()


def test_ids_that_no_sequence_makes_are_told_of(
    server: Postgres, broker: EmbeddedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """No row is lost, and whether they grow only the user knows."""
    outbox = in_postgres(server, broker)
    outbox.do(
        "CREATE TABLE outbox (id bigint PRIMARY KEY DEFAULT (random() * 1e15)::bigint, topic text, key text, "
        "value text, semel_xid xid8 NOT NULL DEFAULT pg_current_xact_id())"
    )
    outbox.write(1, 30)
    assert outbox.relay().rows == 30
    assert "cannot see whether they grow" in caplog.text
    assert sorted(outbox.numbers()) == list(range(1, 31))


def test_a_time_that_python_has_no_date_for_is_a_dead_letter(tmp_path: Path, broker: EmbeddedBroker) -> None:
    """A row after the year 9999, whose topic is not there either, does not stop the relay."""
    outbox = in_sqlite(tmp_path, broker)
    outbox.do(
        "CREATE TABLE outbox (id INTEGER PRIMARY KEY AUTOINCREMENT, topic TEXT, value TEXT, created_at INTEGER)",
        f"INSERT INTO outbox (topic, value, created_at) VALUES ('gone', '1', {400_000_000_000_000})",
    )
    outbox.do(f"INSERT INTO outbox (topic, value) VALUES ('{outbox.topic}', '2')")
    letters = outbox.create_topic(outbox.topic + "-failed")
    assert outbox.relay(dead_letter=letters).dead_letters == 1
    assert len(outbox.read(letters)) == 1
    assert outbox.numbers() == [2]
