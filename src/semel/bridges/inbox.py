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

from semel.bridges.positions import Position, PositionStore
from semel.bridges.postgres import PostgresConnection, PostgresPositions
from semel.bridges.sqlite import SqlitePositions
from semel.client.admin import Admin
from semel.client.fetched import to_read_table
from semel.client.fetcher import Fetcher
from semel.client.offsets import Edge
from semel.client.partitions import TopicPartition
from semel.errors import ConfigError, InvalidState, OffsetOutOfRange, TopicRecreated, UnknownTopic
from semel.session.backlog import Backlog, partition_of
from semel.session.claims import LOG
from semel.session.transaction import Row, origins, rows_of

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
        self.was_entered = False

    def rows(self) -> Iterator[Row]:
        """The records one by one."""
        return rows_of(self.table)

    @property
    def count(self) -> int:
        """How many records."""
        return self.table.num_rows

    @property
    def is_small(self) -> bool:
        """Whether all records are in memory at once without harm: always, as the inbox takes no more."""
        return True

    def tables(self) -> Iterator[pa.Table]:
        """The records in parts; here it is one."""
        yield self.table

    def __enter__(self) -> Any:
        """What the store gives for the user's statements; with SQLite, the connection."""
        self.was_entered = True
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
        if error is not None:
            error.add_note(f"In a delivery of inbox {self._inbox.name!r} ({origins(self.table)}); it is rolled back.")
        self._transaction.__exit__(kind, error, trace)
        if error is None:
            self._inbox.delivered(self)


_ELSEWHERE: Final = {
    "idle_ms": "call inbox.next(timeout_ms), which returns None if nothing has come, or end the loop by inbox.stop()",
    "stop": "call inbox.stop(), after which the loop ends",
    "retry_s": "after an error of your connection, make a new one and a new Inbox; it goes on from the database",
    "transaction_records_max": "write delivery_records_max=",
    "group": "its position is in your database, under name=",
}
"""Options of `semel.run` that are written in another way here."""


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
        for option in more_settings:
            if option in _ELSEWHERE:
                raise ConfigError(f"{option}= is no option of an Inbox: {_ELSEWHERE[option]}. Nothing was read.")
        self.store: PositionStore = store_in(store)
        self.name = name
        self._settings = {**(settings or {}), **more_settings}
        self._topics = sorted(set(topics))
        self._start: Edge = start
        self._records_max = delivery_records_max
        self._backlog = Backlog()
        self._positions: dict[TopicPartition, Position] = {}
        self._stored: dict[TopicPartition, Position] = {}
        """What the database has, where that is not the same: positions in a topic that is no more."""
        self._fetcher: Fetcher | None = None
        self._admin: Admin | None = None
        """With connections of its own: a fetch that waits for records would keep its questions waiting."""
        self._under_way: Delivery | None = None
        self._is_astray = False
        """Records were taken and not delivered: what is fetched next would not follow what the database has."""
        self._is_stopping = False
        self._looked_at = 0.0

    def __enter__(self) -> Self:
        self._fetcher = Fetcher(self._settings)
        try:
            self._admin = Admin(self._settings)
            self.rewind()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        for client in (self._fetcher, self._admin):
            if client is not None:
                client.close()
        self._fetcher = self._admin = None

    def stop(self) -> None:
        """Let `for delivery in inbox` end after the present one."""
        self._is_stopping = True

    def __iter__(self) -> Iterator[Delivery]:
        while not self._is_stopping:
            delivery = self.next()
            if delivery is not None:
                yield delivery
                self._check_was_entered(delivery)

    def _check_was_entered(self, delivery: Delivery) -> None:
        if delivery is self._under_way and not delivery.was_entered:
            raise InvalidState(
                "The last delivery was never entered, so its position was not stored, and its records would be "
                "delivered again for ever. Write `with delivery as connection:` and put your statements inside; to "
                "have the records delivered again on purpose, call inbox.rewind()."
            )

    def next(self, timeout_ms: float = _POLL_MS, *, records_max: int | None = None) -> Delivery | None:
        """The next records, or None if none came in time.

        `records_max` is for this one, where it is lower than the inbox's `delivery_records_max`.
        """
        fetcher = self._reading()
        if self._under_way is not None or self._is_astray:
            self.rewind()  # what was handed out last was not processed, or nobody knows whether it was
        if not self._backlog.record_count:
            if time.monotonic() - self._looked_at >= _LOOK_AT_TOPICS_S and self._has_changed():
                self.rewind()
            self._fetch(fetcher, timeout_ms)
        if not self._backlog.record_count:
            return None
        self._is_astray = True
        count = self._records_max if records_max is None else min(records_max, self._records_max)
        taken = self._backlog.take(count, _BYTES_MAX)
        if self._is_other_topic({records.topic for records in taken}):
            self.rewind()
            return None
        next_offsets = {partition_of(records): records.next_offset for records in taken}
        self._under_way = Delivery(self, to_read_table(taken), next_offsets)
        self._is_astray = False
        return self._under_way

    @property
    def positions(self) -> dict[TopicPartition, int]:
        """The next offset of every partition, as far as deliveries are committed."""
        return {partition: at.next_offset for partition, at in self._positions.items()}

    def is_at_end(self) -> bool:
        """Whether everything that the topics have now was delivered."""
        fetcher = self._reading()
        if self._backlog.record_count or self._is_astray:
            return False
        positions = fetcher.positions
        try:
            ends = fetcher.end_offsets()
        except UnknownTopic:
            if not self._has_changed():
                raise
            self.rewind()  # the topic was created again with fewer partitions
            return False
        return all(positions[partition] >= end for partition, end in ends.items())

    # -- for the delivery ------------------------------------------------------------------------------------------

    def move(self, handle: Any, delivery: Delivery) -> None:
        if delivery is not self._under_way:
            raise InvalidState("This delivery is not the last one: its records are delivered again. Take the next one.")
        moves = {
            partition: (
                self._stored.get(partition, at),
                at._replace(next_offset=delivery.next_offsets.get(partition, at.next_offset)),
            )
            for partition, at in self._positions.items()
            if partition in delivery.next_offsets or self._lacks_topic(partition)
        }
        self.store.move(handle, self.name, moves)

    def _lacks_topic(self, partition: TopicPartition) -> bool:
        """Whether the database has a position of an earlier release, without the topic's id."""
        stored = self._stored.get(partition)
        return stored is not None and stored.topic_id is None and self._positions[partition].topic_id is not None

    def delivered(self, delivery: Delivery) -> None:
        for partition in [one for one in self._stored if one in delivery.next_offsets or self._lacks_topic(one)]:
            del self._stored[partition]
        for partition, end in delivery.next_offsets.items():
            self._positions[partition] = self._positions[partition]._replace(next_offset=end)
        self._under_way = None

    def rewind(self) -> None:
        """To what the database says: it is the only one who knows."""
        fetcher = self._reading()
        self._is_astray = True
        self._backlog.clear()
        self._under_way = None
        known, ids = self.store.load(self.name), self._topics_now()
        positions: dict[TopicPartition, Position] = {}
        self._stored = {}
        first: dict[Edge, list[TopicPartition]] = {"earliest": [], "latest": []}
        topics_known = {partition.topic for partition in known}
        for partition, topic_id in ids.items():
            stored = known.get(partition)
            if stored is not None and (topic_id is None or stored.topic_id in (None, topic_id)):
                positions[partition] = Position(stored.next_offset, topic_id)
                self._stored[partition] = stored
            elif stored is not None:
                self._stored[partition] = stored
                first["earliest"].append(partition)
                LOG.warning("Topic %r was deleted and created again: it is read from its beginning.", partition.topic)
            else:
                # A partition that the inbox has not seen in a topic that it has is new, and nothing of it was read.
                first["earliest" if partition.topic in topics_known else self._start].append(partition)
        for edge, partitions in first.items():
            found = fetcher.offsets_for(partitions, edge) if partitions else {}
            positions |= {partition: Position(at, ids[partition]) for partition, at in found.items()}
        if first["latest"]:
            # A reader that begins at the end must not begin there again after a restart, and skip what came in between.
            begun = {partition: (positions[partition], positions[partition]) for partition in first["latest"]}
            with self.store.transaction() as handle:
                self.store.move(handle, self.name, begun)
        self._positions = positions
        fetcher.assign({partition: at.next_offset for partition, at in positions.items()})
        self._is_astray = False

    # -- topics ----------------------------------------------------------------------------------------------------

    def _topics_now(self) -> dict[TopicPartition, str | None]:
        """Every partition there is, with the id of its topic."""
        self._looked_at = time.monotonic()
        if self._admin is None:
            raise InvalidState("The inbox is not open: use it in a `with` block.")
        found = self._admin.describe_topics(*self._topics)
        return {
            TopicPartition(name, one.partition): None if topic.topic_id is None else str(topic.topic_id)
            for name, topic in found.items()
            for one in topic.partitions
        }

    def _has_changed(self) -> bool:
        return self._topics_now() != {partition: at.topic_id for partition, at in self._positions.items()}

    def _is_other_topic(self, topics: Collection[str]) -> bool:
        """Asked after records have come: whether they may be of another topic than the positions."""
        now = self._topics_now()
        return any(
            at.topic_id is not None and now.get(partition) != at.topic_id
            for partition, at in self._positions.items()
            if partition.topic in topics
        )

    def _fetch(self, fetcher: Fetcher, timeout_ms: float) -> None:
        try:
            self._backlog.add(fetcher.fetch(timeout_ms))
        except OffsetOutOfRange as error:
            if not isinstance(error, TopicRecreated) and not self._has_changed():
                raise
            self.rewind()

    def _reading(self) -> Fetcher:
        if self._fetcher is None:
            raise InvalidState("The inbox is not open: use it in a `with` block.")
        return self._fetcher


def store_in(given: Any) -> PositionStore:
    """The positions behind a connection of the user's."""
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
