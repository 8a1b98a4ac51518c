"""ConsumerGroupDescribe (69), versions 0-1: members, assignments and targets of KIP-848 groups.

A group that reads a topic which the client may not see is not told at all, as in Kafka. Partitions of deleted topics
have no name any more and are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from semel.broker.acls import Operation, ResourceType
from semel.broker.context import Reply, RequestContext
from semel.broker.pacing import answer_list, sliced
from semel.core.consumer_group_records import Assignment
from semel.core.consumer_groups import ConsumerGroupDescription, MemberDescription
from semel.core.refusal import Refused

if TYPE_CHECKING:
    from semel.broker.state import Broker

_NOT_ASKED_FOR: Final = -(2**31)
_CONSUMER_MEMBER: Final = 1


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    group_ids = dict.fromkeys(request.group_ids)  # each once, however often it is named: a group may be large
    found = (_describe(broker, context, request, group_id) for group_id in group_ids)
    work = sliced(found, weigh=lambda group: 1 + 10 * len(group["members"]))
    return answer_list(broker, context, request, "groups", work)


def _describe(broker: Broker, context: RequestContext, request: Any, group_id: str) -> dict[str, Any]:
    try:
        if not broker.authorizer.allows(context, Operation.DESCRIBE, ResourceType.GROUP, group_id):
            raise Refused(ErrorCode.group_authorization_failed, "Group authorization failed.")
        description = broker.groups.consumer_groups.describe(group_id)
        members = [_member(broker, member) for member in description.members]
        _refuse_hidden_topics(broker, context, description, members)
    except Refused as refusal:
        return _group(group_id, error_code=refusal.code, error_message=refusal.reason)
    operations = _NOT_ASKED_FOR
    if request.include_authorized_operations:
        operations = broker.authorizer.operations(context, ResourceType.GROUP, group_id)
    return _group(
        group_id,
        group_state=description.state,
        group_epoch=description.group_epoch,
        assignment_epoch=description.assignment_epoch,
        assignor_name=description.assignor_name,
        members=members,
        authorized_operations=operations,
    )


def _group(group_id: str, **told: Any) -> dict[str, Any]:
    nothing = {
        "error_code": ErrorCode.none,
        "error_message": None,
        "group_state": "",
        "group_epoch": 0,
        "assignment_epoch": 0,
        "assignor_name": "",
        "members": [],
        "authorized_operations": _NOT_ASKED_FOR,
    }
    return {**nothing, "group_id": group_id, **told}


def _member(broker: Broker, member: MemberDescription) -> dict[str, Any]:
    metadata = member.metadata
    return {
        "member_id": member.member_id,
        "instance_id": metadata.instance_id,
        "rack_id": metadata.rack_id,
        "member_epoch": member.member_epoch,
        "client_id": metadata.client_id,
        "client_host": metadata.client_host,
        "subscribed_topic_names": metadata.subscribed_topic_names,
        "subscribed_topic_regex": metadata.subscribed_topic_regex or None,
        "assignment": {"topic_partitions": _named(broker, member.assigned)},
        "target_assignment": {"topic_partitions": _named(broker, member.target)},
        "member_type": _CONSUMER_MEMBER,
    }


def _named(broker: Broker, assignment: Assignment) -> list[dict[str, Any]]:
    topics = [(broker.topics.by_id(topic_id), partitions) for topic_id, partitions in assignment.items()]
    return [
        {"topic_id": topic.topic_id, "topic_name": topic.name, "partitions": sorted(partitions)}
        for topic, partitions in topics
        if topic is not None
    ]


def _refuse_hidden_topics(
    broker: Broker, context: RequestContext, description: ConsumerGroupDescription, members: list[dict[str, Any]]
) -> None:
    names = {name for member in description.members for name in member.metadata.subscribed_topic_names}
    for member in members:
        for part in ("assignment", "target_assignment"):
            names.update(topic["topic_name"] for topic in member[part]["topic_partitions"])
    for name in sorted(names):
        if not broker.authorizer.allows(context, Operation.DESCRIBE, ResourceType.TOPIC, name):
            raise Refused(
                ErrorCode.topic_authorization_failed,
                "The group has described topic(s) that the client is not authorized to describe.",
            )
