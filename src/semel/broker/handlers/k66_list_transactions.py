"""ListTransactions (66), versions 0-2: the known transactional ids, filtered by state, producer, age or name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.context import Answer, RequestContext
from semel.core.refusal import Refused
from semel.core.transaction_listing import list_transactions
from semel.wire.server import respond

if TYPE_CHECKING:
    from semel.broker.state import Broker


def handle(broker: Broker, context: RequestContext, request: Any) -> Answer:
    try:
        listing = list_transactions(
            broker.transactions.coordinator,
            now_ms=broker.clock.now_ms(),
            state_filters=request.state_filters,
            producer_id_filters=request.producer_id_filters,
            duration_filter_ms=getattr(request, "duration_filter", -1),
            transactional_id_pattern=getattr(request, "transactional_id_pattern", None),
        )
    except Refused as refusal:
        return respond(request, error_code=refusal.code, unknown_state_filters=[], transaction_states=[])
    allows = broker.authorizer.allows
    return respond(
        request,
        error_code=ErrorCode.none,
        unknown_state_filters=listing.unknown_state_filters,
        transaction_states=[
            {
                "transactional_id": metadata.transactional_id,
                "producer_id": metadata.producer_id,
                "transaction_state": metadata.status.title,
            }
            for metadata in listing.transactions
            if allows(context, Operation.DESCRIBE, ResourceType.TRANSACTIONAL_ID, metadata.transactional_id)
        ],
    )
