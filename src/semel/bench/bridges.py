"""Out of Kafka and out of Spark into Postgres: Semel's targets beside loops by hand and Spark's JDBC writer. And out of
an outbox in Postgres into Kafka: `relays.py`.

Postgres runs on the same machine with its own defaults, so every commit is synced. All ways write the same rows and
take turns. The limit is `COPY` of rows that were put into Postgres' text format beforehand.
"""

from __future__ import annotations

import csv
import io
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final, cast

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from confluent_kafka import Consumer, Message

from semel.bench import relays
from semel.bench.client import QUICK_FETCHES, kafka_to_measure, new_topic, settings_line
from semel.bench.copiers import fill
from semel.bench.report import Bar, Row, Section
from semel.bench.spark_worlds import SparkProcess
from semel.bridges.postgres import PostgresDatabase
from semel.bridges.targets import Postgres
from semel.testing.maven import jars
from semel.testing.postgres import Postgres as PostgresServer

ROWS: Final = 1_000_000
ROUNDS: Final = 3
FILES: Final = 4
TRANSACTION_ROWS: Final = 50_000
PORTION: Final = 5_000
JDBC: Final = "org.postgresql:postgresql:42.7.4"
JDBC_BATCH: Final = 10_000
SESSION_BAR: Final = 1.5
APPEND_BAR: Final = 2.0
UPSERT_BAR: Final = 1.0

_EVENTS: Final = "(partition integer, position bigint, key text, value text)"
_ORDERS: Final = (
    "(id bigint, customer text, amount integer, note text, price double precision, placed_at timestamp with time zone)"
)
_NAMES: Final = ("Ada", "Grace Hopper", "Müller & Söhne", "customer", "Société Générale d'Exemple")
_UPDATES: Final = "upsert, index, all keys there"
_NEW_KEYS: Final = "upsert, index, new keys beside a row"
Turns = dict[str, list[float]]
"""Rows a second of every turn, by who wrote them."""


def run(records: int = ROWS, rounds: int = ROUNDS) -> Section:
    """The section `bridges` of `semel bench`."""
    with PostgresServer(has_defaults=True, password="bench") as server:
        relay_rows, relay_bars, relay_notes = relays.measure(server, records // 2, rounds)
        session = _session_turns(server, records, rounds)
        spark = _spark_turns(server, records, rounds)
        version = _ask(server, "SHOW server_version")
    loop = max((name for name in session if name.startswith("by hand")), key=lambda name: median(session[name]))
    return Section(
        name="bridges",
        timed=f"rows a second, {records:,} rows, {rounds} turns each",
        columns=("best", "median", "median, times the other way", "median, times COPY"),
        rows=(*_rows("from Kafka", session, loop), *_rows("from Spark", spark, "JDBC, {index}"), *relay_rows),
        bars=(
            Bar(
                "session, append, against a loop by hand without guarantees", SESSION_BAR, _over(session, "semel", loop)
            ),
            Bar("Spark, append, against JDBC", APPEND_BAR, _over(spark, "append, no index", "JDBC, no index")),
            Bar("Spark, append, index, against JDBC", APPEND_BAR, _over(spark, "append, index", "JDBC, index")),
            Bar("Spark, upsert, against JDBC append", UPSERT_BAR, _over(spark, "upsert, index", "JDBC, index")),
            *relay_bars,
        ),
        notes=(
            f"Postgres {version}, same machine, its defaults. By hand: confluent-kafka with "
            f"{settings_line(QUICK_FETCHES)}, psycopg COPY, a commit for {TRANSACTION_ROWS:,} rows; the better of "
            "write_row and the csv module counts.",
            f"JDBC: reWriteBatchedInserts=true, batchsize {JDBC_BATCH:,}, 2 tasks. COPY: text made beforehand. From "
            "Spark, times the other way: JDBC's append, with or without the index.",
            *relay_notes,
        ),
    )


# -- from Kafka ------------------------------------------------------------------------------------------------------


def _session_turns(server: PostgresServer, records: int, rounds: int) -> Turns:
    ways: dict[str, Callable[[str, str, int], float]] = {
        "semel": lambda bootstrap, topic, count: _by_semel(server, bootstrap, topic, count),
        "by hand, write_row": lambda *given: _by_hand(server, _write_rows, *given),
        "by hand, csv": lambda *given: _by_hand(server, _write_csv, *given),
    }
    turns: Turns = {name: [] for name in ways}
    with kafka_to_measure() as (bootstrap, _):
        topic = new_topic(bootstrap, "bridges-in")
        fill(bootstrap, topic, records, "ragged")
        for way in ways.values():
            _fresh(server, "events", _EVENTS)
            way(bootstrap, topic, min(records, TRANSACTION_ROWS))  # what is only slow once
        for _ in range(rounds):
            for name, way in ways.items():
                _fresh(server, "events", _EVENTS)
                turns[name].append(records / way(bootstrap, topic, records))
                _check_count(server, "events", records)
    return turns


def _by_semel(server: PostgresServer, bootstrap: str, topic: str, records: int) -> float:
    stop, done, started = threading.Event(), 0, 0.0

    def to_columns(table: pa.Table) -> pa.Table:
        nonlocal done, started
        started = started or time.perf_counter()
        if done + table.num_rows >= records:
            table = table.slice(0, records - done)
            stop.set()
        done += table.num_rows
        texts = [table.column(name).cast(pa.string()) for name in ("key", "value")]
        columns = [table.column("partition"), table.column("offset"), *texts]
        return pa.table(columns, names=["partition", "position", "key", "value"])

    target = Postgres(server.tcp_uri, table="events")
    name = f"bench-{time.time_ns()}"
    target.run(to_columns, stop=stop, bootstrap=bootstrap, topics=[topic], name=name)
    return time.perf_counter() - started


def _by_hand(
    server: PostgresServer, write: Callable[[Any, list[Message]], None], bootstrap: str, topic: str, records: int
) -> float:
    settings: dict[str, Any] = {
        "bootstrap.servers": bootstrap,
        "group.id": f"bench-{time.time_ns()}",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        **QUICK_FETCHES,
    }
    consumer = Consumer(settings)
    consumer.subscribe([topic])
    started, done = 0.0, 0
    try:
        with psycopg.connect(server.tcp_uri) as connection:
            while done < records:
                with (
                    connection.cursor() as cursor,
                    cursor.copy(
                        "COPY events FROM STDIN (FORMAT csv)" if write is _write_csv else "COPY events FROM STDIN"
                    ) as copy,
                ):
                    count, wanted = 0, min(TRANSACTION_ROWS, records - done)
                    while count < wanted:
                        messages = consumer.consume(min(PORTION, wanted - count), timeout=1)
                        started = started or (time.perf_counter() if messages else 0.0)
                        write(copy, messages)
                        count += len(messages)
                connection.commit()
                consumer.commit(asynchronous=True)
                done += count
        return time.perf_counter() - started
    finally:
        consumer.close()


def _write_rows(copy: Any, messages: list[Message]) -> None:
    for one in messages:
        copy.write_row((one.partition(), one.offset(), _text(one.key()), _text(one.value())))


def _write_csv(copy: Any, messages: list[Message]) -> None:
    text = io.StringIO()
    csv.writer(text).writerows(
        (one.partition(), one.offset(), _text(one.key()), _text(one.value())) for one in messages
    )
    copy.write(text.getvalue())


def _text(value: object) -> str:
    return cast(bytes, value).decode()


# -- from Spark ------------------------------------------------------------------------------------------------------


def _spark_turns(server: PostgresServer, rows: int, rounds: int) -> Turns:
    with tempfile.TemporaryDirectory(prefix="semel-bench-") as folder, _spark() as spark:
        text = write_orders(Path(folder), rows)

        def to_database(**given: Any) -> float:
            return spark.run("to_database", input=folder, url=server.tcp_uri, table="orders", **given)["seconds"]

        def upsert() -> float:
            return to_database(way="semel", mode="upsert", key=["id"])

        ways: Mapping[str, tuple[str, Callable[[], float]]] = {
            "append, no index": ("", lambda: to_database(way="semel", mode="append")),
            "JDBC, no index": ("", lambda: to_database(way="jdbc")),
            "COPY, no index": ("", lambda: _copy(server, text)),
            "append, index": ("PRIMARY KEY", lambda: to_database(way="semel", mode="append")),
            "upsert, index": ("PRIMARY KEY", upsert),
            _NEW_KEYS: ("PRIMARY KEY", upsert),
            _UPDATES: ("PRIMARY KEY", upsert),
            "JDBC, index": ("PRIMARY KEY", lambda: to_database(way="jdbc")),
            "COPY, index": ("PRIMARY KEY", lambda: _copy(server, text)),
        }
        turns: Turns = {name: [] for name in ways}
        for turn in range(rounds + 1):
            for name, (index, write) in ways.items():
                _fresh(server, "orders", _ORDERS.replace("id bigint", f"id bigint {index}"))
                if name == _UPDATES:
                    _copy(server, text)
                    _checkpoint(server)
                if name == _NEW_KEYS:  # the first load of an empty table needs no merge
                    _ask(server, "INSERT INTO orders VALUES (-1, '', 0, '', 0, now()) RETURNING id")
                seconds = write()
                _check_count(server, "orders", rows + (name == _NEW_KEYS))
                if turn:  # the first one is to warm up
                    turns[name].append(rows / seconds)
    return turns


@contextmanager
def _spark() -> Iterator[SparkProcess]:
    driver = jars(f"postgres-jdbc/{JDBC.rpartition(':')[2]}", [JDBC], alone=True)
    spark = SparkProcess(sys.executable, {}, str(driver))
    try:
        yield spark
    finally:
        spark.close()


def write_orders(folder: Path, rows: int) -> bytes:
    """Parquet files for Spark, and the same rows as Postgres' text format. They are the same in every run."""
    rng = random.Random(17)
    text = io.StringIO()
    share = -(-rows // FILES)
    for number in range(FILES):
        ids = range(number * share, min((number + 1) * share, rows))
        table = pa.table(
            {
                "id": pa.array(ids, pa.int64()),
                "customer": [_customer(rng) for _ in ids],
                "amount": pa.array([rng.randrange(100_000) for _ in ids], pa.int32()),
                "note": [None if rng.random() < 0.2 else "x" * rng.randrange(0, 150) for _ in ids],
                "price": pa.array([None if rng.random() < 0.05 else rng.random() * 1_000 for _ in ids], pa.float64()),
                "placed_at": pa.array([1_760_000_000_000_000 + n * 1_000 for n in ids], pa.timestamp("us", "UTC")),
            }
        )
        pq.write_table(table, folder / f"{number}.parquet")
        for row in zip(*(column.to_pylist() for column in table.columns), strict=True):
            text.write("\t".join("\\N" if value is None else str(value) for value in row) + "\n")
    return text.getvalue().encode()


def _customer(rng: random.Random) -> str:
    number = rng.randrange(5_000)
    return f"{_NAMES[number % len(_NAMES)]}-{number}"


def _copy(server: PostgresServer, text: bytes) -> float:
    started = time.perf_counter()
    with psycopg.connect(server.tcp_uri) as connection:
        with connection.cursor() as cursor, cursor.copy("COPY orders FROM STDIN") as copy:
            for first in range(0, len(text), 1 << 20):
                copy.write(text[first : first + (1 << 20)])
        connection.commit()
    return time.perf_counter() - started


# -- the database ----------------------------------------------------------------------------------------------------


def _fresh(server: PostgresServer, table: str, columns: str) -> None:
    with PostgresDatabase(server.uri) as database:
        database.execute(f"DROP TABLE IF EXISTS {table}")
        database.execute(f"CREATE TABLE {table} {columns}")
    _checkpoint(server)


def _checkpoint(server: PostgresServer) -> None:
    """No turn pays for the rows of the one before it."""
    with PostgresDatabase(server.uri) as database:
        database.execute("CHECKPOINT")


def _check_count(server: PostgresServer, table: str, rows: int) -> None:
    found = _ask(server, f"SELECT count(*) FROM {table}")
    if found != rows:
        raise AssertionError(f"{rows:,} rows were written to {table} and {found:,} are there")


def _ask(server: PostgresServer, query: str) -> Any:
    with PostgresDatabase(server.uri) as database:
        return database.scalar(query)


# -- figures ---------------------------------------------------------------------------------------------------------


def _rows(title: str, turns: Turns, other: str) -> list[Row]:
    """`other` is the way to compare with, which may differ for tables with and without an index."""
    rows: list[Row] = []
    for name, rates in turns.items():
        index = "no index" if "no index" in name else "index"
        limit = f"COPY, {index}"
        over_limit = _over(turns, name, limit) if limit in turns else None
        over_other = _over(turns, name, other.format(index=index))
        rows.append(Row(f"{title}: {name}", (max(rates), median(rates), over_other, over_limit)))
    return rows


def _over(turns: Turns, name: str, other: str) -> float:
    return median(turns[name]) / median(turns[other])
