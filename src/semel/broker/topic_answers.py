"""Topics as Metadata and DescribeTopicPartitions tell them, and what to say of names that are no topic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from semel.broker.acls import CLUSTER_NAME, Operation, ResourceType
from semel.broker.topic_names import refuse_bad_name
from semel.broker.topics import Topic
from semel.core.refusal import Refused

if TYPE_CHECKING:
    from semel.broker.context import RequestContext
    from semel.broker.state import Broker

NOT_ASKED: Final = -(2**31)
"""Kafka's "nobody asked for the authorized operations"."""

NO_LEADER: Final = -1


def missing_topic_code(name: str) -> ErrorCode:
    """Why there is no topic of this name: it cannot be one, or it is just not there."""
    try:
        refuse_bad_name(name)
    except Refused as refusal:
        return refusal.code
    return ErrorCode.unknown_topic_or_partition


def partition_fields(broker: Broker, topic: Topic, indexes: Iterable[int]) -> list[Mapping[str, Any]]:
    """The fields of these partitions. One whose log could not be opened has no leader."""
    node = broker.settings.node_id
    replicas = (node,)
    return [
        {
            "error_code": ErrorCode.none if is_open else ErrorCode.leader_not_available,
            "partition_index": index,
            "leader_id": node if is_open else NO_LEADER,
            "leader_epoch": broker.leader_epoch,
            "replica_nodes": replicas,
            "isr_nodes": replicas if is_open else (),
            "eligible_leader_replicas": (),
            "last_known_elr": (),
            "offline_replicas": () if is_open else replicas,
        }
        for index in indexes
        for is_open in (broker.partition(topic.name, index) is not None,)
    ]


def topic_fields(
    code: ErrorCode,
    name: str | None,
    topic: Topic | None = None,
    partitions: Iterable[Mapping[str, Any]] = (),
    operations: int = NOT_ASKED,
) -> Mapping[str, Any]:
    """The fields of a topic, or of a name that is none."""
    return {
        "error_code": code,
        "name": name,
        "topic_id": topic.topic_id if topic is not None else None,
        "is_internal": topic is not None and topic.is_internal,
        "partitions": partitions,
        "topic_authorized_operations": operations,
    }


def cluster_operations(broker: Broker, context: RequestContext, *, is_asked: bool) -> int:
    """What this client may do to the cluster; 0 when it may not even know."""
    if not is_asked:
        return NOT_ASKED
    if not broker.authorizer.allows(context, Operation.DESCRIBE, ResourceType.CLUSTER, CLUSTER_NAME):
        return 0
    return broker.authorizer.operations(context, ResourceType.CLUSTER, CLUSTER_NAME)
