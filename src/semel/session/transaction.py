"""One turn of a session: the records it consumes, what is written for them, and how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import pyarrow as pa

from semel.client.partitions import TopicPartition
from semel.client.producer import Outcome
from semel.errors import InvalidState
from semel.session.async_steps import AsyncSteps
from semel.session.inputs import Portion
from semel.session.thread_use import ThreadUse

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


def origins(table: pa.Table) -> str:
    """Where the records of a table came from, in words.

    >>> origins(pa.table({"topic": ["t", "t"], "partition": [0, 0], "offset": [5, 9]}))
    't-0 offsets 5 to 9'
    """
    ranges = table.group_by(["topic", "partition"]).aggregate([("offset", "min"), ("offset", "max")]).to_pylist()
    parts = [f"{one['topic']}-{one['partition']} offsets {one['offset_min']} to {one['offset_max']}" for one in ranges]
    return ", ".join(sorted(parts)) or "no records"


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

    def dead_letter(self, row: Row, error: BaseException | str) -> None: ...

    def flush(self) -> None: ...

    def enter_work(self) -> Callable[[], None] | None: ...

    def settle(self, transaction: Transaction) -> None: ...

    def give_up(self, transaction: Transaction, error: BaseException) -> None: ...


class Transaction:
    """All of what is sent here becomes visible together with the progress in `table`, or none of it does.

    Leaving the block commits; an exception aborts, and the records come again in the next transaction. If the group
    takes a partition away meanwhile, the block runs to its end and the transaction is aborted then: `outcome` tells.
    """

    def __init__(self, owner: _Owner, take: Callable[[], Portion], steps: AsyncSteps, use: ThreadUse) -> None:
        self._owner = owner
        self._take = take
        self._steps = steps
        self._use = use
        self._portion: Portion | None = None
        self._leave_work: Callable[[], None] | None = None
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
        with self._writing():
            self._owner.send(topic, value, key=key, headers=headers, partition=partition, timestamp_ms=timestamp_ms)

    def send_table(self, topic: str | None, table: pa.Table, *, partition: int | None = None) -> None:
        """Write a table with a column `value` and, if wanted, `key`, `headers`, `timestamp`, `partition`, `topic`.

        A table that still has the column `offset` is one that was read: its `partition` says where it came from and
        is left out, so that the key decides where it goes.
        """
        if "offset" in table.column_names and "partition" in table.column_names:
            table = table.drop_columns(["partition"])
        with self._writing():
            self._owner.send_table(topic, table, partition=partition)

    def dead_letter(self, row: Row, error: BaseException | str) -> None:
        """Put a record that cannot be processed into the session's dead-letter topic, once, in this transaction.

        >>> for row in transaction.rows():  # doctest: +SKIP
        ...     try:
        ...         transaction.send("out", work(row), key=row.key)
        ...     except ValueError as error:
        ...         transaction.dead_letter(row, error)
        """
        with self._writing():
            self._owner.dead_letter(row, error)

    def flush(self) -> None:
        """Wait until everything that was written so far is acknowledged; raises if the broker refused it.

        There is no need to call it before the end of the block, which does the same.
        """
        with self._writing():
            self._owner.flush()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._use.step(in_turn=True):
            if self._portion is None or self.outcome is not None:
                raise InvalidState("This transaction is not open: write inside of its `with` block.")
            yield

    # -- its life --------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        with self._use.step():
            self._portion = self._take()
            self._use.begin_turn()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._use.step(in_turn=True):
            try:
                if error is None:
                    self._owner.settle(self)
                else:
                    self._owner.give_up(self, error)
            finally:
                self._use.end_turn()

    async def __aenter__(self) -> Self:
        self._use.is_async = True
        try:
            await self._steps.run(self.__enter__)
            self._leave_work = self._owner.enter_work()  # in the task's own context: the step ran in a copy of it
            return self
        except asyncio.CancelledError as error:
            if self._portion is not None:
                # Its block will never run, and nothing else would end it.
                with suppress(asyncio.CancelledError):
                    await self._steps.run(partial(self.__exit__, type(error), error, None))
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._steps.run(partial(self.__exit__, kind, error, trace))
        finally:
            if self._leave_work is not None:
                self._leave_work()
