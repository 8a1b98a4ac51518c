"""Where a group stands in some partitions, as a member asks it: one try, partition by partition (OffsetFetch)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from semel.client.cluster import Answered, Cluster, CoordinatorKind
from semel.client.leader_calls import by_topic
from semel.client.partitions import TopicPartition
from semel.wire import Api, ErrorCode


@dataclass(frozen=True, slots=True)
class GroupOffsets:
    """What is committed; None where nothing is. `unstable` are those of which an open transaction holds an offset."""

    committed: dict[TopicPartition, int | None] = field(default_factory=dict[TopicPartition, int | None])
    unstable: set[TopicPartition] = field(default_factory=set[TopicPartition])
    notes: dict[TopicPartition, str] = field(default_factory=dict[TopicPartition, str])
    """What was written beside the committed offsets."""


def fetch_group_offsets(
    cluster: Cluster, group: str, partitions: Collection[TopicPartition], *, require_stable: bool = True
) -> GroupOffsets:
    """With `require_stable` nothing is told that an open transaction may still change (KIP-447)."""

    def read_answer(response: Any) -> Answered:
        codes = [getattr(response, "error_code", ErrorCode.none)]
        codes += [item.error_code for topic in response.topics for item in topic.partitions]
        telling = [code for code in codes if code not in (ErrorCode.none, ErrorCode.unstable_offset_commit)]
        return Answered(telling[0] if telling else ErrorCode.none)

    response = cluster.call_coordinator(
        CoordinatorKind.GROUP,
        group,
        Api.OFFSET_FETCH,
        read_answer,
        what=f"group {group!r}",
        group_id=group,
        topics=[
            {"name": topic, "partition_indexes": numbers} for topic, numbers in by_topic(sorted(partitions)).items()
        ],
        require_stable=require_stable,
    )
    found = GroupOffsets()
    for topic in response.topics:
        for item in topic.partitions:
            partition = TopicPartition(topic.name, item.partition_index)
            if item.error_code is ErrorCode.unstable_offset_commit:
                found.unstable.add(partition)
            else:
                found.committed[partition] = item.committed_offset if item.committed_offset >= 0 else None
                if item.metadata:
                    found.notes[partition] = item.metadata
    if getattr(response, "error_code", ErrorCode.none) is ErrorCode.unstable_offset_commit:
        found.unstable.update(partitions)
        found.committed.clear()
    return found
