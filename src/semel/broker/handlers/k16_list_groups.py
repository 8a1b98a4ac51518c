"""ListGroups (16), versions 0-5: all groups of both kinds, filtered by state (version 4) and type (version 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from semel.broker.acls import CLUSTER_NAME, Operation, ResourceType
from semel.broker.context import Answer, RequestContext
from semel.wire.server import respond

if TYPE_CHECKING:
    from semel.broker.state import Broker


def handle(broker: Broker, context: RequestContext, request: Any) -> Answer:
    allows = broker.authorizer.allows
    sees_all = allows(context, Operation.DESCRIBE, ResourceType.CLUSTER, CLUSTER_NAME)
    states = {state.lower() for state in getattr(request, "states_filter", ())}
    types = {group_type.lower() for group_type in getattr(request, "types_filter", ())}
    listed = [
        {
            "group_id": group.group_id,
            "protocol_type": group.protocol_type,
            "group_state": group.state,
            "group_type": group.group_type,
        }
        for group in broker.groups.coordinator.listed_groups()
        if (not states or group.state.lower() in states)
        and (not types or group.group_type in types)
        and (sees_all or allows(context, Operation.DESCRIBE, ResourceType.GROUP, group.group_id))
    ]
    return respond(request, error_code=ErrorCode.none, groups=listed)
