"""`semel.Outbox`: an application relays its own events at once, and nothing depends on that it was told of them."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from relay_scene import Outbox as Scene
from relay_scene import broker, in_postgres, outbox, server
from session_scene import wait_until

import semel
from semel.bridges.relay.waking import PostgresWaker, SqliteWaker
from semel.errors import ConfigError
from semel.testing.embedded import EmbeddedBroker
from semel.testing.postgres import Postgres

__all__ = ["broker", "outbox", "server"]

NEVER_MS = 3_600_000
"""A polling interval that no test lives to see."""


def connect(scene: Scene) -> Any:
    if scene.kind == "sqlite":
        return closing(sqlite3.connect(scene.address, timeout=30))
    return psycopg.connect(scene.address)


def started(scene: Scene, **options: Any) -> semel.Outbox:
    given: dict[str, Any] = {"name": scene.name, "bootstrap": scene.bootstrap, "poll_ms": NEVER_MS, **options}
    return semel.Outbox(scene.address, **given)


def wait_for(scene: Scene, last: int) -> None:
    wait_until(lambda: len(scene.numbers()) >= last, f"{last} events", 60)
    assert scene.has_each_once(last)


def test_an_event_is_on_its_way_when_its_transaction_commits(outbox: Scene) -> None:
    """G3: long before the relay would look by itself; and not before the commit, or if it never comes."""
    with started(outbox) as box, connect(outbox) as connection:
        for number in (1, 2):
            box.send(connection, outbox.topic, str(number), key=f"k{number}", headers={"trace": "7"})
            if number == 1:
                assert outbox.numbers() == []
            connection.commit()
            wait_for(outbox, number)
        box.send(connection, outbox.topic, "13")
        connection.rollback()
        box.send(connection, outbox.topic, "3")
        connection.commit()
        wait_for(outbox, 3)
    assert outbox.read()[0].headers == [("trace", b"7")]


def test_the_time_from_commit_to_kafka_is_far_below_the_interval(outbox: Scene) -> None:
    """G3: twenty events one after the other, in a small part of what one look by the clock would take."""
    poll_s = 60.0
    with (
        started(outbox, poll_ms=poll_s * 1000) as box,
        connect(outbox) as connection,
        semel.Fetcher({"bootstrap.servers": outbox.bootstrap}) as fetcher,
    ):
        fetcher.assign({(outbox.topic, partition): "earliest" for partition in range(3)})
        begun, seen = time.monotonic(), 0
        for number in range(1, 21):
            box.send(connection, outbox.topic, str(number), key=f"k{number % 7}")
            connection.commit()
            while seen < number:
                seen += sum(records.table.num_rows for records in fetcher.fetch(1_000))
        assert time.monotonic() - begun < poll_s / 2
    assert outbox.has_each_once(20)


def test_a_trigger_wakes_the_relay_whoever_writes(server: Postgres, broker: EmbeddedBroker) -> None:
    """A program that knows nothing of Semel; and a row of one's own with `wake`."""
    scene = in_postgres(server, broker)
    scene.do(*semel.outbox_table_sql(wake=True).split(";\n", 2))
    with started(scene):
        scene.write(1, 3)
        wait_for(scene, 3)


def test_rows_of_another_form_are_announced_by_wake(outbox: Scene) -> None:
    """The application's own INSERT."""
    with started(outbox) as box, connect(outbox) as connection:
        connection.execute(f"INSERT INTO outbox (topic, key, value) VALUES ('{outbox.topic}', 'k1', '1')")
        box.wake(connection)
        connection.commit()
        wait_for(outbox, 1)


def test_what_nobody_told_of_waits_for_the_interval_and_no_longer(server: Postgres, broker: EmbeddedBroker) -> None:
    """G3: a notification that is lost costs that, and nothing else; so does a connection that is lost."""
    scene = in_postgres(server, broker)
    scene.make_table()
    with started(scene, poll_ms=50):
        scene.write(1, 3)
        wait_for(scene, 3)
        killed = (
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
            "WHERE application_name = 'semel-relay-waker' AND datname = current_database()"
        )
        wait_until(lambda: scene.ask(killed) == [(1,)], "the listening connection to be ended")
        scene.write(4, 6)
        wait_for(scene, 6)


def test_one_instance_relays_and_another_one_follows_it(outbox: Scene) -> None:
    """Both write. When the first is gone the second relays what is there, and what comes."""
    with started(outbox) as first, started(outbox) as second, connect(outbox) as connection:
        for number, box in ((1, first), (2, second)):
            box.send(connection, outbox.topic, str(number), key=f"k{number}")
            connection.commit()
            wait_for(outbox, number)
        first.close()
        second.send(connection, outbox.topic, "3", key="k3")
        connection.commit()
        wait_for(outbox, 3)
        assert (first.trouble, second.trouble) == (None, None)


def test_what_is_wrong_at_the_start_is_said_at_the_start(outbox: Scene) -> None:
    """A table that is missing; options that are the relay's own; a connection that cannot write."""
    with pytest.raises(ConfigError, match="no table"):
        started(outbox, table="nowhere").__enter__()
    with pytest.raises(ConfigError, match=r"idle_ms= is for semel\.relay"):
        started(outbox, idle_ms=1)
    with started(outbox) as box, pytest.raises(ConfigError, match="cannot write by a str"):
        box.send("shop.db", "orders", "1")  # type: ignore[arg-type]


def test_trouble_later_leaves_the_application_alone(outbox: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that cannot be relayed: the application is told by `trouble`, and its events are safe in the table."""
    monkeypatch.setattr("semel.bridges.relay.outbox._AGAIN_S", 0.05)
    with started(outbox) as box, connect(outbox) as connection:
        missing = f"missing-{outbox.topic}"
        box.send(connection, missing, "1")
        connection.commit()
        wait_until(lambda: "cannot be relayed" in str(box.trouble), "trouble")
        box.send(connection, outbox.topic, "1", key="k1")
        connection.commit()
        outbox.create_topic(missing, partitions=1)
        wait_for(outbox, 1)
        wait_until(lambda: box.trouble is None, "the end of the trouble")


def test_a_killed_application_loses_and_repeats_nothing(outbox: Scene, tmp_path: Path) -> None:
    """G3: kill -9 in the middle of writing and relaying, four times; then one instance ends it in peace."""
    program, last = tmp_path / "shop.py", 400
    program.write_text(SHOP)
    command = [sys.executable, str(program), outbox.kind, outbox.address, outbox.name, outbox.topic, outbox.bootstrap]
    for goal in (20, 60, 120, 200):
        life = subprocess.Popen([*command, str(last)])
        wait_until(lambda goal=goal, life=life: len(outbox.numbers()) >= goal or life.poll() is not None, "events", 60)
        life.kill()
        life.wait()
    subprocess.run([*command, str(last)], check=True, timeout=120)
    outbox.relay()
    assert outbox.has_each_once(last)


SHOP = """
import sqlite3, sys
import semel

kind, address, name, topic, bootstrap, last = sys.argv[1:]
if kind == "sqlite":
    connection = sqlite3.connect(address, timeout=30)
else:
    import psycopg
    connection = psycopg.connect(address)
with semel.Outbox(address, name=name, bootstrap=bootstrap, poll_ms=20) as outbox:
    (done,) = connection.execute("SELECT count(*) FROM outbox").fetchone()
    connection.rollback()
    for number in range(done + 1, int(last) + 1):
        outbox.send(connection, topic, str(number), key=f"k{number % 7}")
        connection.commit()
"""


def test_a_commit_between_two_waits_is_not_slept_through(tmp_path: Path, server: Postgres) -> None:
    """What came while the relay was at work is known at its next wait."""
    path = str(tmp_path / "shop.db")
    with closing(sqlite3.connect(path)) as writer:
        writer.execute("CREATE TABLE t (x)")
        writer.commit()
        waker = SqliteWaker(path)
        assert waker.wait(0.01)  # the first time nobody knows
        assert not waker.wait(0.01)
        writer.execute("INSERT INTO t VALUES (1)")
        writer.commit()
        assert waker.wait(60)
        assert not waker.wait(0.01)
        waker.close()
    with psycopg.connect(server.uri, autocommit=True) as connection:
        listening = PostgresWaker(server.uri)
        assert listening.wait(0.01)
        assert not listening.wait(0.01)
        for _ in range(3):
            connection.execute("NOTIFY semel_relay")
        wait_until(lambda: listening.wait(1), "the notification")
        threading.Event().wait(0.1)
        listening.wait(0.01)
        assert not listening.wait(0.01)
        listening.close()
