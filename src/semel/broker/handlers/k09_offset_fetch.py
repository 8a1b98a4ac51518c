"""OffsetFetch (9), versions 1-9: committed positions of a group; of several groups from version 8.

RequireStable (7) holds back partitions with offsets of an open transaction (KIP-447); member epochs (9) are checked for
KIP-848 groups. Not done: version 10, which names topics by id.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.context import Reply, RequestContext
from semel.broker.pacing import answer_list, answer_wide, sliced
from semel.core.group_offsets import FetchedOffset, TopicPartition
from semel.core.refusal import Refused

if TYPE_CHECKING:
    from semel.broker.state import Broker

_GROUP_ERRORS_SINCE: Final = 2
_SEVERAL_GROUPS_SINCE: Final = 8
_NOTHING: Final = -1


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    if context.api_version >= _SEVERAL_GROUPS_SINCE:
        groups = {group.group_id: group for group in request.groups}  # each once: all offsets of one may be many
        fetched_groups = (_fetch_or_code(broker, context, request, group) for group in groups.values())
        return answer_list(broker, context, request, "groups", sliced(fetched_groups, weigh=_entries))
    fetched = _fetch_or_code(broker, context, request, request)
    if fetched["error_code"] is not ErrorCode.none and context.api_version < _GROUP_ERRORS_SINCE:
        asked = [(topic.name, index) for topic in request.topics for index in topic.partition_indexes]
        failed = FetchedOffset(code=fetched["error_code"])
        fetched["topics"] = _by_topic(dict.fromkeys(asked, failed))
    return answer_wide(
        broker,
        context,
        request,
        _entries(fetched),
        {"topics": fetched["topics"], "error_code": fetched["error_code"]},
    )


def _entries(fetched: Mapping[str, Any]) -> int:
    return 1 + sum(1 + len(topic["partitions"]) for topic in fetched["topics"])


def _fetch_or_code(broker: Broker, context: RequestContext, request: Any, group: Any) -> dict[str, Any]:
    try:
        fetched = _fetch(broker, context, group, require_stable=getattr(request, "require_stable", False))
    except Refused as refusal:
        broker.metrics.count_refusal(refusal.code)
        return {"group_id": group.group_id, "topics": [], "error_code": refusal.code}
    return {"group_id": group.group_id, "topics": _by_topic(fetched), "error_code": ErrorCode.none}


def _fetch(
    broker: Broker, context: RequestContext, group: Any, *, require_stable: bool
) -> dict[TopicPartition, FetchedOffset]:
    allows = broker.authorizer.allows
    if not allows(context, Operation.DESCRIBE, ResourceType.GROUP, group.group_id):
        raise Refused(ErrorCode.group_authorization_failed, group.group_id)
    asked = None
    if group.topics is not None:
        asked = [(topic.name, index) for topic in group.topics for index in topic.partition_indexes]
    fetched = broker.groups.coordinator.decide_fetch(
        group.group_id,
        asked,
        require_stable=require_stable,
        member_id=getattr(group, "member_id", None),
        member_epoch=getattr(group, "member_epoch", -1),
    )
    hidden = {
        topic
        for topic in {topic for topic, _ in fetched}
        if not allows(context, Operation.DESCRIBE, ResourceType.TOPIC, topic)
    }
    if asked is None:
        return {where: offset for where, offset in fetched.items() if where[0] not in hidden}
    refused = FetchedOffset(code=ErrorCode.topic_authorization_failed)
    return {where: refused if where[0] in hidden else offset for where, offset in fetched.items()}


def _by_topic(fetched: Mapping[TopicPartition, FetchedOffset]) -> list[dict[str, Any]]:
    topics: dict[str, list[dict[str, Any]]] = {}
    for (topic, index), offset in fetched.items():
        value = offset.value
        topics.setdefault(topic, []).append(
            {
                "partition_index": index,
                "committed_offset": _NOTHING if value is None else value.offset,
                "committed_leader_epoch": _NOTHING if value is None else value.leader_epoch,
                "metadata": "" if value is None else value.metadata,
                "error_code": offset.code,
            }
        )
    return [{"name": topic, "partitions": partitions} for topic, partitions in topics.items()]
