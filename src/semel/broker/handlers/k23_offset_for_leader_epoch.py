"""OffsetForLeaderEpoch (23), versions 2-4: where a leader's time ended.

There is one broker, and a new epoch begins when a power cut may have taken records that were readable before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.context import Reply, RequestContext
from semel.broker.pacing import answer_list, sliced_partitions
from semel.core.leader_epochs import UNDEFINED
from semel.core.refusal import Refused

if TYPE_CHECKING:
    from semel.broker.state import Broker


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    work = sliced_partitions(request.topics, lambda name, asked: _answer(broker, context, name, asked), name="topic")
    return answer_list(broker, context, request, "topics", work)


def _answer(broker: Broker, context: RequestContext, name: str, asked: Any) -> Mapping[str, Any]:
    code, (epoch, end_offset) = ErrorCode.none, UNDEFINED
    try:
        epoch, end_offset = _find(broker, context, name, asked)
    except Refused as refusal:
        code = refusal.code
    return {"error_code": code, "partition": asked.partition, "leader_epoch": epoch, "end_offset": end_offset}


def _find(broker: Broker, context: RequestContext, name: str, asked: Any) -> tuple[int, int]:
    if not broker.authorizer.allows(context, Operation.DESCRIBE, ResourceType.TOPIC, name):
        raise Refused(ErrorCode.topic_authorization_failed, "Authorization failed.")
    partition = broker.partition(name, asked.partition)
    if partition is None:
        raise Refused(ErrorCode.unknown_topic_or_partition, "This server does not host this topic-partition.")
    partition.log.leader_epochs.check_current(asked.current_leader_epoch)
    # The end of the log, not what is synced: a client compares it with positions that it has read, which lie below.
    return partition.log.leader_epochs.end_of(asked.leader_epoch, partition.log.log_end_offset)
