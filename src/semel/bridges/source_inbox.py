"""An inbox for change events: each transaction of the source database is one piece of a transaction here, never less.

Beside the position of each partition it keeps the number of the last transaction, in the same table and the same
database transaction: what lies between the positions and that number was read ahead, and is known when it comes again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final, Self

import pyarrow as pa

from semel.bridges.inbox import store_in
from semel.bridges.positions import Position, PositionStore
from semel.bridges.postgres import PostgresConnection
from semel.client.partitions import TopicPartition
from semel.errors import ConfigError, InvalidState
from semel.session.source_reader import (
    MEMORY_BYTES_MAX,
    SourceOptions,
    SourceReader,
    SourceTransaction,
    SourceTransactions,
)
from semel.session.transaction import Row, rows_of

_POLL_MS: Final = 1_000
_NOWHERE: Final = Position(-1)
"""Where a partition stands that the database does not have: nowhere else can it be moved from by two readers."""


def number_place(source: str) -> TopicPartition:
    """Where the number of the next transaction is kept, among the positions. No topic has such a name.

    >>> number_place("shop")
    TopicPartition(topic='shop/transaction', partition=0)
    """
    return TopicPartition(f"{source}/transaction", 0)


class SourceDelivery:
    """Whole transactions of the source, and a database transaction in which they are applied.

    Leaving the block commits the results and the position together; an exception rolls both back, and the same
    transactions are delivered again.
    """

    def __init__(self, inbox: SourceInbox, transactions: SourceTransactions) -> None:
        self._inbox = inbox
        self._transactions = transactions
        self.next_offsets: dict[TopicPartition, int] = dict(transactions.positions)
        self._transaction: AbstractContextManager[Any] | None = None
        self.was_entered = False

    def transactions(self) -> Iterator[SourceTransaction]:
        """One by one, in commit order."""
        return iter(self._transactions)

    @property
    def first(self) -> int:
        """The number of the first transaction."""
        return self._transactions.first

    @property
    def last(self) -> int:
        """The number of the last transaction."""
        return self._transactions.last

    @property
    def count(self) -> int:
        """How many events they have."""
        return self._transactions.count

    @property
    def is_small(self) -> bool:
        """Whether all events are in memory at once without harm: about 32 MB."""
        return self._transactions.is_small

    @property
    def table(self) -> pa.Table:
        """All events, in the order of transactions and of events in them; columns as in Spark's Kafka connector."""
        return self._transactions.table

    def tables(self) -> Iterator[pa.Table]:
        """The same in tables of at most about 32 MB."""
        return self._transactions.tables()

    def rows(self) -> Iterator[Row]:
        """The same one by one."""
        return (row for table in self.tables() for row in rows_of(table))

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
            error.add_note(
                f"In a delivery of inbox {self._inbox.name!r} (transactions {self.first} to {self.last} of source "
                f"{self._inbox.source!r}); it is rolled back."
            )
        self._transaction.__exit__(kind, error, trace)
        if error is None:
            self._inbox.delivered(self)


class SourceInbox:
    """Reads the change events of a source database, and gives out its transactions whole and in commit order.

    `source` is the name of the relay that writes the events, `store` a connection to SQLite (`sqlite3`) or Postgres
    (`psycopg`). Several transactions may come in one delivery, which is one transaction of the database.

    >>> with SourceInbox(sqlite3.connect("copy.db"), bootstrap="127.0.0.1:9092", source="shop",
    ...                  topics=["accounts", "entries"], name="copy") as inbox:  # doctest: +SKIP
    ...     for delivery in inbox:
    ...         with delivery as connection:
    ...             for transaction in delivery.transactions():
    ...                 for row in transaction.rows():
    ...                     apply(connection, row.topic, json.loads(row.value))
    """

    def __init__(
        self,
        store: sqlite3.Connection | PostgresConnection | PositionStore,
        settings: Mapping[str, object] | None = None,
        *,
        source: str,
        topics: Collection[str],
        name: str,
        transactions_topic: str | None = None,
        after: int | None = None,
        delivery_events_max: int = 100_000,
        memory_bytes_max: int = MEMORY_BYTES_MAX,
        spill_folder: str | None = None,
        **more_settings: object,
    ) -> None:
        self.store: PositionStore = store_in(store)
        self.name = name
        self.source = source
        self._events_max = delivery_events_max
        options = SourceOptions(source, topics, transactions_topic, after, memory_bytes_max, spill_folder)
        self._reader = SourceReader({**(settings or {}), **more_settings}, options)
        self._topics = frozenset(options.all_topics)
        self._stored: dict[TopicPartition, Position] = {}
        self._under_way: SourceDelivery | None = None
        self._is_stopping = False

    def __enter__(self) -> Self:
        self._reader.__enter__()
        try:
            self.rewind()
        except BaseException:
            self._reader.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.__exit__(kind, error, trace)

    def stop(self) -> None:
        """Let `for delivery in inbox` end after the present one."""
        self._is_stopping = True

    def __iter__(self) -> Iterator[SourceDelivery]:
        while not self._is_stopping:
            delivery = self.next()
            if delivery is not None:
                yield delivery
                self._check_was_entered(delivery)

    def _check_was_entered(self, delivery: SourceDelivery) -> None:
        if delivery is self._under_way and not delivery.was_entered:
            raise InvalidState(
                "The last delivery was never entered, so its position was not stored, and its transactions would be "
                "delivered again for ever. Write `with delivery as connection:` and put your statements inside; to "
                "have them delivered again on purpose, call inbox.rewind()."
            )

    def next(self, timeout_ms: float = _POLL_MS) -> SourceDelivery | None:
        """The next whole transactions, or None if none became whole in time."""
        if self._under_way is not None or self._reader.must_begin:
            self.rewind()  # what was handed out last was not processed, or nobody knows whether it was
        transactions = self._reader.next(timeout_ms, self._events_max)
        if transactions is None:
            return None
        self._under_way = SourceDelivery(self, transactions)
        return self._under_way

    @property
    def applied(self) -> int | None:
        """The last transaction that is in the database; None if there is none."""
        stored = self._stored.get(number_place(self.source))
        return None if stored is None else stored.next_offset - 1

    @property
    def positions(self) -> dict[TopicPartition, int]:
        """The next offset of every partition, as far as deliveries are committed."""
        return {place: at.next_offset for place, at in self._stored.items() if place.topic in self._topics}

    def is_at_end(self) -> bool:
        """Whether everything that the topics have now was read. A transaction that is not whole yet may remain."""
        return self._under_way is None and self._reader.is_at_end()

    def waits_for(self) -> str | None:
        """What was read of a transaction that is not whole yet, in words; None if there is none."""
        return self._reader.waits_for()

    # -- for the delivery --------------------------------------------------------------------------------------------

    def move(self, handle: Any, delivery: SourceDelivery) -> None:
        if delivery is not self._under_way:
            raise InvalidState("This delivery is not the last one: its events are delivered again. Take the next one.")
        ends = self._ends_of(delivery)
        moves = {place: (self._stored.get(place, _NOWHERE), at) for place, at in ends.items()}
        moves = {place: (start, end) for place, (start, end) in moves.items() if start != end}
        self.store.move(handle, self.name, moves)

    def _ends_of(self, delivery: SourceDelivery) -> dict[TopicPartition, Position]:
        ids = self._reader.topic_ids
        ends = {place: Position(offset, ids[place]) for place, offset in delivery.next_offsets.items()}
        return ends | {number_place(self.source): Position(delivery.last + 1)}

    def delivered(self, delivery: SourceDelivery) -> None:
        self._stored |= self._ends_of(delivery)
        self._under_way = None

    def rewind(self) -> None:
        """To what the database says: it is the only one who knows."""
        self._under_way = None
        self._stored = self.store.load(self.name)
        number = self._stored.get(number_place(self.source))
        self._check_same(has_number=number is not None)
        self._reader.begin(self._stored, None if number is None else number.next_offset - 1)

    def _check_same(self, *, has_number: bool) -> None:
        read_before = {place.topic for place in self._stored}
        if not has_number and self._stored:
            raise ConfigError(
                f"The database has positions of {self.name!r} in {', '.join(sorted(read_before))}, and no number of a "
                f"transaction of source {self.source!r}: it was another reader until now. Nothing was read. Use "
                "another name=, with empty tables."
            )
        new = sorted(self._topics - read_before)
        if has_number and new:
            raise ConfigError(
                f"{self.name!r} has not read topic {new[0]!r} until now, so its events up to transaction "
                f"{self.applied} would be missing. Nothing was read. Use another name=, with empty tables, or with "
                f"after={self.applied} if they have what these events say."
            )
