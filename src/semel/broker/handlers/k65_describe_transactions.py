"""DescribeTransactions (65), version 0: who owns a transactional id and what its transaction has written to."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.context import Reply, RequestContext
from semel.broker.pacing import answer_list, sliced
from semel.core.refusal import Refused
from semel.core.transaction_listing import describe_transaction

if TYPE_CHECKING:
    from semel.broker.state import Broker


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    found = (_describe(broker, context, name) for name in dict.fromkeys(request.transactional_ids))
    work = sliced(found, weigh=lambda state: 1 + len(state["topics"]))
    return answer_list(broker, context, request, "transaction_states", work)


def _describe(broker: Broker, context: RequestContext, transactional_id: str) -> dict[str, Any]:
    if not broker.authorizer.allows(context, Operation.DESCRIBE, ResourceType.TRANSACTIONAL_ID, transactional_id):
        return _unknown(transactional_id, ErrorCode.transactional_id_authorization_failed)
    try:
        metadata = describe_transaction(broker.transactions.coordinator, transactional_id)
    except Refused as refusal:
        return _unknown(transactional_id, refusal.code)
    topics: dict[str, list[int]] = defaultdict(list)
    for topic, index in sorted(metadata.partitions):
        if broker.authorizer.allows(context, Operation.DESCRIBE, ResourceType.TOPIC, topic):
            topics[topic].append(index)
    return {
        "error_code": ErrorCode.none,
        "transactional_id": transactional_id,
        "transaction_state": metadata.status.title,
        "transaction_timeout": metadata.timeout_ms,
        "transaction_start_time_ms": metadata.start_ms,
        "producer_id": metadata.producer_id,
        "producer_epoch": metadata.producer_epoch,
        "topics": [{"topic": topic, "partitions": indexes} for topic, indexes in topics.items()],
    }


def _unknown(transactional_id: str, code: ErrorCode) -> dict[str, Any]:
    return {
        "error_code": code,
        "transactional_id": transactional_id,
        "transaction_state": "",
        "transaction_timeout": 0,
        "transaction_start_time_ms": -1,
        "producer_id": -1,
        "producer_epoch": -1,
        "topics": [],
    }
