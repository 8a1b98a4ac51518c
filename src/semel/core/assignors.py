"""Server-side assignors of KIP-848: `uniform` and `range`, both sticky: they move no partition without need.

An assignor is a pure function from the members' subscriptions, what each had in the target before, and the topics'
partition counts, to the new target. Equal input gives equal output, in whatever order the members come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final
from uuid import UUID

from semel.core.consumer_group_records import Assignment

TopicPartition = tuple[UUID, int]


@dataclass(frozen=True, slots=True)
class MemberSpec:
    """A member as an assignor sees it: the existing topics it reads, and its partitions in the target until now."""

    subscribed_topic_ids: frozenset[UUID]
    previous: Assignment


_NUMBER: Final = attrgetter("int")
"""Compares topic ids by their numbers, which is the same order and much faster."""

GroupSpec = Mapping[str, MemberSpec]
PartitionCounts = Mapping[UUID, int]
GroupTarget = dict[str, Assignment]
Assignor = Callable[[GroupSpec, PartitionCounts], GroupTarget]


def assign_uniform(members: GroupSpec, partition_counts: PartitionCounts) -> GroupTarget:
    """Spread all partitions evenly: with equal subscriptions, no two members differ by more than one partition.

    >>> topic = UUID(int=1)
    >>> group = {name: MemberSpec(frozenset([topic]), {}) for name in ("a", "b")}
    >>> {name: sorted(target[topic]) for name, target in assign_uniform(group, {topic: 3}).items()}
    {'a': [0, 1], 'b': [2]}
    """
    kept = {member_id: list(_still_valid(members[member_id], partition_counts)) for member_id in sorted(members)}
    if len({spec.subscribed_topic_ids for spec in members.values()}) == 1:
        _spread_among_equals(kept, members, partition_counts)
    else:
        _spread_among_different(kept, members, partition_counts)
    return {member_id: _by_topic(partitions) for member_id, partitions in kept.items()}


def assign_range(members: GroupSpec, partition_counts: PartitionCounts) -> GroupTarget:
    """Give each subscriber a share of every topic; topics with equal counts and readers are cut at the same places.

    So a member that joins two co-partitioned topics has the same partitions of both, also when one of them was
    created later.

    >>> one, two = UUID(int=1), UUID(int=2)
    >>> group = {name: MemberSpec(frozenset([one, two]), {}) for name in ("a", "b")}
    >>> target = assign_range(group, {one: 3, two: 3})
    >>> sorted(target["a"][one]), sorted(target["a"][two]), sorted(target["b"][two])
    ([0, 1], [0, 1], [2])
    """
    target: dict[str, dict[UUID, frozenset[int]]] = {member_id: {} for member_id in members}
    for (subscribers, count), topic_ids in _co_partitioned(members, partition_counts).items():
        lead = max(topic_ids, key=lambda topic_id: (_assigned_before(members, subscribers, topic_id), -topic_id.int))
        before = [
            sorted(p for p in members[member_id].previous.get(lead, ()) if p < count) for member_id in subscribers
        ]
        for member_id, partitions in zip(subscribers, _cut(before, count), strict=True):
            if partitions:
                target[member_id].update(dict.fromkeys(topic_ids, partitions))
    return dict(target)


ASSIGNORS: Final[Mapping[str, Assignor]] = {"uniform": assign_uniform, "range": assign_range}


def _still_valid(spec: MemberSpec, partition_counts: PartitionCounts) -> Iterator[TopicPartition]:
    for topic_id in sorted(spec.previous.keys() & spec.subscribed_topic_ids, key=_NUMBER):
        for partition in sorted(spec.previous[topic_id]):
            if partition < partition_counts[topic_id]:
                yield topic_id, partition


def _by_topic(partitions: Iterable[TopicPartition]) -> Assignment:
    topics: dict[UUID, set[int]] = {}
    for topic_id, partition in partitions:
        topics.setdefault(topic_id, set()).add(partition)
    return {topic_id: frozenset(numbers) for topic_id, numbers in topics.items()}


def _unassigned(
    kept: Mapping[str, Sequence[TopicPartition]], topic_ids: Iterable[UUID], partition_counts: PartitionCounts
) -> list[TopicPartition]:
    taken = {partition for partitions in kept.values() for partition in partitions}
    every = (
        (topic_id, number)
        for topic_id in sorted(topic_ids, key=_NUMBER)
        for number in range(partition_counts[topic_id])
    )
    return [partition for partition in every if partition not in taken]


def _spread_among_equals(
    kept: dict[str, list[TopicPartition]], members: GroupSpec, partition_counts: PartitionCounts
) -> None:
    topic_ids = next(iter(members.values())).subscribed_topic_ids
    quota, extra = divmod(sum(partition_counts[topic_id] for topic_id in topic_ids), len(members))
    quotas: dict[str, int] = {}
    # Those who have more than the quota already keep one of the extra partitions: handing it to another is a move
    # without need.
    for member_id in sorted(kept, key=lambda member_id: (len(kept[member_id]) <= quota, member_id)):
        quotas[member_id] = quota + (1 if extra > 0 else 0)
        extra -= 1
    for member_id, partitions in kept.items():
        del partitions[quotas[member_id] :]
    free = iter(_unassigned(kept, topic_ids, partition_counts))
    for member_id, partitions in kept.items():
        partitions.extend(next(free) for _ in range(quotas[member_id] - len(partitions)))


def _spread_among_different(
    kept: dict[str, list[TopicPartition]], members: GroupSpec, partition_counts: PartitionCounts
) -> None:
    subscribers: dict[UUID, list[str]] = {}
    for member_id in kept:
        for topic_id in members[member_id].subscribed_topic_ids:
            subscribers.setdefault(topic_id, []).append(member_id)
    # Topics with the most partitions for each reader first, then those with the fewest readers: they leave the least
    # choice, so the others can still even out what they leave uneven.
    order = sorted(
        subscribers,
        key=lambda topic_id: (-partition_counts[topic_id] / len(subscribers[topic_id]), len(subscribers[topic_id])),
    )
    rank = {topic_id: place for place, topic_id in enumerate(order)}
    for partition in sorted(_unassigned(kept, subscribers, partition_counts), key=lambda free: (rank[free[0]], free)):
        least_loaded = min(subscribers[partition[0]], key=lambda member_id: len(kept[member_id]))
        kept[least_loaded].append(partition)
    while any(_even_out(kept, subscribers[topic_id], topic_id) for topic_id in order):
        pass


def _even_out(kept: dict[str, list[TopicPartition]], subscribers: Sequence[str], topic_id: UUID) -> bool:
    """Move partitions of one topic from the most to the least loaded, as long as that brings them closer.

    Every move lessens the sum of the squares of the loads, so repeating this over all topics comes to an end.
    """
    held = {member_id: [p for p in kept[member_id] if p[0] == topic_id] for member_id in subscribers}
    moved = False
    while True:
        giver = max((m for m in subscribers if held[m]), key=lambda m: len(kept[m]), default=None)
        taker = min(subscribers, key=lambda m: len(kept[m]))
        if giver is None or len(kept[giver]) - len(kept[taker]) <= 1:
            return moved
        partition = held[giver].pop()
        kept[giver].remove(partition)
        held[taker].append(partition)
        kept[taker].append(partition)
        moved = True


def _co_partitioned(
    members: GroupSpec, partition_counts: PartitionCounts
) -> dict[tuple[tuple[str, ...], int], list[UUID]]:
    subscribers: dict[UUID, list[str]] = {}
    for member_id in sorted(members):
        for topic_id in members[member_id].subscribed_topic_ids:
            subscribers.setdefault(topic_id, []).append(member_id)
    together: dict[tuple[tuple[str, ...], int], list[UUID]] = {}
    for topic_id in sorted(subscribers):
        together.setdefault((tuple(subscribers[topic_id]), partition_counts[topic_id]), []).append(topic_id)
    return together


def _assigned_before(members: GroupSpec, subscribers: Sequence[str], topic_id: UUID) -> int:
    return sum(len(members[member_id].previous.get(topic_id, ())) for member_id in subscribers)


def _cut(before: Sequence[Sequence[int]], count: int) -> list[frozenset[int]]:
    """Share out the partitions 0..count-1; `before` has what each member held, ascending."""
    quota, extra = divmod(count, len(before))
    shares: list[list[int]] = []
    for held in before:
        keeps_extra = len(held) > quota and extra > 0
        extra -= keeps_extra
        shares.append(list(held[: quota + keeps_extra]))
    taken = {partition for share in shares for partition in share}
    free = iter([partition for partition in range(count) if partition not in taken])
    for share in shares:
        wanted = quota - len(share)
        if wanted >= 0 and extra > 0:
            wanted += 1
            extra -= 1
        share.extend(next(free) for _ in range(wanted))
    return [frozenset(share) for share in shares]
