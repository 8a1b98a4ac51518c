"""DescribeProducers (61), version 0: who writes to a partition, how far, and whether a transaction is open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.context import Reply, RequestContext
from semel.broker.pacing import Pace, Slices, answer_list

if TYPE_CHECKING:
    from semel.broker.state import Broker


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    return answer_list(broker, context, request, "topics", _describe_all(broker, context, request))


def _describe_all(broker: Broker, context: RequestContext, request: Any) -> Slices[list[Mapping[str, Any]]]:
    """Each partition once, however often it is named: thousands of producers can be in each answer."""
    asked: dict[str, dict[int, None]] = {}
    for topic in request.topics:
        asked.setdefault(topic.name, {}).update(dict.fromkeys(topic.partition_indexes))
    pace = Pace()
    topics: list[Mapping[str, Any]] = []
    for name, indexes in asked.items():
        partitions: list[Mapping[str, Any]] = []
        for index in indexes:
            partitions.append((yield from _describe(broker, context, name, index, pace)))
            if pace.is_over():
                yield
        topics.append({"name": name, "partitions": partitions})
    return topics


def _describe(broker: Broker, context: RequestContext, topic: str, index: int, pace: Pace) -> Slices[Mapping[str, Any]]:
    partition = broker.partition(topic, index)
    code = ErrorCode.none
    if not broker.authorizer.allows(context, Operation.READ, ResourceType.TOPIC, topic):
        code = ErrorCode.topic_authorization_failed
    elif partition is None:
        code = ErrorCode.unknown_topic_or_partition
    entries = partition.log.active_producers() if partition is not None and code is ErrorCode.none else []
    producers: list[Mapping[str, Any]] = []
    for entry in entries:
        producers.append(
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
        )
        if pace.is_over():
            yield
    return {
        "partition_index": index,
        "error_code": code,
        "error_message": None if code is ErrorCode.none else code.name,
        "active_producers": producers,
    }
