"""Out of an outbox in Postgres into Kafka: Semel's relay beside a loop by hand without guarantees.

Each way runs in a process of its own on one core, with the same rows, and they take turns. Latency is from the commit
of a row to the moment at which a reader of committed records has it, one row at a time.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median, quantiles
from typing import Any, Final

import psycopg
from confluent_kafka import Consumer

from semel.bench.client import kafka_to_measure, new_topic, settings_line
from semel.bench.relay_ways import LOOK_S, WAYS, WRITING
from semel.bench.report import Bar, Row
from semel.bridges.relay.table_sql import outbox_table_sql
from semel.testing.postgres import Postgres as PostgresServer

ROWS: Final = 500_000
EVENTS: Final = 300
PAUSE_S: Final = 0.02
RELAY_BAR: Final = 2.0
_NAMES: Final = {"semel": "semel relay", "hand": "by hand, no guarantees"}

Turns = dict[str, list[dict[str, float]]]


def measure(server: PostgresServer, records: int = ROWS, rounds: int = 3) -> tuple[list[Row], list[Bar], list[str]]:
    """Rows, bars and notes for the section `bridges`."""
    turns: Turns = {way: [] for way in WAYS}
    with kafka_to_measure() as (bootstrap, _):
        for turn in range(rounds + 1):
            for way in WAYS:
                count = records if turn else min(records, 20_000)  # the first one is to warm up
                told = _relay_all(server, bootstrap, way, count)
                if turn:
                    turns[way].append(told)
        waits = {way: _latencies(server, bootstrap, way) for way in WAYS}
    rows = [
        Row(
            f"relay, rows a second: {_NAMES[way]}",
            (max(_rates(turns[way])), median(_rates(turns[way])), _over(turns, way), None),
        )
        for way in WAYS
    ]
    rows += [
        Row(f"relay, ms from commit to reader, {name}: {_NAMES[way]}", (None, _part(waits[way], percent), None, None))
        for name, percent in (("p50", 50), ("p99", 99))
        for way in WAYS
    ]
    rows += [
        Row(
            f"relay, us of processor time a row: {_NAMES[way]}",
            (min(_costs(turns[way])), median(_costs(turns[way])), None, None),
        )
        for way in WAYS
    ]
    bars = [Bar("relay on one core, against a loop by hand without guarantees", RELAY_BAR, _over(turns, "hand"))]
    notes = [
        f"Relay: {records:,} rows with keys of 4 to 20 B and values of 20 to 400 B. By hand: {_driver()} and "
        f"confluent-kafka with {settings_line(WRITING)}; a look every {LOOK_S * 1000:g} ms where latency is measured. "
        f"Latency of {EVENTS} rows, one every {PAUSE_S * 1000:g} ms.",
    ]
    return rows, bars, notes


def _relay_all(server: PostgresServer, bootstrap: str, way: str, records: int) -> dict[str, float]:
    topic = new_topic(bootstrap, f"relay-{way}")
    _fill(server, topic, records)
    with _process(server, bootstrap, way, serve=False) as process:
        said, _ = process.communicate(timeout=600)
    told = json.loads(said.splitlines()[-1])
    if told["rows"] != records:
        raise AssertionError(f"{way} has relayed {told['rows']:,} of {records:,} rows")
    return told


@contextmanager
def _process(server: PostgresServer, bootstrap: str, way: str, *, serve: bool) -> Iterator[subprocess.Popen[str]]:
    name = f"bench-{way}-{time.time_ns()}"
    options = {"database": server.tcp_uri, "bootstrap": bootstrap, "name": name, "serve": serve}
    with subprocess.Popen(
        [sys.executable, "-m", "semel.bench.relay_ways", way, json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _fill(server: PostgresServer, topic: str, records: int) -> None:
    """A new table with rows that are the same in every turn, in transactions of 10,000."""
    rng = random.Random(18)
    with psycopg.connect(server.tcp_uri, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS outbox")
        for statement in outbox_table_sql().split(";\n"):
            connection.execute(statement.encode())
        with connection.cursor() as cursor:
            for first in range(0, records, 10_000):
                with cursor.copy("COPY outbox (topic, key, value) FROM STDIN") as copy:
                    for number in range(first, min(first + 10_000, records)):
                        copy.write_row((topic, _key(rng, number), f"{number:0{rng.randint(20, 400)}x}"))
        connection.execute("VACUUM ANALYZE outbox")
        connection.execute("CHECKPOINT")


def _key(rng: random.Random, number: int) -> str:
    return f"{number % 50_000:0{rng.randint(5, 20)}d}"


def _latencies(server: PostgresServer, bootstrap: str, way: str) -> list[float]:
    """Milliseconds of each event."""
    topic = new_topic(bootstrap, f"relay-wait-{way}")
    _fill(server, topic, 0)
    settings: dict[str, Any] = {
        "bootstrap.servers": bootstrap,
        "group.id": f"bench-{time.time_ns()}",
        "auto.offset.reset": "earliest",
        "isolation.level": "read_committed",
        "fetch.wait.max.ms": 100,
    }
    consumer = Consumer(settings)
    consumer.subscribe([topic])
    waits: list[float] = []
    with (
        _process(server, bootstrap, way, serve=True) as process,
        psycopg.connect(server.tcp_uri, autocommit=True) as connection,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for number in range(EVENTS + 10):
            connection.execute(
                "WITH written AS (INSERT INTO outbox (topic, key, value) VALUES (%s, 'k', %s) RETURNING 1) "
                "SELECT pg_notify('semel_relay', '') FROM written",
                (topic, str(number)),
            )
            committed = time.perf_counter()
            while (message := consumer.poll(10)) is None or message.error():
                pass
            if number >= 10:  # what is only slow once
                waits.append((time.perf_counter() - committed) * 1000)
            time.sleep(PAUSE_S)
    consumer.close()
    return waits


def _rates(told: list[dict[str, float]]) -> list[float]:
    return [one["rows"] / one["seconds"] for one in told]


def _costs(told: list[dict[str, float]]) -> list[float]:
    return [one["cpu"] / one["rows"] * 1e6 for one in told]


def _over(turns: Turns, way: str) -> float:
    return median(_rates(turns["semel"])) / median(_rates(turns[way]))


def _part(waits: list[float], percent: int) -> float:
    return quantiles(waits, n=100)[percent - 1]


def _driver() -> str:
    try:
        import psycopg2  # noqa: F401  # pyright: ignore
    except ImportError:
        return "psycopg 3"
    return "psycopg2"
