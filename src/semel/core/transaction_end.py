"""What becomes of an EndTxn: tables by state and wished outcome, for each protocol (KIP-98, KIP-890)."""

from __future__ import annotations

import enum
from typing import Final

from kio.schema.errors import ErrorCode

from semel.core.transaction_metadata import (
    EXHAUSTED_EPOCH,
    PROTOCOL_2,
    ProducerIdentity,
    TransactionMetadata,
    TransactionStatus,
)


class EndVerdict(enum.Enum):
    """END is to be logged, ANSWER_AGAIN was carried out before; the others are refused."""

    END = enum.auto()
    ANSWER_AGAIN = enum.auto()
    WAIT_FOR_MARKERS = enum.auto()
    WRONG_STATE = enum.auto()
    FENCED = enum.auto()
    WRONG_PRODUCER_ID = enum.auto()


REFUSALS: Final[dict[EndVerdict, ErrorCode]] = {
    EndVerdict.WAIT_FOR_MARKERS: ErrorCode.concurrent_transactions,
    EndVerdict.WRONG_STATE: ErrorCode.invalid_txn_state,
    EndVerdict.FENCED: ErrorCode.producer_fenced,
    EndVerdict.WRONG_PRODUCER_ID: ErrorCode.invalid_producer_id_mapping,
}

_S = TransactionStatus
_COMMIT, _ABORT = True, False

Table = dict[tuple[TransactionStatus, bool], EndVerdict]

# The epoch is the same before and after an end, so state and outcome must tell a repeat from a new request. They cannot
# always: a delayed EndTxn may end the next transaction. That is the protocol's hole, and why there is a protocol 2.
PROTOCOL_1_TABLE: Final[Table] = {
    (_S.EMPTY, _COMMIT): EndVerdict.WRONG_STATE,
    (_S.EMPTY, _ABORT): EndVerdict.WRONG_STATE,
    (_S.ONGOING, _COMMIT): EndVerdict.END,
    (_S.ONGOING, _ABORT): EndVerdict.END,
    (_S.PREPARE_COMMIT, _COMMIT): EndVerdict.WAIT_FOR_MARKERS,
    (_S.PREPARE_COMMIT, _ABORT): EndVerdict.WRONG_STATE,
    (_S.PREPARE_ABORT, _COMMIT): EndVerdict.WRONG_STATE,
    (_S.PREPARE_ABORT, _ABORT): EndVerdict.WAIT_FOR_MARKERS,
    (_S.COMPLETE_COMMIT, _COMMIT): EndVerdict.ANSWER_AGAIN,
    (_S.COMPLETE_COMMIT, _ABORT): EndVerdict.WRONG_STATE,
    (_S.COMPLETE_ABORT, _COMMIT): EndVerdict.WRONG_STATE,
    (_S.COMPLETE_ABORT, _ABORT): EndVerdict.ANSWER_AGAIN,
}

# With the present epoch it is about what came after the last end. An abort of nothing is allowed, since the client
# cannot know whether its first write arrived. A PREPARE state is missing: its epoch has been given to nobody yet.
PROTOCOL_2_TABLE: Final[Table] = {
    (_S.EMPTY, _COMMIT): EndVerdict.WRONG_STATE,
    (_S.EMPTY, _ABORT): EndVerdict.END,
    (_S.ONGOING, _COMMIT): EndVerdict.END,
    (_S.ONGOING, _ABORT): EndVerdict.END,
    (_S.COMPLETE_COMMIT, _COMMIT): EndVerdict.WRONG_STATE,
    (_S.COMPLETE_COMMIT, _ABORT): EndVerdict.END,
    (_S.COMPLETE_ABORT, _COMMIT): EndVerdict.WRONG_STATE,
    (_S.COMPLETE_ABORT, _ABORT): EndVerdict.END,
}

# With the epoch before the present one it is the request that raised the epoch, come again after a lost answer. What
# was begun or claimed since then was so by a newer epoch, so that EMPTY and ONGOING are missing.
PROTOCOL_2_REPEAT_TABLE: Final[Table] = {
    (_S.PREPARE_COMMIT, _COMMIT): EndVerdict.WAIT_FOR_MARKERS,
    (_S.PREPARE_COMMIT, _ABORT): EndVerdict.WRONG_STATE,
    (_S.PREPARE_ABORT, _COMMIT): EndVerdict.WRONG_STATE,
    (_S.PREPARE_ABORT, _ABORT): EndVerdict.WAIT_FOR_MARKERS,
    (_S.COMPLETE_COMMIT, _COMMIT): EndVerdict.ANSWER_AGAIN,
    (_S.COMPLETE_COMMIT, _ABORT): EndVerdict.WRONG_STATE,
    (_S.COMPLETE_ABORT, _COMMIT): EndVerdict.WRONG_STATE,
    (_S.COMPLETE_ABORT, _ABORT): EndVerdict.ANSWER_AGAIN,
}


def end_verdict(
    metadata: TransactionMetadata, given: ProducerIdentity, committed: bool, transaction_version: int
) -> EndVerdict:
    """`given` is the identity in whose name it is asked for, `transaction_version` the protocol that is spoken.

    >>> ended = TransactionMetadata(
    ...     "id", 7, producer_epoch=4, status=TransactionStatus.COMPLETE_COMMIT, client_transaction_version=2
    ... )
    >>> [end_verdict(ended, ProducerIdentity(7, 3), True, version).name for version in (1, 2)]
    ['FENCED', 'ANSWER_AGAIN']
    """
    if metadata.is_kept:
        return _verdict_of_kept(metadata, given, committed, transaction_version)
    is_protocol_2 = transaction_version >= PROTOCOL_2
    has_used_up_epochs = (
        is_protocol_2 and metadata.producer_epoch == 0 and given == (metadata.previous_producer_id, EXHAUSTED_EPOCH)
    )
    if given.producer_id != metadata.producer_id and not has_used_up_epochs:
        return EndVerdict.WRONG_PRODUCER_ID
    # Not so in Kafka: the last end must have been of protocol 2, or the present epoch was raised by somebody else, and
    # where clients of both protocols share an id, a fenced one would be answered with its successor's identity.
    has_raised_epoch = (
        metadata.client_transaction_version >= PROTOCOL_2 and given.producer_epoch + 1 == metadata.producer_epoch
    )
    if is_protocol_2 and (has_used_up_epochs or has_raised_epoch):
        table = PROTOCOL_2_REPEAT_TABLE
    elif given.producer_epoch != metadata.producer_epoch:
        return EndVerdict.FENCED
    else:
        table = PROTOCOL_2_TABLE if is_protocol_2 else PROTOCOL_1_TABLE
    return table.get((metadata.status, committed), EndVerdict.FENCED)


def _verdict_of_kept(
    metadata: TransactionMetadata, given: ProducerIdentity, committed: bool, transaction_version: int
) -> EndVerdict:
    """About a transaction that its present owner found open and kept (KIP-939), or whose end is decided by now."""
    if transaction_version < PROTOCOL_2:
        return EndVerdict.WRONG_STATE  # its answer could not tell the next identity
    if metadata.status is _S.ONGOING:
        if given == metadata.owner:
            return EndVerdict.END
    elif given == (metadata.previous_producer_id, metadata.last_producer_epoch):
        return PROTOCOL_2_REPEAT_TABLE[metadata.status, committed]
    is_known = given.producer_id in (metadata.producer_id, metadata.owner.producer_id)
    return EndVerdict.FENCED if is_known else EndVerdict.WRONG_PRODUCER_ID
