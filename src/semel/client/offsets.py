"""Where partitions begin and end, and where a point in time or the end of a leader's time lies in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from semel.client.cluster import Cluster
from semel.client.config import Isolation
from semel.client.leader_calls import PartitionAnswer, by_topic, call_leaders
from semel.client.partitions import TopicPartition
from semel.client.retry import Patience
from semel.wire import Api

Edge = Literal["earliest", "latest"]
When = Edge | int
"""An end of the log, or milliseconds since 1970: the first record of that time or later."""

ISOLATION_LEVELS: Final[Mapping[Isolation, int]] = {"read_uncommitted": 0, "read_committed": 1}
_EDGES: Final[Mapping[str, int]] = {"latest": -1, "earliest": -2}
_CONSUMER: Final = -1


@dataclass(frozen=True, slots=True)
class ListedOffset:
    """An answer of ListOffsets. `offset` is -1 if there is no record of that time or later."""

    offset: int
    timestamp_ms: int
    leader_epoch: int


def list_offsets(
    cluster: Cluster,
    questions: Mapping[TopicPartition, When],
    isolation: Isolation = "read_committed",
    *,
    patience: Patience | None = None,
) -> dict[TopicPartition, ListedOffset]:
    """One offset for each partition. The latest one of `read_committed` is the last stable offset."""

    def fields(asked: Mapping[TopicPartition, When]) -> Mapping[str, Any]:
        return {
            "replica_id": _CONSUMER,
            "isolation_level": ISOLATION_LEVELS[isolation],
            "topics": [
                {
                    "name": topic,
                    "partitions": [
                        {
                            "partition_index": partition,
                            "current_leader_epoch": cluster.leader(topic, partition).epoch,
                            "timestamp": _EDGES[when] if isinstance(when, str) else when,
                        }
                        for partition in partitions
                        for when in (asked[TopicPartition(topic, partition)],)
                    ],
                }
                for topic, partitions in by_topic(asked).items()
            ],
        }

    return call_leaders(cluster, Api.LIST_OFFSETS, questions, fields, _read_listed, patience=patience)


def _read_listed(response: Any) -> Iterator[PartitionAnswer[ListedOffset]]:
    for topic in response.topics:
        for partition in topic.partitions:
            listed = ListedOffset(partition.offset, partition.timestamp, getattr(partition, "leader_epoch", -1))
            yield PartitionAnswer(TopicPartition(topic.name, partition.partition_index), partition.error_code, listed)


def epoch_ends(
    cluster: Cluster, epochs: Mapping[TopicPartition, int], *, patience: Patience | None = None
) -> dict[TopicPartition, int]:
    """Where the part of each log ends that was written up to this leader epoch (KIP-320); -1: nothing is known of it.

    A reader that has read such a record behind that offset has read what is lost now.
    """

    def fields(asked: Mapping[TopicPartition, int]) -> Mapping[str, Any]:
        return {
            "replica_id": _CONSUMER,
            "topics": [
                {
                    "topic": topic,
                    "partitions": [
                        {
                            "partition": partition,
                            "current_leader_epoch": cluster.leader(topic, partition).epoch,
                            "leader_epoch": asked[TopicPartition(topic, partition)],
                        }
                        for partition in partitions
                    ],
                }
                for topic, partitions in by_topic(asked).items()
            ],
        }

    return call_leaders(cluster, Api.OFFSET_FOR_LEADER_EPOCH, epochs, fields, _read_epoch_ends, patience=patience)


def _read_epoch_ends(response: Any) -> Iterator[PartitionAnswer[int]]:
    for topic in response.topics:
        for partition in topic.partitions:
            named = TopicPartition(topic.topic, partition.partition)
            yield PartitionAnswer(named, partition.error_code, partition.end_offset)


def edge_offsets(
    cluster: Cluster, partitions: Iterable[TopicPartition], edge: Edge, isolation: Isolation = "read_committed"
) -> dict[TopicPartition, int]:
    """Where each partition begins or ends."""
    listed = list_offsets(cluster, {TopicPartition(*partition): edge for partition in partitions}, isolation)
    return {partition: answer.offset for partition, answer in listed.items()}


def timestamp_offsets(
    cluster: Cluster, partitions: Iterable[TopicPartition], timestamp_ms: int, isolation: Isolation = "read_committed"
) -> dict[TopicPartition, int | None]:
    """The first offset of that time or later in each partition; None where there is none (yet)."""
    listed = list_offsets(cluster, {TopicPartition(*partition): timestamp_ms for partition in partitions}, isolation)
    return {partition: None if answer.offset < 0 else answer.offset for partition, answer in listed.items()}
