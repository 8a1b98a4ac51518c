"""SyncGroup (14), versions 0-5: a member asks for its assignment; the leader's request brings those of all.

The answer waits for the leader's assignment, which is logged first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.context import Answer, Reply, RequestContext
from semel.core.classic_state import SyncReply, SyncRequest
from semel.core.refusal import Refused
from semel.wire.server import respond

if TYPE_CHECKING:
    from semel.broker.state import Broker


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    request_id, reply = broker.groups.wait_reply()
    try:
        if not broker.authorizer.allows(context, Operation.READ, ResourceType.GROUP, request.group_id):
            raise Refused(ErrorCode.group_authorization_failed, request.group_id)
        sync = SyncRequest(
            request.group_id,
            request_id,
            request.member_id,
            request.generation_id,
            {assignment.member_id: assignment.assignment for assignment in request.assignments},
            getattr(request, "group_instance_id", None),
            getattr(request, "protocol_type", None),
            getattr(request, "protocol_name", None),
        )
        decision = broker.groups.coordinator.decide_sync(sync, broker.clock.now_ms())
        broker.groups.carry_out(request.group_id, decision)
    except Refused as refusal:
        asyncio.ensure_future(reply).cancel()
        broker.metrics.count_refusal(refusal.code)
        return _answer(request, SyncReply(refusal.code))
    return _wait_and_answer(broker, request, reply)


async def _wait_and_answer(broker: Broker, request: Any, reply: Awaitable[SyncReply]) -> Answer:
    answer = await reply
    await broker.groups.wait_durable(request.group_id)
    return _answer(request, answer)


def _answer(request: Any, reply: SyncReply) -> Answer:
    return respond(
        request,
        error_code=reply.code,
        protocol_type=reply.protocol_type,
        protocol_name=reply.protocol_name,
        assignment=reply.assignment,
    )
