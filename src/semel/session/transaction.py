"""One turn of a session: the records it consumes, what is written for them, and how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import pyarrow as pa

from semel.client.partitions import TopicPartition
from semel.client.producer import Outcome
from semel.errors import InvalidState
from semel.session.inputs import Portion

Headers = Collection[tuple[str, bytes | None]]


class Row(NamedTuple):
    """A record, for jobs that look at one at a time."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


def rows_of(table: pa.Table) -> Iterator[Row]:
    """The rows of a table as it was read."""
    for row in table.to_pylist():
        headers = tuple((header["key"], header["value"]) for header in row["headers"] or ())
        timestamp_ms = int(row["timestamp"].timestamp() * 1000 + 0.5) if row["timestamp"] is not None else -1
        yield Row(row["topic"], row["partition"], row["offset"], timestamp_ms, row["key"], row["value"], headers)


class _Owner(Protocol):
    """The session, as its transaction sees it."""

    def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None,
        headers: Headers,
        partition: int | None,
        timestamp_ms: int | None,
    ) -> None: ...

    def send_table(self, topic: str | None, table: pa.Table, *, partition: int | None) -> None: ...

    def settle(self, transaction: Transaction) -> None: ...

    def give_up(self, transaction: Transaction, error: BaseException) -> None: ...


class Transaction:
    """All of what is sent here becomes visible together with the progress in `table`, or none of it does.

    Leaving the block commits; an exception aborts, and the records come again in the next transaction. If the group
    takes a partition away meanwhile, the block runs to its end and the transaction is aborted then: `outcome` tells.
    """

    def __init__(self, owner: _Owner, take: Callable[[], Portion]) -> None:
        self._owner = owner
        self._take = take
        self._portion: Portion | None = None
        self.outcome: Outcome | None = None
        """None while it is open, and if there was nothing to do."""
        self.reason: str | None = None
        """Why it was aborted."""

    @property
    def portion(self) -> Portion:
        if self._portion is None:
            raise InvalidState("This transaction has not begun: use it in a `with` block.")
        return self._portion

    @property
    def table(self) -> pa.Table:
        """The records, columns as in Spark's Kafka connector; those of a partition in their order."""
        return self.portion.table

    @property
    def is_empty(self) -> bool:
        return self.portion.is_empty

    @property
    def next_offsets(self) -> dict[TopicPartition, int]:
        """The group's progress if it commits."""
        return dict(self.portion.next_offsets)

    def rows(self) -> Iterator[Row]:
        """The records one by one. Convenient and slow: work on `table` where there are many."""
        return rows_of(self.table)

    # -- what is written -------------------------------------------------------------------------------------------

    def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Headers = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> None:
        """Write one record. Records with the same key keep their order."""
        self._check_open()
        self._owner.send(topic, value, key=key, headers=headers, partition=partition, timestamp_ms=timestamp_ms)

    def send_table(self, topic: str | None, table: pa.Table, *, partition: int | None = None) -> None:
        """Write a table with a column `value` and, if wanted, `key`, `headers`, `timestamp`, `partition`, `topic`.

        A table that still has the column `offset` is one that was read: its `partition` says where it came from and
        is left out, so that the key decides where it goes.
        """
        self._check_open()
        if "offset" in table.column_names and "partition" in table.column_names:
            table = table.drop_columns(["partition"])
        self._owner.send_table(topic, table, partition=partition)

    def _check_open(self) -> None:
        if self._portion is None or self.outcome is not None:
            raise InvalidState("This transaction is not open: write inside of its `with` block.")

    # -- its life --------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._portion = self._take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._owner.settle(self)
        else:
            self._owner.give_up(self, error)

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Whatever cancels the caller, the transaction is ended before anything else happens to the session.
        await asyncio.shield(asyncio.to_thread(self.__exit__, kind, error, trace))
