"""DescribeProducers (61), version 0: who writes to a partition, how far, and whether a transaction is open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.context import Answer, RequestContext
from semel.wire.server import respond

if TYPE_CHECKING:
    from semel.broker.state import Broker


def handle(broker: Broker, context: RequestContext, request: Any) -> Answer:
    return respond(
        request,
        topics=[
            {
                "name": topic.name,
                "partitions": [_describe(broker, context, topic.name, index) for index in topic.partition_indexes],
            }
            for topic in request.topics
        ],
    )


def _describe(broker: Broker, context: RequestContext, topic: str, index: int) -> dict[str, Any]:
    partition = broker.partition(topic, index)
    code = ErrorCode.none
    if not broker.authorizer.allows(context, Operation.READ, ResourceType.TOPIC, topic):
        code = ErrorCode.topic_authorization_failed
    elif partition is None:
        code = ErrorCode.unknown_topic_or_partition
    producers = partition.log.active_producers() if partition is not None and code is ErrorCode.none else []
    return {
        "partition_index": index,
        "error_code": code,
        "error_message": None if code is ErrorCode.none else code.name,
        "active_producers": [
            {
                "producer_id": entry.producer_id,
                "producer_epoch": entry.producer_epoch,
                "last_sequence": entry.last_sequence,
                "last_timestamp": entry.last_timestamp_ms,
                "coordinator_epoch": entry.coordinator_epoch,
                "current_txn_start_offset": -1
                if entry.transaction_first_offset is None
                else entry.transaction_first_offset,
            }
            for entry in producers
        ],
    }
