"""WriteTxnMarkers (27), version 1: end a transaction in a partition by hand, which is how one that hangs is aborted.

Needs ALTER on the cluster, as in Kafka since 3.x (CLUSTER_ACTION is what brokers among themselves use).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from semel.broker.acls import CLUSTER_NAME, Operation, ResourceType
from semel.broker.context import Reply, RequestContext
from semel.broker.pacing import Slices, answer_list, sliced_partitions
from semel.broker.storage.failures import StorageError
from semel.core.refusal import Refused

if TYPE_CHECKING:
    from semel.broker.state import Broker


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    return answer_list(broker, context, request, "markers", _write_all(broker, context, request))


def _write_all(broker: Broker, context: RequestContext, request: Any) -> Slices[list[Mapping[str, Any]]]:
    allowed = any(
        broker.authorizer.allows(context, operation, ResourceType.CLUSTER, CLUSTER_NAME)
        for operation in (Operation.ALTER, Operation.CLUSTER_ACTION)
    )
    answers: list[Mapping[str, Any]] = []
    for marker in request.markers:

        def answer(topic: str, index: int, marker: Any = marker) -> Mapping[str, Any]:
            code = _write(broker, marker, topic, index) if allowed else ErrorCode.cluster_authorization_failed
            return {"partition_index": index, "error_code": code}

        topics = yield from sliced_partitions(marker.topics, answer, partitions="partition_indexes")
        answers.append({"producer_id": marker.producer_id, "topics": topics})
    return answers


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
