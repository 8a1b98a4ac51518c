"""What OffsetCommit and TxnOffsetCommit have in common: which partitions may be committed, and the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.context import Answer, RequestContext
from semel.core.group_offsets import OffsetCommit, TopicPartition
from semel.wire.server import respond

if TYPE_CHECKING:
    from semel.broker.state import Broker

Codes = Mapping[TopicPartition, ErrorCode]


def read_commits(broker: Broker, context: RequestContext, request: Any) -> tuple[list[OffsetCommit], Codes]:
    """The commits to make, and the codes of those that are refused because of their topic."""
    commits: list[OffsetCommit] = []
    codes: dict[TopicPartition, ErrorCode] = {}
    for topic in request.topics:
        may_read = broker.authorizer.allows(context, Operation.READ, ResourceType.TOPIC, topic.name)
        for partition in topic.partitions:
            where = (topic.name, partition.partition_index)
            if not may_read:
                codes[where] = ErrorCode.topic_authorization_failed
            elif broker.partition(*where) is None:
                codes[where] = ErrorCode.unknown_topic_or_partition
            else:
                leader_epoch = getattr(partition, "committed_leader_epoch", -1)
                commits.append(
                    OffsetCommit(*where, partition.committed_offset, leader_epoch, partition.committed_metadata)
                )
    return commits, codes


def answer(request: Any, codes: Codes, otherwise: ErrorCode = ErrorCode.none) -> Answer:
    """Every partition asked for with its code, or with `otherwise` where it has none of its own."""
    return respond(
        request,
        topics=[
            {
                "name": topic.name,
                "partitions": [
                    {
                        "partition_index": partition.partition_index,
                        "error_code": codes.get((topic.name, partition.partition_index), otherwise),
                    }
                    for partition in topic.partitions
                ],
            }
            for topic in request.topics
        ],
    )


async def answer_when_durable(broker: Broker, request: Any, codes: Codes) -> Answer:
    """The same, once the offsets survive the loss of power."""
    await broker.groups.wait_durable(request.group_id)
    return answer(request, codes)
