"""Metadata (3), versions 0-12: where the topics are, and the topics that come into being by being asked for.

A topic that is created by the request is answered as ready at once; Kafka lets the client ask again. Not done: quotas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from kio.schema.errors import ErrorCode

from semel.broker.acls import CLUSTER_NAME, Operation, ResourceType
from semel.broker.context import Reply, RequestContext
from semel.broker.pacing import ENTRIES_AT_ONCE, Pace, Slices, answer_in_slices
from semel.broker.topic_answers import cluster_operations, missing_topic_code, partition_fields, topic_fields
from semel.broker.topics import INTERNAL_TOPICS, Topic
from semel.core.refusal import Refused

if TYPE_CHECKING:
    from semel.broker.state import Broker

_BY_ID_SINCE: Final = 12


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    return answer_in_slices(broker, context, request, _answer(broker, context, request))


def _answer(broker: Broker, context: RequestContext, request: Any) -> Slices[Mapping[str, Any]]:
    asked = request.topics
    found: Iterator[Mapping[str, Any] | Slices[Mapping[str, Any]]]
    if asked is None or (context.api_version == 0 and not asked):
        found = _all_topics(broker, context, request)
    elif _names_by_id_too_early(context, asked):
        found = (topic_fields(ErrorCode.invalid_request, item.name or "") for item in asked)
    else:
        found = _named_topics(broker, context, request)
    pace = Pace()
    topics: list[Mapping[str, Any]] = []
    for one in found:
        known = len(broker.topics)
        topic = one if isinstance(one, Mapping) else (yield from one)
        topics.append(topic)
        if pace.is_over(1 + len(topic["partitions"]) if len(broker.topics) == known else ENTRIES_AT_ONCE):
            yield
    host, port = broker.advertised(context)
    settings = broker.settings
    return {
        "brokers": [{"node_id": settings.node_id, "host": host, "port": port, "rack": settings.rack}],
        "cluster_id": broker.topics.cluster_id,
        "controller_id": settings.node_id,
        "topics": topics,
        "cluster_authorized_operations": cluster_operations(
            broker, context, is_asked=getattr(request, "include_cluster_authorized_operations", False)
        ),
    }


def _names_by_id_too_early(context: RequestContext, asked: Sequence[Any]) -> bool:
    """Versions 10 and 11 have the fields, but their answers have no room for a topic without a name."""
    return context.api_version < _BY_ID_SINCE and any(
        item.name is None or getattr(item, "topic_id", None) is not None for item in asked
    )


def _all_topics(broker: Broker, context: RequestContext, request: Any) -> Iterator[Mapping[str, Any]]:
    for topic in broker.topics:
        if broker.authorizer.allows(context, Operation.DESCRIBE, ResourceType.TOPIC, topic.name):
            yield _described(broker, context, request, topic)


def _named_topics(
    broker: Broker, context: RequestContext, request: Any
) -> Iterator[Mapping[str, Any] | Slices[Mapping[str, Any]]]:
    for asked in dict.fromkeys((item.name, getattr(item, "topic_id", None)) for item in request.topics):
        name, topic_id = asked
        # The id first: beside it, the Java client sends an empty name and not none.
        if topic_id is not None:
            yield _by_id(broker, context, request, topic_id)
        elif name is not None:
            yield _by_name(broker, context, request, name)
        else:
            yield topic_fields(ErrorCode.invalid_request, "")


def _by_name(broker: Broker, context: RequestContext, request: Any, name: str) -> Slices[Mapping[str, Any]]:
    if not broker.authorizer.allows(context, Operation.DESCRIBE, ResourceType.TOPIC, name):
        return topic_fields(ErrorCode.topic_authorization_failed, name)
    topic = broker.topics.get(name)
    if topic is not None:
        return _described(broker, context, request, topic)
    # Versions before 4 cannot say that they do not want it created.
    if not broker.settings.auto_create_topics or not getattr(request, "allow_auto_topic_creation", True):
        return _failed(broker, context, request, missing_topic_code(name), name)
    try:
        topic = yield from _create(broker, context, name)
        return _described(broker, context, request, topic)
    except Refused as refusal:
        return _failed(broker, context, request, refusal.code, name)


def _create(broker: Broker, context: RequestContext, name: str) -> Slices[Topic]:
    allows = broker.authorizer.allows
    if not allows(context, Operation.CREATE, ResourceType.CLUSTER, CLUSTER_NAME) and not allows(
        context, Operation.CREATE, ResourceType.TOPIC, name
    ):
        raise Refused(ErrorCode.topic_authorization_failed, "Authorization failed.")
    if name in INTERNAL_TOPICS:
        return (yield from broker.topics.ensure_internal_in_slices(name, broker.settings))
    topic = broker.topics.decide_create(name, broker.settings)
    return (yield from broker.topics.create_in_slices(topic, broker.settings))


def _by_id(broker: Broker, context: RequestContext, request: Any, topic_id: UUID) -> Mapping[str, Any]:
    topic = broker.topics.by_id(topic_id)
    if topic is None:
        return {**topic_fields(ErrorCode.unknown_topic_id, None), "topic_id": topic_id}
    if not broker.authorizer.allows(context, Operation.DESCRIBE, ResourceType.TOPIC, topic.name):
        # Who may not describe a topic does not learn its name from its id.
        return {**topic_fields(ErrorCode.topic_authorization_failed, None), "topic_id": topic_id}
    return _described(broker, context, request, topic)


def _described(broker: Broker, context: RequestContext, request: Any, topic: Topic) -> Mapping[str, Any]:
    fields = topic_fields(
        ErrorCode.none, topic.name, topic, partition_fields(broker, topic, range(topic.partition_count))
    )
    return _with_operations(broker, context, request, fields)


def _failed(broker: Broker, context: RequestContext, request: Any, code: ErrorCode, name: str) -> Mapping[str, Any]:
    return _with_operations(broker, context, request, topic_fields(code, name))


def _with_operations(
    broker: Broker, context: RequestContext, request: Any, fields: Mapping[str, Any]
) -> Mapping[str, Any]:
    if not getattr(request, "include_topic_authorized_operations", False):
        return fields
    operations = broker.authorizer.operations(context, ResourceType.TOPIC, fields["name"])
    return {**fields, "topic_authorized_operations": operations}
