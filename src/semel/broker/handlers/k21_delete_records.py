"""DeleteRecords (21), versions 0-2: a partition begins later from now on. Internal topics are left alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.context import Reply, RequestContext
from semel.broker.pacing import answer_list, sliced_partitions
from semel.broker.topics import DISK_FAILURES
from semel.core.refusal import Refused

if TYPE_CHECKING:
    from semel.broker.state import Broker

_UNKNOWN_OFFSET: Final = -1


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    # Each is synced before the next.
    work = sliced_partitions(request.topics, lambda name, asked: _answer(broker, context, name, asked), at_once=1)
    return answer_list(broker, context, request, "topics", work)


def _answer(broker: Broker, context: RequestContext, name: str, asked: Any) -> Mapping[str, Any]:
    code, low_watermark = ErrorCode.none, _UNKNOWN_OFFSET
    try:
        low_watermark = _delete(broker, context, name, asked.partition_index, asked.offset)
    except Refused as refusal:
        code = refusal.code
    except DISK_FAILURES as error:
        broker.note_storage_error(error)
        code = ErrorCode.kafka_storage_error
    return {"partition_index": asked.partition_index, "low_watermark": low_watermark, "error_code": code}


def _delete(broker: Broker, context: RequestContext, name: str, index: int, offset: int) -> int:
    if not broker.authorizer.allows(context, Operation.DELETE, ResourceType.TOPIC, name):
        raise Refused(ErrorCode.topic_authorization_failed, "Authorization failed.")
    topic = broker.topics.get(name)
    partition = broker.partition(name, index)
    if topic is None or partition is None:
        raise Refused(ErrorCode.unknown_topic_or_partition, "This server does not host this topic-partition.")
    if topic.is_internal:
        raise Refused(ErrorCode.invalid_topic_exception, f"The records of internal topic {name} cannot be deleted.")
    if not partition.settings.deletes:
        # A compacted topic is the newest value of every key: cutting it off would silently drop keys.
        raise Refused(ErrorCode.policy_violation, f"The cleanup policy of {name} does not let records be deleted.")
    return partition.delete_records(offset)
