"""Kafka's side: the transaction that holds a block's records, and what a recovery asks about an earlier one."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol
from weakref import WeakKeyDictionary

from semel.bridges.both.decision import PLACES_MAX, Decision, Place, StoredBatch
from semel.bridges.both.recovery import EndAnswer, MarkerSeen, OwnerSeen, lowest_epoch, read_marker
from semel.bridges.retries import LOG
from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.fetcher import find_marker
from semel.client.ownership import Owner
from semel.client.partitions import TopicPartition
from semel.client.producer import Producer
from semel.client.transaction_state import State
from semel.client.transactions import TransactionCalls
from semel.errors import (
    ConfigError,
    Fenced,
    InvalidState,
    KafkaError,
    OffsetOutOfRange,
    SemelError,
    TransactionAborted,
    UnknownTopic,
)
from semel.records import EncodedBatch
from semel.wire import ErrorCode

_MARKER_MS: Final = 5_000
"""How long to look in one partition. The marker of a transaction that has ended is there within milliseconds."""
_OWN_STATES: Final = (State.OPEN, State.DOOMED)


class Inquiry(Protocol):
    """What recovery asks of Kafka."""

    cluster_id: str

    def send_end(self, decision: Decision) -> EndAnswer: ...
    def read_markers(self, decision: Decision) -> MarkerSeen: ...
    def owner(self, decision: Decision) -> Owner | OwnerSeen: ...


class ClusterInquiry:
    """The same with a cluster. It takes part in no election of owners: nobody is fenced by it."""

    def __init__(self, cluster: Cluster, name: str, timeout_ms: int, cluster_id: str | None = None) -> None:
        self._cluster = cluster
        self.name = name
        self._timeout_ms = timeout_ms
        self.cluster_id = cluster_id or Admin(cluster).describe_cluster().cluster_id

    def _calls(self, decision: Decision) -> TransactionCalls:
        return TransactionCalls(self._cluster, self.name, self._timeout_ms, decision.protocol)

    def send_end(self, decision: Decision) -> EndAnswer:
        try:
            self._calls(decision).end(decision.identity, commit=True)
        except KafkaError as error:
            if isinstance(error, Fenced | TransactionAborted) or error.code == ErrorCode.invalid_txn_state:
                return EndAnswer.REFUSED
            if error.code == ErrorCode.concurrent_transactions:  # for all of the patience: its markers hang
                return EndAnswer.UNANSWERED
            raise
        return EndAnswer.ACCEPTED

    def read_markers(self, decision: Decision) -> MarkerSeen:
        seen = MarkerSeen.LOST
        for place in decision.places:
            try:
                marker = find_marker(
                    self._cluster,
                    place.topic,
                    place.partition,
                    decision.identity.producer_id,
                    place.offset,
                    timeout_ms=_MARKER_MS,
                    producer_epoch_min=lowest_epoch(decision),
                )
            except (OffsetOutOfRange, UnknownTopic) as error:
                LOG.warning("Where a decided transaction wrote, its end cannot be found: %s", error)
                continue
            found = read_marker(decision, marker)
            if found in (MarkerSeen.COMMIT, MarkerSeen.ABORT):
                return found
            if found is MarkerSeen.NOT_YET:
                seen = found
        return seen

    def owner(self, decision: Decision) -> Owner | OwnerSeen:
        try:
            return self._calls(decision).owner() or OwnerSeen.UNKNOWN
        except Fenced:  # the id is forgotten
            return OwnerSeen.UNKNOWN


class KafkaSide(Inquiry, Protocol):
    """What a block asks of Kafka besides."""

    name: str
    token: str
    places: set[str]

    @property
    def is_ready(self) -> bool: ...
    def new_id(self) -> str: ...
    def write(self, decision_id: str, batches: Sequence[StoredBatch]) -> Decision: ...
    def commit(self) -> None: ...
    def abort_after(self, error: BaseException) -> None: ...
    def settle(self) -> None: ...
    def check_owner(self) -> None: ...
    def end_prepared(self, decision: Decision | None) -> bool: ...


class _Use:
    """What is kept for a producer as long as it lives."""

    def __init__(self) -> None:
        self.token = uuid.uuid4().hex
        self.cluster_id: str | None = None
        self.places: set[str] = set()
        """The databases in which this producer has claimed its name."""
        self.has_asked_for_two_phase = False
        self.turn = threading.Lock()


_USES: Final[WeakKeyDictionary[Producer, _Use]] = WeakKeyDictionary()


class ProducerSide(ClusterInquiry):
    """A user's producer. Its `transactional.id` is the name of everything that it does in databases."""

    def __init__(self, producer: Producer) -> None:
        name = producer.config.transactional_id
        if name is None:
            raise ConfigError(
                'semel.both needs a producer with a transactional.id, such as Producer(transactional_id="shop-1"): it '
                "names the decisions in the database. Nothing was written."
            )
        if producer.state is State.DEAD:
            producer.begin()  # raises what it died of
        self.producer = producer
        self._use = _USES.setdefault(producer, _Use())
        super().__init__(producer.cluster, name, producer.config.transaction_timeout_ms, self._use.cluster_id)
        self._use.cluster_id = self.cluster_id
        self.token, self.places = self._use.token, self._use.places

    @contextmanager
    def turn(self) -> Iterator[None]:
        """One block at a time."""
        if not self._use.turn.acquire(blocking=False):
            raise InvalidState(
                "This producer is in another block of semel.both; nothing was written. Blocks cannot be nested: put "
                "all of it into one, or give each thread its own producer."
            )
        try:
            if self.producer.state in _OWN_STATES:
                raise InvalidState(
                    "The producer has a transaction open; nothing was written. semel.both begins its own: commit or "
                    "abort that one first."
                )
            yield
        finally:
            self._use.turn.release()

    @property
    def is_ready(self) -> bool:
        return self.producer.state is State.READY

    def new_id(self) -> str:
        return uuid.uuid4().hex

    def write(self, decision_id: str, batches: Sequence[StoredBatch]) -> Decision:
        """Begin a transaction and store the records in it. Raises if that cannot be; then `abort_after`."""
        producer = self.producer
        producer.begin()
        for batch in batches:
            encoded = EncodedBatch(memoryview(bytearray(batch.data)), batch.record_count)
            producer.send_encoded(batch.topic, batch.partition, encoded)
        first: dict[TopicPartition, int] = {}
        for stored in producer.flush():
            if stored.base_offset >= 0:
                first.setdefault(TopicPartition(stored.topic, stored.partition), stored.base_offset)
        if not first:
            raise TransactionAborted(
                "No broker has said where it stored the records, so they were given up. Try again."
            )
        shared = producer.share()
        places = [Place(*partition, offset) for partition, offset in sorted(first.items())]
        return Decision(decision_id, self.cluster_id, shared.identity, shared.protocol, tuple(places[:PLACES_MAX]))

    def commit(self) -> None:
        self.producer.commit()

    def abort_after(self, error: BaseException) -> None:
        """Abort because of `error`, which must reach the caller.

        What is not aborted now, its timeout aborts; a two-phase transaction, the next producer of this name.
        """
        if self.producer.state not in _OWN_STATES:
            return
        try:
            self.producer.abort()
        except SemelError as second:
            error.add_note(
                f"The abort in Kafka was not confirmed ({second}); its timeout aborts it, or the next one of this name."
            )

    def settle(self) -> None:
        """Make the producer ready for another transaction, once nothing depends on its last one any more."""
        if self.producer.state is State.UNKNOWN:
            self.producer.resolve()
        elif self.producer.state in _OWN_STATES:
            self.producer.abort()
        if self.producer.state is State.DEAD:
            self.producer.begin()  # raises what it died of

    def check_owner(self) -> None:
        """Raise `Fenced` if another producer of this name has come: it, and not this one, may claim it in databases."""
        if self.producer.state is not State.READY:
            return
        if not self._use.has_asked_for_two_phase:
            is_two_phase = self.producer.try_two_phase_commit()
            self._use.has_asked_for_two_phase = True
            if is_two_phase:
                return  # to be given an epoch is to be the owner
        if self.producer.prepared is not None:
            return  # the coordinator tells whose the transaction was, and not who has it now; its end will show that
        identity = self.producer.identity
        owner = TransactionCalls(self._cluster, self.name, self._timeout_ms, 1).owner()
        if owner is not None and owner.identity not in (identity, identity.following):
            raise Fenced(
                f"Another producer with the transactional.id {self.name!r} has taken over, so this one stops. Nothing "
                "was written, in the database or in Kafka. Let one program use a name at a time.",
                code=ErrorCode.producer_fenced,
                is_fatal=True,
            )

    def end_prepared(self, decision: Decision | None) -> bool:
        """End what an earlier producer of this name has left prepared: commit it if the decision names it, else abort.

        True if it was that, and is committed.
        """
        prepared = self.producer.prepared
        if prepared is None:
            return False
        is_decided = decision is not None and decision.cluster_id == self.cluster_id and decision.identity == prepared
        self.producer.end_prepared(commit=is_decided)
        return is_decided
