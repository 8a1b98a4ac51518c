"""A shop: orders in SQLite or Postgres, events on a broker, and an outsider who compares the two."""

from __future__ import annotations

import sqlite3
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, TopicPartition

import semel
from semel.testing.postgres import Postgres

PARTITIONS = 3


class Shop:
    """A database with a table of orders, a topic, and the name of the program that writes both."""

    def __init__(self, address: str, bootstrap: str, name: str | None = None, topic: str | None = None) -> None:
        self.address = address
        self.bootstrap = bootstrap
        self.name = name or f"shop-{uuid.uuid4().hex[:8]}"
        self.topic = topic or f"orders-{self.name}"

    @property
    def is_postgres(self) -> bool:
        return self.address.startswith("postgresql")

    def set_up(self) -> None:
        with semel.Admin({"bootstrap.servers": self.bootstrap}) as admin:
            admin.create_topics(self.topic, partitions=PARTITIONS)
        with closing(self.connect()) as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, topic TEXT)")
            for statement in semel.both_table_sql("postgres" if self.is_postgres else "sqlite").split(";\n"):
                connection.execute(statement)
            connection.commit()

    def connect(self, **options: Any) -> Any:
        if self.is_postgres:
            return psycopg.connect(self.address, **options)
        return sqlite3.connect(self.address, timeout=30, **options)

    def producer(self, **settings: Any) -> semel.Producer:
        return semel.Producer(bootstrap_servers=self.bootstrap, transactional_id=self.name, **settings)

    def place(self, connection: Any, t: Any, number: int) -> None:
        """One order: its row, and one event in a partition of its own choice and one with a key."""
        connection.execute(self.insert, (number, self.topic))
        t.send(self.topic, str(number), partition=number % PARTITIONS)
        t.send(self.topic, str(number), key="all")

    def order(
        self, connection: Any, producer: semel.Producer, number: int, then: Callable[[Any], object] = lambda t: None
    ) -> None:
        """A block with one order, and whatever else is to happen in it."""
        with semel.both(connection, producer) as t:
            self.place(connection, t, number)
            then(t)

    @property
    def insert(self) -> str:
        mark = "%s" if self.is_postgres else "?"
        return f"INSERT INTO orders (id, topic) VALUES ({mark}, {mark})"

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        with closing(self.connect()) as connection:
            return connection.execute(query).fetchall()

    def rows(self) -> list[int]:
        return [number for (number,) in self.ask(f"SELECT id FROM orders WHERE topic = '{self.topic}' ORDER BY id")]

    def events(self) -> list[int]:
        """What a reader of committed records sees, by another client than Semel's; by partition, in their order."""
        return [int(value) for _, value in read_committed(self.bootstrap, self.topic)]

    def leftovers(self) -> tuple[int, int]:
        """Decisions and records that are still in the tables."""
        decisions = self.ask(f"SELECT count(*) FROM semel_both WHERE decision IS NOT NULL AND name = '{self.name}'")
        records = self.ask(f"SELECT count(*) FROM semel_both_records WHERE topic = '{self.topic}'")
        return decisions[0][0], records[0][0]

    def check(self, expected: list[int]) -> None:
        """Both sides have exactly these orders, each once, in order; and nothing is left over."""
        assert self.rows() == expected
        assert Counter(self.events()) == Counter(expected + expected)
        by_key = [int(value) for key, value in read_committed(self.bootstrap, self.topic) if key == b"all"]
        assert by_key == expected, "the events of one key are out of order"
        assert self.leftovers() == (0, 0)


def read_committed(bootstrap: str, topic: str) -> list[tuple[bytes | None, bytes]]:
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
        found: dict[int, list[tuple[bytes | None, bytes]]] = {partition: [] for partition in known}
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
            found[partition].append((message.key(), message.value() or b""))  # type: ignore[arg-type]
        return [record for partition in sorted(found) for record in found[partition]]
    finally:
        consumer.close()


def shops(folder: Path, bootstrap: str, server: Postgres) -> Iterator[Shop]:
    """One in each kind of database."""
    yield Shop(str(folder / f"shop-{uuid.uuid4().hex[:8]}.db"), bootstrap)
    database = f"shop_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(server.uri, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {database}".encode())
    yield Shop(server.uri.replace("/postgres?", f"/{database}?"), bootstrap)
