"""CreateTopics (19), versions 2-7. Done, on disk and ready for records when it is answered.

Not done: creation policies and quotas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from semel.broker.acls import CLUSTER_NAME, Operation, ResourceType
from semel.broker.config_entries import topic_entries
from semel.broker.context import Reply, RequestContext
from semel.broker.pacing import ENTRIES_AT_ONCE, Pace, Slices, answer_in_slices
from semel.broker.topics import NEW_PARTITIONS_MAX, TOO_MANY_PARTITIONS, Topic
from semel.core.refusal import Refused

if TYPE_CHECKING:
    from semel.broker.state import Broker

_REPLICATION_FACTOR: Final = 1
_STEPS_OF_A_CHECK: Final = 16


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    return answer_in_slices(broker, context, request, _answer(broker, context, request))


def _answer(broker: Broker, context: RequestContext, request: Any) -> Slices[Mapping[str, Any]]:
    counts: dict[str, int] = {}
    for item in request.topics:
        counts[item.name] = counts.get(item.name, 0) + 1
    partitions = sum(len(item.assignments) or max(item.num_partitions, 1) for item in request.topics)
    pace = Pace()
    answers: list[Mapping[str, Any]] = []
    for item in request.topics:
        if counts[item.name] == 1:
            is_too_much = partitions > NEW_PARTITIONS_MAX
            answer = yield from _answer_one(broker, context, request, item, is_too_much=is_too_much)
            answers.append(answer)
            is_new = not answer["error_code"] and not request.validate_only
            if pace.is_over(ENTRIES_AT_ONCE if is_new else _STEPS_OF_A_CHECK):
                yield
    duplicate = Refused(ErrorCode.invalid_request, "Duplicate topic name.")
    repeated = [_refused(name, duplicate) for name, count in counts.items() if count > 1]
    return {"topics": [*answers, *repeated]}


def _answer_one(
    broker: Broker, context: RequestContext, request: Any, item: Any, *, is_too_much: bool
) -> Slices[Mapping[str, Any]]:
    try:
        _check_authorized(broker, context, item.name)
        if is_too_much:
            raise Refused(ErrorCode.policy_violation, TOO_MANY_PARTITIONS)
        topic = broker.topics.decide_create(
            item.name,
            broker.settings,
            partition_count=item.num_partitions,
            replication_factor=item.replication_factor,
            assignments=_assignments(item),
            configs={config.name: config.value for config in item.configs},
        )
        if not request.validate_only:
            yield from broker.topics.create_in_slices(topic, broker.settings)
    except Refused as refusal:
        return _refused(item.name, refusal)
    return _created(broker, context, topic, is_there=not request.validate_only)


def _check_authorized(broker: Broker, context: RequestContext, name: str) -> None:
    allows = broker.authorizer.allows
    if not allows(context, Operation.CREATE, ResourceType.CLUSTER, CLUSTER_NAME) and not allows(
        context, Operation.CREATE, ResourceType.TOPIC, name
    ):
        raise Refused(ErrorCode.topic_authorization_failed, "Authorization failed.")


def _assignments(item: Any) -> dict[int, tuple[int, ...]]:
    assignments: dict[int, tuple[int, ...]] = {}
    for assignment in item.assignments:
        if assignment.partition_index in assignments:
            raise Refused(
                ErrorCode.invalid_replica_assignment,
                f"Found multiple manual partition assignments for partition {assignment.partition_index}",
            )
        assignments[assignment.partition_index] = tuple(assignment.broker_ids)
    return assignments


def _created(broker: Broker, context: RequestContext, topic: Topic, *, is_there: bool) -> Mapping[str, Any]:
    fields: dict[str, Any] = {
        "name": topic.name,
        "topic_id": topic.topic_id if is_there else None,
        "error_code": ErrorCode.none,
        "error_message": None,
    }
    if not broker.authorizer.allows(context, Operation.DESCRIBE_CONFIGS, ResourceType.TOPIC, topic.name):
        hidden = {"topic_config_error_code": int(ErrorCode.topic_authorization_failed), "configs": None}
        return {**fields, **hidden, "num_partitions": -1, "replication_factor": -1}
    return {
        **fields,
        "topic_config_error_code": 0,
        "num_partitions": topic.partition_count,
        "replication_factor": _REPLICATION_FACTOR,
        "configs": list(_configs(broker, topic)),
    }


def _configs(broker: Broker, topic: Topic) -> Iterator[Mapping[str, Any]]:
    for entry in topic_entries(topic.configs, broker.settings):
        yield {
            "name": entry.name,
            "value": entry.value,
            "read_only": entry.is_read_only,
            "config_source": int(entry.source),
            "is_sensitive": entry.is_sensitive,
        }


def _refused(name: str, refusal: Refused) -> Mapping[str, Any]:
    return {
        "name": name,
        "topic_id": None,
        "error_code": refusal.code,
        "error_message": refusal.reason,
        "topic_config_error_code": 0,
        "num_partitions": -1,
        "replication_factor": -1,
        "configs": [],
    }
