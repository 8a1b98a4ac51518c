"""ListGroups (16), versions 0-5: all groups of both kinds, filtered by state (version 4) and type (version 5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from semel.broker.acls import CLUSTER_NAME, Operation, ResourceType
from semel.broker.context import Reply, RequestContext
from semel.broker.pacing import Pace, Slices, answer_in_slices

if TYPE_CHECKING:
    from semel.broker.state import Broker


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    return answer_in_slices(broker, context, request, _list(broker, context, request))


def _list(broker: Broker, context: RequestContext, request: Any) -> Slices[Mapping[str, Any]]:
    allows = broker.authorizer.allows
    sees_all = allows(context, Operation.DESCRIBE, ResourceType.CLUSTER, CLUSTER_NAME)
    states = {state.lower() for state in getattr(request, "states_filter", ())}
    types = {group_type.lower() for group_type in getattr(request, "types_filter", ())}
    pace = Pace()
    listed: list[Mapping[str, Any]] = []
    for group_id in broker.groups.coordinator.group_ids():
        if pace.is_over():
            yield
        group = broker.groups.coordinator.listed_group(group_id)
        if (
            group is not None
            and (not states or group.state.lower() in states)
            and (not types or group.group_type in types)
            and (sees_all or allows(context, Operation.DESCRIBE, ResourceType.GROUP, group_id))
        ):
            listed.append(
                {
                    "group_id": group_id,
                    "protocol_type": group.protocol_type,
                    "group_state": group.state,
                    "group_type": group.group_type,
                }
            )
    return {"error_code": ErrorCode.none, "groups": listed}
