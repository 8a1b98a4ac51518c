"""The members of both group protocols as state machines, with answers written by hand and time that a test moves."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from kio.schema.errors import ErrorCode

from semel.client.classic_member import ClassicMember
from semel.client.cluster import TopicShape
from semel.client.consumer_member import ConsumerMember
from semel.client.group_asks import Ask, GroupStateMachine
from semel.client.group_config import GroupConfig
from semel.client.group_formats import Subscription, decode_subscription, encode_assignment, encode_subscription
from semel.client.partitions import TopicPartition
from semel.errors import NotAuthorized
from semel.wire import Api

TOPIC_ID = UUID(int=7)
P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)


def send(member: GroupStateMachine, now: float) -> Ask:
    ask = member.next_ask(now, may_move=True)
    assert ask is not None
    return ask


def code(error: ErrorCode, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(error_code=error, error_message=None, **more)


def joined(generation: int, leader: str = "other", **more: Any) -> SimpleNamespace:
    fields = {"member_id": "m", "generation_id": generation, "protocol_name": "cooperative-sticky", "members": ()}
    return code(ErrorCode.none, leader=leader, **{**fields, **more})


def synced(*partitions: TopicPartition) -> SimpleNamespace:
    return code(ErrorCode.none, assignment=encode_assignment(partitions))


def classic(*partitions: TopicPartition, assignor: str = "cooperative-sticky") -> ClassicMember:
    """A member that has these partitions in generation 1, at time 0."""
    member = ClassicMember(GroupConfig(group_id="g", assignors=(assignor,)), ["t"])
    member.answered(send(member, 0), joined(1, protocol_name=assignor), 0)
    member.answered(send(member, 0), synced(*partitions), 0)
    assert member.standing.assignment == frozenset(partitions)
    return member


def beat(epoch: int, *partitions: int, told: bool = True) -> SimpleNamespace:
    assigned = SimpleNamespace(topic_partitions=[SimpleNamespace(topic_id=TOPIC_ID, partitions=partitions)])
    interval = timedelta(seconds=5)
    return code(ErrorCode.none, member_epoch=epoch, heartbeat_interval=interval, assignment=assigned if told else None)


def consumer(*partitions: int) -> ConsumerMember:
    """A member that has these partitions in epoch 1, at time 0."""
    member = ConsumerMember(GroupConfig(group_id="g", protocol="consumer"), ["t"], member_id="m")
    member.answered(send(member, 0), beat(1, *partitions), 0)
    assert member.standing.topics_wanted == {"t"}
    member.learn({"t": TopicShape(TOPIC_ID, 2)}, 0)
    assert member.standing.assignment == {TopicPartition("t", number) for number in partitions}
    return member


def test_a_classic_member_beats_in_its_interval_and_not_before() -> None:
    """Time is what the test says it is."""
    member = classic(P0)
    assert send(member, 0.1).api is Api.HEARTBEAT
    assert member.next_ask(3.0, may_move=True) is None
    assert send(member, 3.2).api is Api.HEARTBEAT


def test_a_cooperative_member_joins_with_what_it_has_and_gives_up_what_it_is_not_given() -> None:
    """KIP-429: then it joins once more, and until it has let go it goes on with its heartbeats."""
    member = classic(P0, P1)
    member.answered(send(member, 1), code(ErrorCode.rebalance_in_progress), 1)
    join = send(member, 1)
    told = decode_subscription(join.fields["protocols"][0]["metadata"])
    assert (join.api, told.owned, told.generation) == (Api.JOIN_GROUP, {P0, P1}, 1)
    member.answered(join, joined(2), 1)
    member.answered(send(member, 1), synced(P0), 1)
    assert (member.standing.assignment, member.standing.to_release) == ({P0, P1}, {P1})
    beat_while_waiting = send(member, 2)
    assert beat_while_waiting.api is Api.HEARTBEAT
    member.answered(beat_while_waiting, code(ErrorCode.rebalance_in_progress), 2)
    assert member.standing.to_release == {P1}
    member.released(3)
    assert (member.standing.assignment, send(member, 3).api) == ({P0}, Api.JOIN_GROUP)


def test_an_eager_member_gives_everything_up_before_it_joins() -> None:
    """And not a moment before its holder agrees."""
    member = classic(P0, P1, assignor="range")
    member.answered(send(member, 1), code(ErrorCode.rebalance_in_progress), 1)
    assert member.standing.to_release == {P0, P1}
    assert send(member, 4.5).api is Api.HEARTBEAT
    member.released(5)
    assert (member.standing.assignment, send(member, 5).api) == (frozenset(), Api.JOIN_GROUP)


def test_nothing_that_moves_the_generation_is_sent_while_it_must_stand_still() -> None:
    """Offsets are under way; a classic heartbeat may go, a join and any heartbeat of KIP-848 may not."""
    member = classic(P0)
    heartbeat = member.next_ask(1, may_move=False)
    assert heartbeat is not None
    member.answered(heartbeat, code(ErrorCode.rebalance_in_progress), 1)
    assert member.next_ask(2, may_move=False) is None
    assert send(member, 2).api is Api.JOIN_GROUP
    assert consumer(0).next_ask(60, may_move=False) is None


@pytest.mark.parametrize("error", [ErrorCode.illegal_generation, ErrorCode.unknown_member_id])
def test_a_classic_member_that_was_removed_has_nothing_and_joins_anew(error: ErrorCode) -> None:
    """What it had is lost at once; a member id that is unknown is not used again."""
    member = classic(P0)
    member.answered(send(member, 1), code(error), 1)
    assert (member.standing.assignment, member.identity, member.standing.losses) == (frozenset(), None, 1)
    join = send(member, 1)
    assert join.fields["member_id"] == ("" if error is ErrorCode.unknown_member_id else "m")


@pytest.mark.parametrize("make", [lambda: classic(P0), lambda: consumer(0)], ids=["classic", "consumer"])
def test_a_coordinator_that_moved_is_looked_for_and_nothing_is_lost(make: Any) -> None:
    """Its log is being loaded elsewhere: the partitions stay."""
    member = make()
    member.answered(send(member, 10), code(ErrorCode.not_coordinator), 10)
    assert member.standing.forget_coordinator
    assert member.standing.assignment == {P0}
    assert member.next_ask(10, may_move=True) is None
    member.unanswered(send(member, 11), 11)
    assert (member.standing.assignment, member.standing.fatal) == ({P0}, None)


@pytest.mark.parametrize("make", [lambda: classic(P0), lambda: consumer(0)], ids=["classic", "consumer"])
def test_what_no_repeat_can_cure_ends_the_membership(make: Any) -> None:
    """An ACL that was taken away: the user is told, and nothing more is sent."""
    member = make()
    member.answered(send(member, 10), code(ErrorCode.group_authorization_failed), 10)
    assert isinstance(member.standing.fatal, NotAuthorized)
    assert (member.standing.assignment, member.next_ask(99, may_move=True)) == (frozenset(), None)


def test_a_leader_shares_out_what_there_is_and_shares_out_again_when_there_is_more() -> None:
    """Unless the coordinator tells it to leave all as it is (KIP-814)."""
    member = ClassicMember(GroupConfig(group_id="g"), ["t"])
    subscription = encode_subscription(Subscription(("t",)))
    members = [SimpleNamespace(member_id=name, group_instance_id=None, metadata=subscription) for name in ("m", "n")]
    member.answered(send(member, 0), joined(1, leader="m", members=members, skip_assignment=False), 0)
    assert (member.standing.topics_wanted, member.next_ask(1, may_move=True)) == ({"t"}, None)
    member.learn({"t": TopicShape(None, 2)}, 1)
    sync = send(member, 1)
    assert {one["member_id"] for one in sync.fields["assignments"]} == {"m", "n"}
    member.answered(sync, synced(P0), 1)
    assert member.watched_topics == {"t"}
    member.learn({"t": TopicShape(None, 2)}, 2)
    assert send(member, 2).api is Api.HEARTBEAT
    member.learn({"t": TopicShape(None, 3)}, 3)
    assert send(member, 3).api is Api.JOIN_GROUP

    skipping = ClassicMember(GroupConfig(group_id="g", group_instance_id="i"), ["t"])
    skipping.answered(send(skipping, 0), joined(1, leader="m", members=members, skip_assignment=True), 0)
    assert send(skipping, 0).fields["assignments"] == []
    assert skipping.leave() is None


def test_a_consumer_tells_all_at_first_and_after_a_lost_answer_and_otherwise_only_what_is_new() -> None:
    """KIP-848: what it has is told as soon as it has changed, since others wait for it."""
    member = consumer(0, 1)
    told = send(member, 0).fields
    assert told["topic_partitions"] == [{"topic_id": TOPIC_ID, "partitions": [0, 1]}]
    assert told["subscribed_topic_names"] is None
    member.answered(Ask(Api.CONSUMER_GROUP_HEARTBEAT, {}), beat(1, told=False), 0)
    assert member.next_ask(4, may_move=True) is None
    quiet = send(member, 5)
    assert (quiet.fields["topic_partitions"], quiet.fields["member_epoch"]) == (None, 1)
    member.unanswered(quiet, 5)
    assert send(member, 6).fields["subscribed_topic_names"] == ["t"]


def test_a_consumer_lets_go_before_it_says_so() -> None:
    """KIP-848: the partition is still told as its own until its holder has agreed."""
    member = consumer(0, 1)
    member.answered(send(member, 5), beat(2, 0), 5)
    assert (member.standing.assignment, member.standing.to_release) == ({P0, P1}, {P1})
    member.released(6)
    told = send(member, 6).fields
    assert (told["topic_partitions"], told["member_epoch"]) == ([{"topic_id": TOPIC_ID, "partitions": [0]}], 2)


@pytest.mark.parametrize("error", [ErrorCode.fenced_member_epoch, ErrorCode.unknown_member_id])
def test_a_consumer_that_was_fenced_begins_at_epoch_0_with_nothing(error: ErrorCode) -> None:
    """KIP-848: it says all again, under the id that it keeps for life."""
    member = consumer(0)
    member.answered(send(member, 5), code(error), 5)
    assert (member.standing.assignment, member.identity) == (frozenset(), None)
    join = send(member, 5).fields
    assert (join["member_id"], join["member_epoch"], join["topic_partitions"]) == ("m", 0, [])
    assert join["subscribed_topic_names"] == ["t"]


@pytest.mark.parametrize(("instance", "epoch"), [(None, -1), ("i", -2)])
def test_a_consumer_leaves_for_good_or_if_it_is_static_for_a_while(instance: str | None, epoch: int) -> None:
    """KIP-848: -2 keeps its partitions for it."""
    config = GroupConfig(group_id="g", protocol="consumer", group_instance_id=instance)
    member = ConsumerMember(config, ["t"], member_id="m")
    assert member.leave() is None
    member.answered(send(member, 0), beat(1), 0)
    leaving = member.leave()
    assert leaving is not None
    assert leaving.fields["member_epoch"] == epoch
