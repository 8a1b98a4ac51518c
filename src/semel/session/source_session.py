"""Consume, transform and produce by whole transactions of a source database: what one of them gave appears as one.

No group shares the partitions: a transaction lies in any of them, so one process reads them all. Which one that is, the
`transactional.id` decides, which the session that was started last takes over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self

import pyarrow as pa

from semel.client.partitions import TopicPartition
from semel.client.producer import Outcome, Producer
from semel.client.progress_topic import ProgressTopic
from semel.client.transaction_state import State
from semel.errors import CommitUnknown, ConfigError, Fenced, InvalidState, TransactionAborted, WorkTooLong
from semel.metrics.parts import SESSION
from semel.observe import Pipeline, Work
from semel.session.claims import LOG
from semel.session.sigterm import SigtermWatch
from semel.session.source_progress import SourceProgress
from semel.session.source_reader import (
    MEMORY_BYTES_MAX,
    SourceOptions,
    SourceReader,
    SourceTransaction,
    SourceTransactions,
)
from semel.session.transaction import Headers, Row, rows_of
from semel.wire import ErrorCode

PROGRESS_TOPIC: Final = "semel-source-progress"
_POLL_MS: Final = 1_000
_AS_NAMED: Final = "the pipeline's name"
_TRIES_OF_ONE: Final = 2
"""A pause of the machine may hit a transaction once."""


class SourceSession:
    """Settings have Kafka's names. `source` is the name of the relay that writes the events, `name` the pipeline's.

    The progress is a record in the compacted topic `progress_topic`, inside the transaction. With it the positions are
    committed to the group `group`, by default `name`, so that lag tools see them; None commits none.

    >>> with SourceSession(bootstrap="127.0.0.1:9092", source="shop", topics=["accounts", "entries"],
    ...                    name="booking") as session:  # doctest: +SKIP
    ...     for transaction in session:
    ...         for booked in transaction.source_transactions():
    ...             transaction.send("bookings", make_booking(booked.rows()))
    """

    def __init__(
        self,
        settings: Mapping[str, object] | None = None,
        *,
        source: str,
        topics: Collection[str],
        name: str,
        group: str | None = _AS_NAMED,
        transactions_topic: str | None = None,
        after: int | None = None,
        transaction_events_max: int = 10_000,
        memory_bytes_max: int = MEMORY_BYTES_MAX,
        spill_folder: str | None = None,
        progress_topic: str = PROGRESS_TOPIC,
        end_on_sigterm: bool = True,
        **more_settings: object,
    ) -> None:
        given = {key.replace("_", "."): value for key, value in {**(settings or {}), **more_settings}.items()}
        if "transactional.id" in given:
            raise ConfigError("transactional.id is what a session makes itself: write name=... in its place.")
        self.name = name
        self._pipeline = Pipeline(SESSION, name)
        self._work: Work | None = None
        self._leave_work: Callable[[], None] | None = None
        self._group = name if group is _AS_NAMED else group
        self._options = SourceOptions(source, topics, transactions_topic, after, memory_bytes_max, spill_folder)
        self._reader = SourceReader(given, self._options)
        self._settings = {**given, "transactional.id": self._key, "linger.ms": given.get("linger.ms", 0)}
        self._progress_topic = progress_topic
        self._events_max = transaction_events_max
        self._limit = transaction_events_max
        self._timeouts = 0
        self._producer: Producer | None = None
        self._progress: SourceProgress | None = None
        self._open: SourceTurn | None = None
        self._is_stopping = False
        self._sigterm = SigtermWatch(self.stop)
        self._ends_on_sigterm = end_on_sigterm
        self.committed_count = 0
        self.aborted_count = 0

    @property
    def _key(self) -> str:
        return f"/source/{self.name}"

    def __enter__(self) -> Self:
        if self._ends_on_sigterm:
            self._sigterm.start()
        try:
            self._reader.__enter__()
            # The producer first: it ends what an earlier session left open, which then cannot change any more.
            self._producer = Producer(self._settings)
            self._records = ProgressTopic(
                self._producer.cluster, self._progress_topic, kind="progress topic", option="progress_topic="
            )
            self._records.ensure()
            value = self._records.read_value(self._key, lambda value: SourceProgress.decode(value).producer_id)
            self._progress = None if value is None else SourceProgress.decode(value)
            self._check_same()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._pipeline.failed(error)
        self._close()
        if error is None:
            self._sigterm.raise_exit()

    def _close(self) -> None:
        self._sigterm.end()
        producer, self._producer = self._producer, None
        try:
            if producer is not None:
                producer.close()
        finally:
            self._reader.__exit__(None, None, None)

    def _check_same(self) -> None:
        progress, options = self._progress, self._options
        if progress is None:
            return
        if progress.source != options.source:
            raise ConfigError(
                f"Pipeline {self.name!r} has read source {progress.source!r} until now, and the transactions of "
                f"{options.source!r} have other numbers. Nothing was read. Use another name=."
            )
        new = sorted(set(options.all_topics) - {place.topic for place in progress.positions})
        if new:
            raise ConfigError(
                f"Pipeline {self.name!r} has not read topic {new[0]!r} until now, so its events up to transaction "
                f"{progress.applied} would be missing. Nothing was read. Use another name=."
            )

    def stop(self) -> None:
        """Let `for transaction in session` end after the present turn. May be called from another thread."""
        self._is_stopping = True

    @property
    def applied(self) -> int | None:
        """The last transaction of the source that is committed; None if there is none."""
        return None if self._progress is None else self._progress.applied

    def is_at_end(self) -> bool:
        """Whether everything that the topics have now was read. A transaction that is not whole yet may remain."""
        return self._open is None and self._reader.is_at_end()

    def transaction(self, timeout_ms: float = _POLL_MS) -> SourceTurn:
        """The next whole transactions of the source, and a Kafka transaction; without any in time it is empty."""
        self._sigterm.raise_exit()
        return SourceTurn(self, timeout_ms)

    def __iter__(self) -> Iterator[SourceTurn]:
        """One turn after the other, each committed when the loop comes back for the next."""
        while not self._is_stopping:
            with self.transaction() as transaction:
                if not transaction.is_empty:
                    yield transaction

    # -- for the turn ------------------------------------------------------------------------------------------------

    @property
    def producer(self) -> Producer:
        """What the turns write with."""
        if self._producer is None:
            raise InvalidState("The session is not open: use it in a `with` block.")
        return self._producer

    def take(self, turn: SourceTurn, timeout_ms: float) -> SourceTransactions | None:
        """Begin a turn."""
        if self._open is not None:
            raise InvalidState("A transaction of this session is open already: leave its block first.")
        producer = self.producer
        if producer.state is State.UNKNOWN:
            raise InvalidState(
                "What became of the last commit is not known: close this session, and open a new one, which finds out."
            )
        if self._reader.must_begin:
            progress = self._progress
            self._reader.begin({} if progress is None else progress.positions, self.applied)
        self._pipeline.looked()
        transactions = self._reader.next(timeout_ms, self._limit)
        if transactions is not None:
            producer.begin()
            self._open = turn
            identity = producer.identity
            self._work = self._pipeline.begin(
                transactional_id=self._key,
                producer_id=identity.producer_id,
                producer_epoch=identity.producer_epoch,
                source_transaction=transactions.last,
            )
            self._leave_work = self._work.enter()
        return transactions

    def commit(self, turn: SourceTurn, transactions: SourceTransactions) -> None:
        """End a turn: as committed, or as aborted if it can only be that."""
        try:
            self._commit(turn, transactions)
        except Fenced as error:
            self._explain(error)
            raise

    def _commit(self, turn: SourceTurn, transactions: SourceTransactions) -> None:
        producer = self.producer
        ids = self._reader.topic_ids
        positions = {place: (offset, ids[place]) for place, offset in transactions.positions.items()}
        progress = SourceProgress(
            self._options.source, transactions.last, positions, producer_id=producer.identity.producer_id
        )
        if turn.doomed is not None:
            self._aborted(turn, transactions, turn.doomed)
            return
        try:
            producer.flush()
            place = self._records.place(self._key)
            producer.send(place.topic, progress.encode(), key=self._key.encode(), partition=place.partition)
            if self._group is not None:
                producer.send_offsets({place: offset for place, (offset, _) in positions.items()}, self._group)
            producer.commit()
        except TransactionAborted as error:
            self._aborted(turn, transactions, error)
            return
        except CommitUnknown as error:
            LOG.info("The answer to a commit was lost; finding out what became of it.")
            self._open = None
            try:
                outcome = producer.resolve()
            except BaseException:
                if self._work is not None:
                    self._work.unknown(error)
                self._leave()
                raise
            if outcome is not Outcome.COMMITTED:
                self._aborted(turn, transactions, error)
                return
        except BaseException as error:
            self.give_up(error)
            raise
        self._progress = progress
        self._open = None
        self._limit, self._timeouts = min(self._events_max, max(1, self._limit * 2)), 0
        self.committed_count += 1
        if self._work is not None:
            self._work.committed(transactions.count)
        self._leave()
        turn.outcome = Outcome.COMMITTED

    def _aborted(self, turn: SourceTurn, transactions: SourceTransactions, error: Exception) -> None:
        self._rewind(error)
        turn.outcome = Outcome.ABORTED
        LOG.info("A transaction was aborted (%s); its events come again.", error)
        self._limit = max(1, min(self._limit, transactions.count) // 2)
        self._timeouts = self._timeouts + 1 if len(transactions) == 1 else 0
        if self._timeouts >= _TRIES_OF_ONE:
            raise WorkTooLong(
                f"Transaction {transactions.last} of source {self._options.source!r} was aborted "
                f"{self._timeouts} times in a row ({error}). It cannot be cut, and nothing of it was committed; what "
                "came before it is. Raise transaction.timeout.ms (the broker allows up to transaction.max.timeout.ms), "
                "or do the slow work before the first write."
            ) from error

    def give_up(self, error: BaseException) -> None:
        """Abort a turn because of an error, which must reach the caller even if the abort fails as well."""
        try:
            self._rewind(error)
        except Exception as second:
            error.add_note(f"The abort was not confirmed ({second}); transaction.timeout.ms ends it.")
        if isinstance(error, Fenced):
            self._explain(error)

    def _explain(self, error: Fenced) -> None:
        # An id that its coordinator has forgotten after a week of silence was taken over by nobody.
        if error.code != ErrorCode.invalid_producer_id_mapping and not getattr(error, "__notes__", None):
            error.add_note(
                f"Another session of the name {self.name!r} was started and has taken over, so this one stops: what it "
                "had not committed is aborted, and nothing is lost or repeated."
            )

    def _leave(self) -> None:
        self._work = None
        if self._leave_work is not None:
            self._leave_work()
            self._leave_work = None

    def _rewind(self, error: BaseException) -> None:
        if self._work is not None:
            self._work.aborted(error)
        self._leave()
        self._open = None
        self._reader.must_begin = True
        self.aborted_count += 1
        if self.producer.state in (State.OPEN, State.DOOMED):
            self.producer.abort()


class SourceTurn:
    """All of what is sent here becomes visible together, with the progress in the source's transactions, or none of it.

    Leaving the block commits; an exception aborts, and the same transactions come again.
    """

    def __init__(self, session: SourceSession, timeout_ms: float) -> None:
        self._session = session
        self._timeout_ms = timeout_ms
        self._transactions: SourceTransactions | None = None
        self.outcome: Outcome | None = None
        """None while it is open, and if there was nothing to do."""
        self.doomed: TransactionAborted | None = None
        """Why it can only be aborted: what is written from then on is dropped."""

    def __enter__(self) -> Self:
        self._transactions = self._session.take(self, self._timeout_ms)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._transactions is None:
            return
        if error is None:
            self._session.commit(self, self._transactions)
        else:
            self.outcome = Outcome.ABORTED
            self._session.give_up(error)

    @property
    def is_empty(self) -> bool:
        return self._transactions is None

    def source_transactions(self) -> Iterator[SourceTransaction]:
        """One by one, in commit order."""
        return iter(self._transactions or ())

    @property
    def first(self) -> int:
        """The number of the first transaction."""
        return self._taken.first

    @property
    def last(self) -> int:
        """The number of the last transaction."""
        return self._taken.last

    @property
    def next_offsets(self) -> dict[TopicPartition, int]:
        """How far the partitions are done with if it commits."""
        return {} if self._transactions is None else dict(self._transactions.positions)

    @property
    def table(self) -> pa.Table:
        """All events, in the order of transactions and of events in them; columns as in Spark's Kafka connector."""
        return self._taken.table

    def rows(self) -> Iterator[Row]:
        """The same one by one."""
        return (row for table in self._taken.tables() for row in rows_of(table))

    @property
    def _taken(self) -> SourceTransactions:
        if self._transactions is None:
            raise InvalidState("This transaction has no events: look at is_empty first.")
        return self._transactions

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
        with self._writing() as producer:
            producer.send(topic, value, key=key, headers=headers, partition=partition, timestamp_ms=timestamp_ms)

    def send_table(self, topic: str | None, table: pa.Table, *, partition: int | None = None) -> None:
        """Write a table with a column `value` and, if wanted, `key`, `headers`, `timestamp`, `partition`, `topic`.

        A table that still has the column `offset` is one that was read: its `partition` is left out.
        """
        if "offset" in table.column_names and "partition" in table.column_names:
            table = table.drop_columns(["partition"])
        with self._writing() as producer:
            producer.send_table(topic, table, partition=partition)

    @contextmanager
    def _writing(self) -> Iterator[Producer]:
        if self._transactions is None or self.outcome is not None:
            raise InvalidState("This transaction is not open: write inside of its `with` block.")
        try:
            yield self._session.producer
        except TransactionAborted as error:
            self.doomed = error
