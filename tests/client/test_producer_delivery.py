"""Without transactions, what `send` took is stored or reported, and one bad record costs no other."""

from __future__ import annotations

import gc
import logging
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

import semel
from semel.errors import ConfigError, InvalidState, RecordTooLarge, RequestTimedOut, UnknownTopic


class Topic:
    """A new topic and what is stored in it."""

    def __init__(self, bootstrap: str, name: str, partitions: int = 2) -> None:
        self.to = {"bootstrap.servers": bootstrap}
        self.name = name
        self._partitions = partitions
        with semel.Admin(self.to) as admin:
            admin.create_topics(name, partitions=partitions)

    def rows(self) -> list[dict[str, Any]]:
        with semel.Fetcher(self.to) as fetcher:
            fetcher.assign({(self.name, index): "earliest" for index in range(self._partitions)})
            tables = fetcher.read_until(fetcher.end_offsets())
            return [row for table in tables for row in table.to_pylist()]

    def values(self) -> list[bytes]:
        return sorted(row["value"] for row in self.rows())

    def wait_values(self, expected: list[bytes], seconds: float = 20.0) -> None:
        wait_until(lambda: self.values() == expected, seconds)


def wait_until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.01)


@pytest.fixture
def topic(semel_broker: semel.Broker, request: pytest.FixtureRequest) -> Topic:
    return Topic(semel_broker.bootstrap, re.sub(r"[^\w.-]", "-", request.node.name)[:200])


@pytest.fixture
def own_broker() -> Iterator[semel.Broker]:
    with semel.Broker(fsync="never") as broker:
        yield broker


# -- close ---------------------------------------------------------------------------------------------------------


def test_close_stores_what_was_sent(topic: Topic) -> None:
    """As with Java and kafka-python: send and close, and the record is there."""
    producer = semel.Producer(topic.to, linger_ms=60_000)
    producer.send(topic.name, b"3")
    producer.close()
    assert topic.values() == [b"3"]


def test_a_closed_producer_takes_nothing_and_can_be_closed_again(topic: Topic) -> None:
    """A record that is sent after close would be lost, so it is refused."""
    producer = semel.Producer(topic.to)
    producer.close()
    producer.close()
    with pytest.raises(InvalidState, match="closed"):
        producer.send(topic.name, b"late")


def test_close_raises_within_the_delivery_timeout_if_the_broker_is_gone(own_broker: semel.Broker) -> None:
    """The exception says how many records are given up, holds them, and the wait is bounded."""
    topic = Topic(own_broker.bootstrap, "gone", 1)
    producer = semel.Producer(topic.to, linger_ms=400, delivery_timeout_ms=1_500, request_timeout_ms=1_000)
    producer.send(topic.name, b"first")
    producer.flush()
    own_broker.stop()
    producer.send(topic.name, b"second")
    producer.send(topic.name, b"third")
    began = time.monotonic()
    with pytest.raises(RequestTimedOut) as caught:
        producer.close()
    assert time.monotonic() - began < 10
    given_up = [row["value"] for one in caught.value.undelivered for row in one.table.to_pylist()]
    assert given_up == [b"second", b"third"]
    assert "2 for gone-0" in str(caught.value.__notes__)


def test_an_exception_in_the_block_does_not_drop_what_was_sent_before_it(topic: Topic) -> None:
    """Without a transaction records that were taken are sent, whatever ends the block."""

    def program() -> None:
        with semel.Producer(topic.to, linger_ms=60_000) as producer:
            producer.send(topic.name, b"1")
            raise RuntimeError("my bug")

    with pytest.raises(RuntimeError, match="my bug"):
        program()
    assert topic.values() == [b"1"]


def test_an_exception_in_the_block_carries_a_note_if_the_flush_fails(own_broker: semel.Broker) -> None:
    """The program's own exception is the one that leaves; what was lost with it stands in a note."""
    topic = Topic(own_broker.bootstrap, "noted", 1)
    settings = {**topic.to, "delivery.timeout.ms": 1_000, "request.timeout.ms": 500}

    def program() -> None:
        with semel.Producer(settings) as producer:
            producer.send(topic.name, b"0")
            producer.flush()
            own_broker.stop()
            producer.send(topic.name, b"1")
            raise RuntimeError("my bug")

    with pytest.raises(RuntimeError, match="my bug") as caught:
        program()
    [note] = caught.value.__notes__
    assert "could not be delivered" in note
    assert "1 for noted-0" in note


def test_close_aborts_an_open_transaction(topic: Topic) -> None:
    """Nothing of it is seen."""
    producer = semel.Producer(topic.to, transactional_id=topic.name)
    producer.begin()
    producer.send(topic.name, b"1")
    producer.close()
    assert topic.values() == []


# -- left open -----------------------------------------------------------------------------------------------------


def test_a_forgotten_producer_reports_what_it_never_sent(topic: Topic, caplog: pytest.LogCaptureFixture) -> None:
    """A ResourceWarning and an error in the log, with the number of records; and its thread ends."""

    def use() -> None:
        producer = semel.Producer(topic.to, linger_ms=60_000)
        producer.send(topic.name, b"1")
        producer.send(topic.name, b"2")
        producer.cluster.close()

    def forget() -> None:
        use()
        gc.collect()

    with caplog.at_level(logging.ERROR, "semel.client"), pytest.warns(ResourceWarning, match="2 records were never"):
        forget()
    assert "2 records were never sent" in caplog.text
    wait_until(lambda: not any(thread.name == "semel-linger" for thread in threading.enumerate()))


@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)", "1 / 0"])
def test_a_program_that_forgets_to_close_still_sends_what_it_took(topic: Topic, ending: str) -> None:
    """The records are flushed when the interpreter exits, also after an uncaught exception."""
    program = f"""
import semel
producer = semel.Producer({topic.to!r}, linger_ms=60_000)
for number in range(10):
    producer.send({topic.name!r}, b"%d" % number)
{ending}
"""
    subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
    assert topic.values() == [b"%d" % number for number in range(10)]


def test_a_program_that_ends_without_its_broker_says_how_many_records_are_lost(own_broker: semel.Broker) -> None:
    """The last chance to learn of it is the log."""
    topic = Topic(own_broker.bootstrap, "lost", 1)
    program = f"""
import sys, semel
producer = semel.Producer({topic.to!r}, linger_ms=50_000, request_timeout_ms=1_000, delivery_timeout_ms=51_000)
for number in range(7):
    producer.send("lost", b"%d" % number)
print("ready", flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-W", "always", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    own_broker.stop()
    _, errors = process.communicate("", timeout=60)
    assert re.search("7 (records were never sent|were sent without an answer)", errors)
    assert "ResourceWarning" in errors


def test_a_program_ends_though_one_of_its_threads_waits_in_flush(own_broker: semel.Broker) -> None:
    """The flush at exit is bounded, also while another thread holds the producer for all of `delivery.timeout.ms`."""
    topic = Topic(own_broker.bootstrap, "busy", 1)
    program = f"""
import threading, semel
from semel.client import left_open
left_open.EXIT_FLUSH_MS = 500
producer = semel.Producer({topic.to!r}, delivery_timeout_ms=120_000)
producer.send({topic.name!r}, b"stored")
producer.flush()
print("ready", flush=True)
input()
producer.send({topic.name!r}, b"lost")
thread = threading.Thread(target=producer.flush, daemon=True)
thread.start()
while producer._lock.acquire(blocking=False):
    producer._lock.release()
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        own_broker.kill()
        began = time.monotonic()
        try:
            _, said = process.communicate(b"\n", timeout=30)
        finally:
            process.kill()
    assert time.monotonic() - began < 20
    assert b"1 records were" in said or b"1 were sent without an answer" in said, said


# -- linger --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"linger.ms": 0}, {"linger.ms": 50}])
def test_a_single_record_leaves_without_another_call(topic: Topic, settings: dict[str, object]) -> None:
    """A service that sends a record a second is seen at once; so is the last record of a burst."""
    with semel.Producer({**topic.to, **settings}) as producer:
        for number in range(3):
            producer.send(topic.name, b"%d" % number)
        topic.wait_values([b"0", b"1", b"2"])
        producer.send(topic.name, b"3")
        topic.wait_values([b"0", b"1", b"2", b"3"])
        assert sum(one.record_count for one in producer.flush()) == 4


def test_records_wait_for_linger_and_leave_together(topic: Topic) -> None:
    """A long linger makes large batches: nothing leaves before `flush`, and then all of it in one batch."""
    with semel.Producer(topic.to, linger_ms=60_000) as producer:
        for number in range(100):
            producer.send(topic.name, b"%d" % number, partition=0)
        assert topic.values() == []
        assert [one.record_count for one in producer.flush()] == [100]


def test_a_transaction_keeps_its_records_until_a_batch_is_full_or_it_commits(topic: Topic) -> None:
    """Transactions batch by themselves, and have no thread."""
    before = set(threading.enumerate())
    with semel.Producer(topic.to, transactional_id=topic.name) as producer, producer.transaction():
        for number in range(100):
            producer.send(topic.name, b"%d" % number, partition=0)
        assert set(threading.enumerate()) == before
        assert [one.record_count for one in producer.flush()] == [100]


def test_a_table_of_many_batches_is_stored_without_another_call(topic: Topic) -> None:
    """Only the first batch of a partition leaves within the call; the others follow once it is answered."""
    table = pa.table({"value": [b"%09d" % number * 100 for number in range(4_000)]})
    with semel.Producer(topic.to) as producer:
        producer.send_table(topic.name, table, partition=0)
        wait_until(lambda: len(topic.rows()) == 4_000)


def test_records_are_sent_again_in_the_background_when_the_broker_returns(own_broker: semel.Broker) -> None:
    """A restart of the broker costs no record, and `send` does not block meanwhile."""
    topic = Topic(own_broker.bootstrap, "again", 1)
    with semel.Producer(topic.to) as producer:
        producer.send(topic.name, b"0")
        topic.wait_values([b"0"])
        own_broker.kill()
        began = time.monotonic()
        for number in range(1, 5):
            producer.send(topic.name, b"%d" % number)
        assert time.monotonic() - began < 2
        own_broker.start()
        topic.wait_values([b"%d" % number for number in range(5)])


def test_a_failure_in_the_background_is_logged_and_raised_by_flush(
    topic: Topic, caplog: pytest.LogCaptureFixture
) -> None:
    """A topic that is deleted under way: the log says it at once, and flush names the records that were given up."""
    with semel.Producer(topic.to) as producer:
        producer.send(topic.name, b"0", partition=1)
        producer.flush()
        with semel.Admin(topic.to) as admin:
            admin.delete_topics(topic.name)
        with caplog.at_level(logging.ERROR, "semel.client"):
            producer.send(topic.name, b"given up", partition=1, key=b"k")
            wait_until(lambda: "1 records were given up" in caplog.text)
        with pytest.raises(UnknownTopic) as caught:
            producer.flush()
        [given_up] = caught.value.undelivered
        assert (given_up.topic, given_up.partition) == (topic.name, 1)
        assert [(row["key"], row["value"]) for row in given_up.table.to_pylist()] == [(b"k", b"given up")]
        assert producer.flush() == []


def test_an_idle_producer_is_not_kept_by_its_thread(topic: Topic) -> None:
    """A producer that nobody holds any more is collected, although its thread once ran."""

    def use() -> weakref.ref[semel.Producer]:
        producer = semel.Producer(topic.to)
        producer.send(topic.name, b"1")
        wait_until(lambda: topic.values() == [b"1"] and producer.unsent == (0, 0))
        producer.cluster.close()
        return weakref.ref(producer)

    forgotten = use()
    wait_until(lambda: gc.collect() >= 0 and forgotten() is None)


# -- one bad record ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "bad"),
    [
        (ConfigError, {"value": 5}),
        (ConfigError, {"value": {"a": 1}}),
        (ConfigError, {"value": b"", "key": 5}),
        (ConfigError, {"value": b"", "partition": 9}),
        (ConfigError, {"value": b"", "partition": -1}),
        (ConfigError, {"value": b"", "partition": "0"}),
        (ConfigError, {"value": b"", "timestamp_ms": 1.5}),
        (ConfigError, {"value": b"", "headers": ["a"]}),
        (ConfigError, {"value": b"", "headers": [("a", 5)]}),
        (ConfigError, {"value": b"", "headers": [(b"a", b"b")]}),
        (ConfigError, {"value": "\ud800"}),
        (ConfigError, {"value": b"", "topic": None}),
        (RecordTooLarge, {"value": b"x" * 2_000_000}),
        (RecordTooLarge, {"value": b"", "headers": [("a", b"x" * 2_000_000)]}),
        (UnknownTopic, {"value": b"", "topic": "no-such-topic"}),
    ],
)
def test_a_bad_record_is_refused_by_send_and_takes_no_other_with_it(
    topic: Topic, error: type[Exception], bad: dict[str, Any]
) -> None:
    """Type, size, topic and partition are checked before the record is taken; those around it are stored."""
    with semel.Producer(topic.to, linger_ms=60_000) as producer:
        producer.send(topic.name, b"before")
        with pytest.raises(error):
            producer.send(**({"topic": topic.name} | bad))  # pyright: ignore[reportArgumentType]
        producer.send(topic.name, b"behind")
        assert sum(one.record_count for one in producer.flush()) == 2
    assert topic.values() == [b"before", b"behind"]


def test_a_table_with_one_row_too_large_is_refused_whole(topic: Topic) -> None:
    """No half of a table is stored, whatever partition the row belongs to."""
    table = pa.table({"value": [b"a", b"b", b"x" * 2_000_000], "partition": [0, 0, 1]})
    with semel.Producer(topic.to) as producer:
        producer.send(topic.name, b"before")
        with pytest.raises(RecordTooLarge):
            producer.send_table(topic.name, table)
    assert topic.values() == [b"before"]


def test_headers_may_be_a_mapping_or_pairs_and_text_is_utf8(topic: Topic) -> None:
    """confluent's two forms of headers, and strings as confluent takes them."""
    with semel.Producer(topic.to) as producer:
        producer.send(topic.name, "é", key="k", headers={"a": b"b"}, partition=0)
        producer.send(topic.name, bytearray(b"v"), headers=[("a", None), ["b", "text"]], partition=0)  # pyright: ignore
    with semel.Fetcher(topic.to) as fetcher:
        fetcher.assign({(topic.name, 0): "earliest"})
        rows = [row for table in fetcher.read_until(fetcher.end_offsets()) for row in table.to_pylist()]
    assert [(row["value"], row["key"]) for row in rows] == [("é".encode(), b"k"), (b"v", None)]
    assert [[(header["key"], header["value"]) for header in row["headers"]] for row in rows] == [
        [("a", b"b")],
        [("a", None), ("b", b"text")],
    ]


def test_a_refused_record_dooms_its_transaction_and_the_next_call_says_so(topic: Topic) -> None:
    """All or nothing: the message names the first failure and says what to do."""
    with semel.Producer(topic.to, transactional_id=topic.name) as producer:
        producer.begin()
        producer.send(topic.name, b"good")
        with pytest.raises(ConfigError):
            producer.send(topic.name, 5)  # pyright: ignore[reportArgumentType]
        with pytest.raises(InvalidState) as caught:
            producer.send(topic.name, b"good")
        producer.abort()
    message = str(caught.value)
    assert "can only be aborted" in message
    assert "of type int" in message
    assert "Begin a transaction" not in message
    assert topic.values() == []
