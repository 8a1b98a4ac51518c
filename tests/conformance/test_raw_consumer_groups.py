"""The group protocol of KIP-848, request by request: epochs instead of generations, and offsets fenced by them."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from raw import RawClient, settled, wait_until
from raw_producer import GROUP, RawProducer, common_code, find_coordinator, offsets_by_topic
from raw_reading import committed_offset, settled_offset
from targets import NewTopic

from semel.wire import Api, ErrorCode

pytestmark = pytest.mark.needs("has_consumer_groups")

LEAVES = -1
LEAVES_FOR_A_WHILE = -2


@pytest.fixture
def topic(new_topic: NewTopic) -> str:
    return new_topic(partitions=2)


class Member:
    """One that heartbeats with exactly what it is told."""

    def __init__(self, raw: RawClient, topic: str, *, instance_id: str | None = None) -> None:
        self.raw, self.topic, self.group = raw, topic, f"{topic}-group"
        self.instance_id = instance_id
        self.member_id = str(uuid.uuid4())
        self.epoch = 0
        self.owned: list[dict[str, Any]] = []
        find_coordinator(raw, GROUP, self.group)

    def beat(self, *, version: int = 1, **changed: Any) -> Any:
        joins = changed.get("member_epoch", self.epoch) == 0
        fields: dict[str, Any] = {
            "group_id": self.group,
            "member_id": self.member_id,
            "member_epoch": self.epoch,
            "instance_id": self.instance_id,
            "rack_id": None,
            "rebalance_timeout": 10_000 if joins else -1,
            "subscribed_topic_names": [self.topic] if joins else None,
            "subscribed_topic_regex": None,
            "server_assignor": None,
            "topic_partitions": [] if joins else None,
        }
        return settled(lambda: self.raw.call(Api.CONSUMER_GROUP_HEARTBEAT, version, **{**fields, **changed}))

    def join(self) -> Member:
        """Join a group that is empty, and wait for all partitions: Kafka may take its time to assign them."""
        wait_until(lambda: self.poll() == [0, 1], "the assignment of all partitions")
        return self

    def poll(self, *, version: int = 1) -> list[int]:
        """One heartbeat as a client sends it, which has done what the last answer asked for; what it has then."""
        owned = {} if self.epoch == 0 else {"topic_partitions": self.owned}
        answer = self.beat(version=version, **owned)
        assert answer.error_code is ErrorCode.none, answer
        self.member_id, self.epoch = answer.member_id, answer.member_epoch
        if answer.assignment is not None:
            self.owned = [
                {"topic_id": one.topic_id, "partitions": list(one.partitions)}
                for one in answer.assignment.topic_partitions
            ]
        return sorted(index for one in self.owned for index in one["partitions"])

    def commit(self, offset: int, *, epoch: int, version: int = 9) -> ErrorCode:
        return common_code(
            self.raw.call(
                Api.OFFSET_COMMIT,
                version,
                group_id=self.group,
                generation_id_or_member_epoch=epoch,
                member_id=self.member_id,
                group_instance_id=None,
                topics=offsets_by_topic({(self.topic, 0): offset}),
            )
        )


@pytest.mark.parametrize("version", [0, 1])
def test_a_member_joins_gets_all_partitions_and_leaves(raw: RawClient, topic: str, version: int) -> None:
    """C1 (KIP-848): the id is the broker's in version 0 and the client's in version 1."""
    member = Member(raw, topic)
    chosen = member.member_id = "" if version == 0 else member.member_id
    wait_until(lambda: member.poll(version=version) == [0, 1], "all partitions")
    assert member.epoch > 0
    assert member.member_id == chosen or version == 0
    answer = member.beat(version=version)
    assert (answer.error_code, answer.member_epoch, answer.assignment) == (ErrorCode.none, member.epoch, None)
    assert answer.heartbeat_interval.total_seconds() == 0.5
    left = member.beat(version=version, member_epoch=LEAVES)
    assert (left.error_code, left.member_epoch) == (ErrorCode.none, LEAVES)
    assert member.beat(version=version).error_code is ErrorCode.unknown_member_id


def test_two_members_share_the_partitions_once_the_first_has_let_go(raw: RawClient, topic: str) -> None:
    """C1 (KIP-848): nobody gets a partition that the other has not given up yet."""
    first, second = Member(raw, topic).join(), Member(raw, topic)
    assert second.poll() == []
    wait_until(lambda: second.poll() == [] and len(first.poll()) == 1, "one partition to be asked back")
    assert second.poll() == []
    (kept,) = first.poll()  # has let go now
    wait_until(lambda: second.poll() == [1 - kept], "the partition that was given up")
    assert first.poll() == [kept]
    wait_until(lambda: first.poll() == [kept] and first.epoch == second.epoch, "the same epoch")


def test_epochs_that_are_not_the_members_are_fenced(raw: RawClient, topic: str) -> None:
    """C1 (KIP-848): FENCED_MEMBER_EPOCH above and below, UNKNOWN_MEMBER_ID for strangers, and no group at all."""
    member, stranger = Member(raw, topic).join(), Member(raw, topic)
    assert member.beat(member_epoch=member.epoch + 1).error_code is ErrorCode.fenced_member_epoch
    assert stranger.beat(member_epoch=1).error_code is ErrorCode.unknown_member_id
    assert stranger.beat(group_id=f"{topic}-missing", member_epoch=1).error_code is ErrorCode.group_id_not_found
    assert stranger.beat(group_id=f"{topic}-missing", member_epoch=LEAVES).error_code is ErrorCode.group_id_not_found
    assert member.beat().error_code is ErrorCode.none


def test_a_static_member_keeps_its_place_while_it_is_away(raw: RawClient, topic: str) -> None:
    """C1 (KIP-848): UNRELEASED_INSTANCE_ID while it is there; who comes back has its partitions, its old id none."""
    before, after = Member(raw, topic, instance_id="one").join(), Member(raw, topic, instance_id="one")
    assert after.beat().error_code is ErrorCode.unreleased_instance_id
    away = before.beat(member_epoch=LEAVES_FOR_A_WHILE)
    assert (away.error_code, away.member_epoch) == (ErrorCode.none, LEAVES_FOR_A_WHILE)
    after.join()
    assert before.beat().error_code is ErrorCode.fenced_instance_id


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"group_id": ""}, ErrorCode.invalid_request),
        ({"member_id": ""}, ErrorCode.invalid_request),
        ({"instance_id": ""}, ErrorCode.invalid_request),
        ({"rebalance_timeout": -1}, ErrorCode.invalid_request),
        ({"subscribed_topic_names": None}, ErrorCode.invalid_request),
        ({"topic_partitions": None}, ErrorCode.invalid_request),
        ({"member_epoch": -3}, ErrorCode.invalid_request),
        ({"member_epoch": LEAVES_FOR_A_WHILE}, ErrorCode.invalid_request),
        ({"server_assignor": "nonsense"}, ErrorCode.unsupported_assignor),
        ({"subscribed_topic_regex": "(", "subscribed_topic_names": None}, ErrorCode.invalid_regular_expression),
    ],
    ids=str,
)
def test_joins_that_make_no_sense_are_refused(
    raw: RawClient, topic: str, changed: dict[str, Any], code: ErrorCode
) -> None:
    """C1 (KIP-848): what a join must say, and what it must not."""
    assert Member(raw, topic).beat(**changed).error_code is code


def test_offsets_are_fenced_by_the_member_epoch(raw: RawClient, topic: str) -> None:
    """C1 (KIP-848): STALE_MEMBER_EPOCH to OffsetCommit 9; older versions cannot name an epoch."""
    member = Member(raw, topic).join()
    assert member.commit(3, epoch=member.epoch - 1) is ErrorCode.stale_member_epoch
    assert member.commit(3, epoch=member.epoch + 1) is ErrorCode.stale_member_epoch
    assert member.commit(3, epoch=member.epoch, version=8) is ErrorCode.unsupported_version
    assert member.commit(3, epoch=member.epoch) is ErrorCode.none
    assert committed_offset(raw, member.group, topic) == (ErrorCode.none, 3)
    member.member_id = "stranger"
    assert member.commit(4, epoch=member.epoch) is ErrorCode.unknown_member_id


def test_offsets_are_read_by_members_of_the_present_epoch(raw: RawClient, topic: str) -> None:
    """C1 (KIP-848): OffsetFetch 9 with a member id: STALE_MEMBER_EPOCH and UNKNOWN_MEMBER_ID for the whole group."""
    member = Member(raw, topic).join()

    def ask(member_id: str, epoch: int) -> ErrorCode:
        topics = [{"name": topic, "partition_indexes": [0]}]
        groups = [{"group_id": member.group, "member_id": member_id, "member_epoch": epoch, "topics": topics}]
        return raw.call(Api.OFFSET_FETCH, 9, groups=groups, require_stable=True).groups[0].error_code

    assert ask(member.member_id, member.epoch) is ErrorCode.none
    assert ask(member.member_id, member.epoch + 1) is ErrorCode.stale_member_epoch
    assert ask("stranger", member.epoch) is ErrorCode.unknown_member_id


@pytest.mark.parametrize("protocol", [1, 2])
def test_offsets_in_a_transaction_are_fenced_by_the_member_epoch(raw: RawClient, topic: str, protocol: int) -> None:
    """C1 (KIP-447, KIP-848): ILLEGAL_GENERATION, which transactional clients know, for a stale epoch."""
    member = Member(raw, topic).join()
    producer = RawProducer(raw, topic, protocol=protocol).begin()
    if protocol == 1:
        assert producer.add_offsets(member.group) is ErrorCode.none

    def commit(member_id: str, epoch: int) -> ErrorCode:
        return producer.commit_offsets(member.group, {(topic, 0): 5}, member_id=member_id, generation_id=epoch)

    assert commit(member.member_id, member.epoch + 1) is ErrorCode.illegal_generation
    assert commit(member.member_id, member.epoch - 1) is ErrorCode.illegal_generation
    assert commit("stranger", member.epoch) is ErrorCode.unknown_member_id
    assert commit(member.member_id, member.epoch) is ErrorCode.none
    producer.commit()
    assert settled_offset(raw, member.group, topic) == 5
