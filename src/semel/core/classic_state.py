"""Values of classic groups: a group, its members, what they ask and what they are answered. All frozen.

A request that must wait (JoinGroup, SyncGroup) leaves its number with its member; a later decision answers that number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from sys import getsizeof
from typing import Final

from kio.schema.errors import ErrorCode
from kio.serial import readers
from kio.serial.errors import SerialError

from semel.core.consumer_group_records import ConsumerGroupRecord
from semel.core.group_records import GroupMetadata, GroupRecord, LoggedRecord, StoredMember

CONSUMER_PROTOCOL_TYPE: Final = "consumer"
_VERSION_BYTES: Final = 2
_PROTOCOL_BYTES: Final = 160
"""Its object, its place among the member's, and its count in the group's index."""
_TOPIC_BYTES: Final = 64
"""A place in a set."""
_SUBSCRIBED_TOPICS_MAX: Final = 5_000
"""A megabyte of metadata can name two hundred thousand. With more than this a group counts as subscribed to all."""


class GroupState(Enum):
    """Kafka's names, as DescribeGroups and ListGroups tell them. A group that is not there is called "Dead"."""

    EMPTY = "Empty"
    PREPARING_REBALANCE = "PreparingRebalance"
    COMPLETING_REBALANCE = "CompletingRebalance"
    STABLE = "Stable"


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """The broker's `group.*` and `offset*` settings."""

    initial_rebalance_delay_ms: int = 0
    min_session_timeout_ms: int = 6_000
    max_session_timeout_ms: int = 1_800_000
    max_size: int = 2**31 - 1
    new_member_join_timeout_ms: int = 300_000
    offset_metadata_max_bytes: int = 4096


@dataclass(frozen=True, slots=True)
class MemberProtocol:
    """An assignor that a member can work with, and its subscription for it."""

    name: str
    metadata: bytes

    @property
    def memory_bytes(self) -> int:
        """About what it takes. Of a short name most is what Python's objects take themselves."""
        return _PROTOCOL_BYTES + getsizeof(self.name) + getsizeof(self.metadata)


@dataclass(frozen=True, slots=True)
class ClassicMember:
    """One member. It waits for at most one JoinGroup and one SyncGroup answer."""

    member_id: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    protocols: tuple[MemberProtocol, ...]
    session_deadline_ms: int
    assignment: bytes = b""
    is_new: bool = False
    join_request_id: int | None = None
    sync_request_id: int | None = None

    @property
    def can_expire(self) -> bool:
        """A member that waits for us cannot send heartbeats. A new one may be gone without a trace, so it expires."""
        return self.is_new or (self.join_request_id is None and self.sync_request_id is None)

    @property
    def memory_bytes(self) -> int:
        """About what its texts and bytes take."""
        texts = (self.member_id, self.group_instance_id, self.client_id, self.client_host)
        return (
            sum(map(getsizeof, texts))
            + getsizeof(self.assignment)
            + sum(protocol.memory_bytes for protocol in self.protocols)
        )

    @property
    def protocol_names(self) -> frozenset[str]:
        return frozenset(protocol.name for protocol in self.protocols)

    def metadata_for(self, protocol_name: str | None) -> bytes:
        """The member's subscription under that protocol."""
        return next((protocol.metadata for protocol in self.protocols if protocol.name == protocol_name), b"")


@dataclass(frozen=True, slots=True)
class ClassicGroup:
    """One classic group at one moment. `members` keep the order in which they came."""

    group_id: str
    state: GroupState = GroupState.EMPTY
    state_since_ms: int | None = None
    generation_id: int = 0
    protocol_type: str | None = None
    protocol_name: str | None = None
    leader_id: str | None = None
    members: Mapping[str, ClassicMember] = field(default_factory=dict[str, ClassicMember])
    # Kept beside the members so that a request about one of them need not look at the others.
    static_members: Mapping[str, str] = field(default_factory=dict[str, str])
    protocol_counts: Mapping[str, int] = field(default_factory=dict[str, int])
    subscribed_topics: frozenset[str] | None = None
    # Members that were told their id and have not come back with it (KIP-394), with the time when they are forgotten.
    pending_members: Mapping[str, int] = field(default_factory=dict[str, int])
    is_initial_rebalance: bool = False
    initial_remaining_ms: int = 0
    new_member_added: bool = False
    join_deadline_ms: int | None = None
    pending_sync: Set[str] = frozenset()
    sync_deadline_ms: int | None = None

    @property
    def memory_bytes(self) -> int:
        """About what the texts and bytes of the group, its members and its subscriptions take."""
        return (
            sum(map(getsizeof, self.pending_members))
            + sum(member.memory_bytes for member in self.members.values())
            + sum(_TOPIC_BYTES + getsizeof(topic) for topic in self.subscribed_topics or ())
        )

    @property
    def rebalance_timeout_ms(self) -> int:
        """As long as the slowest member asked for."""
        return max((member.rebalance_timeout_ms for member in self.members.values()), default=0)

    @property
    def has_all_members_joined(self) -> bool:
        """Whether the join phase may end: all members wait for its end, and nobody was just told an id."""
        return not self.pending_members and all(member.join_request_id is not None for member in self.members.values())

    def static_member_id(self, group_instance_id: str) -> str | None:
        """Who holds this `group.instance.id` (KIP-345)."""
        return self.static_members.get(group_instance_id)

    def is_known_to_all(self, protocol_name: str) -> bool:
        """Whether every member can work with this protocol."""
        return self.protocol_counts.get(protocol_name, 0) == len(self.members)

    def is_subscribed_to(self, topic: str) -> bool:
        """When the subscriptions cannot be read, a consumer group counts as subscribed to everything."""
        if self.subscribed_topics is None:
            return self.protocol_type == CONSUMER_PROTOCOL_TYPE
        return topic in self.subscribed_topics

    def next_deadline_ms(self) -> int | None:
        """When `decide_tick` has something to do, if nothing else happens before."""
        deadlines = [*self.pending_members.values(), self.join_deadline_ms, self.sync_deadline_ms]
        deadlines += [member.session_deadline_ms for member in self.members.values() if member.can_expire]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A JoinGroup. `new_member_id` is the id to give if the member has none yet."""

    group_id: str
    request_id: int
    member_id: str
    new_member_id: str
    protocol_type: str
    protocols: tuple[MemberProtocol, ...]
    session_timeout_ms: int
    rebalance_timeout_ms: int
    group_instance_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    requires_known_member_id: bool = False
    supports_skipping_assignment: bool = False

    @property
    def memory_bytes(self) -> int:
        """About what its texts and bytes will take once it is a member."""
        texts = (self.group_id, self.new_member_id, self.group_instance_id, self.client_id, self.client_host)
        return sum(map(getsizeof, texts)) + sum(protocol.memory_bytes for protocol in self.protocols)


@dataclass(frozen=True, slots=True)
class SyncRequest:
    """A SyncGroup; only the leader's brings assignments."""

    group_id: str
    request_id: int
    member_id: str
    generation_id: int
    assignments: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    group_instance_id: str | None = None
    protocol_type: str | None = None
    protocol_name: str | None = None


@dataclass(frozen=True, slots=True)
class MemberIdentity:
    """Who leaves: by member id, or by instance id alone, as an administrator removes a static member."""

    member_id: str
    group_instance_id: str | None = None


@dataclass(frozen=True, slots=True)
class JoinedMember:
    """A member as the leader is told it, to assign partitions."""

    member_id: str
    group_instance_id: str | None
    metadata: bytes


@dataclass(frozen=True, slots=True)
class JoinReply:
    """The answer to a JoinGroup."""

    member_id: str
    code: ErrorCode = ErrorCode.none
    generation_id: int = -1
    protocol_type: str | None = None
    protocol_name: str | None = None
    leader_id: str = ""
    skip_assignment: bool = False
    members: tuple[JoinedMember, ...] = ()


@dataclass(frozen=True, slots=True)
class SyncReply:
    """The answer to a SyncGroup."""

    code: ErrorCode = ErrorCode.none
    protocol_type: str | None = None
    protocol_name: str | None = None
    assignment: bytes = b""


Reply = JoinReply | SyncReply
AnyRecord = LoggedRecord | ConsumerGroupRecord
"""Whatever `__consumer_offsets` holds."""


@dataclass(frozen=True, slots=True)
class GroupDecision:
    """What is to be logged, what the group becomes once it is, and who is answered then.

    `group` None means that it stays as it is; a group is removed by its tombstone among the records.
    `code` answers a Heartbeat; `left` has one code per member of a LeaveGroup, in its order. Records of a KIP-848 group
    are tombstones of one that was empty and becomes a classic group.
    """

    group: ClassicGroup | None = None
    records: tuple[AnyRecord, ...] = ()
    replies: tuple[tuple[int, Reply], ...] = ()
    code: ErrorCode = ErrorCode.none
    left: tuple[ErrorCode, ...] = ()


def metadata_record(group: ClassicGroup) -> GroupRecord:
    """The group as it is logged, with the assignments its members have now."""
    members = tuple(
        StoredMember(
            member.member_id,
            member.group_instance_id,
            member.client_id,
            member.client_host,
            member.rebalance_timeout_ms,
            member.session_timeout_ms,
            member.metadata_for(group.protocol_name),
            member.assignment,
        )
        for member in group.members.values()
    )
    return GroupRecord(
        group.group_id,
        GroupMetadata(
            group.protocol_type or "",
            group.generation_id,
            group.protocol_name,
            group.leader_id,
            -1 if group.state_since_ms is None else group.state_since_ms,
            members,
        ),
    )


def group_from_log(group_id: str, metadata: GroupMetadata) -> ClassicGroup:
    """The group as a restart finds it: stable with its last generation, or empty.

    Its sessions have no deadline yet: `with_fresh_sessions` gives them one when loading is done, for the members could
    not send heartbeats while the broker was away.
    """
    members = {
        stored.member_id: ClassicMember(
            stored.member_id,
            stored.group_instance_id,
            stored.client_id,
            stored.client_host,
            stored.rebalance_timeout_ms,
            stored.session_timeout_ms,
            (MemberProtocol(metadata.protocol_name or "", stored.subscription),),
            session_deadline_ms=0,
            assignment=stored.assignment,
        )
        for stored in metadata.members
    }
    loaded = ClassicGroup(
        group_id,
        state=GroupState.STABLE if members else GroupState.EMPTY,
        state_since_ms=None if metadata.state_since_ms == -1 else metadata.state_since_ms,
        generation_id=metadata.generation_id,
        protocol_type=metadata.protocol_type or None,
        protocol_name=metadata.protocol_name,
        leader_id=metadata.leader_id,
        members=members,
        static_members={
            member.group_instance_id: member.member_id
            for member in members.values()
            if member.group_instance_id is not None
        },
        protocol_counts={metadata.protocol_name or "": len(members)} if members else {},
    )
    return replace(loaded, subscribed_topics=subscribed_topics(loaded))


def with_fresh_sessions(group: ClassicGroup, now_ms: int) -> ClassicGroup:
    """Every member has its whole session time-out again."""
    members = {
        member_id: replace(member, session_deadline_ms=now_ms + member.session_timeout_ms)
        for member_id, member in group.members.items()
    }
    return replace(group, members=members)


def subscribed_topics(group: ClassicGroup) -> frozenset[str] | None:
    """All topics of a consumer group's members.

    None when it is no consumer group, a subscription is unreadable, or they name too many topics to be remembered.
    """
    if group.protocol_type != CONSUMER_PROTOCOL_TYPE:
        return None
    if not group.members:
        return frozenset()
    # Most members of a group have the same subscription.
    subscriptions = {member.metadata_for(group.protocol_name) for member in group.members.values()}
    topics: set[str] = set()
    read = 0
    try:
        for subscription in subscriptions:
            for topic in _topics_of_subscription(subscription):
                read += 1
                if read > _SUBSCRIBED_TOPICS_MAX:
                    return None
                topics.add(topic)
    except (SerialError, UnicodeDecodeError):
        return None
    return frozenset(topics)


def _topics_of_subscription(subscription: bytes) -> Iterator[str]:
    # Version 0 is the beginning of every version, so that a newer client's subscription is understood as well.
    count, at = readers.read_legacy_array_length(subscription, _VERSION_BYTES)
    at += _VERSION_BYTES
    for _ in range(count or 0):
        topic, size = readers.read_legacy_string(subscription, at)
        at += size
        yield topic
