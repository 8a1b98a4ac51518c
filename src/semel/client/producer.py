"""Idempotent and transactional producing, from Arrow tables and from single records.

A `Producer` belongs to one thread and has none of its own: records leave while its methods run, and all of them have
left when `flush` or `commit` returns.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from semel.client.cluster import Answered, Cluster
from semel.client.config import ProducerConfig, parse_config
from semel.client.failures import failure
from semel.client.fetcher import find_marker
from semel.client.ownership import EXHAUSTED_EPOCH, NOBODY, Owner, ProducerIdentity, decide_claim
from semel.client.partitions import TopicPartition
from semel.client.routing import RowBuffer, encode_for_partitions
from semel.client.sender import Sender, Stored
from semel.client.shared import SharedTransaction
from semel.client.transaction_state import Event, State, next_state
from semel.client.transactions import GroupMember, TransactionCalls
from semel.errors import (
    BrokerUnreachable,
    CommitUnknown,
    ConfigError,
    Fenced,
    InvalidState,
    KafkaError,
    RequestTimedOut,
    SemelError,
    TransactionAborted,
)
from semel.records import StickyPartitioner
from semel.wire import Api, ErrorCode, verdict

BUFFERED_BYTES_MAX = 32 * 1024 * 1024
"""How much may wait for its acknowledgement before a call to send blocks."""

_DISCARD_PATIENCE_MS = 500


class Outcome(Enum):
    """How a transaction ended. There is no third value here: `CommitUnknown` is raised instead of told."""

    COMMITTED = "committed"
    ABORTED = "aborted"


class Producer:
    """Writes each record once; with a `transactional.id`, all records of a transaction or none.

    Settings have Kafka's names, in a mapping or as keywords with underscores. A new transactional producer fences every
    older one of the same id.

    >>> with Producer(bootstrap_servers="127.0.0.1:9092", transactional_id="orders") as producer:  # doctest: +SKIP
    ...     with producer.transaction():
    ...         producer.send("out", b"value", key=b"key")
    """

    def __init__(
        self,
        settings: Mapping[str, object] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        **more_settings: object,
    ) -> None:
        config = parse_config({**(settings or {}), **more_settings})
        self.config: ProducerConfig = config.producer
        self.cluster = Cluster(config.client, clock=clock, sleep=sleep)
        self._rows = RowBuffer()
        self._unsent_bytes = 0
        self._sticky = StickyPartitioner(random.Random(), batch_bytes=self.config.batch_bytes)
        self._state = State.READY
        self._reason_dead: SemelError | None = None
        self._transaction_started = False  # it may be open at the coordinator
        self._surely_open = False  # the coordinator, or a leader that asked it, has confirmed that it is
        self._needs_new_epoch = False
        self._written: dict[TopicPartition, int] = {}
        self._offsets_sent: dict[str, dict[TopicPartition, int]] = {}
        self._calls: TransactionCalls | None = None
        self._sender = Sender(
            self.cluster,
            self.config,
            before_first_write=self._add_partitions if self.config.transactional_id else None,
            next_identity=self._next_identity if self.config.idempotent and not self.config.transactional_id else None,
        )
        try:
            self._initialize()
        except BaseException:
            self.cluster.close()
            raise

    def _initialize(self) -> None:
        if self.config.transactional_id is not None:
            self._calls = TransactionCalls(
                self.cluster, self.config.transactional_id, self.config.transaction_timeout_ms
            )
            self._sender.start_over(self._calls.init_producer_id())
            self._sender.protocol = self._calls.protocol
        elif self.config.idempotent:
            self._sender.start_over(self._fresh_identity())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._calls is None:
                self.flush()
        finally:
            self.close()

    def close(self) -> None:
        """Abort an open transaction and close the connections. Records that were not flushed are dropped."""
        try:
            if self._state in (State.OPEN, State.DOOMED):
                self.abort()
        finally:
            self.cluster.close()

    @property
    def state(self) -> State:
        return self._state

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
        self._check_may_write()
        stamped = int(time.time() * 1000) if timestamp_ms is None else timestamp_ms
        if self._rows.add(topic, value, key, headers, partition, stamped) >= self.config.batch_bytes:
            self._send_rows()
            with self._doomed_by_failure():
                self._push()

    def send_table(self, topic: str | None, table: pa.Table, *, partition: int | None = None) -> None:
        """Take a table with a column `value` and, if wanted, `key`, `headers`, `timestamp`, `partition` and `topic`.

        Column `topic` is read where no topic is given.
        Blocks while more than 32 MB wait to be acknowledged. Rows keep their order within a partition.
        """
        self._check_may_write()
        self._send_rows()
        self._send_table(topic, table, partition)
        with self._doomed_by_failure():
            self._push()

    def flush(self) -> list[Stored]:
        """Wait until everything is acknowledged; returns what was stored since the last flush.

        Raises the first failure. Outside of transactions the records behind it are given up with it rather than
        reordered, and the producer can go on.
        """
        self._check_may_write()
        self._send_rows()
        with self._doomed_by_failure():
            self._sender.drain()
        stored, self._sender.stored = self._sender.stored, []
        self._remember_written(stored)
        failed, self._sender.failure = self._sender.failure, None
        if failed is not None:
            raise failed
        return stored

    def _send_rows(self) -> None:
        for topic, table in self._rows.take_tables():
            self._send_table(topic, table, None)

    def _send_table(self, topic: str | None, table: pa.Table, partition: int | None) -> None:
        with self._doomed_by_failure():
            encoded = encode_for_partitions(
                topic,
                table,
                partition,
                partition_count=lambda name: len(self.cluster.leaders(name)),
                sticky=self._sticky,
                config=self.config,
                now_ms=int(time.time() * 1000),
            )
            for name, index, batch in encoded:
                self._transaction_started = True
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

    def _check_may_write(self) -> None:
        if self._reason_dead is not None:
            raise self._reason_dead
        if self._calls is not None and self._state is not State.OPEN:
            raise InvalidState(f"Begin a transaction before writing: this producer is {self._state.value}.")

    @contextmanager
    def _doomed_by_failure(self) -> Iterator[None]:
        """Whatever fails inside leaves the transaction with nothing but an abort, or the producer dead."""
        try:
            yield
        except SemelError as error:
            self._fail(error)
            raise

    def _fail(self, error: SemelError) -> None:
        if self._calls is None:
            return
        if isinstance(error, KafkaError) and error.is_fatal:
            self._die(error)
        else:
            self._state = next_state(self._state, Event.FAIL)

    def _die(self, error: SemelError) -> None:
        self._state = next_state(self._state, Event.DIE)
        self._reason_dead = error

    # -- transactions ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Open a transaction."""
        calls = self._transactional()
        if self._reason_dead is not None:
            raise self._reason_dead
        following = next_state(self._state, Event.BEGIN)
        if self._needs_new_epoch:
            self._renew_epoch(calls)
        self._sender.protocol = calls.protocol
        self._transaction_started = False
        self._surely_open = False
        self._offsets_sent = {}
        self._written = {}
        self._state = following

    @contextmanager
    def transaction(self) -> Iterator[Self]:
        """A transaction that commits at the end of the block, and aborts if the block raises.

        `CommitUnknown` leaves it as it is: call `resolve`.
        """
        self.begin()
        try:
            yield self
            self.commit()
        except BaseException:
            if self._state in (State.OPEN, State.DOOMED):
                self.abort()
            raise

    def send_offsets(self, offsets: Mapping[TopicPartition, int], group: GroupMember | str) -> None:
        """Put the next positions to read into the transaction, so that input and output are committed as one."""
        calls = self._transactional()
        self._check_may_write()
        member = GroupMember(group) if isinstance(group, str) else group
        if not offsets:
            return
        named = {TopicPartition(*tp): offset for tp, offset in offsets.items()}
        self._transaction_started = True
        with self._doomed_by_failure():
            calls.commit_offsets(self.identity, named, member)
        self._surely_open = True
        self._offsets_sent.setdefault(member.group_id, {}).update(named)

    def commit(self, *, timeout_ms: float | None = None) -> None:
        """Make all of the transaction visible. Returning means that it is committed.

        `timeout_ms` is for the last step alone, by default `default.api.timeout.ms`. Raises `TransactionAborted` or
        another `KafkaError` if it cannot be (then `abort`), `Fenced` if another producer took over, and `CommitUnknown`
        if the answer was lost (then `resolve`, and never abort).
        """
        calls = self._transactional()
        if self._state is State.OPEN:
            self.flush()
        self._state = next_state(self._state, Event.COMMIT)
        if not self._transaction_started:
            self._state = next_state(self._state, Event.COMMITTED)
            return
        try:
            following = calls.end(self.identity, commit=True, patience=self.cluster.patience(timeout_ms))
        except BrokerUnreachable:
            self._state = next_state(self._state, Event.COMMIT_REFUSED)
            raise
        except KafkaError as error:
            if error.earlier_answer_lost:
                # The first try may have committed; a refusal of its repeat proves nothing.
                raise self._commit_lost(error) from error
            if error.is_fatal and self._was_ended_by_coordinator(calls):
                self._state = next_state(self._state, Event.COMMIT_REFUSED)
                raise TransactionAborted(
                    "The coordinator has aborted this transaction: it was open for longer than transaction.timeout.ms "
                    f"({self.config.transaction_timeout_ms} ms). Nothing of it will be seen; abort and begin again.",
                    code=error.code,
                ) from error
            self._fail(error)
            raise
        except SemelError as error:
            # Besides a lost answer: one that cannot be read, or a login that was refused before a repeat.
            raise self._commit_lost(error) from error
        self._next_transaction(following)
        self._state = next_state(self._state, Event.COMMITTED)

    def _was_ended_by_coordinator(self, calls: TransactionCalls) -> bool:
        """Whether the epoch is one that the coordinator took for its own abort, and no new owner has come."""
        owner = calls.owner()
        return (
            owner is not None and self._surely_open and owner.identity == self.identity.following and not owner.is_open
        )

    def abort(self) -> None:
        """Leave no trace of the transaction. Safe to repeat while it raises."""
        calls = self._transactional()
        self._state = next_state(self._state, Event.ABORT)
        self._rows.clear()
        self._remember_written(self._sender.stored)
        self._sender.discard(patience_ms=_DISCARD_PATIENCE_MS)
        if self._transaction_started:
            try:
                self._end_by_abort(calls)
            except SemelError as error:
                self._fail(error)
                raise
        self._state = next_state(self._state, Event.ABORTED)

    def _end_by_abort(self, calls: TransactionCalls) -> None:
        if calls.protocol == 1:
            # EndTxn would leave the epoch as it is, and a write that is still under way could slip into the next
            # transaction. InitProducerId aborts with markers of a higher epoch, which every leader then insists on.
            self._renew_epoch(calls)
            return
        try:
            self._next_transaction(calls.end(self.identity, commit=False))
        except KafkaError as error:
            if not isinstance(error, Fenced) and error.code != ErrorCode.invalid_txn_state:
                raise
            # The coordinator ended it before us (time-out), or it never began there, or we are fenced indeed.
            self._renew_epoch(calls)

    def resolve(self) -> Outcome:
        """After `CommitUnknown`: see to it that the transaction can no longer change, then look what it became.

        May be called again if it raises. If another producer took over meanwhile, the outcome is told all the same, and
        the next transaction raises `Fenced`.
        """
        calls = self._transactional()
        if self._state is not State.UNKNOWN:
            raise InvalidState(f"There is nothing to resolve: this producer is {self._state.value}.")
        mine, protocol = self.identity, calls.protocol
        owner = self._wait_until_decided(calls)
        outcome = self._look_up_outcome(mine)
        self._state = next_state(self._state, Event.RESOLVED)
        # After an abort the next epoch is nobody's; after a commit it is ours on protocol 2 and perhaps a successor's
        # on 1.
        self._claim(calls, owner, next_epoch_is_free=outcome is Outcome.ABORTED or protocol == 2)
        return outcome

    def _look_up_outcome(self, identity: ProducerIdentity) -> Outcome:
        for (topic, partition), offset in self._written.items():
            marker = find_marker(
                self.cluster,
                topic,
                partition,
                identity.producer_id,
                offset,
                timeout_ms=self.cluster.config.api_timeout_ms,
            )
            if marker is not None:
                return Outcome.COMMITTED if marker.kind == "commit" else Outcome.ABORTED
        return self._look_up_offsets()

    def _look_up_offsets(self) -> Outcome:
        """A transaction of offsets alone leaves its trace only in the group: there they are, or they are not."""
        from semel.client.admin import Admin

        if not self._offsets_sent:
            raise CommitUnknown(
                "The partitions written in this transaction hold no marker of it any more: its outcome cannot be told."
            )
        admin = Admin(self.cluster)
        for group, offsets in self._offsets_sent.items():
            committed = admin.committed_offsets(group, list(offsets), require_stable=True)
            if any(tp not in committed or committed[tp].offset != offset for tp, offset in offsets.items()):
                return Outcome.ABORTED
        return Outcome.COMMITTED

    def share(self) -> SharedTransaction:
        """Let other processes write inside the open transaction; see `SharedWriter`. This producer alone ends it."""
        calls = self._transactional()
        if self._state is not State.OPEN:
            raise InvalidState(f"Begin a transaction before sharing it: this producer is {self._state.value}.")
        self._transaction_started = True
        return SharedTransaction(
            calls.transactional_id, self.identity, calls.protocol, self.config.transaction_timeout_ms
        )

    def adopt(self, stored: Collection[Stored]) -> None:
        """Take over what shared writers have stored: `resolve` looks there for the outcome of a lost commit."""
        self._remember_written(list(stored))

    def _transactional(self) -> TransactionCalls:
        if self._calls is None:
            raise ConfigError("This producer has no transactional.id: set one to use transactions.")
        return self._calls

    def _commit_lost(self, error: SemelError) -> CommitUnknown:
        self._state = next_state(self._state, Event.COMMIT_LOST)
        return CommitUnknown(
            "The commit was sent and its answer was lost: the transaction may be committed or aborted. "
            f"Call resolve() to find out, and do not write its records again before. Last: {error}"
        )

    def _remember_written(self, stored: list[Stored]) -> None:
        if self._calls is None:
            return
        self._surely_open = self._surely_open or bool(stored)
        for batch in stored:
            if batch.base_offset >= 0:
                self._written.setdefault(TopicPartition(batch.topic, batch.partition), batch.base_offset)

    def _next_transaction(self, following: ProducerIdentity) -> None:
        # Protocol 1 keeps the epoch at EndTxn, and a delayed EndTxn could then end the *next* transaction: raise it
        # before.
        self._needs_new_epoch = following == self.identity
        self._sender.start_over(following)

    def _renew_epoch(self, calls: TransactionCalls) -> None:
        """End what is open and raise the epoch; `Fenced` if another producer has taken over."""
        next_epoch_is_free = self._surely_open
        owner = calls.owner()
        if owner is not None and owner.identity == self.identity and owner.is_open:
            next_epoch_is_free = True
        self._claim(calls, self._wait_until_decided(calls), next_epoch_is_free=next_epoch_is_free)
        if self._reason_dead is not None:
            raise self._reason_dead

    def _wait_until_decided(self, calls: TransactionCalls) -> Owner | None:
        """Abort the transaction if it is ours and open; wait for its markers; returns who owns the id then."""
        patience = self.cluster.patience()
        while True:
            owner = calls.owner()
            if owner is None or not (owner.is_undecided or (owner.is_open and owner.identity == self.identity)):
                return owner
            if owner.is_open:
                self._abort_open(calls)
            elif patience.is_spent:
                raise RequestTimedOut(
                    f"The coordinator has not finished the transaction of {calls.transactional_id!r} in time; "
                    "its outcome is decided and will be carried out. Try again."
                )
            patience.pause(verdict(ErrorCode.concurrent_transactions, Api.END_TXN))

    def _abort_open(self, calls: TransactionCalls) -> None:
        try:
            calls.init_producer_id(self.identity, patience=self.cluster.patience(0))
        except KafkaError as error:
            # CONCURRENT_TRANSACTIONS is the answer to expect: the abort is under way.
            if error.code != ErrorCode.concurrent_transactions and not isinstance(error, Fenced):
                raise

    def _claim(self, calls: TransactionCalls, owner: Owner | None, *, next_epoch_is_free: bool) -> None:
        """Get the next epoch, or be dead if it is another producer's."""
        mine = self.identity
        claimed = mine if owner is None else decide_claim(mine, owner, next_epoch_is_free=next_epoch_is_free)
        try:
            if claimed is None:
                raise failure(ErrorCode.producer_fenced, Api.INIT_PRODUCER_ID, calls.transactional_id)
            self._sender.start_over(calls.init_producer_id(claimed))
        except Fenced as error:
            self._die(error)
        self._needs_new_epoch = False

    def _add_partitions(self, partitions: Collection[TopicPartition]) -> None:
        self._transactional().add_partitions(self.identity, partitions)
        self._surely_open = True

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
