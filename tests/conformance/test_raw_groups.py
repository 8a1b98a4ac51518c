"""Groups and their offsets, request by request: fencing by generation, pending offsets, and the classic protocol."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from raw import AGES, RawClient, connect, wait_until
from raw_member import NO_GENERATION, RawMember
from raw_producer import RawProducer
from raw_reading import committed_offset, settled_offset
from targets import KafkaUnderTest, NewTopic, Target

from semel.wire import Api, ErrorCode

ages = pytest.mark.parametrize("age", AGES)
protocols = pytest.mark.parametrize("protocol", [1, 2])


@pytest.fixture
def other_raw(kafka: KafkaUnderTest) -> Iterator[RawClient]:
    """A second connection, for a second member."""
    with connect(kafka.bootstrap) as raw:
        yield raw


@pytest.fixture
def topic(new_topic: NewTopic) -> str:
    return new_topic(partitions=2)


def begun(raw: RawClient, group: str, *, age: str = "newest", protocol: int = 1) -> RawProducer:
    """A producer whose transaction may commit offsets of the group."""
    producer = RawProducer(raw, group, age=age, protocol=protocol).begin()
    if protocol == 1:
        assert producer.add_offsets(group) is ErrorCode.none
    return producer


@protocols
@pytest.mark.parametrize("age", ["oldest", "newest"])
def test_offsets_in_a_transaction_are_fenced_by_the_group(
    raw: RawClient, other_raw: RawClient, target: Target, topic: str, age: str, protocol: int
) -> None:
    """C1 (KIP-447): stale and future generation, unknown member, fenced instance; and the true member passes."""
    group = f"{topic}-group"
    member = RawMember(other_raw, group, group_instance_id="one").join_alone()
    producer = begun(raw, group, protocol=protocol)
    version = raw.version(Api.TXN_OFFSET_COMMIT, age, protocol=protocol, lowest=3)

    def commit(**changed: object) -> ErrorCode:
        return producer.commit_offsets(group, {(topic, 0): 4}, version=version, **{**member.fields, **changed})

    assert commit(generation_id=member.generation_id - 1) is ErrorCode.illegal_generation
    assert commit(generation_id=member.generation_id + 1) is ErrorCode.illegal_generation
    assert commit(member_id="nobody", group_instance_id=None) is ErrorCode.unknown_member_id
    assert commit(member_id="an older one") is ErrorCode.fenced_instance_id
    if target.has_strict_groups:
        assert commit(group_instance_id="another") is ErrorCode.unknown_member_id
    assert commit() is ErrorCode.none
    producer.commit()
    assert settled_offset(raw, group, topic) == 4


@ages
def test_who_names_no_generation_may_commit_offsets_in_a_transaction(
    raw: RawClient, other_raw: RawClient, topic: str, age: str
) -> None:
    """C1: clients before KIP-447 cannot name it; a group with members and one without take their offsets."""
    group = f"{topic}-group"
    producer = begun(raw, group, age=age)
    assert producer.commit_offsets(group, {(topic, 0): 3}, generation_id=-1, member_id="") is ErrorCode.none
    producer.commit()
    RawMember(other_raw, group).join_alone()
    assert producer.add_offsets(group) is ErrorCode.none
    assert producer.commit_offsets(group, {(topic, 1): 4}, generation_id=-1, member_id="") is ErrorCode.none
    producer.commit()
    assert [settled_offset(raw, group, topic, index) for index in (0, 1)] == [3, 4]


def test_nobody_is_a_member_of_a_group_that_does_not_exist(raw: RawClient, target: Target, topic: str) -> None:
    """C1: a group that was deleted, or never was, has no generation; to Kafka before 4.0, no such member."""
    producer = begun(raw, f"{topic}-group")
    code = producer.commit_offsets(f"{topic}-group", {(topic, 0): 1}, generation_id=3, member_id="gone")
    assert code is (ErrorCode.illegal_generation if target.has_consumer_groups else ErrorCode.unknown_member_id)
    producer.abort()


@protocols
@pytest.mark.parametrize("version", [7, 8, 9])
@pytest.mark.parametrize("committed", [True, False], ids=["commit", "abort"])
def test_pending_offsets_hold_back_who_asks_for_stable_ones(
    raw: RawClient, topic: str, version: int, protocol: int, committed: bool
) -> None:
    """C2 (KIP-447): UNSTABLE_OFFSET_COMMIT, for the partition with a pending offset alone, until that is settled."""
    version = min(version, raw.version(Api.OFFSET_FETCH))
    group = f"{topic}-group"
    outside = RawMember(raw, group)
    assert outside.commit({(topic, 0): 1, (topic, 1): 2}) is ErrorCode.none
    producer = begun(raw, group, protocol=protocol)
    assert producer.commit_offsets(group, {(topic, 0): 9}) is ErrorCode.none
    assert committed_offset(raw, group, topic, 0, version=version) == (ErrorCode.unstable_offset_commit, -1)
    assert committed_offset(raw, group, topic, 1, version=version) == (ErrorCode.none, 2)
    assert committed_offset(raw, group, topic, 0, version=version, require_stable=False) == (ErrorCode.none, 1)
    producer.commit() if committed else producer.abort()
    assert settled_offset(raw, group, topic, 0, version=version) == (9 if committed else 1)


@ages
def test_versions_before_stable_offsets_see_the_last_committed_one(raw: RawClient, topic: str, age: str) -> None:
    """C2: OffsetFetch up to version 6 never waits."""
    version = raw.version(Api.OFFSET_FETCH, age, highest=6)
    group = f"{topic}-group"
    RawMember(raw, group).commit({(topic, 0): 1})
    producer = begun(raw, group)
    producer.commit_offsets(group, {(topic, 0): 9})
    assert committed_offset(raw, group, topic, version=version) == (ErrorCode.none, 1)
    producer.commit()
    assert settled_offset(raw, group, topic, version=version) == 9


@protocols
def test_a_plain_commit_during_a_transaction_is_older_than_its_offsets(
    raw: RawClient, topic: str, protocol: int
) -> None:
    """C2: what the transaction committed before wins only if it was written later in the log."""
    group = f"{topic}-group"
    producer = begun(raw, group, protocol=protocol)
    producer.commit_offsets(group, {(topic, 0): 9})
    assert RawMember(raw, group).commit({(topic, 0): 5}) is ErrorCode.none
    assert committed_offset(raw, group, topic, require_stable=False) == (ErrorCode.none, 5)
    producer.commit()
    assert settled_offset(raw, group, topic) == 5


@protocols
def test_one_producer_commits_the_offsets_of_many_partitions(
    raw: RawClient, new_topic: NewTopic, protocol: int
) -> None:
    """C3 (KIP-447): three input topics with fifty partitions each, in one transaction of one producer."""
    topics = [new_topic(partitions=50) for _ in range(3)]
    group = f"{topics[0]}-group"
    offsets = {(name, index): index + 1 for name in topics for index in range(50)}
    producer = begun(raw, group, protocol=protocol)
    assert producer.commit_offsets(group, offsets) is ErrorCode.none
    producer.commit()
    for name in topics:
        assert [settled_offset(raw, group, name, index) for index in (0, 24, 49)] == [1, 25, 50]


@ages
def test_a_group_forms_moves_on_and_ends(raw: RawClient, other_raw: RawClient, topic: str, age: str) -> None:
    """C1: two members over two generations in old and new versions; each gets its own assignment."""
    group = f"{topic}-group"
    first, second = RawMember(raw, group, age), RawMember(other_raw, group, age)
    alone = first.join()
    assert (first.generation_id, first.leader_id) == (1, first.member_id)
    assert [member.member_id for member in alone.members] == [first.member_id]
    assert first.sync({first.member_id: b"all"}).assignment == b"all"
    assert first.heartbeat() is ErrorCode.none
    second.prepare()
    second.send_join()
    wait_until(lambda: first.heartbeat() is ErrorCode.rebalance_in_progress, "the rebalance")
    both = first.join()
    follower = second.joined()
    assert follower.error_code is ErrorCode.none
    assert {member.member_id for member in both.members} == {first.member_id, second.member_id}
    assert follower.members == ()
    assert (first.generation_id, second.generation_id) == (2, 2)
    assert first.sync({first.member_id: b"left", second.member_id: b"right"}).assignment == b"left"
    assert second.sync().assignment == b"right"
    assert [member.heartbeat() for member in (first, second)] == [ErrorCode.none] * 2
    assert second.leave() is ErrorCode.none
    assert second.heartbeat() is ErrorCode.unknown_member_id
    assert first.heartbeat() is ErrorCode.rebalance_in_progress
    assert first.leave() is ErrorCode.none
    assert first.leave() is ErrorCode.unknown_member_id


@pytest.mark.parametrize("version", range(10))
def test_a_new_member_is_told_its_id_before_it_counts(raw: RawClient, topic: str, version: int) -> None:
    """C1 (KIP-394): MEMBER_ID_REQUIRED from JoinGroup 4 on; a static member (5) and older clients join at once."""
    version = min(version, raw.version(Api.JOIN_GROUP))
    member = RawMember(raw, f"{topic}-group")
    answer = member.try_join(version=version)
    assert answer.error_code is (ErrorCode.member_id_required if version >= 4 else ErrorCode.none)
    assert answer.member_id.startswith("raw-")
    member.member_id = answer.member_id
    assert member.try_join(version=version).error_code is ErrorCode.none
    if version >= 5:
        static = RawMember(raw, f"{topic}-static", group_instance_id="one")
        answer = static.try_join(version=version)
        assert answer.error_code is ErrorCode.none
        assert answer.member_id.startswith("one-")


def test_a_static_member_that_comes_back_shuts_its_predecessor_out(
    raw: RawClient, other_raw: RawClient, topic: str
) -> None:
    """C1 (KIP-345): the same instance id, a new member id and no rebalance; the old one is fenced everywhere."""
    group = f"{topic}-group"
    before = RawMember(raw, group, group_instance_id="one").join_alone()
    after = RawMember(other_raw, group, group_instance_id="one")
    answer = after.try_join()
    assert answer.error_code is ErrorCode.none
    assert after.generation_id == before.generation_id
    assert after.member_id != before.member_id
    assert after.sync().assignment == b"all"
    assert before.heartbeat() is ErrorCode.fenced_instance_id
    assert before.sync().error_code is ErrorCode.fenced_instance_id
    assert before.commit({(topic, 0): 1}) is ErrorCode.fenced_instance_id
    assert before.try_join().error_code is ErrorCode.fenced_instance_id
    assert before.leave() is ErrorCode.fenced_instance_id
    assert after.heartbeat() is ErrorCode.none
    assert after.commit({(topic, 0): 2}) is ErrorCode.none


@ages
def test_offsets_are_fenced_by_the_generation(raw: RawClient, topic: str, age: str) -> None:
    """C1: OffsetCommit of a stale generation, of a stranger, and from outside of a group with members."""
    group = f"{topic}-group"
    member = RawMember(raw, group, age).join_alone()
    stale = RawMember(raw, group, age, member_id=member.member_id, generation_id=member.generation_id - 1)
    stranger = RawMember(raw, group, age, member_id="stranger", generation_id=member.generation_id)
    outside = RawMember(raw, group, age)
    assert stale.commit({(topic, 0): 1}) is ErrorCode.illegal_generation
    assert stranger.commit({(topic, 0): 2}) is ErrorCode.unknown_member_id
    assert outside.commit({(topic, 0): 3}) is ErrorCode.unknown_member_id
    assert committed_offset(raw, group, topic) == (ErrorCode.none, -1)
    assert member.commit({(topic, 0): 4}) is ErrorCode.none
    assert member.leave() is ErrorCode.none
    assert member.commit({(topic, 0): 5}) is ErrorCode.unknown_member_id
    assert outside.commit({(topic, 0): 6}) is ErrorCode.none
    assert committed_offset(raw, group, topic) == (ErrorCode.none, 6)


@ages
def test_during_a_rebalance_members_are_told_to_join_again(
    raw: RawClient, other_raw: RawClient, target: Target, topic: str, age: str
) -> None:
    """C1: before the others have joined offsets are still taken; before the assignment is there they are not."""
    group = f"{topic}-group"
    first, second = RawMember(raw, group, age).join_alone(), RawMember(other_raw, group, age)
    second.prepare()
    second.send_join()
    wait_until(lambda: first.heartbeat() is ErrorCode.rebalance_in_progress, "the rebalance")
    assert first.sync().error_code is ErrorCode.rebalance_in_progress
    assert first.commit({(topic, 0): 1}) is ErrorCode.none
    first.join()
    assert second.joined().error_code is ErrorCode.none
    assert second.commit({(topic, 0): 2}) is ErrorCode.rebalance_in_progress
    assert second.heartbeat() is (ErrorCode.none if target.has_strict_groups else ErrorCode.rebalance_in_progress)
    assert first.sync({first.member_id: b"a", second.member_id: b"b"}).error_code is ErrorCode.none
    assert second.commit({(topic, 0): 3}) is ErrorCode.none


@ages
def test_generations_and_members_that_do_not_exist(raw: RawClient, target: Target, topic: str, age: str) -> None:
    """C1: heartbeat and sync with a wrong generation, a wrong member, and in a group that is not there."""
    group = f"{topic}-group"
    member = RawMember(raw, group, age).join_alone()
    stale = RawMember(raw, group, age, member_id=member.member_id, generation_id=member.generation_id + 1)
    stranger = RawMember(raw, group, age, member_id="stranger", generation_id=member.generation_id)
    lost = RawMember(raw, f"{group}-missing", age, member_id="stranger", generation_id=1)
    assert stale.heartbeat() is ErrorCode.illegal_generation
    assert stale.sync().error_code is ErrorCode.illegal_generation
    for nobody in (stranger, lost):
        assert nobody.heartbeat() is ErrorCode.unknown_member_id
        assert nobody.sync().error_code is ErrorCode.unknown_member_id
        assert nobody.leave() is ErrorCode.unknown_member_id
        assert nobody.try_join().error_code is ErrorCode.unknown_member_id
    is_told = target.has_consumer_groups and raw.version(Api.OFFSET_COMMIT, age) >= 9
    assert lost.commit({(topic, 0): 1}) is (ErrorCode.group_id_not_found if is_told else ErrorCode.illegal_generation)
    assert member.heartbeat() is ErrorCode.none


@ages
def test_joins_that_do_not_fit_are_refused(raw: RawClient, other_raw: RawClient, topic: str, age: str) -> None:
    """C1: another kind of group, no common assignor, a session time-out out of range, a group without a name."""
    group = f"{topic}-group"
    RawMember(raw, group, age).join_alone()
    refusals = {
        ErrorCode.inconsistent_group_protocol: [
            RawMember(other_raw, group, age, protocol_type="connect"),
            RawMember(other_raw, group, age, protocol_names=("sticky",)),
            RawMember(other_raw, f"{group}-new", age, protocol_names=()),
            RawMember(other_raw, f"{group}-new", age, protocol_type=""),
        ],
        ErrorCode.invalid_session_timeout: [
            RawMember(other_raw, group, age, session_timeout_ms=1),
            RawMember(other_raw, group, age, session_timeout_ms=10_000_000),
        ],
    }
    for code, members in refusals.items():
        for member in members:
            assert member.try_join().error_code is code, member
    nameless = RawMember(other_raw, "", age)
    nameless.send_join()
    assert nameless.joined().error_code is ErrorCode.invalid_group_id


def test_a_member_that_falls_silent_is_removed(raw: RawClient, topic: str) -> None:
    """C1: after its session time-out its generation can commit nothing."""
    member = RawMember(raw, f"{topic}-group", session_timeout_ms=200).join_alone()
    group_is_free = RawMember(raw, f"{topic}-group")
    wait_until(lambda: group_is_free.commit({(topic, 0): 7}) is ErrorCode.none, "the end of the session")
    assert member.commit({(topic, 0): 8}) is ErrorCode.unknown_member_id
    assert member.heartbeat() is ErrorCode.unknown_member_id
    assert member.generation_id > NO_GENERATION
    assert committed_offset(raw, f"{topic}-group", topic) == (ErrorCode.none, 7)


def test_several_members_leave_at_once(raw: RawClient, topic: str) -> None:
    """C1 (KIP-345): LeaveGroup 3 and above, by member id and by instance id, each with its own code."""
    group = f"{topic}-group"
    RawMember(raw, group, group_instance_id="one").join_alone()
    who = [("", "one"), ("", "two"), ("stranger", None)]
    answer = raw.call(
        Api.LEAVE_GROUP,
        raw.version(Api.LEAVE_GROUP, lowest=3),
        group_id=group,
        members=[{"member_id": name, "group_instance_id": instance, "reason": ""} for name, instance in who],
    )
    assert answer.error_code is ErrorCode.none
    assert [one.error_code for one in answer.members] == [
        ErrorCode.none,
        ErrorCode.unknown_member_id,
        ErrorCode.unknown_member_id,
    ]
