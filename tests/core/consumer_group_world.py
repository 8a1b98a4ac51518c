"""A coordinator of KIP-848 groups with its log, and members that obey the protocol; time moves when a test says so."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from kio.schema.errors import ErrorCode

from semel.core.consumer_group_records import Assignment, decode, encode
from semel.core.consumer_groups import (
    ConsumerGroupDecision,
    ConsumerGroups,
    ConsumerGroupSettings,
    HeartbeatResponse,
)
from semel.core.refusal import Refused

GROUP = "group"
REBALANCE_TIMEOUT_MS = 60_000
BEGIN_ANEW = (ErrorCode.fenced_member_epoch, ErrorCode.unknown_member_id, ErrorCode.group_id_not_found)

Partition = tuple[UUID, int]


def flat(assignment: Assignment) -> set[Partition]:
    return {(topic_id, partition) for topic_id, partitions in assignment.items() for partition in partitions}


def by_topic(partitions: set[Partition]) -> dict[UUID, list[int]]:
    topics: dict[UUID, list[int]] = {}
    for topic_id, partition in sorted(partitions):
        topics.setdefault(topic_id, []).append(partition)
    return topics


class World:
    """Everything outside the members. Records go through their bytes on the way into the state, as on a restart."""

    def __init__(self, settings: ConsumerGroupSettings | None = None, **partition_counts: int) -> None:
        self.settings = settings or ConsumerGroupSettings()
        self.groups = ConsumerGroups(self.settings)
        self.topics: dict[str, tuple[UUID, int]] = {}
        self.log: list[tuple[bytes, bytes | None]] = []
        self.now_ms = 1_000_000
        self._topics_made = 0
        for name, count in partition_counts.items():
            self.create_topic(name, count)

    def create_topic(self, name: str, partition_count: int) -> UUID:
        self._topics_made += 1
        self.topics[name] = (UUID(int=self._topics_made), partition_count)
        return self.topics[name][0]

    def grow_topic(self, name: str, by: int = 1) -> None:
        topic_id, partition_count = self.topics[name]
        self.topics[name] = (topic_id, partition_count + by)

    def beat(
        self,
        member_id: str,
        epoch: int,
        *,
        names: Sequence[str] | None = None,
        regex: str | None = None,
        owned: dict[UUID, list[int]] | None = None,
        instance_id: str | None = None,
        rack_id: str | None = None,
        assignor: str | None = None,
        rebalance_timeout_ms: int | None = None,
        group_id: str = GROUP,
        new_member_id: Callable[[], str] | None = None,
        may_describe: Callable[[str], bool] = lambda topic: True,
    ) -> HeartbeatResponse:
        """Decide and carry out one heartbeat; a join has the fields that a join must have."""
        default_timeout_ms = REBALANCE_TIMEOUT_MS if epoch == 0 else -1
        decision = self.decide(
            self.groups.decide_heartbeat,
            group_id,
            member_id,
            epoch,
            instance_id,
            rack_id,
            default_timeout_ms if rebalance_timeout_ms is None else rebalance_timeout_ms,
            "client",
            "/127.0.0.1",
            names,
            regex,
            assignor,
            {} if owned is None and epoch == 0 else owned,
            topics=self.topics,
            now_ms=self.now_ms,
            new_member_id=new_member_id,
            may_describe=may_describe,
        )
        self.carry_out(decision)
        assert decision.response is not None
        return decision.response

    def decide(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call it, and see that it left everything as it was, also when it refuses."""
        before = copy.deepcopy(self.state())
        try:
            return function(*args, **kwargs)
        finally:
            assert self.state() == before, "a decision changed the state"

    def state(self) -> dict[str, Any]:
        groups = {group_id: vars(group) for group_id, group in vars(self.groups)["_groups"].items()}
        return {"groups": groups, "timers": vars(vars(self.groups)["_timers"])}

    def durable_state(self) -> dict[str, Any]:
        """What a restart must bring back: all but the timers."""
        return copy.deepcopy(self.state()["groups"])

    def carry_out(self, decision: ConsumerGroupDecision) -> None:
        for record in decision.records:
            key, value = encode(record)
            self.log.append((key, value))
            decoded = decode(key, value)
            assert decoded == record
            self.groups.replay(record)
        if decision.heard_member_id is not None:
            self.groups.note_heartbeat(decision.group_id, decision.heard_member_id, decision.now_ms)

    def tick(self, by_ms: int) -> set[str]:
        """Let time pass; the members that were thrown out."""
        self.now_ms += by_ms
        before = set(self.member_ids())
        for decision in self.decide(self.groups.decide_tick, self.now_ms):
            self.carry_out(decision)
        return before - set(self.member_ids())

    def member_ids(self) -> list[str]:
        return [member.member_id for member in self.groups.describe(GROUP).members] if self.groups.exists(GROUP) else []

    def restart(self, *, compact: bool = False) -> None:
        if compact:
            last = {key: number for number, (key, _) in enumerate(self.log)}
            self.log = [entry for number, entry in enumerate(self.log) if last[entry[0]] == number]
        self.groups = ConsumerGroups(self.settings)
        for key, value in self.log:
            record = decode(key, value)
            assert record is not None
            self.groups.replay(record)
        self.groups.start_timers(self.now_ms)


@dataclass
class Client:
    """A member that follows KIP-848: it owns what it was told to own, and reports what it has given up."""

    member_id: str
    names: list[str] | None = None
    regex: str | None = None
    instance_id: str | None = None
    epoch: int = 0
    owned: set[Partition] = field(default_factory=set[Partition])
    told: set[Partition] = field(default_factory=set[Partition])
    reported: set[Partition] = field(default_factory=set[Partition])
    must_say_all: bool = True
    thrown_out: bool = False
    is_dead: bool = False
    epochs_seen: list[int] = field(default_factory=list[int])

    def beat(self, world: World, *, lose_answer: bool = False, is_slow: bool = False, times: int = 1) -> None:
        """One heartbeat; a slow member does not give up its partitions yet. `times` > 1: the request is repeated."""
        say_all = self.must_say_all or self.epoch == 0
        say_owned = say_all or self.owned != self.reported
        response = None
        for _ in range(times):
            try:
                response = world.beat(
                    self.member_id,
                    self.epoch,
                    names=self.names if say_all else None,
                    regex=self.regex if say_all else None,
                    owned=by_topic(self.owned) if say_owned else None,
                    instance_id=self.instance_id,
                    rebalance_timeout_ms=REBALANCE_TIMEOUT_MS if say_all else -1,
                )
            except Refused as refused:
                self._take_refusal(refused)
                return
        if lose_answer:
            self.must_say_all = True
            return
        assert response is not None
        self._take_answer(response, is_slow=is_slow)

    def _take_refusal(self, refused: Refused) -> None:
        if refused.code in BEGIN_ANEW:
            self.epoch, self.must_say_all, self.thrown_out = 0, True, False
            self.owned.clear()
            self.told.clear()
        elif refused.code in (ErrorCode.unreleased_instance_id, ErrorCode.fenced_instance_id):
            self.is_dead = True
        else:
            raise refused

    def _take_answer(self, response: HeartbeatResponse, *, is_slow: bool) -> None:
        self.reported = set(self.owned)
        self.must_say_all = False
        self.thrown_out = False
        self.epoch = response.member_epoch
        self.epochs_seen.append(self.epoch)
        if response.assignment is not None:
            self.told = flat(response.assignment)
        if not is_slow:
            self.owned &= self.told
        if self.owned <= self.told:
            self.owned |= self.told
