"""From cluster to cluster, exactly once: Semel's mirror beside MirrorMaker 2.

Both copy the same records between the same two nodes of Apache Kafka, in turns. Their rate is taken from the moment
when a tenth of the records is visible at the target to the moment when all are, so that it does not matter how long
each takes to start. Then single records follow, one transaction each, and what counts is the time from the commit at
the source to a reader of committed records at the target. SEMEL_BENCH_SOURCE and SEMEL_BENCH_BOOTSTRAP name other
clusters.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from statistics import median, quantiles
from typing import Final

from semel.bench.client import PARTITIONS, kafka_to_measure, new_topic
from semel.bench.copiers import fill
from semel.bench.mirrors import TUNING, mirror_maker, semel_mirror
from semel.bench.report import Bar, Row, Section
from semel.client.admin import Admin
from semel.client.fetcher import Fetcher
from semel.client.partitions import TopicPartition
from semel.client.producer import Producer
from semel.errors import RequestTimedOut, SemelError

RECORDS = 2_000_000
ROUNDS = 3
SINGLES: Final = 200
_PAUSE_S: Final = 0.02
_LOOK_S: Final = 0.02
_PATIENCE_S: Final = 300.0

Mirror = Callable[[str, str, str], AbstractContextManager[None]]
MIRRORS: Final[Mapping[str, Mirror]] = {"semel mirror": semel_mirror, "MirrorMaker 2": mirror_maker}


def run(records: int = RECORDS, rounds: int = ROUNDS, singles: int = SINGLES) -> Section:
    """The section `mirror` of `semel bench`."""
    rates: dict[str, list[float]] = {name: [] for name in MIRRORS}
    delays: dict[str, list[float]] = {name: [] for name in MIRRORS}
    with _source() as source, kafka_to_measure() as (target, broker):
        for _ in range(rounds):
            for name, mirror in MIRRORS.items():
                topic = new_topic(source, "mirror")
                fill(source, topic, records, "ragged")
                with mirror(source, target, topic):
                    rates[name].append(measure_rate(target, topic, records))
                    delays[name] += measure_delays(source, target, topic, singles)
    own, other = MIRRORS
    return Section(
        name="mirror",
        timed=f"{records:,} ragged records on {PARTITIONS} partitions and {singles} single ones, {rounds} turns each",
        columns=("best a second", "median a second", "p50 ms", "p99 ms"),
        rows=tuple(_row(name, rates[name], delays[name]) for name in MIRRORS),
        bars=(
            Bar("records a second, median, against MirrorMaker 2", 1.0, median(rates[own]) / median(rates[other])),
            Bar("records a second, best, against MirrorMaker 2", 1.0, max(rates[own]) / max(rates[other])),
        ),
        notes=(
            f"{broker}, twice, same machine; no compression; Semel's mirror at its defaults",
            f"MirrorMaker 2, exactly once: {', '.join(f'{name}={value}' for name, value in TUNING.items())}",
        ),
    )


@contextmanager
def _source() -> Iterator[str]:
    if running := os.environ.get("SEMEL_BENCH_SOURCE"):
        yield running
        return
    with kafka_to_measure() as (bootstrap, _):
        yield bootstrap


def _row(name: str, rates: list[float], delays: list[float]) -> Row:
    percentiles = quantiles(delays, n=100)
    return Row(name, (max(rates), median(rates), percentiles[49] * 1000, percentiles[98] * 1000))


def measure_rate(target: str, topic: str, records: int) -> float:
    """Records a second, from a tenth to all of them; from the start if all become visible at once."""
    first: tuple[float, int] | None = None
    started = time.monotonic()
    until = started + _PATIENCE_S
    with Admin({"bootstrap.servers": target}) as admin:
        while time.monotonic() < until:
            visible, now = _visible(admin, topic), time.monotonic()
            if first is None and visible >= records // 10:
                first = now, visible
            if first is not None and visible >= records:
                since, before = first if visible > first[1] else (started, 0)
                return (visible - before) / max(now - since, _LOOK_S)
            time.sleep(_LOOK_S)
    raise RequestTimedOut(f"Not all of {records:,} records were mirrored within {_PATIENCE_S:g} s.")


def _visible(admin: Admin, topic: str) -> int:
    """Offsets that a reader of committed records can get to; markers count as well, a few for each cut."""
    named = {TopicPartition(topic, number): "latest" for number in range(PARTITIONS)}
    try:
        if topic not in admin.list_topics():
            return 0
        return sum(one.offset for one in admin.list_offsets(dict.fromkeys(named, "latest")).values())
    except SemelError:
        return 0  # it is being created


def measure_delays(source: str, target: str, topic: str, singles: int) -> list[float]:
    """Seconds from the commit of a record at the source to its sight at the target."""
    committed: list[float] = []
    seen: list[float] = []
    is_reading = threading.Event()

    def read() -> None:
        with Fetcher({"bootstrap.servers": target}) as fetcher:
            fetcher.assign({(topic, number): "latest" for number in range(PARTITIONS)})
            until = time.monotonic() + _PATIENCE_S
            is_reading.set()
            while len(seen) < singles and time.monotonic() < until:
                count = sum(one.table.num_rows for one in fetcher.fetch(200))
                seen.extend([time.monotonic()] * count)

    reader = threading.Thread(target=read)
    reader.start()
    is_reading.wait()
    with Producer(bootstrap_servers=source, transactional_id=f"{topic}-singles", linger_ms=0) as producer:
        for number in range(singles):
            with producer.transaction():
                producer.send(topic, b"x" * 100, partition=number % PARTITIONS)
            committed.append(time.monotonic())
            time.sleep(_PAUSE_S)
    reader.join()
    if len(seen) < singles:
        raise RequestTimedOut(f"Only {len(seen)} of {singles} single records were mirrored.")
    return [after - before for before, after in zip(committed, sorted(seen), strict=False)]
