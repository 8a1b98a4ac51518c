"""Kafka first: the wait ends when the rows of one's own events are in the database, and not before."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from database_scene import Input, Place, broker, make_postgres, number, place, server

import semel
from semel.testing.embedded import EmbeddedBroker
from semel.testing.postgres import Postgres

__all__ = ["broker", "place", "server"]


@contextmanager
def running(source: Input, place: Place) -> Iterator[None]:
    """The writer, in a thread of its own."""
    stop = threading.Event()
    target = place.target(table="numbers", create=True)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(source.run, number, target, stop=stop, idle_ms=None, end_on_sigterm=False)
        try:
            yield
        finally:
            stop.set()
            done.result(30)


def test_rows_are_there_when_the_wait_returns_from_many_threads(broker: EmbeddedBroker, place: Place) -> None:
    """G4: eight threads write, wait and read; each finds its own row every time."""
    source = Input(broker.bootstrap)

    def write_and_read(thread: int, rows: semel.ReadYourWrites) -> None:
        with semel.Producer(bootstrap_servers=broker.bootstrap, linger_ms=0) as producer:
            for turn in range(5):
                value = thread * 1000 + turn
                producer.send(source.topic, str(value).encode(), partition=turn % 2)
                rows.wait(producer.flush(), 30_000)
                assert place.ask(f"SELECT number FROM numbers WHERE number = {value}") == [(value,)]

    with (
        running(source, place),
        semel.ReadYourWrites(to=place.address, name=source.name, bootstrap=broker.bootstrap) as rows,
        ThreadPoolExecutor(8) as pool,
    ):
        for done in [pool.submit(write_and_read, thread, rows) for thread in range(8)]:
            done.result(120)


def test_a_transaction_is_waited_for_by_what_its_flush_returned(broker: EmbeddedBroker, place: Place) -> None:
    """The ends of a transaction in several partitions; and a wait by plain offsets."""
    source = Input(broker.bootstrap)
    target = place.target(table="numbers", create=True)
    with (
        running(source, place),
        semel.Producer(bootstrap_servers=broker.bootstrap, transactional_id=f"app-{source.name}") as producer,
    ):
        with producer.transaction():
            for value in range(10):
                producer.send(source.topic, str(value).encode(), partition=value % 2)
            stored = producer.flush()
        semel.wait_until_written(stored, to=target, name=source.name, bootstrap=broker.bootstrap, timeout_ms=30_000)
        assert place.ask("SELECT count(*) FROM numbers") == [(10,)]
        ends = {(source.topic, 0): 5, (source.topic, 1): 5}
        semel.wait_until_written(ends, to=target, name=source.name, bootstrap=broker.bootstrap, timeout_ms=30_000)


def test_it_waits_until_the_writer_is_started(broker: EmbeddedBroker, place: Place) -> None:
    """Before the first start there is not even a table; the wait begins all the same, and makes nothing."""
    source = Input(broker.bootstrap)
    source.write([1, 2, 3])
    ends = {semel.TopicPartition(source.topic, 0): 2}
    begun, returned = threading.Event(), threading.Event()

    def wait() -> None:
        with semel.ReadYourWrites(to=place.address, name=source.name, bootstrap=broker.bootstrap) as rows:
            begun.set()
            rows.wait(ends, 30_000)
        returned.set()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(wait)
        assert begun.wait(10)
        assert not returned.wait(0.3)
        assert not place.has("semel_inbox")
        source.run(number, place.target(table="numbers", create=True))
        done.result(30)


def refuse(source: Input, place: Place, text: str, *, end: int = 5, name: str | None = None) -> None:
    began = time.monotonic()
    ends = {(source.topic, 0): end}
    with pytest.raises(semel.RequestTimedOut, match=text):
        semel.wait_until_written(
            ends, to=place.address, name=name or source.name, bootstrap=source.bootstrap, timeout_ms=200
        )
    assert time.monotonic() - began >= 0.2


def test_a_timeout_says_where_the_writer_stands(broker: EmbeddedBroker, place: Place) -> None:
    """What happened, what it means for the event, what to do; each state has its own words."""
    source = Input(broker.bootstrap)
    refuse(source, place, "no pipeline has ever written there")
    source.write([1, 2, 3])
    target = place.target(table="numbers", create=True)
    source.run(number, target)
    refuse(source, place, r"it stands at 2\. The event is in Kafka and is not lost")
    refuse(source, place, "no pipeline of that name", name="billings")
    other = Input(broker.bootstrap)
    refuse(other, place, f"nothing of that partition yet; it reads {source.topic}", name=source.name)


def test_a_position_in_a_deleted_topic_of_the_same_name_is_not_taken_for_ones_own(
    broker: EmbeddedBroker, place: Place
) -> None:
    """Its offsets are higher than the new event's, and say nothing of it."""
    source = Input(broker.bootstrap, 1)
    source.write(range(50))
    target = place.target(table="numbers", create=True)
    source.run(number, target)
    with semel.Admin({"bootstrap.servers": broker.bootstrap}) as admin:
        admin.delete_topics(source.topic)
        admin.create_topics(source.topic, partitions=1)
    source.write([77])
    refuse(source, place, "topic of this name that was deleted", end=1)
    source.run(number, target)
    semel.wait_until_written({(source.topic, 0): 1}, to=target, name=source.name, bootstrap=broker.bootstrap)
    assert place.ask("SELECT count(*) FROM numbers WHERE number = 77") == [(1,)]


def test_a_topic_that_is_created_again_during_the_wait_ends_it(broker: EmbeddedBroker, place: Place) -> None:
    """The event is gone with the old one, and the position of the new one never means it."""
    source = Input(broker.bootstrap, 1)
    source.write([1])
    target = place.target(table="numbers", create=True)
    source.run(number, target)
    rows = semel.ReadYourWrites(to=target, name=source.name, bootstrap=broker.bootstrap)
    with rows, ThreadPoolExecutor(1) as pool, semel.Admin({"bootstrap.servers": broker.bootstrap}) as admin:
        asked = threading.Event()
        load = rows._load

        def note_and_load() -> Any:
            asked.set()
            return load()

        rows._load = note_and_load
        done = pool.submit(rows.wait, {(source.topic, 0): 40}, 30_000)
        assert asked.wait(10)
        admin.delete_topics(source.topic)
        admin.create_topics(source.topic, partitions=1)
        source.write(range(60))
        source.run(number, target)
        with pytest.raises(semel.TopicRecreated, match="while its events were waited for"):
            done.result(30)


def test_a_database_that_is_away_is_waited_for(broker: EmbeddedBroker, tmp_path: Any) -> None:
    """A restart of Postgres in the middle of a wait is no error."""
    source = Input(broker.bootstrap)
    with Postgres() as server:
        place = make_postgres(server)
        target = place.target(table="numbers", create=True)
        source.write([1, 2])
        source.run(number, target)
        with semel.ReadYourWrites(to=target, name=source.name, bootstrap=broker.bootstrap) as rows:
            rows.wait({(source.topic, 0): 1})
            server.stop_at_once()
            with pytest.raises(semel.RequestTimedOut, match="could not be reached"):
                rows.wait({(source.topic, 0): 1}, 300)
            server.start()
            rows.wait({(source.topic, 0): 1})


def test_misuse_is_refused_at_once(broker: EmbeddedBroker, place: Place) -> None:
    """A partition that is not there, events without offsets, an address that is none, a `with` that is missing."""
    source = Input(broker.bootstrap)
    rows = semel.ReadYourWrites(to=place.address, name=source.name, bootstrap=broker.bootstrap)
    with pytest.raises(semel.InvalidState, match="`with`"):
        rows.wait({(source.topic, 0): 1})
    with rows:
        with pytest.raises(semel.ConfigError, match="no partition 9"):
            rows.wait({(source.topic, 9): 1})
        with semel.Producer(bootstrap_servers=broker.bootstrap, acks=0, enable_idempotence=False) as producer:
            producer.send(source.topic, b"1")
            stored = producer.flush()
        with pytest.raises(semel.ConfigError, match="acks=all"):
            rows.wait(stored)
    with pytest.raises(semel.ConfigError, match="to= must be"):
        semel.ReadYourWrites(to="mysql://here", name="x", bootstrap=broker.bootstrap)
