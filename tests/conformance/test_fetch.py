"""The fetcher against real brokers, with records written by librdkafka."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import confluent_kafka
import pytest
from targets import KafkaUnderTest, NewTopic

from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.fetcher import Fetcher, find_marker
from semel.client.producer import Producer
from semel.client.settings import parse_config
from semel.errors import OffsetOutOfRange, RequestTimedOut, UnknownTopic
from semel.testing.apache_kafka import ApacheKafka

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
COMPACTION_PATIENCE_S = 60.0


def producer(kafka: KafkaUnderTest, **settings: Any) -> confluent_kafka.Producer:
    named = {name.replace("_", "."): value for name, value in settings.items()}
    # Without idempotence a retry, such as at a topic that is only just there, changes the order of the records.
    common = {"bootstrap.servers": kafka.bootstrap, "linger.ms": 5, "enable.idempotence": True}
    return confluent_kafka.Producer({**common, **named})


def write(kafka: KafkaUnderTest, topic: str, values: Iterable[bytes], partition: int = 0, **settings: Any) -> None:
    writer = producer(kafka, **settings)
    for value in values:
        writer.produce(topic, value, partition=partition)
    assert writer.flush(30) == 0


def begin(kafka: KafkaUnderTest) -> confluent_kafka.Producer:
    """A transactional producer with an id of its own, its first transaction begun."""
    writer = producer(kafka, transactional_id=f"id-{uuid.uuid4().hex[:12]}")
    writer.init_transactions(30)
    writer.begin_transaction()
    return writer


def add(writer: confluent_kafka.Producer, topic: str, *values: bytes) -> None:
    for value in values:
        writer.produce(topic, value, partition=0)
    assert writer.flush(30) == 0


def fetcher_for(kafka: KafkaUnderTest, isolation: str = "read_committed", **options: Any) -> Fetcher:
    return Fetcher({"bootstrap.servers": kafka.bootstrap, "isolation.level": isolation}, **options)


def read_to_end(fetcher: Fetcher) -> list[dict[str, Any]]:
    return [row for table in fetcher.read_until(fetcher.end_offsets(), stall_ms=20_000) for row in table.to_pylist()]


def values_to_end(kafka: KafkaUnderTest, topic: str, isolation: str = "read_committed") -> list[bytes]:
    with fetcher_for(kafka, isolation) as fetcher:
        fetcher.assign({(topic, 0): "earliest"})
        return [row["value"] for row in read_to_end(fetcher)]


def end_in_log(kafka: KafkaUnderTest, topic: str, end: Callable[[float], None]) -> None:
    """End a transaction and wait for its marker: the broker answers before it writes it."""
    with fetcher_for(kafka, "read_uncommitted") as fetcher:
        fetcher.assign({(topic, 0): "earliest"})
        before = fetcher.end_offsets()
        end(30)
        wait_until(lambda: fetcher.end_offsets() != before, time.monotonic() + 30)


def interleaved_transactions(kafka: KafkaUnderTest, topic: str) -> confluent_kafka.Producer:
    """Two transactions across each other, one aborted and one committed; then an open one, which is returned."""
    first, second = begin(kafka), begin(kafka)
    add(first, topic, b"aborted-1")
    add(second, topic, b"committed-1")
    add(first, topic, b"aborted-2")
    write(kafka, topic, [b"plain"])
    end_in_log(kafka, topic, first.abort_transaction)
    add(second, topic, b"committed-2")
    end_in_log(kafka, topic, second.commit_transaction)
    first.begin_transaction()
    add(first, topic, b"committed-3")
    end_in_log(kafka, topic, first.commit_transaction)
    last = begin(kafka)
    add(last, topic, b"open")
    write(kafka, topic, [b"after"])
    return last


def test_read_committed_shows_committed_records_up_to_the_last_stable_offset(
    kafka: KafkaUnderTest, new_topic: NewTopic
) -> None:
    """Aborted records are left out, and nothing from the open transaction on is seen, not even plain records."""
    topic = new_topic()
    still_open = interleaved_transactions(kafka, topic)

    assert values_to_end(kafka, topic) == [b"committed-1", b"plain", b"committed-2", b"committed-3"]

    end_in_log(kafka, topic, still_open.abort_transaction)
    assert values_to_end(kafka, topic) == [b"committed-1", b"plain", b"committed-2", b"committed-3", b"after"]


def test_read_uncommitted_shows_every_record(kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
    """All but the markers, in the order of the log."""
    topic = new_topic()
    still_open = interleaved_transactions(kafka, topic)

    assert values_to_end(kafka, topic, "read_uncommitted") == [
        b"aborted-1",
        b"committed-1",
        b"aborted-2",
        b"plain",
        b"committed-2",
        b"committed-3",
        b"open",
        b"after",
    ]
    end_in_log(kafka, topic, still_open.abort_transaction)


def test_reading_from_every_offset_shows_the_rest(kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
    """Also a start inside an aborted transaction hides its remaining records: the broker names it still."""
    topic = new_topic()
    end_in_log(kafka, topic, interleaved_transactions(kafka, topic).abort_transaction)
    with fetcher_for(kafka) as fetcher:
        fetcher.assign({(topic, 0): "earliest"})
        everything = [(row["offset"], row["value"]) for row in read_to_end(fetcher)]
        [end] = fetcher.end_offsets().values()

        for start in range(end):
            fetcher.seek(topic, 0, start)
            rows = [(row["offset"], row["value"]) for row in read_to_end(fetcher)]
            assert rows == [(offset, value) for offset, value in everything if offset >= start]


def test_markers_come_on_request(kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
    """Each transaction's end is told with its producer and place, and stands behind its records."""
    topic = new_topic()
    end_in_log(kafka, topic, interleaved_transactions(kafka, topic).abort_transaction)
    with fetcher_for(kafka, include_markers=True) as fetcher:
        fetcher.assign({(topic, 0): "earliest"})
        [end] = fetcher.end_offsets().values()
        markers, position = [], 0
        while position < end:
            [records] = fetcher.fetch(10_000)
            markers += records.markers
            position = records.next_offset

    assert [marker.kind for marker in markers] == ["abort", "commit", "commit", "abort"]
    assert markers[0].producer_id == markers[2].producer_id != markers[1].producer_id
    assert [marker.offset for marker in markers] == sorted(marker.offset for marker in markers)


def test_watermarks_come_with_the_records(kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
    """High watermark, last stable offset and the beginning of the log, while a transaction is open."""
    topic = new_topic()
    write(kafka, topic, [b"0", b"1", b"2"])
    still_open = begin(kafka)
    add(still_open, topic, b"3", b"4")
    with Admin({"bootstrap.servers": kafka.bootstrap}) as admin:
        admin.delete_records({(topic, 0): 1})
    with fetcher_for(kafka) as fetcher:
        fetcher.assign({(topic, 0): "earliest"})
        [records] = fetcher.fetch(10_000)

        assert records.table["offset"].to_pylist() == [1, 2]
        assert (records.log_start_offset, records.last_stable_offset, records.high_watermark) == (1, 3, 5)
        assert fetcher.offsets_for([(topic, 0)], "latest") == {(topic, 0): 3}
        assert fetcher.fetch(300) == []
    with fetcher_for(kafka, "read_uncommitted") as fetcher:
        assert fetcher.offsets_for([(topic, 0)], "latest") == {(topic, 0): 5}
        assert fetcher.offsets_for([(topic, 0)], "earliest") == {(topic, 0): 1}
    still_open.abort_transaction(30)


def test_an_end_behind_an_open_transaction_stalls_with_a_reason(kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
    """A batch reader that was given the end of the log hears that a transaction is in the way."""
    topic = new_topic()
    still_open = begin(kafka)
    add(still_open, topic, b"open")
    with fetcher_for(kafka) as fetcher:
        fetcher.assign({(topic, 0): 0})

        with pytest.raises(RequestTimedOut, match="can go up to 0 now"):
            list(fetcher.read_until({(topic, 0): 1}, stall_ms=700))
    still_open.abort_transaction(30)


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_is_read(codec: str, kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
    """Keys, values, headers and timestamps as written, and nulls as nulls, with each compression."""
    topic = new_topic()
    writer = producer(kafka, compression_type=codec)
    now_ms = int(time.time() * 1000)
    for number in range(500):
        key = None if number % 3 == 0 else b"key-%d" % number
        value = None if number % 7 == 0 else b"value " * (number % 20)
        headers = [("a", b"1"), ("b", None), ("a", b"")] if number % 2 else None
        writer.produce(topic, value, key, partition=0, timestamp=now_ms + number, headers=headers)
    assert writer.flush(30) == 0

    with fetcher_for(kafka) as fetcher:
        fetcher.assign({(topic, 0): "earliest"})
        rows = read_to_end(fetcher)

    assert [row["offset"] for row in rows] == list(range(500))
    assert {(row["topic"], row["partition"], row["timestampType"]) for row in rows} == {(topic, 0, 0)}
    for number, row in enumerate(rows):
        assert row["key"] == (None if number % 3 == 0 else b"key-%d" % number)
        assert row["value"] == (None if number % 7 == 0 else b"value " * (number % 20))
        assert int(row["timestamp"].timestamp() * 1000 + 0.5) == now_ms + number
        expected = [("a", b"1"), ("b", None), ("a", b"")] if number % 2 else []
        assert [(header["key"], header["value"]) for header in row["headers"] or []] == expected


def test_a_start_and_an_end_within_a_batch_are_exact(kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
    """One batch of 100 records, of which 37 to 61 are wanted; the rest follows on the next read."""
    topic = new_topic()
    write(kafka, topic, [b"%d" % number for number in range(100)], linger_ms=500)
    with fetcher_for(kafka) as fetcher:
        fetcher.assign({(topic, 0): 37})
        first = [row["offset"] for table in fetcher.read_until({(topic, 0): 62}) for row in table.to_pylist()]
        rest = [row["offset"] for row in read_to_end(fetcher)]

    assert first == list(range(37, 62))
    assert rest == list(range(62, 100))


def test_many_partitions_are_read_each_in_order(kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
    """Thirty partitions with responses far smaller than the data: everything once, in order within each partition."""
    topic = new_topic(partitions=30)
    writer = producer(kafka)
    for number in range(30 * 200):
        writer.produce(topic, b"%06d" % number * 20, partition=number % 30)
    assert writer.flush(30) == 0
    settings = {
        "bootstrap.servers": kafka.bootstrap,
        "fetch.max.bytes": 50_000,
        "max.partition.fetch.bytes": 10_000,
    }
    with Fetcher(settings) as fetcher:
        fetcher.assign({(topic, partition): "earliest" for partition in range(30)})
        rows = read_to_end(fetcher)

    assert len(rows) == 30 * 200
    for partition in range(30):
        mine = [(row["offset"], int(row["value"][:6])) for row in rows if row["partition"] == partition]
        assert mine == [(number, number * 30 + partition) for number in range(200)]


def test_a_batch_over_every_limit_is_read(kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
    """Batches of 600 kB pass through limits of 1 kB, in both partitions."""
    topic = new_topic(partitions=2)
    values = [bytes([number]) * 600_000 for number in range(3)]
    for partition in range(2):
        write(kafka, topic, values, partition)
    settings = {"bootstrap.servers": kafka.bootstrap, "fetch.max.bytes": 1_000, "max.partition.fetch.bytes": 1_000}
    with Fetcher(settings) as fetcher:
        fetcher.assign({(topic, 0): "earliest", (topic, 1): "earliest"})
        rows = read_to_end(fetcher)

    for partition in range(2):
        assert [row["value"] for row in rows if row["partition"] == partition] == values


def test_gaps_of_compaction_are_stepped_over(kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
    """Where compaction took records the position still moves, and what is left is read once."""
    config = {"cleanup.policy": "compact", "segment.bytes": "1048576", "min.cleanable.dirty.ratio": "0.001"}
    topic = new_topic(config=config)
    writer = producer(kafka, batch_size=300_000)
    for number in range(30):
        writer.produce(topic, bytes([number]) * 100_000, b"key-%d" % (number % 2), partition=0)
    assert writer.flush(30) == 0

    def offsets() -> list[int]:
        with fetcher_for(kafka) as fetcher:
            fetcher.assign({(topic, 0): "earliest"})
            rows = read_to_end(fetcher)
            assert fetcher.positions == {(topic, 0): 30}
            assert all(row["value"][0] == row["offset"] for row in rows)
            return [row["offset"] for row in rows]

    deadline = time.monotonic() + COMPACTION_PATIENCE_S
    wait_until(lambda: len(offsets()) < 30, deadline)

    assert offsets()[-1] == 29


def wait_until(is_true: Callable[[], bool], deadline: float) -> None:
    while not is_true():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


def test_a_position_beyond_the_log_is_an_error_or_reset(kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
    """By default nothing is skipped silently; with auto.offset.reset reading goes on from there."""
    topic = new_topic()
    write(kafka, topic, [b"0", b"1"])
    with fetcher_for(kafka) as fetcher:
        fetcher.assign({(topic, 0): 50})
        with pytest.raises(OffsetOutOfRange, match=f"{topic}' partition 0 .offset 50"):
            fetcher.fetch(10_000)
    with Fetcher({"bootstrap.servers": kafka.bootstrap, "auto.offset.reset": "earliest"}) as fetcher:
        fetcher.assign({(topic, 0): 50})
        [records] = fetcher.fetch(10_000)
        assert records.table["offset"].to_pylist() == [0, 1]


@pytest.mark.parametrize("position", [0, "earliest"])
def test_a_topic_that_is_not_there_is_named(position: Any, kafka: KafkaUnderTest) -> None:
    """UnknownTopic with the name, whether the position has to be asked for or not."""

    def assign_and_fetch(fetcher: Fetcher) -> None:
        fetcher.assign({("no-such-topic", 0): position})
        fetcher.fetch(10_000)

    with fetcher_for(kafka) as fetcher, pytest.raises(UnknownTopic, match="no-such-topic"):
        assign_and_fetch(fetcher)


def test_a_partition_that_is_not_there_is_named(kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
    """UnknownTopic with how many partitions there are."""
    topic = new_topic(partitions=2)
    with fetcher_for(kafka) as fetcher, pytest.raises(UnknownTopic, match="2 partitions and none numbered 5"):
        fetcher.assign({(topic, 5): "latest"})


def test_offsets_are_found_by_time(kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
    """The first record of a time or later, and None where there is none."""
    topic = new_topic()
    start_ms = int(time.time() * 1000) - 60_000
    writer = producer(kafka)
    for number in range(3):
        writer.produce(topic, b"", partition=0, timestamp=start_ms + number * 1_000)
    assert writer.flush(30) == 0

    with fetcher_for(kafka) as fetcher:
        assert fetcher.offsets_for([(topic, 0)], start_ms + 500) == {(topic, 0): 1}
        assert fetcher.offsets_for([(topic, 0)], start_ms) == {(topic, 0): 0}
        assert fetcher.offsets_for([(topic, 0)], start_ms + 60_000) == {(topic, 0): None}


def test_records_written_while_waiting_arrive_at_once(kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
    """A fetch at the end of the log returns when something is written, well before its time is over."""
    topic = new_topic()
    with fetcher_for(kafka) as fetcher:
        fetcher.assign({(topic, 0): "latest"})
        assert fetcher.fetch(200) == []
        writing = threading.Timer(0.3, write, (kafka, topic, [b"new"]))
        writing.start()
        started = time.monotonic()
        [records] = fetcher.fetch(20_000)
        waited = time.monotonic() - started
        writing.join()

    assert records.table["value"].to_pylist() == [b"new"]
    assert waited < 10


def test_the_end_of_a_transaction_is_found_when_it_comes(kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
    """find_marker waits for a commit under way, and tells commits from aborts."""
    topic = new_topic()
    with (
        Producer(bootstrap_servers=kafka.bootstrap, transactional_id=topic) as writer,
        Cluster(parse_config({"bootstrap.servers": kafka.bootstrap}).client) as cluster,
    ):
        writer.begin()
        writer.send(topic, b"first", partition=0)
        writer.flush()
        producer_id = writer.identity.producer_id
        assert find_marker(cluster, topic, 0, producer_id, 0, timeout_ms=300) is None
        committing = threading.Timer(0.3, writer.commit)
        committing.start()
        committed = find_marker(cluster, topic, 0, producer_id, 0, timeout_ms=20_000)
        committing.join()
        assert committed is not None
        assert (committed.kind, committed.offset) == ("commit", 1)

        writer.begin()
        writer.send(topic, b"second", partition=0)
        writer.flush()
        writer.abort()
        aborted = find_marker(cluster, topic, 0, producer_id, 2, timeout_ms=20_000)
        assert aborted is not None
        assert (aborted.kind, aborted.offset) == ("abort", 3)


def test_reading_goes_on_when_a_leader_dies(kafka_cluster: ApacheKafka, new_topic: NewTopic) -> None:
    """Three brokers, one killed in the middle of reading: every record comes once and in order."""
    topic = new_topic(partitions=6, replication=3)
    total = 3_000
    first_half = [(number, number % 6) for number in range(total // 2)]
    second_half = [(number, number % 6) for number in range(total // 2, total)]

    def write_numbers(numbers: list[tuple[int, int]]) -> None:
        writer = producer(kafka_cluster, acks="all")
        for number, partition in numbers:
            writer.produce(topic, b"%d" % number, partition=partition)
        assert writer.flush(60) == 0

    write_numbers(first_half)
    with Fetcher({"bootstrap.servers": kafka_cluster.bootstrap, "max.partition.fetch.bytes": 2_000}) as fetcher:
        fetcher.assign({(topic, partition): "earliest" for partition in range(6)})
        rows = fetcher.read(10_000).to_pylist()
        with Admin({"bootstrap.servers": kafka_cluster.bootstrap}) as admin:
            victim = kafka_cluster.node(admin.describe_topics(topic)[topic].partitions[0].leader)
        victim.kill()
        try:
            ends = {(topic, partition): total // 2 // 6 for partition in range(6)}
            for table in fetcher.read_until(ends, stall_ms=60_000):
                rows += table.to_pylist()
            write_numbers(second_half)
            rows += read_to_end(fetcher)
        finally:
            victim.start()

    for partition in range(6):
        mine = [(row["offset"], int(row["value"])) for row in rows if row["partition"] == partition]
        assert mine == [(number, number * 6 + partition) for number in range(total // 6)]
