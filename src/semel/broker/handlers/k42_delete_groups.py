"""DeleteGroups (42), versions 0-2: groups without members, with all their offsets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.context import Answer, RequestContext
from semel.core.refusal import Refused
from semel.wire.server import respond

if TYPE_CHECKING:
    from semel.broker.state import Broker


def handle(broker: Broker, context: RequestContext, request: Any) -> Answer:
    group_ids = dict.fromkeys(request.groups_names)
    return respond(
        request,
        results=[{"group_id": group_id, "error_code": _delete(broker, context, group_id)} for group_id in group_ids],
    )


def _delete(broker: Broker, context: RequestContext, group_id: str) -> ErrorCode:
    if not broker.authorizer.allows(context, Operation.DELETE, ResourceType.GROUP, group_id):
        return ErrorCode.group_authorization_failed
    try:
        broker.groups.carry_out(group_id, broker.groups.coordinator.decide_delete_group(group_id))
    except Refused as refusal:
        broker.metrics.count_refusal(refusal.code)
        return refusal.code
    return ErrorCode.none
