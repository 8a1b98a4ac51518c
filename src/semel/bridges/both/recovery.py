"""What became of a decided transaction, and what to do about it: the one function that recovery obeys. Pure.

A decision in the database says that its records belong into Kafka. Only two things can be true of the Kafka
transaction that it names: it is or will be committed, and then the rows go; or it was aborted, by its timeout or by a
new producer of the same name, and then the rows are sent again. To take one for the other would lose or repeat records,
so where neither can be proven, nothing is done.

EndTxn(commit) is tried first. It is always right, since the decision is to commit; it is refused by the epoch if the
transaction has ended; and every broker has it. If it is refused, the marker that ended the transaction is looked up
where its records are.

With two-phase commit (KIP-939) there is no timeout, and a new producer of the name keeps the transaction; it commits it
by itself then. Whoever else asks finds it open, and under an epoch that is no longer the one to end it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from semel.bridges.both.decision import Decision
from semel.client.ownership import Owner
from semel.records.control import ControlMarker


class EndAnswer(enum.Enum):
    """What the coordinator said to EndTxn(commit) under the decision's own producer id and epoch."""

    NOT_SENT = enum.auto()
    ACCEPTED = enum.auto()
    """It commits now, or it has committed before."""
    REFUSED = enum.auto()
    """Its state or its epoch is another one: the transaction has ended, in whichever way."""
    UNANSWERED = enum.auto()


class MarkerSeen(enum.Enum):
    """What the partitions say that were written."""

    NOT_READ = enum.auto()
    COMMIT = enum.auto()
    ABORT = enum.auto()
    NOT_YET = enum.auto()
    """No marker is there, nor anything that shows that there never will be one."""
    MISSING = enum.auto()
    """Still none, when the coordinator had said that all markers are written: a topic that was created again, say."""
    LOST = enum.auto()
    """The place where it was is gone: deleted by retention, compacted, or the topic was deleted."""


class OwnerSeen(enum.Enum):
    """What there is besides an `Owner`."""

    NOT_ASKED = enum.auto()
    UNKNOWN = enum.auto()
    """The broker is too old to tell, or the coordinator has forgotten the transactional id."""


class Step(enum.Enum):
    """What to do next."""

    SEND_END = "send EndTxn(commit)"
    READ_MARKERS = "look for the marker"
    ASK_OWNER = "ask the coordinator"
    DELETE = "it is committed: delete the rows"
    RESEND = "it is aborted: send the rows again"
    TAKE_OVER = "another producer of the name has it: that one commits it, or one that comes after"
    WAIT = "not known yet: try again"
    REFUSE_CLUSTER = "it is about another cluster"
    REFUSE = "it can never be known"


LAST_STEPS: Final = frozenset({Step.DELETE, Step.RESEND, Step.TAKE_OVER, Step.WAIT, Step.REFUSE_CLUSTER, Step.REFUSE})


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of Kafka's side so far."""

    cluster_id: str
    end: EndAnswer = EndAnswer.NOT_SENT
    marker: MarkerSeen = MarkerSeen.NOT_READ
    owner: Owner | OwnerSeen = OwnerSeen.NOT_ASKED


def decide_step(decision: Decision, seen: Seen) -> Step:
    """What to do next about this decision.

    >>> from semel.client.ownership import ProducerIdentity
    >>> decision = Decision("d1", "c", ProducerIdentity(7, 3), 2, ())
    >>> decide_step(decision, Seen("c"))
    <Step.SEND_END: 'send EndTxn(commit)'>
    >>> decide_step(decision, Seen("c", EndAnswer.REFUSED, MarkerSeen.ABORT))
    <Step.RESEND: 'it is aborted: send the rows again'>
    """
    if seen.cluster_id != decision.cluster_id:
        return Step.REFUSE_CLUSTER
    match seen.end:
        case EndAnswer.NOT_SENT:
            return Step.SEND_END
        case EndAnswer.ACCEPTED:
            return Step.DELETE
        case EndAnswer.UNANSWERED:
            return Step.WAIT
        case EndAnswer.REFUSED:
            return _after_refusal(decision, seen)


_AFTER_MARKER: Final = {
    MarkerSeen.NOT_READ: Step.READ_MARKERS,
    MarkerSeen.COMMIT: Step.DELETE,
    MarkerSeen.ABORT: Step.RESEND,
}


def _after_refusal(decision: Decision, seen: Seen) -> Step:
    if seen.marker in _AFTER_MARKER:
        return _AFTER_MARKER[seen.marker]
    if seen.owner is OwnerSeen.NOT_ASKED:
        return Step.ASK_OWNER
    if decision.protocol == 2 and _is_still_open(decision, seen.owner):
        return Step.TAKE_OVER
    if seen.marker is MarkerSeen.NOT_YET:
        # A coordinator whose state is another one has written all markers of this transaction: look once more.
        has_written_all = isinstance(seen.owner, Owner) and not seen.owner.is_undecided
        return Step.READ_MARKERS if has_written_all else Step.WAIT
    if isinstance(seen.owner, Owner):
        return _OUTCOMES.get(_how_it_ended(decision, seen.owner), Step.REFUSE)
    return Step.REFUSE


def _is_still_open(decision: Decision, owner: Owner | OwnerSeen) -> bool:
    """Protocol 2 gives an identity to one transaction, so it is this one."""
    return isinstance(owner, Owner) and owner.is_open and owner.identity == decision.identity


_OUTCOMES: Final = {"CompleteCommit": Step.DELETE, "CompleteAbort": Step.RESEND}


def _how_it_ended(decision: Decision, owner: Owner) -> str:
    """The coordinator's state, if it is still the one in which this very transaction has ended, else nothing.

    Protocol 2 raises the epoch by one with the end of each transaction. Protocol 1 leaves it, and an abort by the
    coordinator raises it too; but then another owner may have come and aborted his own under the same epoch.
    """
    ended_as = decision.identity.following if decision.protocol == 2 else decision.identity
    return owner.state if owner.identity == ended_as else ""


def read_marker(decision: Decision, marker: ControlMarker | None) -> MarkerSeen:
    """What the first marker of this producer id after a place says, from the lowest epoch on that can be its.

    A later epoch belongs to a later transaction: the marker of this one was there and is gone.
    """
    if marker is None:
        return MarkerSeen.NOT_YET
    epoch = decision.identity.producer_epoch
    if decision.protocol == 2:
        is_its = marker.producer_epoch == epoch + 1
    else:
        # The coordinator aborts under the next epoch, which it then gives to nobody.
        is_its = marker.producer_epoch == epoch or (marker.kind == "abort" and marker.producer_epoch == epoch + 1)
    if not is_its:
        return MarkerSeen.LOST
    return MarkerSeen.COMMIT if marker.kind == "commit" else MarkerSeen.ABORT


def lowest_epoch(decision: Decision) -> int:
    """Protocol 2 ends a transaction under the next epoch; this one is on the marker of the transaction before."""
    return decision.identity.producer_epoch + (1 if decision.protocol == 2 else 0)
