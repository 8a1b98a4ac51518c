"""The inbox in a real Postgres: readers killed with SIGKILL at each step, two at a time, and careless blocks."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import inbox_reader
import psycopg
import pytest
from session_scene import BROKER_CONFIG, Pipeline

from semel.bridges.inbox import Inbox
from semel.bridges.postgres import PostgresPositions
from semel.errors import ConfigError, InboxOvertaken, InvalidState
from semel.testing.embedded import EmbeddedBroker
from semel.testing.postgres import Postgres

STEPS = ("SELECT txid", "SAVEPOINT", "UPDATE semel_inbox", "INSERT INTO seen", "RELEASE", "commit", "committed")


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(config=BROKER_CONFIG, fsync="never") as broker:
        yield broker


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with Postgres() as postgres:
        yield postgres


@pytest.fixture
def uri(postgres: Postgres) -> str:
    """Of a database of the test's own, with a table for results."""
    name = f"app_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(postgres.uri, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    uri = postgres.uri.replace("/postgres?", f"/{name}?")
    with psycopg.connect(uri) as connection:
        connection.execute("CREATE TABLE seen (number integer, life integer DEFAULT pg_backend_pid())")
    return uri


def seen(uri: str) -> list[int]:
    with psycopg.connect(uri) as connection:
        return [number for (number,) in connection.execute("SELECT number FROM seen ORDER BY number")]


def make_inbox(pipeline: Pipeline, connection: Any) -> Inbox:
    return inbox_reader.make_inbox(connection, pipeline.bootstrap, pipeline.source)


def process(inbox: Inbox) -> None:
    """Until nothing comes any more."""
    while (delivery := inbox.next(1_000)) is not None:
        with delivery as connection:
            for row in delivery.rows():
                connection.execute("INSERT INTO seen VALUES (%s)", (int(row.value or b""),))


def test_a_table_of_an_earlier_release_is_taken_over(broker: EmbeddedBroker, uri: str) -> None:
    """It had no ids of topics; its positions are gone on from, and get one."""
    pipeline = Pipeline(broker.bootstrap, partitions=1)
    pipeline.write(range(10))
    with psycopg.connect(uri) as connection:
        connection.execute(
            "CREATE TABLE semel_inbox (inbox text NOT NULL, topic text NOT NULL, partition integer NOT NULL, "
            "next_offset bigint NOT NULL, PRIMARY KEY (inbox, topic, partition))"
        )
        connection.execute("INSERT INTO semel_inbox VALUES ('billing', %s, 0, 6)", (pipeline.source,))
    for _ in range(2):
        with psycopg.connect(uri) as connection, make_inbox(pipeline, connection) as inbox:
            process(inbox)
    assert seen(uri) == list(range(6, 10))
    with psycopg.connect(uri) as connection:
        [(offset, topic_id)] = connection.execute("SELECT next_offset, topic_id FROM semel_inbox").fetchall()
    assert offset == 10
    assert topic_id is not None


def test_every_record_is_processed_once_though_readers_are_killed_at_each_step(
    broker: EmbeddedBroker, uri: str
) -> None:
    """H3: SIGKILL before and after every statement of a delivery and its commit; each time a new reader goes on."""
    pipeline = Pipeline(broker.bootstrap)
    count = 7 * 2 * len(STEPS) + 20
    pipeline.write(range(count))
    command = [sys.executable, inbox_reader.__file__, uri, broker.bootstrap, pipeline.source, *STEPS, ""]
    readers = subprocess.run(command, timeout=120, check=True, stdout=subprocess.PIPE, text=True)
    assert readers.stdout.split() == [*[str(-signal.SIGKILL)] * len(STEPS), "0"]
    assert seen(uri) == list(range(count))
    with psycopg.connect(uri) as connection:
        # Seven lives committed one delivery and died in the next, the last of them after its commit.
        lives = connection.execute("SELECT count(DISTINCT life) FROM seen").fetchone()
        first = connection.execute("SELECT life, count(*) FROM seen GROUP BY life ORDER BY min(number)").fetchall()
    assert lives == (len(STEPS) + 1,)
    assert sorted(rows for _, rows in first)[:-1] == [7] * (len(STEPS) - 1) + [14]


def test_of_two_readers_in_postgres_the_slower_is_rolled_back(broker: EmbeddedBroker, uri: str) -> None:
    """H3: the second waits for the first one's row, finds it moved, and repeats nothing."""
    pipeline = Pipeline(broker.bootstrap, partitions=1)
    pipeline.write(range(20))
    with ExitStack() as stack:
        ours, theirs = (stack.enter_context(psycopg.connect(uri)) for _ in range(2))
        slow, quick = (stack.enter_context(make_inbox(pipeline, one)) for one in (ours, theirs))
        late, first = slow.next(10_000), quick.next(10_000)
        assert late is not None
        assert first is not None
        errors: list[BaseException] = []

        def overtake() -> None:
            try:
                with late:
                    raise AssertionError("both readers have the same records")
            except BaseException as error:
                errors.append(error)

        waiting = threading.Thread(target=overtake)
        with first as connection:
            waiting.start()
            for row in first.rows():
                connection.execute("INSERT INTO seen VALUES (%s)", (int(row.value or b""),))
        waiting.join(30)
        assert [type(error) for error in errors] == [InboxOvertaken]
        process(slow)
        with pytest.raises(InboxOvertaken):
            process(quick)  # what it had fetched ahead has been processed meanwhile
        process(quick)
    assert seen(uri) == list(range(20))


def be_careless(connection: Any, how: str) -> None:
    if how == "failed":
        with pytest.raises(psycopg.errors.DivisionByZero):
            connection.execute("SELECT 1 / 0")
    else:
        getattr(connection, how)()
        connection.execute("INSERT INTO seen VALUES (99)")


@pytest.mark.parametrize("careless", ["failed", "commit", "rollback"])
def test_a_block_that_ends_its_transaction_itself_is_told(broker: EmbeddedBroker, uri: str, careless: str) -> None:
    """H3: a swallowed failure makes Postgres turn COMMIT into a rollback without a word; it must not pass for done."""
    pipeline = Pipeline(broker.bootstrap, partitions=1)
    pipeline.write(range(7))
    with psycopg.connect(uri) as database, make_inbox(pipeline, database) as inbox:
        delivery = inbox.next(10_000)
        assert delivery is not None
        with pytest.raises(InvalidState, match="could not be committed whole"), delivery as connection:
            be_careless(connection, careless)
        process(inbox)
    # With its commit the position was committed, which is what it asked for; otherwise all come again.
    assert seen(uri) == ([] if careless == "commit" else list(range(7)))


def test_an_exception_in_the_block_rolls_back_results_and_position(broker: EmbeddedBroker, uri: str) -> None:
    """H3: within one life of the reader."""
    pipeline = Pipeline(broker.bootstrap)
    pipeline.write(range(10))
    with psycopg.connect(uri) as database, make_inbox(pipeline, database) as inbox:
        delivery = inbox.next(10_000)
        assert delivery is not None
        with pytest.raises(psycopg.errors.InvalidTextRepresentation), delivery as connection:
            connection.execute("INSERT INTO seen VALUES (99), ('x')")
        process(inbox)
    assert seen(uri) == list(range(10))


def test_connections_that_cannot_keep_the_promise_are_refused(broker: EmbeddedBroker, uri: str) -> None:
    """What is committed by itself or by somebody else, or leads nobody knows where, is no place for a position."""
    pipeline = Pipeline(broker.bootstrap)
    with psycopg.connect(uri, autocommit=True) as database, pytest.raises(ConfigError, match="autocommit off"):
        make_inbox(pipeline, database)
    with pytest.raises(ConfigError, match="what database a object leads to"):
        make_inbox(pipeline, object())
    pipeline.write(range(1))
    with psycopg.connect(uri) as database, make_inbox(pipeline, database) as inbox:
        delivery = inbox.next(10_000)
        assert delivery is not None
        database.execute("INSERT INTO seen VALUES (99)")
        with pytest.raises(InvalidState, match="has a transaction open already"):
            delivery.__enter__()
        database.rollback()
        database.execute("SELECT 1")  # opens a transaction too, which holds nothing
        process(inbox)
    assert seen(uri) == [0]


def end_session_of(connection: Any, uri: str) -> None:
    connection.execute("INSERT INTO seen VALUES (99)")
    with psycopg.connect(uri, autocommit=True) as other:
        other.execute("SELECT pg_terminate_backend(%s)", (connection.info.backend_pid,))


def test_a_lost_connection_leaves_what_was_committed(broker: EmbeddedBroker, uri: str) -> None:
    """H3: the server ends the session in the middle of a block; a new connection goes on from the database."""
    pipeline = Pipeline(broker.bootstrap)
    pipeline.write(range(10))
    with psycopg.connect(uri) as database, make_inbox(pipeline, database) as inbox:
        delivery = inbox.next(10_000)
        assert delivery is not None
        with pytest.raises(InvalidState) as told, delivery as connection:
            end_session_of(connection, uri)
        assert isinstance(told.value.__cause__, psycopg.OperationalError)
    with psycopg.connect(uri) as database, make_inbox(pipeline, database) as inbox:
        process(inbox)
    assert seen(uri) == list(range(10))


def test_many_readers_may_make_the_table_at_once(uri: str) -> None:
    """A first start of several instances at the same moment fails for none."""
    failures: list[BaseException] = []
    together = threading.Barrier(5)

    def make() -> None:
        try:
            with psycopg.connect(uri) as connection:
                together.wait(30)
                PostgresPositions(connection)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=make) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []
