"""`kill -9` at every named point, zombies, and lost servers: nothing lost, nothing repeated, aggregates in order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psycopg
import pytest
from relay_scene import Outbox, broker, in_postgres, outbox, server
from session_scene import wait_until

import semel
from semel.bridges.failpoints import RELAY_POINTS, STOP_VARIABLE, VARIABLE
from semel.bridges.postgres import PostgresDatabase
from semel.bridges.relay.options import make_options
from semel.bridges.relay.postgres_source import PostgresSource
from semel.bridges.relay.runs import RelayRun
from semel.testing.embedded import EmbeddedBroker
from semel.testing.postgres import Postgres

__all__ = ["broker", "outbox", "server"]

WORKER = Path(__file__).parent / "relay_worker.py"
PORTION = 5


def command(outbox: Outbox, *points: str, **options: Any) -> list[str]:
    given = {"name": outbox.name, "bootstrap": outbox.bootstrap, "idle_ms": 0, "transaction_rows_max": PORTION}
    return [sys.executable, str(WORKER), outbox.address, json.dumps({**given, **options}), *points]


def live(outbox: Outbox, *points: str, **options: Any) -> list[int]:
    """Lives that end at these points; their exit statuses."""
    done = subprocess.run(command(outbox, *points, **options), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return [int(status) for status in done.stdout.split()]


def test_every_row_is_relayed_once_though_the_relay_is_killed_at_every_point(outbox: Outbox) -> None:
    """G1: each life dies at the next point, in its second portion; the last one finishes. Rows are deleted too."""
    points = [point if point == "relay_taken_over" else f"{point}:2" for point in RELAY_POINTS]
    count = 2 * PORTION * len(points) + 20
    half = count // 2
    outbox.write(1, half)
    outbox.write(half + 1, count)
    ended = live(outbox, *points, "", delete=True)
    assert ended == [-signal.SIGKILL] * len(points) + [0]
    assert outbox.has_each_once(count)
    assert outbox.ask("SELECT count(*) FROM outbox") == [(0,)]


@pytest.mark.parametrize("point", ["relay_end_sent", "relay_committed"])
def test_a_kill_between_commit_and_clean_up_repeats_nothing(outbox: Outbox, point: str) -> None:
    """Progress says what was relayed, so rows that are still in the table are deleted and not sent again."""
    outbox.write(1, 3 * PORTION)
    assert live(outbox, f"{point}:2", delete=True) == [-signal.SIGKILL]
    assert outbox.ask("SELECT count(*) FROM outbox") == [(3 * PORTION,)]
    outbox.relay(delete=True)
    assert outbox.has_each_once(3 * PORTION)
    assert outbox.ask("SELECT count(*) FROM outbox") == [(0,)]


def test_a_second_relay_of_the_same_name_fences_the_first(outbox: Outbox) -> None:
    """The first ends with one clear error, and no row is in the topic twice."""
    ready, errors = threading.Event(), list[BaseException]()

    def first() -> None:
        try:
            outbox.relay(idle_ms=None, on_ready=ready.set)
        except semel.SemelError as error:
            errors.append(error)

    running = threading.Thread(target=first, daemon=True)
    running.start()
    assert ready.wait(30)
    outbox.write(1, 20)
    wait_until(lambda: len(outbox.numbers()) == 20, "the first relay")
    assert outbox.relay().rows == 0
    outbox.write(21, 40)
    running.join(30)
    assert not running.is_alive()
    assert isinstance(errors[0], semel.Fenced)
    assert "Another relay of the name" in str(errors[0])
    assert outbox.relay().rows == 20
    assert outbox.has_each_once(40)


@pytest.mark.parametrize("point", ["relay_rows_read", "relay_events_written", "relay_progress_written"])
def test_a_zombie_that_wakes_after_its_successor_commits_nothing(
    server: Postgres, broker: EmbeddedBroker, tmp_path: Path, point: str
) -> None:
    """Stopped with SIGSTOP in its second portion, and awake when the successor is through."""
    outbox, note = in_postgres(server, broker), tmp_path / "stopped"
    outbox.make_table()
    outbox.write(1, 4 * PORTION)
    environment = {**os.environ, VARIABLE: f"{point}:2", STOP_VARIABLE: str(note)}
    zombie = subprocess.Popen(command(outbox), env=environment, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: note.exists() and note.read_text() != "", "the first relay to stop")
        outbox.relay()
        assert outbox.has_each_once(4 * PORTION)
        os.kill(zombie.pid, signal.SIGCONT)
        _, said = zombie.communicate(timeout=60)
    finally:
        zombie.kill()
        zombie.wait()
    assert "Another relay of the name" in said
    assert outbox.has_each_once(4 * PORTION)


@pytest.mark.parametrize("rows", [0, 5])
def test_another_server_at_the_same_address_is_noticed_in_the_middle_of_a_run(
    broker: EmbeddedBroker, rows: int
) -> None:
    """Its transaction ids are others, so rows could be taken for relayed ones; also where none was relayed yet."""
    with Postgres() as old, Postgres() as new:
        outbox, other = (Outbox("postgres", one.uri, broker.bootstrap) for one in (old, new))
        outbox.make_table()
        other.make_table()
        if rows:
            outbox.write(1, rows)
        options = make_options(
            outbox.name, {"bootstrap.servers": broker.bootstrap}, table="outbox", topic="{topic}", retry_s=30.0
        )
        database, errors = PostgresDatabase(old.uri), list[BaseException]()
        run = RelayRun(PostgresSource(database, options), options, lambda: False)

        def go() -> None:
            try:
                run.go(None)
            except semel.SemelError as error:
                errors.append(error)

        running = threading.Thread(target=go, daemon=True)
        running.start()
        wait_until(lambda: run.report.transactions >= (2 if rows else 1), "the relay to work")
        # Until its first look the relay has no position that could be wrong elsewhere, and may begin anywhere.
        wait_until(lambda: run._position is not None, "the first look")
        database.uri = new.uri  # as a name that leads elsewhere after a failover
        old.stop_at_once()
        running.join(60)
        assert not running.is_alive()
        assert isinstance(errors[0], semel.ConfigError)
        assert "another server" in str(errors[0])


def test_a_relay_goes_on_after_postgres_and_the_broker_were_restarted() -> None:
    """Immediate shutdown of Postgres, kill -9 of the broker, while rows are written: the same process goes on."""
    with Postgres() as server, semel.Broker() as broker:
        outbox = Outbox("postgres", server.uri, broker.bootstrap)
        outbox.make_table()
        stop, reports = threading.Event(), list[Any]()
        running = threading.Thread(
            target=lambda: reports.append(outbox.relay(idle_ms=None, stop=stop, retry_s=60.0)), daemon=True
        )
        running.start()
        try:
            outbox.write(1, 50)
            wait_until(lambda: len(outbox.numbers()) == 50, "the first rows")
            server.stop_at_once()
            server.start()
            outbox.write(51, 100)
            wait_until(lambda: len(outbox.numbers()) == 100, "rows after Postgres was back")
            broker.kill()
            outbox.write(101, 150)
            broker.start()
            wait_until(lambda: len(outbox.numbers()) == 150, "rows after the broker was back", 60)
        finally:
            stop.set()
            running.join(60)
        assert outbox.has_each_once(150)
        assert [report.rows for report in reports] == [150]


@pytest.mark.parametrize("way", ["rolled back", "asynchronous"])
def test_transaction_ids_that_a_crash_of_postgres_gives_out_again_lose_no_row(broker: EmbeddedBroker, way: str) -> None:
    """G1: such transactions are not on disk when they end. New rows under their ids are not taken for relayed ones."""
    with Postgres(settings={"checkpoint_timeout": "1h"}) as server:
        outbox = Outbox("postgres", server.uri, broker.bootstrap)
        outbox.make_table()
        outbox.do("CREATE TABLE other (number int)")
        with psycopg.connect(server.uri, autocommit=True) as connection:
            [(writer,)] = connection.execute(
                "SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'"
            ).fetchall()
            os.kill(writer, signal.SIGSTOP)  # it would write them to disk after 200 ms
            outbox.write(1, 1)
            for _ in range(20):
                if way == "asynchronous":
                    connection.execute("SET synchronous_commit = off")
                    connection.execute("INSERT INTO other VALUES (1)")
                else:
                    with connection.transaction(force_rollback=True):
                        connection.execute("INSERT INTO other VALUES (1)")
            assert outbox.relay().rows == 1
        os.kill(writer, signal.SIGCONT)
        server.stop_at_once()
        server.start()
        for number in range(2, 42):
            outbox.write(number, number)
        assert outbox.relay().rows == 40
        assert outbox.has_each_once(41)
