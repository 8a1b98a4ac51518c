"""What a mirror has committed: a record inside the same transaction as the records that it speaks of. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from semel.client.partitions import TopicPartition
from semel.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PartitionState:
    """Where one partition stands, at the source and at the target."""

    source: int
    """The next offset to mirror."""
    target: int
    """The offset after the last mirrored record."""
    began: int
    """The source offset at which mirroring began."""
    expected: int
    """Where the next record lands at the target if nobody else writes there."""
    native: int | None = None
    """Where the target may have the first record that this mirror did not write; None: nowhere."""

    @property
    def return_offset(self) -> int:
        """Where a mirror in the other direction begins: nothing before it was written by others than this mirror."""
        return self.expected if self.native is None else self.native


@dataclass(frozen=True, slots=True)
class TopicState:
    """One topic of the source. Its id tells it from a later one of the same name."""

    topic_id: str | None
    target: str
    partitions: Mapping[int, PartitionState]


@dataclass(frozen=True, slots=True)
class MirrorState:
    """All that a restart needs."""

    source_cluster: str
    topics: Mapping[str, TopicState] = field(default_factory=dict[str, TopicState])
    producer_id: int = -1
    """Who has written the record: its markers say whether it counts where other transactions are open."""

    def encode(self) -> bytes:
        topics = {
            name: {
                "id": topic.topic_id,
                "target": topic.target,
                "partitions": {
                    str(number): [state.source, state.target, state.began, state.expected, state.native]
                    for number, state in topic.partitions.items()
                },
            }
            for name, topic in self.topics.items()
        }
        return json.dumps(
            {"format": 1, "source": self.source_cluster, "producer_id": self.producer_id, "topics": topics}
        ).encode()

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """
        >>> state = MirrorState("A", {"t": TopicState(None, "t", {0: PartitionState(5, 4, 0, 5)})}, 7)
        >>> MirrorState.decode(state.encode()) == state
        True
        """
        try:
            known: dict[str, Any] = dict(json.loads(value))
            if known.get("format") != 1:
                raise ConfigError(
                    f"The progress of this mirror has format {known.get('format')}, which this release cannot read. "
                    "Nothing was mirrored. Use the release that has written it, or a newer one."
                )
            topics = {
                name: TopicState(
                    topic["id"],
                    topic["target"],
                    {int(number): PartitionState(*numbers) for number, numbers in topic["partitions"].items()},
                )
                for name, topic in known["topics"].items()
            }
            return cls(known["source"], topics, known["producer_id"])
        except (ValueError, TypeError, KeyError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                "The progress of this mirror cannot be read: something else has written under its key into the "
                "progress topic. Nothing was mirrored. Find the writer, then use another name=."
            ) from error

    def partition(self, partition: TopicPartition) -> PartitionState | None:
        topic = self.topics.get(partition.topic)
        return None if topic is None else topic.partitions.get(partition.partition)

    def moved(self, changes: Mapping[TopicPartition, PartitionState]) -> Self:
        topics = dict(self.topics)
        for name in {partition.topic for partition in changes}:
            new = {number: state for (topic, number), state in changes.items() if topic == name}
            topics[name] = replace(topics[name], partitions={**topics[name].partitions, **new})
        return replace(self, topics=topics)


def progress_key(name: str) -> str:
    """The key of a mirror's record, and its `transactional.id`. No pipeline has it: their names hold no `/`."""
    return f"/mirror/{name}"


@dataclass(frozen=True, slots=True)
class Run:
    """Records that follow each other without a gap both at the source and at the target."""

    source: int
    target: int
    count: int


@dataclass(frozen=True, slots=True)
class CutPart:
    """What one cut did in one partition: from where to where it went, and where each record is now."""

    start: int
    end: int
    target_end: int
    runs: tuple[Run, ...]

    def translate(self, offset: int) -> int | None:
        """Where a reader at this source offset goes on at the target; None if the cut has nothing from there on."""
        for run in self.runs:
            if offset < run.source + run.count:
                return run.target + max(0, offset - run.source)
        return None


def encode_cut(
    source_cluster: str, parts: Mapping[TopicPartition, CutPart], topic_ids: Mapping[str, str | None]
) -> bytes:
    """The record of one cut in the offsets topic."""
    return json.dumps(
        {
            "format": 1,
            "source": source_cluster,
            "topic_ids": {topic: topic_ids.get(topic) for topic in {named.topic for named in parts}},
            "partitions": [
                [*named, part.start, part.end, part.target_end, [[r.source, r.target, r.count] for r in part.runs]]
                for named, part in parts.items()
            ],
        }
    ).encode()


def decode_cut(value: bytes) -> dict[tuple[str, str | None, int], CutPart]:
    """By topic, topic id and partition.

    >>> part = CutPart(0, 9, 5, (Run(3, 0, 5),))
    >>> decode_cut(encode_cut("A", {TopicPartition("t", 1): part}, {})) == {("t", None, 1): part}
    True
    """
    known: dict[str, Any] = json.loads(value)
    return {
        (topic, known["topic_ids"][topic], number): CutPart(start, end, last, tuple(Run(*run) for run in runs))
        for topic, number, start, end, last, runs in known["partitions"]
    }
