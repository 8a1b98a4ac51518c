"""A member of a classic group: joins, syncs, heartbeats, leaves. A state machine without IO; time is passed in.

Eager assignors give everything up before each rebalance. The cooperative one keeps what it has, learns after the
rebalance what to give up, does so, and joins once more so that others can have it (KIP-429).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

from semel.client.cluster import TopicShape
from semel.client.group_asks import NOTHING, RETRY_S, SOON_S, Ask, Standing, fenced_instance, settle_refusal
from semel.client.group_assignors import ASSIGNORS, Assignor
from semel.client.group_config import GroupConfig
from semel.client.group_formats import (
    NO_GENERATION,
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_subscription,
)
from semel.client.partitions import TopicPartition
from semel.client.transactions import GroupMember
from semel.errors import WireError
from semel.wire import Api, ErrorCode

_PROTOCOL_TYPE: Final = "consumer"
_JOIN_GRACE_MS: Final = 5_000


class Step(Enum):
    OUTSIDE = "about to join"
    JOINING = "waiting for the other members"
    ASSIGNING = "leader: about to share out"
    SYNC_DUE = "about to ask for its share"
    SYNCING = "waiting for its share"
    INSIDE = "a member with its share"


class ClassicMember:
    """
    >>> member = ClassicMember(GroupConfig(group_id="g"), ["orders"])
    >>> member.next_ask(0.0, may_move=True).api.name
    'JOIN_GROUP'
    """

    def __init__(self, config: GroupConfig, topics: list[str]) -> None:
        assert config.group_id is not None
        self.standing = Standing()
        self.step = Step.OUTSIDE
        self._config = config
        self._group = config.group_id
        self._topics = frozenset(topics)
        self._assignors = [ASSIGNORS[name] for name in config.assignors]
        # As in Java: cooperative only if every assignor that might be chosen is.
        self._is_cooperative = all(assignor.is_cooperative for assignor in self._assignors)
        self._member_id = ""
        self._generation = NO_GENERATION
        self._protocol_name = ""
        self._previous: frozenset[TopicPartition] = NOTHING
        self._previous_generation = NO_GENERATION
        self._members: dict[str, Any] = {}
        self._assignments: dict[str, bytes] = {}
        self._is_leader = False
        self._shapes: dict[str, int] = {}
        self._rejoins = False

    @property
    def identity(self) -> GroupMember | None:
        if self._generation == NO_GENERATION:
            return None
        return GroupMember(self._group, self._generation, self._member_id, self._config.group_instance_id)

    @property
    def watched_topics(self) -> frozenset[str]:
        """Whose partitions the leader must share out anew when their number changes."""
        return frozenset(self._shapes) | self._topics if self._is_leader and self.step is Step.INSIDE else frozenset()

    # -- what to send ----------------------------------------------------------------------------------------------

    def next_ask(self, now: float, *, may_move: bool) -> Ask | None:
        if self.standing.fatal is not None or now < self.standing.wake_at:
            return None
        if self.step is Step.OUTSIDE:
            return self._join() if may_move else None
        if self.step is Step.SYNC_DUE:
            self.step = Step.SYNCING
            return self._sync()
        if self.step is Step.INSIDE:
            self.standing.wake_at = now + self._config.heartbeat_interval_ms / 1000
            return Ask(Api.HEARTBEAT, self._who())
        return None

    def _who(self) -> dict[str, Any]:
        return {
            "group_id": self._group,
            "generation_id": self._generation,
            "member_id": self._member_id,
            "group_instance_id": self._config.group_instance_id,
        }

    def _join(self) -> Ask:
        self.step = Step.JOINING
        owned = self.standing.assignment
        fields = {
            "group_id": self._group,
            "session_timeout": self._config.session_timeout_ms,
            "rebalance_timeout": self._config.rebalance_timeout_ms,
            "member_id": self._member_id,
            "group_instance_id": self._config.group_instance_id,
            "protocol_type": _PROTOCOL_TYPE,
            "protocols": [
                {
                    "name": assignor.name,
                    "metadata": encode_subscription(
                        assignor.subscription(self._topics, owned, self._previous, self._previous_generation)
                    ),
                }
                for assignor in self._assignors
            ],
            "reason": "",
        }
        return Ask(Api.JOIN_GROUP, fields, self._config.rebalance_timeout_ms + _JOIN_GRACE_MS)

    def _sync(self) -> Ask:
        assignments = [{"member_id": name, "assignment": data} for name, data in self._assignments.items()]
        fields = {"protocol_type": _PROTOCOL_TYPE, "protocol_name": self._protocol_name, "assignments": assignments}
        return Ask(Api.SYNC_GROUP, {**self._who(), **fields}, self._config.rebalance_timeout_ms + _JOIN_GRACE_MS)

    def leave(self, *, for_good: bool = False) -> Ask | None:
        instance = self._config.group_instance_id
        if not self._member_id or (instance is not None and not for_good):
            return None
        who = {"member_id": self._member_id, "group_instance_id": instance, "reason": "the session was closed"}
        return Ask(Api.LEAVE_GROUP, {"group_id": self._group, "members": [who]})

    # -- what came back --------------------------------------------------------------------------------------------

    def answered(self, ask: Ask, response: Any, now: float) -> None:
        code: ErrorCode = response.error_code
        if code is ErrorCode.none:
            taken = {Api.JOIN_GROUP: self._joined, Api.SYNC_GROUP: self._synced, Api.HEARTBEAT: self._beaten}
            taken[ask.api](response, now)
        elif code is ErrorCode.member_id_required and ask.api is Api.JOIN_GROUP:
            self._member_id = response.member_id
            self._rejoin(now)
        elif code is ErrorCode.rebalance_in_progress:
            self._rebalance(ask, now)
        elif code in (ErrorCode.illegal_generation, ErrorCode.unknown_member_id):
            self._lose(code.name, now, member_id="" if code is ErrorCode.unknown_member_id else self._member_id)
        elif code is ErrorCode.fenced_instance_id:
            self._lose(code.name, now, member_id="")
            self.standing.fatal = fenced_instance(self._group, self._config.group_instance_id)
        else:
            self._step_back(ask)
            settle_refusal(self.standing, code, ask.api, self._group, None, now)
            if self.standing.fatal is not None:
                self._lose(code.name, now, member_id=self._member_id)

    def unanswered(self, ask: Ask, now: float) -> None:
        self._step_back(ask)
        self.standing.forget_coordinator = True
        self.standing.wake_at = now + RETRY_S

    def _step_back(self, ask: Ask) -> None:
        # A join or sync that was not answered may have been carried out; to join again is right in both cases.
        if ask.api in (Api.JOIN_GROUP, Api.SYNC_GROUP):
            self.step = Step.OUTSIDE

    def _rebalance(self, ask: Ask, now: float) -> None:
        if ask.api is not Api.HEARTBEAT:
            self.step = Step.OUTSIDE
            self.standing.wake_at = now + SOON_S
        elif self.step is Step.INSIDE:
            self.standing.confirmed += 1  # still a member, and nobody goes on without it
            self._begin_rebalance(now)

    def _begin_rebalance(self, now: float) -> None:
        if self.standing.to_release:
            return  # it joins again anyway, once that is done
        self.standing.note("rebalance")
        if self._is_cooperative or not self.standing.assignment:
            self._rejoin(now)
        else:
            self.standing.to_release = self.standing.assignment

    def _rejoin(self, now: float) -> None:
        self.step = Step.OUTSIDE
        self.standing.wake_at = now

    def _lose(self, reason: str, now: float, *, member_id: str) -> None:
        """Removed from the group: others may have the partitions already."""
        self.standing.note(reason)
        self.standing.losses += 1
        self.standing.assignment = self.standing.to_release = NOTHING
        self._generation, self._member_id = NO_GENERATION, member_id
        self._rejoin(now)

    def released(self, now: float) -> None:
        standing = self.standing
        standing.assignment, standing.to_release = standing.assignment - standing.to_release, NOTHING
        self._rejoin(now)

    def beat_at_once(self, now: float) -> None:
        if self.step is Step.INSIDE:
            self.standing.wake_at = min(self.standing.wake_at, now)

    def _beaten(self, response: Any, now: float) -> None:
        self.standing.confirmed += 1

    # -- the share -------------------------------------------------------------------------------------------------

    def _joined(self, response: Any, now: float) -> None:
        self._member_id, self._generation = response.member_id, response.generation_id
        self._protocol_name = response.protocol_name or ""
        self._assignments = {}
        self._is_leader = response.leader == self._member_id
        if self._is_leader and not getattr(response, "skip_assignment", False):
            assignor = self._chosen()
            self._members = {
                member.member_id: assignor.subscriber(decode_subscription(member.metadata), member.group_instance_id)
                for member in response.members
            }
            self.step = Step.ASSIGNING
            self.standing.topics_wanted = frozenset(t for member in self._members.values() for t in member.topics)
        else:
            self.step = Step.SYNC_DUE
            self.standing.wake_at = now

    def _chosen(self) -> Assignor:
        for assignor in self._assignors:
            if assignor.name == self._protocol_name:
                return assignor
        raise WireError(f"The coordinator chose the assignor {self._protocol_name!r}, which this member did not offer.")

    def learn(self, shapes: Mapping[str, TopicShape], now: float) -> None:
        """The leader shares out; later on, it asks for a rebalance when the number of partitions has changed."""
        counts = {topic: shape.partition_count for topic, shape in shapes.items()}
        self.standing.topics_wanted = frozenset()
        if self.step is Step.ASSIGNING:
            self._shapes = counts
            shares = self._chosen().share(self._members, counts)
            self._assignments = {name: encode_assignment(share) for name, share in shares.items()}
            self.step = Step.SYNC_DUE
            self.standing.wake_at = now
        elif self._is_leader and self.step is Step.INSIDE and counts != self._shapes:
            self._begin_rebalance(now)

    def _synced(self, response: Any, now: float) -> None:
        share = decode_assignment(response.assignment)
        standing, self.step = self.standing, Step.INSIDE
        # The first heartbeat at once: a rebalance that began meanwhile would otherwise wait for a whole interval.
        standing.wake_at = now + SOON_S
        self._previous, self._previous_generation = share, self._generation
        standing.to_release = standing.assignment - share
        standing.assignment = standing.assignment | share
