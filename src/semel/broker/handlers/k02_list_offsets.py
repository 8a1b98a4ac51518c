"""ListOffsets (2), versions 1-8: where a partition begins and ends, and where a point in time lies in it.

The end is the last stable offset for readers who want committed records only. There is no second tier of storage, so
the earliest local offset (version 8) is the earliest one. A partition that is named twice is refused, as in Kafka.
A search by time that would take more memory than there is is refused for its partition: OFFSET_NOT_AVAILABLE if other
clients have it, POLICY_VIOLATION if the budget is too small for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.context import Answer, Reply, RequestContext
from semel.broker.pacing import Pace, Slices, answer_list
from semel.broker.storage.failures import StorageError
from semel.broker.storage.record_walk import are_codecs_loaded, load_codecs
from semel.core.refusal import Refused
from semel.errors import CorruptRecords, RecordTooLarge

if TYPE_CHECKING:
    from semel.broker.state import Broker
    from semel.broker.storage.partition import Partition

LATEST: Final = -1
EARLIEST: Final = -2
MAX_TIMESTAMP: Final = -3
EARLIEST_LOCAL: Final = -4
READ_COMMITTED: Final = 1
_NOT_AVAILABLE_SINCE: Final = 5
"""Clients try again after this error, and after the one that stood for it before."""
_ENDS: Final = frozenset({LATEST, EARLIEST, EARLIEST_LOCAL})
_NOWHERE: Final = (-1, -1)
T = TypeVar("T")


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    if not are_codecs_loaded() and any(
        one.timestamp not in _ENDS for topic in request.topics for one in topic.partitions
    ):
        return _load_codecs_and_handle(broker, context, request)
    return answer_list(broker, context, request, "topics", _list(broker, context, request))


async def _load_codecs_and_handle(broker: Broker, context: RequestContext, request: Any) -> Answer:
    await broker.durability.compute_aside(load_codecs)
    reply = handle(broker, context, request)
    return await reply if isinstance(reply, Awaitable) else reply


def _list(broker: Broker, context: RequestContext, request: Any) -> Slices[list[Mapping[str, Any]]]:
    is_committed = getattr(request, "isolation_level", 0) == READ_COMMITTED
    named: set[tuple[str, int]] = set()
    repeated: set[tuple[str, int]] = set()
    pace = Pace()
    for topic in request.topics:
        for one in topic.partitions:
            name = (topic.name, one.partition_index)
            (repeated if name in named else named).add(name)
            if pace.is_over():
                yield
    topics: list[Mapping[str, Any]] = []
    for topic in request.topics:
        answers: list[Mapping[str, Any]] = []
        for one in topic.partitions:
            is_repeated = (topic.name, one.partition_index) in repeated
            answers.append((yield from _answer(broker, context, topic.name, one, is_committed, is_repeated)))
            if pace.is_over():
                yield
        topics.append({"name": topic.name, "partitions": answers})
    return topics


def _answer(
    broker: Broker, context: RequestContext, topic: str, asked: Any, is_committed: bool, is_repeated: bool
) -> Slices[Mapping[str, Any]]:
    code, (timestamp_ms, offset), leader_epoch = ErrorCode.none, _NOWHERE, -1
    try:
        if not broker.authorizer.allows(context, Operation.DESCRIBE, ResourceType.TOPIC, topic):
            raise Refused(ErrorCode.topic_authorization_failed, topic)
        if is_repeated:  # as Kafka answers: a search by time could else be asked for a thousand times at once
            raise Refused(ErrorCode.invalid_request, topic)
        partition = broker.partition(topic, asked.partition_index)
        if partition is None:
            raise Refused(ErrorCode.unknown_topic_or_partition, topic)
        partition.log.leader_epochs.check_current(getattr(asked, "current_leader_epoch", -1))
        finding = _find(partition, asked.timestamp, is_committed, context)
        timestamp_ms, offset = yield from _while_connected(context, finding, _NOWHERE)
        if offset >= 0:
            leader_epoch = partition.log.leader_epochs.of(offset)
    except Refused as refusal:
        code = refusal.code
    except (CorruptRecords, RecordTooLarge, StorageError):
        code = ErrorCode.kafka_storage_error
    context.connection.note_working(0)
    return {
        "partition_index": asked.partition_index,
        "error_code": code,
        "timestamp": timestamp_ms,
        "offset": offset,
        "leader_epoch": leader_epoch,
    }


def _while_connected(context: RequestContext, work: Slices[T], otherwise: T) -> Slices[T]:
    """A search may take long, and nobody needs its result when the client has gone."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value
        yield
        if context.connection.is_closed:
            work.close()
            return otherwise


def _find(
    partition: Partition, timestamp_ms: int, is_committed: bool, context: RequestContext
) -> Slices[tuple[int, int]]:
    log = partition.log
    if timestamp_ms == LATEST:
        return -1, log.last_stable_offset if is_committed else log.high_watermark
    if timestamp_ms in (EARLIEST, EARLIEST_LOCAL):
        return -1, log.log_start_offset
    is_known = context.api_version >= _NOT_AVAILABLE_SINCE
    code = ErrorCode.offset_not_available if is_known else ErrorCode.leader_not_available

    def take_memory(held_bytes: int) -> None:
        context.connection.take_working(held_bytes, code)

    if timestamp_ms == MAX_TIMESTAMP:
        return (yield from partition.max_timestamp(take_memory)) or _NOWHERE
    if timestamp_ms < 0:
        raise Refused(ErrorCode.unsupported_version, f"{timestamp_ms} is no point in time that is known here")
    found = yield from partition.offset_for_timestamp(timestamp_ms, take_memory)
    end = log.last_stable_offset if is_committed else log.high_watermark
    return found if found is not None and found[1] < end else _NOWHERE
