"""Groups with a log, a clock that moves when told, and clients that wait: what a broker does, without one."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from kio.schema.errors import ErrorCode

from semel.core import group_records
from semel.core.classic_state import (
    ClassicGroup,
    GroupDecision,
    GroupSettings,
    JoinReply,
    JoinRequest,
    MemberIdentity,
    MemberProtocol,
    Reply,
    SyncReply,
    SyncRequest,
)
from semel.core.group_coordinator import Committer, GroupCoordinator
from semel.core.group_offsets import OffsetCommit, OffsetDecision
from semel.core.group_records import GroupMetadata, GroupRecord, LoggedRecord
from semel.core.refusal import Refused

GROUP = "g"


def subscription(*topics: str) -> bytes:
    """A consumer's subscription, version 0: topics and no user data."""
    names = b"".join(struct.pack(">h", len(topic)) + topic.encode() for topic in topics)
    return struct.pack(">hi", 0, len(topics)) + names + struct.pack(">i", -1)


def protocols(*names: str, topics: Sequence[str] = ("t",)) -> tuple[MemberProtocol, ...]:
    return tuple(MemberProtocol(name, subscription(*topics)) for name in names or ("range",))


@contextmanager
def refused(code: ErrorCode) -> Iterator[None]:
    """The block must be refused with this code."""
    with pytest.raises(Refused) as caught:
        yield
    assert caught.value.code is code


class GroupWorld:
    """One group's coordinator."""

    def __init__(self, **settings: int) -> None:
        self.settings = GroupSettings(**settings)
        self.coordinator = GroupCoordinator(self.settings)
        self.now_ms = 1_000_000
        self.log: list[tuple[LoggedRecord | bool, int | None]] = []
        self.replies: dict[int, Reply] = {}
        self.disk_is_full = False
        self._last_request_id = 0

    @property
    def group(self) -> ClassicGroup:
        group = self.coordinator.classic_group(GROUP)
        assert group is not None
        return group

    @property
    def logged_group(self) -> GroupMetadata | None:
        """The group as the log has it."""
        found = [record.metadata for record, _ in self.log if isinstance(record, GroupRecord)]
        return found[-1] if found else None

    def new_request_id(self) -> int:
        self._last_request_id += 1
        return self._last_request_id

    def carry_out(self, decision: GroupDecision | OffsetDecision, producer_id: int | None = None) -> bool:
        """Log, apply, answer; False when the disk refused and nothing happened."""
        if self.disk_is_full and decision.records:
            return False
        log_offset = len(self.log)
        for record in decision.records:
            assert isinstance(record, LoggedRecord)
            self.log.append((group_records.decode(*group_records.encode(record)) or record, producer_id))
        self.coordinator.apply(GROUP, decision, log_partition=0, log_offset=log_offset, producer_id=producer_id)
        for request_id, reply in decision.replies:
            assert request_id not in self.replies, "a request is answered once"
            self.replies[request_id] = reply
        return True

    def mark(self, producer_id: int, *, committed: bool) -> None:
        self.log.append((committed, producer_id))
        self.coordinator.replay_marker(producer_id, committed=committed, log_partition=0)

    def restart(self) -> None:
        """A new process reads the log. Clients that waited lost their connection."""
        self.coordinator = GroupCoordinator(self.settings)
        for log_offset, (record, producer_id) in enumerate(self.log):
            if isinstance(record, bool):
                assert producer_id is not None
                self.coordinator.replay_marker(producer_id, committed=record, log_partition=0)
            else:
                self.coordinator.replay(record, log_partition=0, log_offset=log_offset, producer_id=producer_id)
        self.coordinator.replay_loaded(self.now_ms)

    def join(
        self,
        member_id: str = "",
        *,
        names: Sequence[str] = ("range",),
        topics: Sequence[str] = ("t",),
        instance_id: str | None = None,
        version: int = 9,
        session_timeout_ms: int = 10_000,
        rebalance_timeout_ms: int = 60_000,
        protocol_type: str = "consumer",
    ) -> int:
        """Sends a JoinGroup; its number finds the reply in `replies`."""
        request_id = self.new_request_id()
        request = JoinRequest(
            GROUP,
            request_id,
            member_id,
            f"{instance_id or 'c'}-{request_id}",
            protocol_type,
            protocols(*names, topics=topics) if names else (),
            session_timeout_ms,
            rebalance_timeout_ms,
            instance_id,
            requires_known_member_id=version >= 4,
            supports_skipping_assignment=version >= 9,
        )
        self.carry_out(self.coordinator.decide_join(request, self.now_ms))
        return request_id

    def sync(
        self,
        member_id: str,
        generation_id: int,
        assignments: dict[str, bytes] | None = None,
        *,
        instance_id: str | None = None,
        protocol_type: str | None = None,
        protocol_name: str | None = None,
    ) -> int:
        """Sends a SyncGroup; its number finds the reply in `replies`."""
        request_id = self.new_request_id()
        request = SyncRequest(
            GROUP, request_id, member_id, generation_id, assignments or {}, instance_id, protocol_type, protocol_name
        )
        self.carry_out(self.coordinator.decide_sync(request, self.now_ms))
        return request_id

    def heartbeat(self, member_id: str, generation_id: int, instance_id: str | None = None) -> GroupDecision:
        decision = self.coordinator.decide_heartbeat(
            GROUP, Committer(member_id, generation_id, instance_id), self.now_ms
        )
        self.carry_out(decision)
        return decision

    def leave(self, *members: MemberIdentity) -> GroupDecision:
        decision = self.coordinator.decide_leave(GROUP, members, self.now_ms)
        self.carry_out(decision)
        return decision

    def commit(self, committer: Committer, *commits: OffsetCommit, version: int = 9) -> OffsetDecision:
        decision = self.coordinator.decide_commit(GROUP, committer, commits, now_ms=self.now_ms, api_version=version)
        self.carry_out(decision)
        return decision

    def txn_commit(self, producer_id: int, committer: Committer, *commits: OffsetCommit) -> OffsetDecision:
        decision = self.coordinator.decide_txn_commit(GROUP, committer, commits, now_ms=self.now_ms)
        self.carry_out(decision, producer_id)
        return decision

    def pass_time(self, ms: int) -> None:
        """Time passes, with a stop at everything that is due on the way."""
        end_ms = self.now_ms + ms
        while (deadline_ms := self.coordinator.next_deadline_ms()) is not None and deadline_ms <= end_ms:
            self.now_ms = max(self.now_ms, deadline_ms)
            for _, decision in self.coordinator.decide_due(self.now_ms):
                assert self.carry_out(decision), "a test with a full disk must not let time pass"
        self.now_ms = end_ms

    def joined(self, request_id: int) -> JoinReply:
        reply = self.replies[request_id]
        assert isinstance(reply, JoinReply)
        return reply

    def synced(self, request_id: int) -> SyncReply:
        reply = self.replies[request_id]
        assert isinstance(reply, SyncReply)
        return reply

    def grow(self, count: int, *, version: int = 3) -> list[str]:
        """A stable group of that many dynamic members, the leader first; each is assigned its own id as bytes."""
        joins = [self.join(version=version)]
        for _ in range(count - 1):
            members = list(self.group.members)
            joins.append(self.join(version=version))
            for member_id in members:
                self.join(member_id)
        self.settle()
        assert len(self.group.members) == count
        return [*self.group.members]

    def settle(self) -> None:
        """All members of the present generation ask for their assignment, the leader last."""
        group = self.group
        members = sorted(group.members, key=lambda member_id: member_id == group.leader_id)
        for member_id in members:
            self.sync(member_id, group.generation_id, {name: name.encode() for name in members})
