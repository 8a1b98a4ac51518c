"""A database whose changes are captured, topics on an embedded broker, and confluent-kafka to count what arrived."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any

import psycopg
import pytest
from database_scene import Place
from relay_scene import Outbox, in_postgres, read_topic
from session_scene import BROKER_CONFIG, wait_until

import semel
from semel.bridges.capture.options import make_capture_options
from semel.bridges.capture.run import CaptureRun
from semel.bridges.capture.source import CaptureSource
from semel.bridges.relay.runs import RelayReport
from semel.client.source_transactions import TransactionEnd
from semel.testing.embedded import EmbeddedBroker
from semel.testing.postgres import Postgres

SETTINGS = {
    "wal_level": "logical",
    "max_connections": "60",
    "max_wal_senders": "40",
    "max_replication_slots": "40",
    "wal_receiver_timeout": "10s",
}


@dataclass(frozen=True)
class Change:
    """One event in a topic."""

    number: int
    index: int
    operation: str
    key: Any
    value: Any
    headers: dict[str, str]

    @property
    def what(self) -> tuple[str, Any]:
        return self.operation, self.value


class Source(Outbox):
    """A database of its own with tables to capture; each has a topic `NAME.TABLE`."""

    tables: tuple[str, ...] = ()

    def make(self, *statements: str, tables: tuple[str, ...] = ("accounts",)) -> None:
        self.do(*statements)
        self.tables = tables
        for table in tables:
            self.create_topic(self.topic_of(table))

    def topic_of(self, table: str) -> str:
        return f"{self.name}.{table}"

    @property
    def place(self) -> Place:
        return Place("postgres", self.address)

    @property
    def options(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "tables": list(self.tables),
            "topic": f"{self.name}.{{table}}",
            "bootstrap": self.bootstrap,
            "retry_s": 20.0,
        }

    def capture(self, **options: Any) -> RelayReport:
        """Until nothing is left."""
        return semel.capture(self.address, **{**self.options, "idle_ms": 0, **options})

    def capture_some(self, transactions: int, **options: Any) -> None:
        """So many Kafka transactions, and no more."""
        given: dict[str, Any] = {**self.options, **options}
        settings = {"bootstrap.servers": given.pop("bootstrap")}
        chosen = make_capture_options(
            given.pop("name"),
            settings,
            tables=given.pop("tables"),
            topic=given.pop("topic"),
            rows_max=given.pop("transaction_rows_max"),
            outbox=None,
            slot=None,
            publication=None,
            failover=False,
            snapshot=True,
            heartbeat_s=10,
            **given,
        )

        def is_enough() -> bool:
            return run.report.transactions >= transactions

        run = CaptureRun(CaptureSource(self.address, chosen, is_enough), chosen, is_enough)
        run.go(None)

    def changes(self, table: str = "accounts") -> list[Change]:
        """What is in the topic of a table, in the order of the source."""
        found = []
        for record in read_topic(self.bootstrap, self.topic_of(table)):
            headers = {name: (value or b"").decode() for name, value in record.headers}
            assert headers["semel.source"] == self.name
            found.append(
                Change(
                    int(headers["semel.source.transaction"]),
                    int(headers["semel.source.index"]),
                    headers["semel.change.operation"],
                    None if record.key is None else json.loads(record.key),
                    None if record.value is None else json.loads(record.value),
                    headers,
                )
            )
        return sorted(found, key=lambda change: (change.number, change.index))

    def whats(self, table: str = "accounts") -> list[tuple[str, Any]]:
        return [change.what for change in self.changes(table)]

    def ends(self) -> list[TransactionEnd]:
        """They must count from 0 without gaps."""
        found = [
            TransactionEnd.decode(one.value or b"") for one in read_topic(self.bootstrap, f"{self.name}.transactions")
        ]
        assert [end.transaction for end in found] == list(range(len(found)))
        return found

    def slot(self) -> dict[str, Any]:
        [row] = self.ask(f"SELECT to_jsonb(s) FROM pg_replication_slots s WHERE slot_name = '{self.slot_name}'")
        return row[0]

    def drop_slot(self, name: str | None = None) -> None:
        """As soon as the server has noticed that its reader has gone."""
        slot = name or self.slot_name
        query = f"SELECT active FROM pg_replication_slots WHERE slot_name = '{slot}'"
        wait_until(lambda: self.ask(query) == [(False,)], "the slot to be free")
        self.do(f"SELECT pg_drop_replication_slot('{slot}')")

    @property
    def slot_name(self) -> str:
        return f"semel_{self.name.replace('-', '_')}"

    def copy_into(self, target: Place, last: int | None, is_over: Event | None = None) -> None:
        """What a user writes: whole transactions of the source into tables of the same names, up to number `last`, or
        until it is over."""
        given: dict[str, Any] = {"topics": [self.topic_of(table) for table in self.tables], "name": "copy"}
        with (
            psycopg.connect(target.address) as connection,
            semel.SourceInbox(connection, bootstrap=self.bootstrap, source=self.name, **given) as inbox,
        ):
            while inbox.applied is None or last is None or inbox.applied < last:
                if is_over is not None and is_over.is_set():
                    return
                delivery = inbox.next(200)
                if delivery is not None:
                    with delivery as handle:
                        semel.apply_changes(handle, delivery.rows())

    def assert_same(self, target: Place, table: str = "accounts") -> None:
        query = f"SELECT t::text FROM {table} t ORDER BY 1"
        assert target.ask(query) == self.ask(query)

    def same_in(self, target: Place, tables: Sequence[str]) -> bool:
        queries = [f"SELECT t::text FROM {table} t ORDER BY 1" for table in tables]
        return all(target.ask(query) == self.ask(query) for query in queries)


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(config=BROKER_CONFIG, fsync="never") as broker:
        yield broker


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with Postgres(settings=SETTINGS) as server:
        yield server


@pytest.fixture
def source(server: Postgres, broker: EmbeddedBroker) -> Source:
    made = in_postgres(server, broker)
    return Source("postgres", made.address, made.bootstrap)
