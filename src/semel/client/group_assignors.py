"""How the leader of a classic group shares out partitions: range, round-robin, sticky, cooperative-sticky. Pure.

The leader alone computes, so members of other libraries need not agree with the way it is done, only with the formats
(`group_formats`) and with the rule of cooperative rebalancing: a partition that changes hands goes to nobody until its
owner has let go of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import Final
from uuid import UUID

from semel.client.group_formats import (
    NO_GENERATION,
    Subscription,
    decode_sticky_data,
    encode_cooperative_data,
    encode_sticky_data,
)
from semel.client.partitions import TopicPartition
from semel.core.assignors import MemberSpec, assign_uniform

Shares = dict[str, frozenset[TopicPartition]]
"""By member id."""


@dataclass(frozen=True, slots=True)
class Subscriber:
    """A member as an assignor sees it."""

    topics: frozenset[str]
    owned: frozenset[TopicPartition] = frozenset()
    generation: int = NO_GENERATION
    group_instance_id: str | None = None


Subscribers = Mapping[str, Subscriber]
PartitionCounts = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Assignor:
    """A way to share out, and how members tell what it needs to know."""

    name: str
    is_cooperative: bool
    share: Callable[[Subscribers, PartitionCounts], Shares]

    def subscription(
        self,
        topics: Iterable[str],
        owned: frozenset[TopicPartition],
        previous: frozenset[TopicPartition],
        generation: int,
    ) -> Subscription:
        """What a member says when it joins: `owned` is what it holds now, `previous` what it had last."""
        named = tuple(sorted(topics))
        if self.name == "sticky":
            return Subscription(named, user_data=encode_sticky_data(previous, generation))
        if self.is_cooperative:
            return Subscription(named, owned, generation, encode_cooperative_data(generation))
        return Subscription(named, owned, generation)

    def subscriber(self, subscription: Subscription, group_instance_id: str | None) -> Subscriber:
        """The same, as the leader reads it."""
        owned, generation = subscription.owned, subscription.generation
        told_owned, told_generation = decode_sticky_data(subscription.user_data or b"")
        if self.name == "sticky":
            owned, generation = told_owned, told_generation
        elif self.is_cooperative and generation == NO_GENERATION:
            generation = told_generation
        return Subscriber(frozenset(subscription.topics), owned, generation, group_instance_id)


def share_by_range(members: Subscribers, counts: PartitionCounts) -> Shares:
    """Of every topic a run of neighbouring partitions to each subscriber; the first ones get one more.

    >>> group = {name: Subscriber(frozenset(["t"])) for name in ("a", "b")}
    >>> {name: len(share) for name, share in share_by_range(group, {"t": 3}).items()}
    {'a': 2, 'b': 1}
    """
    shares: dict[str, set[TopicPartition]] = {member_id: set() for member_id in members}
    for topic, count in counts.items():
        subscribers = [name for name in _in_order(members) if topic in members[name].topics]
        if not subscribers:
            continue
        quota, extra = divmod(count, len(subscribers))
        first = 0
        for place, name in enumerate(subscribers):
            size = quota + (place < extra)
            shares[name].update(TopicPartition(topic, number) for number in range(first, first + size))
            first += size
    return _frozen(shares)


def share_in_turn(members: Subscribers, counts: PartitionCounts) -> Shares:
    """All partitions of all topics in one row, dealt out like cards.

    >>> group = {name: Subscriber(frozenset(["t"])) for name in ("a", "b")}
    >>> sorted(partition.partition for partition in share_in_turn(group, {"t": 3})["a"])
    [0, 2]
    """
    shares: dict[str, set[TopicPartition]] = {member_id: set() for member_id in members}
    turn = cycle(_in_order(members))
    for topic in sorted(counts):
        if not any(topic in member.topics for member in members.values()):
            continue
        for number in range(counts[topic]):
            name = next(name for name in turn if topic in members[name].topics)
            shares[name].add(TopicPartition(topic, number))
    return _frozen(shares)


def share_sticky(members: Subscribers, counts: PartitionCounts) -> Shares:
    """Evenly, and so that partitions stay where they are as far as that allows."""
    ids = {topic: UUID(int=place) for place, topic in enumerate(sorted(counts), 1)}
    names = {topic_id: topic for topic, topic_id in ids.items()}
    owners = owners_of(members)
    specs = {
        name: MemberSpec(
            frozenset(ids[topic] for topic in member.topics if topic in ids),
            {
                ids[topic]: frozenset(p.partition for p, owner in owners.items() if owner == name and p.topic == topic)
                for topic in {p.topic for p in member.owned}
                if topic in ids
            },
        )
        for name, member in members.items()
    }
    target = assign_uniform(specs, {ids[topic]: count for topic, count in counts.items()})
    return {
        name: frozenset(
            TopicPartition(names[topic_id], number) for topic_id, numbers in share.items() for number in numbers
        )
        for name, share in target.items()
    }


def share_cooperatively(members: Subscribers, counts: PartitionCounts) -> Shares:
    """`share_sticky`, without what another member still holds: it comes free in the rebalance after this one.

    >>> held = frozenset(TopicPartition("t", number) for number in range(2))
    >>> group = {"a": Subscriber(frozenset(["t"]), held, 4), "b": Subscriber(frozenset(["t"]))}
    >>> {name: len(share) for name, share in share_cooperatively(group, {"t": 2}).items()}
    {'a': 1, 'b': 0}
    """
    # By whoever says so, of whatever generation: a member that came back late may still be reading it.
    holders: dict[TopicPartition, set[str]] = {}
    for name, member in members.items():
        for partition in member.owned:
            holders.setdefault(partition, set()).add(name)
    return {
        name: frozenset(p for p in share if not holders.get(p, set()) - {name})
        for name, share in share_sticky(members, counts).items()
    }


def owners_of(members: Subscribers) -> dict[TopicPartition, str]:
    """Who has each partition, by the newest generation that anyone names; if two claim it in the same one, nobody."""
    claims: dict[TopicPartition, tuple[int, list[str]]] = {}
    for name, member in members.items():
        for partition in member.owned:
            generation, names = claims.get(partition, (member.generation, []))
            if member.generation > generation:
                claims[partition] = (member.generation, [name])
            elif member.generation == generation:
                claims[partition] = (generation, [*names, name])
    return {partition: names[0] for partition, (_, names) in claims.items() if len(names) == 1}


ASSIGNORS: Final[Mapping[str, Assignor]] = {
    assignor.name: assignor
    for assignor in (
        Assignor("range", False, share_by_range),
        Assignor("roundrobin", False, share_in_turn),
        Assignor("sticky", False, share_sticky),
        Assignor("cooperative-sticky", True, share_cooperatively),
    )
}


def _in_order(members: Subscribers) -> list[str]:
    """Static members first, by their instance ids, which outlive their member ids (KIP-345)."""
    return sorted(members, key=lambda name: (members[name].group_instance_id or "\U0010ffff", name))


def _frozen(shares: Mapping[str, set[TopicPartition]]) -> Shares:
    return {name: frozenset(partitions) for name, partitions in shares.items()}
