"""AddOffsetsToTxn (25), versions 0-4: the group whose offsets the transaction is about to commit (protocol 1)."""

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


def handle(broker: Broker, context: RequestContext, request: Any) -> Answer:
    code = ErrorCode.none
    try:
        _add(broker, context, request)
    except Refused as refusal:
        broker.metrics.count_refusal(refusal.code)
        code = refusal.code
        if code is ErrorCode.producer_fenced and context.api_version < FENCED_KNOWN_SINCE:
            code = ErrorCode.invalid_producer_epoch
    return respond(request, error_code=code)


def _add(broker: Broker, context: RequestContext, request: Any) -> None:
    allows = broker.authorizer.allows
    if not allows(context, Operation.WRITE, ResourceType.TRANSACTIONAL_ID, request.transactional_id):
        raise Refused(ErrorCode.transactional_id_authorization_failed, request.transactional_id)
    if not allows(context, Operation.READ, ResourceType.GROUP, request.group_id):
        raise Refused(ErrorCode.group_authorization_failed, request.group_id)
    broker.transactions.add_partitions(
        request.transactional_id,
        request.producer_id,
        request.producer_epoch,
        [broker.groups.partition_name_of(request.group_id)],
        client_version=0,
    )
