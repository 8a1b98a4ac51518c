"""A table in SQLite or Postgres, a topic that fills it, and the eyes of another client: sqlite3 and psycopg."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from session_scene import BROKER_CONFIG

import semel
from semel.bridges.targets import DatabaseTarget
from semel.session.runner import RunReport
from semel.testing.embedded import EmbeddedBroker
from semel.testing.postgres import Postgres

KINDS = ["sqlite", "postgres"]


class Place:
    """A database of the test's own, of either kind."""

    def __init__(self, kind: str, address: str) -> None:
        self.kind = kind
        self.address = address
        """A file, or a URI."""

    def target(self, **options: Any) -> DatabaseTarget:
        if self.kind == "sqlite":
            return semel.SQLite(self.address, **options)
        return semel.Postgres(self.address, **options)

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        """What another client than Semel's finds."""
        if self.kind == "sqlite":
            with closing(sqlite3.connect(self.address, timeout=30)) as connection:
                return connection.execute(query).fetchall()
        with psycopg.connect(self.address) as connection:
            return connection.execute(query.encode()).fetchall()

    def do(self, *statements: str) -> None:
        if self.kind == "sqlite":
            with closing(sqlite3.connect(self.address, timeout=30)) as connection, connection:
                for statement in statements:
                    connection.execute(statement)
            return
        with psycopg.connect(self.address, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def has(self, table: str) -> bool:
        if self.kind == "sqlite":
            return bool(self.ask(f"SELECT 1 FROM sqlite_master WHERE name = '{table}'"))
        return self.ask(f"SELECT to_regclass('{table}')") != [(None,)]


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(config=BROKER_CONFIG, fsync="never") as broker:
        yield broker


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with Postgres(settings={"max_connections": "20"}) as server:
        yield server


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "sqlite":
        return Place("sqlite", str(tmp_path / "shop.db"))
    return make_postgres(request.getfixturevalue("server"))


def make_postgres(server: Postgres) -> Place:
    """A new database in a server."""
    name = f"shop_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(server.uri, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    return Place("postgres", server.uri.replace("/postgres?", f"/{name}?"))


class Input:
    """A topic with numbered records."""

    def __init__(self, bootstrap: str, partitions: int = 2) -> None:
        self.bootstrap = bootstrap
        self.partitions = partitions
        self.topic = f"orders-{uuid.uuid4().hex[:8]}"
        self.name = f"billing-{uuid.uuid4().hex[:8]}"
        with semel.Admin({"bootstrap.servers": bootstrap}) as admin:
            admin.create_topics(self.topic, partitions=partitions)

    def write(self, values: Iterable[bytes | int]) -> None:
        """Value number n into partition n modulo their count."""
        with semel.Producer(bootstrap_servers=self.bootstrap) as producer:
            for number, value in enumerate(values):
                data = value if isinstance(value, bytes) else str(value).encode()
                producer.send(self.topic, data, key=f"k{number % 7}".encode(), partition=number % self.partitions)
            producer.flush()

    def run(self, transform: Callable[[Any], Any], target: DatabaseTarget | semel.Kafka, **options: Any) -> RunReport:
        """Until nothing is left."""
        given = {
            "bootstrap": self.bootstrap,
            "topics": [self.topic],
            "name": self.name,
            "by": "row",
            "idle_ms": 200,
            "fetch_max_wait_ms": 50,
            **options,
        }
        return semel.run(transform, to=target, **given)

    def committed(self, group: str | None = None) -> dict[int, int]:
        with semel.Admin({"bootstrap.servers": self.bootstrap}) as admin:
            found = admin.committed_offsets(group or self.name)
        return {place.partition: at.offset for place, at in found.items() if place.topic == self.topic}


def number(row: Any) -> dict[str, Any]:
    """The function of most tests."""
    return {"number": int(row.value), "place": row.partition, "at": row.offset}


def numbers(place: Place, table: str = "numbers") -> list[int]:
    return sorted(found for (found,) in place.ask(f"SELECT number FROM {table}"))


def positions(place: Place) -> dict[int, int]:
    return dict(place.ask("SELECT partition, next_offset FROM semel_inbox"))  # pyright: ignore[reportArgumentType]
