"""JoinGroup (11), versions 0-9: a member joins a classic group, or joins it again for the next generation.

The answer waits for the end of the join phase. Not done: classic members in a group whose members use KIP-848, which
are refused with INCONSISTENT_GROUP_PROTOCOL while it has members.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.context import Answer, Reply, RequestContext
from semel.broker.pacing import answer_wide
from semel.core.classic_state import JoinReply, JoinRequest, MemberProtocol
from semel.core.group_coordinator import RECORD_BYTES
from semel.core.refusal import Refused
from semel.wire.server import respond

if TYPE_CHECKING:
    from semel.broker.state import Broker

_MEMBER_ID_REQUIRED_SINCE: Final = 4
_NULLABLE_PROTOCOL_SINCE: Final = 7
_SKIPPING_ASSIGNMENT_SINCE: Final = 9
# What could not be logged when the generation is complete is not held in memory until then either.
_METADATA_BYTES_MAX: Final = 1_048_588
# Kafka's clients have four at most. Each is compared with those of all other members.
_PROTOCOLS_MAX: Final = 32
_MS: Final = timedelta(milliseconds=1)


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    request_id, reply = broker.groups.wait_reply()
    try:
        if not broker.authorizer.allows(context, Operation.READ, ResourceType.GROUP, request.group_id):
            raise Refused(ErrorCode.group_authorization_failed, request.group_id)
        _check_size(request)
        join = _read(broker, context, request, request_id)
        broker.groups.table.take(2 * RECORD_BYTES + join.memory_bytes, ErrorCode.group_max_size_reached)
        decision = broker.groups.coordinator.decide_join(join, broker.clock.now_ms())
        broker.groups.carry_out(request.group_id, decision)
    except Refused as refusal:
        asyncio.ensure_future(reply).cancel()
        broker.metrics.count_refusal(refusal.code)
        return respond(request, **_fields(context, JoinReply(request.member_id, refusal.code)))
    return _wait_and_answer(broker, context, request, reply)


def _check_size(request: Any) -> None:
    if len(request.protocols) > _PROTOCOLS_MAX:
        raise Refused(ErrorCode.invalid_request, f"a member can have {_PROTOCOLS_MAX} protocols at most")
    if sum(len(protocol.name) + len(protocol.metadata) for protocol in request.protocols) > _METADATA_BYTES_MAX:
        raise Refused(ErrorCode.unknown_server_error, "the member's metadata is too large to be logged")


async def _wait_and_answer(
    broker: Broker, context: RequestContext, request: Any, reply: Awaitable[JoinReply]
) -> Answer:
    answer = await reply
    await broker.groups.wait_durable(request.group_id)
    # The leader is told all members, which takes long to write.
    written = answer_wide(broker, context, request, len(answer.members), _fields(context, answer))
    return await written if isinstance(written, Awaitable) else written


def _read(broker: Broker, context: RequestContext, request: Any, request_id: int) -> JoinRequest:
    instance_id = getattr(request, "group_instance_id", None)
    client_id = context.client_id or ""
    return JoinRequest(
        request.group_id,
        request_id,
        request.member_id,
        f"{instance_id or client_id}-{broker.new_id()}",
        request.protocol_type,
        tuple(MemberProtocol(protocol.name, protocol.metadata) for protocol in request.protocols),
        request.session_timeout // _MS,
        # Version 0 has one time-out for both.
        getattr(request, "rebalance_timeout", request.session_timeout) // _MS,
        instance_id,
        client_id,
        f"/{context.host}",
        requires_known_member_id=context.api_version >= _MEMBER_ID_REQUIRED_SINCE,
        supports_skipping_assignment=context.api_version >= _SKIPPING_ASSIGNMENT_SINCE,
    )


def _fields(context: RequestContext, reply: JoinReply) -> Mapping[str, Any]:
    protocol_name = reply.protocol_name
    if protocol_name is None and context.api_version < _NULLABLE_PROTOCOL_SINCE:
        protocol_name = ""
    return {
        "error_code": reply.code,
        "generation_id": reply.generation_id,
        "protocol_type": reply.protocol_type,
        "protocol_name": protocol_name,
        "leader": reply.leader_id,
        "skip_assignment": reply.skip_assignment,
        "member_id": reply.member_id,
        "members": [
            {
                "member_id": member.member_id,
                "group_instance_id": member.group_instance_id,
                "metadata": member.metadata,
            }
            for member in reply.members
        ],
    }
