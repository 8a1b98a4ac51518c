"""The transaction coordinator: who owns a transactional id, what its transaction has become, and what a client is told.

`decide_*()` gives the record to be logged and the answer, and changes nothing; `replay()` applies what was logged. A
request that is to be answered with an error, with nothing to log, raises `Refused`.

A stale epoch is always refused with PRODUCER_FENCED here, and a partition that is not in the transaction with the code
asked for. What older clients do not know is the handlers' to translate, as in Kafka: PRODUCER_FENCED becomes
INVALID_PRODUCER_EPOCH in answers of InitProducerId before version 4 and of AddPartitionsToTxn, AddOffsetsToTxn and
EndTxn before version 2, and always in Produce and TxnOffsetCommit.

`client_version` is the transaction.version that the request's own version speaks: 2 for EndTxn 5, Produce 12 and
TxnOffsetCommit 5 and above, else 0. A coordinator with a lower transaction.version takes it for its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from kio.schema.errors import ErrorCode

from semel.core.refusal import Refused
from semel.core.transaction_end import REFUSALS, EndVerdict, end_verdict
from semel.core.transaction_metadata import (
    AT_REST,
    EXHAUSTED_EPOCH,
    NO_IDENTITY,
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    NO_TIMEOUT_MS,
    PREPARED,
    PROTOCOL_2,
    Marker,
    ProducerIdentity,
    TopicPartition,
    TransactionMetadata,
    TransactionStatus,
    marker_of,
    to_complete,
    to_fenced,
    to_kept,
    to_new_producer_id,
    to_ongoing,
    to_prepared,
    to_raised_epoch,
    to_same_epoch,
)

__all__ = [
    "Decision",
    "Marker",
    "ProducerIdentity",
    "TopicPartition",
    "TransactionCoordinator",
    "TransactionMetadata",
    "TransactionSettings",
    "TransactionStatus",
    "marker_of",
]

Response = TypeVar("Response")
NewProducerId = Callable[[], int]
"""Hands out a producer id that was never used. If what was decided with it is not logged, it is lost, no more."""


@dataclass(frozen=True, slots=True)
class Decision(Generic[Response]):
    """What to log, what to answer, what to do then.

    `record` None: there is nothing to log, answer at once. `refusal`: once the record is logged and replayed, answer
    with this code instead of `response`. `needs_markers`: once it is logged, write `marker_of(record)` to all of
    `record.partitions`, then log what `decide_complete` says.
    """

    record: TransactionMetadata | None
    response: Response
    refusal: ErrorCode | None = None
    needs_markers: bool = False


@dataclass(frozen=True, slots=True)
class TransactionSettings:
    """`transaction_version` is the finalized feature: 2 is protocol 2 (KIP-890), 0 and 1 are as Kafka 3.9.

    `two_phase_commit` lets clients begin transactions that no timeout ends (KIP-939). It takes protocol 2.
    """

    transaction_version: int = PROTOCOL_2
    transaction_timeout_max_ms: int = 900_000
    expiration_ms: int = 604_800_000
    two_phase_commit: bool = False


_S = TransactionStatus


class TransactionCoordinator:
    """All transactional ids of a broker.

    >>> coordinator = TransactionCoordinator(TransactionSettings())
    >>> decision = coordinator.decide_init_producer_id("id", 60_000, -1, -1, now_ms=0, new_producer_id=lambda: 7)
    >>> coordinator.replay(decision.record)
    >>> decision.response
    ProducerIdentity(producer_id=7, producer_epoch=0)
    """

    def __init__(self, settings: TransactionSettings) -> None:
        self.settings = settings
        self._transactions: dict[str, TransactionMetadata] = {}
        self._deadlines_ms: dict[str, int] = {}
        self._unfinished: dict[str, TransactionMetadata] = {}

    def __len__(self) -> int:
        return len(self._transactions)

    def __iter__(self) -> Iterator[TransactionMetadata]:
        return iter(self._transactions.values())

    def get(self, transactional_id: str) -> TransactionMetadata | None:
        return self._transactions.get(transactional_id)

    def decide_init_producer_id(
        self,
        transactional_id: str,
        timeout_ms: int,
        producer_id: int,
        producer_epoch: int,
        *,
        now_ms: int,
        new_producer_id: NewProducerId,
        two_phase: bool = False,
        keep_prepared: bool = False,
    ) -> Decision[ProducerIdentity]:
        """Make the asker the owner of the id.

        -1 and -1 is a new incarnation, which always wins; a producer id and epoch is an owner that wants to go on
        (KIP-360) and is fenced when it is the owner no more. While a transaction is open only the producer id is looked
        at, not the epoch, as in Kafka: whoever asks, it is aborted, and the asker comes again.

        `two_phase`: no timeout ends the owner's transactions. `keep_prepared`: an open transaction stays open, and the
        asker can do nothing but end it; `record.identity` is then the one it was begun with, for the asker to compare
        with what was decided. Its timeout stays what it was, unless `two_phase` takes it away.
        """
        _refuse_empty_id(transactional_id)
        if (producer_id == NO_PRODUCER_ID) != (producer_epoch == NO_PRODUCER_EPOCH):
            raise Refused(ErrorCode.invalid_request, "a producer id and its epoch must be given together or not at all")
        self._check_two_phase(two_phase, keep_prepared)
        if two_phase:
            timeout_ms = NO_TIMEOUT_MS
        elif not 0 < timeout_ms <= self.settings.transaction_timeout_max_ms:
            raise Refused(ErrorCode.invalid_transaction_timeout, f"transaction.timeout.ms {timeout_ms} is out of range")
        given = None if producer_id == NO_PRODUCER_ID else ProducerIdentity(producer_id, producer_epoch)
        metadata = self._transactions.get(transactional_id)
        if metadata is None:
            created = TransactionMetadata(transactional_id, new_producer_id())
            return _owner_is(to_raised_epoch(created, NO_PRODUCER_EPOCH, timeout_ms, now_ms))
        if given is not None and not _may_be_owner(metadata, given):
            raise _refused(ErrorCode.producer_fenced, metadata, given)
        if metadata.status in PREPARED:
            raise _refused(ErrorCode.concurrent_transactions, metadata, given)
        if metadata.status is _S.ONGOING:
            if keep_prepared:
                return _owner_is(_keep(metadata, given, two_phase, now_ms, new_producer_id))
            if metadata.is_two_phase and given not in (None, metadata.owner):
                # Kafka would abort what is prepared here, on the word of a producer that has been replaced.
                raise _refused(ErrorCode.producer_fenced, metadata, given)
            record = self._fence(metadata, now_ms, new_producer_id)
            return Decision(record, NO_IDENTITY, ErrorCode.concurrent_transactions, needs_markers=True)
        return _owner_is(_raise_epoch(metadata, given, timeout_ms, now_ms, new_producer_id))

    def decide_add_partitions(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Collection[TopicPartition],
        *,
        now_ms: int,
        client_version: int,
    ) -> Decision[None]:
        """Open the transaction if none is open, and take `partitions` in. What is in already is not logged again."""
        metadata = self._owned(transactional_id, producer_id, producer_epoch)
        added = frozenset(partitions)
        if metadata.status is _S.ONGOING and added <= metadata.partitions:
            return Decision(None, None)
        return Decision(to_ongoing(metadata, added, self._effective(client_version), now_ms), None)

    def decide_verify_partitions(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Collection[TopicPartition],
        *,
        code_if_missing: ErrorCode = ErrorCode.transaction_abortable,
    ) -> dict[TopicPartition, ErrorCode]:
        """Whether each partition was added before it is written to (KIP-890, for clients of protocol 1).

        Without it a write delayed past the end of its transaction would open one that nobody ends. Nothing is ever
        logged for it. `code_if_missing`: TRANSACTION_ABORTABLE from AddPartitionsToTxn and to clients that know it
        (Produce 11, TxnOffsetCommit 4 and above), INVALID_TXN_STATE to older ones.
        """
        metadata = self._owned(transactional_id, producer_id, producer_epoch)
        return {
            partition: ErrorCode.none if partition in metadata.partitions else code_if_missing
            for partition in partitions
        }

    def decide_end(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        committed: bool,
        *,
        now_ms: int,
        client_version: int,
        new_producer_id: NewProducerId,
    ) -> Decision[ProducerIdentity]:
        """Commit or abort. On protocol 2 the answer is the producer's next identity, on protocol 1 it is -1 and -1.

        A repeat of a request that was carried out is answered CONCURRENT_TRANSACTIONS until the markers are written,
        then like the first time. The opposite outcome is INVALID_TXN_STATE: a decided outcome never changes. What the
        coordinator has aborted by itself (time-out, or a new incarnation on its way) counts as decided on protocol 2,
        so that a commit is INVALID_TXN_STATE and an abort is a success; on protocol 1 both are PRODUCER_FENCED.
        """
        metadata = self._known(transactional_id)
        version = self._effective(client_version)
        given = ProducerIdentity(producer_id, producer_epoch)
        verdict = end_verdict(metadata, given, committed, version)
        if verdict in REFUSALS:
            raise _refused(REFUSALS[verdict], metadata, given)
        if verdict is EndVerdict.ANSWER_AGAIN:
            return Decision(None, metadata.identity if version >= PROTOCOL_2 else NO_IDENTITY)
        if version < PROTOCOL_2:
            record = to_prepared(metadata, committed, 0, NO_PRODUCER_ID, now_ms)
            return Decision(record, NO_IDENTITY, needs_markers=True)
        record = to_prepared(metadata, committed, version, _next_producer_id(metadata, new_producer_id), now_ms)
        return Decision(record, to_complete(record, now_ms).identity, needs_markers=True)

    def decide_complete(self, transactional_id: str, *, now_ms: int) -> Decision[None]:
        """To be called once all markers are written."""
        return Decision(to_complete(self._known(transactional_id), now_ms), None)

    def late_ids(self, now_ms: int) -> list[str]:
        """The transactional ids whose transaction has been open for longer than its timeout."""
        return [name for name, deadline_ms in self._deadlines_ms.items() if deadline_ms < now_ms]

    def decide_timeouts(
        self, *, now_ms: int, new_producer_id: NewProducerId, among: Collection[str] | None = None
    ) -> list[Decision[None]]:
        """Abort what has been open for longer than its timeout, under an epoch that shuts its producer out.

        `among` names the ids to look at, if not all.
        """
        late = self.late_ids(now_ms) if among is None else among
        late = [name for name in late if self._deadlines_ms.get(name, now_ms) < now_ms]
        records = [self._fence(self._transactions[name], now_ms, new_producer_id) for name in late]
        return [Decision(record, None, needs_markers=True) for record in records]

    def decide_abort(self, transactional_id: str, *, now_ms: int, new_producer_id: NewProducerId) -> Decision[None]:
        """Abort an open transaction whoever owns it, under an epoch that shuts its producer out."""
        record = self._fence(self._known(transactional_id), now_ms, new_producer_id)
        return Decision(record, None, needs_markers=True)

    def decide_shut_out(self, transactional_id: str, *, now_ms: int, new_producer_id: NewProducerId) -> Decision[None]:
        """Take an id that is at rest from its owner, who has to begin anew.

        After a loss of power nobody knows what its owner had written since: that it began a transaction is not synced.
        With fsync `never` the epochs that it had are not known either. One that was given a second time would find its
        own sequences in the partitions, and its records would be dropped as repeats; hence a new producer id.
        """
        metadata = self._known(transactional_id)
        record = to_new_producer_id(metadata, new_producer_id(), NO_PRODUCER_EPOCH, metadata.timeout_ms, now_ms)
        return Decision(record, None)

    def next_deadline_ms(self) -> int | None:
        """When `decide_timeouts` will next have something to say, None while no transaction is open."""
        # Kafka's time-out is over when more than that has passed.
        return min(self._deadlines_ms.values()) + 1 if self._deadlines_ms else None

    def decide_expirations(self, *, now_ms: int) -> list[str]:
        """The transactional ids to be forgotten by a tombstone: without a transaction, and idle for too long."""
        latest_ms = now_ms - self.settings.expiration_ms
        return [
            metadata.transactional_id
            for metadata in self._transactions.values()
            if metadata.last_update_ms <= latest_ms and metadata.status in AT_REST
        ]

    def unfinished(self) -> list[TransactionMetadata]:
        """Those whose markers may not all be written: after recovery they are written again and completed."""
        return list(self._unfinished.values())

    def replay(self, record: TransactionMetadata) -> None:
        name = record.transactional_id
        self._transactions[name] = record
        self._deadlines_ms.pop(name, None)
        self._unfinished.pop(name, None)
        if record.status is _S.ONGOING and not record.is_two_phase:
            self._deadlines_ms[name] = record.start_ms + record.timeout_ms
        elif record.status in PREPARED:
            self._unfinished[name] = record

    def replay_tombstone(self, transactional_id: str) -> None:
        self._transactions.pop(transactional_id, None)
        self._deadlines_ms.pop(transactional_id, None)
        self._unfinished.pop(transactional_id, None)

    def replay_loaded(self, now_ms: int) -> list[str]:
        """The whole log is replayed: let no transaction have begun in the future; returns those that had.

        The clock was set back then. Their time-out would come as much too late, and readers would wait for it.
        """
        late = [name for name in self._deadlines_ms if self._transactions[name].start_ms > now_ms]
        for name in late:
            self.replay(replace(self._transactions[name], start_ms=now_ms))
        return late

    def _check_two_phase(self, two_phase: bool, keep_prepared: bool) -> None:
        if two_phase and not self.settings.two_phase_commit:
            raise Refused(
                ErrorCode.transactional_id_authorization_failed, "transaction.two.phase.commit.enable is false here"
            )
        if (two_phase or keep_prepared) and self.settings.transaction_version < PROTOCOL_2:
            raise Refused(ErrorCode.unsupported_version, "two-phase commit takes transaction.version 2")

    def _fence(self, metadata: TransactionMetadata, now_ms: int, new_producer_id: NewProducerId) -> TransactionMetadata:
        version = self.settings.transaction_version
        if version < PROTOCOL_2:
            return to_fenced(metadata, now_ms)
        return to_prepared(metadata, False, version, _next_producer_id(metadata, new_producer_id), now_ms)

    def _effective(self, client_version: int) -> int:
        return min(client_version, self.settings.transaction_version)

    def _known(self, transactional_id: str) -> TransactionMetadata:
        _refuse_empty_id(transactional_id)
        metadata = self._transactions.get(transactional_id)
        if metadata is None:
            raise Refused(ErrorCode.invalid_producer_id_mapping, f"{transactional_id!r} is not known")
        return metadata

    def _owned(self, transactional_id: str, producer_id: int, producer_epoch: int) -> TransactionMetadata:
        metadata = self._known(transactional_id)
        given = ProducerIdentity(producer_id, producer_epoch)
        if producer_id not in (metadata.producer_id, metadata.owner.producer_id):
            raise _refused(ErrorCode.invalid_producer_id_mapping, metadata, given)
        if metadata.owner != given:
            raise _refused(ErrorCode.producer_fenced, metadata, given)
        if metadata.is_kept and metadata.status is _S.ONGOING:
            raise _refused(ErrorCode.invalid_txn_state, metadata, given)  # it was prepared: nothing comes in any more
        if metadata.status in PREPARED:
            raise _refused(ErrorCode.concurrent_transactions, metadata, given)
        return metadata


def _may_be_owner(metadata: TransactionMetadata, given: ProducerIdentity) -> bool:
    """The epoch is compared later. Under the previous id only its last epoch can be a repeat after a lost answer."""
    return given.producer_id == metadata.owner.producer_id or (
        given.producer_id == metadata.previous_producer_id and given.producer_epoch >= EXHAUSTED_EPOCH
    )


def _raise_epoch(
    metadata: TransactionMetadata,
    given: ProducerIdentity | None,
    timeout_ms: int,
    now_ms: int,
    new_producer_id: NewProducerId,
) -> TransactionMetadata:
    if given is None:
        last_epoch = NO_PRODUCER_EPOCH  # whoever was here before is to find no answer any more
    elif given == metadata.identity:
        last_epoch = metadata.producer_epoch
    elif given.producer_epoch == metadata.last_producer_epoch:
        return to_same_epoch(metadata, timeout_ms, now_ms)
    else:
        raise _refused(ErrorCode.producer_fenced, metadata, given)
    if metadata.is_epoch_exhausted:
        return to_new_producer_id(metadata, new_producer_id(), last_epoch, timeout_ms, now_ms)
    return to_raised_epoch(metadata, last_epoch, timeout_ms, now_ms)


def _keep(
    metadata: TransactionMetadata,
    given: ProducerIdentity | None,
    two_phase: bool,
    now_ms: int,
    new_producer_id: NewProducerId,
) -> TransactionMetadata:
    timeout_ms = NO_TIMEOUT_MS if two_phase else metadata.timeout_ms
    owner = metadata.owner
    if given is None:
        last_epoch = NO_PRODUCER_EPOCH
    elif given == owner:
        last_epoch = owner.producer_epoch
    elif metadata.is_kept and given.producer_epoch == metadata.last_producer_epoch:
        return to_kept(metadata, owner, metadata.last_producer_epoch, timeout_ms, now_ms)  # a repeat
    else:
        raise _refused(ErrorCode.producer_fenced, metadata, given)
    if metadata.is_epoch_exhausted:
        return to_kept(metadata, ProducerIdentity(new_producer_id(), 0), last_epoch, timeout_ms, now_ms)
    raised = ProducerIdentity(owner.producer_id, owner.producer_epoch + 1)
    return to_kept(metadata, raised, last_epoch, timeout_ms, now_ms)


def _next_producer_id(metadata: TransactionMetadata, new_producer_id: NewProducerId) -> int:
    return new_producer_id() if metadata.is_epoch_exhausted else NO_PRODUCER_ID


def _owner_is(record: TransactionMetadata) -> Decision[ProducerIdentity]:
    return Decision(record, record.owner)


def _refuse_empty_id(transactional_id: str) -> None:
    if not transactional_id:
        raise Refused(ErrorCode.invalid_request, "the transactional id is empty")


def _refused(code: ErrorCode, metadata: TransactionMetadata, given: ProducerIdentity | None) -> Refused:
    asker = "a new incarnation" if given is None else f"producer id {given.producer_id} epoch {given.producer_epoch}"
    return Refused(
        code,
        f"{metadata.transactional_id!r} is {metadata.status.title} and belongs to producer id {metadata.producer_id} "
        f"epoch {metadata.producer_epoch}; asked by {asker}",
    )
