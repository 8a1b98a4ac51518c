"""Offsets of the Spark source: their JSON, how much of them one micro-batch takes, and which task reads what.

Pure, and by the rules of Spark's own Kafka source, so that a checkpoint can move from one to the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from semel.client.partitions import TopicPartition
from semel.errors import ConfigError

Offsets = dict[TopicPartition, int]

OFFSET_MAX: Final = 2**63 - 1
LATEST: Final = -1
EARLIEST: Final = -2
"""Stand for the ends of a partition in the JSON that users write."""

NOTE_PREFIX: Final = "semel:"
"""How the name of the note begins in a checkpoint. A topic's name has no colon."""


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """What a task reads: from `start`, up to but without `end`."""

    topic: str
    partition: int
    start: int
    end: int
    topic_id: str | None = None
    """Of which topic of that name; None where that is not known (Kafka before 2.8)."""

    @property
    def size(self) -> int:
        return self.end - self.start


# -- JSON --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Note:
    """What the source keeps in every offset besides the offsets themselves."""

    cluster: str | None
    """The id of the cluster that is read."""
    start: Offsets
    """Where each partition began: in the first micro-batch, or in the one in which it appeared. A query whose
    checkpoint comes from an older Semel or from Spark's Kafka source has only the later ones."""
    topic_ids: Mapping[str, str]
    """None are known from brokers before Kafka 2.8."""


def to_checkpoint(offsets: Mapping[TopicPartition, int], note: Note | None = None) -> dict[str, dict[str, int]]:
    """As Spark's Kafka source writes them. Always in one order, because Spark compares offsets as text.

    The note is the name of one more entry, which is empty: Spark's Kafka source reads no offset from it. No topic can
    have such a name.

    >>> to_checkpoint({TopicPartition("b", 10): 7, TopicPartition("b", 9): 5, TopicPartition("a", 0): 1})
    {'a': {'0': 1}, 'b': {'9': 5, '10': 7}}
    >>> to_checkpoint({TopicPartition("a", 0): 9}, Note("c", {TopicPartition("a", 0): 1}, {}))
    {'a': {'0': 9}, 'semel:{"cluster":"c","start":{"a":{"0":1}},"topic_ids":{}}': {}}
    """
    nested: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in sorted(offsets.items()):
        nested.setdefault(topic, {})[str(partition)] = offset
    if note is not None:
        fields = {
            "cluster": note.cluster,
            "start": to_checkpoint(note.start),
            "topic_ids": dict(sorted(note.topic_ids.items())),
        }
        nested[NOTE_PREFIX + json.dumps(fields, separators=(",", ":"))] = {}
    return nested


def split_note(nested: Mapping[str, Mapping[str, int]]) -> tuple[Offsets, Note | None]:
    """The offsets of a checkpoint, and the source's note if there is one.

    >>> split_note({"a": {"0": 1}})
    ({TopicPartition(topic='a', partition=0): 1}, None)
    """
    offsets: Offsets = {}
    note = None
    for topic, partitions in nested.items():
        if topic.startswith(NOTE_PREFIX):
            note = _read_note(topic.removeprefix(NOTE_PREFIX))
            continue
        for partition, offset in partitions.items():
            offsets[TopicPartition(topic, int(partition))] = offset
    return offsets, note


def _read_note(text: str) -> Note:
    """Fields that a later version may have added are passed over."""
    try:
        fields = json.loads(text)
        cluster, topic_ids = fields["cluster"], fields["topic_ids"]
        start, _ = split_note(fields["start"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"The checkpoint has an entry {NOTE_PREFIX}{text} that is not Semel's own ({error!r}); nothing was read. "
            "Restore the file from a backup. Without one, remove the entry from the newest file in `offsets` and from "
            "the one before it: the query then goes on, but cannot notice that a topic was deleted and created again."
        ) from error
    return Note(cluster, start, topic_ids)


def parse_numbers(option: str, text: str, low: int, example: str) -> Offsets:
    """A number for each partition, as users write them: `{"orders":{"0":23,"1":-2}}`."""
    found: Offsets = {}
    for topic, partitions in _read_object(option, text, example).items():
        if not isinstance(partitions, dict) or not partitions:
            raise _malformed(option, f"{topic!r} has no object of partitions", example)
        for partition, number in partitions.items():
            if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= OFFSET_MAX:
                raise _malformed(option, f"{number!r} of {topic!r} partition {partition} is out of place", example)
            found[TopicPartition(topic, _partition(option, topic, partition, example))] = number
    return found


def parse_partitions(option: str, text: str) -> frozenset[TopicPartition]:
    """Partitions by topic, as users write them for `assign`: `{"orders":[0,1]}`."""
    example = '{"orders":[0,1]}'
    found: set[TopicPartition] = set()
    for topic, partitions in _read_object(option, text, example).items():
        if not isinstance(partitions, list) or not partitions:
            raise _malformed(option, f"{topic!r} has no list of partitions", example)
        found |= {TopicPartition(topic, _partition(option, topic, number, example)) for number in partitions}
    return frozenset(found)


def _read_object(option: str, text: str, example: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise _malformed(option, f"it is not JSON ({error})", example) from None
    if not isinstance(value, dict) or not value:
        raise _malformed(option, "it names no topic", example)
    return value


def _partition(option: str, topic: str, value: object, example: str) -> int:
    text = str(value)
    if isinstance(value, bool) or not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise _malformed(option, f"{text!r} is no partition of {topic!r}", example)
    return int(text)


def _malformed(option: str, reason: str, example: str) -> ConfigError:
    return ConfigError(f"{option} is not understood: {reason}. Write it like {example}.")


# -- how much, and by whom ---------------------------------------------------------------------------------------------


def limit_offsets(start: Mapping[TopicPartition, int], end: Mapping[TopicPartition, int], limit: int) -> Offsets:
    """The part of `start` to `end` that a micro-batch of about `limit` offsets takes: each partition by its share.

    A partition with anything new moves on by one offset at least, so that none starves beside a large one.

    >>> limit_offsets({TopicPartition("t", 0): 0, TopicPartition("t", 1): 5}, {("t", 0): 900, ("t", 1): 105}, 100)
    {('t', 0): 90, ('t', 1): 15}
    """
    sizes = {partition: max(0, offset - start[partition]) for partition, offset in end.items()}
    total = sum(sizes.values())
    if total <= limit:
        return dict(end)
    return {
        partition: start[partition] + min(size, max(1, limit * size // total)) if size else end[partition]
        for partition, size in sizes.items()
    }


def split_ranges(
    ranges: Iterable[OffsetRange], min_partitions: int | None = None, max_records_per_partition: int | None = None
) -> list[OffsetRange]:
    """Ranges for tasks: one for each Kafka partition, or about `min_partitions`, the larger ones cut into more pieces.

    >>> split_ranges([OffsetRange("t", 0, 0, 90), OffsetRange("t", 1, 0, 10)], min_partitions=3)[0]
    OffsetRange(topic='t', partition=0, start=0, end=45, topic_id=None)
    """
    wanted = [piece for piece in ranges if piece.size > 0]
    if max_records_per_partition is not None:
        wanted = [part for piece in wanted for part in _cut(piece, -(-piece.size // max_records_per_partition))]
    if min_partitions is None or len(wanted) >= min_partitions:
        return wanted
    total = sum(piece.size for piece in wanted)
    small = {piece for piece in wanted if _share(piece.size, total, min_partitions) == 1}
    # What stays whole is left out of the reckoning, or the large ranges would be cut into too few pieces.
    rest = total - sum(piece.size for piece in small)
    count = max(1, min_partitions - len(small))
    return [
        part
        for piece in wanted
        for part in ([piece] if piece in small else _cut(piece, _share(piece.size, rest, count)))
    ]


def _share(size: int, total: int, count: int) -> int:
    """size / total of count, rounded to the nearest, and at least one."""
    return max(1, (2 * size * count + total) // (2 * total))


def _cut(piece: OffsetRange, count: int) -> list[OffsetRange]:
    edges = [piece.start + piece.size * part // count for part in range(count + 1)]
    return [OffsetRange(piece.topic, piece.partition, start, end) for start, end in pairwise(edges) if end > start]
