"""A session's reading side: which partitions it has, where each of them stands, and what was fetched ahead.

The group says who has which partition; where to begin is what the group has committed, read only when no open
transaction can change it. A partition that was lost and came back is a new one: its position is asked for again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal
from uuid import UUID

import pyarrow as pa

from semel.client.cluster import Cluster
from semel.client.fetched import PartitionRecords, to_read_table
from semel.client.fetcher import Fetcher
from semel.client.group_offsets import GroupOffsets, fetch_group_offsets
from semel.client.membership import Membership, look_interval_s
from semel.client.offsets import edge_offsets
from semel.client.partitions import TopicPartition
from semel.client.position_notes import PositionNote, first_count, read_note
from semel.client.topic_ids import ask_topic_ids
from semel.errors import Fenced, OffsetOutOfRange, TopicRecreated
from semel.session.backlog import Backlog, partition_of
from semel.session.claims import LOG
from semel.wire import ErrorCode

Reset = Literal["earliest", "latest", "error"]

_SLICE_MS: Final = 200
"""How long a fetch is waited for at a stretch, before a look at the group."""
_LOOK_AT_TOPICS_S: Final = 5.0
"""How often to look at the ids of topics from which nothing comes."""
_UNSTABLE_RETRY_S: Final = 0.01
_UNSTABLE_RETRY_MAX_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Portion:
    """What one transaction consumes."""

    table: pa.Table
    next_offsets: dict[TopicPartition, int]
    tenures: dict[TopicPartition, int]
    notes: dict[TopicPartition, str] = field(default_factory=dict[TopicPartition, str])
    """To be kept beside the offsets."""
    topics_asked: frozenset[str] = frozenset()
    """Those that records were taken from, where brokers have ids."""
    find_topic_ids: Callable[[], Mapping[str, UUID | None]] = dict
    """Their ids, asked for after the records had come."""

    @property
    def is_empty(self) -> bool:
        """No record, though perhaps progress: markers and aborted records that were passed."""
        return self.table.num_rows == 0


@dataclass(frozen=True, slots=True)
class PortionLimits:
    """When a portion is full: whichever is reached first."""

    records_max: int = 100_000
    bytes_max: int = 32 * 1024 * 1024
    linger_ms: float = 0.0
    """How long to go on gathering after the first record."""


@dataclass(slots=True)
class TopicIdentity:
    """A topic as it was when its positions were found."""

    topic_id: UUID | None
    partition_count: int
    first_count: int | None = None
    """See `PositionNote.first_count`; None: not asked for."""

    def is_other_than(self, topic_id: UUID | None) -> bool:
        return self.topic_id is not None and topic_id is not None and self.topic_id != topic_id

    def learn_first_count(self, note: PositionNote | None) -> None:
        """It is handed on from offset to offset."""
        if note is not None:
            self.first_count = note.first_count if self.first_count is None else min(note.first_count, self.first_count)

    @property
    def note(self) -> str:
        return PositionNote(self.topic_id, self.first_count or 0).text


def topic_identities(cluster: Cluster, topics: Collection[str]) -> dict[str, TopicIdentity]:
    """As they are now; `UnknownTopic` if one is not there."""
    cluster.refresh_topics(topics)
    return {topic: TopicIdentity(cluster.topic_id(topic), len(cluster.leaders(topic))) for topic in topics}


def _warn_of_new_topic(topic: str) -> None:
    LOG.warning("Topic %r was deleted and created again: the new one is read from its beginning.", topic)


class Inputs:
    def __init__(
        self,
        cluster: Cluster,
        fetcher: Fetcher,
        membership: Membership,
        group: str,
        *,
        reset: Reset,
        require_stable: bool,
        is_last_started: Callable[[], bool] | None = None,
    ) -> None:
        self._cluster = cluster
        """For questions; a fetch that waits for records would keep them waiting."""
        self._fetcher = fetcher
        self._membership = membership
        self._group = group
        self._reset: Reset = reset
        self._require_stable = require_stable
        self._is_last_started = is_last_started
        """For a session with an `instance`: whether it is the one that should have the place in the group."""
        self._look_at_topics_s = look_interval_s(_LOOK_AT_TOPICS_S, cluster.config)
        self._tenures: dict[TopicPartition, int] = {}
        self._committed: dict[TopicPartition, int] = {}
        """Where each partition goes on after an abort; it is read only if it is in here."""
        self._pins: dict[TopicPartition, int] = {}
        """Positions that nothing but this session knows: who begins at the end must not begin there twice."""
        self._topics: dict[str, TopicIdentity] = {}
        """What is known of the topics that are read; positions are positions in these."""
        self._recreated: set[str] = set()
        """Topics that must be begun again, since there are others of their name now."""
        self._looked_at_topics = cluster.clock()
        self._backlog = Backlog()
        self._ask_again_at = 0.0
        self._ask_pause_s = _UNSTABLE_RETRY_S

    @property
    def partitions(self) -> frozenset[TopicPartition]:
        """Those that are being read."""
        return frozenset(self._committed)

    # -- reading ---------------------------------------------------------------------------------------------------

    def take(self, timeout_ms: float, limits: PortionLimits) -> Portion:
        """The next portion; an empty one if no record came in time."""
        clock = self._cluster.clock
        deadline = clock() + timeout_ms / 1000
        linger_until: float | None = None
        while True:
            self._check_membership()
            self._begin_recreated()
            self._follow_group()
            now = clock()
            if self._backlog.record_count:
                linger_until = now + limits.linger_ms / 1000 if linger_until is None else linger_until
                is_full = (
                    self._backlog.record_count >= limits.records_max or self._backlog.byte_count >= limits.bytes_max
                )
                if is_full or now >= linger_until:
                    break
            elif now >= deadline:
                break
            self._fetch((deadline if linger_until is None else linger_until) - now)
        try:
            return self._portion(self._backlog.take(limits.records_max, limits.bytes_max))
        except BaseException:
            self.rewind()  # what was taken would be skipped by a user that goes on
            raise

    def _check_membership(self) -> None:
        fatal = self._membership.fatal
        if fatal is None:
            return
        if not isinstance(fatal, Fenced) or self._is_last_started is None or not self._is_last_started():
            raise fatal
        LOG.info("An older session with the same instance took the place in the group; taking it back.")
        self._membership.take_back()

    def _look_around_if_due(self) -> None:
        """When nothing comes: see whether topics are still the same, and whether this session is still wanted.

        One that waits for its place in the group, which a newer session has, would otherwise wait for ever (KIP-848).
        """
        if self._cluster.clock() - self._looked_at_topics < self._look_at_topics_s:
            return
        self._look_at_topics()
        if self._is_last_started is not None and not self._is_last_started():
            raise Fenced(
                "Another session with the same name and instance was started after this one and has taken over; what "
                "this one had not committed is aborted. Stop this one, or give each its own instance.",
                code=ErrorCode.producer_fenced,
                is_fatal=True,
            )

    def _portion(self, taken: list[PartitionRecords]) -> Portion:
        pins = {partition: at for partition, at in self._pins.items() if partition in self._committed}
        offsets = pins | {partition_of(records): records.next_offset for records in taken}
        read = {partition_of(records) for records in taken}
        has_ids = any(self._topics[partition.topic].topic_id is not None for partition in read)
        topics_asked = frozenset(partition.topic for partition in read) if has_ids else frozenset[str]()
        return Portion(
            to_read_table(taken),
            offsets,
            {partition: self._tenures[partition] for partition in offsets},
            {partition: self._topics[partition.topic].note for partition in offsets},
            topics_asked,
            ask_topic_ids(self._cluster, read) if has_ids else dict,
        )

    def _fetch(self, wait_s: float) -> None:
        if not self._committed:
            self._membership.wait_change(self._tenures, min(wait_s, self._pause_s()))
            self._look_around_if_due()
            return
        try:
            fetched = self._fetcher.fetch(max(0.0, min(wait_s, self._pause_s()) * 1000))
        except OffsetOutOfRange as error:
            if not self._look_at_topics() and not isinstance(error, TopicRecreated):
                raise
            self._fetcher.assign(self._committed)
            self._backlog.clear()
            return
        if not fetched:
            self._look_around_if_due()
        self._backlog.add(records for records in fetched if partition_of(records) in self._committed)

    def _pause_s(self) -> float:
        if self._tenures.keys() == self._committed.keys():
            return _SLICE_MS / 1000
        return max(0.001, min(_SLICE_MS / 1000, self._ask_again_at - self._cluster.clock()))

    # -- positions -------------------------------------------------------------------------------------------------

    def _follow_group(self) -> None:
        tenures = dict(self._membership.tenures)
        if tenures != self._tenures:
            stays = {partition for partition, tenure in self._tenures.items() if tenures.get(partition) == tenure}
            self._tenures = tenures
            self._committed = {partition: at for partition, at in self._committed.items() if partition in stays}
            self._backlog.keep_only(self._committed)
            self._ask_again_at, self._ask_pause_s = 0.0, _UNSTABLE_RETRY_S
            self._read_on()
        if self._tenures.keys() != self._committed.keys() and self._cluster.clock() >= self._ask_again_at:
            self._begin_new()

    def _begin_new(self) -> None:
        """Positions of partitions that were gained; those that another's open transaction holds must wait for it."""
        gained = self._tenures.keys() - self._committed.keys()
        shapes = topic_identities(self._cluster, {partition.topic for partition in gained})
        there = {one for one in gained if one.partition < shapes[one.topic].partition_count}
        if there != gained:
            # The topic was created again with fewer partitions, and the group has not noticed yet.
            gained, self._ask_again_at = there, self._cluster.clock() + _UNSTABLE_RETRY_MAX_S
            if not there:
                return
        found = fetch_group_offsets(self._cluster, self._group, gained, require_stable=self._require_stable)
        if found.unstable:
            self._ask_again_at = self._cluster.clock() + self._ask_pause_s
            self._ask_pause_s = min(self._ask_pause_s * 2, _UNSTABLE_RETRY_MAX_S)
        if not found.committed:
            return
        for topic, shape in shapes.items():
            known = self._topics.setdefault(topic, shape)
            if known.is_other_than(shape.topic_id):
                self._recreated.add(topic)
        if self._recreated:
            return
        known, new = self._sort_out(found)
        first = self._first_offsets(found.committed.keys() - known.keys() - new)
        self._pins |= first if self._reset == "latest" else {}
        first |= edge_offsets(self._cluster, sorted(new), "earliest") if new else {}
        self._committed |= known | first
        self._read_on()

    def _sort_out(self, found: GroupOffsets) -> tuple[dict[TopicPartition, int], set[TopicPartition]]:
        """The positions to go on from, and the partitions to read from their beginning whatever the settings are."""
        known: dict[TopicPartition, int] = {}
        new: set[TopicPartition] = set()
        missing: dict[str, set[TopicPartition]] = {}
        for partition, offset in found.committed.items():
            identity, note = self._topics[partition.topic], read_note(found.notes.get(partition))
            if offset is None:
                missing.setdefault(partition.topic, set()).add(partition)
            elif note is not None and identity.is_other_than(note.topic_id):
                _warn_of_new_topic(partition.topic)
                new.add(partition)
            else:
                known[partition] = offset
                identity.learn_first_count(note)
        if self._reset == "latest":
            for topic, partitions in missing.items():
                count = self._first_count(topic)
                new |= {partition for partition in partitions if partition.partition >= count}
        return known, new

    def _first_count(self, topic: str) -> int:
        """How many of the topic's partitions were there when the group began. Later ones are read from their beginning:

        what was written before they were noticed would be skipped otherwise.
        """
        identity = self._topics[topic]
        if identity.first_count is None:
            every = [TopicPartition(topic, number) for number in range(identity.partition_count)]
            found = fetch_group_offsets(self._cluster, self._group, every, require_stable=False)
            has_offset = [partition for partition, offset in found.committed.items() if offset is not None]
            notes = [read_note(found.notes.get(partition)) for partition in has_offset]
            count = first_count(notes, identity.topic_id)
            identity.first_count = identity.partition_count if count is None else count
        return identity.first_count

    def _first_offsets(self, partitions: set[TopicPartition]) -> dict[TopicPartition, int]:
        if not partitions:
            return {}
        if self._reset == "error":
            topic, partition = min(partitions)
            raise OffsetOutOfRange(
                f"Group {self._group!r} has committed no offset for {topic}-{partition}, and auto.offset.reset does "
                "not say where to begin; nothing was read. Write auto.offset.reset=earliest or latest.",
                code=ErrorCode.offset_out_of_range,
            )
        return edge_offsets(self._cluster, sorted(partitions), self._reset)

    # -- topics that were deleted and created again ----------------------------------------------------------------

    def find_change(self, portion: Portion) -> str | None:
        """Why the portion must not be committed: its records may be of another topic than its positions."""
        ids = portion.find_topic_ids()
        changed = [topic for topic in sorted(ids) if self._topics[topic].is_other_than(ids[topic])]
        changed += sorted(portion.topics_asked - ids.keys())
        if not changed:
            return None
        self._recreated.update(changed)
        return f"topic {changed[0]!r} was deleted, or created again, while its records were processed"

    def _look_at_topics(self) -> bool:
        """Whether some topic is another one now."""
        self._looked_at_topics = self._cluster.clock()
        held = {partition.topic for partition in self._committed}
        if all(self._topics[topic].topic_id is None for topic in held):
            return False
        for topic, shape in topic_identities(self._cluster, held).items():
            if self._topics[topic].is_other_than(shape.topic_id):
                self._recreated.add(topic)
        return bool(self._recreated)

    def _begin_recreated(self) -> None:
        if not self._recreated:
            return
        for topic, shape in topic_identities(self._cluster, self._recreated).items():
            if not self._topics[topic].is_other_than(shape.topic_id):
                continue
            _warn_of_new_topic(topic)
            shape.first_count = 0
            self._topics[topic] = shape
            held = [partition for partition in self._committed if partition.topic == topic]
            there = [partition for partition in held if partition.partition < shape.partition_count]
            for partition in held:
                self._committed.pop(partition)
                self._pins.pop(partition, None)
            self._committed |= edge_offsets(self._cluster, there, "earliest")
        self._recreated.clear()
        self._backlog.clear()
        self._fetcher.assign(self._committed)

    def _read_on(self) -> None:
        """Let the fetcher read what we have, behind what it has fetched of it already."""
        ahead = self._fetcher.positions
        self._fetcher.assign({partition: ahead.get(partition, at) for partition, at in self._committed.items()})

    # -- how a transaction ended -----------------------------------------------------------------------------------

    def committed(self, portion: Portion) -> None:
        """What was taken is done with."""
        for partition, offset in portion.next_offsets.items():
            if self._tenures.get(partition) == portion.tenures[partition]:
                self._committed[partition] = offset
                self._pins.pop(partition, None)

    def rewind(self) -> None:
        """Go back to what is committed, also in partitions where nothing is: they begin where they began."""
        self._backlog.clear()
        self._fetcher.assign(self._committed)
