"""Producing and reading against a real broker: Semel from and to Arrow, beside confluent-kafka record by record.

Apache Kafka is started from Maven coordinates (Java 17+ and `mvn`), or taken from SEMEL_BENCH_BOOTSTRAP where that is
set. Both clients write the same million values in transactions of 50,000 and read them back as `read_committed`; they
take turns, and the best turn of each counts, because the machine's other work only ever slows one down.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import pyarrow as pa
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka import Producer as ConfluentProducer

from semel.bench.report import Bar, Row, Section
from semel.client.admin import Admin
from semel.client.fetcher import Fetcher
from semel.client.producer import Producer
from semel.testing.apache_kafka import FULL_SPEED, LATEST, ApacheKafka

RECORDS = 1_000_000
VALUE_BYTES = 100
TRANSACTION_RECORDS = 50_000
PARTITIONS = 4
ROUNDS = 3
WARM_UP_RECORDS = 100_000
# librdkafka stops fetching a partition for a second (fetch.queue.backoff.ms) once queued.min.messages are waiting.
QUICK_FETCHES: Final = {"fetch.queue.backoff.ms": 5, "fetch.message.max.bytes": 8_388_608}
LARGE_BATCHES: Final = {
    "linger.ms": 5,
    "batch.size": 1_000_000,
    "batch.num.messages": 1_000_000,
    "queue.buffering.max.messages": 1_000_000,
}


def run(records: int = RECORDS, rounds: int = ROUNDS) -> Section:
    """The section `client` of `semel bench`."""
    values = [os.urandom(VALUE_BYTES // 2).hex().encode() for _ in range(records)]
    table = pa.table({"value": values})
    written: dict[str, float] = {}
    read: dict[str, float] = {}
    with kafka_to_measure() as (bootstrap, broker):
        _produce_semel(bootstrap, new_topic(bootstrap, "warm"), table.slice(0, WARM_UP_RECORDS))
        for turn in range(rounds):
            topic = new_topic(bootstrap, f"semel-{turn}")
            keep_best(written, "semel", _produce_semel(bootstrap, topic, table))
            other = new_topic(bootstrap, f"confluent-{turn}")
            keep_best(written, "confluent", _produce_confluent(bootstrap, other, values))
            batched = new_topic(bootstrap, f"confluent-batched-{turn}")
            keep_best(written, "confluent", _produce_confluent_batched(bootstrap, batched, values))
            keep_best(read, "semel", _read_semel(bootstrap, topic, records))
            keep_best(read, "confluent", _read_confluent(bootstrap, topic, records))

    def row(case: str, seconds: dict[str, float]) -> Row:
        semel, confluent = (seconds[name] / records * 1e9 for name in ("semel", "confluent"))
        return Row(case, (semel, confluent, confluent / semel))

    rows = (row("produce in transactions", written), row("read committed", read))
    return Section(
        name="client",
        timed=f"ns a record, {records:,} values of {VALUE_BYTES} B on {PARTITIONS} partitions, best of {rounds} turns",
        columns=("semel", "confluent-kafka", "times as fast"),
        rows=rows,
        bars=(
            Bar("produce against confluent-kafka's transactional producer", 1.0, rows[0].figures[2]),
            Bar("read into Arrow against a confluent-kafka consume loop", 3.0, rows[1].figures[2]),
        ),
        notes=(
            f"{broker}, same machine; transactions of {TRANSACTION_RECORDS:,}; no compression",
            f"confluent-kafka: the better of produce and produce_batch; {settings_line(QUICK_FETCHES | LARGE_BATCHES)}",
        ),
    )


def settings_line(settings: Mapping[str, int]) -> str:
    """
    >>> settings_line({"linger.ms": 5, "batch.size": 1000})
    'linger.ms=5, batch.size=1000'
    """
    return ", ".join(f"{name}={value}" for name, value in settings.items())


@contextmanager
def kafka_to_measure() -> Iterator[tuple[str, str]]:
    """Where it is, and what it is called."""
    running = os.environ.get("SEMEL_BENCH_BOOTSTRAP")
    if running:
        yield running, f"the broker at {running}"
        return
    # What a benchmark has done with is to be gone at once, and not in a minute.
    with ApacheKafka(LATEST, jvm=FULL_SPEED, config={"log.segment.delete.delay.ms": "0"}) as kafka:
        yield kafka.bootstrap, f"Apache Kafka {LATEST}, one node"


def new_topic(bootstrap: str, name: str) -> str:
    topic = f"bench-{name}-{time.time_ns()}"
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.create_topics(topic, partitions=PARTITIONS)
    return topic


def keep_best(best: dict[str, float], name: str, seconds: float) -> None:
    best[name] = min(seconds, best.get(name, seconds))


def _produce_semel(bootstrap: str, topic: str, table: pa.Table) -> float:
    with Producer(bootstrap_servers=bootstrap, transactional_id=f"{topic}-writer") as producer:
        started = time.perf_counter()
        for first in range(0, table.num_rows, TRANSACTION_RECORDS):
            with producer.transaction():
                producer.send_table(topic, table.slice(first, TRANSACTION_RECORDS))
        return time.perf_counter() - started


def _produce_confluent(bootstrap: str, topic: str, values: list[bytes]) -> float:
    producer = _confluent_producer(bootstrap, topic)
    started = time.perf_counter()
    for first in range(0, len(values), TRANSACTION_RECORDS):
        producer.begin_transaction()
        for value in values[first : first + TRANSACTION_RECORDS]:
            producer.produce(topic, value)
        producer.commit_transaction()
    return time.perf_counter() - started


def _produce_confluent_batched(bootstrap: str, topic: str, values: list[bytes]) -> float:
    producer: Any = _confluent_producer(bootstrap, topic)
    started = time.perf_counter()
    for first in range(0, len(values), TRANSACTION_RECORDS):
        producer.begin_transaction()
        portion = values[first : first + TRANSACTION_RECORDS]
        _check(producer.produce_batch(topic, [{"value": value} for value in portion]), len(portion))
        producer.commit_transaction()
    return time.perf_counter() - started


def _confluent_producer(bootstrap: str, topic: str) -> ConfluentProducer:
    settings: dict[str, Any] = {"bootstrap.servers": bootstrap, "transactional.id": f"{topic}-writer", **LARGE_BATCHES}
    producer = ConfluentProducer(settings)
    producer.init_transactions()
    return producer


def _read_semel(bootstrap: str, topic: str, records: int) -> float:
    with Fetcher({"bootstrap.servers": bootstrap}) as fetcher:
        started = time.perf_counter()
        fetcher.assign({(topic, partition): 0 for partition in range(PARTITIONS)})
        count = sum(table.num_rows for table in fetcher.read_until(fetcher.end_offsets()))
        seconds = time.perf_counter() - started
    _check(count, records)
    return seconds


def _read_confluent(bootstrap: str, topic: str, records: int) -> float:
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"{topic}-reader",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            **QUICK_FETCHES,
        }
    )
    try:
        started = time.perf_counter()
        consumer.assign([TopicPartition(topic, partition, 0) for partition in range(PARTITIONS)])
        count = 0
        while count < records:
            for message in consumer.consume(min(5_000, records - count), timeout=10):
                # What a table of the same columns would need of each record.
                _ = message.value(), message.key(), message.offset(), message.partition(), message.timestamp()
                count += 1
        seconds = time.perf_counter() - started
    finally:
        consumer.close()
    _check(count, records)
    return seconds


def _check(count: int, records: int) -> None:
    if count != records:
        raise AssertionError(f"{count:,} records were read of {records:,} written")
