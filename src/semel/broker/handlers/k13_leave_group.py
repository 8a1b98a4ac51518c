"""LeaveGroup (13), versions 0-5: members leave a classic group; from version 3 several at once, or by instance id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.context import Reply, RequestContext
from semel.broker.pacing import ENTRIES_AT_ONCE, Slices, answer_in_slices
from semel.core.classic_state import MemberIdentity
from semel.core.refusal import Refused

if TYPE_CHECKING:
    from semel.broker.state import Broker

_SEVERAL_MEMBERS_SINCE: Final = 3


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    return answer_in_slices(broker, context, request, _answer(broker, context, request))


def _answer(broker: Broker, context: RequestContext, request: Any) -> Slices[Mapping[str, Any]]:
    """Some members at a time, as if they had been named in several requests."""
    members = _read(context, request)
    answers: list[Mapping[str, Any]] = []
    for begin in range(0, max(1, len(members)), ENTRIES_AT_ONCE):
        if begin:
            yield
        some = members[begin : begin + ENTRIES_AT_ONCE]
        try:
            left = _leave(broker, context, request.group_id, some)
        except Refused as refusal:
            broker.metrics.count_refusal(refusal.code)
            if refusal.code is not ErrorCode.unknown_member_id and not begin:
                return {"error_code": refusal.code, "members": []}
            # There is no such group: then none of them is a member. Or others have left already, which is said.
            left = (refusal.code,) * len(some)
        answers += [
            {"member_id": member.member_id, "group_instance_id": member.group_instance_id, "error_code": code}
            for member, code in zip(some, left, strict=True)
        ]
    if context.api_version < _SEVERAL_MEMBERS_SINCE:
        return {"error_code": answers[0]["error_code"]}
    return {"error_code": ErrorCode.none, "members": answers}


def _read(context: RequestContext, request: Any) -> list[MemberIdentity]:
    if context.api_version < _SEVERAL_MEMBERS_SINCE:
        return [MemberIdentity(request.member_id)]
    return [MemberIdentity(member.member_id, member.group_instance_id) for member in request.members]


def _leave(
    broker: Broker, context: RequestContext, group_id: str, members: Sequence[MemberIdentity]
) -> tuple[ErrorCode, ...]:
    if not broker.authorizer.allows(context, Operation.READ, ResourceType.GROUP, group_id):
        raise Refused(ErrorCode.group_authorization_failed, group_id)
    decision = broker.groups.coordinator.decide_leave(group_id, members, broker.clock.now_ms())
    broker.groups.carry_out(group_id, decision)
    return decision.left
