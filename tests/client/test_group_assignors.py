"""Sharing out partitions in classic groups, by what must hold however it is done; and the bytes members exchange."""

from __future__ import annotations

import random
import struct

import pytest

from semel.client.group_assignors import ASSIGNORS, Shares, Subscriber, owners_of
from semel.client.group_formats import (
    Subscription,
    decode_assignment,
    decode_sticky_data,
    decode_subscription,
    encode_assignment,
    encode_sticky_data,
    encode_subscription,
)
from semel.client.partitions import TopicPartition
from semel.errors import WireError

ROUNDS = 60
TOPICS = ("a", "b", "c")


def random_group(rng: random.Random) -> tuple[dict[str, Subscriber], dict[str, int]]:
    counts = {topic: rng.randrange(8) for topic in TOPICS}
    same = frozenset(rng.sample(TOPICS, rng.randint(1, 3)))
    members: dict[str, Subscriber] = {}
    for number in range(rng.randint(1, 6)):
        topics = same if rng.random() < 0.6 else frozenset(rng.sample(TOPICS, rng.randint(1, 3)))
        # Also what cannot be true: partitions that are gone, topics that are not subscribed, claims of two members.
        owned = frozenset(
            TopicPartition(topic, partition) for topic in TOPICS for partition in range(9) if rng.random() < 0.25
        )
        instance = f"i{rng.randrange(99)}" if rng.random() < 0.3 else None
        members[f"m{number}"] = Subscriber(topics, owned, rng.randrange(-1, 4), instance)
    return members, counts


def wanted(members: dict[str, Subscriber], counts: dict[str, int]) -> list[TopicPartition]:
    read = {topic for member in members.values() for topic in member.topics}
    return sorted(TopicPartition(topic, number) for topic in read for number in range(counts[topic]))


def settled(name: str, members: dict[str, Subscriber], counts: dict[str, int]) -> Shares:
    """The shares after as many rebalances as it takes until nobody gives anything up."""
    assignor = ASSIGNORS[name]
    for generation in range(10, 20):
        shares = assignor.share(members, counts)
        gives_up = any(member.owned - shares[member_id] for member_id, member in members.items())
        members = {
            member_id: Subscriber(member.topics, shares[member_id], generation, member.group_instance_id)
            for member_id, member in members.items()
        }
        if not (assignor.is_cooperative and gives_up):
            return shares
    raise AssertionError("the members go on giving up partitions")


@pytest.mark.parametrize("name", ASSIGNORS)
def test_every_partition_goes_to_one_member_that_wants_it(name: str, rng: random.Random) -> None:
    """Nothing is left out, nothing is given twice, nobody gets what it did not ask for; order does not matter."""
    for _ in range(ROUNDS):
        members, counts = random_group(rng)
        shares = settled(name, members, counts)
        assert sorted(partition for share in shares.values() for partition in share) == wanted(members, counts)
        assert all({p.topic for p in share} <= members[member].topics for member, share in shares.items())
        again = ASSIGNORS[name].share(dict(reversed(members.items())), dict(reversed(counts.items())))
        assert again == ASSIGNORS[name].share(members, counts)


@pytest.mark.parametrize("name", ["roundrobin", "sticky", "cooperative-sticky"])
def test_equal_subscriptions_get_equal_shares(name: str, rng: random.Random) -> None:
    """No two members differ by more than one partition; with range that holds for each topic."""
    for _ in range(ROUNDS):
        members, counts = random_group(rng)
        members = {k: Subscriber(frozenset(TOPICS), m.owned, m.generation) for k, m in members.items()}
        sizes = [len(share) for share in settled(name, members, counts).values()]
        assert max(sizes) - min(sizes) <= 1
        by_range = ASSIGNORS["range"].share(members, counts).values()
        for topic in TOPICS:
            parts = [sum(p.topic == topic for p in share) for share in by_range]
            assert max(parts) - min(parts) <= 1


@pytest.mark.parametrize("name", ["sticky", "cooperative-sticky"])
def test_what_needs_not_move_stays(name: str, rng: random.Random) -> None:
    """When members come or go, those who stay give up no more than what they have above their new share."""
    for _ in range(ROUNDS):
        counts = {"a": rng.randint(1, 20)}
        before = [f"m{number}" for number in range(rng.randint(1, 5))]
        after = [f"m{number}" for number in range(rng.randint(1, 5))]
        first = settled(name, {k: Subscriber(frozenset(["a"])) for k in before}, counts)
        members = {k: Subscriber(frozenset(["a"]), first.get(k, frozenset()), 5) for k in after}
        second = settled(name, members, counts)
        least = counts["a"] // len(after)
        moved = sum(len(first[k] - second[k]) for k in before if k in second)
        assert moved <= sum(max(0, len(first[k]) - least) for k in before if k in second)


def test_nobody_is_given_what_another_still_holds(rng: random.Random) -> None:
    """KIP-429: one rebalance to let go, the next one to take."""
    for _ in range(ROUNDS):
        members, counts = random_group(rng)
        for name, share in ASSIGNORS["cooperative-sticky"].share(members, counts).items():
            held_by_others = {p for other, member in members.items() if other != name for p in member.owned}
            assert not share & held_by_others


def test_the_newest_claim_counts_and_two_equal_ones_do_not() -> None:
    """A member that missed a rebalance believes in partitions that were given away since."""
    partition = TopicPartition("a", 0)
    late, present = (
        Subscriber(frozenset("a"), frozenset([partition]), 3),
        Subscriber(frozenset("a"), frozenset([partition]), 4),
    )
    assert owners_of({"late": late, "present": present}) == {partition: "present"}
    assert owners_of({"one": present, "other": present}) == {}


def test_static_members_are_ranked_by_their_instance_ids() -> None:
    """KIP-345: with new member ids after a restart, range and round-robin give each instance what it had."""
    for name in ("range", "roundrobin"):
        before = {f"x{n}": Subscriber(frozenset("a"), group_instance_id=f"i{n}") for n in range(3)}
        after = {f"y{2 - n}": Subscriber(frozenset("a"), group_instance_id=f"i{n}") for n in range(3)}
        first, second = (ASSIGNORS[name].share(group, {"a": 7}) for group in (before, after))
        assert [first[f"x{n}"] for n in range(3)] == [second[f"y{2 - n}"] for n in range(3)]


# The bytes below were written down from Java's ConsumerProtocol and StickyAssignor: version, fields, in that order.
JAVA_SUBSCRIPTION_3 = (
    struct.pack(">hih1s", 3, 1, 1, b"t")
    + struct.pack(">i", -1)
    + struct.pack(">ih1siii", 1, 1, b"t", 2, 0, 2)
    + struct.pack(">ih", 7, -1)
)
JAVA_SUBSCRIPTION_0 = struct.pack(">hih1si", 0, 1, 1, b"t", -1)
JAVA_ASSIGNMENT_3 = struct.pack(">hih1siii", 3, 1, 1, b"t", 2, 0, 2) + struct.pack(">i", -1)
JAVA_STICKY = struct.pack(">ih1siii", 1, 1, b"t", 2, 0, 2) + struct.pack(">i", 7)
OWNED = frozenset([TopicPartition("t", 0), TopicPartition("t", 2)])


def test_subscriptions_assignments_and_user_data_have_javas_layout() -> None:
    """Members of other libraries read them."""
    assert encode_subscription(Subscription(("t",), OWNED, 7)) == JAVA_SUBSCRIPTION_3
    assert decode_subscription(JAVA_SUBSCRIPTION_3) == Subscription(("t",), OWNED, 7)
    assert decode_subscription(JAVA_SUBSCRIPTION_0) == Subscription(("t",))
    assert encode_assignment(OWNED) == JAVA_ASSIGNMENT_3
    assert decode_assignment(JAVA_ASSIGNMENT_3) == OWNED
    assert encode_sticky_data(OWNED, 7) == JAVA_STICKY
    assert decode_sticky_data(JAVA_STICKY) == (OWNED, 7)


def test_newer_versions_are_read_as_far_as_they_are_known() -> None:
    """A member of a later release may say more; what is known stands in front."""
    newer = struct.pack(">h", 9) + JAVA_SUBSCRIPTION_3[2:] + b"more"
    assert decode_subscription(newer) == Subscription(("t",), OWNED, 7)


@pytest.mark.parametrize("data", [b"", b"\0", b"\0\1\0", struct.pack(">hi", 1, 5), struct.pack(">h", -4)])
def test_damaged_subscriptions_are_an_error_of_ours(data: bytes) -> None:
    """And not of struct's or kio's; damaged user data only costs stickiness."""
    with pytest.raises(WireError, match="A member's subscription"):
        decode_subscription(data)
    assert decode_sticky_data(b"\0\0\0\5ab")[0] == frozenset()
