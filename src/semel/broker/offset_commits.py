"""What OffsetCommit and TxnOffsetCommit have in common: which partitions may be committed, and the answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.context import Answer, Reply, RequestContext
from semel.broker.pacing import Slices, answer_in_slices, answer_wide
from semel.core.group_offsets import OffsetCommit, TopicPartition
from semel.core.refusal import Refused

if TYPE_CHECKING:
    from semel.broker.state import Broker

Codes = Mapping[TopicPartition, ErrorCode]
COMMITS_AT_ONCE: Final = 256
"""Each of them is written to the log and to the group's table."""


def commit_and_answer(
    broker: Broker,
    context: RequestContext,
    request: Any,
    check: Callable[[], None],
    commit: Callable[[list[OffsetCommit]], Codes],
    code_for_client: Callable[[ErrorCode], ErrorCode] = lambda code: code,
    wait_safe: Callable[[], Awaitable[None] | None] = lambda: None,
) -> Reply:
    """`commit` the positions of a request, some hundreds at a time, and answer what became of each.

    The answer waits for what `wait_safe` returns, if anything. `check` and `commit` raise Refused. What was committed
    before a refusal stays, as each partition has its own code.
    """
    return answer_in_slices(
        broker, context, request, _commit_all(broker, context, request, check, commit, code_for_client, wait_safe)
    )


def _commit_all(
    broker: Broker,
    context: RequestContext,
    request: Any,
    check: Callable[[], None],
    commit: Callable[[list[OffsetCommit]], Codes],
    code_for_client: Callable[[ErrorCode], ErrorCode],
    wait_safe: Callable[[], Awaitable[None] | None],
) -> Slices[Mapping[str, Any] | Reply]:
    codes: dict[TopicPartition, ErrorCode] = {}
    otherwise, has_committed = ErrorCode.none, False
    try:
        check()
        positions = _positions(request)
        while chunk := list(islice(positions, COMMITS_AT_ONCE)):
            if has_committed:
                yield
            commits = [one for one in chunk if _is_possible(broker, context, one, codes)]
            if commits:
                codes.update(commit(commits))
            has_committed = True
    except Refused as refusal:
        broker.metrics.count_refusal(refusal.code)
        otherwise = code_for_client(refusal.code)
    if otherwise is ErrorCode.none and has_committed:
        safe = wait_safe()
        if safe is None and broker.acknowledges_after_sync:
            safe = broker.groups.wait_durable(request.group_id)
        if safe is not None:
            return _answer_when_safe(broker, context, request, codes, safe)
    return {"topics": _topics(request, codes, otherwise)}


def _positions(request: Any) -> Iterator[OffsetCommit]:
    for topic in request.topics:
        for partition in topic.partitions:
            yield OffsetCommit(
                topic.name,
                partition.partition_index,
                partition.committed_offset,
                getattr(partition, "committed_leader_epoch", -1),
                partition.committed_metadata,
            )


def _is_possible(
    broker: Broker, context: RequestContext, commit: OffsetCommit, codes: dict[TopicPartition, ErrorCode]
) -> bool:
    """Whether there is such a partition, and for this client. Otherwise its code is noted."""
    where = (commit.topic, commit.partition)
    if not broker.authorizer.allows(context, Operation.READ, ResourceType.TOPIC, commit.topic):
        codes[where] = ErrorCode.topic_authorization_failed
    elif broker.partition(*where) is None:
        codes[where] = ErrorCode.unknown_topic_or_partition
    return where not in codes


def _topics(request: Any, codes: Mapping[TopicPartition, ErrorCode], otherwise: ErrorCode) -> list[Mapping[str, Any]]:
    """Every partition asked for with its code, or with `otherwise` where it has none of its own."""
    return [
        {
            "name": topic.name,
            "partitions": [
                {
                    "partition_index": partition.partition_index,
                    "error_code": codes.get((topic.name, partition.partition_index), otherwise),
                }
                for partition in topic.partitions
            ],
        }
        for topic in request.topics
    ]


async def _answer_when_safe(
    broker: Broker, context: RequestContext, request: Any, codes: Codes, safe: Awaitable[None]
) -> Answer:
    """The same, once the offsets survive the loss of power."""
    await safe
    reply = answer_wide(broker, context, request, len(codes), {"topics": _topics(request, codes, ErrorCode.none)})
    return await reply if isinstance(reply, Awaitable) else reply
