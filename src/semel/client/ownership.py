"""Whose is the epoch? What a producer may claim after the coordinator has raised it.

InitProducerId with an identity is meant to be refused when a newer owner is there. But while that owner has a
transaction *open*, Kafka (seen on 2.5, 3.9 and 4.3) does not look at the epoch: it aborts the open transaction, whoever
asked. So a producer looks first (DescribeTransactions, or before Kafka 3.0 by an EndTxn, which does look at the epoch),
and asks only in the name of an epoch that nobody else can hold.

The coordinator hands epochs out like this, for a producer that has epoch e:

- an open transaction that the coordinator ends by itself (time-out, or a new owner arriving) is aborted under e+1,
  which is given to nobody: a new owner gets e+2 or later;
- protocol 2: commit or abort by the producer itself moves it to e+1, which is its own;
- protocol 1: commit leaves e in place, so after it e+1 may be a new owner's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

EXHAUSTED_EPOCH: Final = 2**15 - 2
"""From here on the coordinator answers with a new producer id."""

OPEN: Final = "Ongoing"
UNDECIDED: Final = frozenset({"PrepareCommit", "PrepareAbort", "PrepareEpochFence"})
"""Markers are being written: the state will move on by itself within milliseconds."""


NO_TIMEOUT_MS: Final = 2**31 - 1
"""What a coordinator says of the timeout of two-phase transactions (KIP-939): they have none."""


class ProducerIdentity(NamedTuple):
    """The producer id and epoch that every batch carries."""

    producer_id: int
    producer_epoch: int

    @property
    def following(self) -> ProducerIdentity:
        return ProducerIdentity(self.producer_id, self.producer_epoch + 1)


NOBODY: Final = ProducerIdentity(-1, -1)


@dataclass(frozen=True, slots=True)
class Owner:
    """What the coordinator says of a transactional id."""

    identity: ProducerIdentity
    state: str
    timeout_ms: int = 0

    @property
    def is_two_phase(self) -> bool:
        return self.timeout_ms == NO_TIMEOUT_MS

    @property
    def is_open(self) -> bool:
        return self.state == OPEN

    @property
    def is_undecided(self) -> bool:
        return self.state in UNDECIDED


def decide_claim(mine: ProducerIdentity, owner: Owner, *, next_epoch_is_free: bool) -> ProducerIdentity | None:
    """The identity in whose name InitProducerId may be asked for, or None if another producer has taken over.

    `next_epoch_is_free` says that the epoch after `mine` can only be the coordinator's or this producer's own.

    >>> mine = ProducerIdentity(7, 3)
    >>> decide_claim(mine, Owner(mine, "CompleteCommit"), next_epoch_is_free=False)
    ProducerIdentity(producer_id=7, producer_epoch=3)
    >>> decide_claim(mine, Owner(mine.following, "CompleteAbort"), next_epoch_is_free=True)
    ProducerIdentity(producer_id=7, producer_epoch=4)
    >>> decide_claim(mine, Owner(mine.following, "Ongoing"), next_epoch_is_free=True) is None
    True
    """
    if owner.identity == mine:
        return mine
    if owner.is_open:
        return None
    if owner.identity == mine.following and next_epoch_is_free:
        return owner.identity
    if mine.producer_epoch >= EXHAUSTED_EPOCH and owner.identity.producer_epoch == 0 and next_epoch_is_free:
        # The coordinator changed the producer id at the end of the epochs and still knows the old one as the last.
        return mine
    return None
