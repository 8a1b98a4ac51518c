"""Classic groups, request by request: each rule of Kafka's group coordinator that a client can notice."""

from __future__ import annotations

import pytest
from group_world import GROUP, GroupWorld, refused
from kio.schema.errors import ErrorCode

from semel.core.classic_state import GroupState, MemberIdentity
from semel.core.group_coordinator import Committer
from semel.core.group_offsets import OffsetCommit

# Joining


def test_a_new_dynamic_member_is_told_its_id_first() -> None:
    """KIP-394: a member whose first answer is lost must not hold up a rebalance."""
    world = GroupWorld()
    reply = world.joined(world.join())
    assert reply.code is ErrorCode.member_id_required
    assert reply.member_id
    assert world.group.state is GroupState.EMPTY
    again = world.joined(world.join(reply.member_id))
    assert (again.code, again.generation_id, again.leader_id) == (ErrorCode.none, 1, reply.member_id)


def test_an_old_client_joins_without_asking_for_its_id() -> None:
    """Before version 4 of JoinGroup there was no such answer."""
    world = GroupWorld()
    assert world.joined(world.join(version=3)).generation_id == 1


def test_a_member_that_was_told_its_id_is_forgotten_after_its_session_time_out() -> None:
    """It never came back; its id is then not known any more."""
    world = GroupWorld()
    member_id = world.joined(world.join()).member_id
    world.pass_time(10_000)
    with refused(ErrorCode.unknown_member_id):
        world.join(member_id)


def test_a_pending_member_holds_up_a_rebalance_until_it_is_forgotten() -> None:
    """It is about to come back, and a second rebalance would be needed for it."""
    world = GroupWorld()
    (first,) = world.grow(1)
    world.join(session_timeout_ms=7_000)
    again = world.join(first)
    assert again not in world.replies
    world.pass_time(7_000)
    assert world.joined(again).generation_id == 2


def test_a_new_group_is_logged_so_that_a_restart_knows_it() -> None:
    """As Kafka does; DescribeGroups shows it as empty."""
    world = GroupWorld()
    world.join()
    world.restart()
    assert world.group.state is GroupState.EMPTY


@pytest.mark.parametrize("session_timeout_ms", [5_999, 1_800_001])
def test_session_time_outs_outside_of_the_brokers_bounds_are_refused(session_timeout_ms: int) -> None:
    """`group.min.session.timeout.ms` and `group.max.session.timeout.ms`."""
    with refused(ErrorCode.invalid_session_timeout):
        GroupWorld().join(session_timeout_ms=session_timeout_ms)


def test_an_unknown_member_or_group_is_refused() -> None:
    """The client then forgets its member id and begins anew."""
    world = GroupWorld()
    with refused(ErrorCode.unknown_member_id):
        world.join("somebody")
    world.grow(1)
    with refused(ErrorCode.unknown_member_id):
        world.join("somebody")


def test_a_group_takes_no_more_members_than_allowed() -> None:
    """`group.max.size`."""
    world = GroupWorld(max_size=2)
    world.grow(2)
    assert world.joined(world.join(version=3)).code is ErrorCode.group_max_size_reached


def test_a_group_over_a_lowered_limit_shrinks_after_a_restart() -> None:
    """Those who join again first stay."""
    world = GroupWorld()
    first, second, third = world.grow(3)
    world.settings = type(world.settings)(max_size=2)
    world.restart()
    assert world.group.state is GroupState.PREPARING_REBALANCE
    joins = [world.join(member_id) for member_id in (third, first)]
    late = world.join(second)
    assert world.joined(late).code is ErrorCode.group_max_size_reached
    assert [world.joined(join).code for join in joins] == [ErrorCode.none, ErrorCode.none]
    assert set(world.group.members) == {first, third}


def test_the_protocol_that_all_know_and_most_like_is_chosen() -> None:
    """Each member votes for the first protocol on its list that every member knows."""
    world = GroupWorld(initial_rebalance_delay_ms=1000)
    joins = [
        world.join(version=3, names=["sticky", "range", "roundrobin"]),
        world.join(version=3, names=["roundrobin", "range"]),
        world.join(version=3, names=["range", "roundrobin"]),
    ]
    world.pass_time(60_000)
    assert {world.joined(join).protocol_name for join in joins} == {"range"}


@pytest.mark.parametrize(
    ("names", "protocol_type"), [(["other"], "consumer"), (["range"], "connect"), ([], "consumer")]
)
def test_a_member_without_a_common_protocol_is_refused(names: list[str], protocol_type: str) -> None:
    """It could not work with the others' assignment."""
    world = GroupWorld()
    world.grow(1)
    with refused(ErrorCode.inconsistent_group_protocol):
        world.join(names=names, protocol_type=protocol_type)


def test_an_initial_delay_gathers_members_into_one_generation() -> None:
    """KIP-134: the delay is prolonged while new members come, up to the rebalance time-out."""
    world = GroupWorld(initial_rebalance_delay_ms=3000)
    first = world.join(version=3)
    world.pass_time(2000)
    second = world.join(version=3)
    world.pass_time(1500)
    assert not world.replies.keys() & {first, second}
    world.pass_time(2500)
    assert {world.joined(join).generation_id for join in (first, second)} == {1}


def test_the_leader_alone_is_told_all_members() -> None:
    """It makes the assignment; the others only wait for it."""
    world = GroupWorld(initial_rebalance_delay_ms=1000)
    joins = [world.join(version=3) for _ in range(3)]
    world.pass_time(60_000)
    replies = [world.joined(join) for join in joins]
    assert [len(reply.members) for reply in replies] == [3, 0, 0]
    assert {reply.leader_id for reply in replies} == {replies[0].member_id}


def test_a_follower_that_asks_again_is_told_the_current_generation() -> None:
    """Its answer was lost; nobody else is disturbed."""
    world = GroupWorld()
    _, follower = world.grow(2)
    generation_id = world.group.generation_id
    reply = world.joined(world.join(follower))
    assert (reply.generation_id, reply.members) == (generation_id, ())
    assert world.group.state is GroupState.STABLE


def test_the_leader_that_asks_again_makes_a_rebalance() -> None:
    """It has seen new partitions, or another change that is not in its subscription."""
    world = GroupWorld()
    leader, follower = world.grow(2)
    world.join(leader)
    assert world.group.state is GroupState.PREPARING_REBALANCE
    assert world.heartbeat(follower, world.group.generation_id).code is ErrorCode.rebalance_in_progress


def test_a_changed_subscription_makes_a_rebalance() -> None:
    """The leader must assign anew."""
    world = GroupWorld()
    _, follower = world.grow(2)
    world.join(follower, topics=["t", "u"])
    assert world.group.state is GroupState.PREPARING_REBALANCE


def test_who_does_not_join_again_in_time_is_removed() -> None:
    """The rebalance time-out is that of the slowest member; its sessions are kept by heartbeats meanwhile."""
    world = GroupWorld()
    leader, follower = world.grow(2)
    join = world.join(leader, rebalance_timeout_ms=30_000)
    for _ in range(11):
        assert join not in world.replies
        world.heartbeat(follower, world.group.generation_id)
        world.pass_time(5_500)
    assert world.joined(join).generation_id == 3
    assert set(world.group.members) == {leader}


def test_a_leader_that_does_not_join_again_is_replaced() -> None:
    """Somebody who is there must make the assignment."""
    world = GroupWorld()
    _, follower = world.grow(2)
    join = world.join(follower, topics=["u"])
    world.pass_time(60_000)
    assert world.joined(join).leader_id == follower


def test_a_second_join_takes_the_place_of_the_first_which_is_answered() -> None:
    """The client lost its connection and asks again; nothing may wait without end."""
    world = GroupWorld()
    leader, _ = world.grow(2)
    first, second = world.join(leader), world.join(leader)
    assert world.joined(first).code is ErrorCode.rebalance_in_progress
    assert second not in world.replies


def test_a_new_member_whose_connection_is_lost_expires() -> None:
    """It does not know its id, so it cannot send heartbeats; it must not hold up rebalances for ever."""
    world = GroupWorld(new_member_join_timeout_ms=20_000)
    (leader,) = world.grow(1)
    join = world.join(version=3, rebalance_timeout_ms=600_000)
    for _ in range(4):
        world.heartbeat(leader, world.group.generation_id)
        world.pass_time(5_000)
    assert world.joined(join).code is ErrorCode.unknown_member_id
    assert set(world.group.members) == {leader}


# Assigning


def test_the_assignment_is_in_the_log_before_anybody_is_told() -> None:
    """After a crash the generation must be known that members already work in."""
    world = GroupWorld()
    leader, follower = world.grow(2)
    logged = world.logged_group
    assert logged is not None
    assert logged.generation_id == world.group.generation_id
    assert {member.member_id: member.assignment for member in logged.members} == {
        leader: leader.encode(),
        follower: follower.encode(),
    }


def test_when_the_disk_refuses_the_assignment_nobody_is_told() -> None:
    """The group stays as it was, and the leader's next try succeeds."""
    world = GroupWorld(initial_rebalance_delay_ms=1000)
    joins = [world.join(version=3) for _ in range(2)]
    world.pass_time(2_000)
    leader, follower = (world.joined(join).member_id for join in joins)
    waiting = world.sync(follower, 1)
    world.disk_is_full = True
    world.sync(leader, 1, {follower: b"all"})
    assert waiting not in world.replies
    assert world.group.state is GroupState.COMPLETING_REBALANCE
    world.disk_is_full = False
    world.sync(leader, 1, {follower: b"all"})
    assert world.synced(waiting).assignment == b"all"


def test_a_member_that_the_leader_forgot_gets_an_empty_assignment() -> None:
    """As Kafka does."""
    world = GroupWorld()
    member_id = world.joined(world.join(version=3)).member_id
    assert world.synced(world.sync(member_id, 1)).assignment == b""


def test_a_sync_in_a_stable_group_is_answered_at_once() -> None:
    """The member's first answer was lost."""
    world = GroupWorld()
    leader, follower = world.grow(2)
    reply = world.synced(world.sync(follower, 2, protocol_type="consumer", protocol_name="range"))
    assert (reply.code, reply.assignment) == (ErrorCode.none, follower.encode())
    assert leader in world.group.members


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"generation_id": 1}, ErrorCode.illegal_generation),
        ({"member_id": "somebody"}, ErrorCode.unknown_member_id),
        ({"instance_id": "i"}, ErrorCode.unknown_member_id),
        ({"protocol_type": "connect"}, ErrorCode.inconsistent_group_protocol),
        ({"protocol_name": "sticky"}, ErrorCode.inconsistent_group_protocol),
    ],
)
def test_a_sync_that_does_not_fit_the_generation_is_refused(changes: dict[str, object], code: ErrorCode) -> None:
    """It comes from another generation, from a stranger, or from a client that understood something else."""
    world = GroupWorld()
    _, follower = world.grow(2)
    arguments: dict[str, object] = {"member_id": follower, "generation_id": 2, **changes}
    with refused(code):
        world.sync(**arguments)  # pyright: ignore[reportArgumentType]


def test_a_sync_during_a_rebalance_is_refused() -> None:
    """The generation is over before it began."""
    world = GroupWorld()
    leader, follower = world.grow(2)
    world.join(leader)
    with refused(ErrorCode.rebalance_in_progress):
        world.sync(follower, 2)


def test_who_waits_for_an_assignment_is_sent_back_when_a_rebalance_begins() -> None:
    """A new member came before the leader had assigned."""
    world = GroupWorld(initial_rebalance_delay_ms=1000)
    joins = [world.join(version=3) for _ in range(2)]
    world.pass_time(2_000)
    waiting = world.sync(world.joined(joins[1]).member_id, 1)
    world.join(version=3)
    assert world.synced(waiting).code is ErrorCode.rebalance_in_progress


def test_a_leader_that_never_assigns_is_removed() -> None:
    """Its heartbeats go on, but the others wait for it: the rebalance time-out holds here too."""
    world = GroupWorld(initial_rebalance_delay_ms=1000)
    joins = [world.join(version=3) for _ in range(2)]
    world.pass_time(2_000)
    leader, follower = (world.joined(join).member_id for join in joins)
    waiting = world.sync(follower, 1)
    for _ in range(13):
        if leader in world.group.members and waiting not in world.replies:
            world.heartbeat(leader, 1)
        world.pass_time(5_000)
    assert world.synced(waiting).code is ErrorCode.rebalance_in_progress
    assert leader not in world.group.members


# Heartbeats, leaving, time


def test_a_silent_member_is_removed_after_its_session_time_out() -> None:
    """And the others rebalance."""
    world = GroupWorld()
    leader, follower = world.grow(2)
    world.pass_time(9_000)
    assert world.heartbeat(leader, 2).code is ErrorCode.none
    world.pass_time(1_000)
    assert follower not in world.group.members
    assert world.heartbeat(leader, 2).code is ErrorCode.rebalance_in_progress


@pytest.mark.parametrize(
    ("member_id", "generation_id", "instance_id", "code"),
    [
        ("somebody", 1, None, ErrorCode.unknown_member_id),
        (None, 0, None, ErrorCode.illegal_generation),
        (None, 1, "i", ErrorCode.unknown_member_id),
    ],
)
def test_heartbeats_of_strangers_and_of_the_past_are_refused(
    member_id: str | None, generation_id: int, instance_id: str | None, code: ErrorCode
) -> None:
    """The client then joins again."""
    world = GroupWorld()
    (member,) = world.grow(1)
    with refused(code):
        world.heartbeat(member_id or member, generation_id, instance_id)


def test_the_last_member_that_leaves_makes_the_group_empty_with_a_new_generation() -> None:
    """The log says so, from which the expiry of its offsets is counted (KIP-211)."""
    world = GroupWorld()
    (member,) = world.grow(1)
    world.pass_time(1000)
    assert world.leave(MemberIdentity(member)).left == (ErrorCode.none,)
    logged = world.logged_group
    assert logged is not None
    assert (logged.generation_id, logged.members, logged.state_since_ms) == (2, (), world.now_ms)
    assert world.group.state is GroupState.EMPTY


def test_several_members_leave_at_once_each_with_its_own_answer() -> None:
    """LeaveGroup 3+; an administrator names static members by instance id alone."""
    world = GroupWorld(initial_rebalance_delay_ms=1000)
    joins = [world.join(instance_id="a"), world.join(instance_id="b"), world.join(version=3)]
    pending = world.joined(world.join()).member_id
    world.pass_time(5_000)
    _, b, dynamic = (world.joined(join).member_id for join in joins)
    left = world.leave(
        MemberIdentity("", "a"),
        MemberIdentity("wrong", "b"),
        MemberIdentity("", "c"),
        MemberIdentity(dynamic),
        MemberIdentity(pending),
        MemberIdentity("somebody"),
    ).left
    assert left == (
        ErrorCode.none,
        ErrorCode.fenced_instance_id,
        ErrorCode.unknown_member_id,
        ErrorCode.none,
        ErrorCode.none,
        ErrorCode.unknown_member_id,
    )
    assert set(world.group.members) == {b}


def test_a_restart_keeps_the_generation_and_gives_every_member_its_whole_session() -> None:
    """Members go on without noticing; they could not send heartbeats while the broker was away."""
    world = GroupWorld()
    leader, follower = world.grow(2)
    world.now_ms += 3_600_000
    world.restart()
    world.pass_time(9_999)
    assert world.heartbeat(leader, 2).code is ErrorCode.none
    assert world.synced(world.sync(follower, 2)).assignment == follower.encode()


# Static members (KIP-345)


def static_pair() -> tuple[GroupWorld, str, str]:
    world = GroupWorld(initial_rebalance_delay_ms=1000)
    joins = [world.join(instance_id="a"), world.join(instance_id="b")]
    world.pass_time(5_000)
    world.settle()
    return world, world.joined(joins[0]).member_id, world.joined(joins[1]).member_id


def test_a_restarted_static_member_takes_its_place_without_a_rebalance() -> None:
    """It keeps its assignment under a new member id, and the log knows the new id."""
    world, _, follower = static_pair()
    reply = world.joined(world.join(instance_id="b"))
    assert (reply.code, reply.generation_id) == (ErrorCode.none, 1)
    assert reply.member_id != follower
    assert world.group.state is GroupState.STABLE
    assert world.synced(world.sync(reply.member_id, 1, instance_id="b")).assignment == follower.encode()
    world.restart()
    assert world.group.static_member_id("b") == reply.member_id


def test_the_older_of_two_static_members_is_fenced() -> None:
    """Two processes with one `group.instance.id` must not both work."""
    world, _, follower = static_pair()
    world.join(instance_id="b")
    for ask in (
        lambda: world.heartbeat(follower, 1, "b"),
        lambda: world.sync(follower, 1, instance_id="b"),
        lambda: world.join(follower, instance_id="b"),
        lambda: world.commit(Committer(follower, 1, "b"), OffsetCommit("t", 0, 1)),
        lambda: world.txn_commit(7, Committer(follower, 1, "b"), OffsetCommit("t", 0, 1)),
    ):
        with refused(ErrorCode.fenced_instance_id):
            ask()


def test_a_restarted_static_leader_is_told_not_to_assign() -> None:
    """KIP-814: from version 9 it knows all members; an older client must not learn that it leads."""
    world, leader, _ = static_pair()
    reply = world.joined(world.join(instance_id="a"))
    assert (reply.leader_id, reply.skip_assignment, len(reply.members)) == (reply.member_id, True, 2)
    older = world.joined(world.join(instance_id="a", version=8))
    assert (older.leader_id, older.skip_assignment, older.members) == (reply.member_id, False, ())
    assert leader not in world.group.members


def test_a_static_member_with_another_protocol_makes_a_rebalance() -> None:
    """The chosen protocol changes with it."""
    world = GroupWorld()
    world.join(instance_id="a", names=["range", "sticky"])
    world.settle()
    world.join(instance_id="a", names=["sticky", "range"])
    assert (world.group.generation_id, world.group.protocol_name) == (2, "sticky")


def test_a_static_member_that_returns_before_the_assignment_makes_a_rebalance() -> None:
    """The leader may already have assigned to the old member id."""
    world = GroupWorld(initial_rebalance_delay_ms=1000)
    joins = [world.join(instance_id="a"), world.join(instance_id="b")]
    world.pass_time(5_000)
    waiting = world.sync(world.joined(joins[1]).member_id, 1, instance_id="b")
    world.join(instance_id="b")
    assert world.synced(waiting).code is ErrorCode.fenced_instance_id
    assert world.group.state is GroupState.PREPARING_REBALANCE


def test_a_replaced_static_member_is_not_waited_for_under_its_old_id() -> None:
    """It had not asked for its assignment yet; its successor works, and no time-out may disturb the group."""
    world = GroupWorld(initial_rebalance_delay_ms=1000)
    joins = [world.join(instance_id="a"), world.join(instance_id="b")]
    world.pass_time(5_000)
    leader = world.joined(joins[0]).member_id
    world.sync(leader, 1, instance_id="a")
    successor = world.joined(world.join(instance_id="b")).member_id
    for _ in range(15):
        world.pass_time(5_000)
        assert world.heartbeat(leader, 1, "a").code is ErrorCode.none
        assert world.heartbeat(successor, 1, "b").code is ErrorCode.none


def test_static_members_that_are_away_are_not_removed_by_a_rebalance() -> None:
    """Only their session time-out does that; they may be restarting."""
    world = GroupWorld(initial_rebalance_delay_ms=1000)
    joins = [world.join(instance_id=name, session_timeout_ms=600_000) for name in ("a", "b")]
    world.pass_time(5_000)
    world.settle()
    leader = world.joined(joins[0]).member_id
    again = world.join(leader, instance_id="a", topics=["u"], session_timeout_ms=600_000)
    world.pass_time(60_000)
    assert world.joined(again).generation_id == 2
    assert world.group.static_member_id("b") is not None


# Commits by members


def test_a_commit_needs_the_current_generation_and_keeps_the_session() -> None:
    """A zombie of an earlier generation is refused; a live member's commit is as good as a heartbeat."""
    world = GroupWorld()
    (member,) = world.grow(1)
    with refused(ErrorCode.illegal_generation):
        world.commit(Committer(member, 0), OffsetCommit("t", 0, 1))
    with refused(ErrorCode.unknown_member_id):
        world.commit(Committer(), OffsetCommit("t", 0, 1))
    for _ in range(3):
        world.pass_time(9_000)
        world.commit(Committer(member, 1), OffsetCommit("t", 0, 1))
    assert member in world.group.members


def test_a_commit_before_the_assignment_is_told_to_wait() -> None:
    """The member has the new generation but does not own any partition of it yet."""
    world = GroupWorld()
    member = world.joined(world.join(version=3)).member_id
    with refused(ErrorCode.rebalance_in_progress):
        world.commit(Committer(member, 1), OffsetCommit("t", 0, 1))


def test_a_transactional_commit_of_an_old_generation_is_refused() -> None:
    """C1, KIP-447: the partitions may belong to somebody else, who has read the old offsets."""
    world = GroupWorld()
    (member,) = world.grow(1)
    with refused(ErrorCode.illegal_generation):
        world.txn_commit(7, Committer(member, 0), OffsetCommit("t", 0, 1))
    with refused(ErrorCode.unknown_member_id):
        world.txn_commit(7, Committer("somebody", 1), OffsetCommit("t", 0, 1))
    assert world.txn_commit(7, Committer(member, 1), OffsetCommit("t", 0, 1)).codes == {("t", 0): ErrorCode.none}


def test_a_transactional_commit_that_names_nobody_is_taken() -> None:
    """Clients before KIP-447 have no generation to tell; their producer's epoch fences them."""
    world = GroupWorld()
    world.grow(1)
    world.txn_commit(7, Committer(), OffsetCommit("t", 0, 1))
    assert world.coordinator.offsets.has_pending(GROUP)


@pytest.mark.parametrize(("version", "code"), [(8, ErrorCode.illegal_generation), (9, ErrorCode.group_id_not_found)])
def test_a_commit_to_a_group_that_is_not_there_is_refused(version: int, code: ErrorCode) -> None:
    """Clients from version 9 on understand the plainer code."""
    with refused(code):
        GroupWorld().commit(Committer("m", 1), OffsetCommit("t", 0, 1), version=version)
