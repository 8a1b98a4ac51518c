"""DeleteGroups (42), versions 0-2: groups without members, with all their offsets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.context import Reply, RequestContext
from semel.broker.pacing import answer_list, sliced
from semel.core.refusal import Refused

if TYPE_CHECKING:
    from semel.broker.state import Broker

_DELETIONS_AT_ONCE: Final = 32


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    group_ids = dict.fromkeys(request.groups_names)
    work = sliced(
        ({"group_id": group_id, "error_code": _delete(broker, context, group_id)} for group_id in group_ids),
        _DELETIONS_AT_ONCE,
    )
    return answer_list(broker, context, request, "results", work)


def _delete(broker: Broker, context: RequestContext, group_id: str) -> ErrorCode:
    if not broker.authorizer.allows(context, Operation.DELETE, ResourceType.GROUP, group_id):
        return ErrorCode.group_authorization_failed
    try:
        broker.groups.carry_out(group_id, broker.groups.coordinator.decide_delete_group(group_id))
    except Refused as refusal:
        broker.metrics.count_refusal(refusal.code)
        return refusal.code
    return ErrorCode.none
