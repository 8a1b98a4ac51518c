"""Transactions of a source database, whole on the other side: in order, once, over topics and partitions."""

from __future__ import annotations

import json
import logging
import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import pytest
from database_scene import Place, broker, place, server
from source_scene import (
    CREATE,
    SUM,
    TABLES,
    TOTAL,
    Event,
    Relay,
    SourceTopics,
    apply_rows,
    balances_after,
    relay,
    transfers,
)

import semel
from semel.bridges.source_inbox import SourceInbox
from semel.client.source_transactions import TransactionEnd, transactions_topic
from semel.session import source_reader
from semel.testing.embedded import EmbeddedBroker

__all__ = ["broker", "place", "server"]


@contextmanager
def connected(place: Place) -> Iterator[Any]:
    if place.kind == "sqlite":
        with closing(sqlite3.connect(place.address, timeout=30)) as connection:
            yield connection
    else:
        with psycopg.connect(place.address) as connection:
            yield connection


@contextmanager
def opened(place: Place, scene: SourceTopics, **options: Any) -> Iterator[SourceInbox]:
    given = {"source": scene.source, "topics": scene.topics, "name": "copy", "fetch_max_wait_ms": 20, **options}
    with connected(place) as connection, SourceInbox(connection, bootstrap=scene.bootstrap, **given) as inbox:
        yield inbox


def drain(inbox: SourceInbox, topics: SourceTopics, place: Place | None = None) -> list[int]:
    """Apply everything; the numbers of what was applied."""
    numbers: list[int] = []
    while not inbox.is_at_end():
        delivery = inbox.next(100)
        if delivery is None:
            continue
        with delivery as connection:
            for transaction in delivery.transactions():
                apply_rows(connection, topics, transaction.rows())
                numbers.append(transaction.number)
        if place is not None:
            assert place.ask(SUM) == [(TOTAL,)]
    return numbers


def fail_after(_: None) -> None:
    raise ZeroDivisionError


def read_until_it_fails(inbox: SourceInbox) -> None:
    """Nothing more may be given out."""
    while True:
        assert inbox.next(100) is None


def balances(place: Place) -> dict[tuple[str, int], int]:
    query = " UNION ALL ".join(f"SELECT '{table}', account, balance FROM {table}" for table in TABLES)
    return {(table, account): balance for table, account, balance in place.ask(query)}


def test_each_transaction_is_applied_whole_once_and_in_commit_order(broker: EmbeddedBroker, place: Place) -> None:
    """H1: three tables, six partitions, Kafka transactions of another cut and aborted ones; over several starts."""
    topics = SourceTopics(broker.bootstrap).create()
    place.do(*CREATE)
    all_transfers = list(transfers(7, 150))
    applied: list[int] = []
    for until in (1, 60, 151):
        relay(topics, all_transfers[:until])
        with opened(place, topics, delivery_events_max=20) as inbox:
            assert inbox.applied == (applied[-1] if applied else None)
            applied += drain(inbox, topics, place)
            assert inbox.waits_for() is None
        assert balances(place) == balances_after(all_transfers[:until])
    assert applied == list(range(151))


def test_a_transaction_shows_its_events_in_order(broker: EmbeddedBroker, place: Place) -> None:
    """The order of the source, whatever the topics and partitions; and the whole delivery in the same order."""
    topics = SourceTopics(broker.bootstrap).create()
    all_transfers = list(transfers(3, 30))
    relay(topics, all_transfers)
    found: list[Any] = []
    with opened(place, topics) as inbox:
        while len(found) < len(all_transfers):
            delivery = inbox.next(1_000)
            assert delivery is not None
            with delivery:
                for transaction in delivery.transactions():
                    assert transaction.end.id == f"x{transaction.number}"
                    assert transaction.table.num_rows == transaction.count == transaction.end.events
                    rows = [(topics.table_of(row.topic), json.loads(row.value or b"")) for row in transaction.rows()]
                    found.append([Event(table, value["account"], value["balance"]) for table, value in rows])
                values = [row.value for transaction in delivery.transactions() for row in transaction.rows()]
                assert delivery.table["value"].to_pylist() == values == [row.value for row in delivery.rows()]
                assert delivery.count == len(values)
    assert found == all_transfers


def test_a_transaction_that_is_not_whole_is_not_shown(broker: EmbeddedBroker, place: Place) -> None:
    """H1: some events, or all of them without the end, or the end without the last one: nothing of it is applied."""
    topics = SourceTopics(broker.bootstrap).create()
    place.do(*CREATE)
    snapshot, first = list(transfers(1, 1))
    relay(topics, [snapshot])
    writer = Relay(topics, random.Random(1))
    steps = [(1, index, event) for index, event in enumerate(first)]
    with opened(place, topics) as inbox:
        assert drain(inbox, topics) == [0]
        writer._commit(steps)
        assert drain(inbox, topics) == []
        assert inbox.waits_for() == f"transaction 1 of source {topics.source!r}: it lacks its end record"
        before = balances(place)
        assert before == balances_after([snapshot])
        writer.write([snapshot, first])
        assert drain(inbox, topics, place) == [1]
        assert inbox.waits_for() is None
    writer.close()
    assert balances(place) == balances_after([snapshot, first])


def test_an_exception_rolls_the_whole_transaction_back_and_it_comes_again(broker: EmbeddedBroker, place: Place) -> None:
    """The results, the positions and the number are one transaction of the database."""
    topics = SourceTopics(broker.bootstrap).create()
    place.do(*CREATE)
    relay(topics, list(transfers(5, 10)))
    with opened(place, topics, delivery_events_max=1) as inbox:
        for wanted in range(11):
            delivery = inbox.next(2_000)
            assert delivery is not None
            with pytest.raises(ZeroDivisionError) as caught, delivery as connection:
                fail_after(apply_rows(connection, topics, delivery.rows()))
            assert f"transactions {wanted} to {wanted}" in caught.value.__notes__[0]
            again = inbox.next(2_000)
            assert again is not None
            assert (again.first, again.last) == (wanted, wanted)
            with again as connection:
                apply_rows(connection, topics, again.rows())
            assert place.ask(SUM) == [(TOTAL,)]
    assert balances(place) == balances_after(transfers(5, 10))


def test_of_two_readers_of_one_name_the_slower_one_is_rolled_back(broker: EmbeddedBroker, place: Place) -> None:
    """Two readers never both apply a transaction."""
    topics = SourceTopics(broker.bootstrap).create()
    place.do(*CREATE)
    relay(topics, list(transfers(5, 10)))
    with opened(place, topics) as one, opened(place, topics) as other:
        first, second = one.next(2_000), other.next(2_000)
        assert first is not None
        assert second is not None
        with first as connection:
            apply_rows(connection, topics, first.rows())
        with pytest.raises(semel.InboxOvertaken), second:
            pytest.fail("the block of an overtaken reader must not run")
        assert drain(one, topics) == list(range(first.last + 1, 11))
        assert drain(other, topics) == []
    assert balances(place) == balances_after(transfers(5, 10))


def test_memory_is_bounded_and_what_does_not_fit_is_in_a_file(
    broker: EmbeddedBroker, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H1: with room for a few events only, everything arrives; what is larger goes through a file."""
    monkeypatch.setattr(source_reader, "_ENDS_MAX", 5)
    topics = SourceTopics(broker.bootstrap).create()
    place.do(*CREATE)
    all_transfers = list(transfers(9, 60))
    large = [Event(table, account, 1_000 + n) for n in range(40) for table in TABLES for account in range(20)]
    relay(topics, [*all_transfers, large], events_max=400)
    with opened(place, topics, memory_bytes_max=20_000, max_partition_fetch_bytes=2_000) as inbox:
        assert drain(inbox, topics) == list(range(62))
    assert balances(place) == balances_after([*all_transfers, large])


def test_a_lost_event_is_one_error_and_nothing_of_its_transaction_is_applied(
    broker: EmbeddedBroker, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H1: the end record names more events than there are, and every partition was read to beyond where they can be."""
    monkeypatch.setattr(source_reader, "_CHECK_LOST_S", 0.1)
    topics = SourceTopics(broker.bootstrap).create()
    place.do(*CREATE)
    snapshot, first, second = list(transfers(1, 2))
    writer = Relay(topics, random.Random(1))
    writer.write([snapshot, first])
    send = writer.send
    monkeypatch.setattr(writer, "send", lambda number, index, event: index == 1 or send(number, index, event))
    writer.write([snapshot, first, second])
    writer.close()
    with opened(place, topics) as inbox:
        drain(inbox, topics, place)
        with pytest.raises(semel.TransactionIncomplete, match="can never be whole: it lacks 1 of its"):
            read_until_it_fails(inbox)
        assert inbox.applied == 1
    assert balances(place) == balances_after([snapshot, first])


@pytest.mark.parametrize("what", ["events", "ends"])
def test_events_that_were_deleted_before_they_were_read_are_one_error(
    broker: EmbeddedBroker, place: Place, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention has passed the reader: it never goes on with the rest as if it were whole."""
    monkeypatch.setattr(source_reader, "_CHECK_LOST_S", 0.1)
    topics = SourceTopics(broker.bootstrap).create()
    place.do(*CREATE)
    all_transfers = list(transfers(1, 20))
    relay(topics, all_transfers[:5])
    with opened(place, topics) as inbox:
        assert drain(inbox, topics) == list(range(5))
    relay(topics, all_transfers)
    gone = topics.topics if what == "events" else [transactions_topic(topics.source)]
    with (
        semel.Fetcher({"bootstrap.servers": topics.bootstrap}) as fetcher,
        semel.Admin({"bootstrap.servers": topics.bootstrap}) as admin,
    ):
        places = [(topic, n) for topic in gone for n in range(topics.partitions if what == "events" else 1)]
        admin.delete_records(fetcher.offsets_for(places, "latest"))
    with opened(place, topics) as inbox, pytest.raises(semel.TransactionIncomplete, match="deleted before"):
        read_until_it_fails(inbox)
    assert balances(place) == balances_after(all_transfers[:5])
    relay(topics, [*all_transfers, all_transfers[1]])
    with opened(place, topics, name="late") as inbox, pytest.raises(semel.TransactionIncomplete):
        read_until_it_fails(inbox)


def test_a_relay_that_counts_from_the_start_again_is_refused(broker: EmbeddedBroker, place: Place) -> None:
    """Its transactions would pass for those that are applied already, and be left out in silence."""
    topics = SourceTopics(broker.bootstrap).create()
    place.do(*CREATE)
    relay(topics, list(transfers(1, 5)))
    with opened(place, topics) as inbox:
        drain(inbox, topics)
        writer = Relay(topics, random.Random(2))
        writer._next = (0, 0)
        writer.write(list(transfers(2, 1)))
        writer.close()
        with pytest.raises(semel.TransactionIncomplete, match="begun"):
            read_until_it_fails(inbox)
    assert balances(place) == balances_after(transfers(1, 5))


def test_a_topic_that_was_created_again_is_noticed(
    broker: EmbeddedBroker, place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With events in it that were not read, the transaction is lost; without, the reader goes on."""
    monkeypatch.setattr(source_reader, "_CHECK_LOST_S", 0.1)
    topics = SourceTopics(broker.bootstrap).create()
    place.do(*CREATE)
    all_transfers = list(transfers(4, 8))
    relay(topics, all_transfers[:4])
    with opened(place, topics) as inbox, semel.Admin({"bootstrap.servers": topics.bootstrap}) as admin:
        assert drain(inbox, topics) == [0, 1, 2, 3]
        admin.delete_topics(*topics.topics)
        admin.create_topics(*topics.topics, partitions=2)
        relay(topics, all_transfers[:6])
        applied: list[int] = []
        while len(applied) < 2:
            applied += drain(inbox, topics, place)
        assert applied == [4, 5]
        assert "deleted and created again" in caplog.text
        relay(topics, all_transfers)
        admin.delete_topics(*topics.topics)
        admin.create_topics(*topics.topics, partitions=2)
        with pytest.raises(semel.TransactionIncomplete, match="can never be whole"):
            read_until_it_fails(inbox)
    assert balances(place) == balances_after(all_transfers[:6])


def test_partitions_that_are_added_are_read_from_their_beginning(
    broker: EmbeddedBroker, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event in a partition that was not there at the start is waited for, and not taken for lost."""
    monkeypatch.setattr(source_reader, "_CHECK_LOST_S", 0.1)
    topics = SourceTopics(broker.bootstrap, partitions=1).create()
    place.do(*CREATE)
    all_transfers = list(transfers(4, 20))
    relay(topics, all_transfers[:4])
    with opened(place, topics) as inbox:
        assert drain(inbox, topics) == [0, 1, 2, 3]
        with semel.Admin({"bootstrap.servers": topics.bootstrap}) as admin:
            for topic in topics.topics:
                admin.create_partitions(topic, 3)
        topics.partitions = 3
        relay(topics, all_transfers)
        applied: list[int] = []
        while len(applied) < 17:
            applied += drain(inbox, topics, place)
        assert applied == list(range(4, 21))
    assert balances(place) == balances_after(all_transfers)


def test_a_target_that_was_filled_by_other_means_goes_on_after_a_number(broker: EmbeddedBroker, place: Place) -> None:
    """`after=` counts at the first start; then the database decides."""
    topics = SourceTopics(broker.bootstrap).create()
    place.do(*CREATE)
    all_transfers = list(transfers(8, 20))
    relay(topics, all_transfers)
    with connected(place) as connection:
        for (table, account), balance in balances_after(all_transfers[:11]).items():
            connection.execute(f"INSERT INTO {table} VALUES ({account}, {balance})")
        connection.commit()
    with opened(place, topics, after=10, delivery_events_max=10) as inbox:
        delivery = inbox.next(2_000)
        assert delivery is not None
        assert delivery.first == 11
        with delivery as connection:
            apply_rows(connection, topics, delivery.rows())
        last = delivery.last
    with opened(place, topics, after=10) as inbox:
        assert drain(inbox, topics, place) == list(range(last + 1, 21))
    assert balances(place) == balances_after(all_transfers)


def test_some_of_the_topics_are_whole_by_themselves(broker: EmbeddedBroker, place: Place) -> None:
    """A reader of one table gets each transaction's part in it; a topic that is added later is refused."""
    topics = SourceTopics(broker.bootstrap).create()
    place.do(*CREATE)
    all_transfers = list(transfers(8, 20))
    relay(topics, all_transfers)
    one = topics.topics[:1]
    with opened(place, topics, topics=one) as inbox:
        assert drain(inbox, topics) == list(range(21))
    assert balances(place) == {key: value for key, value in balances_after(all_transfers).items() if key[0] == "cash"}
    with pytest.raises(semel.ConfigError, match="would be missing"), opened(place, topics):
        pass


MISUSE: list[tuple[dict[str, Any], str]] = [
    ({"topics": []}, "topics must be a list"),
    ({"topics": "orders"}, "topics must be a list"),
    ({"auto_offset_reset": "latest"}, "auto_offset_reset= cannot be set"),
    ({"isolation_level": "read_uncommitted"}, "only committed events"),
    ({"group_id": "g"}, "there is no group"),
]


@pytest.mark.parametrize(("options", "text"), MISUSE)
def test_misuse_is_refused_at_once(broker: EmbeddedBroker, place: Place, options: dict[str, Any], text: str) -> None:
    """Before anything is read, with the right way in the message."""
    topics = SourceTopics(broker.bootstrap)
    with pytest.raises(semel.ConfigError, match=text), opened(place, topics, **options):
        pass


def test_wrong_topics_are_refused(broker: EmbeddedBroker, place: Place) -> None:
    """An ends topic of two partitions has no order; one with other records than ends is not one."""
    topics = SourceTopics(broker.bootstrap)
    ends = transactions_topic(topics.source)
    with semel.Admin({"bootstrap.servers": topics.bootstrap}) as admin:
        admin.create_topics(*topics.topics, ends, partitions=2)
    with pytest.raises(semel.ConfigError, match="must have one"), opened(place, topics):
        pass
    with pytest.raises(semel.ConfigError, match="leave it out"), opened(place, topics, topics=[ends]):
        pass
    topics = SourceTopics(broker.bootstrap).create()
    with semel.Producer(bootstrap_servers=topics.bootstrap) as producer:
        producer.send(transactions_topic(topics.source), b"hello")
    with pytest.raises(semel.TransactionIncomplete, match="no end record"), opened(place, topics) as inbox:
        read_until_it_fails(inbox)


def test_a_reader_of_another_kind_leaves_a_name_that_is_refused(broker: EmbeddedBroker, place: Place) -> None:
    """Positions of a plain inbox do not say which transaction they are at."""
    topics = SourceTopics(broker.bootstrap).create()
    relay(topics, list(transfers(1, 2)))
    with (
        connected(place) as connection,
        semel.Inbox(connection, bootstrap=topics.bootstrap, topics=topics.topics, name="copy") as plain,
    ):
        delivery = plain.next(2_000)
        assert delivery is not None
        with delivery:
            pass
    with pytest.raises(semel.ConfigError, match="another reader until now"), opened(place, topics):
        pass


def test_what_is_waited_for_is_logged(
    broker: EmbeddedBroker, place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A relay that stands still in the middle of a transaction shows in the log."""
    monkeypatch.setattr(source_reader, "_CHECK_LOST_S", 0.1)
    monkeypatch.setattr(source_reader, "_TELL_S", 0.3)
    topics = SourceTopics(broker.bootstrap).create()
    writer = Relay(topics, random.Random(1))
    writer._commit([(0, 0, Event("cash", 1, 5))])
    with opened(place, topics) as inbox, caplog.at_level(logging.WARNING):
        for _ in range(10):
            assert inbox.next(100) is None
    writer.close()
    assert "it lacks its end record" in caplog.text


def test_an_end_of_a_later_format_is_refused(broker: EmbeddedBroker, place: Place) -> None:
    """It may count in another way."""
    topics = SourceTopics(broker.bootstrap).create()
    with semel.Producer(bootstrap_servers=topics.bootstrap) as producer:
        producer.send(transactions_topic(topics.source), TransactionEnd(topics.source, 1, {}, format=2).encode())
    with pytest.raises(semel.ConfigError, match="format 2"), opened(place, topics) as inbox:
        read_until_it_fails(inbox)
