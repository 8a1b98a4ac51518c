"""The target's side of a mirror: records, progress and the translation of offsets in one transaction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from semel.bridges import failpoints
from semel.bridges.mirror.options import OFFSETS_TOPIC, PROGRESS_TOPIC, MirrorOptions
from semel.bridges.mirror.progress import CutPart, MirrorState, PartitionState, encode_cut, progress_key
from semel.bridges.mirror.records import Copied, make_runs
from semel.bridges.name_owner import NameOwner
from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.partitions import TopicPartition
from semel.client.progress_topic import PARTITIONS, ProgressTopic
from semel.client.sender import Stored
from semel.errors import Fenced, KafkaError, TransactionAborted
from semel.wire import ErrorCode

Offsets = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class PartCut:
    """What one cut brings of one partition. Records are made while they are written, so that few are in memory."""

    partition: TopicPartition
    end: int
    records: Iterable[Copied] = ()


@dataclass(slots=True)
class Published:
    """What a committed cut has brought."""

    state: MirrorState
    cuts: Mapping[TopicPartition, CutPart]
    records: int = 0
    loops: int = 0


def read_state(cluster: Cluster, name: str, *, is_owner: bool) -> MirrorState | None:
    """What a mirror of this name has committed on a cluster."""
    topic = _progress_topic(cluster)
    if not topic.exists():
        return None
    value = topic.read_value(progress_key(name), lambda value: MirrorState.decode(value).producer_id, is_owner=is_owner)
    return None if value is None else MirrorState.decode(value)


def read_states(cluster: Cluster) -> list[MirrorState]:
    """What all mirrors that write to a cluster have committed there."""
    topic = _progress_topic(cluster)
    if not topic.exists():
        return []
    found: list[MirrorState] = []
    for number in range(PARTITIONS):
        records = topic.committed(TopicPartition(topic.topic, number))
        found += [MirrorState.decode(values[-1][1]) for values in records.values() if values[-1][1]]
    return found


def _progress_topic(cluster: Cluster) -> ProgressTopic:
    return ProgressTopic(cluster, PROGRESS_TOPIC, kind="progress topic", option="a cluster without one")


class Target(NameOwner):
    """Owns the transactions of a mirror's name."""

    def __init__(self, options: MirrorOptions) -> None:
        super().__init__("mirror", options.name)
        self._own({"linger.ms": 0, **options.target, "transactional.id": progress_key(options.name)})
        try:
            self._topic = _progress_topic(self.cluster)
            self._topic.ensure()
            self._ensure_offsets_topic()
        except BaseException:
            self.close()
            raise

    @property
    def admin(self) -> Admin:
        return Admin(self.cluster)

    def _ensure_offsets_topic(self) -> None:
        if OFFSETS_TOPIC in self.cluster.list_topics():
            return
        try:
            self.admin.create_topics(OFFSETS_TOPIC, partitions=PARTITIONS, config={"cleanup.policy": "delete"})
        except KafkaError as error:
            if error.code != ErrorCode.topic_already_exists:  # another mirror was faster
                raise

    def state(self) -> MirrorState | None:
        """What was committed last. It cannot change any more, since all earlier owners are fenced."""
        return read_state(self.cluster, self._name, is_owner=True)

    # -- one cut ---------------------------------------------------------------------------------------------------

    def publish(self, parts: list[PartCut], state: MirrorState) -> Published:
        """Returns when all of it is committed: the new state, and where each record is now.

        Raises `CommitUnknown` if the answer was lost, and other errors if nothing of it will be seen; then `recover`.
        """
        producer = self._producer
        try:
            producer.begin()
            done = Published(state, {})
            offsets = [self._write_part(part, state, done) for part in parts]
            done.cuts = cuts = _cut_parts(parts, offsets, state, producer.flush())
            failpoints.reach("mirror_records_written")
            moved = state.moved({named: _moved(state, named, cut) for named, cut in cuts.items()})
            done.state = replace(moved, producer_id=producer.identity.producer_id)
            self._write_progress(done.state, cuts)
            failpoints.reach("mirror_progress_written")
            producer.commit()
        except Fenced as error:
            raise self._explain(error) from error
        failpoints.reach("mirror_committed")
        return done

    def _write_part(self, part: PartCut, state: MirrorState, done: Published) -> Offsets:
        """Returns the source offset of each record that was written."""
        name = state.topics[part.partition.topic].target
        offsets = [np.zeros(0, np.int64)]
        for copied in part.records:
            if copied.table.num_rows:
                self._producer.send_table(name, copied.table, partition=part.partition.partition)
            offsets.append(copied.offsets)
            done.records += copied.table.num_rows
            done.loops += copied.loops
        return np.concatenate(offsets)

    def _write_progress(self, state: MirrorState, cuts: Mapping[TopicPartition, CutPart]) -> None:
        key = progress_key(self._name)
        place = self._topic.place(key)
        self._producer.send(place.topic, state.encode(), key=key, partition=place.partition)
        if cuts:
            ids = {name: topic.topic_id for name, topic in state.topics.items()}
            value = encode_cut(state.source_cluster, cuts, ids)
            self._producer.send(OFFSETS_TOPIC, value, key=key, partition=place.partition)
        self._producer.flush()

    def recover(self) -> MirrorState | None:
        """After an error: end what is open, and read what was committed."""
        self._end_open()
        return self.state()


def _cut_parts(
    parts: list[PartCut], offsets: list[Offsets], state: MirrorState, stored: list[Stored]
) -> dict[TopicPartition, CutPart]:
    if any(one.base_offset < 0 for one in stored):
        raise TransactionAborted(
            "A broker did not say at which offsets it stored a repeated batch, so positions could not be "
            "translated exactly. Nothing of this cut was committed, and it is written again."
        )
    landed: dict[TopicPartition, list[Stored]] = {}
    for one in sorted(stored, key=lambda one: one.base_offset):
        landed.setdefault(TopicPartition(one.topic, one.partition), []).append(one)
    cuts: dict[TopicPartition, CutPart] = {}
    for part, copied in zip(parts, offsets, strict=True):
        before = state.partition(part.partition)
        assert before is not None
        name = TopicPartition(state.topics[part.partition.topic].target, part.partition.partition)
        batches = landed.get(name, [])
        runs = make_runs(copied, batches)
        end = batches[-1].base_offset + batches[-1].record_count if batches else before.target
        cuts[part.partition] = CutPart(before.source, part.end, end, runs)
    return cuts


def _moved(state: MirrorState, partition: TopicPartition, cut: CutPart) -> PartitionState:
    """Where a partition stands after a cut, and whether somebody else has written to it at the target."""
    before = state.partition(partition)
    assert before is not None
    native, expected = before.native, before.expected
    for run in cut.runs:
        if native is None and run.target > expected:
            native = expected
        expected = run.target + run.count
    if cut.runs:
        expected += 1  # the marker of this transaction
    return replace(before, source=cut.end, target=cut.target_end, expected=expected, native=native)
