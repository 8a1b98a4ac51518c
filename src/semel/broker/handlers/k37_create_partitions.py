"""CreatePartitions (37), versions 0-3. The new partitions are ready for records when it is answered.

Not done: quotas. Internal topics cannot grow here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.context import Reply, RequestContext
from semel.broker.pacing import ENTRIES_AT_ONCE, Pace, Slices, answer_list
from semel.broker.topics import NEW_PARTITIONS_MAX, TOO_MANY_PARTITIONS, Topic
from semel.core.refusal import Refused

if TYPE_CHECKING:
    from semel.broker.state import Broker


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    return answer_list(broker, context, request, "results", _answers(broker, context, request))


def _answers(broker: Broker, context: RequestContext, request: Any) -> Slices[list[Mapping[str, Any]]]:
    pace = Pace()
    answers: list[Mapping[str, Any]] = []
    counts = Counter(item.name for item in request.topics)
    items = {item.name: item for item in request.topics}
    left = NEW_PARTITIONS_MAX
    for name, item in items.items():
        topic = broker.topics.get(name)
        left -= max(0, item.count - (topic.partition_count if topic is not None else 0))
        answer = yield from _answer(
            broker,
            context,
            item,
            is_repeated=counts[name] > 1,
            is_too_much=left < 0,
            validate_only=request.validate_only,
        )
        answers.append(answer)
        is_new = not answer["error_code"] and not request.validate_only
        if pace.is_over(ENTRIES_AT_ONCE if is_new else 1):
            yield
    return answers


def _answer(
    broker: Broker, context: RequestContext, item: Any, *, is_repeated: bool, is_too_much: bool, validate_only: bool
) -> Slices[Mapping[str, Any]]:
    try:
        if is_repeated:
            raise Refused(ErrorCode.invalid_request, "Duplicate topic name.")
        if not broker.authorizer.allows(context, Operation.ALTER, ResourceType.TOPIC, item.name):
            raise Refused(ErrorCode.topic_authorization_failed, "Authorization failed.")
        if is_too_much and item.name in broker.topics:
            raise Refused(ErrorCode.policy_violation, TOO_MANY_PARTITIONS)
        assignments = None if item.assignments is None else [each.broker_ids for each in item.assignments]

        def decide() -> Topic:
            return broker.topics.decide_grow(item.name, item.count, broker.settings, assignments)

        decide()
        if not validate_only:
            yield from broker.topics.grow_in_slices(item.name, decide)
    except Refused as refusal:
        return {"name": item.name, "error_code": refusal.code, "error_message": refusal.reason}
    return {"name": item.name, "error_code": ErrorCode.none, "error_message": None}
