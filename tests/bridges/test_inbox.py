"""The inbox: an ordinary subscriber whose position is in its own database, killed between any two steps."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from session_scene import BROKER_CONFIG, Pipeline

from semel.bridges.inbox import Inbox
from semel.client.admin import Admin
from semel.errors import InboxOvertaken, InvalidState
from semel.testing.embedded import EmbeddedBroker


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(config=BROKER_CONFIG, fsync="never") as broker:
        yield broker


def open_database(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE IF NOT EXISTS seen (number INTEGER)")
    connection.commit()
    return connection


def seen(path: Path) -> list[int]:
    with closing(sqlite3.connect(path)) as connection:
        return sorted(number for (number,) in connection.execute("SELECT number FROM seen"))


def make_inbox(pipeline: Pipeline, connection: sqlite3.Connection, **more: object) -> Inbox:
    options: dict[str, object] = {"bootstrap": pipeline.bootstrap, "fetch_max_wait_ms": 50, **more}
    return Inbox(connection, options, topics=[pipeline.source], name="billing", delivery_records_max=7)


class Crash(Exception):
    """Stands for the end of the process at this point."""


def process(inbox: Inbox, count: int, *, crash_at: str | None = None) -> None:
    """Exactly so many rows, one by one, and nothing after them."""
    done, deadline = 0, time.monotonic() + 30
    while done < count:
        assert time.monotonic() < deadline, f"{done} of {count} rows"
        delivery = inbox.next(1_000)
        if delivery is None:
            continue
        if crash_at == "before":
            raise Crash
        with delivery as connection:
            for row in delivery.rows():
                connection.execute("INSERT INTO seen VALUES (?)", (int(row.value or b""),))
                if crash_at == "inside":
                    raise Crash
            done += delivery.table.num_rows
        if crash_at == "after":
            raise Crash
    assert (done, inbox.next(100)) == (count, None)


def test_every_record_is_processed_once_wherever_the_reader_dies(broker: EmbeddedBroker, tmp_path: Path) -> None:
    """H3: before its results, between them, and after they were committed; each time a new one goes on."""
    pipeline, path = Pipeline(broker.bootstrap), tmp_path / "app.db"
    pipeline.write(range(40))
    for crash_at in ("before", "inside", "after", "inside", "after"):
        with (
            closing(open_database(path)) as connection,
            pytest.raises(Crash),
            make_inbox(pipeline, connection) as inbox,
        ):
            process(inbox, 40, crash_at=crash_at)
    with closing(open_database(path)) as connection, make_inbox(pipeline, connection) as inbox:
        process(inbox, 40 - 2 * 7)
        pipeline.write(range(40, 50))
        process(inbox, 10)
    assert seen(path) == list(range(50))


def test_an_exception_rolls_back_and_the_same_records_are_delivered_again(
    broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """H3: within one life of the reader too."""
    pipeline, path = Pipeline(broker.bootstrap), tmp_path / "app.db"
    pipeline.write(range(10))
    with closing(open_database(path)) as connection, make_inbox(pipeline, connection) as inbox:
        for _ in range(2):
            with pytest.raises(Crash):
                process(inbox, 10, crash_at="inside")
        process(inbox, 10)
    assert seen(path) == list(range(10))


def test_of_two_readers_of_one_inbox_the_slower_is_rolled_back(broker: EmbeddedBroker, tmp_path: Path) -> None:
    """H3: a zombie that comes back, or a second instance by mistake, repeats nothing."""
    pipeline, path = Pipeline(broker.bootstrap, partitions=1), tmp_path / "app.db"
    pipeline.write(range(10))
    with (
        closing(open_database(path)) as ours,
        closing(open_database(path)) as theirs,
        make_inbox(pipeline, ours) as slow,
        make_inbox(pipeline, theirs) as quick,
    ):
        late = slow.next(10_000)
        assert late is not None
        process(quick, 10)
        with pytest.raises(InboxOvertaken, match="Another reader of inbox 'billing'"):
            late.__enter__()
        process(slow, 0)
    assert seen(path) == list(range(10))


def test_who_begins_at_the_end_begins_there_once(broker: EmbeddedBroker, tmp_path: Path) -> None:
    """H3: what comes while it is away is not skipped."""
    pipeline, path = Pipeline(broker.bootstrap), tmp_path / "app.db"
    pipeline.write(range(10))
    with closing(open_database(path)) as connection:
        options = {"bootstrap": pipeline.bootstrap, "fetch.max.wait.ms": 50}
        inbox = Inbox(connection, options, topics=[pipeline.source], name="late", start="latest")
        with inbox:
            process(inbox, 0)
        pipeline.write(range(10, 15))
        with Inbox(connection, options, topics=[pipeline.source], name="late", start="latest") as again:
            process(again, 5)
    assert seen(path) == list(range(10, 15))


def test_new_partitions_are_read_from_their_beginning(
    broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H3: a topic that grows loses nothing."""
    monkeypatch.setattr("semel.bridges.inbox._LOOK_AT_TOPICS_S", 0.0)
    pipeline, path = Pipeline(broker.bootstrap, partitions=1), tmp_path / "app.db"
    pipeline.write(range(5))
    with closing(open_database(path)) as connection, make_inbox(pipeline, connection) as inbox:
        process(inbox, 5)
        with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            admin.create_partitions(pipeline.source, 2)
        pipeline.write(range(5, 10), partition=1)
        process(inbox, 5)
    assert seen(path) == list(range(10))


def test_new_partitions_are_read_from_their_beginning_though_the_inbox_began_at_the_end(
    broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written to them before they are noticed was lost; while the reader runs, and while it is away."""
    monkeypatch.setattr("semel.bridges.inbox._LOOK_AT_TOPICS_S", 0.0)
    pipeline, path = Pipeline(broker.bootstrap, partitions=1), tmp_path / "app.db"
    pipeline.write(range(5))
    with closing(open_database(path)) as connection, Admin({"bootstrap.servers": broker.bootstrap}) as admin:

        def inbox() -> Inbox:
            options = {"bootstrap": pipeline.bootstrap, "fetch.max.wait.ms": 50}
            return Inbox(connection, options, topics=[pipeline.source], name="late", start="latest")

        with inbox() as first:
            process(first, 0)
            admin.create_partitions(pipeline.source, 2)
            pipeline.write(range(5, 10), partition=1)
            process(first, 5)
        admin.create_partitions(pipeline.source, 3)
        pipeline.write(range(10, 15), partition=2)
        with inbox() as second:
            process(second, 5)
    assert seen(path) == list(range(5, 15))


@pytest.mark.parametrize("reset", [None, "latest"])
@pytest.mark.parametrize("written", [4, 10, 30])
@pytest.mark.parametrize("is_running", [True, False])
def test_a_topic_that_was_created_again_is_read_from_its_beginning(
    broker: EmbeddedBroker, tmp_path: Path, is_running: bool, written: int, reset: str | None
) -> None:
    """With fewer records than the old one, as many, and more; while the reader runs, and while it is away."""
    pipeline, path = Pipeline(broker.bootstrap, partitions=1), tmp_path / "app.db"
    pipeline.write(range(10))
    more = {} if reset is None else {"auto.offset.reset": reset}

    def recreate() -> None:
        with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            admin.delete_topics(pipeline.source)
            admin.create_topics(pipeline.source)
        pipeline.write(range(100, 100 + written))

    with closing(open_database(path)) as connection:
        with make_inbox(pipeline, connection, **more) as inbox:
            process(inbox, 10)
            if is_running:
                recreate()
                pipeline.write([99])  # a reader that stands at the end looks up only when something comes
                process(inbox, written + 1)
        if not is_running:
            recreate()
            pipeline.write([99])
            with make_inbox(pipeline, connection, **more) as inbox:
                process(inbox, written + 1)
    assert seen(path) == [*range(10), 99, *range(100, 100 + written)]


def test_a_topic_that_was_created_again_with_fewer_partitions_is_read_from_its_beginning(
    broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """The reader stands in partitions that are no more."""
    pipeline, path = Pipeline(broker.bootstrap, partitions=4), tmp_path / "app.db"
    pipeline.write(range(20))
    with closing(open_database(path)) as connection, make_inbox(pipeline, connection) as inbox:
        process(inbox, 20)
        with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            admin.delete_topics(pipeline.source)
            admin.create_topics(pipeline.source, partitions=2)
        pipeline.partitions = 2
        pipeline.write(range(100, 120))
        process(inbox, 20)
    assert seen(path) == [*range(20), *range(100, 120)]


def test_a_table_of_an_earlier_release_is_taken_over(broker: EmbeddedBroker, tmp_path: Path) -> None:
    """Its positions are gone on from, and get the id of their topic."""
    pipeline, path = Pipeline(broker.bootstrap, partitions=1), tmp_path / "app.db"
    pipeline.write(range(10))
    with closing(open_database(path)) as connection:
        connection.execute(
            "CREATE TABLE semel_inbox (inbox TEXT NOT NULL, topic TEXT NOT NULL, partition INTEGER NOT NULL, "
            "next_offset INTEGER NOT NULL, PRIMARY KEY (inbox, topic, partition))"
        )
        connection.execute("INSERT INTO semel_inbox VALUES ('billing', ?, 0, 6)", (pipeline.source,))
        connection.commit()
        for _ in range(2):
            with make_inbox(pipeline, connection) as inbox:
                process(inbox, 4 if not seen(path) else 0)
        [(offset, topic_id)] = connection.execute("SELECT next_offset, topic_id FROM semel_inbox")
    assert seen(path) == list(range(6, 10))
    assert offset == 10
    assert topic_id is not None


def test_an_error_in_a_block_names_the_records(broker: EmbeddedBroker, tmp_path: Path) -> None:
    """K3: where to look for the record that made it fail."""
    pipeline, path = Pipeline(broker.bootstrap, partitions=1), tmp_path / "app.db"
    pipeline.write(range(5))
    with closing(open_database(path)) as connection, make_inbox(pipeline, connection) as inbox:
        with pytest.raises(Crash) as caught:
            process(inbox, 5, crash_at="inside")
        assert f"{pipeline.source}-0 offsets 0 to 4" in caught.value.__notes__[0]


def test_a_delivery_that_was_not_used_comes_again(broker: EmbeddedBroker, tmp_path: Path) -> None:
    """H3: to look at records is not to process them; an old delivery cannot be used after a newer one."""
    pipeline, path = Pipeline(broker.bootstrap), tmp_path / "app.db"
    pipeline.write(range(10))
    with closing(open_database(path)) as connection, make_inbox(pipeline, connection) as inbox:
        ignored = inbox.next(10_000)
        assert ignored is not None
        process(inbox, 10)
        with pytest.raises(InvalidState, match="not the last one"):
            ignored.__enter__()
    assert seen(path) == list(range(10))


def test_a_transaction_that_is_open_already_is_told(broker: EmbeddedBroker, tmp_path: Path) -> None:
    """The position and somebody else's statements must not be committed together by accident."""
    pipeline = Pipeline(broker.bootstrap)
    pipeline.write(range(1))
    with closing(open_database(tmp_path / "app.db")) as connection, make_inbox(pipeline, connection) as inbox:
        delivery = inbox.next(10_000)
        assert delivery is not None
        connection.execute("INSERT INTO seen VALUES (99)")
        with pytest.raises(InvalidState, match="has a transaction open already"):
            delivery.__enter__()
        connection.rollback()
        process(inbox, 1)


@pytest.mark.parametrize("careless", ["commit", "rollback"])
def test_a_block_that_commits_or_rolls_back_by_itself_is_told(
    broker: EmbeddedBroker, tmp_path: Path, careless: str
) -> None:
    """H3: after a rollback of its own a block's results were once kept without the position, and came again."""
    pipeline, path = Pipeline(broker.bootstrap, partitions=1), tmp_path / "app.db"
    pipeline.write(range(7))
    with closing(open_database(path)) as database, make_inbox(pipeline, database) as inbox:
        delivery = inbox.next(10_000)
        assert delivery is not None
        with pytest.raises(InvalidState, match="could not be committed whole"), delivery as connection:
            getattr(connection, careless)()
        process(inbox, 0 if careless == "commit" else 7)
    assert seen(path) == ([] if careless == "commit" else list(range(7)))


def test_a_loop_that_never_enters_its_deliveries_is_stopped(broker: EmbeddedBroker, tmp_path: Path) -> None:
    """It wrote the same records again and again, each time committed by the user's own hand."""
    pipeline = Pipeline(broker.bootstrap)
    pipeline.write(range(5))
    with closing(open_database(tmp_path / "app.db")) as connection, make_inbox(pipeline, connection) as inbox:

        def consume() -> None:
            for delivery in inbox:
                numbers = [(int(row.value or b""),) for row in delivery.rows()]
                connection.executemany("INSERT INTO seen VALUES (?)", numbers)
                connection.commit()

        with pytest.raises(InvalidState, match="never entered"):
            consume()
        assert len(seen(tmp_path / "app.db")) == 5
