"""Where a mirror begins or goes on: the state for every partition of the source, and what forbids to go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from semel.bridges.mirror.options import MirrorOptions
from semel.bridges.mirror.progress import MirrorState, PartitionState, TopicState
from semel.bridges.mirror.source import Source, SourceTopic
from semel.bridges.mirror.target import Target, read_state, read_states
from semel.bridges.retries import LOG
from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.offsets import edge_offsets
from semel.client.partitions import TopicPartition
from semel.client.settings import parse_config
from semel.errors import ConfigError, NotAuthorized, OffsetOutOfRange, TopicRecreated


def check_before(options: MirrorOptions, source: Source) -> None:
    """What can be wrong is found out before a mirror of this name that works is fenced."""
    source_cluster = source.admin.describe_cluster().cluster_id
    if not source.topics():
        LOG.warning("The source has no topic that matches %r yet.", options.topics.pattern)
    with Cluster(parse_config(options.target).client) as target:
        _check_source(options, read_state(target, options.name, is_owner=False), source_cluster)
        is_one = Admin(target).describe_cluster().cluster_id == source_cluster
    if is_one and options.rename == "{topic}":
        raise ConfigError(
            "Source and target are one cluster, so topics would be copied into themselves; nothing was mirrored. "
            "Name another cluster, or rename the topics."
        )


def _check_source(options: MirrorOptions, state: MirrorState | None, source_cluster: str) -> None:
    if state is not None and state.source_cluster != source_cluster:
        raise ConfigError(
            f"Mirror {options.name!r} has mirrored cluster {state.source_cluster} until now, and this is cluster "
            f"{source_cluster}, where its positions mean nothing. Nothing was mirrored. Use another name."
        )


def plan(options: MirrorOptions, source: Source, target: Target, topics: Mapping[str, SourceTopic]) -> MirrorState:
    """The state to go on from: what was committed, with every topic and partition that is new. Writes nothing."""
    source_cluster = source.admin.describe_cluster().cluster_id
    state = target.state() or MirrorState(source_cluster)
    _check_source(options, state, source_cluster)
    returning = _returning(source, target.admin.describe_cluster().cluster_id)
    planned = dict(state.topics)
    for name, topic in topics.items():
        before = _same_topic(options, name, topic, state.topics.get(name))
        planned[name] = _plan_topic(options, name, topic, before, source, target, returning)
    return replace(state, topics=planned)


def _same_topic(options: MirrorOptions, name: str, topic: SourceTopic, before: TopicState | None) -> TopicState | None:
    """What is known of a topic, unless it is another one now."""
    if before is None or before.topic_id == topic.id_text:
        return before
    if options.recreated == "stop":
        raise TopicRecreated(
            f"Topic {name!r} was deleted and created again at the source. What the target has of the old one stays; "
            "what the old one had beyond it is gone. Nothing of the new one was mirrored. Delete the target's topic if "
            'it should go too, and pass recreated="go-on" to mirror the new one from its beginning, after what is '
            "there."
        )
    LOG.warning("Topic %r was created again at the source: it is mirrored from its beginning, after the old one.", name)
    return None


def _plan_topic(
    options: MirrorOptions,
    name: str,
    topic: SourceTopic,
    before: TopicState | None,
    source: Source,
    target: Target,
    returning: Mapping[tuple[str, str], TopicState],
) -> TopicState:
    target_name = before.target if before else options.target_topic(name)
    known = dict(before.partitions) if before else {}
    ends = _ends(target.cluster, target_name, topic.partitions)
    starts = _starts(source, name, [number for number in range(topic.partitions) if number not in known])
    back = returning.get((name, target_name))
    for number, earliest in starts.items():
        start = earliest
        if back is not None and number in back.partitions:
            start = max(earliest, back.partitions[number].return_offset)
        end = ends[number]
        known[number] = PartitionState(start, end, start, end, native=0 if end else None)
    for number, state in known.items():
        if ends.get(number, state.target) < state.target:
            raise OffsetOutOfRange(
                f"The target's topic {target_name!r} partition {number} ends at offset {ends[number]}, and this mirror "
                f"has written up to {state.target}: it was deleted, created again or restored. Nothing was mirrored, "
                "because the lost records would be missing for good. Use another name= to mirror the topic again."
            )
    return TopicState(topic.id_text, target_name, known)


def _ends(cluster: Cluster, topic: str, partitions: int) -> dict[int, int]:
    named = [TopicPartition(topic, number) for number in range(partitions)]
    found = edge_offsets(cluster, named, "latest", "read_uncommitted")
    return {partition.partition: end for partition, end in found.items()}


def _starts(source: Source, topic: str, numbers: list[int]) -> dict[int, int]:
    named = [TopicPartition(topic, number) for number in numbers]
    found = edge_offsets(source.cluster, named, "earliest", "read_uncommitted") if named else {}
    return {partition.partition: offset for partition, offset in found.items()}


def _returning(source: Source, target_cluster: str) -> dict[tuple[str, str], TopicState]:
    """What mirrors in the other direction have written into the source, by the names of their target and source.

    Such a mirror's last cut is where this one begins: everything before it came from the target.
    """
    found: dict[tuple[str, str], TopicState] = {}
    try:
        states = read_states(source.cluster)
    except NotAuthorized as error:
        LOG.warning("Whether the source was a mirror's target before is not known, so nothing is skipped: %s", error)
        return found
    for state in states:
        if state.source_cluster == target_cluster:
            found |= {(topic.target, name): topic for name, topic in state.topics.items()}
    return found


def skip_lost(state: MirrorState, source: Source) -> tuple[MirrorState, int]:
    """Move every partition that retention has overtaken to its beginning, and count the offsets that were lost."""
    positions = {
        TopicPartition(name, number): one.source
        for name, topic in state.topics.items()
        for number, one in topic.partitions.items()
    }
    present = source.cluster.topic_shapes({named.topic for named in positions})
    asked = [named for named in positions if named.topic in present]
    starts = edge_offsets(source.cluster, asked, "earliest", "read_uncommitted")
    moved: dict[TopicPartition, PartitionState] = {}
    lost = 0
    for named, start in starts.items():
        gap = start - positions[named]
        if gap > 0:
            lost += gap
            before = state.partition(named)
            assert before is not None
            moved[named] = replace(before, source=start, began=start)
            LOG.warning(
                "Topic %r partition %d: offsets %d to %d were deleted before they were mirrored.",
                named.topic,
                named.partition,
                positions[named],
                start - 1,
            )
    return state.moved(moved), lost
