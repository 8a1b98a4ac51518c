"""The embedded broker beside Apache Kafka: the same client does the same to both, and they take turns.

Apache Kafka comes from Maven coordinates (Java 17+ and `mvn`), with 1 GB of heap and its own defaults, which never sync
to disk by themselves; the embedded broker syncs every commit, which is its default.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka import Producer as ConfluentProducer
from kio.schema.api_versions.v0.request import ApiVersionsRequest
from kio.schema.api_versions.v0.response import ApiVersionsResponse

from semel.bench.report import Bar, Row, Section
from semel.broker.process import Broker
from semel.client.admin import Admin
from semel.client.config import ClientConfig
from semel.client.connection import Connection
from semel.client.producer import Producer
from semel.errors import SemelError
from semel.records import reference, stamp
from semel.testing.apache_kafka import FULL_SPEED, LATEST, ApacheKafka
from semel.testing.exchange import exchange, parse_bootstrap
from semel.wire import Api

# Where tests make Apache Kafka smaller than it comes, it gets its own defaults back.
_DEFAULTS = {
    "offsets.topic.num.partitions": "50",
    "transaction.state.log.num.partitions": "50",
    "num.network.threads": "3",
    "num.io.threads": "8",
    "background.threads": "10",
    "log.cleaner.dedupe.buffer.size": "134217728",
}
_STARTS = 3
_ROUNDS = 3
_IDLE_S = 3.0
_SMALL_TRANSACTIONS = 1_500
_BULK_BYTES = 200_000_000
_BULK_VALUE_BYTES = 1_000
_BULK_TRANSACTION_BYTES = 20_000_000
_PARTITIONS = 4
_PRODUCER_COUNTS = (1, 100, 10_000)


@dataclass(frozen=True)
class Contender:
    """One of the two brokers, running."""

    name: str
    bootstrap: str
    process_id: int


@dataclass(frozen=True)
class Small:
    """Transactions of one record."""

    per_second: float
    p99_ms: float


def run() -> Section:
    """The section `broker` of `semel bench`."""
    starts = {"semel": _start_semel(), "apache": _start_apache()}
    with _both() as (semel, apache):
        time.sleep(_IDLE_S)
        memory = {one.name: _resident_mb(one.process_id) for one in (semel, apache)}
        small = {
            client: _turns(measure, semel, apache)
            for client, measure in (("Semel", _small_semel), ("librdkafka", _small_librdkafka))
        }
        bulk = {size: _bulk(size, semel, apache) for size in (1_000_000, 16_384)}
    state = _producer_state()
    return _report(starts, memory, small, bulk, state)


def _turns(measure: Callable[[Contender], Small], semel: Contender, apache: Contender) -> dict[str, Small]:
    """Each has its turn several times; the median counts, since a p99 has no best."""
    rounds: dict[str, list[Small]] = {one.name: [] for one in (semel, apache)}
    for _ in range(_ROUNDS):
        for one in (semel, apache):
            rounds[one.name].append(measure(one))
    return {
        name: Small(
            statistics.median(turn.per_second for turn in turns), statistics.median(turn.p99_ms for turn in turns)
        )
        for name, turns in rounds.items()
    }


@contextmanager
def _both() -> Iterator[tuple[Contender, Contender]]:
    with Broker() as semel, ApacheKafka(LATEST, jvm=FULL_SPEED, config=_DEFAULTS) as apache:
        yield (
            Contender("semel", semel.bootstrap, semel.process_id),
            Contender("apache", apache.bootstrap, apache.nodes[0].pid),
        )


def _start_semel() -> float:
    best = float("inf")
    for _ in range(_STARTS):
        started = time.perf_counter()
        with Broker() as broker:
            _first_answer(broker.bootstrap)
            best = min(best, time.perf_counter() - started)
    return best


def _start_apache() -> float:
    """From the start of the process, on storage that is formatted already, to the first answer."""
    best = float("inf")
    with ApacheKafka(LATEST, jvm=FULL_SPEED, config=_DEFAULTS) as kafka:
        (node,) = kafka.nodes
        for _ in range(_STARTS):
            node.stop()
            started = time.perf_counter()
            node.launch()
            _first_answer(kafka.bootstrap)
            best = min(best, time.perf_counter() - started)
            node.wait_ready({node.node_id}, time.monotonic() + 60)
    return best


def _first_answer(bootstrap: str) -> None:
    (address,) = parse_bootstrap(bootstrap)
    deadline = time.monotonic() + 60
    while True:
        try:
            exchange(address, ApiVersionsRequest(), ApiVersionsResponse, timeout_s=1.0)
        except SemelError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)
        else:
            return


def _resident_mb(process_id: int) -> float:
    status = Path(f"/proc/{process_id}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) / 1024


def _new_topic(bootstrap: str, name: str) -> str:
    topic = f"bench-{name}-{time.time_ns()}"
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.create_topics(topic, partitions=_PARTITIONS)
    return topic


def _small(begin_to_commit: Callable[[], None]) -> Small:
    for _ in range(100):
        begin_to_commit()
    latencies: list[float] = []
    started = time.perf_counter()
    for _ in range(_SMALL_TRANSACTIONS):
        before = time.perf_counter()
        begin_to_commit()
        latencies.append(time.perf_counter() - before)
    seconds = time.perf_counter() - started
    return Small(_SMALL_TRANSACTIONS / seconds, statistics.quantiles(latencies, n=100)[98] * 1000)


def _small_semel(broker: Contender) -> Small:
    topic = _new_topic(broker.bootstrap, "small")
    with Producer(bootstrap_servers=broker.bootstrap, transactional_id=topic) as producer:

        def one() -> None:
            producer.begin()
            producer.send(topic, value=b"x" * 100, partition=0)
            producer.commit()

        return _small(one)


def _small_librdkafka(broker: Contender) -> Small:
    topic = _new_topic(broker.bootstrap, "small")
    producer = ConfluentProducer({"bootstrap.servers": broker.bootstrap, "transactional.id": topic, "linger.ms": 0})
    producer.init_transactions()

    def one() -> None:
        producer.begin_transaction()
        producer.produce(topic, b"x" * 100, partition=0)
        producer.commit_transaction()

    return _small(one)


@dataclass(frozen=True)
class Bulk:
    """Megabytes a second."""

    produced: float
    fetched: float


def _bulk(batch_bytes: int, semel: Contender, apache: Contender) -> dict[str, Bulk]:
    best = {one.name: Bulk(0, 0) for one in (semel, apache)}
    for _ in range(_ROUNDS):
        for one in (semel, apache):
            topic = _new_topic(one.bootstrap, f"bulk-{batch_bytes}")
            produced, fetched = _produce_bulk(one, topic, batch_bytes), _fetch_bulk(one, topic)
            best[one.name] = Bulk(max(produced, best[one.name].produced), max(fetched, best[one.name].fetched))
            with Admin({"bootstrap.servers": one.bootstrap}) as admin:
                admin.delete_topics(topic)
    return best


def _produce_bulk(broker: Contender, topic: str, batch_bytes: int) -> float:
    producer = ConfluentProducer(
        {
            "bootstrap.servers": broker.bootstrap,
            "transactional.id": topic,
            "linger.ms": 20,
            "batch.size": batch_bytes,
            "batch.num.messages": 1_000_000,
            "message.max.bytes": 2_000_000,
            "queue.buffering.max.messages": 1_000_000,
        }
    )
    producer.init_transactions()
    value = os.urandom(_BULK_VALUE_BYTES)
    count, per_transaction = _BULK_BYTES // _BULK_VALUE_BYTES, _BULK_TRANSACTION_BYTES // _BULK_VALUE_BYTES
    started = time.perf_counter()
    for first in range(0, count, per_transaction):
        producer.begin_transaction()
        for number in range(first, min(first + per_transaction, count)):
            producer.produce(topic, value, partition=number % _PARTITIONS)
        producer.commit_transaction()
    return _BULK_BYTES / 1e6 / (time.perf_counter() - started)


def _fetch_bulk(broker: Contender, topic: str) -> float:
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": topic,
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "queued.max.messages.kbytes": 500_000,
            "fetch.message.max.bytes": 4_000_000,
            "fetch.queue.backoff.ms": 5,  # a second by default, which both brokers would be idle for
        }
    )
    wanted = count = _BULK_BYTES // _BULK_VALUE_BYTES
    started = time.perf_counter()
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(_PARTITIONS)])
    while count > 0:
        messages = consumer.consume(50_000, timeout=30)
        if not messages:
            raise AssertionError(f"{count:,} of {wanted:,} records were not read")
        count -= len(messages)
    seconds = time.perf_counter() - started
    consumer.close()
    return _BULK_BYTES / 1e6 / seconds


def _producer_state() -> list[Row]:
    """What producers cost in memory: each wrote one batch to one partition (A7)."""
    rows: list[Row] = []
    for count in _PRODUCER_COUNTS:
        with Broker() as broker:
            topic = _new_topic(broker.bootstrap, "producers")
            before = _resident_mb(broker.process_id)
            started = time.perf_counter()
            _write_as_many(broker.bootstrap, topic, count)
            seconds = time.perf_counter() - started
            grown = max(0.0, _resident_mb(broker.process_id) - before)
            rows.append(
                Row(f"{count:,} producers: kB each, ms each", (grown * 1024 / count, None, seconds * 1000 / count))
            )
    return rows


def _write_as_many(bootstrap: str, topic: str, count: int) -> None:
    """As `count` producers in turn, from one connection: only the broker's side is looked at."""
    (address,) = parse_bootstrap(bootstrap)
    batch = bytearray(reference.encode_batch([reference.Record(0, time.time_ns() // 1_000_000, None, b"x" * 100)]))
    connection = Connection(*address, ClientConfig(bootstrap=(address,)))
    try:
        for _ in range(count):
            identity = connection.call(
                Api.INIT_PRODUCER_ID,
                transactional_id=None,
                transaction_timeout=60_000,
                producer_id=-1,
                producer_epoch=-1,
            )
            stamp(batch, producer_id=identity.producer_id, producer_epoch=0, base_sequence=0, transactional=False)
            partition_data = [{"index": 0, "records": bytes(batch)}]
            connection.call(
                Api.PRODUCE,
                transactional_id=None,
                acks=-1,
                timeout=30_000,
                topic_data=[{"name": topic, "partition_data": partition_data}],
            )
    finally:
        connection.close()


def _report(
    starts: dict[str, float],
    memory: dict[str, float],
    small: dict[str, dict[str, Small]],
    bulk: dict[int, dict[str, Bulk]],
    state: list[Row],
) -> Section:
    def row(case: str, semel: float, apache: float) -> Row:
        return Row(case, (semel, apache, semel / apache))

    rows = [
        row("start to first answer, ms", starts["semel"] * 1000, starts["apache"] * 1000),
        row("resident memory when idle, MB", memory["semel"], memory["apache"]),
    ]
    bars = [
        Bar("start, of Apache Kafka's", 0.15, rows[0].figures[2], at_most=True),
        Bar("start, of half a second", 1.0, starts["semel"] / 0.5, at_most=True),
        Bar("idle memory, of Apache Kafka's", 0.12, rows[1].figures[2], at_most=True),
    ]
    for client, figures in small.items():
        semel, apache = figures["semel"], figures["apache"]
        rate = row(f"one-record transactions a second, {client}", semel.per_second, apache.per_second)
        p99 = row(f"p99 of such a transaction, ms, {client}", semel.p99_ms, apache.p99_ms)
        rows += [rate, p99]
        if client == "Semel":
            bars.append(Bar("one-record transactions", 1.5, rate.figures[2]))
        bars.append(Bar(f"p99 commit latency, {client}", 1.0, p99.figures[2], at_most=True))
    for (batch_bytes, figures), required in zip(bulk.items(), (0.8, 0.5), strict=True):
        for verb in ("produced", "fetched"):
            rate = row(
                f"MB/s {verb}, librdkafka, batches of {batch_bytes // 1000} kB",
                getattr(figures["semel"], verb),
                getattr(figures["apache"], verb),
            )
            rows.append(rate)
            bars.append(Bar(f"{verb} in batches of {batch_bytes // 1000} kB", required, rate.figures[2]))
    return Section(
        name="broker",
        timed=f"medians of {_ROUNDS} turns for transactions of one record, the best of {_ROUNDS} for the rest",
        columns=("semel", "Apache Kafka", "semel / Apache"),
        rows=(*rows, *state),
        bars=tuple(bars),
        notes=(
            f"Apache Kafka {LATEST}, 1 GB heap, defaults (it never syncs by itself); semel syncs every commit.",
            "The last rows are what a producer costs the embedded broker, with the same work through one connection.",
        ),
    )
