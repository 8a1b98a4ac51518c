"""WriteTxnMarkers (27), version 1: end a transaction in a partition by hand, which is how one that hangs is aborted.

Needs ALTER on the cluster, as in Kafka since 3.x (CLUSTER_ACTION is what brokers among themselves use).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from semel.broker.acls import CLUSTER_NAME, Operation, ResourceType
from semel.broker.context import Answer, RequestContext
from semel.broker.storage.failures import StorageError
from semel.core.refusal import Refused
from semel.wire.server import respond

if TYPE_CHECKING:
    from semel.broker.state import Broker


async def handle(broker: Broker, context: RequestContext, request: Any) -> Answer:
    allowed = any(
        broker.authorizer.allows(context, operation, ResourceType.CLUSTER, CLUSTER_NAME)
        for operation in (Operation.ALTER, Operation.CLUSTER_ACTION)
    )
    return respond(
        request,
        markers=[
            {
                "producer_id": marker.producer_id,
                "topics": [
                    {
                        "name": topic.name,
                        "partitions": [
                            {
                                "partition_index": index,
                                "error_code": _write(broker, marker, topic.name, index)
                                if allowed
                                else ErrorCode.cluster_authorization_failed,
                            }
                            for index in topic.partition_indexes
                        ],
                    }
                    for topic in marker.topics
                ],
            }
            for marker in request.markers
        ],
    )


def _write(broker: Broker, marker: Any, topic: str, index: int) -> ErrorCode:
    partition = broker.partition(topic, index)
    if partition is None:
        return ErrorCode.unknown_topic_or_partition
    try:
        broker.transactions.write_marker(
            partition,
            marker.producer_id,
            marker.producer_epoch,
            committed=marker.transaction_result,
            coordinator_epoch=marker.coordinator_epoch,
        )
    except Refused as refusal:
        return refusal.code
    except StorageError:
        return ErrorCode.kafka_storage_error
    return ErrorCode.none
