"""What the coordinator knows of one transactional id: the states, the table of legal transitions, and the transitions.

Each transition takes the metadata as it is and gives the one to be logged; nothing is changed in place. Whether a
client may ask for it is decided in `transactions.py`.

Epochs, for a producer that has epoch e:

- protocol 1 (transaction.version 0 and 1): the end of a transaction leaves e in place; only InitProducerId raises it;
- protocol 2 (KIP-890, transaction.version 2): each end of a transaction raises it to e+1, markers carry e+1 already;
- fencing, when the coordinator ends a transaction by itself: the markers carry e+1, on both protocols;
- two-phase commit (KIP-939): a new owner that keeps the open transaction gets an epoch of its own, and that of the
  transaction stays until its markers are written.

32767 is given to nobody, so that a producer with 32766 can still be fenced: past it comes a new producer id with 0.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from semel.errors import InvalidState

TopicPartition = tuple[str, int]

NO_PRODUCER_ID: Final = -1
NO_PRODUCER_EPOCH: Final = -1
NO_TIME: Final = -1
PRODUCER_EPOCH_MAX: Final = 2**15 - 1
EXHAUSTED_EPOCH: Final = PRODUCER_EPOCH_MAX - 1
"""From here on a raise of the epoch brings a new producer id instead."""
NO_TIMEOUT_MS: Final = 2**31 - 1
"""The timeout of a two-phase transaction, as Kafka logs it: somebody else decides about it, however long that takes."""
PROTOCOL_2: Final = 2
"""The first transaction.version in which the end of a transaction raises the epoch (KIP-890)."""


class TransactionStatus(enum.IntEnum):
    """Kafka's numbers, as they stand in the log.

    >>> TransactionStatus.PREPARE_COMMIT.title, TransactionStatus.by_title("CompleteAbort").value
    ('PrepareCommit', 5)
    """

    EMPTY = 0
    ONGOING = 1
    PREPARE_COMMIT = 2
    PREPARE_ABORT = 3
    COMPLETE_COMMIT = 4
    COMPLETE_ABORT = 5
    DEAD = 6
    PREPARE_EPOCH_FENCE = 7

    @property
    def title(self) -> str:
        """The name that DescribeTransactions and ListTransactions show."""
        return _TITLES[self]

    @classmethod
    def by_title(cls, title: str) -> TransactionStatus | None:
        return _BY_TITLE.get(title)


_S = TransactionStatus
_TITLES: Final = {status: status.name.title().replace("_", "") for status in TransactionStatus}
_BY_TITLE: Final = {title: status for status, title in _TITLES.items()}

AT_REST: Final = frozenset({_S.EMPTY, _S.COMPLETE_COMMIT, _S.COMPLETE_ABORT})
"""No transaction is open and none is being ended."""
PREPARED: Final = frozenset({_S.PREPARE_COMMIT, _S.PREPARE_ABORT})
"""The outcome is decided and logged; markers are still to be written."""

TRANSITIONS: Final[dict[TransactionStatus, frozenset[TransactionStatus]]] = {
    # to: from
    _S.EMPTY: AT_REST,
    _S.ONGOING: AT_REST | {_S.ONGOING},
    _S.PREPARE_COMMIT: frozenset({_S.ONGOING}),
    # Protocol 2 may abort what was never begun: its client cannot know whether its first write arrived (KIP-890).
    _S.PREPARE_ABORT: AT_REST | {_S.ONGOING},
    _S.COMPLETE_COMMIT: frozenset({_S.PREPARE_COMMIT}),
    _S.COMPLETE_ABORT: frozenset({_S.PREPARE_ABORT}),
    # In Kafka these two exist only while a record is on its way to the log. Here that is between decide and replay.
    _S.DEAD: frozenset(),
    _S.PREPARE_EPOCH_FENCE: frozenset(),
}


class ProducerIdentity(NamedTuple):
    """The producer id and epoch that every batch carries: the answer of InitProducerId and of EndTxn 5."""

    producer_id: int
    producer_epoch: int


NO_IDENTITY: Final = ProducerIdentity(NO_PRODUCER_ID, NO_PRODUCER_EPOCH)


@dataclass(frozen=True, slots=True)
class TransactionMetadata:
    """One record of `__transaction_state`: the whole state of one transactional id.

    `last_producer_epoch` is what the present owner had before (KIP-360), -1 if it had none: a repeat of an
    InitProducerId whose answer was lost is known by it. `previous_producer_id` tells the same across a change of the
    producer id. `next_producer_id` is set between a PREPARE state that used up the epochs and its completion; with
    `next_producer_epoch` it is the identity of an owner that keeps a transaction begun by an earlier one.
    `end_offsets` has, for a decided commit, where each of the partitions, sorted by name, ended then: what of this
    producer is open below is part of it, and what begins above is not.
    """

    transactional_id: str
    producer_id: int
    previous_producer_id: int = NO_PRODUCER_ID
    next_producer_id: int = NO_PRODUCER_ID
    next_producer_epoch: int = NO_PRODUCER_EPOCH
    producer_epoch: int = NO_PRODUCER_EPOCH
    last_producer_epoch: int = NO_PRODUCER_EPOCH
    timeout_ms: int = 0
    status: TransactionStatus = TransactionStatus.EMPTY
    partitions: frozenset[TopicPartition] = frozenset()
    start_ms: int = NO_TIME
    last_update_ms: int = NO_TIME
    client_transaction_version: int = 0
    end_offsets: tuple[int, ...] = ()

    @property
    def identity(self) -> ProducerIdentity:
        return ProducerIdentity(self.producer_id, self.producer_epoch)

    @property
    def owner(self) -> ProducerIdentity:
        """Who may go on. While a transaction is kept that is not the identity that its records carry."""
        return ProducerIdentity(self.next_producer_id, self.next_producer_epoch) if self.is_kept else self.identity

    @property
    def is_kept(self) -> bool:
        """An owner has taken over a transaction that it can only end (keepPreparedTxn), or its end is decided."""
        return self.next_producer_epoch != NO_PRODUCER_EPOCH

    @property
    def is_two_phase(self) -> bool:
        """No timeout ends the transaction: it is prepared for somebody else's decision."""
        return self.timeout_ms == NO_TIMEOUT_MS

    @property
    def is_epoch_exhausted(self) -> bool:
        return self.owner.producer_epoch >= EXHAUSTED_EPOCH


class Marker(NamedTuple):
    """What the control records that end a transaction must carry."""

    producer_id: int
    producer_epoch: int
    committed: bool


def marker_of(metadata: TransactionMetadata) -> Marker:
    """The marker to be written to each of `metadata.partitions`.

    On protocol 2 and after fencing that is the raised epoch, so that late writers are shut out by the marker itself;
    when the epochs are used up, 32767 under the old producer id.

    >>> ended = TransactionMetadata("id", 7, producer_epoch=4, status=TransactionStatus.PREPARE_COMMIT)
    >>> marker_of(ended)
    Marker(producer_id=7, producer_epoch=4, committed=True)
    """
    if metadata.status not in PREPARED:
        raise InvalidState(
            f"Transactional id {metadata.transactional_id!r} is {metadata.status.title}: "
            "it has no decided outcome, so no marker may be written."
        )
    return Marker(metadata.producer_id, metadata.producer_epoch, metadata.status is _S.PREPARE_COMMIT)


def to_raised_epoch(
    metadata: TransactionMetadata, last_epoch: int, timeout_ms: int, now_ms: int
) -> TransactionMetadata:
    """InitProducerId: the same producer id with the next epoch, or epoch 0 for a transactional id seen first."""
    epoch = metadata.producer_epoch + 1
    return _to_empty(metadata, timeout_ms, now_ms, producer_epoch=epoch, last_producer_epoch=last_epoch)


def to_new_producer_id(
    metadata: TransactionMetadata, producer_id: int, last_epoch: int, timeout_ms: int, now_ms: int
) -> TransactionMetadata:
    """InitProducerId when the epochs are used up."""
    return _to_empty(
        metadata, timeout_ms, now_ms, producer_id=producer_id, producer_epoch=0, last_producer_epoch=last_epoch
    )


def to_same_epoch(metadata: TransactionMetadata, timeout_ms: int, now_ms: int) -> TransactionMetadata:
    """InitProducerId repeated after a lost answer: the identity stays.

    The previous producer id stays too, unlike in Kafka, which finds the answer across a change of the id only once.
    """
    return _to_empty(metadata, timeout_ms, now_ms, previous_producer_id=metadata.previous_producer_id)


def to_ongoing(
    metadata: TransactionMetadata, partitions: frozenset[TopicPartition], client_version: int, now_ms: int
) -> TransactionMetadata:
    """Partitions come in; the first ones open the transaction and start its time."""
    return _transition(
        metadata,
        _S.ONGOING,
        now_ms,
        partitions=metadata.partitions | partitions,
        start_ms=metadata.start_ms if metadata.status is _S.ONGOING else now_ms,
        client_transaction_version=client_version,
    )


def to_kept(
    metadata: TransactionMetadata, owner: ProducerIdentity, last_epoch: int, timeout_ms: int, now_ms: int
) -> TransactionMetadata:
    """InitProducerId with keepPreparedTxn: a new owner, and the transaction stays open as it is."""
    return _transition(
        metadata,
        _S.ONGOING,
        now_ms,
        previous_producer_id=metadata.previous_producer_id if owner == metadata.owner else metadata.owner.producer_id,
        next_producer_id=owner.producer_id,
        next_producer_epoch=owner.producer_epoch,
        last_producer_epoch=last_epoch,
        timeout_ms=timeout_ms,
    )


def to_prepared(
    metadata: TransactionMetadata, committed: bool, client_version: int, next_producer_id: int, now_ms: int
) -> TransactionMetadata:
    """The outcome is decided. On protocol 2 the epoch rises; `next_producer_id` is given when that uses up the last."""
    changes: dict[str, Any] = {}
    if client_version >= PROTOCOL_2:
        changes["producer_epoch"] = min(metadata.producer_epoch + 1, PRODUCER_EPOCH_MAX)
        changes["last_producer_epoch"] = metadata.owner.producer_epoch
    if metadata.is_kept:
        raised = metadata.owner.producer_epoch + 1
        if next_producer_id == NO_PRODUCER_ID:
            next_producer_id, changes["next_producer_epoch"] = metadata.owner.producer_id, raised
        else:
            changes["next_producer_epoch"] = 0
        changes["previous_producer_id"] = metadata.owner.producer_id
    return _transition(
        metadata,
        _S.PREPARE_COMMIT if committed else _S.PREPARE_ABORT,
        now_ms,
        next_producer_id=next_producer_id,
        # An abort of what was never begun has no start of its own.
        start_ms=metadata.start_ms if metadata.status is _S.ONGOING else now_ms,
        client_transaction_version=client_version,
        **changes,
    )


def to_fenced(metadata: TransactionMetadata, now_ms: int) -> TransactionMetadata:
    """Protocol 1: the coordinator aborts by itself, under an epoch that is given to nobody.

    On protocol 2 an abort raises the epoch anyway, and `to_prepared` does it.
    """
    return _transition(
        metadata,
        _S.PREPARE_ABORT,
        now_ms,
        producer_epoch=min(metadata.producer_epoch + 1, PRODUCER_EPOCH_MAX),
        last_producer_epoch=NO_PRODUCER_EPOCH,
        next_producer_id=NO_PRODUCER_ID,
        client_transaction_version=0,
    )


def to_complete(metadata: TransactionMetadata, now_ms: int) -> TransactionMetadata:
    """All markers are written. `last_producer_epoch` stays: also under a new id it is what the client last had."""
    changes: dict[str, Any] = {}
    if metadata.next_producer_id != NO_PRODUCER_ID:
        changes = {"producer_id": metadata.next_producer_id, "producer_epoch": max(metadata.next_producer_epoch, 0)}
    if metadata.is_kept:
        changes["previous_producer_id"] = metadata.previous_producer_id
    return _transition(
        metadata,
        _S.COMPLETE_COMMIT if metadata.status is _S.PREPARE_COMMIT else _S.COMPLETE_ABORT,
        now_ms,
        next_producer_id=NO_PRODUCER_ID,
        partitions=frozenset[TopicPartition](),
        **changes,
    )


def _to_empty(metadata: TransactionMetadata, timeout_ms: int, now_ms: int, **changes: Any) -> TransactionMetadata:
    return _transition(
        metadata,
        _S.EMPTY,
        now_ms,
        timeout_ms=timeout_ms,
        partitions=frozenset[TopicPartition](),
        start_ms=NO_TIME,
        **changes,
    )


def _transition(
    metadata: TransactionMetadata, status: TransactionStatus, now_ms: int, **changes: Any
) -> TransactionMetadata:
    if metadata.status not in TRANSITIONS[status]:
        raise InvalidState(
            f"Transactional id {metadata.transactional_id!r} cannot go from {metadata.status.title} to {status.title}. "
            "Nothing was changed."
        )
    changes.setdefault("previous_producer_id", metadata.producer_id)
    changes.setdefault("end_offsets", ())
    changes.setdefault("next_producer_epoch", NO_PRODUCER_EPOCH)
    return replace(metadata, status=status, last_update_ms=now_ms, **changes)
