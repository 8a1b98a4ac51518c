"""What exactly-once costs: throughput and latency by the size of a transaction, beside the same writes without.

Semel's own client writes groups of records in three ways: acknowledged only, idempotent, and each group as one
transaction. A group is done when its records are acknowledged or committed, which is when a reader can have them. It
runs on the embedded broker and on Apache Kafka from Maven coordinates (Java 17+ and `mvn`), or on SEMEL_BENCH_BOOTSTRAP
alone where that is set.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa

from semel.bench.report import Chart, Row, Section
from semel.broker.process import Broker
from semel.charts import Axis, Series
from semel.client.admin import Admin
from semel.client.producer import Producer
from semel.testing.apache_kafka import FULL_SPEED, LATEST, ApacheKafka

SIZES = (1, 10, 100, 1_000, 10_000, 100_000)
VALUE_BYTES = 100
PARTITIONS = 4
SECONDS_A_CASE = 1.0
GROUPS_MIN = 5
_PLAIN, _IDEMPOTENT, _TRANSACTIONS = "acks=all", "idempotent", "transactions"


@dataclass(frozen=True)
class Cost:
    """One way of writing, at one size."""

    records_per_second: float
    p50_ms: float
    p99_ms: float


def run(sizes: tuple[int, ...] = SIZES, seconds_a_case: float = SECONDS_A_CASE) -> Section:
    """The section `transactions` of `semel bench`."""
    costs = {
        (target, size, way): cost
        for target, bootstrap in _targets()
        for (size, way), cost in _measure(bootstrap, sizes, seconds_a_case).items()
    }
    targets = list(dict.fromkeys(target for target, _, _ in costs))
    return Section(
        name="transactions",
        timed=f"values of {VALUE_BYTES} B on {PARTITIONS} partitions; {seconds_a_case:g} s or more a size, in turns",
        columns=(
            f"{_PLAIN}, records/s",
            "idempotent",
            "transactions",
            "transactions / idempotent",
            "commit p50 ms",
            "p99 ms",
            "idempotent p99 ms",
        ),
        rows=tuple(_row(costs, target, size) for target in targets for size in sizes),
        bars=(),
        notes=("A group is one flush, or one transaction. Its latency is from the first send until it is visible.",),
        charts=tuple(chart for target in targets for chart in _charts(costs, target, sizes)),
    )


def _row(costs: dict[tuple[str, int, str], Cost], target: str, size: int) -> Row:
    plain, idempotent, transactions = (costs[target, size, way] for way in (_PLAIN, _IDEMPOTENT, _TRANSACTIONS))
    return Row(
        f"{target}, groups of {size:,}",
        (
            plain.records_per_second,
            idempotent.records_per_second,
            transactions.records_per_second,
            transactions.records_per_second / idempotent.records_per_second,
            transactions.p50_ms,
            transactions.p99_ms,
            idempotent.p99_ms,
        ),
    )


def _charts(costs: dict[tuple[str, int, str], Cost], target: str, sizes: tuple[int, ...]) -> Iterator[Chart]:
    def series(figure: Callable[[Cost], float]) -> tuple[Series, ...]:
        return tuple(
            Series(way, [(size, figure(costs[target, size, way])) for size in sizes])
            for way in (_PLAIN, _IDEMPOTENT, _TRANSACTIONS)
        )

    records = Axis("records in a transaction (or between flushes)", is_logarithmic=True)
    yield Chart(
        f"Throughput, {target}", series(lambda cost: cost.records_per_second), records, Axis("records a second", True)
    )
    yield Chart(f"Latency, {target}", series(lambda cost: cost.p99_ms), records, Axis("p99, ms", True))


def _measure(bootstrap: str, sizes: tuple[int, ...], seconds_a_case: float) -> dict[tuple[int, str], Cost]:
    costs: dict[tuple[int, str], Cost] = {}
    with _writers(bootstrap) as writers:
        for write in writers.values():
            for _ in range(GROUPS_MIN):
                write(_table(100))  # connections, metadata, and the broker's compiler
        for size in sizes:
            table = _table(size)
            times: dict[str, list[float]] = {way: [] for way in writers}
            # They take turns, group by group, so that a slow moment of the machine falls on all of them.
            while min(map(len, times.values())) < GROUPS_MIN or min(map(sum, times.values())) < seconds_a_case / 3:
                for way, write in writers.items():
                    started = time.perf_counter()
                    write(table)
                    times[way].append(time.perf_counter() - started)
            for way, seconds in times.items():
                costs[size, way] = _cost(size, seconds)
    return costs


def _cost(size: int, seconds: list[float]) -> Cost:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return Cost(size * len(seconds) / sum(seconds), cuts[49] * 1000, cuts[98] * 1000)


def _table(size: int) -> pa.Table:
    return pa.table({"value": [os.urandom(VALUE_BYTES // 2).hex().encode() for _ in range(size)]})


@contextmanager
def _writers(bootstrap: str) -> Iterator[dict[str, Callable[[pa.Table], None]]]:
    topic = f"bench-transactions-{time.time_ns()}"
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.create_topics(topic, partitions=PARTITIONS)
    common = {"bootstrap.servers": bootstrap}
    with (
        Producer({**common, "enable.idempotence": False, "acks": "all"}) as plain,
        Producer(common) as idempotent,
        Producer({**common, "transactional.id": topic}) as transactional,
    ):

        def flushed_by(producer: Producer) -> Callable[[pa.Table], None]:
            def write(table: pa.Table) -> None:
                producer.send_table(topic, table)
                producer.flush()

            return write

        def write_transaction(table: pa.Table) -> None:
            with transactional.transaction():
                transactional.send_table(topic, table)

        yield {_PLAIN: flushed_by(plain), _IDEMPOTENT: flushed_by(idempotent), _TRANSACTIONS: write_transaction}


def _targets() -> Iterator[tuple[str, str]]:
    running = os.environ.get("SEMEL_BENCH_BOOTSTRAP")
    if running:
        yield running, running
        return
    with Broker() as broker:
        yield "embedded broker", broker.bootstrap
    with ApacheKafka(LATEST, jvm=FULL_SPEED) as kafka:
        yield f"Apache Kafka {LATEST}", kafka.bootstrap
