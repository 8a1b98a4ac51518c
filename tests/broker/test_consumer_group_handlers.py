"""ConsumerGroupHeartbeat and ConsumerGroupDescribe, from bytes to bytes."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from handler_calls import SmallBroker, ask
from kio.schema.errors import ErrorCode

from semel.broker.acls import AclBinding, Authorizer, Operation, ResourceType
from semel.core.classic_state import AnyRecord
from semel.core.consumer_groups import ConsumerGroupDecision
from semel.core.group_coordinator import GroupCoordinator
from semel.wire.api import Api

HEARTBEAT, DESCRIBE = Api.CONSUMER_GROUP_HEARTBEAT, Api.CONSUMER_GROUP_DESCRIBE
JOIN: dict[str, Any] = {
    "group_id": "g",
    "member_id": "m",
    "member_epoch": 0,
    "rebalance_timeout": 60_000,
    "subscribed_topic_names": ["t"],
    "topic_partitions": [],
}


class Groups:
    """The coordinator without a log."""

    def __init__(self) -> None:
        self.coordinator = GroupCoordinator()
        self.consumer_groups = self.coordinator.consumer_groups

    def carry_out_consumer(self, decision: ConsumerGroupDecision, replaced: Sequence[AnyRecord] = ()) -> None:
        self.consumer_groups.replay_decision(decision)


class GroupBroker(SmallBroker):
    """A small broker with a coordinator, and a count of refusals."""

    acknowledges_after_sync = False

    def __init__(self, **configs: Any) -> None:
        super().__init__(**configs)
        self.groups = Groups()
        self.refusals: list[ErrorCode] = []
        self.new_id = uuid4
        self.clock = SimpleNamespace(now_ms=lambda: 1_000)
        self.metrics = SimpleNamespace(count_refusal=self.refusals.append)


def allow(*rules: tuple[Operation, ResourceType, str]) -> Authorizer:
    authorizer = Authorizer()
    authorizer.add(
        [AclBinding(kind, name, principal="User:ann", operation=operation) for operation, kind, name in rules]
    )
    return authorizer


@pytest.mark.parametrize("version", [0, 1])
def test_a_member_joins_and_beats(version: int) -> None:
    """The first answer has the partitions by topic id, the second none, as nothing changed."""
    broker = GroupBroker()
    topic = broker.new_topic("t", 3)
    joined = ask(broker, HEARTBEAT, version, **JOIN)
    assert (joined.error_code, joined.member_id, joined.member_epoch) == (ErrorCode.none, "m", 1)
    assert [(part.topic_id, part.partitions) for part in joined.assignment.topic_partitions] == [
        (topic.topic_id, (0, 1, 2))
    ]
    quiet = ask(broker, HEARTBEAT, version, group_id="g", member_id="m", member_epoch=1, topic_partitions=None)
    assert (quiet.error_code, quiet.assignment) == (ErrorCode.none, None)
    assert quiet.heartbeat_interval.total_seconds() == 5


def test_version_0_receives_a_member_id() -> None:
    """Version 1 must bring one."""
    broker = GroupBroker()
    broker.new_topic("t")
    assert ask(broker, HEARTBEAT, 0, **{**JOIN, "member_id": ""}).member_id
    assert ask(broker, HEARTBEAT, 1, **{**JOIN, "member_id": ""}).error_code is ErrorCode.invalid_request


def test_owned_partitions_of_a_request_release_the_others() -> None:
    """What the member no longer lists goes to the next one."""
    broker = GroupBroker()
    topic = broker.new_topic("t", 2)
    ask(broker, HEARTBEAT, 1, **JOIN)
    ask(broker, HEARTBEAT, 1, **{**JOIN, "member_id": "n"})
    owned = [{"topic_id": topic.topic_id, "partitions": [0]}]
    beat = ask(broker, HEARTBEAT, 1, group_id="g", member_id="m", member_epoch=1, topic_partitions=owned)
    assert beat.member_epoch == 2
    other = ask(broker, HEARTBEAT, 1, group_id="g", member_id="n", member_epoch=2, topic_partitions=None)
    assert other.assignment.topic_partitions[0].partitions == (1,)


def test_an_expression_sees_only_topics_that_the_client_may_describe() -> None:
    """A topic that is hidden from the client does not appear through the back door."""
    broker = GroupBroker()
    seen, _ = broker.new_topic("orders-seen"), broker.new_topic("orders-hidden")
    broker.authorizer = allow(
        (Operation.READ, ResourceType.GROUP, "g"), (Operation.DESCRIBE, ResourceType.TOPIC, "orders-seen")
    )
    fields = {**JOIN, "subscribed_topic_names": None, "subscribed_topic_regex": "orders-.*"}
    joined = ask(broker, HEARTBEAT, 1, principal="User:ann", **fields)
    assert [part.topic_id for part in joined.assignment.topic_partitions] == [seen.topic_id]


def test_an_expression_that_two_members_share_shows_each_what_it_may_describe() -> None:
    """It is resolved with the rights of one member; the other gets no id of a topic that is hidden from it."""
    broker = GroupBroker()
    seen, hidden = broker.new_topic("orders-seen", 4), broker.new_topic("orders-hidden", 4)
    broker.authorizer = allow(
        (Operation.READ, ResourceType.GROUP, "g"), (Operation.DESCRIBE, ResourceType.TOPIC, "orders-seen")
    )
    whole_right = [
        AclBinding(ResourceType.GROUP, "g", principal="User:boss", operation=Operation.READ),
        AclBinding(ResourceType.TOPIC, "*", principal="User:boss", operation=Operation.DESCRIBE),
    ]
    broker.authorizer.add(whole_right)
    fields = {**JOIN, "subscribed_topic_names": None, "subscribed_topic_regex": "orders-.*"}
    boss = ask(broker, HEARTBEAT, 1, principal="User:boss", **{**fields, "member_id": "boss"})
    assert {part.topic_id for part in boss.assignment.topic_partitions} == {seen.topic_id, hidden.topic_id}
    ask(broker, HEARTBEAT, 1, principal="User:ann", **fields)
    boss = ask(
        broker, HEARTBEAT, 1, principal="User:boss", group_id="g", member_id="boss", member_epoch=1, topic_partitions=[]
    )
    assert boss.error_code is ErrorCode.none
    ann = ask(
        broker, HEARTBEAT, 1, principal="User:ann", group_id="g", member_id="m", member_epoch=2, topic_partitions=[]
    )
    assert ann.error_code is ErrorCode.none
    assert hidden.topic_id not in [part.topic_id for part in ann.assignment.topic_partitions]
    described = broker.groups.consumer_groups.describe("g")
    [of_ann] = [member for member in described.members if member.member_id == "m"]
    assert hidden.topic_id in of_ann.assigned, "otherwise nothing had to be hidden"


def test_rights_on_the_group_and_on_named_topics_are_needed() -> None:
    """Without them nothing is changed."""
    broker = GroupBroker()
    broker.new_topic("t")
    broker.authorizer = allow()
    assert ask(broker, HEARTBEAT, 1, principal="User:ann", **JOIN).error_code is ErrorCode.group_authorization_failed
    broker.authorizer = allow((Operation.READ, ResourceType.GROUP, "g"))
    assert ask(broker, HEARTBEAT, 1, principal="User:ann", **JOIN).error_code is ErrorCode.topic_authorization_failed
    assert broker.groups.consumer_groups.group_ids() == []
    assert broker.refusals == [ErrorCode.group_authorization_failed, ErrorCode.topic_authorization_failed]


def test_a_broker_can_have_the_protocol_switched_off() -> None:
    """Clients then know that they must use the classic protocol."""
    broker = GroupBroker(group_coordinator_rebalance_protocols="classic")
    assert ask(broker, HEARTBEAT, 1, **JOIN).error_code is ErrorCode.unsupported_version


@pytest.mark.parametrize("version", [0, 1])
def test_a_group_is_described(version: int) -> None:
    """Members with what they have and shall have, by topic name."""
    broker = GroupBroker()
    broker.new_topic("t", 2)
    ask(broker, HEARTBEAT, 1, **JOIN)
    described = describe(broker, version, "g", "none")
    group = described[0]
    assert (group.group_state, group.group_epoch, group.assignment_epoch) == ("Stable", 1, 1)
    assert (group.assignor_name, group.members[0].client_host) == ("uniform", "/127.0.0.1")
    for part in (group.members[0].assignment, group.members[0].target_assignment):
        assert [(topic.topic_name, topic.partitions) for topic in part.topic_partitions] == [("t", (0, 1))]
    assert group.members[0].subscribed_topic_names == ("t",)
    assert (described[1].error_code, described[1].members) == (ErrorCode.group_id_not_found, ())


def describe(broker: GroupBroker, version: int, *group_ids: str, principal: str = "User:ANONYMOUS") -> Any:
    fields = {"group_ids": list(group_ids), "include_authorized_operations": True}
    return ask(broker, DESCRIBE, version, principal=principal, **fields).groups


def test_a_description_needs_rights_on_the_group_and_on_all_its_topics() -> None:
    """One hidden topic hides the members, as in Kafka."""
    broker = GroupBroker()
    broker.new_topic("t")
    ask(broker, HEARTBEAT, 1, **JOIN)
    broker.authorizer = allow()
    assert describe(broker, 1, "g", principal="User:ann")[0].error_code is ErrorCode.group_authorization_failed
    on_group = (Operation.DESCRIBE, ResourceType.GROUP, "g")
    broker.authorizer = allow(on_group)
    hidden = describe(broker, 1, "g", principal="User:ann")[0]
    assert (hidden.error_code, hidden.members) == (ErrorCode.topic_authorization_failed, ())
    broker.authorizer = allow(on_group, (Operation.DESCRIBE, ResourceType.TOPIC, "t"))
    shown = describe(broker, 1, "g", principal="User:ann")[0]
    assert (shown.error_code, shown.authorized_operations) == (ErrorCode.none, 1 << Operation.DESCRIBE)
