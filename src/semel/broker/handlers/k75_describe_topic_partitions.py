"""DescribeTopicPartitions (75), version 0: topics page by page, with a cursor. Eligible leaders are always none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.context import Reply, RequestContext
from semel.broker.pacing import ENTRIES_AT_ONCE, Pace, Slices, answer_in_slices
from semel.broker.topic_answers import missing_topic_code, partition_fields, topic_fields

if TYPE_CHECKING:
    from semel.broker.state import Broker


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    return answer_in_slices(broker, context, request, _answer(broker, context, request))


def _answer(broker: Broker, context: RequestContext, request: Any) -> Slices[Mapping[str, Any]]:
    everything = not request.topics
    names = {topic.name for topic in broker.topics} if everything else {item.name for item in request.topics}
    first, first_partition = ("", 0) if request.cursor is None else (request.cursor.topic_name, _start(request.cursor))
    room = max(1, min(request.response_partition_limit, broker.settings.request_partitions_max))
    answers: list[Mapping[str, Any]] = []
    next_cursor: Mapping[str, Any] | None = None
    pace = Pace()
    for name in sorted(name for name in names if name >= first):
        if pace.is_over():
            yield
        topic = broker.topics.get(name)
        if not broker.authorizer.allows(context, Operation.DESCRIBE, ResourceType.TOPIC, name):
            if not everything:
                answers.append(topic_fields(ErrorCode.topic_authorization_failed, name))
            continue
        operations = broker.authorizer.operations(context, ResourceType.TOPIC, name)
        if topic is None:
            answers.append(topic_fields(missing_topic_code(name), name, operations=operations))
            continue
        begin = first_partition if name == first else 0
        end = min(topic.partition_count, begin + room)
        if begin < end:
            partitions: list[Mapping[str, Any]] = []
            for start in range(begin, end, ENTRIES_AT_ONCE):
                if start > begin:
                    yield
                partitions += partition_fields(broker, topic, range(start, min(end, start + ENTRIES_AT_ONCE)))
            answers.append(topic_fields(ErrorCode.none, name, topic, partitions, operations))
            room -= end - begin
        if end < topic.partition_count:
            next_cursor = {"topic_name": name, "partition_index": max(begin, end)}
            break
    return {"topics": answers, "next_cursor": next_cursor}


def _start(cursor: Any) -> int:
    return max(0, cursor.partition_index)
