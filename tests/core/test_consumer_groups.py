"""KIP-848 consumer groups, one rule at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from consumer_group_world import GROUP, REBALANCE_TIMEOUT_MS, World, flat
from kio.schema.errors import ErrorCode

from semel.core.consumer_group_records import (
    ConsumerGroupRecord,
    CurrentAssignment,
    CurrentAssignmentRecord,
    GroupEpochRecord,
    MemberMetadataRecord,
    MemberState,
    PartitionMetadataRecord,
    ResolvedRegexRecord,
    TargetMemberRecord,
    decode,
)
from semel.core.consumer_groups import ConsumerGroups, ConsumerGroupSettings, HeartbeatResponse
from semel.core.refusal import Refused

SESSION_TIMEOUT_MS = ConsumerGroupSettings().session_timeout_ms


def partitions_of(response: HeartbeatResponse) -> list[int]:
    assert response.assignment is not None
    return sorted(partition for _, partition in flat(response.assignment))


def refused_code(call: Callable[..., Any], *args: Any, **kwargs: Any) -> ErrorCode:
    with pytest.raises(Refused) as refusal:
        call(*args, **kwargs)
    return refusal.value.code


def logged(world: World) -> list[ConsumerGroupRecord | None]:
    return [decode(key, value) for key, value in world.log]


def two_members() -> tuple[World, Any]:
    """Member a has both partitions at epoch 1 and does not know yet that b joined with epoch 2."""
    world = World(t=2)
    assert partitions_of(world.beat("a", 0, names=["t"])) == [0, 1]
    joined = world.beat("b", 0, names=["t"])
    assert (joined.member_epoch, partitions_of(joined)) == (2, [])
    return world, world.topics["t"][0]


def test_the_first_member_gets_everything() -> None:
    """A join makes the group, its epoch and its target in one step."""
    world = World(t=3, other=1)
    response = world.beat("a", 0, names=["t"])
    assert response == HeartbeatResponse("a", 1, 5_000, {world.topics["t"][0]: frozenset([0, 1, 2])})
    assert world.groups.state_of(GROUP) == "Stable"
    assert world.groups.group_ids() == [GROUP]


def test_a_partition_is_given_on_only_after_it_was_released() -> None:
    """The heart of the protocol: a is asked, acknowledges, and only then b receives."""
    world, topic = two_members()
    asked = world.beat("a", 1)
    assert (asked.member_epoch, partitions_of(asked)) == (1, [0])
    assert world.groups.state_of(GROUP) == "Reconciling"
    assert world.beat("b", 2).assignment is None
    assert world.beat("a", 1, owned={topic: [0, 1]}).member_epoch == 1
    assert world.beat("b", 2).assignment is None
    assert world.beat("a", 1, owned={topic: [0]}).member_epoch == 2
    assert partitions_of(world.beat("b", 2)) == [1]
    assert world.groups.state_of(GROUP) == "Stable"


def test_a_quiet_heartbeat_writes_nothing_and_repeats_nothing() -> None:
    """In the steady state there is no record and no assignment in the answer."""
    world = World(t=2)
    world.beat("a", 0, names=["t"])
    length = len(world.log)
    assert world.beat("a", 1) == HeartbeatResponse("a", 1, 5_000, None)
    assert len(world.log) == length


def test_a_full_heartbeat_is_answered_with_the_assignment() -> None:
    """A member that says all, as after an error, is told all."""
    world = World(t=2)
    topic = world.topics["t"][0]
    world.beat("a", 0, names=["t"])
    again = world.beat("a", 1, names=["t"], owned={topic: [0]}, rebalance_timeout_ms=REBALANCE_TIMEOUT_MS)
    assert partitions_of(again) == [0, 1]


def test_version_0_gets_its_member_id_from_the_server() -> None:
    """Later versions bring their own; without one they are refused."""
    world = World(t=1)
    assert world.beat("", 0, names=["t"], new_member_id=lambda: "made").member_id == "made"
    assert refused_code(world.beat, "", 0, names=["t"]) is ErrorCode.invalid_request


def test_a_lost_answer_is_asked_for_again_with_the_previous_epoch() -> None:
    """The previous epoch is good if the member owns no more than it was given, and says so."""
    world, topic = two_members()
    world.beat("a", 1)
    world.beat("a", 1, owned={topic: [0]})
    assert world.beat("a", 1, owned={topic: [0]}).member_epoch == 2


@pytest.mark.parametrize(("epoch", "owned"), [(3, None), (1, None), (1, [0, 1]), (0x7FFFFFFF, [0])])
def test_a_wrong_epoch_is_fenced(epoch: int, owned: list[int] | None) -> None:
    """Ahead, or behind without proof that nothing is owned that was given to another."""
    world, topic = two_members()
    world.beat("a", 1)
    world.beat("a", 1, owned={topic: [0]})
    told = None if owned is None else {topic: owned}
    assert refused_code(world.beat, "a", epoch, owned=told) is ErrorCode.fenced_member_epoch


def test_an_epoch_older_than_the_previous_one_is_fenced() -> None:
    """Only one answer can be lost; two epochs back is a member that missed a revocation."""
    world = World(t=1)
    topic = world.topics["t"][0]
    world.beat("a", 0, names=["t"])
    for epoch in (1, 2):
        world.grow_topic("t")
        world.beat("a", epoch)
    assert refused_code(world.beat, "a", 1, owned={topic: [0]}) is ErrorCode.fenced_member_epoch


def test_a_fenced_member_joins_again_under_its_id() -> None:
    """Epoch 0 from a known member is a new beginning: it owns nothing and is told what it has."""
    world, _ = two_members()
    assert partitions_of(world.beat("a", 0, names=["t"])) == [0]
    assert partitions_of(world.beat("b", 2)) == [1]


def test_a_member_that_leaves_frees_its_partitions() -> None:
    """The next heartbeat of another member hands them out."""
    world, _ = two_members()
    left = world.beat("a", -1)
    assert (left.member_id, left.member_epoch, left.assignment) == ("a", -1, None)
    assert partitions_of(world.beat("b", 2)) == [0, 1]
    world.beat("b", -1)
    assert world.groups.state_of(GROUP) == "Empty"
    assert world.groups.is_empty(GROUP)


def test_unknown_groups_and_members_are_told_so() -> None:
    """Then the member joins anew."""
    world = World(t=1)
    assert refused_code(world.beat, "a", 1) is ErrorCode.group_id_not_found
    assert refused_code(world.beat, "a", -1) is ErrorCode.group_id_not_found
    world.beat("a", 0, names=["t"])
    assert refused_code(world.beat, "b", 1) is ErrorCode.unknown_member_id
    assert refused_code(world.beat, "b", -1) is ErrorCode.unknown_member_id
    assert refused_code(world.beat, "b", 1, instance_id="i") is ErrorCode.unknown_member_id


def test_a_static_member_comes_back_to_its_partitions() -> None:
    """While it is away nobody moves; back under a new id, it has what it had, and the epoch did not rise."""
    world = World(t=2)
    world.beat("a1", 0, names=["t"], instance_id="a")
    assert world.beat("a1", -2, instance_id="a").member_epoch == -2
    epoch_before = world.groups.describe(GROUP).group_epoch
    back = world.beat("a2", 0, names=["t"], instance_id="a")
    assert (back.member_epoch, partitions_of(back)) == (epoch_before, [0, 1])
    assert world.member_ids() == ["a2"]
    assert world.groups.state_of(GROUP) == "Stable"


def test_a_static_member_that_stays_away_loses_its_partitions() -> None:
    """The session goes on while it is away, and ends."""
    world = World(t=2)
    world.beat("a1", 0, names=["t"], instance_id="a")
    world.tick(30_000)
    world.beat("b", 0, names=["t"])
    world.beat("a1", -2, instance_id="a")
    assert partitions_of(world.beat("b", 0, names=["t"])) == []
    assert world.tick(15_000) == {"a1"}
    assert partitions_of(world.beat("b", 2)) == [0, 1]


def test_an_instance_id_has_one_member() -> None:
    """A second one must wait until the first has left; the first is fenced once the second took over."""
    world = World(t=1)
    world.beat("a1", 0, names=["t"], instance_id="a")
    assert refused_code(world.beat, "a2", 0, names=["t"], instance_id="a") is ErrorCode.unreleased_instance_id
    world.beat("a1", -2, instance_id="a")
    world.beat("a2", 0, names=["t"], instance_id="a")
    assert refused_code(world.beat, "a1", 1, instance_id="a") is ErrorCode.fenced_instance_id
    assert refused_code(world.beat, "a1", -1, instance_id="a") is ErrorCode.fenced_instance_id


def test_a_silent_member_is_thrown_out_when_its_session_ends() -> None:
    """Not a millisecond earlier, and a heartbeat starts the time anew."""
    world = World(t=1)
    world.beat("a", 0, names=["t"])
    assert world.groups.next_deadline_ms() == world.now_ms + SESSION_TIMEOUT_MS
    assert world.tick(SESSION_TIMEOUT_MS - 1) == set()
    world.beat("a", 1)
    assert world.tick(SESSION_TIMEOUT_MS - 1) == set()
    assert world.tick(1) == {"a"}
    assert world.groups.next_deadline_ms() is None


def test_a_member_that_does_not_give_up_its_partitions_is_thrown_out() -> None:
    """It beats all the time and keeps what it must give up: the rebalance time-out ends that."""
    world, topic = two_members()
    world.beat("a", 1)
    gone: set[str] = set()
    for _ in range(REBALANCE_TIMEOUT_MS // 10_000):
        assert gone == set()
        gone = world.tick(10_000)
        world.beat("b", 2)
        if not gone:
            world.beat("a", 1, owned={topic: [0, 1]})
    assert gone == {"a"}
    assert world.groups.describe(GROUP).members[0].assigned == {topic: frozenset([0, 1])}


def test_timers_start_afresh_after_a_restart() -> None:
    """Nobody is thrown out for the time in which the broker was down."""
    world, _ = two_members()
    world.beat("a", 1)
    world.now_ms += 10 * SESSION_TIMEOUT_MS
    world.restart()
    assert world.tick(SESSION_TIMEOUT_MS - 1) == set()
    assert world.groups.next_deadline_ms() == world.now_ms + 1
    assert world.tick(1) == {"a", "b"}


def test_a_revocation_is_awaited_afresh_after_a_restart() -> None:
    """The rebalance timer runs again too, with all of its time."""
    world, topic = two_members()
    world.beat("a", 1)
    world.restart()
    world.tick(40_000)
    world.beat("a", 1, owned={topic: [0, 1]})
    world.beat("b", 2)
    assert world.tick(REBALANCE_TIMEOUT_MS - 40_000) == {"a"}


def test_topics_that_grow_come_and_go_are_noticed_at_the_next_heartbeat() -> None:
    """Without any change of a subscription the group's epoch rises."""
    world = World(t=1)
    world.beat("a", 0, names=["t", "later"])
    world.grow_topic("t")
    assert partitions_of(world.beat("a", 1)) == [0, 1]
    later = world.create_topic("later", 1)
    assert (later, 0) in flat(world.beat("a", 2).assignment or {})
    del world.topics["t"]
    assert world.beat("a", 3).assignment == {later: frozenset([0])}
    assert world.beat("a", 3, owned={later: [0]}).member_epoch == 4


def test_a_topic_made_anew_under_its_name_is_another_topic() -> None:
    """Its id differs, so old partitions are given up and new ones received."""
    world = World(t=1)
    world.beat("a", 0, names=["t"])
    new = world.create_topic("t", 1)
    assert world.beat("a", 1).assignment == {}
    assert world.beat("a", 1, owned={}).assignment == {new: frozenset([0])}


def test_a_change_across_a_restart_is_noticed() -> None:
    """The hash of the topics is in the log."""
    world = World(t=1)
    world.beat("a", 0, names=["t"])
    world.grow_topic("t")
    world.restart(compact=True)
    assert partitions_of(world.beat("a", 1)) == [0, 1]


def test_a_changed_subscription_moves_partitions() -> None:
    """Names not repeated stay; an empty list unsubscribes."""
    world = World(t=1, u=1)
    t, u = world.topics["t"][0], world.topics["u"][0]
    world.beat("a", 0, names=["t"])
    assert world.beat("a", 1, names=["u"], owned={t: [0]}).assignment == {}
    assert world.beat("a", 1, owned={}).assignment == {u: frozenset([0])}
    assert world.groups.is_subscribed(GROUP, "u")
    assert not world.groups.is_subscribed(GROUP, "t")
    assert world.beat("a", 2, names=[], owned={}).assignment == {}


def test_a_regular_expression_follows_the_topics() -> None:
    """It matches whole names, sees new topics, hides those the member may not see, and goes with its last member."""
    world = World()
    eu, us, _ = (world.create_topic(name, 1) for name in ("orders-eu", "orders-us", "my-orders-eu"))
    joined = world.beat("a", 0, regex="orders-.*", may_describe=lambda topic: topic != "orders-us")
    assert joined.assignment == {eu: frozenset([0])}
    asia = world.create_topic("orders-asia", 1)
    assert world.beat("a", 1).assignment == {eu: frozenset([0]), us: frozenset([0]), asia: frozenset([0])}
    assert world.groups.is_subscribed(GROUP, "orders-asia")
    world.beat("a", 2, regex="", names=["orders-eu"])
    assert not world.groups.is_subscribed(GROUP, "orders-asia")
    resolved = [record for record in logged(world) if isinstance(record, ResolvedRegexRecord)]
    assert [record.resolved is None for record in resolved] == [False, False, True]


def test_a_regular_expression_is_tried_again_after_the_refresh_interval() -> None:
    """Rights may have changed without any topic having changed."""
    world = World(secret=1)
    world.beat("a", 0, regex=".*", may_describe=lambda topic: False)
    for _ in range(19):
        world.tick(30_000)
        assert world.beat("a", 1).assignment is None
    world.tick(30_000)
    assert partitions_of(world.beat("a", 1)) == [0]


@pytest.mark.parametrize("regex", ["(", "a**", "[", "a{99999999999999}"])
def test_an_expression_that_does_not_compile_is_refused(regex: str) -> None:
    """The member learns it at once, and the group is as before."""
    assert refused_code(World(t=1).beat, "a", 0, regex=regex) is ErrorCode.invalid_regular_expression


def test_the_assignor_that_most_members_ask_for_is_used() -> None:
    """Without a wish the first of the settings is; an unknown one is refused."""
    world = World(t=2, u=2)
    world.beat("a", 0, names=["t", "u"])
    assert world.groups.describe(GROUP).assignor_name == "uniform"
    world.beat("b", 0, names=["t", "u"], assignor="range")
    described = world.groups.describe(GROUP)
    assert described.assignor_name == "range"
    assert all(len(target) == 2 for target in (member.target for member in described.members))
    assert refused_code(world.beat, "c", 0, names=["t"], assignor="cooperative") is ErrorCode.unsupported_assignor


@pytest.mark.parametrize(
    "request_fields",
    [
        {"member_id": "a", "epoch": 0},
        {"member_id": "a", "epoch": 0, "names": ["t"], "rebalance_timeout_ms": -1},
        {"member_id": "a", "epoch": 0, "names": ["t"], "owned": {World(t=1).topics["t"][0]: [0]}},
        {"member_id": "a", "epoch": 0, "names": ["t"], "instance_id": ""},
        {"member_id": "a", "epoch": 0, "names": ["t"], "rack_id": ""},
        {"member_id": "a", "epoch": 0, "names": ["t"], "group_id": ""},
        {"member_id": "", "epoch": 1},
        {"member_id": "", "epoch": -1},
        {"member_id": "a", "epoch": -2},
        {"member_id": "a", "epoch": -3},
    ],
    ids=str,
)
def test_requests_that_make_no_sense_are_invalid(request_fields: dict[str, Any]) -> None:
    """Whatever the group, these cannot be answered."""
    assert refused_code(World(t=1).beat, **request_fields) is ErrorCode.invalid_request


def test_a_full_group_takes_no_more_members() -> None:
    """Those who are in may go on and join again."""
    world = World(ConsumerGroupSettings(max_size=1), t=1)
    world.beat("a", 0, names=["t"])
    assert refused_code(world.beat, "b", 0, names=["t"]) is ErrorCode.group_max_size_reached
    assert world.beat("a", 0, names=["t"]).member_epoch == 1


def test_commits_are_good_from_current_members_only() -> None:
    """Stale epochs and strangers are refused; of an empty group anybody may set the offsets."""
    world = World(t=1)
    groups = world.groups
    assert refused_code(groups.decide_validate_commit, GROUP, "a", 1, is_transactional=False) is (
        ErrorCode.group_id_not_found
    )
    world.beat("a", 0, names=["t"])
    groups.decide_validate_commit(GROUP, "a", 1, is_transactional=False)
    groups.decide_validate_commit(GROUP, "a", 1, is_transactional=True)
    groups.decide_validate_commit(GROUP, "", -1, is_transactional=True)
    for member_id, epoch, is_transactional, code in [
        ("a", 0, False, ErrorCode.stale_member_epoch),
        ("a", 2, False, ErrorCode.stale_member_epoch),
        ("a", 0, True, ErrorCode.illegal_generation),
        ("b", 1, False, ErrorCode.unknown_member_id),
        ("b", 1, True, ErrorCode.unknown_member_id),
        ("", -1, False, ErrorCode.unknown_member_id),
    ]:
        assert (
            refused_code(groups.decide_validate_commit, GROUP, member_id, epoch, is_transactional=is_transactional)
            is code
        )
    world.beat("a", -1)
    groups.decide_validate_commit(GROUP, "", -1, is_transactional=False)
    assert refused_code(groups.decide_validate_commit, GROUP, "a", 1, is_transactional=False) is (
        ErrorCode.unknown_member_id
    )


def test_fetches_in_the_name_of_a_member_need_its_epoch() -> None:
    """Without a name anybody may look."""
    world = World(t=1)
    world.beat("a", 0, names=["t"])
    world.groups.decide_validate_fetch(GROUP, None, -1)
    world.groups.decide_validate_fetch(GROUP, "", -1)
    world.groups.decide_validate_fetch(GROUP, "a", 1)
    assert refused_code(world.groups.decide_validate_fetch, GROUP, "a", 7) is ErrorCode.stale_member_epoch
    assert refused_code(world.groups.decide_validate_fetch, GROUP, "b", 1) is ErrorCode.unknown_member_id
    assert refused_code(world.groups.decide_validate_fetch, "none", None, -1) is ErrorCode.group_id_not_found


def test_only_an_empty_group_is_deleted_and_leaves_nothing() -> None:
    """Its tombstones undo every record, also after a restart."""
    world = World(t=1)
    world.beat("a", 0, regex=".*")
    assert refused_code(world.groups.decide_delete, GROUP) is ErrorCode.non_empty_group
    world.beat("a", -1)
    world.carry_out(world.decide(world.groups.decide_delete, GROUP))
    assert not world.groups.exists(GROUP)
    assert world.groups.state_of(GROUP) == "Dead"
    world.restart(compact=True)
    assert all(value is None for _, value in world.log)
    assert world.groups.group_ids() == []
    assert refused_code(world.groups.decide_delete, GROUP) is ErrorCode.group_id_not_found


def test_a_description_tells_what_each_member_has_and_shall_have() -> None:
    """While a still holds both partitions, the target has already been cut."""
    world, topic = two_members()
    described = world.groups.describe(GROUP)
    assert (described.state, described.group_epoch, described.assignment_epoch) == ("Reconciling", 2, 2)
    a, b = sorted(described.members, key=lambda member: member.member_id)
    assert (a.member_epoch, a.assigned, a.target) == (1, {topic: frozenset([0, 1])}, {topic: frozenset([0])})
    assert (b.member_epoch, b.assigned, b.target) == (2, {}, {topic: frozenset([1])})
    assert a.metadata.client_host == "/127.0.0.1"
    world.beat("b", -1)
    assert world.groups.state_of(GROUP) == "Assigning"
    assert refused_code(world.groups.describe, "none") is ErrorCode.group_id_not_found


def test_a_member_in_a_state_of_a_newer_kafka_must_begin_anew() -> None:
    """It is fenced until it reports that it owns nothing."""
    world = World(t=1)
    topic = world.topics["t"][0]
    world.beat("a", 0, names=["t"])
    strange = CurrentAssignment(1, 0, MemberState.UNKNOWN, {topic: frozenset([0])}, {})
    world.groups.replay(CurrentAssignmentRecord(GROUP, "a", strange))
    assert refused_code(world.beat, "a", 1) is ErrorCode.fenced_member_epoch
    assert partitions_of(world.beat("a", 0, names=["t"])) == [0]


def test_partition_metadata_of_an_older_kafka_is_cleaned_away() -> None:
    """The next rise of the epoch writes its tombstone."""
    world = World(t=1)
    world.beat("a", 0, names=["t"])
    world.groups.replay(PartitionMetadataRecord(GROUP, present=True))
    world.beat("b", 0, names=["t"])
    assert logged(world).count(PartitionMetadataRecord(GROUP, present=False)) == 1


def test_a_newer_holder_stays_when_compaction_took_the_release() -> None:
    """The log may show b receiving a partition before it shows a without it; b keeps it against everybody."""
    world, topic = two_members()
    for member_id, epoch, assigned in [("b", 2, {topic: frozenset([1])}), ("a", 2, {topic: frozenset([0])})]:
        world.groups.replay(
            CurrentAssignmentRecord(GROUP, member_id, CurrentAssignment(epoch, epoch, assigned=assigned))
        )
    assert partitions_of(world.beat("c", 0, names=["t"])) == []
    assert refused_code(world.beat, "b", 1) is ErrorCode.fenced_member_epoch
    world.beat("a", -1)
    assert partitions_of(world.beat("c", 3)) == [0]


def test_every_member_has_a_target_in_the_log_even_an_empty_one() -> None:
    """As Kafka writes it: a member without a record of its target would look half written."""
    world = World(t=1)
    world.beat("a", 0, names=["t"])
    world.beat("b", 0, names=["t"])
    assert TargetMemberRecord(GROUP, "b", {}) in logged(world)


def test_tombstones_of_the_unknown_are_no_error() -> None:
    """Compaction may keep a tombstone longer than what it removed."""
    groups = ConsumerGroups()
    groups.replay(CurrentAssignmentRecord("g", "m", None))
    groups.replay(MemberMetadataRecord("g", "m", None))
    groups.replay(GroupEpochRecord("g", None))
    assert groups.group_ids() == []
