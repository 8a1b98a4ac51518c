"""Random members of a classic group that join, sync, leave, fall silent, repeat themselves and meet restarts."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from group_world import GroupWorld
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kio.schema.errors import ErrorCode

from semel.core.classic_state import ClassicGroup, GroupDecision, GroupState, JoinReply, MemberIdentity, SyncReply
from semel.core.group_coordinator import Committer
from semel.core.group_offsets import OffsetDecision
from semel.core.refusal import Refused

PARTITIONS = range(6)
CLIENTS = st.integers(0, 4)


@dataclass
class Client:
    """What one client process remembers. It may repeat a request, and it may have an answer that is long outdated."""

    instance_id: str | None
    member_id: str = ""
    generation_id: int = -1
    leads: tuple[str, ...] = ()
    waiting: int | None = None
    names: tuple[str, ...] = ("range", "sticky")
    topics: tuple[str, ...] = ("t",)


class WatchedWorld(GroupWorld):
    """Takes notice of every decision: that making it changed nothing, and what was told to whom in which generation."""

    def __init__(self) -> None:
        super().__init__(initial_rebalance_delay_ms=3000, new_member_join_timeout_ms=20_000, max_size=4)
        self.highest_generation = 0
        self.leaders: dict[int, set[str]] = {}
        self.unanswered: set[int] = set()
        self.seen: ClassicGroup | None = None
        self.last_was_done = False

    def carry_out(self, decision: GroupDecision | OffsetDecision, producer_id: int | None = None) -> bool:
        assert self.coordinator.classic_group("g") == self.seen, "deciding has changed the group"
        self.last_was_done = self._carry_out(decision, producer_id)
        self.seen = copy.deepcopy(self.coordinator.classic_group("g"))
        return self.last_was_done

    def _carry_out(self, decision: GroupDecision | OffsetDecision, producer_id: int | None) -> bool:
        if not super().carry_out(decision, producer_id):
            return False
        for request_id, reply in decision.replies:
            self.unanswered.discard(request_id)
            if reply.code is ErrorCode.none:
                self._witness(request_id, reply)
        return True

    def _witness(self, request_id: int, reply: JoinReply | SyncReply) -> None:
        if isinstance(reply, JoinReply):
            assert reply.generation_id >= self.highest_generation
            self.highest_generation = reply.generation_id
            if reply.members and not reply.skip_assignment:
                self.leaders.setdefault(reply.generation_id, set()).add(reply.member_id)
            return
        logged = self.logged_group
        assert logged is not None
        assert reply.assignment in {member.assignment for member in logged.members}, "told before it was logged"


def only_one_leader_assigns(world: WatchedWorld, group: ClassicGroup) -> None:
    for generation_id, leaders in world.leaders.items():
        assert len(leaders) == 1, f"{leaders} were all asked to assign in generation {generation_id}"
    assert group.leader_id is None or group.leader_id in group.members


class ClassicGroupHistories(RuleBasedStateMachine):
    """Five clients, two of them static, and the checks that hold after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.world = WatchedWorld()
        self.clients = [Client(None), Client(None), Client(None), Client("a"), Client("b")]

    def ask(self, call: Any, *arguments: Any, **options: Any) -> Any:
        """A request; a refusal must leave everything as it was."""
        before = copy.deepcopy(self.world.coordinator.classic_group("g"))
        try:
            return call(*arguments, **options)
        except Refused as refused:
            assert self.world.coordinator.classic_group("g") == before
            return refused.code

    def listen(self) -> None:
        """Clients take in what they were answered."""
        for client in self.clients:
            reply = self.world.replies.get(client.waiting) if client.waiting is not None else None
            if reply is None:
                continue
            client.waiting = None
            if isinstance(reply, SyncReply):
                continue
            if reply.code in (ErrorCode.none, ErrorCode.member_id_required):
                client.member_id, client.generation_id = reply.member_id, reply.generation_id
                client.leads = () if reply.skip_assignment else tuple(member.member_id for member in reply.members)
            elif reply.code in (ErrorCode.unknown_member_id, ErrorCode.fenced_instance_id):
                client.member_id, client.generation_id = "", -1

    def send(self, client: Client, call: Any, *arguments: Any, **options: Any) -> None:
        answer = self.ask(call, *arguments, **options)
        if isinstance(answer, ErrorCode):
            if answer in (ErrorCode.unknown_member_id, ErrorCode.fenced_instance_id):
                client.member_id, client.generation_id = "", -1
            return
        client.waiting = answer
        if answer not in self.world.replies and self.world.last_was_done:
            self.world.unanswered.add(answer)
        self.listen()

    @rule(which=CLIENTS, version=st.sampled_from([3, 8, 9]), forgets=st.booleans())
    def join(self, which: int, version: int, forgets: bool) -> None:
        client = self.clients[which]
        self.send(
            client,
            self.world.join,
            "" if forgets else client.member_id,
            names=client.names,
            topics=client.topics,
            instance_id=client.instance_id,
            version=version,
            rebalance_timeout_ms=30_000,
        )

    @rule(which=CLIENTS, topics=st.sampled_from([("t",), ("t", "u")]), swap=st.booleans())
    def change_subscription(self, which: int, topics: tuple[str, ...], swap: bool) -> None:
        self.clients[which].topics = topics
        self.clients[which].names = ("sticky", "range") if swap else ("range", "sticky")

    @rule(which=CLIENTS)
    def sync(self, which: int) -> None:
        client = self.clients[which]
        assignments = {
            member_id: bytes(number for number in PARTITIONS if number % len(client.leads) == position)
            for position, member_id in enumerate(client.leads)
        }
        self.send(
            client,
            self.world.sync,
            client.member_id,
            client.generation_id,
            assignments,
            instance_id=client.instance_id,
        )

    @precondition(lambda self: not self.world.disk_is_full)
    @rule(present=st.sets(CLIENTS, min_size=1))
    def all_work_together(self, present: set[int]) -> None:
        """The way to a stable group, which random single steps seldom find."""
        for _ in range(2):
            for which in sorted(present):
                if self.clients[which].waiting is None:
                    self.join(which, 9, False)
        self.pass_time(3_000)
        for which in sorted(present):
            self.sync(which)

    @rule(which=CLIENTS)
    def heartbeat(self, which: int) -> None:
        client = self.clients[which]
        self.ask(self.world.heartbeat, client.member_id, client.generation_id, client.instance_id)

    @rule(which=CLIENTS, by_instance=st.booleans())
    def leave(self, which: int, by_instance: bool) -> None:
        client = self.clients[which]
        self.ask(self.world.leave, MemberIdentity("" if by_instance else client.member_id, client.instance_id))
        self.listen()

    @rule(which=CLIENTS)
    def sync_and_leave(self, which: int) -> None:
        """The application is closed while its request still waits."""
        self.sync(which)
        self.leave(which, False)

    @rule(which=CLIENTS)
    def check_commit(self, which: int) -> None:
        """Only a member of the current generation may commit, and none while the group waits for an assignment."""
        client, group = self.clients[which], self.world.coordinator.classic_group("g")
        answer = self.ask(self.world.commit, Committer(client.member_id, client.generation_id, client.instance_id))
        if not isinstance(answer, ErrorCode) and client.generation_id >= 0:
            assert group is not None
            assert group.state is not GroupState.COMPLETING_REBALANCE
            assert client.generation_id == group.generation_id
            assert client.member_id in group.members

    @precondition(lambda self: not self.world.disk_is_full)
    @rule(ms=st.sampled_from([100, 3_000, 9_000, 40_000]))
    def pass_time(self, ms: int) -> None:
        self.world.pass_time(ms)
        self.listen()

    @rule(full=st.booleans())
    def fill_or_free_the_disk(self, full: bool) -> None:
        self.world.disk_is_full = full

    @rule()
    def restart(self) -> None:
        self.world.disk_is_full = False
        logged = self.world.logged_group
        self.world.restart()
        self.world.seen = copy.deepcopy(self.world.coordinator.classic_group("g"))
        self.world.unanswered.clear()
        for client in self.clients:
            client.waiting = None
        if logged is not None:
            members = self.world.group.members.values()
            assert self.world.group.generation_id == logged.generation_id
            assert {member.member_id: member.assignment for member in members} == {
                member.member_id: member.assignment for member in logged.members
            }
            self.world.highest_generation = min(self.world.highest_generation, logged.generation_id)
            # A generation that was never logged is begun a second time, with a leader of its own.
            self.world.leaders = {
                number: leaders for number, leaders in self.world.leaders.items() if number <= logged.generation_id
            }

    @invariant()
    def holds(self) -> None:
        group = self.world.coordinator.classic_group("g")
        if group is None:
            return
        only_one_leader_assigns(self.world, group)
        waiting = [
            request_id
            for member in group.members.values()
            for request_id in (member.join_request_id, member.sync_request_id)
            if request_id is not None
        ]
        assert len(waiting) == len(set(waiting))
        assert self.world.unanswered == set(waiting), "a request is answered, or a member of the group waits for it"
        assert bool(group.members) == (group.state is not GroupState.EMPTY) or (
            group.state is GroupState.PREPARING_REBALANCE
        )
        assert group.state is not GroupState.STABLE or not any(
            member.join_request_id or member.sync_request_id for member in group.members.values()
        )
        if group.state is GroupState.STABLE:
            given = b"".join(member.assignment for member in group.members.values())
            assert len(given) == len(set(given)), "a partition has two owners"
        assert group.pending_sync <= group.members.keys()
        assert (group.sync_deadline_ms is None) == (not group.pending_sync)
        instance_ids = [member.group_instance_id for member in group.members.values() if member.group_instance_id]
        assert len(instance_ids) == len(set(instance_ids))

    def teardown(self) -> None:
        """Without any further request, everybody is answered and the group becomes empty."""
        self.world.disk_is_full = False
        self.world.pass_time(400_000)
        assert not self.world.unanswered
        group = self.world.coordinator.classic_group("g")
        assert group is None or group.state is GroupState.EMPTY
        assert self.world.coordinator.next_deadline_ms() is None


TestClassicGroupHistories = ClassicGroupHistories.TestCase
