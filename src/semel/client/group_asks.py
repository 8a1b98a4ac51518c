"""What a group member and the loop around it say to each other: requests to send, and how the member stands. No IO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from semel.client.cluster import TopicShape
from semel.client.failures import failure
from semel.client.partitions import TopicPartition
from semel.client.transactions import GroupMember
from semel.errors import Fenced, KafkaError, SemelError
from semel.wire import Action, Api, ErrorCode, Refresh, verdict

RETRY_S: Final = 0.1
SOON_S: Final = 0.01
NOTHING: Final[frozenset[TopicPartition]] = frozenset()


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for the group's coordinator."""

    api: Api
    fields: Mapping[str, Any]
    timeout_ms: int | None = None
    """Where it may take longer than other requests: a join waits for all members."""


@dataclass(slots=True)
class Standing:
    """What a member's loop and its user look at."""

    assignment: frozenset[TopicPartition] = NOTHING
    """What may be read and committed now."""
    to_release: frozenset[TopicPartition] = NOTHING
    """Of it, what must be given up before the member can go on."""
    wake_at: float = 0.0
    """When the member has something to do again, if nothing else happens before."""
    fatal: SemelError | None = None
    forget_coordinator: bool = False
    topics_wanted: frozenset[str] = frozenset()
    """Whose shapes the member needs now; `learn` brings them."""
    confirmed: int = 0
    """How many heartbeats were answered without any complaint."""
    losses: int = 0
    """How often the group has gone on without this member."""
    reasons: dict[str, int] = field(default_factory=dict[str, int])
    """Why partitions were lost or rebalances begun, counted."""

    def note(self, reason: str) -> None:
        self.reasons[reason] = self.reasons.get(reason, 0) + 1


class GroupStateMachine(Protocol):
    """A member of a group, of either protocol. Time is passed in; nothing is sent from here."""

    standing: Standing

    @property
    def identity(self) -> GroupMember | None:
        """Who to commit offsets as; None while it is no member."""
        ...

    @property
    def watched_topics(self) -> frozenset[str]:
        """Whose partitions this member must share out anew when their number changes."""
        ...

    def next_ask(self, now: float, *, may_move: bool) -> Ask | None:
        """What to send now. `may_move=False`: nothing that could change the generation or epoch."""
        ...

    def answered(self, ask: Ask, response: Any, now: float) -> None: ...

    def unanswered(self, ask: Ask, now: float) -> None:
        """No answer came: the coordinator may have carried it out or not."""

    def released(self, now: float) -> None:
        """What was `to_release` is no longer used."""

    def learn(self, shapes: Mapping[str, TopicShape], now: float) -> None: ...

    def beat_at_once(self, now: float) -> None:
        """The next heartbeat is due now."""

    def leave(self, *, for_good: bool = False) -> Ask | None:
        """The request to leave with; None if there is nothing to say.

        A static member keeps its place until its session ends (KIP-345), unless it goes `for_good`.
        """
        ...


def settle_refusal(standing: Standing, code: ErrorCode, api: Api, group: str, message: str | None, now: float) -> None:
    """A code that is no event of the group protocol: try again in a moment, or be lost for good."""
    judged = verdict(code, api)
    if judged.action is Action.RETRIABLE:
        standing.wake_at = now + (SOON_S if judged.soon else RETRY_S)
        standing.forget_coordinator |= judged.refresh is Refresh.COORDINATOR
        return
    standing.fatal = failure(code, api, f"group {group!r}", message)


def fenced_instance(group: str, instance_id: str | None) -> KafkaError:
    return Fenced(
        f"Another member of group {group!r} has taken over group.instance.id {instance_id!r}, so this one may no "
        "longer read or commit, and what it had not committed is aborted. Stop this instance, or give each its own id.",
        code=ErrorCode.fenced_instance_id,
        is_fatal=True,
    )
