"""CreatePartitions (37), versions 0-3. The new partitions are ready for records when it is answered.

Not done: quotas. Internal topics cannot grow here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.context import Reply, RequestContext
from semel.broker.topics import NEW_PARTITIONS_MAX, TOO_MANY_PARTITIONS
from semel.core.refusal import Refused
from semel.wire.server import respond

if TYPE_CHECKING:
    from semel.broker.state import Broker


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    counts = Counter(item.name for item in request.topics)
    items = {item.name: item for item in request.topics}
    left = NEW_PARTITIONS_MAX
    results: list[Mapping[str, Any]] = []
    for name, item in items.items():
        topic = broker.topics.get(name)
        left -= max(0, item.count - (topic.partition_count if topic is not None else 0))
        answer = _answer(
            broker,
            context,
            item,
            is_repeated=counts[name] > 1,
            is_too_much=left < 0,
            validate_only=request.validate_only,
        )
        results.append(answer)
    return respond(request, results=results)


def _answer(
    broker: Broker, context: RequestContext, item: Any, *, is_repeated: bool, is_too_much: bool, validate_only: bool
) -> Mapping[str, Any]:
    try:
        if is_repeated:
            raise Refused(ErrorCode.invalid_request, "Duplicate topic name.")
        if not broker.authorizer.allows(context, Operation.ALTER, ResourceType.TOPIC, item.name):
            raise Refused(ErrorCode.topic_authorization_failed, "Authorization failed.")
        if is_too_much and item.name in broker.topics:
            raise Refused(ErrorCode.policy_violation, TOO_MANY_PARTITIONS)
        assignments = None if item.assignments is None else [each.broker_ids for each in item.assignments]
        topic = broker.topics.decide_grow(item.name, item.count, broker.settings, assignments)
        if not validate_only:
            broker.topics.grow(topic)
    except Refused as refusal:
        return {"name": item.name, "error_code": refusal.code, "error_message": refusal.reason}
    return {"name": item.name, "error_code": ErrorCode.none, "error_message": None}
