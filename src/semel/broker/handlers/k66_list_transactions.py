"""ListTransactions (66), versions 0-2: the known transactional ids, filtered by state, producer, age or name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.context import Reply, RequestContext
from semel.broker.pacing import Slices, answer_in_slices, sliced
from semel.core.refusal import Refused
from semel.core.transaction_listing import list_transactions

if TYPE_CHECKING:
    from semel.broker.state import Broker


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    return answer_in_slices(broker, context, request, _list(broker, context, request))


def _list(broker: Broker, context: RequestContext, request: Any) -> Slices[Mapping[str, Any]]:
    def may_describe(transactional_id: str) -> bool:
        return broker.authorizer.allows(context, Operation.DESCRIBE, ResourceType.TRANSACTIONAL_ID, transactional_id)

    try:
        listing = yield from list_transactions(
            broker.transactions.coordinator,
            now_ms=broker.clock.now_ms(),
            may_describe=may_describe,
            state_filters=request.state_filters,
            producer_id_filters=request.producer_id_filters,
            duration_filter_ms=getattr(request, "duration_filter", -1),
            transactional_id_pattern=getattr(request, "transactional_id_pattern", None),
        )
    except Refused as refusal:
        return {"error_code": refusal.code, "unknown_state_filters": [], "transaction_states": []}
    states = yield from sliced(
        {
            "transactional_id": metadata.transactional_id,
            "producer_id": metadata.producer_id,
            "transaction_state": metadata.status.title,
        }
        for metadata in listing.transactions
    )
    return {
        "error_code": ErrorCode.none,
        "unknown_state_filters": listing.unknown_state_filters,
        "transaction_states": states,
    }
