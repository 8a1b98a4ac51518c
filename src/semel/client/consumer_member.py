"""A member of a group whose broker assigns (KIP-848): one kind of request, epochs, and one step at a time towards a
target. A state machine without IO; time is passed in.

The broker names the partitions that the member may have. What is no longer among them is given up and the broker told;
only then is it given to others. What is new may be used at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final
from uuid import UUID

from semel.client.cluster import TopicShape
from semel.client.group_asks import NOTHING, RETRY_S, Ask, Standing, fenced_instance, settle_refusal
from semel.client.group_config import GroupConfig
from semel.client.leader_calls import by_topic
from semel.client.partitions import TopicPartition
from semel.client.transactions import GroupMember
from semel.wire import Api, ErrorCode

JOIN_EPOCH: Final = 0
LEAVE_EPOCH: Final = -1
LEAVE_STATIC_EPOCH: Final = -2


class ConsumerMember:
    """
    >>> member = ConsumerMember(GroupConfig(group_id="g", protocol="consumer"), ["orders"], member_id="m")
    >>> member.next_ask(0.0, may_move=True).fields["member_epoch"]
    0
    """

    def __init__(self, config: GroupConfig, topics: list[str], *, member_id: str) -> None:
        assert config.group_id is not None
        self.standing = Standing()
        self._config = config
        self._group = config.group_id
        self._topics = sorted(set(topics))
        self._member_id = member_id
        self._epoch = JOIN_EPOCH
        self._interval_s = config.heartbeat_interval_ms / 1000
        self._target: frozenset[TopicPartition] = NOTHING
        self._pending_ids: list[tuple[UUID, tuple[int, ...]]] = []
        """A target whose topics are not known by name yet."""
        self._ids: dict[str, UUID] = {}
        self._tells_all = True
        self._told: frozenset[TopicPartition] | None = None

    @property
    def identity(self) -> GroupMember | None:
        if self._epoch <= JOIN_EPOCH:
            return None
        return GroupMember(self._group, self._epoch, self._member_id, self._config.group_instance_id)

    @property
    def watched_topics(self) -> frozenset[str]:
        return frozenset()  # the broker watches them

    # -- what to send ----------------------------------------------------------------------------------------------

    def next_ask(self, now: float, *, may_move: bool) -> Ask | None:
        if self.standing.fatal is not None or now < self.standing.wake_at or not may_move:
            return None
        self.standing.wake_at = now + self._interval_s
        fields = self._fields(self._epoch)
        if self._tells_all:
            fields |= {
                "rebalance_timeout": self._config.rebalance_timeout_ms,
                "subscribed_topic_names": self._topics,
                "server_assignor": self._config.remote_assignor,
            }
        owned = NOTHING if self._epoch == JOIN_EPOCH else self.standing.assignment
        if self._tells_all or owned != self._told:
            fields["topic_partitions"] = self._by_id(owned)
        self._told = owned
        return Ask(Api.CONSUMER_GROUP_HEARTBEAT, fields)

    def _fields(self, epoch: int) -> dict[str, Any]:
        return {
            "group_id": self._group,
            "member_id": self._member_id,
            "member_epoch": epoch,
            "instance_id": self._config.group_instance_id,
            "rack_id": None,
            "rebalance_timeout": -1,
            "subscribed_topic_names": None,
            "subscribed_topic_regex": None,
            "server_assignor": None,
            "topic_partitions": None,
        }

    def _by_id(self, partitions: Iterable[TopicPartition]) -> list[dict[str, Any]]:
        return [
            {"topic_id": self._ids[topic], "partitions": numbers}
            for topic, numbers in by_topic(sorted(partitions)).items()
        ]

    def leave(self, *, for_good: bool = False) -> Ask | None:
        if self._epoch <= JOIN_EPOCH:
            return None
        epoch = LEAVE_EPOCH if for_good or self._config.group_instance_id is None else LEAVE_STATIC_EPOCH
        return Ask(Api.CONSUMER_GROUP_HEARTBEAT, self._fields(epoch))

    # -- what came back --------------------------------------------------------------------------------------------

    def answered(self, ask: Ask, response: Any, now: float) -> None:
        code: ErrorCode = response.error_code
        if code is ErrorCode.none:
            self._accepted(response, now)
        elif code in (ErrorCode.fenced_member_epoch, ErrorCode.unknown_member_id, ErrorCode.group_id_not_found):
            self._lose(code.name)
            self.standing.wake_at = now
        elif code is ErrorCode.fenced_instance_id:
            self._lose(code.name)
            self.standing.fatal = fenced_instance(self._group, self._config.group_instance_id)
        else:
            self._tells_all = True
            settle_refusal(self.standing, code, ask.api, self._group, response.error_message, now)
            if self.standing.fatal is not None:
                self._lose(code.name)

    def unanswered(self, ask: Ask, now: float) -> None:
        self._tells_all = True  # whatever was told may not have arrived
        self.standing.forget_coordinator = True
        self.standing.wake_at = now + RETRY_S

    def _accepted(self, response: Any, now: float) -> None:
        self._tells_all = False
        self._epoch = response.member_epoch
        self._interval_s = response.heartbeat_interval.total_seconds() or self._interval_s
        self.standing.wake_at = now + self._interval_s
        self.standing.confirmed += 1
        if response.assignment is not None:
            self._pending_ids = [(one.topic_id, tuple(one.partitions)) for one in response.assignment.topic_partitions]
            self._resolve(now)

    def learn(self, shapes: Mapping[str, TopicShape], now: float) -> None:
        self._ids |= {topic: shape.topic_id for topic, shape in shapes.items() if shape.topic_id is not None}
        self.standing.topics_wanted = frozenset()
        if self._pending_ids:
            self._resolve(now)

    def _resolve(self, now: float) -> None:
        """From ids to names. A topic that was deleted and made again has a new id, which metadata will tell."""
        names = {topic_id: topic for topic, topic_id in self._ids.items()}
        if any(topic_id not in names for topic_id, _ in self._pending_ids):
            self.standing.topics_wanted = frozenset(self._topics)
        self._target = frozenset(
            TopicPartition(names[topic_id], number)
            for topic_id, numbers in self._pending_ids
            if topic_id in names
            for number in numbers
        )
        if not self.standing.topics_wanted:
            self._pending_ids = []
        self._reconcile(now)

    def _reconcile(self, now: float) -> None:
        standing = self.standing
        before = standing.assignment
        standing.to_release = standing.assignment - self._target
        standing.assignment = standing.assignment | self._target
        if standing.assignment != before and not standing.to_release:
            standing.wake_at = now  # the broker waits for the word that the new ones are taken

    def released(self, now: float) -> None:
        standing = self.standing
        standing.assignment, standing.to_release = standing.assignment - standing.to_release, NOTHING
        standing.wake_at = now  # others wait for it

    def beat_at_once(self, now: float) -> None:
        self.standing.wake_at = min(self.standing.wake_at, now)

    def _lose(self, reason: str) -> None:
        """Removed from the group: others may have the partitions already."""
        self.standing.note(reason)
        self.standing.losses += 1
        self.standing.assignment = self.standing.to_release = self._target = NOTHING
        self._pending_ids = []
        self._epoch, self._tells_all, self._told = JOIN_EPOCH, True, None
