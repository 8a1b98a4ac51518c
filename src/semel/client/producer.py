"""Idempotent and transactional producing, from Arrow tables and from single records.

A `Producer` belongs to one thread and has none of its own: records leave while its methods run, and all of them have
left when `flush` or `commit` returns.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from semel.client.cluster import Answered, Cluster
from semel.client.config import ProducerConfig
from semel.client.ownership import EXHAUSTED_EPOCH, NOBODY, ProducerIdentity
from semel.client.partitions import TopicPartition
from semel.client.routing import encode_for_partitions
from semel.client.rows import Row, RowBuffer, are_few, encode_few_rows, to_table
from semel.client.sender import Sender, Stored
from semel.client.settings import parse_config
from semel.client.shared import SharedTransaction
from semel.client.transaction_owner import Outcome, TransactionOwner
from semel.client.transaction_state import State
from semel.client.transactions import GroupMember
from semel.errors import ConfigError, SemelError
from semel.records import EncodedBatch, StickyPartitioner
from semel.wire import Api

__all__ = ["Outcome", "Producer"]

BUFFERED_BYTES_MAX = 32 * 1024 * 1024
"""How much may wait for its acknowledgement before a call to send blocks."""


class Producer:
    """Writes each record once; with a `transactional.id`, all records of a transaction or none.

    Settings have Kafka's names, in a mapping or as keywords with underscores. A new transactional producer fences every
    older one of the same id.

    >>> with Producer(bootstrap_servers=bootstrap, transactional_id="orders") as producer:
    ...     with producer.transaction():
    ...         producer.send("orders", b"value", key=b"key")
    """

    def __init__(
        self,
        settings: Mapping[str, object] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        make_cluster: Callable[..., Cluster] = Cluster,
        **more_settings: object,
    ) -> None:
        config = parse_config({**(settings or {}), **more_settings})
        self.config: ProducerConfig = config.producer
        self.cluster = make_cluster(config.client, clock=clock, sleep=sleep)
        self._rows = RowBuffer()
        self._unsent_bytes = 0
        self._sticky = StickyPartitioner(random.Random(), batch_bytes=self.config.batch_bytes)
        self._sender = Sender(
            self.cluster,
            self.config,
            before_first_write=self._add_partitions if self.config.transactional_id else None,
            next_identity=self._next_identity if self.config.idempotent and not self.config.transactional_id else None,
        )
        self._owner: TransactionOwner | None = None
        try:
            self._initialize()
        except BaseException:
            self.cluster.close()
            raise

    def _initialize(self) -> None:
        config = self.config
        if config.transactional_id is not None:
            self._owner = TransactionOwner(
                self.cluster, self._sender, config.transactional_id, config.transaction_timeout_ms
            )
        elif config.idempotent:
            self._sender.start_over(self._fresh_identity())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._abort_after(error)
            self.cluster.close()
            return
        try:
            if self._owner is None:
                self.flush()
        finally:
            self.close()

    def close(self) -> None:
        """Abort an open transaction and close the connections. Records that were not flushed are dropped."""
        try:
            if self._owner is not None and self._owner.can_abort:
                self.abort()
        finally:
            self.cluster.close()

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

    # -- records ---------------------------------------------------------------------------------------------------

    def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Collection[tuple[str, bytes | None]] = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> None:
        """Take one record. It leaves when a batch is full, and at the latest with `flush` or `commit`."""
        self._check_open()
        stamped = int(time.time() * 1000) if timestamp_ms is None else timestamp_ms
        if self._rows.add(topic, value, key, headers, partition, stamped) >= self.config.batch_bytes:
            self._send_rows()
            with self._dooming():
                self._push()

    def send_table(self, topic: str | None, table: pa.Table, *, partition: int | None = None) -> None:
        """Take a table with a column `value` and, if wanted, `key`, `headers`, `timestamp`, `partition` and `topic`.

        Column `topic` is read where no topic is given.
        Blocks while more than 32 MB wait to be acknowledged. Rows keep their order within a partition.
        """
        self._check_open()
        self._send_rows()
        self._send_table(topic, table, partition)
        with self._dooming():
            self._push()

    def send_encoded(self, topic: str, partition: int, batch: EncodedBatch) -> None:
        """Take a batch that was encoded before, perhaps elsewhere; its data is stamped in place. Blocks as above."""
        self._check_open()
        self._send_rows()
        with self._dooming():
            self._enqueue([(topic, partition, batch)])

    def flush(self) -> list[Stored]:
        """Wait until everything is acknowledged; returns what was stored since the last flush.

        Raises the first failure. Outside of transactions the records behind it are given up with it rather than
        reordered, and the producer can go on.
        """
        self._check_open()
        self._send_rows()
        with self._dooming():
            self._sender.drain()
        stored, self._sender.stored = self._sender.stored, []
        if self._owner is not None:
            self._owner.note_stored(stored)
        failed, self._sender.failure = self._sender.failure, None
        if failed is not None:
            failed.add_note(f"{self._sender.failed_records} records were given up with it.")
            self._sender.failed_records = 0
            raise failed
        return stored

    def _send_rows(self) -> None:
        first_failure: SemelError | None = None
        for topic, rows in self._rows.take().items():
            try:
                self._send_rows_of(topic, rows)
            except SemelError as error:  # the records of other topics are not dropped for it
                first_failure = first_failure or error
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
            self._enqueue(
                encode_for_partitions(
                    topic,
                    table,
                    partition,
                    partition_count=self._partition_count,
                    sticky=self._sticky,
                    config=self.config,
                    now_ms=int(time.time() * 1000),
                )
            )

    def _partition_count(self, topic: str) -> int:
        return len(self.cluster.leaders(topic))

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
        if self._owner is not None:
            self._owner.check_open()

    def _dooming(self) -> AbstractContextManager[None]:
        return nullcontext() if self._owner is None else self._owner.doomed_by_failure()

    # -- transactions ----------------------------------------------------------------------------------------------

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
            error.add_note(
                f"The abort was not confirmed ({second}); the coordinator aborts it after transaction.timeout.ms."
            )

    def send_offsets(self, offsets: Mapping[TopicPartition, int], group: GroupMember | str) -> None:
        """Put the next positions to read into the transaction, so that input and output are committed as one."""
        member = GroupMember(group) if isinstance(group, str) else group
        named = {TopicPartition(*tp): offset for tp, offset in offsets.items()}
        owner = self._transactional()
        if named:
            owner.send_offsets(named, member)

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
