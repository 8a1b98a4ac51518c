"""The inbox: an ordinary subscriber whose position is in its own database, killed between any two steps."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from session_scene import BROKER_CONFIG, Pipeline

from semel.client.admin import Admin
from semel.errors import InboxOvertaken, InvalidState
from semel.session.inbox import Inbox
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
    monkeypatch.setattr("semel.session.inbox._LOOK_AT_TOPICS_S", 0.0)
    pipeline, path = Pipeline(broker.bootstrap, partitions=1), tmp_path / "app.db"
    pipeline.write(range(5))
    with closing(open_database(path)) as connection, make_inbox(pipeline, connection) as inbox:
        process(inbox, 5)
        with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            admin.create_partitions(pipeline.source, 2)
        pipeline.write(range(5, 10), partition=1)
        process(inbox, 5)
    assert seen(path) == list(range(10))


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
