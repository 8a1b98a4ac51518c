"""SaslAuthenticate, versions 0-2: a token of the mechanism chosen before. Version 1 tells how long a session lasts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from semel.broker.sasl import AuthenticateAnswer, not_expected
from semel.wire.server import respond

if TYPE_CHECKING:
    from semel.broker.context import Reply, RequestContext
    from semel.broker.state import Broker


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    sasl = context.connection.sasl
    if sasl is None:  # a listener without logins
        return _answer(request, not_expected())
    was_complete = sasl.is_complete
    answer = sasl.authenticate(bytes(request.auth_bytes))
    if sasl.is_complete and not was_complete:
        context.connection.authenticated(sasl.principal)
    return _answer(request, answer)


def _answer(request: Any, answer: AuthenticateAnswer) -> Reply:
    return respond(
        request,
        error_code=answer.code,
        error_message=answer.message,
        auth_bytes=answer.token,
        session_lifetime=answer.session_lifetime_ms,
    )
