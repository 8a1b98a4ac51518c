"""Consume, transform, produce and commit as one: Semel's session beside confluent-kafka and the Java client.

The job is the same for all: values are put into upper case from one topic to another, exactly once, in transactions of
about 50,000 records beside confluent-kafka (tuned, and with its defaults) and of one record beside the Java client.
All read the same input and take turns; of the few long ones the best counts, of the many short ones all do. Apache
Kafka is started from Maven coordinates, or taken from SEMEL_BENCH_BOOTSTRAP where that is set.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Consumer
from confluent_kafka import Producer as ConfluentProducer

from semel.bench.client import PARTITIONS, kafka_to_measure, keep_best, new_topic
from semel.bench.report import Bar, Row, Section
from semel.bench.singles import Job, Sizes, java_client, measure_rates, semel_client
from semel.client.producer import Outcome, Producer
from semel.session.session import Session

RECORDS = 2_000_000
DEFAULTS_RECORDS = 400_000
"""With its defaults confluent-kafka is slow, and its rate is the same for a part of them."""
TRANSACTION_RECORDS = 50_000
ROUNDS = 2
_SINGLES = Sizes()


def run(records: int = RECORDS, rounds: int = ROUNDS, singles: Sizes = _SINGLES, *, java: bool = True) -> Section:
    """The section `session` of `semel bench`; without `java` what it is compared with is not measured."""
    with kafka_to_measure() as (bootstrap, broker):
        source = new_topic(bootstrap, "session-in")
        _fill(bootstrap, source, records)
        best: dict[str, float] = {}
        _by_session(bootstrap, source, min(records, TRANSACTION_RECORDS))  # what is only slow once
        for _ in range(rounds):
            keep_best(best, "semel", _by_session(bootstrap, source, records) / records)
            keep_best(best, "tuned", _by_confluent(bootstrap, source, records, tuned=True) / records)
            part = min(records, DEFAULTS_RECORDS)
            keep_best(best, "defaults", _by_confluent(bootstrap, source, part, tuned=False) / part)
        single = _measure_singles(bootstrap, singles, java=java)
    rates = {name: 1 / seconds for name, seconds in best.items()}
    rows = (
        Row("semel.Session", (rates["semel"], 1.0)),
        Row("confluent-kafka, tuned", (rates["tuned"], rates["semel"] / rates["tuned"])),
        Row("confluent-kafka, defaults", (rates["defaults"], rates["semel"] / rates["defaults"])),
        *_single_rows("one record read, written and committed", "copy", "semel.Session", single),
        *_single_rows("one record written and committed", "produce", "semel.Producer", single),
    )
    return Section(
        name="session",
        timed=f"records a second, {records:,} of 108 B on {PARTITIONS} partitions, best of {rounds} turns",
        columns=("a second", "Semel is so many times as fast"),
        rows=rows,
        bars=(
            Bar("against confluent-kafka tuned", 1.6, rates["semel"] / rates["tuned"]),
            Bar("against confluent-kafka with its defaults", 4.0, rates["semel"] / rates["defaults"]),
            Bar("one record read, written and committed, against the Java client", 1.0, _over_java(single, "copy")),
            Bar("one record written and committed, against the Java client", 1.0, _over_java(single, "produce")),
        ),
        notes=(
            f"{broker}, same machine; transactions of {TRANSACTION_RECORDS:,}; no compression",
            f"transactions of one record: all of {singles.turns} turns of {singles.turn}",
        ),
    )


def _measure_singles(bootstrap: str, sizes: Sizes, *, java: bool) -> dict[tuple[str, Job], float]:
    source, target = new_topic(bootstrap, "single-in"), new_topic(bootstrap, "single-out")
    _fill(bootstrap, source, sizes.records)
    with ExitStack() as stack:
        clients = {"semel": stack.enter_context(semel_client(bootstrap, source, target))}
        if java:
            clients["java"] = stack.enter_context(java_client(bootstrap, source, target))
        return measure_rates(clients, sizes)


def _over_java(single: dict[tuple[str, Job], float], job: Job) -> float | None:
    return single["semel", job] / single["java", job] if ("java", job) in single else None


def _single_rows(case: str, job: Job, ours: str, single: dict[tuple[str, Job], float]) -> tuple[Row, Row]:
    return (
        Row(f"{case}: {ours}", (single["semel", job], 1.0)),
        Row(f"{case}: Java client", (single.get(("java", job)), _over_java(single, job))),
    )


def _fill(bootstrap: str, topic: str, records: int) -> None:
    with Producer(bootstrap_servers=bootstrap) as producer:
        for first in range(0, records, TRANSACTION_RECORDS):
            numbers = range(first, min(first + TRANSACTION_RECORDS, records))
            keys, values = [b"%08d" % n for n in numbers], [b"%0100x" % (n * 2_654_435_761) for n in numbers]
            producer.send_table(topic, pa.table({"key": keys, "value": values}))
        producer.flush()


def _upper(table: pa.Table) -> pa.Table:
    values = pc.call_function("ascii_upper", [table.column("value").cast(pa.string())])
    return pa.table({"key": table.column("key"), "value": values.cast(pa.binary())})


def _by_session(bootstrap: str, source: str, records: int) -> float:
    target, name = new_topic(bootstrap, "session-out"), f"bench-{time.time_ns()}"
    with Session(
        bootstrap=bootstrap, group=name, topics=[source], name=name, transaction_records_max=TRANSACTION_RECORDS
    ) as session:
        done, started = 0, 0.0
        while done < records:
            with session.transaction() as transaction:
                if transaction.is_empty:
                    continue
                started = started or time.perf_counter()
                transaction.send_table(target, _upper(transaction.table))
            if transaction.outcome is Outcome.COMMITTED:
                done += transaction.table.num_rows
        return time.perf_counter() - started


def _by_confluent(bootstrap: str, source: str, records: int, *, tuned: bool) -> float:
    target, name = new_topic(bootstrap, "confluent-out"), f"bench-{time.time_ns()}"
    reading: dict[str, Any] = {
        "bootstrap.servers": bootstrap,
        "group.id": name,
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
        "isolation.level": "read_committed",
    }
    writing: dict[str, Any] = {"bootstrap.servers": bootstrap, "transactional.id": name}
    if tuned:
        reading |= {"fetch.message.max.bytes": 8_388_608, "queued.max.messages.kbytes": 1_000_000}
        writing |= {"linger.ms": 5, "batch.size": 1_000_000, "batch.num.messages": 1_000_000}
        writing |= {"queue.buffering.max.messages": 1_000_000}
    consumer, producer = Consumer(reading), ConfluentProducer(writing)
    producer.init_transactions()
    consumer.subscribe([source])
    try:
        done, started = 0, 0.0
        while done < records:
            messages = consumer.consume(10_000, timeout=1)
            if not messages:
                continue
            started = started or time.perf_counter()
            producer.begin_transaction()
            count = 0
            while messages:
                for message in messages:
                    producer.produce(target, cast(bytes, message.value()).upper(), message.key())
                count += len(messages)
                wanted = min(TRANSACTION_RECORDS, records - done) - count
                messages = consumer.consume(min(wanted, 10_000), timeout=1) if wanted > 0 else []
            position = consumer.position(consumer.assignment())
            producer.send_offsets_to_transaction(position, consumer.consumer_group_metadata())
            producer.commit_transaction()
            done += count
        return time.perf_counter() - started
    finally:
        consumer.close()
