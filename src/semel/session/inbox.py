"""An inbox: exactly-once processing for an ordinary subscriber, by keeping its position together with its results.

Nothing is written to Kafka, so no transaction of Kafka's can help: a consumer that commits its offset after its results
repeats some of them after a crash. Here the position is a row in the database that the results are in, and both are one
transaction of that database.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final, Self

import pyarrow as pa

from semel.client.admin import Admin
from semel.client.fetched import to_read_table
from semel.client.fetcher import Fetcher
from semel.client.offsets import Edge
from semel.client.partitions import TopicPartition
from semel.errors import ConfigError, InvalidState
from semel.session.backlog import Backlog, partition_of
from semel.session.inbox_positions import PositionStore, SqlitePositions
from semel.session.inbox_postgres import PostgresConnection, PostgresPositions
from semel.session.transaction import Row, rows_of

_POLL_MS: Final = 1_000
_BYTES_MAX: Final = 32 * 1024 * 1024
_POSTGRES_DRIVERS: Final = frozenset({"psycopg", "psycopg2"})
_LOOK_AT_TOPICS_S: Final = 30.0
"""How often to look whether a topic has more partitions."""


class Delivery:
    """Some records, and a database transaction in which they are processed.

    Leaving the block commits the results and the position together; an exception rolls both back, and the same records
    are delivered again.
    """

    def __init__(self, inbox: Inbox, table: pa.Table, next_offsets: Mapping[TopicPartition, int]) -> None:
        self._inbox = inbox
        self.table = table
        """The records, columns as in Spark's Kafka connector; those of a partition in their order."""
        self.next_offsets = dict(next_offsets)
        self._transaction: AbstractContextManager[Any] | None = None

    def rows(self) -> Iterator[Row]:
        """The records one by one."""
        return rows_of(self.table)

    def __enter__(self) -> Any:
        """What the store gives for the user's statements; with SQLite, the connection."""
        self._transaction = self._inbox.store.transaction()
        handle = self._transaction.__enter__()
        try:
            # First of all: if another reader was here, nothing needs to be processed.
            self._inbox.move(handle, self)
        except BaseException as error:
            self._transaction.__exit__(type(error), error, error.__traceback__)
            raise
        return handle

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._transaction is not None
        self._transaction.__exit__(kind, error, trace)
        if error is None:
            self._inbox.delivered(self)


class Inbox:
    """Reads all partitions of some topics, each record into one committed transaction of the database.

    `store` is a connection to SQLite (`sqlite3`) or Postgres (`psycopg`), or a `PositionStore` of another kind.
    Settings have Kafka's names.

    >>> with Inbox(sqlite3.connect("app.db"), bootstrap="127.0.0.1:9092", topics=["orders"],
    ...            name="billing") as inbox:  # doctest: +SKIP
    ...     for delivery in inbox:
    ...         with delivery as connection:
    ...             connection.executemany("INSERT INTO orders VALUES (?)", [(row.value,) for row in delivery.rows()])
    """

    def __init__(
        self,
        store: sqlite3.Connection | PostgresConnection | PositionStore,
        settings: Mapping[str, object] | None = None,
        *,
        topics: Collection[str],
        name: str,
        start: Edge = "earliest",
        delivery_records_max: int = 100_000,
        **more_settings: object,
    ) -> None:
        if isinstance(topics, str) or not topics:
            raise ConfigError('topics must be a list of at least one name, such as ["orders"].')
        self.store: PositionStore = _store_in(store)
        self.name = name
        self._settings = {**(settings or {}), **more_settings}
        self._topics = sorted(set(topics))
        self._start: Edge = start
        self._records_max = delivery_records_max
        self._backlog = Backlog()
        self._positions: dict[TopicPartition, int] = {}
        self._fetcher: Fetcher | None = None
        self._under_way: Delivery | None = None
        self._is_stopping = False
        self._looked_at = 0.0

    def __enter__(self) -> Self:
        self._fetcher = Fetcher(self._settings)
        try:
            self.rewind()
        except BaseException:
            self._fetcher.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reading().close()
        self._fetcher = None

    def stop(self) -> None:
        """Let `for delivery in inbox` end after the present one."""
        self._is_stopping = True

    def __iter__(self) -> Iterator[Delivery]:
        while not self._is_stopping:
            delivery = self.next()
            if delivery is not None:
                yield delivery

    def next(self, timeout_ms: float = _POLL_MS) -> Delivery | None:
        """The next records, or None if none came in time."""
        fetcher = self._reading()
        if self._under_way is not None:
            self.rewind()  # what was handed out last was not processed, or nobody knows whether it was
        if not self._backlog.record_count:
            if time.monotonic() - self._looked_at >= _LOOK_AT_TOPICS_S and self._partitions() != self._positions.keys():
                self.rewind()
            self._backlog.add(fetcher.fetch(timeout_ms))
        if not self._backlog.record_count:
            return None
        taken = self._backlog.take(self._records_max, _BYTES_MAX)
        next_offsets = {partition_of(records): records.next_offset for records in taken}
        self._under_way = Delivery(self, to_read_table(taken), next_offsets)
        return self._under_way

    # -- for the delivery ------------------------------------------------------------------------------------------

    def move(self, handle: Any, delivery: Delivery) -> None:
        if delivery is not self._under_way:
            raise InvalidState("This delivery is not the last one: its records are delivered again. Take the next one.")
        moves = {partition: (self._positions[partition], end) for partition, end in delivery.next_offsets.items()}
        self.store.move(handle, self.name, moves)

    def delivered(self, delivery: Delivery) -> None:
        self._positions |= delivery.next_offsets
        self._under_way = None

    def rewind(self) -> None:
        """To what the database says: it is the only one who knows."""
        fetcher = self._reading()
        self._backlog.clear()
        self._under_way = None
        known, wanted = self.store.load(self.name), self._partitions()
        new = sorted(wanted - known.keys())
        first = fetcher.offsets_for(new, self._start) if new else {}
        if first and self._start == "latest":
            # Who begins at the end must not begin there again after a restart, and skip what came in between.
            with self.store.transaction() as handle:
                self.store.move(handle, self.name, {partition: (at, at) for partition, at in first.items()})
        self._positions = {partition: known[partition] for partition in wanted if partition in known} | first
        fetcher.assign(self._positions)

    def _partitions(self) -> frozenset[TopicPartition]:
        self._looked_at = time.monotonic()
        with Admin(self._settings) as admin:
            found = admin.describe_topics(*self._topics)
        return frozenset(TopicPartition(topic, one.partition) for topic in found for one in found[topic].partitions)

    def _reading(self) -> Fetcher:
        if self._fetcher is None:
            raise InvalidState("The inbox is not open: use it in a `with` block.")
        return self._fetcher


def _store_in(given: Any) -> PositionStore:
    if isinstance(given, sqlite3.Connection):
        return SqlitePositions(given)
    if {kind.__module__.partition(".")[0] for kind in type(given).__mro__} & _POSTGRES_DRIVERS:
        return PostgresPositions(given)
    if not hasattr(given, "move"):
        raise ConfigError(
            f"An inbox cannot tell what database a {type(given).__qualname__} leads to; nothing was read. Give it a "
            "connection of sqlite3 or psycopg, PostgresPositions(connection) for another driver of Postgres, or a "
            "PositionStore."
        )
    return given
