"""Whole source transactions out of Kafka and into Kafka: one transaction there holds all that one of them gave."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from database_scene import broker
from source_scene import SourceTopics, relay, transfers

import semel
from semel.session import source_reader
from semel.session.source_progress import SourceProgress
from semel.testing.embedded import EmbeddedBroker

__all__ = ["broker"]

WORKER = Path(__file__).parent / "source_worker.py"


class Output:
    def __init__(self, topics: SourceTopics) -> None:
        self.topic = f"out-{uuid.uuid4().hex[:8]}"
        self._bootstrap = topics.bootstrap
        with semel.Admin({"bootstrap.servers": topics.bootstrap}) as admin:
            admin.create_topics(self.topic, partitions=1)

    def numbers(self) -> list[int]:
        """What another client than Semel's sees, in order."""
        settings = {"bootstrap.servers": self._bootstrap, "group.id": "judge", "enable.partition.eof": True}
        consumer = Consumer({**settings, "isolation.level": "read_committed", "enable.auto.commit": False})
        consumer.assign([TopicPartition(self.topic, 0, 0)])
        found: list[int] = []
        deadline = time.monotonic() + 60
        try:
            while time.monotonic() < deadline:
                message = consumer.poll(1)
                if message is not None and message.error() is not None:
                    return found
                if message is not None:
                    found.append(int(message.value() or b""))
        finally:
            consumer.close()
        raise AssertionError("the output did not come to an end")


def expected(all_transfers: list[Any]) -> list[int]:
    return [number for number, events in enumerate(all_transfers) for _ in events]


def opened(scene: SourceTopics, **options: Any) -> semel.SourceSession:
    given = {"source": scene.source, "topics": scene.topics, "name": f"copy-{scene.source}", "fetch_max_wait_ms": 20}
    return semel.SourceSession(bootstrap=scene.bootstrap, **{**given, **options})


def copy(session: semel.SourceSession, output: Output) -> list[int]:
    numbers: list[int] = []
    while not session.is_at_end():
        with session.transaction(100) as transaction:
            for one in transaction.source_transactions():
                numbers.append(one.number)
                for _ in one.rows():
                    transaction.send(output.topic, str(one.number).encode())
    return numbers


def test_each_source_transaction_is_copied_whole_and_once_over_several_starts(broker: EmbeddedBroker) -> None:
    """H1: what was committed is known from the progress record; the group's offsets are there for lag tools."""
    topics = SourceTopics(broker.bootstrap).create()
    output, all_transfers = Output(topics), list(transfers(31, 60))
    copied: list[int] = []
    for until in (20, 61):
        relay(topics, all_transfers[:until])
        with opened(topics, transaction_events_max=10) as session:
            copied += copy(session, output)
            assert session.applied == until - 1
            assert session.committed_count > 2
        assert output.numbers() == expected(all_transfers[:until])
    assert copied == list(range(61))
    with opened(topics) as session:
        assert copy(session, output) == []
    with semel.Admin({"bootstrap.servers": topics.bootstrap}) as admin:
        committed = admin.committed_offsets(f"copy-{topics.source}")
        assert {place.topic for place in committed} == {*topics.topics, f"{topics.source}.transactions"}


def test_an_exception_aborts_and_the_same_transactions_come_again(broker: EmbeddedBroker) -> None:
    """By `with` and by the loop; `break` too. Nothing of it is in the output."""
    topics = SourceTopics(broker.bootstrap).create()
    output, all_transfers = Output(topics), list(transfers(32, 10))
    relay(topics, all_transfers)

    def fail(session: semel.SourceSession) -> None:
        for transaction in session:
            transaction.send(output.topic, b"-1")
            raise ZeroDivisionError

    with opened(topics) as session:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                fail(session)
        for transaction in session:
            transaction.send(output.topic, b"-1")
            assert transaction.first == 0
            break
        assert session.aborted_count == 3
        assert copy(session, output) == list(range(11))
    assert output.numbers() == expected(all_transfers)


def test_the_session_that_was_started_last_goes_on(broker: EmbeddedBroker) -> None:
    """Two of one name: the older one is fenced, and what it had not committed is not seen."""
    topics = SourceTopics(broker.bootstrap).create()
    output, all_transfers = Output(topics), list(transfers(33, 30))
    relay(topics, all_transfers)
    with opened(topics, transaction_events_max=1) as old:
        with old.transaction(2_000) as transaction:
            transaction.send(output.topic, b"0")

        def commit_after_takeover() -> list[int]:
            with old.transaction(2_000) as transaction:
                transaction.send(output.topic, b"-1")
                with opened(topics) as new:
                    return copy(new, output)

        with pytest.raises(semel.Fenced) as caught:
            commit_after_takeover()
        assert "has taken over" in "".join(caught.value.__notes__)
    assert output.numbers() == [0, *(number for number in expected(all_transfers) if number)]


def test_a_transaction_that_outlives_its_timeout_comes_again_smaller_and_then_ends_in_one_error(
    broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D9: aborted by the coordinator, the turn shrinks to one source transaction, which cannot be cut."""
    topics = SourceTopics(broker.bootstrap).create()
    output, all_transfers = Output(topics), list(transfers(34, 4))
    relay(topics, all_transfers)
    sizes: list[int] = []
    with opened(topics, transaction_timeout_ms=300) as session:

        def work() -> None:
            for transaction in session:
                sizes.append(len(list(transaction.source_transactions())))
                transaction.send(output.topic, b"-1")
                transaction._session.producer.flush()
                wait = time.monotonic() + 3
                while transaction.doomed is None and time.monotonic() < wait:
                    time.sleep(0.05)
                    transaction.send(output.topic, b"-1")
                    try:
                        transaction._session.producer.flush()
                    except semel.TransactionAborted as error:
                        transaction.doomed = error

        with pytest.raises(semel.WorkTooLong, match="cannot be cut"):
            work()
        assert session.applied is None
    assert sizes[-1] == 1
    assert output.numbers() == []


def test_a_copy_is_exact_though_sessions_are_killed_at_random(broker: EmbeddedBroker) -> None:
    """H1: `kill -9` at a random moment after each of some commits; the last session finishes."""
    seed = int(os.environ.get("SEMEL_SEED", "20261119"))
    print(f"SEMEL_SEED={seed}")
    topics = SourceTopics(broker.bootstrap).create()
    output, all_transfers = Output(topics), list(transfers(35, 100))
    relay(topics, all_transfers, events_max=200)
    chance = random.Random(seed)
    command = [sys.executable, str(WORKER), "session", topics.bootstrap, topics.source, "100", output.topic]
    kills, status = 0, None
    with semel.Fetcher({"bootstrap.servers": topics.bootstrap}) as fetcher:
        fetcher.assign({(output.topic, 0): 0})
        for life in range(4):
            process = subprocess.Popen(command)
            try:
                [seen] = fetcher.end_offsets().values()
                while life < 3 and process.poll() is None and [*fetcher.end_offsets().values()] == [seen]:
                    time.sleep(0.002)
                if life < 3:
                    time.sleep(chance.uniform(0, 0.02))
                    kills += process.poll() is None
                    process.kill()
                status = process.wait(120)
            finally:
                process.kill()
                process.wait()
    assert (kills, status) == (3, 0)
    assert output.numbers() == expected(all_transfers)


def test_a_lost_event_ends_the_session(broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """One error; what came before it is committed, and nothing of it is in the output."""
    monkeypatch.setattr(source_reader, "_CHECK_LOST_S", 0.1)
    topics = SourceTopics(broker.bootstrap).create()
    output, all_transfers = Output(topics), list(transfers(36, 10))
    relay(topics, all_transfers[:5])
    with opened(topics) as session:
        copy(session, output)
    relay(topics, all_transfers)
    with semel.Fetcher({"bootstrap.servers": topics.bootstrap}) as fetcher:
        ends = fetcher.offsets_for([(topic, n) for topic in topics.topics for n in range(2)], "latest")
    with semel.Admin({"bootstrap.servers": topics.bootstrap}) as admin:
        admin.delete_records(ends)
    with opened(topics) as session, pytest.raises(semel.TransactionIncomplete):
        list(session)
    assert output.numbers() == expected(all_transfers[:5])


def test_misuse_is_refused_at_once(broker: EmbeddedBroker) -> None:
    """Another source or more topics under one name, an id of one's own, writing outside, and `semel.run`."""
    topics = SourceTopics(broker.bootstrap).create()
    output = Output(topics)
    relay(topics, list(transfers(37, 2)))
    with opened(topics, topics=topics.topics[:1]) as session:
        copy(session, output)
        with session.transaction(10) as empty:
            assert empty.is_empty
        with pytest.raises(semel.InvalidState, match="`with` block"):
            empty.send(output.topic, b"x")
    with pytest.raises(semel.ConfigError, match="would be missing"), opened(topics):
        pass
    other = SourceTopics(broker.bootstrap).create()
    with pytest.raises(semel.ConfigError, match="until now"), opened(other, name=f"copy-{topics.source}"):
        pass
    with pytest.raises(semel.ConfigError, match="write name="):
        opened(topics, transactional_id="mine")
    with pytest.raises(semel.ConfigError, match="SourceSession"):
        semel.run(
            lambda row: row, to=output.topic, bootstrap=topics.bootstrap, source_transactions=topics.source,
            topics=topics.topics, name="x", group="x",
        )  # fmt: skip
    with pytest.raises(semel.ConfigError, match="format 2"):
        SourceProgress.decode(b'{"format": 2}')
