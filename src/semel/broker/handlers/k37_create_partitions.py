"""CreatePartitions (37), versions 0-3. The new partitions are ready for records when it is answered.

Not done: quotas. Internal topics cannot grow here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.context import Reply, RequestContext
from semel.core.refusal import Refused
from semel.wire.server import respond

if TYPE_CHECKING:
    from semel.broker.state import Broker


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    names = [item.name for item in request.topics]
    items = {item.name: item for item in request.topics}
    return respond(
        request,
        results=[
            _answer(broker, context, item, is_repeated=names.count(name) > 1, validate_only=request.validate_only)
            for name, item in items.items()
        ],
    )


def _answer(
    broker: Broker, context: RequestContext, item: Any, *, is_repeated: bool, validate_only: bool
) -> Mapping[str, Any]:
    try:
        if is_repeated:
            raise Refused(ErrorCode.invalid_request, "Duplicate topic name.")
        if not broker.authorizer.allows(context, Operation.ALTER, ResourceType.TOPIC, item.name):
            raise Refused(ErrorCode.topic_authorization_failed, "Authorization failed.")
        assignments = None if item.assignments is None else [each.broker_ids for each in item.assignments]
        topic = broker.topics.decide_grow(item.name, item.count, broker.settings, assignments)
        if not validate_only:
            broker.topics.grow(topic)
    except Refused as refusal:
        return {"name": item.name, "error_code": refusal.code, "error_message": refusal.reason}
    return {"name": item.name, "error_code": ErrorCode.none, "error_message": None}
