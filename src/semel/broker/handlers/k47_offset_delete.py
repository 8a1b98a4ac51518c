"""OffsetDelete (47), version 0: a group forgets its positions in topics that none of its members reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.context import Reply, RequestContext
from semel.broker.pacing import answer_wide
from semel.core.group_offsets import TopicPartition
from semel.core.refusal import Refused
from semel.wire.server import respond

if TYPE_CHECKING:
    from semel.broker.state import Broker


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    try:
        codes = _delete(broker, context, request)
    except Refused as refusal:
        broker.metrics.count_refusal(refusal.code)
        return respond(request, error_code=refusal.code, topics=[])
    topics = [
        {
            "name": topic.name,
            "partitions": [
                {
                    "partition_index": partition.partition_index,
                    "error_code": codes[topic.name, partition.partition_index],
                }
                for partition in topic.partitions
            ],
        }
        for topic in request.topics
    ]
    entries = len(topics) + len(codes)
    return answer_wide(broker, context, request, entries, {"error_code": ErrorCode.none, "topics": topics})


def _delete(broker: Broker, context: RequestContext, request: Any) -> dict[TopicPartition, ErrorCode]:
    allows = broker.authorizer.allows
    if not allows(context, Operation.DELETE, ResourceType.GROUP, request.group_id):
        raise Refused(ErrorCode.group_authorization_failed, request.group_id)
    codes: dict[TopicPartition, ErrorCode] = {}
    wanted: list[TopicPartition] = []
    for topic in request.topics:
        may_read = allows(context, Operation.READ, ResourceType.TOPIC, topic.name)
        for partition in topic.partitions:
            where = (topic.name, partition.partition_index)
            if not may_read:
                codes[where] = ErrorCode.topic_authorization_failed
            elif broker.partition(*where) is None:
                codes[where] = ErrorCode.unknown_topic_or_partition
            else:
                wanted.append(where)
    decision = broker.groups.coordinator.decide_delete_offsets(request.group_id, wanted)
    broker.groups.carry_out(request.group_id, decision)
    return codes | dict(decision.codes)
