"""The note in the Spark source's offsets: where a micro-batch begins, and whether its topics are still the same."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

from semel.spark.source_offsets import Note, Offsets


def extend_note(note: Note | None, cluster: str | None, topic_ids: Mapping[str, UUID | None], new: Offsets) -> Note:
    """The note of the next offset, `new` being the starts of partitions that appear in it.

    Spark compares offsets as text, so nothing changes in the note as long as the cluster has the same partitions.
    """
    known = {topic: str(topic_id) for topic, topic_id in topic_ids.items() if topic_id is not None}
    if note is None:
        return Note(cluster, new, known)
    return Note(cluster or note.cluster, {**note.start, **new}, {**note.topic_ids, **known})


def begin_of_batch(start: Offsets, began: Note | None, ends: Note | None) -> Offsets:
    """Where the partitions of a micro-batch begin, from its start with its note `began` and the note of its end.

    Partitions that neither knows are left out: they are new in a checkpoint of an older version.
    """
    if ends is None:
        return dict(start)
    if began is not None and start == began.start:
        # An initial offset. It may be from a later time than the one that this micro-batch was planned with.
        return {**start, **ends.start}
    kept = {
        partition: offset
        for partition, offset in start.items()
        if began is None or not is_replaced(partition.topic, began, ends)
    }
    return {**ends.start, **kept}


def replaced_topics(
    offsets: Offsets, note: Note, cluster: str | None, topic_ids: Mapping[str, UUID | None]
) -> frozenset[str]:
    """The topics of these offsets that share only their names with those of the cluster."""
    now = extend_note(None, cluster, topic_ids, {})
    named = {partition.topic for partition in offsets}.intersection(topic_ids)
    return frozenset(topic for topic in named if is_replaced(topic, note, now))


def is_replaced(topic: str, old: Note, new: Note) -> bool:
    """Whether it is certainly another topic: its id has changed, or the cluster's."""
    ids = old.topic_ids.get(topic), new.topic_ids.get(topic)
    clusters = old.cluster, new.cluster
    return any(None not in pair and pair[0] != pair[1] for pair in (ids, clusters))


def is_same_topic(topic: str, old: Note, new: Note) -> bool:
    """Whether it is certainly the same topic. Brokers before Kafka 2.8 leave it open."""
    return topic in old.topic_ids and topic in new.topic_ids and not is_replaced(topic, old, new)
