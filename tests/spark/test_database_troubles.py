"""Servers that fill up, stay away for a minute, are restored or replaced under a running query: no loss, no repeat.

Spark's part is played by `small_stream.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from database_modes import contents, expected, parts_of, target_for
from session_scene import wait_until
from small_disk import move_log, small_disk
from small_stream import Frame, Stream, use

from semel.bridges import spark_staging
from semel.bridges.spark_sink import DatabaseSink
from semel.bridges.targets import DatabaseTarget
from semel.errors import ConfigError, DatabaseError
from semel.spark.owner import PipelineFenced
from semel.testing.postgres import Postgres

ROWS = 2_000
NAME = "pipeline"
END_OTHERS = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = 'shop'"


@pytest.fixture
def stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stream:
    made = Stream(tmp_path / "checkpoint")
    use(made, monkeypatch)
    return made


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with Postgres() as started:
        yield started


@pytest.fixture
def shop(server: Postgres) -> str:
    """The URI of an empty database of this name."""
    do(
        server.uri,
        "DROP DATABASE IF EXISTS shop WITH (FORCE)",
        "DROP DATABASE IF EXISTS backup",
        "CREATE DATABASE shop",
    )
    return server.uri.replace("/postgres?", "/shop?")


def do(uri: str, *statements: str) -> None:
    with psycopg.connect(uri, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def ask(uri: str, query: str) -> Any:
    with psycopg.connect(uri) as connection:
        return connection.execute(query.encode()).fetchall()


def frames(count: int) -> list[Frame]:
    return [Frame(parts_of(batch, ROWS)) for batch in range(count)]


def sink_for(target: DatabaseTarget, **options: Any) -> DatabaseSink:
    return DatabaseSink(name=NAME, to=target, **options)


def at_batch(number: int, action: Callable[[], object], sink: DatabaseSink) -> Callable[[Any, int], None]:
    """Calls the sink, and before that batch the action."""

    def each(df: Any, batch_id: int) -> None:
        if batch_id == number:
            action()
        sink(df, batch_id)

    return each


@pytest.mark.parametrize("where", ["of the table", "of the staged rows"])
def test_a_full_disk_of_the_server_is_waited_for(
    stream: Stream, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """F3: a real disk. Tries are logged, what they staged is dropped, and when there is room the rows are written."""
    with small_disk(24) as disk, Postgres() as server:
        do(server.uri, f"CREATE TABLESPACE small LOCATION '{disk.folder}'")
        target = target_for(server.uri, "append", retry_s=120)
        stream.run(sink_for(target), frames(1))
        if where == "of the table":
            do(server.uri, "ALTER TABLE out SET TABLESPACE small")
        else:
            monkeypatch.setattr(spark_staging, "SPOOL_BYTES", 0)  # as on a cluster, without files
            do(server.uri, "ALTER ROLE postgres SET default_tablespace = 'small'")
        disk.fill(left_bytes=200_000)  # so that a table can be made, and not filled
        staging = "SELECT count(*) FROM pg_class WHERE relname LIKE 'semel_staged_%'"

        def make_room() -> None:
            wait_until(lambda: caplog.text.count("its disk is full") >= 4, "four tries")
            tables.extend(ask(server.uri, staging))
            disk.make_room()

        tables: list[tuple[int]] = []
        room = threading.Thread(target=make_room)
        room.start()
        stream.run(sink_for(target), frames(3))
        room.join()
        assert contents(target, "append") == expected("append", 3, ROWS)
        assert tables[0][0] <= 2, "tries that failed have left their tables on the full disk"
        assert ask(server.uri, staging) == [(0,)]


def test_a_full_disk_for_the_servers_log_loses_and_repeats_nothing(
    stream: Stream, caplog: pytest.LogCaptureFixture
) -> None:
    """F3: pg_wal is on a real disk of its own. The server panics, and starts again when somebody has made room."""
    with small_disk(64) as disk, Postgres() as server:
        move_log(server, disk.folder / "pg_wal")
        target = target_for(server.uri, "append", retry_s=120)
        stream.run(sink_for(target), frames(1))

        do(server.uri, "CREATE TABLE ballast (text text)")
        disk.fill()

        def use_up_and_make_room() -> None:
            while server.is_running:  # the log's present file has some room left
                with suppress(psycopg.Error):
                    do(server.uri, "INSERT INTO ballast SELECT repeat('x', 1900) FROM generate_series(1, 100)")
            wait_until(lambda: caplog.text.count("cannot be reached") >= 2, "two tries without a server")
            disk.make_room()
            server.start()

        room = threading.Thread(target=use_up_and_make_room)
        stream.run(at_batch(2, room.start, sink_for(target)), frames(40))
        room.join()
        assert "PANIC" in (server.folder / "postgres.log").read_text()
        assert contents(target, "append") == expected("append", 40, ROWS)


@pytest.mark.chaos
def test_a_server_that_is_away_for_a_minute_is_waited_for(stream: Stream, caplog: pytest.LogCaptureFixture) -> None:
    """F3: a whole minute, by the clock, with the default of retry_s."""
    with Postgres() as server:
        target = target_for(server.uri, "append")
        sink = sink_for(target)
        stream.run(sink, frames(1))
        server.stop_at_once()
        back = threading.Timer(60, server.start)
        back.start()
        stream.run(sink, frames(3))
        back.join()
        assert contents(target, "append") == expected("append", 3, ROWS)
    assert caplog.text.count("Next try in") >= 6
    assert "The database is back after 6" in caplog.text


@pytest.mark.parametrize("loss", ["entries", "tables", "other tables"])
def test_a_failover_to_a_server_without_the_ledger_is_noticed_in_the_middle_of_a_run(
    shop: str, stream: Stream, loss: str
) -> None:
    """F3: the connection is lost, and behind the same address is a server that does not know the query."""
    statements = {
        "entries": ["DELETE FROM semel_ledger"],
        "tables": ["DROP TABLE semel_ledger, semel_home, semel_staging"],
        "other tables": ["DELETE FROM semel_ledger", "UPDATE semel_home SET id = 'another'"],
    }
    target = target_for(shop, "append")
    call = at_batch(2, lambda: do(shop, *statements[loss], END_OTHERS), sink_for(target))
    with pytest.raises((DatabaseError, ConfigError), match=r"another server|the database knows this query|restored"):
        stream.run(call, frames(4))
    assert contents(target, "append") == expected("append", 2, ROWS), "nothing was written there"
    with pytest.raises(ConfigError, match="resume="):
        stream.run(sink_for(target), frames(4))
    stream.run(sink_for(target, resume="checkpoint"), frames(4))
    assert contents(target, "append") == expected("append", 4, ROWS)


@pytest.mark.parametrize("is_running", [False, True], ids=["before a start", "while it runs"])
def test_a_server_that_was_restored_to_an_earlier_state_is_noticed(
    server: Postgres, shop: str, stream: Stream, is_running: bool
) -> None:
    """F2: rows and ledger are those of an older copy, and Spark would go on as if nothing were missing."""
    target = target_for(shop, "append")
    stream.run(sink_for(target), frames(2))
    do(server.uri, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'shop'")
    do(server.uri, "CREATE DATABASE backup TEMPLATE shop")

    def restore() -> None:
        do(server.uri, "DROP DATABASE shop WITH (FORCE)", "ALTER DATABASE backup RENAME TO shop")

    sink = sink_for(target)
    call = at_batch(4, restore, sink)
    if not is_running:
        stream.run(sink, frames(4))
        restore()
        call = sink_for(target)
    with pytest.raises(ConfigError, match="Spark asks for batch 4, and the database knows this query up to batch 1"):
        stream.run(call, frames(5))
    assert contents(target, "append") == expected("append", 2, ROWS)


def test_of_two_runs_of_one_query_the_older_can_write_nothing_more(shop: str, stream: Stream) -> None:
    """E2: both are alive, as when a job was started twice; the second has written since."""
    target = target_for(shop, "append")
    older, newer = sink_for(target), sink_for(target)
    stream.run(older, frames(1))
    stream.run(newer, frames(2))
    with pytest.raises(PipelineFenced, match="Another run of pipeline 'pipeline' has taken over"):
        stream.run(older, frames(3))
    assert contents(target, "append") == expected("append", 2, ROWS)
    stream.run(newer, frames(3))
    assert contents(target, "append") == expected("append", 3, ROWS)
