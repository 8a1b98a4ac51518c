"""How a KIP-848 member moves to its target: it gives up, acknowledges, and then receives what others released.

| state                 | what it waits for                                    | next                                  |
|-----------------------|------------------------------------------------------|---------------------------------------|
| STABLE                | a target of a newer epoch                            | any of the three, see `_advance`      |
| UNREVOKED_PARTITIONS  | that the member no longer owns what it must give up  | any of the three                      |
| UNRELEASED_PARTITIONS | that other members release what this one shall have  | any of the three                      |
| UNKNOWN               | that the member owns nothing (a newer Kafka's state) | any of the three, or it is fenced     |
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from uuid import UUID

from kio.schema.errors import ErrorCode

from semel.core.consumer_group_records import Assignment, CurrentAssignment, MemberState
from semel.core.refusal import Refused

# What the member reports to own; None when it says nothing about it.
Owned = Mapping[UUID, Collection[int]] | None


def reconcile(
    current: CurrentAssignment,
    target_epoch: int,
    target: Assignment,
    owned: Owned,
    is_free: Callable[[UUID, int], bool],
) -> CurrentAssignment:
    """The member's next state, or `current` itself if it cannot move.

    `is_free` tells whether a partition is held by no other member, so that it may be given to this one.

    >>> topic = UUID(int=1)
    >>> before = CurrentAssignment(1, 0, MemberState.STABLE, {topic: frozenset([0, 1])})
    >>> asked = reconcile(before, 2, {topic: frozenset([0])}, None, lambda topic_id, partition: True)
    >>> asked.state.name, asked.member_epoch, asked.pending_revocation[topic]
    ('UNREVOKED_PARTITIONS', 1, frozenset({1}))
    >>> done = reconcile(asked, 2, {topic: frozenset([0])}, {topic: [0]}, lambda topic_id, partition: True)
    >>> done.state.name, done.member_epoch
    ('STABLE', 2)
    """
    match current.state:
        case MemberState.STABLE if current.member_epoch == target_epoch:
            return current
        case MemberState.UNREVOKED_PARTITIONS if _owns_any(owned, current.pending_revocation):
            return current
        case MemberState.UNKNOWN if owned is None or any(owned.values()):
            raise Refused(
                ErrorCode.fenced_member_epoch,
                "the member is in a state that this broker does not know; it must give up its partitions and rejoin",
            )
        case _:
            return _advance(current, target_epoch, target, owned, is_free)


def _advance(
    current: CurrentAssignment,
    target_epoch: int,
    target: Assignment,
    owned: Owned,
    is_free: Callable[[UUID, int], bool],
) -> CurrentAssignment:
    kept = _without_empty({topic: held & target.get(topic, frozenset()) for topic, held in current.assigned.items()})
    surplus = _minus(current.assigned, kept)
    if surplus and _owns_any(owned, surplus):
        # The epoch stays: the member has not reached the new target, and commits under the old epoch are still good.
        return CurrentAssignment(
            current.member_epoch, current.member_epoch, MemberState.UNREVOKED_PARTITIONS, kept, surplus
        )
    missing = _minus(target, kept)
    granted = _without_empty(
        {topic: frozenset(p for p in wanted if is_free(topic, p)) for topic, wanted in missing.items()}
    )
    assigned = {topic: kept.get(topic, frozenset()) | granted.get(topic, frozenset()) for topic in (*kept, *granted)}
    state = MemberState.STABLE if granted == missing else MemberState.UNRELEASED_PARTITIONS
    return CurrentAssignment(target_epoch, current.member_epoch, state, assigned, {})


def owns_only(owned: Owned, assigned: Assignment) -> bool:
    """Whether the member says what it owns, and all of that was given to it."""
    return owned is not None and all(
        partition in assigned.get(topic, ()) for topic, partitions in owned.items() for partition in partitions
    )


def _owns_any(owned: Owned, assignment: Assignment) -> bool:
    """A member that says nothing counts as owning all: only an explicit report releases a partition."""
    return owned is None or any(
        partition in assignment.get(topic, ()) for topic, partitions in owned.items() for partition in partitions
    )


def _minus(left: Assignment, right: Assignment) -> Assignment:
    return _without_empty({topic: held - right.get(topic, frozenset()) for topic, held in left.items()})


def _without_empty(assignment: Assignment) -> Assignment:
    return {topic: partitions for topic, partitions in assignment.items() if partitions}
