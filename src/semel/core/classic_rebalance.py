"""The steps of a classic group's rebalance, on a draft that lives inside one decision.

A draft has its own copies of the group's members and indexes, and changes these in place: what happens to a thousand
members in one decision takes a thousand steps and not a million. It collects the records and replies that come up.
Nothing else sees it before the decision is made, so a decision whose records cannot be stored leaves no trace.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from kio.schema.errors import ErrorCode

from semel.core.classic_state import (
    ClassicGroup,
    ClassicMember,
    GroupDecision,
    GroupSettings,
    GroupState,
    JoinedMember,
    JoinReply,
    JoinRequest,
    Reply,
    SyncReply,
    metadata_record,
    subscribed_topics,
)
from semel.core.group_records import LoggedRecord
from semel.core.refusal import Refused


class Draft:
    """A decision in the making."""

    def __init__(self, group: ClassicGroup, settings: GroupSettings, now_ms: int) -> None:
        self._members = dict(group.members)
        self._pending_members = dict(group.pending_members)
        self._static_members = dict(group.static_members)
        self._protocol_counts = dict(group.protocol_counts)
        self._pending_sync = set(group.pending_sync)
        self.group = replace(
            group,
            members=self._members,
            pending_members=self._pending_members,
            static_members=self._static_members,
            protocol_counts=self._protocol_counts,
            pending_sync=self._pending_sync,
        )
        self.records: list[LoggedRecord] = []
        self.replies: list[tuple[int, Reply]] = []
        self._settings = settings
        self._now_ms = now_ms

    def decision(self, *, code: ErrorCode = ErrorCode.none, left: tuple[ErrorCode, ...] = ()) -> GroupDecision:
        """What came of it."""
        return GroupDecision(self.group, tuple(self.records), tuple(self.replies), code, left)

    # Members

    def add_member(self, request: JoinRequest, member_id: str) -> None:
        """A member comes in and waits for the end of the join phase."""
        group = self.group
        member = ClassicMember(
            member_id,
            request.group_instance_id,
            request.client_id,
            request.client_host,
            request.rebalance_timeout_ms,
            request.session_timeout_ms,
            request.protocols,
            # It does not know its id yet and cannot send heartbeats. If its connection broke, it comes again as another
            # member, and this one would hold up every rebalance: hence a time-out of its own.
            session_deadline_ms=self._now_ms + self._settings.new_member_join_timeout_ms,
            is_new=True,
            join_request_id=request.request_id,
        )
        self._change(
            protocol_type=group.protocol_type if group.members else request.protocol_type,
            leader_id=group.leader_id or member_id,
            new_member_added=group.new_member_added or group.is_initial_rebalance,
        )
        self._pending_members.pop(member_id, None)
        self.put(member)

    def update_member(self, member_id: str, request: JoinRequest) -> None:
        """A known member joins again, maybe with another subscription, and waits for the end of the join phase."""
        member = self.group.members[member_id]
        # The same member asks again while its first request still waits: that connection is lost, and nobody would ever
        # answer it.
        self._answer_join(member, JoinReply(member_id, ErrorCode.rebalance_in_progress))
        self.put(
            replace(
                member,
                protocols=request.protocols,
                rebalance_timeout_ms=request.rebalance_timeout_ms,
                session_timeout_ms=request.session_timeout_ms,
                join_request_id=request.request_id,
            )
        )

    def replace_static_member(self, old_member_id: str, request: JoinRequest) -> None:
        """A restarted static member takes its place again under a new id; whoever used the old one is fenced."""
        old = self.group.members[old_member_id]
        self._answer_join(old, JoinReply(old_member_id, ErrorCode.fenced_instance_id))
        self._answer_sync(old, SyncReply(ErrorCode.fenced_instance_id))
        new = replace(
            old,
            member_id=request.new_member_id,
            protocols=request.protocols,
            rebalance_timeout_ms=request.rebalance_timeout_ms,
            session_timeout_ms=request.session_timeout_ms,
            session_deadline_ms=self._now_ms + request.session_timeout_ms,
            is_new=False,
            join_request_id=request.request_id,
            sync_request_id=None,
        )
        self._drop(old_member_id)
        self.put(new)
        if self.group.leader_id == old_member_id:
            self._change(leader_id=new.member_id)
        self.mark_synced(old_member_id)

    def remove_member(self, member_id: str) -> None:
        """A member goes; what it waits for is answered, so that a client that is still there starts afresh."""
        member = self._members.get(member_id)
        if member is not None:
            self._answer_join(member, JoinReply("", ErrorCode.unknown_member_id))
            self._answer_sync(member, SyncReply(ErrorCode.unknown_member_id))
        self._drop(member_id)
        self._pending_members.pop(member_id, None)
        if self.group.leader_id == member_id:
            self._change(leader_id=next(iter(self._members), None))
        self.mark_synced(member_id)

    def refuse_too_many_pending(self) -> None:
        """No more members are told an id than could join with it."""
        if len(self._pending_members) >= self._settings.max_size:
            raise Refused(ErrorCode.group_max_size_reached, "too many members were told an id and have not joined")

    def remember_pending(self, member_id: str, timeout_ms: int) -> None:
        """The member was told its id and is expected to come back with it (KIP-394)."""
        self._pending_members[member_id] = self._now_ms + timeout_ms

    def keep_session(self, member_id: str) -> None:
        """The member gave a sign of life."""
        member = self.group.members[member_id]
        self.put(replace(member, session_deadline_ms=self._session_deadline_ms(member)))

    def _session_deadline_ms(self, member: ClassicMember) -> int:
        return self._now_ms + member.session_timeout_ms

    def put(self, member: ClassicMember) -> None:
        """The member's next value."""
        old = self._members.get(member.member_id)
        self._members[member.member_id] = member
        if old is None or old.protocols is not member.protocols:
            self._count_protocols(old, -1)
            self._count_protocols(member, +1)
        if member.group_instance_id is not None:
            self._static_members[member.group_instance_id] = member.member_id

    def _drop(self, member_id: str) -> None:
        old = self._members.pop(member_id, None)
        self._count_protocols(old, -1)
        if old is not None and self._static_members.get(old.group_instance_id or "") == member_id:
            del self._static_members[old.group_instance_id or ""]

    def _count_protocols(self, member: ClassicMember | None, by: int) -> None:
        for name in () if member is None else member.protocol_names:
            count = self._protocol_counts.get(name, 0) + by
            if count:
                self._protocol_counts[name] = count
            else:
                del self._protocol_counts[name]

    # Join phase

    def rebalance_or_complete_join(self) -> None:
        """Begin a rebalance, or if one is under way see whether its join phase is over."""
        if self.group.state is not GroupState.PREPARING_REBALANCE:
            self.prepare_rebalance()
        elif not self.group.is_initial_rebalance:
            self.complete_join_if_all_joined()

    def prepare_rebalance(self) -> None:
        """All members are to join again."""
        group = self.group
        if group.state is GroupState.COMPLETING_REBALANCE:
            self._cancel_syncs()
        is_initial = group.state is GroupState.EMPTY
        self._change(
            state=GroupState.PREPARING_REBALANCE,
            state_since_ms=self._now_ms,
            is_initial_rebalance=is_initial,
            new_member_added=False,
            sync_deadline_ms=None,
        )
        self._pending_sync.clear()
        delay_ms = self._settings.initial_rebalance_delay_ms
        if is_initial and delay_ms > 0:
            # More members are likely to come at the start of an application: one rebalance for all of them (KIP-134).
            self._change(
                join_deadline_ms=self._now_ms + delay_ms,
                initial_remaining_ms=max(self.group.rebalance_timeout_ms - delay_ms, 0),
            )
        elif is_initial or self.group.has_all_members_joined:
            self.complete_join()
        else:
            self._change(join_deadline_ms=self._now_ms + self.group.rebalance_timeout_ms)

    def complete_join_if_all_joined(self) -> None:
        """End the join phase, if there is one and nobody is missing."""
        if self.group.state is GroupState.PREPARING_REBALANCE and self.group.has_all_members_joined:
            self.complete_join()

    def end_of_join_delay(self) -> None:
        """The time for joining is over; while new members keep coming to a new group, it is prolonged."""
        group = self.group
        if group.is_initial_rebalance and group.new_member_added and group.initial_remaining_ms > 0:
            delay_ms = min(self._settings.initial_rebalance_delay_ms, group.initial_remaining_ms)
            self._change(
                new_member_added=False,
                join_deadline_ms=self._now_ms + delay_ms,
                initial_remaining_ms=group.initial_remaining_ms - delay_ms,
            )
        else:
            self.complete_join()

    def complete_join(self) -> None:
        """Who is missing goes, except static members, which may be restarting; the next generation begins."""
        for member in tuple(self.group.members.values()):
            if member.join_request_id is None and member.group_instance_id is None:
                self.remove_member(member.member_id)
        if self.group.members and not self._elect_joined_leader():
            # Only absent static members are left. Wait on, until one is back or their sessions are over.
            self._change(join_deadline_ms=self._now_ms + self.group.rebalance_timeout_ms)
            return
        self._change(
            generation_id=self.group.generation_id + 1,
            protocol_name=self.select_protocol() if self.group.members else None,
            state=GroupState.COMPLETING_REBALANCE if self.group.members else GroupState.EMPTY,
            state_since_ms=self._now_ms,
            is_initial_rebalance=False,
            join_deadline_ms=None,
            sync_deadline_ms=self._now_ms + self.group.rebalance_timeout_ms if self.group.members else None,
        )
        self._pending_sync.clear()
        self._pending_sync.update(self._members)
        self._change(subscribed_topics=subscribed_topics(self.group))
        if not self.group.members:
            self.records.append(metadata_record(self.group))
        for member in tuple(self.group.members.values()):
            self._answer_join(member, self.join_reply(member.member_id))
            deadline_ms = self._session_deadline_ms(member)
            self.put(replace(member, is_new=False, join_request_id=None, session_deadline_ms=deadline_ms))

    def _elect_joined_leader(self) -> bool:
        """The leader must be one who joined, for it is to make the assignment."""
        members = self.group.members
        leader = members.get(self.group.leader_id or "")
        if leader is not None and leader.join_request_id is not None:
            return True
        joined = next((member.member_id for member in members.values() if member.join_request_id is not None), None)
        if joined is not None:
            self._change(leader_id=joined)
        return joined is not None

    def select_protocol(self) -> str:
        """The protocol that all members know and most of them like best."""
        members = tuple(self.group.members.values())
        votes = Counter(
            next(protocol.name for protocol in member.protocols if self.group.is_known_to_all(protocol.name))
            for member in members
        )
        return votes.most_common(1)[0][0]

    def join_reply(self, member_id: str) -> JoinReply:
        """The current generation; the leader is told all members, to assign partitions to them."""
        group = self.group
        told = group.members.values() if member_id == group.leader_id else ()
        return JoinReply(
            member_id,
            generation_id=group.generation_id,
            protocol_type=group.protocol_type,
            protocol_name=group.protocol_name,
            leader_id=group.leader_id or "",
            members=tuple(
                JoinedMember(member.member_id, member.group_instance_id, member.metadata_for(group.protocol_name))
                for member in told
            ),
        )

    def answer_static_member(self, member_id: str, reply: JoinReply) -> None:
        """A static member is back in an unchanged group: it is answered at once, and its new id is logged."""
        member = self.group.members[member_id]
        self._answer_join(member, reply)
        self.put(replace(member, join_request_id=None))
        self.records.append(metadata_record(self.group))

    # Sync phase

    def wait_for_assignment(self, member_id: str, request_id: int) -> None:
        """The member waits for what the leader will assign to it."""
        member = self.group.members[member_id]
        # As in `update_member`: a repeated request takes the place of one whose connection is lost.
        self._answer_sync(member, SyncReply(ErrorCode.rebalance_in_progress))
        self.put(replace(member, sync_request_id=request_id))
        self.mark_synced(member_id)

    def mark_synced(self, member_id: str) -> None:
        """The member is no longer among those that are removed for not asking for their assignment."""
        self._pending_sync.discard(member_id)
        if not self._pending_sync and self.group.sync_deadline_ms is not None:
            self._change(sync_deadline_ms=None)

    def assign(self, assignments: dict[str, bytes]) -> None:
        """The leader's assignment is logged, then told to everybody who waits for it; the group is stable."""
        self._change(state=GroupState.STABLE, state_since_ms=self._now_ms)
        for member in tuple(self._members.values()):
            waits = member.sync_request_id is not None
            given = replace(
                member,
                assignment=assignments.get(member.member_id, b""),
                sync_request_id=None,
                session_deadline_ms=self._session_deadline_ms(member) if waits else member.session_deadline_ms,
            )
            self.put(given)
            self._answer_sync(member, self.sync_reply(member.member_id))
        self.records.append(metadata_record(self.group))

    def sync_reply(self, member_id: str) -> SyncReply:
        """What the member was given."""
        group = self.group
        return SyncReply(
            protocol_type=group.protocol_type,
            protocol_name=group.protocol_name,
            assignment=group.members[member_id].assignment,
        )

    def _cancel_syncs(self) -> None:
        for member in tuple(self.group.members.values()):
            self._answer_sync(member, SyncReply(ErrorCode.rebalance_in_progress))
            waited = member.sync_request_id is not None
            deadline_ms = self._session_deadline_ms(member) if waited else member.session_deadline_ms
            self.put(replace(member, assignment=b"", sync_request_id=None, session_deadline_ms=deadline_ms))

    # Bookkeeping

    def _change(self, **fields: Any) -> None:
        self.group = replace(self.group, **fields)

    def _answer_join(self, member: ClassicMember, reply: JoinReply) -> None:
        if member.join_request_id is not None:
            self.replies.append((member.join_request_id, reply))

    def _answer_sync(self, member: ClassicMember, reply: SyncReply) -> None:
        if member.sync_request_id is not None:
            self.replies.append((member.sync_request_id, reply))
