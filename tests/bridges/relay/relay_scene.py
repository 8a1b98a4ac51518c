"""An outbox in SQLite or Postgres, topics on an embedded broker, and confluent-kafka to count what arrived."""

from __future__ import annotations

import sqlite3
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, TopicPartition
from session_scene import BROKER_CONFIG

import semel
from semel.bridges.relay.runs import RelayReport
from semel.testing.apache_kafka import ApacheKafka
from semel.testing.embedded import EmbeddedBroker
from semel.testing.postgres import Postgres

PARTITIONS = 3


class Record(NamedTuple):
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    timestamp_ms: int


class Outbox:
    """A database with an outbox table, and topics of its own."""

    def __init__(self, kind: Any, address: str, bootstrap: str) -> None:
        self.kind = kind
        self.address = address
        self.bootstrap = bootstrap
        unique = uuid.uuid4().hex[:8]
        self.name, self.topic = f"relay-{unique}", f"orders-{unique}"
        self.create_topic(self.topic)

    def create_topic(self, name: str, partitions: int = PARTITIONS, **config: str) -> str:
        named = {key.replace("_", "."): value for key, value in config.items()}
        with semel.Admin({"bootstrap.servers": self.bootstrap}) as admin:
            admin.create_topics(name, partitions=partitions, config=named)
        return name

    def do(self, *statements: str) -> None:
        """Each in a transaction of its own."""
        if self.kind == "sqlite":
            with closing(sqlite3.connect(self.address, timeout=30)) as connection:
                for statement in statements:
                    connection.executescript(statement)
            return
        with psycopg.connect(self.address, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        if self.kind == "sqlite":
            with closing(sqlite3.connect(self.address, timeout=30)) as connection:
                return connection.execute(query).fetchall()
        with psycopg.connect(self.address) as connection:
            return connection.execute(query.encode()).fetchall()

    def make_table(self) -> None:
        self.do(semel.outbox_table_sql(self.kind))

    def write(self, first: int, last: int) -> None:
        """Rows with these numbers as values, in one transaction; the key is the number modulo 7."""
        rows = ", ".join(f"('{self.topic}', 'k{number % 7}', '{number}')" for number in range(first, last + 1))
        self.do(f"INSERT INTO outbox (topic, key, value) VALUES {rows}")

    def relay(self, **options: Any) -> RelayReport:
        """Until nothing is left."""
        given = {"name": self.name, "bootstrap": self.bootstrap, "idle_ms": 0, "retry_s": 20.0, **options}
        return semel.relay(self.address, **given)

    def read(self, topic: str | None = None) -> list[Record]:
        return read_topic(self.bootstrap, topic or self.topic)

    def numbers(self) -> list[int]:
        """The values in the topic, in the order of each partition."""
        return [int(record.value or b"") for record in self.read()]

    def has_each_once(self, last: int) -> bool:
        return Counter(self.numbers()) == Counter(range(1, last + 1)) and self.is_in_order()

    def is_in_order(self) -> bool:
        """Whether the numbers of each key only grow."""
        highest: dict[bytes | None, int] = {}
        for record in self.read():
            number = int(record.value or b"")
            if number <= highest.get(record.key, 0):
                return False
            highest[record.key] = number
        return True


def read_topic(bootstrap: str, topic: str) -> list[Record]:
    """Everything that is committed, partition after partition, by another client than Semel's."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": uuid.uuid4().hex,
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 50,
        }
    )
    try:
        known = consumer.list_topics(topic, timeout=10).topics[topic].partitions
        consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in known])
        found: dict[int, list[Record]] = {partition: [] for partition in known}
        ended: set[int] = set()
        while len(ended) < len(known):
            message = consumer.poll(60)
            assert message is not None, f"no answer about {topic}"
            partition = message.partition()
            assert partition is not None
            if (error := message.error()) is not None:
                if error.name() != "_PARTITION_EOF":
                    raise KafkaException(error)
                ended.add(partition)
                continue
            headers: list[Any] = list(message.headers() or [])
            record = Record(message.key(), message.value(), headers, message.timestamp()[1])  # type: ignore[arg-type]
            found[partition].append(record)
        return [record for partition in sorted(found) for record in found[partition]]
    finally:
        consumer.close()


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(config=BROKER_CONFIG, fsync="never") as broker:
        yield broker


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with Postgres(settings={"max_connections": "50"}) as server:
        yield server


def in_postgres(server: Postgres, broker: EmbeddedBroker | ApacheKafka) -> Outbox:
    """A new database in a server."""
    name = f"shop_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(server.uri, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    return Outbox("postgres", server.uri.replace("/postgres?", f"/{name}?"), broker.bootstrap)


def in_sqlite(folder: Path, broker: EmbeddedBroker) -> Outbox:
    return Outbox("sqlite", str(folder / "shop.db"), broker.bootstrap)


@pytest.fixture(params=["sqlite", "postgres"])
def outbox(request: pytest.FixtureRequest, tmp_path: Path, broker: EmbeddedBroker) -> Outbox:
    """With its table."""
    if request.param == "sqlite":
        made = in_sqlite(tmp_path, broker)
    else:
        made = in_postgres(request.getfixturevalue("server"), broker)
    made.make_table()
    return made
