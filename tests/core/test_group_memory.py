"""What groups take is counted, and what a decision does grows with its members and not with their square."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from consumer_group_world import World
from group_world import GROUP, GroupWorld, refused
from kio.schema.errors import ErrorCode

from semel.core.classic_state import GroupState, JoinRequest, MemberIdentity, MemberProtocol
from semel.core.group_coordinator import RECORD_BYTES, GroupCoordinator

# Memory


def grown_bytes(work: Callable[[], object]) -> int:
    """How much more Python holds after the work."""
    gc.collect()
    tracemalloc.start()
    try:
        work()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def join_as_the_only_member(coordinator: GroupCoordinator, group_id: str, names: list[str], **fields: Any) -> None:
    request = JoinRequest(
        group_id,
        1,
        "",
        f"{group_id}-member",
        "consumer",
        # Names of a request are strings of its own, however many members send the same.
        tuple(MemberProtocol(name.encode().decode(), b"%d" % number) for number, name in enumerate(names)),
        10_000,
        60_000,
        **fields,
    )
    decision = coordinator.decide_join(request, now_ms=0)
    coordinator.apply(group_id, decision, log_partition=0, log_offset=0)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        pytest.param("p%d", {}, id="short names"),
        pytest.param("p%d" + "x" * 3_000, {}, id="long names"),
        pytest.param("\N{GRINNING FACE}%d" * 100, {}, id="four bytes for each character"),
        pytest.param("p%d", {"client_id": "c" * 30_000, "group_instance_id": "i" * 30_000}, id="long ids"),
    ],
)
def test_what_members_of_classic_groups_take_is_counted(name: str, fields: dict[str, Any]) -> None:
    """150 members with 24,000 protocol names each took 450 MB, of which nothing was counted."""
    coordinator = GroupCoordinator()
    names = [name.replace("%d", str(number)) for number in range(32)]

    def join_all() -> None:
        for number in range(30):
            join_as_the_only_member(
                coordinator, f"g{number}", names, **{key: (text + "!")[:-1] for key, text in fields.items()}
            )

    taken = grown_bytes(join_all)
    assert 0.9 * taken < coordinator.memory_bytes() < 4 * taken


def test_a_subscription_of_too_many_topics_is_not_remembered() -> None:
    """A megabyte names two hundred thousand topics, which took forty. The group counts as subscribed to all of them."""
    world = GroupWorld()
    world.join(version=3, topics=[f"{number:x}" for number in range(20_000)])
    assert world.group.state is GroupState.COMPLETING_REBALANCE
    assert world.group.subscribed_topics is None
    assert world.group.is_subscribed_to("any")


# Steps


def calls_of(work: Callable[[], object]) -> int:
    """How many functions it calls, in Python and in C: its time, on a machine that is never busy."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def waiting_group(count: int) -> tuple[GroupWorld, str]:
    """A group whose first member has not joined again, and for which so many others wait."""
    world = GroupWorld()
    first = world.joined(world.join(version=3, instance_id="first")).member_id
    for number in range(count):
        world.join(version=3, instance_id=f"i{number}")
    assert world.group.state is GroupState.PREPARING_REBALANCE
    return world, first


def end_of_join(count: int) -> int:
    world, first = waiting_group(count)
    calls = calls_of(lambda: world.leave(MemberIdentity(first)))
    assert world.group.state is GroupState.COMPLETING_REBALANCE
    assert len(world.group.members) == count
    return calls


def assignment(count: int) -> int:
    world, first = waiting_group(count)
    world.leave(MemberIdentity(first))
    calls = calls_of(world.settle)
    assert world.group.state is GroupState.STABLE
    return calls


def end_of_sessions(count: int) -> int:
    world, _ = waiting_group(count)
    calls = calls_of(lambda: world.pass_time(600_000))
    assert not world.group.members
    return calls


def end_of_pending_members(count: int) -> int:
    world = GroupWorld()
    for _ in range(count):
        world.join()
    calls = calls_of(lambda: world.pass_time(10_000))
    assert not world.group.pending_members
    return calls


def unknown_members_leave(count: int) -> int:
    world, _ = waiting_group(count)
    unknown = [MemberIdentity("", f"none{number}") for number in range(count)]
    return calls_of(lambda: world.leave(*unknown))


@pytest.mark.parametrize(
    "work", [end_of_join, assignment, end_of_sessions, end_of_pending_members, unknown_members_leave]
)
def test_a_decision_takes_as_many_steps_as_it_has_members(work: Callable[[int], int]) -> None:
    """A thousand members in one group held the loop for 700 ms, since each was compared with each, or copied for it."""
    assert work(200) < 6 * work(50)


def test_a_join_is_not_compared_with_all_protocols_of_all_members() -> None:
    """Sixty members with 24,000 names each held the loop for 275 ms when one more came with one name."""

    def calls(names: int) -> int:
        world = GroupWorld()
        for number in range(20):
            world.join(version=3, names=["range", *(f"{number}-{name}" for name in range(names))])
        return calls_of(lambda: world.join(version=3))

    assert calls(100) < 2 * calls(10)


def test_the_leader_alone_is_told_the_members() -> None:
    """The others have no use for them."""
    world, first = waiting_group(3)
    world.leave(MemberIdentity(first))
    told = {reply.member_id: len(reply.members) for reply in map(world.joined, list(world.replies)[1:])}
    assert told == {member_id: 3 if member_id == world.group.leader_id else 0 for member_id in world.group.members}


def test_no_more_members_wait_to_join_than_may() -> None:
    """Members that ask for an id and never use it were counted, and looked at, without a limit."""
    world = GroupWorld(max_size=3)
    for _ in range(3):
        world.join()
    with refused(ErrorCode.group_max_size_reached):
        world.join()
    assert world.group.group_id == GROUP


@pytest.mark.parametrize(
    ("names", "partitions"),
    [
        pytest.param([f"s{number}" for number in range(1_000)], 1, id="many names"),
        pytest.param([f"{number}" + "n" * 5_000 for number in range(50)], 1, id="long names"),
        pytest.param([], 1_000, id="many partitions"),
    ],
)
def test_what_members_of_consumer_groups_take_is_counted(names: list[str], partitions: int) -> None:
    """A group of one member that has all partitions of a wide topic was counted as three kilobytes."""
    world = World(t=partitions)

    def join_all() -> None:
        for number in range(4):
            own = [name.encode().decode() for name in names]
            world.beat(f"m{number}", 0, names=["t", *own], group_id=f"g{number}")
            world.log.clear()

    taken = grown_bytes(join_all)
    assert 0.9 * taken < world.groups.memory_bytes(RECORD_BYTES) < 12 * taken
