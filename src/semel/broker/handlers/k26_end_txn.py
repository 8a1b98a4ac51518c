"""EndTxn (26), versions 0-5: commit or abort. Version 5 is transaction protocol 2 and answers with the next epoch.

The answer comes when the outcome is safe and its markers are written, so that a client never has to wait for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.context import Answer, RequestContext
from semel.core.refusal import Refused
from semel.wire.server import respond

if TYPE_CHECKING:
    from semel.broker.state import Broker

FENCED_KNOWN_SINCE = 2
PROTOCOL_2_SINCE = 5


async def handle(broker: Broker, context: RequestContext, request: Any) -> Answer:
    transactional_id: str = request.transactional_id
    try:
        if not broker.authorizer.allows(context, Operation.WRITE, ResourceType.TRANSACTIONAL_ID, transactional_id):
            raise Refused(ErrorCode.transactional_id_authorization_failed, transactional_id)
        identity = await broker.transactions.end(
            transactional_id,
            request.producer_id,
            request.producer_epoch,
            request.committed,
            client_version=2 if context.api_version >= PROTOCOL_2_SINCE else 0,
        )
    except Refused as refusal:
        broker.metrics.count_refusal(refusal.code)
        code = refusal.code
        if code is ErrorCode.producer_fenced and context.api_version < FENCED_KNOWN_SINCE:
            code = ErrorCode.invalid_producer_epoch
        return respond(request, error_code=code, producer_id=-1, producer_epoch=-1)
    return respond(
        request, error_code=ErrorCode.none, producer_id=identity.producer_id, producer_epoch=identity.producer_epoch
    )
