"""Positions of consumer groups, carried from the source to the target.

An offset of the source is translated by the cut that mirrored it, exactly: the reader at the target goes on with the
record that it would have read next at the source. A group that has begun to commit at the target itself is left alone.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from semel.bridges.mirror.options import OFFSETS_TOPIC
from semel.bridges.mirror.progress import CutPart, MirrorState, PartitionState, TopicState, decode_cut, progress_key
from semel.bridges.mirror.target import read_state
from semel.bridges.retries import LOG
from semel.client.admin import Admin, CommittedOffset
from semel.client.cluster import Cluster
from semel.client.partitions import TopicPartition
from semel.client.progress_topic import ProgressTopic
from semel.client.settings import parse_config
from semel.errors import KafkaError
from semel.wire import ErrorCode

_CUTS_KEPT: Final = 10_000
"""For each partition, in memory. Older ones are read from the target."""
_NOTE: Final = "semel.mirror"
_HAS_MEMBERS: Final = frozenset(
    {
        ErrorCode.unknown_member_id,
        ErrorCode.illegal_generation,
        ErrorCode.rebalance_in_progress,
        ErrorCode.stale_member_epoch,
        ErrorCode.fenced_member_epoch,
    }
)


class Translator:
    """From offsets of the source to offsets of the target."""

    def __init__(self, name: str, cluster: Cluster) -> None:
        self._name = name
        self._cluster = cluster
        self._recent: dict[TopicPartition, deque[CutPart]] = {}

    def add(self, cuts: Mapping[TopicPartition, CutPart]) -> None:
        for partition, cut in cuts.items():
            self._recent.setdefault(partition, deque(maxlen=_CUTS_KEPT)).append(cut)

    def translate(self, partition: TopicPartition, offset: int, topic: TopicState) -> int | None:
        """Where a reader goes on. None: not mirrored so far, or the cut that says so is no longer kept."""
        state = topic.partitions.get(partition.partition)
        if state is None or offset > state.source:
            return None
        if offset == state.source or state.began == state.source:
            return state.target
        recent = self._recent.get(partition, ())
        if recent and recent[0].start <= offset:
            return self._first_after(recent, offset, state)
        return self._first_after(self._read_cuts(partition, topic), offset, state)

    def _first_after(self, cuts: Iterable[CutPart], offset: int, state: PartitionState) -> int | None:
        """From the cut on that holds the offset; what lies before the first cut leads to its first record."""
        is_known = False
        for cut in cuts:
            is_known = is_known or cut.start <= offset < cut.end or offset < cut.start == state.began
            if is_known and (found := cut.translate(offset)) is not None:
                return found
        return state.target if is_known else None

    def _read_cuts(self, partition: TopicPartition, topic: TopicState) -> list[CutPart]:
        kept = ProgressTopic(self._cluster, OFFSETS_TOPIC, kind="offsets topic", option="a cluster without one")
        records = kept.committed(kept.place(progress_key(self._name))).get(progress_key(self._name), [])
        wanted = (partition.topic, topic.topic_id, partition.partition)
        found = (decode_cut(value).get(wanted) for _, value in records)
        return [cut for cut in found if cut is not None]


@dataclass(slots=True)
class Carried:
    """What became of the groups in one round."""

    groups: int = 0
    """Groups with positions in mirrored topics."""
    behind: int = 0
    """Positions that are ahead of the mirror, and are carried when it gets there."""


class GroupCarrier:
    """Looks at the source's groups from time to time, and carries what has changed."""

    def __init__(self, source: Admin, target: Admin, translator: Translator, pattern: re.Pattern[str]) -> None:
        self._source = source
        self._target = target
        self._translator = translator
        self._pattern = pattern
        self._done: dict[str, dict[TopicPartition, int]] = {}
        """The source's offsets that were carried last, by group."""
        self._refused: set[str] = set()

    def carry(self, state: MirrorState, is_stopping: Callable[[], bool]) -> Carried:
        """Once for all groups. The mirror's cuts up to `state` are committed."""
        report = Carried()
        try:
            groups = self._source.list_groups()
        except KafkaError as error:
            self._note_refused("any", error)
            return report
        for listed in groups:
            if is_stopping():
                break
            if self._pattern.fullmatch(listed.group):
                self._carry_group(listed.group, state, report)
        return report

    def _carry_group(self, group: str, state: MirrorState, report: Carried) -> None:
        try:
            # Offsets of an open transaction are not committed: nothing to wait for.
            offsets = self._source.committed_offsets(group, require_stable=False)
        except KafkaError as error:
            self._note_refused(group, error)
            return
        done = self._done.setdefault(group, {})
        mirrored = {named: found.offset for named, found in offsets.items() if named.topic in state.topics}
        report.groups += bool(mirrored)
        found: dict[TopicPartition, int] = {}
        wanted: dict[TopicPartition, tuple[int, int]] = {}
        for named, offset in mirrored.items():
            if done.get(named) == offset:
                continue
            topic = state.topics[named.topic]
            translated = self._translator.translate(named, offset, topic)
            if translated is None:
                report.behind += 1
            else:
                wanted[TopicPartition(topic.target, named.partition)] = (offset, translated)
                found[named] = offset
        if wanted and self._try_write(group, wanted):
            done |= found

    def _try_write(self, group: str, wanted: Mapping[TopicPartition, tuple[int, int]]) -> bool:
        """False if it has to be tried again later."""
        try:
            present = self._target.committed_offsets(group, list(wanted), require_stable=False)
            # An offset without our note was committed by a consumer at the target: the group has moved.
            offsets = {
                named: CommittedOffset(translated, f"{_NOTE} {offset}")
                for named, (offset, translated) in wanted.items()
                if named not in present or present[named].metadata.startswith(_NOTE)
            }
            if offsets:
                self._target.commit_offsets(group, offsets)
            return True
        except KafkaError as error:
            if error.code not in _HAS_MEMBERS:  # with members at the target its positions are their own
                self._note_refused(group, error)
            return False

    def _note_refused(self, group: str, error: KafkaError) -> None:
        if group not in self._refused:
            self._refused.add(group)
            LOG.warning("The positions of group %r are not carried: %s", group, error)


def is_group_mirrored(
    group: str, *, name: str, source: str | Mapping[str, object], target: str | Mapping[str, object]
) -> bool:
    """Whether all positions that a group has at the source, in topics that mirror `name` mirrors, are at the target.

    Stop the group's consumers at the source, wait until this is true, then start them at the target. True as well for
    positions that consumers at the target have moved on since.

    >>> is_group_mirrored("billing", name="west", source="a:9092", target="b:9092")  # doctest: +SKIP
    True
    """
    with _admin(source) as here, Cluster(parse_config(_settings(target)).client) as cluster:
        state = read_state(cluster, name, is_owner=False)
        offsets = here.committed_offsets(group, require_stable=False)
        mirrored = {named: found for named, found in offsets.items() if state and named.topic in state.topics}
        if state is None or not mirrored:
            return False
        names = {named: TopicPartition(state.topics[named.topic].target, named.partition) for named in mirrored}
        present = Admin(cluster).committed_offsets(group, list(names.values()), require_stable=False)
    return all(
        (there := present.get(names[named])) is not None
        and (there.metadata == f"{_NOTE} {found.offset}" or not there.metadata.startswith(_NOTE))
        for named, found in mirrored.items()
    )


def _settings(cluster: str | Mapping[str, object]) -> Mapping[str, object]:
    return {"bootstrap.servers": cluster} if isinstance(cluster, str) else cluster


def _admin(cluster: str | Mapping[str, object]) -> Admin:
    return Admin(_settings(cluster))
