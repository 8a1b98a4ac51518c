"""Fetch sessions (KIP-227): a reader names its partitions once, then only changes, and is told only changes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from kio.schema.errors import ErrorCode

from semel.broker.topic_names import NAME_CHARACTERS_MAX
from semel.core.refusal import Refused

NO_SESSION: Final = 0
INITIAL_EPOCH: Final = 0
FINAL_EPOCH: Final = -1
_EPOCH_MAX: Final = 2**31 - 1
_SESSION_ID_MAX: Final = 2**31 - 1

PARTITIONS_MAX: Final = 120_000
PARTITION_BYTES: Final = 550
"""About what a partition of a session takes, with a name of its own of the greatest length."""

PartitionName = tuple[str, int]


@dataclass(slots=True)
class Wanted:
    """What a reader wants of one partition, and what it was last told about it."""

    fetch_offset: int
    bytes_max: int
    leader_epoch: int = -1
    told: tuple[int, int, int] | None = None
    """High watermark, last stable offset and log start as last sent; None makes the next answer mention it anyway."""


@dataclass(slots=True)
class FetchSession:
    """The partitions of one reader, in the order in which they are served: who got records goes to the end."""

    session_id: int
    principal: str
    epoch: int = INITIAL_EPOCH
    partitions: OrderedDict[PartitionName, Wanted] = field(default_factory=OrderedDict[PartitionName, Wanted])
    is_incremental: bool = False

    def take(self, request: Any) -> None:
        for topic in request.topics:
            for one in topic.partitions:
                name = (topic.topic, one.partition)
                wanted = self.partitions.get(name)
                leader_epoch = getattr(one, "current_leader_epoch", -1)
                if wanted is None:
                    self.partitions[name] = Wanted(one.fetch_offset, one.partition_max_bytes, leader_epoch)
                else:
                    wanted.fetch_offset = one.fetch_offset
                    wanted.bytes_max = one.partition_max_bytes
                    wanted.leader_epoch = leader_epoch

    def forget(self, names: Iterable[PartitionName]) -> None:
        for name in names:
            self.partitions.pop(name, None)


class FetchSessions:
    """All sessions of a broker: at most `sessions_max`, the longest unused of which makes room for a new one.

    They hold no more than `partitions_max` partitions in all, which need not exist: a thousand sessions of a hundred
    thousand names each would fill the memory. A reader that gets no session fetches without one.
    """

    def __init__(
        self, sessions_max: int, random_number: Callable[[], int], partitions_max: int = PARTITIONS_MAX
    ) -> None:
        """`random_number` gives the ids: after a restart no reader may take another's new session for its old one."""
        self._sessions_max = sessions_max
        self._sessions: OrderedDict[int, FetchSession] = OrderedDict()
        self._random_number = random_number
        self._partitions_max = partitions_max
        self._partition_count = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def partitions_of(self, session_id: int) -> list[PartitionName]:
        session = self._sessions.get(session_id)
        return [] if session is None else list(session.partitions)

    def session_for(self, request: Any, principal: str) -> FetchSession:
        """The session that a request belongs to, brought up to date with it. Raises Refused with its error."""
        session_id: int = getattr(request, "session_id", NO_SESSION)
        epoch: int = getattr(request, "session_epoch", FINAL_EPOCH)
        if any(len(topic.topic) > NAME_CHARACTERS_MAX for topic in request.topics):
            raise Refused(ErrorCode.invalid_topic_exception, "a topic's name is too long to exist")
        if epoch in (INITIAL_EPOCH, FINAL_EPOCH):
            if session_id != NO_SESSION:
                self._drop(session_id)
            return self._full(request, principal, wants_session=epoch == INITIAL_EPOCH)
        session = self._sessions.get(session_id)
        # A session is as secret as its number: somebody else's is treated as if it were not there.
        if session is None or session.principal != principal:
            raise Refused(ErrorCode.fetch_session_id_not_found, f"session {session_id}")
        if session.epoch != epoch:
            raise Refused(ErrorCode.invalid_fetch_session_epoch, f"{epoch} instead of {session.epoch}")
        self._sessions.move_to_end(session_id)
        session.epoch = 1 if epoch == _EPOCH_MAX else epoch + 1
        session.is_incremental = True
        before = len(session.partitions)
        session.take(request)
        session.forget((topic.topic, index) for topic in request.forgotten_topics_data for index in topic.partitions)
        self._partition_count += len(session.partitions) - before
        self._make_room()
        return session

    def _full(self, request: Any, principal: str, *, wants_session: bool) -> FetchSession:
        session = FetchSession(NO_SESSION, principal)
        session.take(request)
        if wants_session and self._sessions_max > 0 and len(session.partitions) <= self._partitions_max:
            session.session_id, session.epoch = self._next_id(), INITIAL_EPOCH + 1
            self._sessions[session.session_id] = session
            self._partition_count += len(session.partitions)
            self._make_room()
        return session

    def _make_room(self) -> None:
        while len(self._sessions) > self._sessions_max or self._partition_count > self._partitions_max:
            self._drop(next(iter(self._sessions)))

    def _drop(self, session_id: int) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._partition_count -= len(session.partitions)

    def _next_id(self) -> int:
        session_id = NO_SESSION
        while session_id == NO_SESSION or session_id in self._sessions:
            session_id = self._random_number() & _SESSION_ID_MAX
        return session_id
