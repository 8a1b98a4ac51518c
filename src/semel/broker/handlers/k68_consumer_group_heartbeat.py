"""ConsumerGroupHeartbeat (68), versions 0-1: join, stay in and leave a KIP-848 group, and learn one's partitions.

Version 1 wants the client to make its own member id. Not done: members of the classic protocol in the same group; a
classic group with members is answered GROUP_ID_NOT_FOUND, an empty one makes room.
"""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Iterator, Mapping
from datetime import timedelta
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.context import Answer, Reply, RequestContext
from semel.broker.pacing import answer_wide
from semel.core.consumer_group_records import Assignment
from semel.core.consumer_groups import ConsumerGroupDecision, HeartbeatResponse
from semel.core.refusal import Refused
from semel.wire.server import respond

if TYPE_CHECKING:
    from semel.broker.state import Broker
    from semel.broker.topics import TopicStore

_CLIENT_MAKES_MEMBER_ID_SINCE: Final = 1
_MS: Final = timedelta(milliseconds=1)
_NUMBER: Final = attrgetter("int")


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    try:
        _refuse_unauthorized(broker, context, request)
        replaced = broker.groups.coordinator.decide_give_up_classic(request.group_id)
        decision = _decide(broker, context, request)
        broker.groups.carry_out_consumer(decision, replaced)
    except Refused as refusal:
        broker.metrics.count_refusal(refusal.code)
        return respond(
            request,
            error_code=refusal.code,
            error_message=refusal.reason,
            member_id=None,
            member_epoch=0,
            heartbeat_interval=0,
            assignment=None,
        )
    # Timers alone decide without an answer.
    assert decision.response is not None
    if broker.acknowledges_after_sync and decision.records:
        return _wait_and_answer(broker, context, request, decision.response)
    return _answer(broker, context, request, decision.response)


async def _wait_and_answer(
    broker: Broker, context: RequestContext, request: Any, response: HeartbeatResponse
) -> Answer:
    await broker.groups.wait_durable(request.group_id)
    reply = _answer(broker, context, request, response)
    return await reply if isinstance(reply, Awaitable) else reply


def _answer(broker: Broker, context: RequestContext, request: Any, response: HeartbeatResponse) -> Reply:
    shown = None if response.assignment is None else _shown(broker, context, response.assignment)
    fields = {
        "error_code": ErrorCode.none,
        "member_id": response.member_id,
        "member_epoch": response.member_epoch,
        "heartbeat_interval": response.heartbeat_interval_ms,
        "assignment": None if shown is None else _topic_partitions(shown),
    }
    return answer_wide(broker, context, request, len(shown or ()), fields)


def _shown(broker: Broker, context: RequestContext, assignment: Assignment) -> Assignment:
    """Without topics that this member may not see.

    A regular expression is resolved once for all members that share it, with the rights of one of them. A member with
    fewer rights could not read the topic, and must not learn its id either.
    """
    hidden = {
        topic.topic_id
        for topic_id in assignment
        if (topic := broker.topics.by_id(topic_id)) is not None
        and not broker.authorizer.allows(context, Operation.DESCRIBE, ResourceType.TOPIC, topic.name)
    }
    return {topic_id: partitions for topic_id, partitions in assignment.items() if topic_id not in hidden}


def _topic_partitions(assignment: Assignment) -> dict[str, Any]:
    topics = [
        {"topic_id": topic_id, "partitions": sorted(assignment[topic_id])}
        for topic_id in sorted(assignment, key=_NUMBER)
    ]
    return {"topic_partitions": topics}


def _refuse_unauthorized(broker: Broker, context: RequestContext, request: Any) -> None:
    if "consumer" not in broker.settings.group_protocols:
        raise Refused(ErrorCode.unsupported_version, "The consumer group protocol (KIP-848) is switched off here.")
    if not broker.authorizer.allows(context, Operation.READ, ResourceType.GROUP, request.group_id):
        raise Refused(ErrorCode.group_authorization_failed, request.group_id)
    for name in request.subscribed_topic_names or ():
        if not broker.authorizer.allows(context, Operation.DESCRIBE, ResourceType.TOPIC, name):
            raise Refused(ErrorCode.topic_authorization_failed, name)


def _decide(broker: Broker, context: RequestContext, request: Any) -> ConsumerGroupDecision:
    return broker.groups.consumer_groups.decide_heartbeat(
        request.group_id,
        request.member_id,
        request.member_epoch,
        request.instance_id,
        request.rack_id,
        request.rebalance_timeout // _MS,
        context.client_id or "",
        f"/{context.host}",
        request.subscribed_topic_names,
        getattr(request, "subscribed_topic_regex", None),
        request.server_assignor,
        _owned(request),
        topics=_TopicsById(broker.topics),
        now_ms=broker.clock.now_ms(),
        new_member_id=None if context.api_version >= _CLIENT_MAKES_MEMBER_ID_SINCE else lambda: str(broker.new_id()),
        may_describe=lambda name: broker.authorizer.allows(context, Operation.DESCRIBE, ResourceType.TOPIC, name),
    )


def _owned(request: Any) -> Mapping[UUID, Collection[int]] | None:
    if request.topic_partitions is None:
        return None
    owned: dict[UUID, set[int]] = {}
    for topic in request.topic_partitions:
        if topic.topic_id is not None:
            owned.setdefault(topic.topic_id, set()).update(topic.partitions)
    return owned


class _TopicsById(Mapping[str, tuple[UUID, int]]):
    """Id and partition count of the topics as the coordinator wants them, looked up one by one and never copied."""

    def __init__(self, topics: TopicStore) -> None:
        self._topics = topics

    def __getitem__(self, name: str) -> tuple[UUID, int]:
        topic = self._topics.get(name)
        if topic is None:
            raise KeyError(name)
        return topic.topic_id, topic.partition_count

    def __contains__(self, name: object) -> bool:
        return name in self._topics

    def __iter__(self) -> Iterator[str]:
        return (topic.name for topic in self._topics)

    def __len__(self) -> int:
        return len(self._topics)
