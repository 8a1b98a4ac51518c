"""ListOffsets (2), versions 1-8: where a partition begins and ends, and where a point in time lies in it.

The end is the last stable offset for readers who want committed records only. There is no second tier of storage, so
the earliest local offset (version 8) is the earliest one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.context import Answer, RequestContext
from semel.core.refusal import Refused
from semel.errors import CorruptRecords
from semel.wire.server import respond

if TYPE_CHECKING:
    from semel.broker.state import Broker
    from semel.broker.storage.partition import Partition

LATEST: Final = -1
EARLIEST: Final = -2
MAX_TIMESTAMP: Final = -3
EARLIEST_LOCAL: Final = -4
READ_COMMITTED: Final = 1
_NOWHERE: Final = (-1, -1)


def handle(broker: Broker, context: RequestContext, request: Any) -> Answer:
    is_committed = getattr(request, "isolation_level", 0) == READ_COMMITTED
    return respond(
        request,
        topics=[
            {
                "name": topic.name,
                "partitions": [_answer(broker, context, topic.name, one, is_committed) for one in topic.partitions],
            }
            for topic in request.topics
        ],
    )


def _answer(broker: Broker, context: RequestContext, topic: str, asked: Any, is_committed: bool) -> dict[str, Any]:
    code, (timestamp_ms, offset), leader_epoch = ErrorCode.none, _NOWHERE, -1
    try:
        if not broker.authorizer.allows(context, Operation.DESCRIBE, ResourceType.TOPIC, topic):
            raise Refused(ErrorCode.topic_authorization_failed, topic)
        partition = broker.partition(topic, asked.partition_index)
        if partition is None:
            raise Refused(ErrorCode.unknown_topic_or_partition, topic)
        partition.log.leader_epochs.check_current(getattr(asked, "current_leader_epoch", -1))
        timestamp_ms, offset = _find(partition, asked.timestamp, is_committed)
        if offset >= 0:
            leader_epoch = partition.log.leader_epochs.of(offset)
    except Refused as refusal:
        code = refusal.code
    except CorruptRecords:
        code = ErrorCode.kafka_storage_error
    return {
        "partition_index": asked.partition_index,
        "error_code": code,
        "timestamp": timestamp_ms,
        "offset": offset,
        "leader_epoch": leader_epoch,
    }


def _find(partition: Partition, timestamp_ms: int, is_committed: bool) -> tuple[int, int]:
    log = partition.log
    if timestamp_ms == LATEST:
        return -1, log.last_stable_offset if is_committed else log.high_watermark
    if timestamp_ms in (EARLIEST, EARLIEST_LOCAL):
        return -1, log.log_start_offset
    if timestamp_ms == MAX_TIMESTAMP:
        return partition.max_timestamp() or _NOWHERE
    if timestamp_ms < 0:
        raise Refused(ErrorCode.unsupported_version, f"{timestamp_ms} is no point in time that is known here")
    found = partition.offset_for_timestamp(timestamp_ms)
    end = log.last_stable_offset if is_committed else log.high_watermark
    return found if found is not None and found[1] < end else _NOWHERE
