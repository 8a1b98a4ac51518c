"""The server-side assignors: complete, balanced, and sticky."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core.assignors import ASSIGNORS, GroupTarget, MemberSpec, assign_range, assign_uniform
from semel.core.consumer_group_records import Assignment

A, B, C = (UUID(int=number) for number in (1, 2, 3))


def load(assignment: Assignment) -> int:
    return sum(map(len, assignment.values()))


def held(target: GroupTarget) -> list[tuple[UUID, int]]:
    return [(topic, p) for assignment in target.values() for topic, numbers in assignment.items() for p in numbers]


def moved(before: GroupTarget, after: GroupTarget) -> int:
    """How many partitions changed from one member to another that both targets know."""
    owner = {p: member for member, assignment in before.items() for p in held({member: assignment})}
    return sum(
        1
        for member, assignment in after.items()
        for p in held({member: assignment})
        if p in owner and owner[p] != member and owner[p] in after
    )


def group_of(names: str, topics: set[UUID], target: GroupTarget | None = None) -> dict[str, MemberSpec]:
    return {name: MemberSpec(frozenset(topics), (target or {}).get(name, {})) for name in names}


@st.composite
def groups(draw: st.DrawFn) -> tuple[dict[str, MemberSpec], dict[UUID, int]]:
    counts = draw(st.dictionaries(st.sampled_from([A, B, C]), st.integers(1, 9), min_size=1))
    names = draw(st.lists(st.sampled_from("abcdefg"), min_size=1, unique=True))
    everyone = draw(st.booleans())
    subscription = st.frozensets(st.sampled_from(sorted(counts)), min_size=0)
    shared = draw(subscription)
    free = [(topic, p) for topic in counts for p in range(draw(st.integers(0, counts[topic])))]
    previous: dict[str, dict[UUID, frozenset[int]]] = {name: {} for name in names}
    for topic, partition in free:
        owner = previous[draw(st.sampled_from(names))]
        owner[topic] = owner.get(topic, frozenset()) | {partition}
    specs = {name: MemberSpec(shared if everyone else draw(subscription), previous[name]) for name in names}
    return specs, counts


@pytest.mark.parametrize("name", ASSIGNORS)
@given(groups())
def test_each_partition_with_a_reader_has_exactly_one_owner_that_reads_it(
    name: str, group: tuple[dict[str, MemberSpec], dict[UUID, int]]
) -> None:
    """Nothing is left out, nothing is given twice, nobody gets what it did not ask for; order does not matter."""
    specs, counts = group
    target = ASSIGNORS[name](specs, counts)
    read = {topic for spec in specs.values() for topic in spec.subscribed_topic_ids}
    assert sorted(held(target)) == sorted((topic, p) for topic in read for p in range(counts[topic]))
    assert target.keys() == specs.keys()
    assert all(target[member].keys() <= spec.subscribed_topic_ids for member, spec in specs.items())
    assert ASSIGNORS[name](dict(reversed(specs.items())), counts) == target


@pytest.mark.parametrize("name", ASSIGNORS)
@given(groups())
def test_assigning_again_moves_nothing(name: str, group: tuple[dict[str, MemberSpec], dict[UUID, int]]) -> None:
    """A target is its own best successor, so an epoch without a real change disturbs nobody."""
    specs, counts = group
    target = ASSIGNORS[name](specs, counts)
    again = {member: MemberSpec(spec.subscribed_topic_ids, target[member]) for member, spec in specs.items()}
    assert ASSIGNORS[name](again, counts) == target


@given(groups())
def test_uniform_leaves_no_move_that_would_even_out_the_loads(
    group: tuple[dict[str, MemberSpec], dict[UUID, int]],
) -> None:
    """A member reads at least two partitions more than another only if the other could take none of them."""
    specs, counts = group
    target = assign_uniform(specs, counts)
    for giver, assignment in target.items():
        for taker, spec in specs.items():
            if assignment.keys() & spec.subscribed_topic_ids:
                assert load(assignment) - load(target[taker]) <= 1, (giver, taker)


@given(st.integers(1, 20), st.integers(1, 6), st.integers(1, 6))
def test_uniform_moves_only_what_balance_demands(partitions: int, before: int, after: int) -> None:
    """When members come or go, nobody who stays gives up more than the surplus over its new share."""
    names = "abcdef"
    first = assign_uniform(group_of(names[:before], {A}), {A: partitions})
    second = assign_uniform(group_of(names[:after], {A}, first), {A: partitions})
    least = partitions // after
    surplus = sum(max(0, load(first[name]) - least) for name in names[: min(before, after)])
    newcomers = sum(load(second[name]) for name in names[before:after])
    assert moved(first, second) <= min(surplus, newcomers)


def test_uniform_keeps_the_extra_partition_where_it_is() -> None:
    """With 3 partitions for 2 members, the one who has two of them keeps both, whatever its name."""
    previous: GroupTarget = {"a": {A: frozenset([0])}, "b": {A: frozenset([1, 2])}}
    assert assign_uniform(group_of("ab", {A}, previous), {A: 3}) == previous


def test_uniform_evens_out_over_different_subscriptions() -> None:
    """Who alone reads a topic gets all of it; the others share what is left."""
    specs = {
        "both": MemberSpec(frozenset([A, B]), {A: frozenset(range(4))}),
        "only_a": MemberSpec(frozenset([A]), {}),
    }
    target = assign_uniform(specs, {A: 4, B: 2})
    assert load(target["both"]) == load(target["only_a"]) == 3
    assert target["both"][B] == frozenset([0, 1])


def test_range_cuts_topics_with_equal_counts_at_the_same_places() -> None:
    """A join of two topics finds the same partitions in one member, also when one topic came later."""
    first = assign_range(group_of("ab", {A}), {A: 4})
    grown = assign_range(group_of("abc", {A}, first), {A: 4})
    with_new_topic = assign_range(group_of("abc", {A, B}, grown), {A: 4, B: 4})
    assert all(target[A] == target[B] for target in with_new_topic.values())
    assert {name: target[A] for name, target in with_new_topic.items()} == {
        name: target[A] for name, target in grown.items()
    }


@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 12))
def test_range_gives_each_member_a_share_of_every_topic(members: int, one: int, two: int) -> None:
    """Shares of a topic differ by one at most, and a first assignment is made of ranges."""
    target = assign_range(group_of("abcdef"[:members], {A, B}), {A: one, B: two})
    for topic in (A, B):
        shares = [sorted(assignment.get(topic, ())) for assignment in target.values()]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert all(share == list(range(share[0], share[0] + len(share))) for share in shares if share)
