"""DescribeGroups (15), versions 0-6: members and assignments of classic groups.

A KIP-848 group is not told here, as in Kafka: ConsumerGroupDescribe does that. What is not there is "Dead", from
version 6 also GROUP_ID_NOT_FOUND.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.context import Reply, RequestContext
from semel.broker.pacing import answer_list, sliced
from semel.core.classic_state import ClassicGroup, GroupState

if TYPE_CHECKING:
    from semel.broker.state import Broker

_NOT_FOUND_SINCE: Final = 6
_NOT_ASKED_FOR: Final = -(2**31)


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    group_ids = dict.fromkeys(request.groups)  # each once, however often it is named: a group may be large
    found = (_describe(broker, context, request, group_id) for group_id in group_ids)
    work = sliced(found, weigh=lambda group: 1 + len(group["members"]))
    return answer_list(broker, context, request, "groups", work)


def _describe(broker: Broker, context: RequestContext, request: Any, group_id: str) -> dict[str, Any]:
    if not broker.authorizer.allows(context, Operation.DESCRIBE, ResourceType.GROUP, group_id):
        return _nothing(group_id, ErrorCode.group_authorization_failed, state="")
    group = broker.groups.coordinator.classic_group(group_id)
    if group is None:
        knows_code = context.api_version >= _NOT_FOUND_SINCE
        code = ErrorCode.group_id_not_found if knows_code else ErrorCode.none
        return _nothing(group_id, code, state="Dead", message=f"There is no classic group {group_id!r}.")
    operations = _NOT_ASKED_FOR
    if getattr(request, "include_authorized_operations", False):
        operations = broker.authorizer.operations(context, ResourceType.GROUP, group_id)
    return {
        "error_code": ErrorCode.none,
        "error_message": None,
        "group_id": group_id,
        "group_state": group.state.value,
        "protocol_type": group.protocol_type or "",
        "authorized_operations": operations,
        **_members(group),
    }


def _members(group: ClassicGroup) -> dict[str, Any]:
    # Until a generation is complete, subscriptions and assignments do not fit together.
    is_stable = group.state is GroupState.STABLE
    return {
        "protocol_data": (group.protocol_name or "") if is_stable else "",
        "members": [
            {
                "member_id": member.member_id,
                "group_instance_id": member.group_instance_id,
                "client_id": member.client_id,
                "client_host": member.client_host,
                "member_metadata": member.metadata_for(group.protocol_name) if is_stable else b"",
                "member_assignment": member.assignment if is_stable else b"",
            }
            for member in group.members.values()
        ],
    }


def _nothing(group_id: str, code: ErrorCode, *, state: str, message: str | None = None) -> dict[str, Any]:
    return {
        "error_code": code,
        "error_message": message,
        "group_id": group_id,
        "group_state": state,
        "protocol_type": "",
        "protocol_data": "",
        "members": [],
        "authorized_operations": _NOT_ASKED_FOR,
    }
