"""Heartbeat (12), versions 0-4: a classic group's member is alive, and learns that it has to join again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.context import Answer, RequestContext
from semel.core.group_coordinator import Committer
from semel.core.refusal import Refused
from semel.wire.server import respond

if TYPE_CHECKING:
    from semel.broker.state import Broker


def handle(broker: Broker, context: RequestContext, request: Any) -> Answer:
    try:
        code = _beat(broker, context, request)
    except Refused as refusal:
        broker.metrics.count_refusal(refusal.code)
        code = refusal.code
    return respond(request, error_code=code)


def _beat(broker: Broker, context: RequestContext, request: Any) -> ErrorCode:
    if not broker.authorizer.allows(context, Operation.READ, ResourceType.GROUP, request.group_id):
        raise Refused(ErrorCode.group_authorization_failed, request.group_id)
    member = Committer(request.member_id, request.generation_id, getattr(request, "group_instance_id", None))
    decision = broker.groups.coordinator.decide_heartbeat(request.group_id, member, broker.clock.now_ms())
    broker.groups.carry_out(request.group_id, decision)
    return decision.code
