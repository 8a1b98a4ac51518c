"""Every change of captured tables is in Kafka once, in its transaction, and a copy made of it is equal."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import psycopg
import pytest
from capture_scene import Source, broker, server, source
from database_scene import make_postgres
from relay_scene import read_topic
from session_scene import wait_until

import semel
from semel.testing.postgres import Postgres

__all__ = ["broker", "server", "source"]

ACCOUNTS = "CREATE TABLE accounts (id int PRIMARY KEY, owner text, balance numeric)"


def test_snapshot_and_every_kind_of_change(source: Source) -> None:
    """G2: rows that are there, then changes, each with its transaction; a second start repeats nothing."""
    source.make(ACCOUNTS, "INSERT INTO accounts VALUES (1, 'a', 1.50), (2, NULL, 2)")
    assert source.capture().rows == 2
    source.do(
        "INSERT INTO accounts VALUES (3, 'c', 3)",
        "UPDATE accounts SET balance = 7 WHERE id = 1",
        "UPDATE accounts SET id = 9 WHERE id = 1",
        "DELETE FROM accounts WHERE id = 2",
        "TRUNCATE accounts",
    )
    assert source.capture().rows == 6
    assert source.capture().rows == 0
    first = {"id": 1, "owner": "a", "balance": "1.50"}
    assert sorted(map(repr, source.whats()[:2])) == sorted(
        map(repr, [("snapshot", first), ("snapshot", {"id": 2, "owner": None, "balance": "2"})])
    )
    assert source.whats()[2:] == [
        ("insert", {"id": 3, "owner": "c", "balance": "3"}),
        ("update", {**first, "balance": "7"}),
        ("delete", {"id": 1}),
        ("insert", {"id": 9, "owner": "a", "balance": "7"}),
        ("delete", {"id": 2}),
        ("truncate", None),
    ]
    changes = source.changes()
    assert [(one.number, one.index) for one in changes] == [
        (0, 0), (0, 1), (1, 0), (2, 0), (3, 0), (3, 1), (4, 0), (5, 0)
    ]  # fmt: skip
    assert [one.key for one in changes[2:]] == [{"id": 3}, {"id": 1}, {"id": 1}, {"id": 9}, {"id": 2}, None]
    assert [end.events for end in source.ends()] == [2, 1, 1, 2, 1, 1]
    sequences = [one.headers["semel.change.sequence"] for one in changes]
    assert sequences == sorted(sequences)
    assert len(set(sequences)) == len(sequences)


def test_the_time_of_a_record_is_that_of_the_commit(source: Source) -> None:
    """Also where the capture was not running then."""
    source.make(ACCOUNTS)
    source.capture()
    before_ms = time.time() * 1000
    source.do("INSERT INTO accounts VALUES (1, 'a', 1)")
    after_ms = time.time() * 1000
    time.sleep(0.02)
    source.capture()
    [record] = read_topic(source.bootstrap, source.topic_of("accounts"))
    assert before_ms - 2 <= record.timestamp_ms <= after_ms + 2


def test_rows_that_come_while_a_capture_begins_are_there_once(source: Source) -> None:
    """The snapshot ends exactly where the stream begins: writers go on all the time, with rollbacks."""
    source.make("CREATE TABLE accounts (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, writer int)")
    is_over, stop = threading.Event(), threading.Event()

    def write(number: int) -> None:
        with psycopg.connect(source.address) as connection:
            while not is_over.is_set():
                for _ in range(3):
                    connection.execute("INSERT INTO accounts (writer) VALUES (%s)", [number])
                connection.execute("SAVEPOINT s")
                connection.execute("INSERT INTO accounts (writer) VALUES (-1)")
                connection.execute("ROLLBACK TO s")
                time.sleep(0.002)
                connection.commit()

    writers = [threading.Thread(target=write, args=[number]) for number in range(4)]
    for writer in writers:
        writer.start()
    wait_until(lambda: source.ask("SELECT count(*) FROM accounts") > [(50,)], "rows before the capture")
    running = threading.Thread(target=lambda: source.capture(idle_ms=None, stop=stop))
    running.start()
    wait_until(lambda: len(source.changes()) > 200, "events of stream and snapshot")
    is_over.set()
    for writer in writers:
        writer.join()
    [(count,)] = source.ask("SELECT count(*) FROM accounts")
    wait_until(lambda: len(source.changes()) >= count, "the last rows")
    stop.set()
    running.join()
    changes = source.changes()
    assert Counter(one.value["id"] for one in changes) == Counter(
        number for (number,) in source.ask("SELECT id FROM accounts")
    )
    assert {one.operation for one in changes} == {"snapshot", "insert"}
    assert all(one.value["writer"] >= 0 for one in changes)
    source.ends()


def test_a_table_that_changes_its_columns_is_followed(source: Source) -> None:
    """Each event has the columns of its time, also those that were written before the capture was started again."""
    source.make("CREATE TABLE accounts (id int PRIMARY KEY, owner text)")
    source.capture()
    source.do(
        "INSERT INTO accounts VALUES (1, 'a')",
        "ALTER TABLE accounts ADD COLUMN balance int DEFAULT 5",
        "INSERT INTO accounts VALUES (2, 'b', 6)",
        "ALTER TABLE accounts DROP COLUMN owner, ALTER COLUMN id TYPE bigint",
        "ALTER TABLE accounts RENAME COLUMN balance TO amount",
        "UPDATE accounts SET amount = 7 WHERE id = 1",
    )
    source.capture()
    assert source.whats() == [
        ("insert", {"id": 1, "owner": "a"}),
        ("insert", {"id": 2, "owner": "b", "balance": 6}),
        ("update", {"id": 1, "amount": 7}),
    ]


def test_a_copy_in_another_database_is_equal_value_by_value(source: Source, server: Postgres, tmp_path: Any) -> None:
    """Types of every kind, among them some that nobody has listed, and large values that did not change."""
    create = [
        "CREATE TYPE mood AS ENUM ('fine', 'so so')",
        "CREATE TYPE pair AS (a int, b text)",
        "CREATE DOMAIN small AS int CHECK (value < 1000)",
        "CREATE TABLE accounts (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, n numeric, d double precision, "
        "f real, b boolean, t text, j jsonb, y bytea, at timestamptz, day date, span interval, l int[], u uuid, "
        "m mood, p pair, s small, r int4range, v tsvector, net inet, big text, six int GENERATED ALWAYS AS (6) STORED)",
        "ALTER TABLE accounts ALTER COLUMN big SET STORAGE EXTERNAL",
    ]
    source.make(*create)
    insert = (
        "INSERT INTO accounts (n, d, f, b, t, j, y, at, day, span, l, u, m, p, s, r, v, net, big) VALUES "
        "(0.10000000000000000000000000001, 0.1, 'NaN', true, E'a\\t\"\\\\\\n\u20ac', '{\"a\": [1, null]}', '\\x00ff', "
        "'2026-11-19 01:02:03.000004+05', '0044-03-15 BC', '1 year 2 days', '{1,NULL,3}', "
        "'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', 'so so', '(1,\"x,y\")', 999, '[1,5)', 'a b', '10.0.0.0/8', "
        "repeat('large', 5000))"
    )
    source.do(insert)
    source.capture()
    source.do(
        insert,
        insert,
        "INSERT INTO accounts DEFAULT VALUES",
        "UPDATE accounts SET b = false, f = 'Infinity', n = 'NaN' WHERE id <= 2",
        "UPDATE accounts SET t = NULL, big = 'short' WHERE id = 3",
    )
    source.capture()
    unchanged = [
        one.headers["semel.change.unchanged"] for one in source.changes() if "semel.change.unchanged" in one.headers
    ]
    assert unchanged == ['["big"]', '["big"]']
    target = make_postgres(server)
    target.do(*create)
    source.copy_into(target, source.ends()[-1].transaction)
    source.assert_same(target)


def test_keys_without_a_primary_key_and_of_partitions(source: Source) -> None:
    """The replica identity is the key: an index, or the whole row. Partitions come under their parent's name."""
    source.make(
        "CREATE TABLE by_index (a int NOT NULL, b text); CREATE UNIQUE INDEX i ON by_index (a)",
        "ALTER TABLE by_index REPLICA IDENTITY USING INDEX i",
        "CREATE TABLE whole (a int, b text)",
        "ALTER TABLE whole REPLICA IDENTITY FULL",
        "CREATE TABLE parted (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE parted_2 PARTITION OF parted FOR VALUES FROM (10) TO (20)",
        "INSERT INTO parted VALUES (1)",
        tables=("by_index", "whole", "parted"),
    )
    source.capture()
    source.do(
        "INSERT INTO by_index VALUES (1, 'x')",
        "UPDATE by_index SET b = 'y'",
        "INSERT INTO whole VALUES (1, NULL)",
        "UPDATE whole SET b = 'z'",
        "INSERT INTO parted VALUES (11)",
        "UPDATE parted SET id = 12 WHERE id = 1",
    )
    source.capture()
    assert [one.key for one in source.changes("by_index")] == [{"a": 1}, {"a": 1}]
    assert [(one.operation, one.key) for one in source.changes("whole")] == [
        ("insert", {"a": 1, "b": None}),
        ("delete", {"a": 1, "b": None}),
        ("insert", {"a": 1, "b": "z"}),
    ]
    assert source.whats("parted") == [
        ("snapshot", {"id": 1}),
        ("insert", {"id": 11}),
        ("delete", {"id": 1}),
        ("insert", {"id": 12}),
    ]


def test_a_publication_of_some_columns_and_rows_is_respected_by_the_snapshot_too(source: Source) -> None:
    """What the owner of the tables does not publish leaves the database in no way."""
    source.make(ACCOUNTS, "INSERT INTO accounts VALUES (1, 'secret', 1), (2, 'secret', 200)")
    source.do("CREATE PUBLICATION mine FOR TABLE accounts (id, balance) WHERE (id < 100)")
    source.do("INSERT INTO accounts VALUES (500, 'secret', 1)")
    source.capture(publication="mine")
    source.do("INSERT INTO accounts VALUES (3, 'secret', 3), (600, 'secret', 1)")
    source.capture(publication="mine")
    assert [value for _, value in source.whats()] == [
        {"id": 1, "balance": "1"}, {"id": 2, "balance": "200"}, {"id": 3, "balance": "3"}
    ]  # fmt: skip


def test_events_go_to_topics_by_a_column_of_the_row(source: Source) -> None:
    """A delete tells the column only if the whole row is logged; else the capture refuses to begin."""
    source.make("CREATE TABLE accounts (id int PRIMARY KEY, kind text)")
    for kind in ("cash", "loan"):
        source.create_topic(f"{source.name}-{kind}")
    with pytest.raises(semel.ConfigError, match="REPLICA IDENTITY FULL"):
        source.capture(topic=f"{source.name}-{{kind}}")
    source.do("ALTER TABLE accounts REPLICA IDENTITY FULL")
    source.capture(topic=f"{source.name}-{{kind}}")
    source.do("INSERT INTO accounts VALUES (1, 'cash'), (2, 'loan')", "DELETE FROM accounts WHERE id = 2")
    source.capture(topic=f"{source.name}-{{kind}}")
    found = [len(read_topic(source.bootstrap, f"{source.name}-{kind}")) for kind in ("cash", "loan")]
    assert found == [1, 2]
    assert source.ends()[1].topics == {f"{source.name}-cash": 1, f"{source.name}-loan": 1}


def test_an_outbox_by_its_inserts(source: Source) -> None:
    """Value, key, headers and topic are those of the row; that rows are deleted or changed means nothing."""
    source.do(
        semel.outbox_table_sql()
        .replace("semel_xid xid8 NOT NULL DEFAULT pg_current_xact_id()", "more text")
        .replace('CREATE INDEX ON "outbox" (semel_xid);', "")
    )
    source.do(f"INSERT INTO outbox (topic, key, value) VALUES ('{source.topic}', 'k', 'before')")
    options: dict[str, Any] = {"tables": None, "outbox": "outbox", "topic": None}
    source.capture(**options)
    source.do(
        f"INSERT INTO outbox (topic, key, value, headers, created_at) VALUES ('{source.topic}', 'k', 'one', "
        "'{\"trace\": \"7\"}', '2020-01-01 00:00:00+00')",
        "UPDATE outbox SET value = 'changed'",
        "DELETE FROM outbox",
        "TRUNCATE outbox",
        f"INSERT INTO outbox (topic, key, value) VALUES ('{source.topic}', NULL, NULL)",
    )
    assert source.capture(**options).rows == 2
    records = source.read()
    assert Counter((one.key, one.value) for one in records) == Counter(
        [(b"k", b"before"), (b"k", b"one"), (None, None)]
    )
    [one] = [one for one in records if one.value == b"one"]
    assert dict(one.headers)["trace"] == b"7"
    assert dict(one.headers)["semel.source.transaction"] == b"1"
    assert one.timestamp_ms == 1_577_836_800_000
    assert [end.events for end in source.ends()] == [1, 1, 1]
    source.do(f"INSERT INTO outbox (topic, value) VALUES ('{source.name}.transactions', 'an end that is none')")
    with pytest.raises(semel.RecordFailed, match="takes no events"):
        source.capture(**options)


def test_without_a_snapshot_readers_begin_with_the_first_change(source: Source, server: Postgres) -> None:
    """Transaction 0 is there and has no events."""
    source.make(ACCOUNTS, "INSERT INTO accounts VALUES (1, 'a', 1)")
    source.capture(snapshot=False)
    source.do("INSERT INTO accounts VALUES (2, 'b', 2)")
    source.capture(snapshot=False)
    assert source.whats() == [("insert", {"id": 2, "owner": "b", "balance": "2"})]
    target = make_postgres(server)
    target.do(ACCOUNTS, "INSERT INTO accounts VALUES (1, 'a', 1)")
    source.copy_into(target, 1)
    source.assert_same(target)


def test_a_transaction_larger_than_a_kafka_transaction_is_whole_for_readers(source: Source, server: Postgres) -> None:
    """It is written in parts, and a reader of whole transactions gets it when its end is there."""
    source.make(ACCOUNTS)
    source.capture()
    source.do(
        "INSERT INTO accounts SELECT n, 'x', n FROM generate_series(1, 5000) n", "DELETE FROM accounts WHERE id > 9"
    )
    report = source.capture(transaction_rows_max=300)
    assert report.rows == 5000 + 4991
    assert report.transactions > 30
    assert [end.events for end in source.ends()] == [0, 5000, 4991]
    target = make_postgres(server)
    target.do(ACCOUNTS)
    source.copy_into(target, 2)
    source.assert_same(target)


def test_a_change_is_in_kafka_in_less_than_a_second_at_idle(source: Source) -> None:
    """The median of ten, on a busy machine too; the figure is in the docs."""
    source.make(ACCOUNTS)
    stop, ready = threading.Event(), threading.Event()
    running = threading.Thread(target=lambda: source.capture(idle_ms=None, stop=stop, on_ready=ready.set))
    running.start()
    try:
        assert ready.wait(30)
        with (
            semel.Fetcher({"bootstrap.servers": source.bootstrap, "fetch.max.wait.ms": 50}) as fetcher,
            psycopg.connect(source.address, autocommit=True) as connection,
        ):
            places = [semel.TopicPartition(source.topic_of("accounts"), number) for number in range(3)]
            fetcher.assign(dict.fromkeys(places, "earliest"))
            waits: list[float] = []
            for number in range(10):
                since = time.monotonic()
                connection.execute("INSERT INTO accounts VALUES (%s, 'a', 1)", [number])
                wait_until(lambda: any(part.table.num_rows for part in fetcher.fetch(20)), "the event")
                waits.append(time.monotonic() - since)
    finally:
        stop.set()
        running.join()
    print(f"latency: {sorted(waits)}")
    assert sorted(waits)[5] < 1.0
