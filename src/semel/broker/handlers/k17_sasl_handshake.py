"""SaslHandshake, versions 0-1: the client chooses a mechanism. After version 0 bare tokens follow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from semel.wire.server import respond

if TYPE_CHECKING:
    from semel.broker.context import Reply, RequestContext
    from semel.broker.state import Broker


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    sasl = context.connection.sasl
    if sasl is None:  # a listener without logins
        return respond(request, error_code=ErrorCode.illegal_sasl_state, mechanisms=())
    answer = sasl.handshake(request.mechanism, context.api_version)
    return respond(request, error_code=answer.code, mechanisms=answer.mechanisms)
