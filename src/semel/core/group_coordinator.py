"""One place for all groups: which kind a group id is, who may commit and fetch its offsets, and what expires.

A group id is a classic group, a KIP-848 consumer group, or neither: then it may still have offsets, committed by an
administrator or by a consumer that assigns its partitions itself. Kafka calls that a simple group; here it is a classic
group that was never stored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kio.schema.errors import ErrorCode

from semel.core import classic_groups, consumer_group_records, group_records
from semel.core.classic_state import (
    CONSUMER_PROTOCOL_TYPE,
    AnyRecord,
    ClassicGroup,
    GroupDecision,
    GroupSettings,
    GroupState,
    JoinRequest,
    MemberIdentity,
    SyncRequest,
    group_from_log,
    with_fresh_sessions,
)
from semel.core.consumer_groups import ConsumerGroups
from semel.core.group_offsets import (
    ExpiryRule,
    FetchedOffset,
    GroupOffsets,
    OffsetCommit,
    OffsetDecision,
    TopicPartition,
)
from semel.core.group_records import GroupRecord, LoggedRecord, OffsetRecord
from semel.core.refusal import Refused

_LOOKED_AT_AT_ONCE = 500
_FIRST_COMMIT_VERSION_WITH_MEMBER_EPOCH: Final = 9
RECORD_BYTES: Final = 800
"""About what a group, a member or an offset takes besides its texts and bytes."""


@dataclass(frozen=True, slots=True)
class Committer:
    """Who commits: a generation for a classic group, a member epoch for a KIP-848 one; -1 and "" for nobody."""

    member_id: str = ""
    generation_id: int = -1
    group_instance_id: str | None = None


@dataclass(frozen=True, slots=True)
class ListedGroup:
    """A line of ListGroups."""

    group_id: str
    group_type: str
    state: str
    protocol_type: str


class GroupCoordinator:
    """All groups and their offsets. `decide_` methods change nothing; `apply` and the `replay_` methods do.

    >>> coordinator = GroupCoordinator()
    >>> decision = coordinator.decide_commit("g", Committer(), [OffsetCommit("t", 0, 7)], now_ms=0)
    >>> coordinator.apply("g", decision, log_partition=0, log_offset=0)
    >>> coordinator.decide_fetch("g", [("t", 0)])[("t", 0)].value.offset
    7
    """

    def __init__(self, settings: GroupSettings | None = None, consumer_groups: ConsumerGroups | None = None) -> None:
        self.settings = settings or GroupSettings()
        self.offsets = GroupOffsets()
        self.consumer_groups = consumer_groups or ConsumerGroups()
        self._classic: dict[str, ClassicGroup] = {}

    # Questions

    def classic_group(self, group_id: str) -> ClassicGroup | None:
        """The classic group of that id; an empty one where there are only offsets."""
        group = self._classic.get(group_id)
        if group is None and self.offsets.has_group(group_id) and not self.consumer_groups.exists(group_id):
            return ClassicGroup(group_id)
        return group

    def memory_bytes(self) -> int:
        """About what all groups and their offsets take."""
        classic = sum(
            RECORD_BYTES * (1 + len(group.members) + len(group.pending_members)) + group.memory_bytes
            for group in self._classic.values()
        )
        return classic + self.offsets.memory_bytes(RECORD_BYTES) + self.consumer_groups.memory_bytes(RECORD_BYTES)

    def group_ids(self) -> list[str]:
        """Of both kinds, sorted."""
        return sorted({*self.consumer_groups.group_ids(), *self._classic, *self.offsets.group_ids()})

    def listed_group(self, group_id: str) -> ListedGroup | None:
        """What ListGroups tells of a group, if there is one."""
        if self.consumer_groups.exists(group_id):
            return ListedGroup(group_id, "consumer", self.consumer_groups.state_of(group_id), CONSUMER_PROTOCOL_TYPE)
        group = self.classic_group(group_id)
        return None if group is None else ListedGroup(group_id, "classic", group.state.value, group.protocol_type or "")

    def listed_groups(self) -> list[ListedGroup]:
        """All groups of both kinds, by name."""
        listed = (self.listed_group(group_id) for group_id in self.group_ids())
        return [group for group in listed if group is not None]

    def next_deadline_ms(self) -> int | None:
        """When the first classic group needs a `decide_tick`."""
        deadlines = (group.next_deadline_ms() for group in self._classic.values())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    # Members of classic groups

    def decide_join(self, request: JoinRequest, now_ms: int) -> GroupDecision:
        """JoinGroup. A KIP-848 group without members becomes a classic one."""
        if not self.consumer_groups.exists(request.group_id):
            group = self.classic_group(request.group_id)
            return classic_groups.decide_join(group, request, self.settings, now_ms)
        if not self.consumer_groups.is_empty(request.group_id):
            raise Refused(ErrorCode.inconsistent_group_protocol, "the group's members use the protocol of KIP-848")
        decision = classic_groups.decide_join(None, request, self.settings, now_ms)
        return replace(
            decision, records=(*self.consumer_groups.decide_delete(request.group_id).records, *decision.records)
        )

    def decide_sync(self, request: SyncRequest, now_ms: int) -> GroupDecision:
        """SyncGroup."""
        return classic_groups.decide_sync(self._classic.get(request.group_id), request, self.settings, now_ms)

    def decide_heartbeat(self, group_id: str, committer: Committer, now_ms: int) -> GroupDecision:
        """Heartbeat."""
        return classic_groups.decide_heartbeat(
            self._classic.get(group_id),
            group_id,
            member_id=committer.member_id,
            generation_id=committer.generation_id,
            group_instance_id=committer.group_instance_id,
            settings=self.settings,
            now_ms=now_ms,
        )

    def decide_leave(self, group_id: str, members: Sequence[MemberIdentity], now_ms: int) -> GroupDecision:
        """LeaveGroup."""
        return classic_groups.decide_leave(self._classic.get(group_id), group_id, members, self.settings, now_ms)

    def decide_due(self, now_ms: int) -> list[tuple[str, GroupDecision]]:
        """What time brings to each classic group that has something due."""
        return [decided for decided in self.decide_each_due(now_ms) if decided is not None]

    def decide_each_due(self, now_ms: int) -> Iterator[tuple[str, GroupDecision] | None]:
        """The same one by one, each decided when it is asked for. None says only that some more were looked at."""
        for number, group in enumerate(list(self._classic.values())):
            if number % _LOOKED_AT_AT_ONCE == _LOOKED_AT_AT_ONCE - 1:
                yield None
            deadline_ms = group.next_deadline_ms()
            if deadline_ms is None or deadline_ms > now_ms or self._classic.get(group.group_id) is not group:
                continue
            yield group.group_id, classic_groups.decide_tick(group, self.settings, now_ms)

    @property
    def classic_count(self) -> int:
        return len(self._classic)

    # Offsets

    def decide_commit(
        self,
        group_id: str,
        committer: Committer,
        commits: Sequence[OffsetCommit],
        *,
        now_ms: int,
        retention_ms: int | None = None,
        api_version: int = _FIRST_COMMIT_VERSION_WITH_MEMBER_EPOCH,
    ) -> OffsetDecision:
        """OffsetCommit, refused as a whole when the member is not (or no longer) the one it claims to be."""
        kept: ClassicGroup | None = None
        has_member_epochs = api_version >= _FIRST_COMMIT_VERSION_WITH_MEMBER_EPOCH
        if self.consumer_groups.exists(group_id):
            self.consumer_groups.decide_validate_commit(
                group_id, committer.member_id, committer.generation_id, is_transactional=False
            )
            if committer.generation_id >= 0 and not has_member_epochs:
                raise Refused(ErrorCode.unsupported_version, "members by KIP-848 commit with OffsetCommit 9 or newer")
        else:
            missing = ErrorCode.group_id_not_found if has_member_epochs else ErrorCode.illegal_generation
            group = self._group_to_commit_to(group_id, committer, missing)
            _check_commit(group, committer, is_transactional=False)
            if group.state in (GroupState.STABLE, GroupState.PREPARING_REBALANCE):
                kept = classic_groups.with_session_kept(group, committer.member_id, now_ms)
        decision = self.offsets.decide_commit(
            group_id,
            commits,
            now_ms=now_ms,
            retention_ms=retention_ms,
            metadata_max=self.settings.offset_metadata_max_bytes,
        )
        return replace(decision, group=kept)

    def decide_txn_commit(
        self, group_id: str, committer: Committer, commits: Sequence[OffsetCommit], *, now_ms: int
    ) -> OffsetDecision:
        """TxnOffsetCommit: offsets that count once their transaction commits. Fenced by generation (KIP-447)."""
        if self.consumer_groups.exists(group_id):
            self.consumer_groups.decide_validate_commit(
                group_id,
                committer.member_id,
                committer.generation_id,
                is_transactional=True,
                instance_id=committer.group_instance_id,
            )
        else:
            group = self._group_to_commit_to(group_id, committer, ErrorCode.illegal_generation)
            _check_commit(group, committer, is_transactional=True)
        return self.offsets.decide_commit(
            group_id, commits, now_ms=now_ms, metadata_max=self.settings.offset_metadata_max_bytes
        )

    def _group_to_commit_to(self, group_id: str, committer: Committer, missing: ErrorCode) -> ClassicGroup:
        group = self.classic_group(group_id)
        if group is not None:
            return group
        if committer.generation_id >= 0:
            raise Refused(missing, f"there is no group {group_id!r}")
        return ClassicGroup(group_id)

    def decide_fetch(
        self,
        group_id: str,
        partitions: Collection[TopicPartition] | None,
        *,
        require_stable: bool = False,
        member_id: str | None = None,
        member_epoch: int = -1,
    ) -> dict[TopicPartition, FetchedOffset]:
        """OffsetFetch of one group; a member of a KIP-848 group is refused when its epoch is not the current one."""
        if self.consumer_groups.exists(group_id):
            self.consumer_groups.decide_validate_fetch(group_id, member_id, member_epoch)
        return self.offsets.decide_fetch(group_id, partitions, require_stable=require_stable)

    def decide_delete_group(self, group_id: str) -> GroupDecision:
        """DeleteGroups: the group and all its offsets, if it has no members."""
        offsets = self.offsets.decide_delete(group_id).records
        if self.consumer_groups.exists(group_id):
            return GroupDecision(records=(*offsets, *self.consumer_groups.decide_delete(group_id).records))
        group = self._existing_classic(group_id)
        if group.state is not GroupState.EMPTY:
            raise Refused(ErrorCode.non_empty_group, "the group has members")
        return GroupDecision(records=(*offsets, GroupRecord(group_id, None)))

    def decide_delete_offsets(self, group_id: str, partitions: Collection[TopicPartition]) -> OffsetDecision:
        """OffsetDelete: these offsets, except those of topics that members are subscribed to."""
        if not self.consumer_groups.exists(group_id):
            group = self._existing_classic(group_id)
            if group.state is not GroupState.EMPTY and group.protocol_type != CONSUMER_PROTOCOL_TYPE:
                raise Refused(ErrorCode.non_empty_group, "the group has members, whose topics cannot be told")
        rule = self._expiry_rule(group_id)
        free = [where for where in partitions if not rule.is_subscribed_to(where[0])]
        decision = self.offsets.decide_delete(group_id, free)
        codes = dict.fromkeys(partitions, ErrorCode.group_subscribed_to_topic) | dict(decision.codes)
        return replace(decision, codes=codes)

    def decide_topic_deleted(self, topic: str) -> Iterator[tuple[str, OffsetDecision]]:
        """What each group forgets when a topic is deleted."""
        return self.offsets.decide_topic_deleted(topic)

    def decide_expired(self, now_ms: int, retention_ms: int) -> Iterator[tuple[str, GroupDecision]]:
        """Group by group, the offsets that have expired, and groups that have nothing left to be kept for."""
        consumer = set(self.consumer_groups.group_ids())
        for group_id in sorted(self._classic.keys() | self.offsets.group_ids() | consumer):
            gone = ()
            if self._may_expire(group_id):
                gone = self.offsets.decide_expired(group_id, self._expiry_rule(group_id), now_ms, retention_ms).records
            records: tuple[AnyRecord, ...] = gone
            if len(gone) == len(self.offsets.committed(group_id)) and not self.offsets.has_pending(group_id):
                records = (*gone, *self._tombstones_if_idle(group_id))
            if records:
                yield group_id, GroupDecision(records=records)

    def _tombstones_if_idle(self, group_id: str) -> tuple[AnyRecord, ...]:
        if self.consumer_groups.exists(group_id):
            is_left = self.consumer_groups.is_empty(group_id)
            return self.consumer_groups.decide_delete(group_id).records if is_left else ()
        group = self._classic.get(group_id)
        is_idle = group is not None and group.state is GroupState.EMPTY and not group.pending_members
        return (GroupRecord(group_id, None),) if is_idle else ()

    def _may_expire(self, group_id: str) -> bool:
        group = self._classic.get(group_id)
        if group is None or group.protocol_type is None or group.state is GroupState.EMPTY:
            return True
        # While a group rebalances it is not certain what it is subscribed to.
        return group.state is GroupState.STABLE and group.subscribed_topics is not None

    def _expiry_rule(self, group_id: str) -> ExpiryRule:
        if self.consumer_groups.exists(group_id):
            return ExpiryRule(lambda topic: self.consumer_groups.is_subscribed(group_id, topic))
        group = self._classic.get(group_id, ClassicGroup(group_id))
        # KIP-211: a consumer group's offsets live as long as the group, and then for the retention time.
        is_left = group.protocol_type is not None and group.state is GroupState.EMPTY
        return ExpiryRule(group.is_subscribed_to, group.state_since_ms if is_left else None)

    def _existing_classic(self, group_id: str) -> ClassicGroup:
        group = self.classic_group(group_id)
        if group is None:
            raise Refused(ErrorCode.group_id_not_found, f"there is no group {group_id!r}")
        return group

    def decide_give_up_classic(self, group_id: str) -> tuple[LoggedRecord, ...]:
        """What to log when a member by KIP-848 comes to this id: an empty classic group makes room for it.

        One with members stays; then there is no KIP-848 group of this id for the member to join.
        """
        group = self._classic.get(group_id)
        if group is None:
            return ()
        if group.state is not GroupState.EMPTY:
            raise Refused(ErrorCode.group_id_not_found, "the group's members use the classic protocol")
        return (GroupRecord(group_id, None),)

    # Applying

    def apply(
        self,
        group_id: str,
        decision: GroupDecision | OffsetDecision,
        *,
        log_partition: int,
        log_offset: int,
        producer_id: int | None = None,
    ) -> None:
        """A decision whose records are in the log from `log_offset` on takes effect."""
        for number, record in enumerate(decision.records):
            # A group's next value comes with the decision, which knows who waits; its record does not.
            if not isinstance(record, GroupRecord) or record.metadata is None:
                self.replay(
                    record, log_partition=log_partition, log_offset=log_offset + number, producer_id=producer_id
                )
        if decision.group is not None:
            self._classic[group_id] = decision.group

    def replay(self, record: AnyRecord, *, log_partition: int, log_offset: int, producer_id: int | None = None) -> None:
        """Applies one record of the log; a restart does so with all of them."""
        if isinstance(record, OffsetRecord):
            self.offsets.replay_offset(
                record, log_partition=log_partition, log_offset=log_offset, producer_id=producer_id
            )
        elif not isinstance(record, GroupRecord):
            self.consumer_groups.replay(record)
        elif record.metadata is None:
            self._classic.pop(record.group_id, None)
        else:
            self._classic[record.group_id] = group_from_log(record.group_id, record.metadata)

    def replay_marker(self, producer_id: int, *, committed: bool, log_partition: int) -> None:
        """A transaction's marker in a partition of `__consumer_offsets`, live or found by a restart."""
        self.offsets.replay_marker(producer_id, committed=committed, log_partition=log_partition)

    def replay_loaded(self, now_ms: int) -> None:
        """All partitions of the log were read: sessions begin anew, and groups over their limit rebalance."""
        for group_id, group in tuple(self._classic.items()):
            fresh = with_fresh_sessions(group, now_ms)
            self._classic[group_id] = classic_groups.decide_loaded(fresh, self.settings, now_ms).group or fresh
        self.consumer_groups.start_timers(now_ms)


def encode_record(record: AnyRecord) -> tuple[bytes, bytes | None]:
    """Key and value of a record of either kind of group.

    >>> decode_record(*encode_record(GroupRecord("g", None)))
    GroupRecord(group_id='g', metadata=None)
    """
    if isinstance(record, LoggedRecord):
        return group_records.encode(record)
    return consumer_group_records.encode(record)


def held_bytes(record: AnyRecord) -> int:
    """About what a record of a KIP-848 group takes besides its own bytes. A classic group is counted when one joins."""
    return 0 if isinstance(record, LoggedRecord) else consumer_group_records.memory_bytes_of(record)


def decode_record(key: bytes, value: bytes | None) -> AnyRecord | None:
    """The typed record; None for a kind that is not known here and is stepped over."""
    return group_records.decode(key, value) or consumer_group_records.decode(key, value)


def _check_commit(group: ClassicGroup, committer: Committer, *, is_transactional: bool) -> None:
    classic_groups.check_offset_commit(
        group,
        member_id=committer.member_id,
        generation_id=committer.generation_id,
        group_instance_id=committer.group_instance_id,
        is_transactional=is_transactional,
    )
