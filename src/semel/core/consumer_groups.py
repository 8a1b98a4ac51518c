"""KIP-848 consumer groups: the coordinator assigns, members report by heartbeat and move to their target step by step.

`decide_*` changes nothing and returns what is to be logged; `replay` applies a record, live and on recovery. Only the
timers are soft state: `replay_decision` (or `note_heartbeat` after the records) restarts a member's session timer, and
`start_timers` starts all of them after recovery.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kio.schema.errors import ErrorCode

from semel.core.assignors import ASSIGNORS
from semel.core.consumer_group_heartbeat import (
    Heartbeat,
    Surroundings,
    check_request,
    decide_regular_heartbeat,
    known_member,
    known_static_member,
    preferred_assignor,
    tombstones_of,
)
from semel.core.consumer_group_reconciliation import Owned
from semel.core.consumer_group_records import (
    NOTHING,
    Assignment,
    ConsumerGroupRecord,
    CurrentAssignmentRecord,
    GroupEpochRecord,
    MemberMetadata,
    MemberMetadataRecord,
    MemberState,
    PartitionMetadataRecord,
    ResolvedRegexRecord,
    TargetEpochRecord,
    TargetMemberRecord,
    partitions_bytes,
)
from semel.core.consumer_group_state import JOIN_EPOCH, LEAVE_STATIC_EPOCH, Group, Member
from semel.core.consumer_group_subscriptions import Topics, hash_of_topics
from semel.core.consumer_group_timers import MemberTimers
from semel.core.refusal import Refused


@dataclass(frozen=True, slots=True)
class ConsumerGroupSettings:
    """Kafka's `group.consumer.*` settings; the first assignor serves groups whose members ask for none."""

    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 5_000
    max_size: int = 2**31 - 1
    assignors: tuple[str, ...] = tuple(ASSIGNORS)
    regex_refresh_interval_ms: int = 600_000


@dataclass(frozen=True, slots=True)
class HeartbeatResponse:
    """What the member is told; `assignment` None means "as before"."""

    member_id: str
    member_epoch: int
    heartbeat_interval_ms: int
    assignment: Assignment | None = None


@dataclass(frozen=True, slots=True)
class ConsumerGroupDecision:
    """Records to log as one batch, the answer (None when a timer decided), and who has been heard when."""

    group_id: str
    records: tuple[ConsumerGroupRecord, ...]
    response: HeartbeatResponse | None = None
    heard_member_id: str | None = None
    now_ms: int = 0


@dataclass(frozen=True, slots=True)
class MemberDescription:
    """A member for ConsumerGroupDescribe."""

    member_id: str
    member_epoch: int
    metadata: MemberMetadata
    assigned: Assignment
    target: Assignment


@dataclass(frozen=True, slots=True)
class ConsumerGroupDescription:
    """A group for ConsumerGroupDescribe."""

    group_id: str
    state: str
    group_epoch: int
    assignment_epoch: int
    assignor_name: str
    members: tuple[MemberDescription, ...]


_TOPIC_BYTES: Final = 60
"""A place in a list and its share of a name that others have as well."""


class ConsumerGroups:
    """All consumer groups of this coordinator.

    >>> from uuid import UUID
    >>> groups, topics = ConsumerGroups(), {"orders": (UUID(int=1), 2)}
    >>> decision = groups.decide_heartbeat(
    ...     "g", "m", 0, None, None, 300_000, "client", "/127.0.0.1", ["orders"], None, None, {},
    ...     topics=topics, now_ms=0,
    ... )
    >>> decision.response.member_epoch, sorted(decision.response.assignment[UUID(int=1)])
    (1, [0, 1])
    >>> groups.exists("g")
    False
    >>> groups.replay_decision(decision)
    >>> groups.state_of("g")
    'Stable'
    """

    def __init__(self, settings: ConsumerGroupSettings | None = None) -> None:
        self.settings = settings or ConsumerGroupSettings()
        self._groups: dict[str, Group] = {}
        self._timers = MemberTimers()

    def group_ids(self) -> list[str]:
        return list(self._groups)

    def memory_bytes(self, each_bytes: int) -> int:
        """About what they take, at `each_bytes` for a group, a member, and a few of its topics."""
        return sum(
            each_bytes * (1 + len(group.members) + len(group.topic_name_counts) + len(group.resolved_regexes))
            + group.metadata_bytes
            + sum(each_bytes * (1 + len(target)) + partitions_bytes(target) for target in group.targets.values())
            + _TOPIC_BYTES * sum(len(resolved.topics) for resolved in group.resolved_regexes.values())
            for group in self._groups.values()
        )

    def exists(self, group_id: str) -> bool:
        return group_id in self._groups

    def is_empty(self, group_id: str) -> bool:
        """Whether the group exists and has no members."""
        return group_id in self._groups and not self._groups[group_id].members

    def state_of(self, group_id: str) -> str:
        """Kafka's name of the state; "Dead" for a group that does not exist."""
        return self._groups[group_id].state if group_id in self._groups else "Dead"

    def is_subscribed(self, group_id: str, topic: str) -> bool:
        """Whether a member reads the topic, by name or by expression; its offsets must then not be deleted."""
        group = self._groups.get(group_id)
        return group is not None and (
            topic in group.topic_name_counts
            or any(topic in resolved.topics for resolved in group.resolved_regexes.values())
        )

    def describe(self, group_id: str) -> ConsumerGroupDescription:
        group = self._group(group_id)
        metadata = (member.metadata for member in group.members.values())
        return ConsumerGroupDescription(
            group_id,
            group.state,
            group.epoch,
            group.assignment_epoch,
            preferred_assignor(metadata, self.settings.assignors[0]),
            tuple(
                MemberDescription(
                    member.member_id,
                    member.current.member_epoch,
                    member.metadata,
                    member.current.assigned,
                    group.target_of(member.member_id),
                )
                for member in group.members.values()
            ),
        )

    def decide_heartbeat(
        self,
        group_id: str,
        member_id: str,
        member_epoch: int,
        instance_id: str | None,
        rack_id: str | None,
        rebalance_timeout_ms: int,
        client_id: str,
        client_host: str,
        subscribed_topic_names: Sequence[str] | None,
        subscribed_topic_regex: str | None,
        server_assignor: str | None,
        owned_partitions: Owned,
        *,
        topics: Topics,
        now_ms: int,
        new_member_id: Callable[[], str] | None = None,
        may_describe: Callable[[str], bool] = lambda topic: True,
    ) -> ConsumerGroupDecision:
        """Join (epoch 0), stay, leave (-1), or leave for a moment as a static member (-2).

        `topics` holds id and partition count of every topic. `new_member_id` makes an id for a member that brings
        none; without it (version 1 of the API) that is an invalid request. `may_describe` hides topics from regular
        expressions.
        """
        heartbeat = Heartbeat(
            group_id,
            member_id,
            member_epoch,
            instance_id,
            rack_id,
            rebalance_timeout_ms,
            client_id,
            client_host,
            subscribed_topic_names,
            subscribed_topic_regex,
            server_assignor,
            owned_partitions,
        )
        check_request(heartbeat, self.settings.assignors, client_brings_member_id=new_member_id is None)
        if member_epoch < JOIN_EPOCH:
            return self._decide_leave(heartbeat, topics, now_ms)
        group = self._groups.get(group_id) if member_epoch == JOIN_EPOCH else self._group(group_id)
        self._check_size(group, member_id)
        if not member_id and new_member_id is not None:
            heartbeat = replace(heartbeat, member_id=new_member_id())
        outcome = decide_regular_heartbeat(
            group or Group(group_id),
            heartbeat,
            Surroundings(
                topics, self.settings.assignors[0], self.settings.regex_refresh_interval_ms, may_describe, now_ms
            ),
        )
        known = None if group is None else group.members.get(member_id)
        # A repeat with the epoch before: the answer that had the new assignment was lost. Kafka leaves that to clients.
        is_repeat = known is not None and member_epoch < known.current.member_epoch
        tells_assignment = member_epoch == JOIN_EPOCH or heartbeat.is_full or outcome.assignment_changed or is_repeat
        current = outcome.member.current
        response = HeartbeatResponse(
            outcome.member.member_id,
            current.member_epoch,
            self.settings.heartbeat_interval_ms,
            current.assigned if tells_assignment else None,
        )
        return ConsumerGroupDecision(group_id, outcome.records, response, outcome.member.member_id, now_ms)

    def decide_tick(self, now_ms: int, members_max: int | None = None) -> list[ConsumerGroupDecision]:
        """Fence the members that were silent for too long or kept partitions they had to give up, group by group.

        At most `members_max` of them, if it is given: ask again for the others.
        """
        late: dict[str, list[Member]] = {}
        for group_id, member_id in self._timers.expired(now_ms, self.settings.session_timeout_ms)[:members_max]:
            late.setdefault(group_id, []).append(self._groups[group_id].members[member_id])
        # The hash of the topics is left as it is: the next heartbeat, which knows the topics, sets it right.
        return [
            ConsumerGroupDecision(
                group_id, _fence(self._groups[group_id], members, self._groups[group_id].metadata_hash), now_ms=now_ms
            )
            for group_id, members in late.items()
        ]

    def next_deadline_ms(self) -> int | None:
        """When `decide_tick` will next have something to do, or None."""
        return self._timers.next_deadline_ms(self.settings.session_timeout_ms)

    def decide_delete(self, group_id: str) -> ConsumerGroupDecision:
        """The tombstones of an empty group; refuses one with members."""
        group = self._group(group_id)
        if group.members:
            raise Refused(ErrorCode.non_empty_group, f"Group {group_id} has members.")
        records: list[ConsumerGroupRecord] = [
            *(ResolvedRegexRecord(group_id, regex, None) for regex in group.resolved_regexes),
            TargetEpochRecord(group_id, None),
        ]
        if group.has_partition_metadata:
            records.append(PartitionMetadataRecord(group_id, present=False))
        return ConsumerGroupDecision(group_id, (*records, GroupEpochRecord(group_id, None)))

    def decide_validate_commit(
        self,
        group_id: str,
        member_id: str,
        member_epoch: int,
        *,
        is_transactional: bool,
        instance_id: str | None = None,
    ) -> None:
        """Refuse an offset commit that does not come from a current member.

        Without members, a commit with a negative epoch is an administrator's. A transactional one may name no member
        at all, as old clients do (before KIP-447); a stale epoch is then told by the code those clients know.
        """
        group = self._group(group_id)
        if member_epoch < 0 and not group.members:
            return
        if is_transactional and member_epoch == -1 and not member_id and instance_id is None:
            return
        try:
            _check_member(group, member_id, member_epoch)
        except Refused as refused:
            if is_transactional and refused.code is ErrorCode.stale_member_epoch:
                raise Refused(ErrorCode.illegal_generation, refused.reason) from refused
            raise

    def decide_validate_fetch(self, group_id: str, member_id: str | None, member_epoch: int) -> None:
        """Refuse an offset fetch in the name of a member that is not current; without a name anybody may look."""
        group = self._group(group_id)
        if not member_id and member_epoch < 0:
            return
        _check_member(group, member_id or "", member_epoch)

    def replay(self, record: ConsumerGroupRecord) -> None:
        """Apply one record. A tombstone of something unknown is no error: compaction may have taken the rest."""
        group_id = record.group_id
        if isinstance(record, GroupEpochRecord) and record.epoch is None:
            self._replay_group_deleted(group_id)
            return
        group = self._groups.get(group_id)
        if group is None:
            if _is_tombstone(record):
                return
            group = self._groups[group_id] = Group(group_id)
        group.replay(record)
        if isinstance(record, MemberMetadataRecord) and record.metadata is None:
            self._timers.forget((group_id, record.member_id))
        elif isinstance(record, CurrentAssignmentRecord):
            self._timers.end_revocation((group_id, record.member_id))

    def replay_decision(self, decision: ConsumerGroupDecision) -> None:
        """Apply a decision whose records are in the log: the records, then the timer of the member that was heard."""
        for record in decision.records:
            self.replay(record)
        if decision.heard_member_id is not None:
            self.note_heartbeat(decision.group_id, decision.heard_member_id, decision.now_ms)

    def note_heartbeat(self, group_id: str, member_id: str, now_ms: int) -> None:
        """Restart the session timer, and start the rebalance timer of a member that has to give up partitions.

        The runtime calls it with every heartbeat decision, after replaying its records; it is the only thing that a
        heartbeat changes in the steady state. A member that has just left is not there, which is fine.
        """
        group = self._groups.get(group_id)
        member = None if group is None else group.members.get(member_id)
        if member is None:
            return
        self._timers.hear((group_id, member_id), now_ms)
        if (
            member.current.state is MemberState.UNREVOKED_PARTITIONS
            and member.current.member_epoch != LEAVE_STATIC_EPOCH
        ):
            self._timers.await_revocation((group_id, member_id), now_ms + max(0, member.metadata.rebalance_timeout_ms))

    def start_timers(self, now_ms: int) -> None:
        """Give every member its full time again; called once when recovery has replayed the log."""
        for group in self._groups.values():
            for member_id in group.members:
                self.note_heartbeat(group.group_id, member_id, now_ms)

    def _decide_leave(self, heartbeat: Heartbeat, topics: Topics, now_ms: int) -> ConsumerGroupDecision:
        group, member_id = self._group(heartbeat.group_id), heartbeat.member_id
        if heartbeat.instance_id is None:
            member = known_member(group, member_id)
        else:
            static = group.static_member(heartbeat.instance_id)
            member = known_static_member(static, heartbeat.instance_id, member_id)
        response = HeartbeatResponse(member_id, heartbeat.member_epoch, 0)
        if heartbeat.member_epoch == LEAVE_STATIC_EPOCH:
            # It will be back: its partitions stay its own until the session ends, so no other member moves.
            current = replace(member.current, member_epoch=LEAVE_STATIC_EPOCH, pending_revocation=NOTHING)
            record = CurrentAssignmentRecord(group.group_id, member_id, current)
            return ConsumerGroupDecision(group.group_id, (record,), response, None, now_ms)
        leaving = [member.metadata]
        regexes = group.regexes(leaving)
        names = group.topic_names(leaving).union(
            *(resolved.topics for regex, resolved in group.resolved_regexes.items() if regex in regexes)
        )
        records = _fence(group, [member], hash_of_topics(names, topics))
        return ConsumerGroupDecision(group.group_id, records, response, None, now_ms)

    def _check_size(self, group: Group | None, member_id: str) -> None:
        if group is not None and len(group.members) >= self.settings.max_size and member_id not in group.members:
            raise Refused(
                ErrorCode.group_max_size_reached,
                f"The consumer group has reached its maximum capacity of {self.settings.max_size} members.",
            )

    def _group(self, group_id: str) -> Group:
        group = self._groups.get(group_id)
        if group is None:
            raise Refused(ErrorCode.group_id_not_found, f"Group {group_id} not found.")
        return group

    def _replay_group_deleted(self, group_id: str) -> None:
        group = self._groups.pop(group_id, None)
        for member_id in () if group is None else group.members:
            self._timers.forget((group_id, member_id))


def _fence(group: Group, members: Sequence[Member], metadata_hash: int) -> tuple[ConsumerGroupRecord, ...]:
    """Remove members; the higher group epoch makes the next heartbeat hand their partitions to others."""
    records = [record for member in members for record in tombstones_of(group.group_id, member.member_id)]
    regexes = group.regexes([member.metadata for member in members])
    unused = sorted(group.resolved_regexes.keys() - regexes)
    records += (ResolvedRegexRecord(group.group_id, regex, None) for regex in unused)
    return (*records, GroupEpochRecord(group.group_id, group.epoch + 1, metadata_hash))


def _check_member(group: Group, member_id: str, member_epoch: int) -> None:
    known = known_member(group, member_id).current.member_epoch
    if member_epoch != known:
        raise Refused(
            ErrorCode.stale_member_epoch,
            f"The received member epoch {member_epoch} does not match the expected member epoch {known}.",
        )


def _is_tombstone(record: ConsumerGroupRecord) -> bool:
    match record:
        case (
            GroupEpochRecord(_, None)
            | PartitionMetadataRecord(_, False)
            | MemberMetadataRecord(_, _, None)
            | TargetEpochRecord(_, None)
            | TargetMemberRecord(_, _, None)
            | CurrentAssignmentRecord(_, _, None)
            | ResolvedRegexRecord(_, _, None)
        ):
            return True
        case _:
            return False
