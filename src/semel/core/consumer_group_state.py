"""One KIP-848 consumer group in memory: members, targets, who holds which partition. Only replay changes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar
from uuid import UUID

from semel.core.consumer_group_records import (
    NOTHING,
    Assignment,
    ConsumerGroupRecord,
    CurrentAssignment,
    CurrentAssignmentRecord,
    GroupEpochRecord,
    MemberMetadata,
    MemberMetadataRecord,
    MemberState,
    PartitionMetadataRecord,
    ResolvedRegex,
    ResolvedRegexRecord,
    TargetEpochRecord,
    TargetMemberRecord,
)

_T = TypeVar("_T")

JOIN_EPOCH: Final = 0
LEAVE_EPOCH: Final = -1
LEAVE_STATIC_EPOCH: Final = -2


@dataclass(frozen=True, slots=True)
class Member:
    """What a member says about itself, and what it has been given."""

    member_id: str
    metadata: MemberMetadata = field(default_factory=MemberMetadata)
    current: CurrentAssignment = field(default_factory=CurrentAssignment)

    def is_reconciled_to(self, target_epoch: int) -> bool:
        return self.current.state is MemberState.STABLE and self.current.member_epoch == target_epoch


def partitions_of(assignment: Assignment) -> Iterator[tuple[UUID, int]]:
    return ((topic_id, partition) for topic_id, partitions in assignment.items() for partition in partitions)


class Group:
    """A consumer group as its records describe it."""

    def __init__(self, group_id: str) -> None:
        self.group_id = group_id
        self.epoch = 0
        self.metadata_hash = 0
        self.assignment_epoch = 0
        self.members: dict[str, Member] = {}
        self.static_members: dict[str, str] = {}
        self.targets: dict[str, Assignment] = {}
        self.resolved_regexes: dict[str, ResolvedRegex] = {}
        self.has_partition_metadata = False
        # Kept by replay so that a heartbeat in the steady state need not look at the other members.
        self.topic_name_counts: Counter[str] = Counter()
        self.regex_counts: Counter[str] = Counter()
        self.metadata_bytes = 0
        """About what the members' texts take."""
        self._holders: dict[tuple[UUID, int], str] = {}

    @property
    def state(self) -> str:
        """Kafka's name of the group's state."""
        if not self.members:
            return "Empty"
        if self.epoch > self.assignment_epoch:
            return "Assigning"
        if all(member.is_reconciled_to(self.assignment_epoch) for member in self.members.values()):
            return "Stable"
        return "Reconciling"

    def static_member(self, instance_id: str) -> Member | None:
        member_id = self.static_members.get(instance_id)
        return None if member_id is None else self.members[member_id]

    def holder_of(self, topic_id: UUID, partition: int) -> str | None:
        """Who has the partition, or has not yet acknowledged that it must give it up."""
        return self._holders.get((topic_id, partition))

    def target_of(self, member_id: str) -> Assignment:
        return self.targets.get(member_id, NOTHING)

    def topic_names(self, leaving: Sequence[MemberMetadata] = (), joining: MemberMetadata | None = None) -> set[str]:
        """Topics subscribed to by name, once some have left and one has joined."""
        left = Counter(name for metadata in leaving for name in metadata.subscribed_topic_names)
        names = {name for name, count in self.topic_name_counts.items() if count > left[name]}
        return names if joining is None else names.union(joining.subscribed_topic_names)

    def regexes(self, leaving: Sequence[MemberMetadata] = (), joining: MemberMetadata | None = None) -> set[str]:
        """Regular expressions subscribed to, once some have left and one has joined."""
        left = Counter(metadata.subscribed_topic_regex for metadata in leaving)
        regexes = {regex for regex, count in self.regex_counts.items() if count > left[regex]}
        return regexes.union([joining.subscribed_topic_regex] if joining and joining.subscribed_topic_regex else ())

    def replay(self, record: ConsumerGroupRecord) -> None:
        """Apply one record. Order within a compacted log may vary: a member's parts may come before the group's."""
        match record:
            case GroupEpochRecord(_, epoch, metadata_hash):
                self.epoch = epoch or 0
                self.metadata_hash = metadata_hash
            case PartitionMetadataRecord(_, present):
                self.has_partition_metadata = present
            case MemberMetadataRecord(_, member_id, metadata):
                self._replay_metadata(member_id, metadata)
            case TargetEpochRecord(_, assignment_epoch):
                self.assignment_epoch = assignment_epoch or 0
            case TargetMemberRecord(_, member_id, target):
                _set_or_drop(self.targets, member_id, target)
            case CurrentAssignmentRecord(_, member_id, current):
                self._replay_current(member_id, current)
            case ResolvedRegexRecord(_, regex, resolved):
                _set_or_drop(self.resolved_regexes, regex, resolved)

    def _replay_metadata(self, member_id: str, metadata: MemberMetadata | None) -> None:
        old = self.members.get(member_id)
        if old is not None:
            self._count_subscription(old.metadata, -1)
            if self.static_members.get(old.metadata.instance_id or "") == member_id:
                del self.static_members[old.metadata.instance_id or ""]
        if metadata is None:
            self._release(member_id)
            self.members.pop(member_id, None)
            return
        self._count_subscription(metadata, +1)
        if metadata.instance_id is not None:
            self.static_members[metadata.instance_id] = member_id
        self.members[member_id] = Member(member_id, metadata, CurrentAssignment() if old is None else old.current)

    def _replay_current(self, member_id: str, current: CurrentAssignment | None) -> None:
        self._release(member_id)
        old = self.members.get(member_id)
        if current is None:
            if old is not None:
                self.members[member_id] = Member(member_id, old.metadata, CurrentAssignment(member_epoch=LEAVE_EPOCH))
            return
        self.members[member_id] = Member(member_id, MemberMetadata() if old is None else old.metadata, current)
        for partition in _held(current):
            self._holders[partition] = member_id

    def _release(self, member_id: str) -> None:
        old = self.members.get(member_id)
        for partition in () if old is None else _held(old.current):
            # Compaction may have dropped the record by which this member gave the partition up, and kept the one by
            # which another got it: the newer holder stays.
            if self._holders.get(partition) == member_id:
                del self._holders[partition]

    def _count_subscription(self, metadata: MemberMetadata, by: int) -> None:
        self.metadata_bytes += by * metadata.memory_bytes
        _count(self.topic_name_counts, metadata.subscribed_topic_names, by)
        if metadata.subscribed_topic_regex:
            _count(self.regex_counts, (metadata.subscribed_topic_regex,), by)


def _held(current: CurrentAssignment) -> Iterator[tuple[UUID, int]]:
    yield from partitions_of(current.assigned)
    yield from partitions_of(current.pending_revocation)


def _set_or_drop(mapping: dict[str, _T], key: str, value: _T | None) -> None:
    if value is None:
        mapping.pop(key, None)
    else:
        mapping[key] = value


def _count(counts: Counter[str], names: Iterable[str], by: int) -> None:
    for name in names:
        counts[name] += by
        if counts[name] == 0:
            del counts[name]
