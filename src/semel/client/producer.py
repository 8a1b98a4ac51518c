"""Idempotent and transactional producing, from Arrow tables and from single records.

A `Producer` belongs to one thread. In a transaction records leave while its methods run, and all of them have left when
`commit` returns. Without transactions a background thread sends what has waited for `linger.ms`; `flush` and `close`
return when everything is stored.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from semel.client import left_open
from semel.client.cluster import Answered, Cluster
from semel.client.config import ProducerConfig
from semel.client.linger import Linger, StartThread, start_daemon
from semel.client.ownership import EXHAUSTED_EPOCH, NOBODY, ProducerIdentity
from semel.client.partitions import TopicPartition
from semel.client.routing import checked_table, encode_for_partitions, wrong_partition
from semel.client.rows import Headers, Row, RowBuffer, are_few, encode_few_rows, make_row, to_table
from semel.client.sender import Sender, Stored
from semel.client.settings import merge_settings, parse_config
from semel.client.shared import SharedTransaction
from semel.client.transaction_owner import Outcome, TransactionOwner
from semel.client.transaction_state import State
from semel.client.transactions import GroupMember
from semel.errors import ConfigError, Fenced, InvalidState, SemelError, TransactionAborted
from semel.records import EncodedBatch, StickyPartitioner
from semel.wire import Api

__all__ = ["Outcome", "Producer"]

BUFFERED_BYTES_MAX = 32 * 1024 * 1024
"""How much may wait for its acknowledgement before a call to send blocks."""

_THREAD_END_S = 5.0
_LOG = logging.getLogger("semel.client")


class Producer:
    """Writes each record once; with a `transactional.id`, all records of a transaction or none.

    Settings have Kafka's names, in a mapping or as keywords with underscores. A new transactional producer fences every
    older one of the same id. `docs/client.md` says when records leave and what the errors mean.

    >>> with Producer(bootstrap_servers=bootstrap, transactional_id="orders") as producer:
    ...     with producer.transaction():
    ...         producer.send("orders", b"value", key=b"key")
    """

    _is_closed = True  # until it has opened
    _linger: Linger | None = None

    def __init__(
        self,
        settings: Mapping[str, object] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        make_cluster: Callable[..., Cluster] = Cluster,
        start_thread: StartThread | None = start_daemon,
        resumed: ProducerIdentity | None = None,
        **more_settings: object,
    ) -> None:
        config = parse_config(merge_settings(settings, more_settings))
        self.config: ProducerConfig = config.producer
        self.cluster = make_cluster(config.client, clock=clock, sleep=sleep)
        self._process = os.getpid()
        self._rows = RowBuffer()
        self._partition_counts: dict[str, int] = {}
        self._unsent_bytes = 0
        self._sticky = StickyPartitioner(random.Random(), batch_bytes=self.config.batch_bytes)
        self._sender = Sender(
            self.cluster,
            self.config,
            before_first_write=self._add_partitions if self.config.transactional_id else None,
            next_identity=self._next_identity if self.config.idempotent and not self.config.transactional_id else None,
        )
        self._owner: TransactionOwner | None = None
        # Guards the cluster and the sender. `send` mostly does without: a lost broker must not hold it up.
        self._lock = threading.RLock()
        self._turn: AbstractContextManager[object] = nullcontext()
        if self.config.transactional_id is None:
            self._turn = self._lock
            if start_thread is not None:
                self._linger = Linger(self, self.config.linger_ms, start_thread)
        try:
            self._initialize(resumed)
        except BaseException:
            self.cluster.close()
            raise
        self._is_closed = False
        # What an open transaction holds was never promised. And a simulated program may be killed.
        self._must_be_closed = self.config.transactional_id is None and start_thread is not None
        if self._must_be_closed:
            left_open.watch(self)

    def _initialize(self, resumed: ProducerIdentity | None) -> None:
        config = self.config
        if config.transactional_id is not None:
            self._owner = TransactionOwner(
                self.cluster, self._sender, config.transactional_id, config.transaction_timeout_ms, resumed
            )
        elif config.idempotent:
            self._sender.start_over(self._fresh_identity())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        if self._owner is not None:
            try:
                self._abort_after(error)
            finally:
                self._disconnect()
            return
        try:
            self.close()
        except SemelError as second:
            notes = "".join(f" {note}" for note in getattr(second, "__notes__", ()))
            error.add_note(f"Records sent before it could not be delivered: {second}{notes}")

    def close(self) -> None:
        """Send what was taken and wait until it is stored, then close the connections. An open transaction is aborted.

        Raises as `flush` does if something could not be delivered within `delivery.timeout.ms`; the connections are
        closed all the same. A second call does nothing.
        """
        if self._is_closed:
            return
        if self._linger is not None:
            self._linger.stop()
        try:
            if self._owner is None:
                self.flush()
            elif self._owner.can_abort:
                self.abort()
        finally:
            self._disconnect()

    def _disconnect(self) -> None:
        with self._turn:
            self._is_closed = True
            left_open.forget(self)
            self.cluster.close()
        if self._linger is not None:
            self._linger.wait_stopped(_THREAD_END_S)

    def __del__(self) -> None:
        if self._linger is not None:
            self._linger.stop()
        if not self._is_closed and self._must_be_closed and os.getpid() == self._process:
            left_open.report_lost(self, "before it was garbage-collected")

    @property
    def unsent(self) -> tuple[int, int]:
        """How many records have not left yet, and how many have left and have no answer yet."""
        never_sent, unanswered = self._sender.record_counts
        return self._rows.record_count + never_sent, unanswered

    def flush_at_exit(self, timeout_ms: float) -> None:
        """Called for producers without transactions that are open when the interpreter exits. Bounded by `timeout_ms`.

        A daemon thread may be in `flush` and hold the lock for all of `delivery.timeout.ms`. If it still does when the
        time is up, the program ends without its records.
        """
        deadline = time.monotonic() + timeout_ms / 1000
        if not self._lock.acquire(timeout=timeout_ms / 1000):
            left_open.forget(self)
            return
        try:
            self._send_rows()
            left_ms = max(0.0, deadline - time.monotonic()) * 1000
            self._sender.drain(timeout_ms=min(left_ms, self.config.delivery_timeout_ms))
        finally:
            self._lock.release()
            self._disconnect()

    @property
    def state(self) -> State:
        """Where a transactional producer stands; one without transactions is always ready."""
        return State.READY if self._owner is None else self._owner.state

    @property
    def identity(self) -> ProducerIdentity:
        """The producer id and epoch now in use."""
        return self._sender.identity

    @property
    def transaction_protocol(self) -> int:
        """1 or 2, as the cluster has finalized it (KIP-890)."""
        return self.cluster.transaction_protocol

    @property
    def prepared(self) -> ProducerIdentity | None:
        """Under which identity the transaction was begun that an earlier producer of this id has left prepared.

        Only two-phase transactions (KIP-939) are kept: `end_prepared` ends them as was decided, `begin` aborts them.
        """
        return None if self._owner is None else self._owner.prepared

    # -- records ---------------------------------------------------------------------------------------------------

    def send(
        self,
        topic: str,
        value: bytes | str | None,
        *,
        key: bytes | str | None = None,
        headers: Headers = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> None:
        """Take one record, or raise and take nothing. Text is written as UTF-8.

        It leaves after `linger.ms` or when a batch is full, and at the latest with `flush` or `close`. In a transaction
        it leaves when a batch is full or with `commit`.
        """
        self._check_open()
        stamped = int(time.time() * 1000) if timestamp_ms is None else timestamp_ms
        try:
            row = make_row(topic, value, key, headers, partition, stamped, self.config.request_bytes_max)
            if topic not in self._partition_counts or partition is not None:
                self._check_place(topic, partition)
        except SemelError as error:
            if self._owner is not None:
                self._owner.doom(error)
            raise
        added = self._rows.add(topic, row)
        if added.topic_bytes >= self.config.batch_bytes:
            with self._turn:
                self._send_rows()
                with self._dooming():
                    self._push()
        if added.is_first and self._linger is not None:
            self._linger.wake()

    def _check_place(self, topic: str, partition: int | None) -> None:
        """Raise if the topic or the partition is not there. Asks a broker only for what is not known yet."""
        count = self._partition_counts.get(topic)
        if count is None:
            with self._turn:
                count = self._partition_count(topic)
        if partition is not None and partition >= count:
            with self._turn:
                self.cluster.refresh_topics([topic])  # it may have grown
                count = self._partition_count(topic)
            if partition >= count:
                raise wrong_partition(topic, partition, count, "the record was not taken")

    def send_table(self, topic: str | None, table: pa.Table, *, partition: int | None = None) -> None:
        """Take a table with a column `value` and, if wanted, `key`, `headers`, `timestamp`, `partition` and `topic`.

        Column `topic` is read where no topic is given. A table of up to 32 MB is taken whole or, if it raises, not at
        all. Blocks while more than 32 MB wait to be acknowledged. Rows keep their order within a partition.
        """
        self._check_open()
        with self._turn:
            self._send_rows()
            with self._dooming():
                self._send_table(topic, checked_table(table), partition)
                self._push()
        self._wake_if_busy()

    def send_encoded(self, topic: str, partition: int, batch: EncodedBatch) -> None:
        """Take a batch that was encoded before, perhaps elsewhere; its data is stamped in place. Blocks as above."""
        self._check_open()
        with self._turn:
            self._send_rows()
            with self._dooming():
                self._enqueue([(topic, partition, batch)])
        self._wake_if_busy()

    def _wake_if_busy(self) -> None:
        if self._linger is not None and not self._sender.is_idle:
            self._linger.wake()

    def flush(self) -> list[Stored]:
        """Wait until everything is acknowledged; returns what was stored since the last flush.

        Raises the first failure; its `undelivered` holds the records that were given up. Outside of transactions those
        are the refused ones and what was in flight behind them in the same partition, which is never reordered, and
        the producer can go on.
        """
        self._check_open()
        with self._turn:
            self._send_rows()
            with self._dooming():
                self._sender.drain()
            stored, self._sender.stored = self._sender.stored, []
            if self._owner is not None:
                self._owner.note_stored(stored)
            failed = self._sender.take_failure()
        if failed is not None:
            self._partition_counts.clear()
            raise failed
        return stored

    def advance(self) -> bool:
        """One step of the background thread: send what waits, without waiting. True if nothing is left to do."""
        with self._turn:
            if self._is_closed:
                return True
            given_up = self._sender.failed_records
            try:
                self._send_rows()
                self._unsent_bytes = 0
                self._sender.nudge()
            except SemelError as error:
                _LOG.warning("Records wait to be sent: %s", error)
                return False
            if self._sender.failed_records > given_up:
                _LOG.error(
                    "%d records were given up: %s The next flush() or close() raises this.",
                    self._sender.failed_records - given_up,
                    self._sender.failure,
                )
            return self._rows.is_empty and self._sender.is_idle

    def _send_rows(self) -> None:
        first_failure: SemelError | None = None
        for topic, rows in self._rows.take().items():
            try:
                self._send_rows_of(topic, rows)
            except SemelError as error:  # the records of other topics are not dropped for it
                first_failure = first_failure or error
            finally:
                # Not before: another thread may end the program meanwhile, and must not find that nothing waits.
                self._rows.note_gone(len(rows))
        if first_failure is not None:
            raise first_failure

    def _send_rows_of(self, topic: str, rows: Sequence[Row]) -> None:
        if not are_few(rows):
            self._send_table(topic, to_table(topic, rows), None)
            return
        with self._dooming():
            self._enqueue(
                encode_few_rows(
                    topic, rows, partition_count=self._partition_count, sticky=self._sticky, config=self.config
                )
            )

    def _send_table(self, topic: str | None, table: pa.Table, partition: int | None) -> None:
        with self._dooming():
            encoded = encode_for_partitions(
                topic,
                table,
                partition,
                partition_count=self._partition_count,
                sticky=self._sticky,
                config=self.config,
                now_ms=int(time.time() * 1000),
            )
            # Outside of transactions nothing undoes the first batches if a later row is refused.
            is_whole = self._owner is None and table.nbytes <= BUFFERED_BYTES_MAX
            self._enqueue(list(encoded) if is_whole else encoded)

    def _partition_count(self, topic: str) -> int:
        """As far as is known: rows that were taken must not be lost because nobody can be asked just now."""
        known = self.cluster.known_leaders(topic)
        if known is not None:
            self._partition_counts[topic] = len(known)
        elif topic not in self._partition_counts:
            self._partition_counts[topic] = len(self.cluster.leaders(topic))
        return self._partition_counts[topic]

    def _enqueue(self, encoded: Iterable[tuple[str, int, EncodedBatch]]) -> None:
        for name, index, batch in encoded:
            if self._owner is not None:
                self._owner.note_sending()
            self._sender.enqueue(name, index, batch)
            self._unsent_bytes += len(batch.data)
            # Many small batches for many partitions go in few requests; large ones leave while the rest is encoded.
            if self._unsent_bytes >= self.config.request_bytes_max:
                self._push()

    def _push(self) -> None:
        self._unsent_bytes = 0
        if self._sender.buffered_bytes > BUFFERED_BYTES_MAX:
            self._sender.drain(down_to_bytes=BUFFERED_BYTES_MAX // 2)
        else:
            self._sender.nudge()

    def _check_open(self) -> None:
        if self._is_closed:
            raise InvalidState("This producer is closed: make a new one. Nothing was taken.")
        if self._owner is not None:
            self._owner.check_open()

    def _dooming(self) -> AbstractContextManager[None]:
        return nullcontext() if self._owner is None else self._owner.doomed_by_failure()

    # -- transactions ----------------------------------------------------------------------------------------------

    def try_two_phase_commit(self) -> bool:
        """Let no timeout end this producer's transactions (KIP-939), for somebody who decides about them elsewhere.

        False, and nothing has changed, if the cluster does not offer it or does not allow it to this user.
        """
        return self._transactional().try_two_phase_commit()

    def end_prepared(self, *, commit: bool) -> None:
        """End what an earlier producer has left `prepared`, as was decided about it."""
        self._transactional().end_prepared(commit=commit)

    def begin(self) -> None:
        """Open a transaction."""
        self._transactional().begin()

    @contextmanager
    def transaction(self) -> Iterator[Self]:
        """A transaction that commits at the end of the block, and aborts if the block raises.

        `CommitUnknown` leaves it as it is: call `resolve`.
        """
        self.begin()
        try:
            yield self
            self.commit()
        except BaseException as error:
            self._abort_after(error)
            raise

    def _abort_after(self, error: BaseException) -> None:
        """Abort because of `error`, which must reach the caller even if the abort fails as well."""
        if self._owner is None or not self._owner.can_abort:
            return
        try:
            self.abort()
        except SemelError as second:
            if isinstance(error, TransactionAborted) and isinstance(second, Fenced):
                raise second from error  # the abort has found out why: to begin again would be of no use
            error.add_note(
                f"The abort was not confirmed ({second}); the coordinator aborts it after transaction.timeout.ms."
            )

    def send_offsets(
        self,
        offsets: Mapping[TopicPartition, int],
        group: GroupMember | str,
        *,
        notes: Mapping[TopicPartition, str] | None = None,
    ) -> None:
        """Put the next positions to read into the transaction, so that input and output are committed as one.

        `notes` are kept beside the positions, as Kafka's offset metadata.
        """
        member = GroupMember(group) if isinstance(group, str) else group
        named = {TopicPartition(*tp): offset for tp, offset in offsets.items()}
        owner = self._transactional()
        if named:
            owner.send_offsets(named, member, notes)

    def commit(self, *, timeout_ms: float | None = None) -> None:
        """Make all of the transaction visible. Returning means that it is committed.

        `timeout_ms` is for the last step alone, by default `default.api.timeout.ms`. Raises `TransactionAborted` or
        another `KafkaError` if it cannot be (then `abort`), `Fenced` if another producer took over, and `CommitUnknown`
        if the answer was lost (then `resolve`, and never abort).
        """
        owner = self._transactional()
        if owner.state is State.OPEN:
            self.flush()
        owner.commit(timeout_ms)

    def abort(self) -> None:
        """Leave no trace of the transaction. Safe to repeat while it raises."""
        owner = self._transactional()
        self._rows.clear()
        owner.abort()

    def resolve(self) -> Outcome:
        """After `CommitUnknown`: see to it that the transaction can no longer change, then look what it became.

        May be called again if it raises. If another producer took over meanwhile, the outcome is told all the same, and
        the next transaction raises `Fenced`.
        """
        return self._transactional().resolve()

    def share(self) -> SharedTransaction:
        """Let other processes write inside the open transaction; see `SharedWriter`. This producer alone ends it."""
        return self._transactional().share()

    def adopt(self, stored: Collection[Stored]) -> None:
        """Take over what shared writers have stored: `resolve` looks there for the outcome of a lost commit."""
        self._transactional().note_stored(stored)

    def _transactional(self) -> TransactionOwner:
        if self._owner is None:
            raise ConfigError("This producer has no transactional.id: set one to use transactions.")
        return self._owner

    def _add_partitions(self, partitions: Collection[TopicPartition]) -> None:
        self._transactional().add_partitions(partitions)

    # -- identity without transactions -----------------------------------------------------------------------------

    def _fresh_identity(self) -> ProducerIdentity:
        def read(response: Any) -> Answered:
            return Answered(response.error_code)

        response = self.cluster.call_until_settled(
            lambda: None,
            lambda: None,
            Api.INIT_PRODUCER_ID,
            read,
            what="a producer id",
            transactional_id=None,
            transaction_timeout=self.config.transaction_timeout_ms,
            producer_id=NOBODY.producer_id,
            producer_epoch=NOBODY.producer_epoch,
        )
        return ProducerIdentity(response.producer_id, response.producer_epoch)

    def _next_identity(self, current: ProducerIdentity) -> ProducerIdentity:
        """Without a transactional id the epoch is the producer's own to raise, until it is used up."""
        if current.producer_epoch >= EXHAUSTED_EPOCH:
            return self._fresh_identity()
        return ProducerIdentity(current.producer_id, current.producer_epoch + 1)
