"""Consumer groups: who is in them, and which offsets they have committed."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kio.schema.consumer_protocol_assignment.v0 import ConsumerProtocolAssignment
from kio.serial import entity_reader

from semel.client.cluster import Cluster, CoordinatorKind
from semel.client.item_calls import ItemAnswer, Route, call_for_items, coordinator, flat_names, on_every_broker
from semel.client.leader_calls import by_topic, describe
from semel.client.partitions import ByPartition, TopicPartition, by_partition
from semel.client.retry import Patience
from semel.wire import Api, ErrorCode

_WHOLE = "the whole group"
"""Stands for the request itself where an answer has a code beside those of its partitions."""


@dataclass(frozen=True, slots=True)
class ListedGroup:
    """A group by name; the state is empty from brokers before Kafka 2.6."""

    group: str
    protocol_type: str
    state: str


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A member, and the partitions it was given if the group is one of consumers."""

    member_id: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    assignment: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A classic group. One that does not exist has the state "Dead", as Kafka says."""

    group: str
    state: str
    protocol_type: str
    protocol: str
    members: tuple[GroupMember, ...]


@dataclass(frozen=True, slots=True)
class CommittedOffset:
    """The next offset that a group will read in a partition."""

    offset: int
    metadata: str = ""
    leader_epoch: int = -1


class GroupAdmin:
    """The part of `Admin` about groups."""

    _cluster: Cluster

    def list_groups(self) -> list[ListedGroup]:
        """The groups of all brokers."""

        def listed_by(route: Route) -> Iterable[ListedGroup]:
            answers = call_for_items(
                self._cluster,
                route,
                Api.LIST_GROUPS,
                ["groups"],
                lambda asked: {},
                lambda response: [ItemAnswer("groups", response.error_code, response.groups)],
                what=str,
            )
            return (ListedGroup(g.group_id, g.protocol_type, getattr(g, "group_state", "")) for g in answers["groups"])

        return sorted(on_every_broker(self._cluster, listed_by), key=lambda listed: listed.group)

    def describe_groups(self, *groups: str | Iterable[str]) -> dict[str, GroupDescription]:
        """State and members of classic groups.

        >>> from semel import Admin
        >>> with Admin({"bootstrap.servers": bootstrap}) as admin:
        ...     admin.describe_groups("nobody")["nobody"].state
        'Dead'
        """
        described: dict[str, GroupDescription] = {}
        for group in flat_names(groups):
            described |= call_for_items(
                self._cluster,
                self._coordinator(group),
                Api.DESCRIBE_GROUPS,
                [group],
                lambda asked: {"groups": asked, "include_authorized_operations": False},
                lambda response: (ItemAnswer(g.group_id, g.error_code, _read_group(g)) for g in response.groups),
                what=_group,
            )
        return described

    def describe_consumer_groups(self, *groups: str | Iterable[str]) -> dict[str, GroupDescription]:
        """The same of groups whose partitions the broker assigns (KIP-848, from Kafka 4.0 on).

        A classic group is no such group: `group_id_not_found`.
        """
        described: dict[str, GroupDescription] = {}
        for group in flat_names(groups):
            described |= call_for_items(
                self._cluster,
                self._coordinator(group),
                Api.CONSUMER_GROUP_DESCRIBE,
                [group],
                lambda asked: {"group_ids": asked, "include_authorized_operations": False},
                lambda response: (
                    ItemAnswer(g.group_id, g.error_code, _read_consumer_group(g), g.error_message)
                    for g in response.groups
                ),
                what=_group,
            )
        return described

    def delete_groups(self, *groups: str | Iterable[str]) -> None:
        """Delete groups without members, and the offsets they have committed."""
        for group in flat_names(groups):
            call_for_items(
                self._cluster,
                self._coordinator(group),
                Api.DELETE_GROUPS,
                [group],
                lambda asked: {"groups_names": asked},
                lambda response: (ItemAnswer(r.group_id, r.error_code, None) for r in response.results),
                what=_group,
                done_already=ErrorCode.group_id_not_found,
            )

    # -- offsets ---------------------------------------------------------------------------------------------------

    def committed_offsets(
        self,
        group: str,
        partitions: Iterable[tuple[str, int]] | None = None,
        *,
        require_stable: bool = True,
        patience: Patience | None = None,
    ) -> dict[TopicPartition, CommittedOffset]:
        """What a group has committed, of these partitions or of all; partitions without a commit are left out.

        `require_stable` waits for open transactions that hold offsets of this group (KIP-447), so that they cannot
        change what is returned.
        """
        wanted = None if partitions is None else by_topic(TopicPartition(*named) for named in partitions)

        def fields(asked: Sequence[str]) -> Mapping[str, Any]:
            topics = None
            if wanted is not None:
                topics = [{"name": topic, "partition_indexes": numbers} for topic, numbers in wanted.items()]
            return {"group_id": group, "topics": topics, "require_stable": require_stable}

        def read(response: Any) -> Iterator[ItemAnswer[str, dict[TopicPartition, CommittedOffset]]]:
            offsets: dict[TopicPartition, CommittedOffset] = {}
            code = getattr(response, "error_code", ErrorCode.none)
            for topic in response.topics:
                for item in topic.partitions:
                    if item.error_code != ErrorCode.none:
                        code = item.error_code
                    elif item.committed_offset >= 0:
                        epoch = getattr(item, "committed_leader_epoch", -1)
                        committed = CommittedOffset(item.committed_offset, item.metadata or "", epoch)
                        offsets[TopicPartition(topic.name, item.partition_index)] = committed
            yield ItemAnswer(_WHOLE, code, offsets)

        answers = call_for_items(
            self._cluster,
            self._coordinator(group),
            Api.OFFSET_FETCH,
            [_WHOLE],
            fields,
            read,
            what=lambda _: _group(group),
            patience=patience,
        )
        return answers[_WHOLE]

    def commit_offsets(self, group: str, offsets: ByPartition[int | CommittedOffset]) -> None:
        """Set a group's offsets from outside; refused while the group has members.

        >>> from semel import Admin
        >>> with Admin({"bootstrap.servers": bootstrap}) as admin:
        ...     admin.create_topics("invoices")
        ...     admin.commit_offsets("billing", {("invoices", 0): 1_000})
        """
        wanted = {
            partition: offset if isinstance(offset, CommittedOffset) else CommittedOffset(offset)
            for partition, offset in by_partition(offsets).items()
        }

        def fields(asked: Sequence[TopicPartition]) -> Mapping[str, Any]:
            return {
                "group_id": group,
                "generation_id_or_member_epoch": -1,
                "member_id": "",
                "topics": [
                    {"name": topic, "partitions": [_commit_fields(number, wanted, topic) for number in numbers]}
                    for topic, numbers in by_topic(asked).items()
                ],
            }

        self._call_for_partitions(group, Api.OFFSET_COMMIT, list(wanted), fields)

    def delete_offsets(self, group: str, partitions: Iterable[tuple[str, int]]) -> None:
        """Forget a group's offsets of these partitions."""

        def fields(asked: Sequence[TopicPartition]) -> Mapping[str, Any]:
            return {
                "group_id": group,
                "topics": [
                    {"name": topic, "partitions": [{"partition_index": number} for number in numbers]}
                    for topic, numbers in by_topic(asked).items()
                ],
            }

        named = [TopicPartition(*partition) for partition in partitions]
        self._call_for_partitions(group, Api.OFFSET_DELETE, named, fields)

    def _call_for_partitions(self, group: str, api: Api, partitions: Sequence[TopicPartition], fields: Any) -> None:
        def read(response: Any) -> Iterator[ItemAnswer[TopicPartition, None]]:
            code = getattr(response, "error_code", ErrorCode.none)
            if code != ErrorCode.none:
                yield ItemAnswer(partitions[0], code, None)
                return
            for topic in response.topics:
                for item in topic.partitions:
                    yield ItemAnswer(TopicPartition(topic.name, item.partition_index), item.error_code, None)

        call_for_items(
            self._cluster,
            self._coordinator(group),
            api,
            partitions,
            fields,
            read,
            what=lambda partition: f"{_group(group)}, {describe(partition)}",
        )

    def _coordinator(self, group: str) -> Route:
        return coordinator(self._cluster, CoordinatorKind.GROUP, group)


def _group(name: str) -> str:
    return f"group {name!r}"


def _commit_fields(number: int, wanted: Mapping[TopicPartition, CommittedOffset], topic: str) -> Mapping[str, Any]:
    committed = wanted[TopicPartition(topic, number)]
    return {
        "partition_index": number,
        "committed_offset": committed.offset,
        "committed_leader_epoch": committed.leader_epoch,
        "committed_metadata": committed.metadata,
    }


def _read_group(group: Any) -> GroupDescription:
    members = tuple(
        GroupMember(
            member.member_id,
            getattr(member, "group_instance_id", None),
            member.client_id,
            member.client_host,
            _read_assignment(member.member_assignment) if group.protocol_type == "consumer" else (),
        )
        for member in group.members
    )
    return GroupDescription(group.group_id, group.group_state, group.protocol_type, group.protocol_data, members)


def _read_consumer_group(group: Any) -> GroupDescription:
    members = tuple(
        GroupMember(
            member.member_id,
            member.instance_id,
            member.client_id,
            member.client_host,
            tuple(
                TopicPartition(topic.topic_name, partition)
                for topic in member.assignment.topic_partitions
                for partition in topic.partitions
            ),
        )
        for member in group.members
    )
    return GroupDescription(group.group_id, group.group_state, "consumer", group.assignor_name, members)


def _read_assignment(data: bytes) -> tuple[TopicPartition, ...]:
    """The partitions in a consumer's assignment; later versions only add fields behind those of version 0."""
    if len(data) < struct.calcsize(">h"):
        return ()  # a member that was given nothing yet
    assignment, _ = entity_reader(ConsumerProtocolAssignment)(data, struct.calcsize(">h"))
    return tuple(
        TopicPartition(topic.topic, partition)
        for topic in assignment.assigned_partitions
        for partition in topic.partitions
    )
