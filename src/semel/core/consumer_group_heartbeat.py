"""What a KIP-848 heartbeat leads to: the records to log and the answer, in the order of Kafka's group coordinator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

from kio.schema.errors import ErrorCode

from semel.core.assignors import ASSIGNORS, MemberSpec
from semel.core.consumer_group_reconciliation import Owned, owns_only, reconcile
from semel.core.consumer_group_records import (
    Assignment,
    ConsumerGroupRecord,
    CurrentAssignmentRecord,
    GroupEpochRecord,
    MemberMetadata,
    MemberMetadataRecord,
    PartitionMetadataRecord,
    ResolvedRegex,
    ResolvedRegexRecord,
    TargetEpochRecord,
    TargetMemberRecord,
)
from semel.core.consumer_group_state import JOIN_EPOCH, LEAVE_EPOCH, LEAVE_STATIC_EPOCH, Group, Member
from semel.core.consumer_group_subscriptions import Topics, hash_of_topics, resolve
from semel.core.refusal import Refused


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A ConsumerGroupHeartbeat request; None and -1 stand for "as in the last one"."""

    group_id: str
    member_id: str
    member_epoch: int
    instance_id: str | None
    rack_id: str | None
    rebalance_timeout_ms: int
    client_id: str
    client_host: str
    subscribed_topic_names: Sequence[str] | None
    subscribed_topic_regex: str | None
    server_assignor: str | None
    owned_partitions: Owned

    @property
    def is_full(self) -> bool:
        """Whether the member says all it has to say, as it does after an error: then it wants all in return."""
        return (
            self.rebalance_timeout_ms != -1
            and (self.subscribed_topic_names is not None or self.subscribed_topic_regex is not None)
            and self.owned_partitions is not None
        )


def check_request(heartbeat: Heartbeat, assignors: Sequence[str], *, client_brings_member_id: bool) -> None:
    """Refuse what no state of the group could make valid."""
    epoch = heartbeat.member_epoch
    if not heartbeat.member_id and (client_brings_member_id or epoch > JOIN_EPOCH or epoch == LEAVE_EPOCH):
        raise _invalid("MemberId can't be empty.")
    for name, value in (
        ("GroupId", heartbeat.group_id),
        ("InstanceId", heartbeat.instance_id),
        ("RackId", heartbeat.rack_id),
    ):
        if value == "":
            raise _invalid(f"{name} can't be empty.")
    if epoch == JOIN_EPOCH:
        _check_join(heartbeat)
    elif epoch == LEAVE_STATIC_EPOCH and heartbeat.instance_id is None:
        raise _invalid("InstanceId can't be null.")
    elif epoch < LEAVE_STATIC_EPOCH:
        raise _invalid("MemberEpoch is invalid.")
    if heartbeat.server_assignor is not None and heartbeat.server_assignor not in assignors:
        raise Refused(
            ErrorCode.unsupported_assignor,
            f"ServerAssignor {heartbeat.server_assignor} is not supported. Supported: {', '.join(assignors)}.",
        )


def _check_join(heartbeat: Heartbeat) -> None:
    if heartbeat.rebalance_timeout_ms == -1:
        raise _invalid("RebalanceTimeoutMs must be provided in first request.")
    if heartbeat.owned_partitions is None or heartbeat.owned_partitions:
        raise _invalid("TopicPartitions must be empty when (re-)joining.")
    if heartbeat.subscribed_topic_names is None and heartbeat.subscribed_topic_regex is None:
        raise _invalid("Either SubscribedTopicNames or SubscribedTopicRegex must be non-null when (re-)joining.")


def _invalid(reason: str) -> Refused:
    return Refused(ErrorCode.invalid_request, reason)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a heartbeat is judged by besides the group itself."""

    topics: Topics
    default_assignor: str
    regex_refresh_interval_ms: int
    may_describe: Callable[[str], bool]
    now_ms: int


@dataclass(frozen=True, slots=True)
class HeartbeatOutcome:
    """The records to log, the member after them, and whether what it has been given changed."""

    records: tuple[ConsumerGroupRecord, ...]
    member: Member
    assignment_changed: bool


def decide_regular_heartbeat(group: Group, heartbeat: Heartbeat, surroundings: Surroundings) -> HeartbeatOutcome:
    """Join, stay, or take a step towards the target. The heartbeat has been checked; the group may be a new one."""
    return _Decider(group, heartbeat, surroundings).decide()


class _Decider:
    """One heartbeat's way through the group; collects records and leaves the group as it is."""

    def __init__(self, group: Group, heartbeat: Heartbeat, surroundings: Surroundings) -> None:
        self._group = group
        self._heartbeat = heartbeat
        self._around = surroundings
        self._records: list[ConsumerGroupRecord] = []
        self._replaced: Member | None = None
        self._resolved: Mapping[str, ResolvedRegex] = group.resolved_regexes

    def decide(self) -> HeartbeatOutcome:
        group, member = self._group, self._find_member()
        metadata = self._updated_metadata(member.metadata)
        if metadata != member.metadata:
            self._records.append(MemberMetadataRecord(group.group_id, member.member_id, metadata))
        epoch = self._decide_group_epoch(member, metadata)
        target_epoch, target = group.assignment_epoch, self._target_until_now(member.member_id)
        if epoch > group.assignment_epoch:
            target_epoch, target = epoch, self._decide_target(epoch, member.member_id, metadata)
        current = reconcile(
            member.current, target_epoch, target, self._heartbeat.owned_partitions, self._is_free(member)
        )
        if current != member.current:
            self._records.append(CurrentAssignmentRecord(group.group_id, member.member_id, current))
        return HeartbeatOutcome(
            tuple(self._records),
            Member(member.member_id, metadata, current),
            assignment_changed=current.assigned != member.current.assigned,
        )

    def _find_member(self) -> Member:
        heartbeat = self._heartbeat
        if heartbeat.instance_id is not None:
            return self._find_static_member(heartbeat.instance_id)
        if heartbeat.member_epoch == JOIN_EPOCH:
            return self._joining_member()
        member = known_member(self._group, heartbeat.member_id)
        _check_epoch(member, heartbeat)
        return member

    def _find_static_member(self, instance_id: str) -> Member:
        heartbeat, member = self._heartbeat, self._group.static_member(instance_id)
        if heartbeat.member_epoch == JOIN_EPOCH:
            return self._joining_member() if member is None else self._take_over(member, instance_id)
        member = known_static_member(member, instance_id, heartbeat.member_id)
        _check_epoch(member, heartbeat)
        return member

    def _joining_member(self) -> Member:
        """Epoch 0 is also how a member that was fenced, or whose join was not answered, begins anew."""
        member_id = self._heartbeat.member_id
        return self._group.members.get(member_id) or Member(member_id)

    def _take_over(self, old: Member, instance_id: str) -> Member:
        """A static member comes back, under a new member id, to the partitions that were kept for it (KIP-345)."""
        heartbeat, group_id = self._heartbeat, self._group.group_id
        if old.current.member_epoch != LEAVE_STATIC_EPOCH:
            raise Refused(
                ErrorCode.unreleased_instance_id,
                f"Static member {heartbeat.member_id} with instance id {instance_id} cannot join the group because the "
                f"instance id is owned by member {old.member_id}.",
            )
        new = Member(
            heartbeat.member_id,
            old.metadata,
            replace(old.current, member_epoch=JOIN_EPOCH, previous_member_epoch=JOIN_EPOCH),
        )
        if new.member_id != old.member_id:
            self._replaced = old
            self._records += [
                *tombstones_of(group_id, old.member_id),
                MemberMetadataRecord(group_id, new.member_id, new.metadata),
                TargetMemberRecord(group_id, new.member_id, self._group.target_of(old.member_id)),
                CurrentAssignmentRecord(group_id, new.member_id, new.current),
            ]
        return new

    def _updated_metadata(self, old: MemberMetadata) -> MemberMetadata:
        heartbeat = self._heartbeat
        names, regex = heartbeat.subscribed_topic_names, heartbeat.subscribed_topic_regex
        return MemberMetadata(
            instance_id=old.instance_id if heartbeat.instance_id is None else heartbeat.instance_id,
            rack_id=old.rack_id if heartbeat.rack_id is None else heartbeat.rack_id,
            client_id=heartbeat.client_id,
            client_host=heartbeat.client_host,
            subscribed_topic_names=old.subscribed_topic_names if names is None else tuple(sorted(set(names))),
            subscribed_topic_regex=old.subscribed_topic_regex if regex is None else regex,
            rebalance_timeout_ms=(
                old.rebalance_timeout_ms if heartbeat.rebalance_timeout_ms == -1 else heartbeat.rebalance_timeout_ms
            ),
            server_assignor=old.server_assignor if heartbeat.server_assignor is None else heartbeat.server_assignor,
        )

    def _decide_group_epoch(self, member: Member, metadata: MemberMetadata) -> int:
        """The epoch rises when a subscription changes, or the topics behind the subscriptions do."""
        group, topics = self._group, self._around.topics
        changed = (
            metadata.subscribed_topic_names != member.metadata.subscribed_topic_names
            or metadata.subscribed_topic_regex != member.metadata.subscribed_topic_regex
        )
        before = self._replaced or group.members.get(member.member_id)
        leaving = [before.metadata] if changed and before is not None else []
        joining = metadata if changed else None
        regexes = group.regexes(leaving, joining)
        matches_changed = self._resolve_regexes(regexes)
        names = group.topic_names(leaving, joining).union(*(self._resolved[regex].topics for regex in regexes))
        metadata_hash = hash_of_topics(names, topics)
        if group.epoch > 0 and not changed and not matches_changed and metadata_hash == group.metadata_hash:
            return group.epoch
        if group.has_partition_metadata:
            self._records.append(PartitionMetadataRecord(group.group_id, present=False))
        self._records.append(GroupEpochRecord(group.group_id, group.epoch + 1, metadata_hash))
        return group.epoch + 1

    def _resolve_regexes(self, regexes: set[str]) -> bool:
        """Bring the matches up to date; True if one of them has other topics than before."""
        group, around = self._group, self._around
        if not regexes and not group.resolved_regexes:
            return False
        known = group.resolved_regexes
        renewed = resolve(
            regexes, known, around.topics, around.may_describe, around.now_ms, around.regex_refresh_interval_ms
        )
        self._records += [ResolvedRegexRecord(group.group_id, regex, None) for regex in sorted(known.keys() - regexes)]
        self._records += [ResolvedRegexRecord(group.group_id, regex, matches) for regex, matches in renewed.items()]
        self._resolved = {**known, **renewed}
        return any(regex not in known or known[regex].topics != renewed[regex].topics for regex in renewed)

    def _decide_target(self, epoch: int, member_id: str, metadata: MemberMetadata) -> Assignment:
        group, topics = self._group, self._around.topics
        members = {other.member_id: other.metadata for other in group.members.values() if other is not self._replaced}
        members[member_id] = metadata
        assignor = preferred_assignor(members.values(), self._around.default_assignor)
        targets = ASSIGNORS[assignor](self._specs_of(members), dict(topics[name] for name in self._names_of(members)))
        self._records += [
            TargetMemberRecord(group.group_id, name, target)
            for name, target in targets.items()
            if self._target_is_new(name) or target != self._target_until_now(name)
        ]
        self._records.append(TargetEpochRecord(group.group_id, epoch))
        return targets[member_id]

    def _names_of(self, members: Mapping[str, MemberMetadata]) -> set[str]:
        found = {_subscription(metadata): metadata for metadata in members.values()}
        return {name for metadata in found.values() for name in self._subscribed_topics(metadata)}

    def _subscribed_topics(self, metadata: MemberMetadata) -> set[str]:
        """The topics that exist among those a member subscribes to, by name or by expression."""
        names = set(metadata.subscribed_topic_names)
        if metadata.subscribed_topic_regex:
            names.update(self._resolved[metadata.subscribed_topic_regex].topics)
        return {name for name in names if name in self._around.topics}

    def _specs_of(self, members: Mapping[str, MemberMetadata]) -> dict[str, MemberSpec]:
        """Members with the same subscription, as nearly all of a group have, share what it stands for."""
        ids: dict[tuple[tuple[str, ...], str | None], frozenset[UUID]] = {}
        specs: dict[str, MemberSpec] = {}
        for name, metadata in members.items():
            subscription = _subscription(metadata)
            if subscription not in ids:
                topics = self._subscribed_topics(metadata)
                ids[subscription] = frozenset(self._around.topics[topic][0] for topic in topics)
            specs[name] = MemberSpec(ids[subscription], self._target_until_now(name))
        return specs

    def _target_until_now(self, member_id: str) -> Assignment:
        if self._replaced is not None and member_id == self._heartbeat.member_id:
            return self._group.target_of(self._replaced.member_id)
        return self._group.target_of(member_id)

    def _target_is_new(self, member_id: str) -> bool:
        is_successor = self._replaced is not None and member_id == self._heartbeat.member_id
        return member_id not in self._group.targets and not is_successor

    def _is_free(self, member: Member) -> Callable[[UUID, int], bool]:
        # What the member itself is still to give up counts as free: it can be given nothing safer than what it has.
        own = {None, member.member_id, self._replaced.member_id if self._replaced else None}
        return lambda topic_id, partition: self._group.holder_of(topic_id, partition) in own


def _subscription(metadata: MemberMetadata) -> tuple[tuple[str, ...], str | None]:
    return metadata.subscribed_topic_names, metadata.subscribed_topic_regex


def preferred_assignor(members: Iterable[MemberMetadata], default: str) -> str:
    """The one that most members ask for; of equals the first by name."""
    asked = Counter(metadata.server_assignor for metadata in members if metadata.server_assignor is not None)
    return min(asked, key=lambda name: (-asked[name], name), default=default)


def known_member(group: Group, member_id: str) -> Member:
    """The member, or the refusal that makes it join anew."""
    member = group.members.get(member_id)
    if member is None:
        raise Refused(ErrorCode.unknown_member_id, f"Member {member_id} is not a member of group {group.group_id}.")
    return member


def known_static_member(member: Member | None, instance_id: str, member_id: str) -> Member:
    """The static member if it is the one that asks; another member of the same instance id fences it."""
    if member is None:
        raise Refused(ErrorCode.unknown_member_id, f"Instance id {instance_id} is unknown.")
    if member.member_id != member_id:
        raise Refused(
            ErrorCode.fenced_instance_id,
            f"Static member {member_id} with instance id {instance_id} was fenced by member {member.member_id}.",
        )
    return member


def tombstones_of(group_id: str, member_id: str) -> list[ConsumerGroupRecord]:
    """What removes a member."""
    return [
        CurrentAssignmentRecord(group_id, member_id, None),
        TargetMemberRecord(group_id, member_id, None),
        MemberMetadataRecord(group_id, member_id, None),
    ]


def _check_epoch(member: Member, heartbeat: Heartbeat) -> None:
    """The previous epoch is good as well, if the member owns no more than it was given: an answer may be lost."""
    known, received = member.current, heartbeat.member_epoch
    if received == known.member_epoch:
        return
    lost_answer = received == known.previous_member_epoch and received < known.member_epoch
    if lost_answer and owns_only(heartbeat.owned_partitions, known.assigned):
        return
    raise Refused(
        ErrorCode.fenced_member_epoch,
        f"The consumer group member has epoch {received}, the group coordinator knows {known.member_epoch}. "
        "The member must abandon all its partitions and rejoin.",
    )
