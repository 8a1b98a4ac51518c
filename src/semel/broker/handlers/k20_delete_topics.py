"""DeleteTopics (20), versions 1-6, by name, and by id from version 6. Internal topics cannot be deleted here.

Not done: quotas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.context import Reply, RequestContext
from semel.broker.pacing import ENTRIES_AT_ONCE, Pace, Slices, answer_list
from semel.broker.topics import Topic
from semel.core.refusal import Refused

if TYPE_CHECKING:
    from semel.broker.state import Broker

_DISABLED_CODE_SINCE: Final = 3

Asked = tuple[str | None, UUID | None]


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    asked: list[Asked] = (
        [(item.name, item.topic_id) for item in request.topics]
        if hasattr(request, "topics")
        else [(name, None) for name in request.topic_names]
    )
    counts = Counter(asked)
    return answer_list(broker, context, request, "responses", _answers(broker, context, counts))


def _answers(broker: Broker, context: RequestContext, counts: Mapping[Asked, int]) -> Slices[list[Mapping[str, Any]]]:
    pace = Pace()
    answers: list[Mapping[str, Any]] = []
    for item, count in counts.items():
        answer = yield from _answer(broker, context, item, is_repeated=count > 1)
        answers.append(answer)
        if pace.is_over(1 if answer["error_code"] else ENTRIES_AT_ONCE):
            yield
    return answers


def _answer(broker: Broker, context: RequestContext, asked: Asked, *, is_repeated: bool) -> Slices[Mapping[str, Any]]:
    name, topic_id = asked
    try:
        if is_repeated:
            what = "name" if name is not None else "id"
            raise Refused(ErrorCode.invalid_request, f"Duplicate topic {what}.")
        topic = _find(broker, context, name, topic_id)
        name, topic_id = topic.name, topic.topic_id
        _check_deletable(broker, context, topic)
        yield from broker.topics.delete_in_slices(topic.name)
    except Refused as refusal:
        return {
            "name": name,
            "topic_id": topic_id,
            "error_code": refusal.code,
            "error_message": refusal.reason,
        }
    return {"name": name, "topic_id": topic_id, "error_code": ErrorCode.none, "error_message": None}


def _find(broker: Broker, context: RequestContext, name: str | None, topic_id: UUID | None) -> Topic:
    if name is not None and topic_id is not None:
        raise Refused(ErrorCode.invalid_request, "You may not specify both topic name and topic id.")
    if name is None and topic_id is None:
        raise Refused(ErrorCode.invalid_request, "Neither topic name nor id were specified.")
    topic = broker.topics.by_id(topic_id) if topic_id is not None else broker.topics.get(name or "")
    # Who may not describe a topic learns neither its name from its id nor whether it is there.
    seen = name if name is not None else topic.name if topic is not None else None
    if seen is not None and not broker.authorizer.allows(context, Operation.DESCRIBE, ResourceType.TOPIC, seen):
        raise Refused(ErrorCode.topic_authorization_failed, "Authorization failed.")
    if topic is None and topic_id is not None:
        raise Refused(ErrorCode.unknown_topic_id, "This server does not host this topic ID.")
    if topic is None:
        raise Refused(ErrorCode.unknown_topic_or_partition, "This server does not host this topic-partition.")
    return topic


def _check_deletable(broker: Broker, context: RequestContext, topic: Topic) -> None:
    if not broker.authorizer.allows(context, Operation.DELETE, ResourceType.TOPIC, topic.name):
        raise Refused(ErrorCode.topic_authorization_failed, "Authorization failed.")
    if not broker.settings.delete_topics:
        is_known = context.api_version >= _DISABLED_CODE_SINCE
        raise Refused(
            ErrorCode.topic_deletion_disabled if is_known else ErrorCode.invalid_request,
            "Topic deletion is disabled.",
        )
    if topic.is_internal:
        # The coordinators live on it: with it would go every committed offset or open transaction.
        raise Refused(ErrorCode.policy_violation, f"Topic '{topic.name}' is internal and cannot be deleted.")
