"""AddPartitionsToTxn (24), versions 0-3: partitions that the transaction is about to write to (protocol 1).

Not done: versions 4 and above, which brokers speak among themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.context import Reply, RequestContext
from semel.broker.pacing import answer_wide
from semel.broker.transaction_runtime import CONSUMER_OFFSETS, TRANSACTION_STATE
from semel.core.refusal import Refused

if TYPE_CHECKING:
    from semel.broker.state import Broker

FENCED_KNOWN_SINCE = 2


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    transactional_id: str = request.v3_and_below_transactional_id
    wanted = [(topic.name, index) for topic in request.v3_and_below_topics for index in topic.partitions]
    if not broker.authorizer.allows(context, Operation.WRITE, ResourceType.TRANSACTIONAL_ID, transactional_id):
        failed = dict.fromkeys(wanted, ErrorCode.transactional_id_authorization_failed)
        return _answer(broker, context, request, failed)
    codes = {partition: _code_before_adding(broker, context, *partition) for partition in wanted}
    if any(code is not ErrorCode.none for code in codes.values()):
        # All or none: the ones that could have been added are told that they were not.
        return _answer(
            broker,
            context,
            request,
            {one: ErrorCode.operation_not_attempted if code is ErrorCode.none else code for one, code in codes.items()},
        )
    try:
        broker.transactions.add_partitions(
            transactional_id,
            request.v3_and_below_producer_id,
            request.v3_and_below_producer_epoch,
            wanted,
            client_version=0,
        )
    except Refused as refusal:
        broker.metrics.count_refusal(refusal.code)
        code = refusal.code
        if code is ErrorCode.producer_fenced and context.api_version < FENCED_KNOWN_SINCE:
            code = ErrorCode.invalid_producer_epoch
        return _answer(broker, context, request, dict.fromkeys(wanted, code))
    return _answer(broker, context, request, codes)


def _code_before_adding(broker: Broker, context: RequestContext, topic: str, index: int) -> ErrorCode:
    if topic in (CONSUMER_OFFSETS, TRANSACTION_STATE) or not broker.authorizer.allows(
        context, Operation.WRITE, ResourceType.TOPIC, topic
    ):
        return ErrorCode.topic_authorization_failed
    if broker.partition(topic, index) is None:
        return ErrorCode.unknown_topic_or_partition
    return ErrorCode.none


def _answer(broker: Broker, context: RequestContext, request: Any, codes: dict[tuple[str, int], ErrorCode]) -> Reply:
    topics = [
        {
            "name": topic.name,
            "results_by_partition": [
                {"partition_index": index, "partition_error_code": codes[topic.name, index]}
                for index in topic.partitions
            ],
        }
        for topic in request.v3_and_below_topics
    ]
    entries = len(codes) + len(topics)
    return answer_wide(broker, context, request, entries, {"results_by_topic_v3_and_below": topics})
