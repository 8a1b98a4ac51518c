"""Membership in a group, kept up by a thread with connections of its own, whatever the user's code is doing meanwhile.

The member itself is a state machine (`classic_member`, `consumer_member`); here are the thread, the requests and what
other threads may ask. Partitions are given up only when their holder agrees, and the member goes on with its heartbeats
until it does; if the group takes them away all the same, the holder is told that they are lost.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

from semel.client.classic_member import ClassicMember
from semel.client.cluster import TRANSPORT_ERRORS, Answered, Cluster, CoordinatorKind
from semel.client.config import ClientConfig
from semel.client.connection import Pending
from semel.client.consumer_member import ConsumerMember
from semel.client.group_asks import RETRY_S, Ask, GroupStateMachine
from semel.client.group_config import GroupConfig
from semel.client.partitions import TopicPartition
from semel.client.transactions import GroupMember
from semel.errors import ConnectionLost, Fenced, KafkaError, SemelError
from semel.wire import Action, Api, ErrorCode, verdict

_SLICE_MS: Final = 50
"""How long a join is waited for at a stretch, before a look at whether it is still wanted."""
_LEAVE_PATIENCE_S: Final = 2.0
_LOOK_AT_TOPICS_S: Final = 30.0
_LOOK_AT_TOPICS_MIN_S: Final = 0.1
_SAY_WAITING_S: Final = 3.0
_NAMED_MAX: Final = 10
LOG: Final = logging.getLogger("semel.group")


class Holder(Protocol):
    """Who uses the partitions. Called in the member's thread, which must not be kept waiting."""

    def may_release(self, partitions: frozenset[TopicPartition]) -> bool:
        """Whether they can be given up now. False: not yet, ask again after `Membership.wake` or in a moment."""
        ...

    def lost(self, partitions: frozenset[TopicPartition]) -> None:
        """They are taken away already."""

    def tick(self, now: float) -> None:
        """Called several times in a heartbeat's interval."""


def look_interval_s(usual_s: float, client: ClientConfig) -> float:
    """How often to look at topics: `usual_s`, or as `metadata.max.age.ms` says if that is more often.

    >>> look_interval_s(30.0, ClientConfig(bootstrap=(("localhost", 9092),), metadata_max_age_ms=2_000))
    2.0
    """
    return min(usual_s, max(client.metadata_max_age_ms / 1000, _LOOK_AT_TOPICS_MIN_S))


def make_member(config: GroupConfig, topics: Collection[str]) -> GroupStateMachine:
    if config.protocol == "classic":
        return ClassicMember(config, list(topics))
    return ConsumerMember(config, list(topics), member_id=str(uuid.uuid4()))


class Membership:
    """Joins when it is started and leaves when it is closed."""

    def __init__(
        self,
        client: ClientConfig,
        config: GroupConfig,
        topics: Collection[str],
        holder: Holder,
        *,
        make_cluster: Callable[[ClientConfig], Cluster] = Cluster,
        clock: Callable[[], float] = time.monotonic,
        look_at_topics_s: float = _LOOK_AT_TOPICS_S,
    ) -> None:
        assert config.group_id is not None
        self.config = config
        self._group = config.group_id
        self._holder = holder
        self._clock = clock
        self._cluster = make_cluster(client)
        self._member = make_member(config, topics)
        self._look_at_topics_s = look_interval_s(look_at_topics_s, client)
        self._looked_at_topics = clock()
        self._changed = threading.Condition()
        self._tenures: dict[TopicPartition, int] = {}
        self._next_tenure = 0
        self._asked = 0
        self._confirmed_ask = -1
        self._confirm_wanted = False
        self._is_held = False
        self._is_asking = False
        self._is_closing = False
        self._leaves = True
        self._leaves_for_good = False
        self._waiting_since = clock()
        self._said_waiting_at = clock()
        self._thread = threading.Thread(target=self._run, name=f"semel-group-{self._group}", daemon=True)

    # -- for other threads -----------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def close(self, *, leave: bool = True, for_good: bool = False) -> None:
        """End the thread; `leave=False` goes without a word, as a crash would.

        `for_good`: a static member gives up its place too, and the others need not wait for its session to end.
        """
        with self._changed:
            self._is_closing, self._leaves, self._leaves_for_good = True, leave, for_good
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def tenures(self) -> Mapping[TopicPartition, int]:
        """The partitions that may be used, each with a number that is new whenever it was gained anew."""
        with self._changed:
            return dict(self._tenures)

    @property
    def identity(self) -> GroupMember | None:
        with self._changed:
            return self._member.identity

    @property
    def reasons(self) -> Mapping[str, int]:
        """Why rebalances began and partitions were lost, counted."""
        with self._changed:
            return dict(self._member.standing.reasons)

    @property
    def fatal(self) -> SemelError | None:
        """Why it has ended, if it has."""
        with self._changed:
            return self._member.standing.fatal

    def raise_fatal(self) -> None:
        if (fatal := self.fatal) is not None:
            raise fatal

    def take_back(self) -> None:
        """After `Fenced`: join again, which fences the member that has the `group.instance.id` now."""
        with self._changed:
            if isinstance(self._member.standing.fatal, Fenced):
                self._member.standing.fatal = None
            self._changed.notify_all()

    def look_soon(self) -> None:
        """Send a heartbeat now: the coordinator has refused this member something."""
        with self._changed:
            self._member.beat_at_once(self._clock())
            self._changed.notify_all()

    def wake(self) -> None:
        """The holder may agree now to what it refused."""
        with self._changed:
            self._changed.notify_all()

    def wait_change(self, known: Mapping[TopicPartition, int], timeout_s: float) -> None:
        """Until the partitions are others than those, or the membership has ended."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._tenures != known or self._member.standing.fatal is not None or self._is_closing, timeout_s
            )

    @contextmanager
    def held_still(self) -> Iterator[None]:
        """Inside, this member does nothing that would change its generation or epoch, while offsets are sent."""
        with self._changed:
            self._is_held = True
            if self.config.protocol == "consumer":  # a heartbeat under way may change it; a join takes its time
                self._changed.wait_for(lambda: not self._is_asking, self.config.session_timeout_ms / 1000)
        try:
            yield
        finally:
            with self._changed:
                self._is_held = False
                self._changed.notify_all()

    def confirm(self, cluster: Cluster, timeout_ms: float) -> bool:
        """One heartbeat now: whether the group still has this member, as what it believes to be."""
        return self.ask_to_confirm(cluster, timeout_ms)()

    def ask_to_confirm(self, cluster: Cluster, timeout_ms: float) -> Callable[[], bool]:
        """Send the heartbeat of `confirm`; what is returned waits for its answer."""
        if self.config.protocol == "consumer":
            is_confirmed = self._confirm_by_thread(timeout_ms / 1000)
            return lambda: is_confirmed
        # The thread's own connection may be waiting for a join; and in this protocol any connection will do.
        identity = self.identity
        if identity is None:
            return lambda: False
        try:
            pending = self._submit_heartbeat(cluster, identity)
        except TRANSPORT_ERRORS:
            return lambda: self._confirm_with_patience(cluster, identity, timeout_ms)

        def wait() -> bool:
            cluster.wait_any([pending], timeout_ms=timeout_ms)
            code = None if pending.response is None else pending.response.error_code
            if code is None or verdict(code, Api.HEARTBEAT).action is Action.RETRIABLE:
                return self._confirm_with_patience(cluster, identity, timeout_ms)
            return self._is_membership(code)

        return wait

    def _submit_heartbeat(self, cluster: Cluster, identity: GroupMember) -> Pending:
        node = cluster.coordinator(CoordinatorKind.GROUP, self._group)
        return cluster.submit(node, Api.HEARTBEAT, **_heartbeat_fields(identity))

    def _confirm_with_patience(self, cluster: Cluster, identity: GroupMember, timeout_ms: float) -> bool:
        try:
            cluster.call_coordinator(
                CoordinatorKind.GROUP,
                self._group,
                Api.HEARTBEAT,
                lambda response: Answered(response.error_code),
                what=f"group {self._group!r}",
                patience=cluster.patience(timeout_ms),
                **_heartbeat_fields(identity),
            )
        except KafkaError as error:
            return self._is_membership(error.code)
        except TRANSPORT_ERRORS:
            return False
        return True

    def _is_membership(self, code: ErrorCode) -> bool:
        if code is not ErrorCode.none:
            self.look_soon()  # the thread is to learn it too
        # In a rebalance it is still a member, and the others wait for it: nobody is given its partitions before it
        # joins again.
        return code in (ErrorCode.none, ErrorCode.rebalance_in_progress)

    def _confirm_by_thread(self, timeout_s: float) -> bool:
        with self._changed:
            if self._member.identity is None:
                return False
            wanted, standing = self._asked, self._member.standing
            losses = standing.losses
            self._confirm_wanted = True
            self._member.beat_at_once(self._clock())
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._confirmed_ask >= wanted or standing.losses > losses or self._is_closing, timeout_s
            )
            self._confirm_wanted = False
            # One that was removed may have joined again by now, which is no answer to the question.
            return self._confirmed_ask >= wanted and standing.losses == losses

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._turn()
            if self._leaves:
                self._leave()
        except Exception as error:
            # Whatever it is, the user's thread must hear of it: without heartbeats the partitions are soon another's.
            with self._changed:
                self._member.standing.fatal = error if isinstance(error, SemelError) else _unexpected(error)
                self._lose_everything()
        finally:
            self._cluster.close()

    def _turn(self) -> None:
        now = self._clock()
        self._holder.tick(now)
        self._say_if_waiting()
        with self._changed:
            standing = self._member.standing
            if standing.to_release and self._holder.may_release(standing.to_release):
                self._member.released(now)
                self._publish()
            may_move = not self._is_held or self._confirm_wanted
            ask = self._member.next_ask(now, may_move=may_move)
            number = self._asked
            if ask is not None:
                self._asked += 1
                self._is_asking = True
            elif not standing.topics_wanted and not self._is_time_to_look(now):
                self._changed.wait(self._pause_s(now))
                return
        if ask is not None:
            self._exchange(ask, number)
        else:
            self._look_at_topics()

    def _say_if_waiting(self) -> None:
        """Why nothing comes. In the first seconds, and after that now and then, since it may take a session timeout."""
        now = self._clock()
        if self._tenures:
            self._waiting_since = self._said_waiting_at = now
        elif now - self._said_waiting_at >= _SAY_WAITING_S:
            self._said_waiting_at = now
            LOG.info(
                "Group %r: has waited %.0f s for partitions. Other members must take part in the rebalance first; one "
                "that has died is removed after its session.timeout.ms (%d ms here).",
                self._group,
                now - self._waiting_since,
                self.config.session_timeout_ms,
            )

    def _pause_s(self, now: float) -> float:
        standing = self._member.standing
        # A holder that has just agreed, or a join that was held back, need not wait for more than a moment.
        longest = 0.05 if standing.to_release or self._is_held else self.config.heartbeat_interval_ms / 4000
        return min(longest, max(0.001, standing.wake_at - now)) if standing.wake_at > now else longest

    def _exchange(self, ask: Ask, number: int) -> None:
        try:
            response = self._wait_answer(ask)
        except TRANSPORT_ERRORS:
            with self._changed:
                self._member.unanswered(ask, self._clock())
                self._after_answer()
            return
        with self._changed:
            before = self._member.standing.confirmed
            self._member.answered(ask, response, self._clock())
            if self._member.standing.confirmed > before:
                self._confirmed_ask = number
                self._confirm_wanted = False
            self._after_answer()

    def _wait_answer(self, ask: Ask) -> Any:
        cluster = self._cluster
        if ask.api is Api.JOIN_GROUP:
            LOG.info("Group %r: joining.", self._group)
        node = cluster.coordinator(CoordinatorKind.GROUP, self._group)
        pending = cluster.submit(node, ask.api, timeout_ms=ask.timeout_ms, **ask.fields)
        while not cluster.wait_any([pending], timeout_ms=_SLICE_MS):
            self._holder.tick(self._clock())
            self._say_if_waiting()
            if self._is_closing:
                raise ConnectionLost("The membership was closed while a request was under way.")
        return pending.result()

    def _after_answer(self) -> None:
        standing = self._member.standing
        self._is_asking = False
        if standing.forget_coordinator:
            standing.forget_coordinator = False
            self._cluster.forget_coordinator(CoordinatorKind.GROUP, self._group)
        self._publish()
        self._changed.notify_all()

    def _publish(self) -> None:
        """Show other threads what has changed; what is gone without having been released is lost."""
        assignment = self._member.standing.assignment
        gone = frozenset(self._tenures.keys() - assignment)
        gained = sorted(assignment - self._tenures.keys())
        if gone:
            LOG.info("Group %r: gave up %s.", self._group, _named(sorted(gone)))
        if gained:
            LOG.info("Group %r: was assigned %s.", self._group, _named(gained))
        for partition in gone:
            del self._tenures[partition]
        for partition in gained:
            self._tenures[partition] = self._next_tenure
            self._next_tenure += 1
        if gone:
            self._holder.lost(gone)
        self._changed.notify_all()

    def _lose_everything(self) -> None:
        gone = frozenset(self._tenures)
        LOG.warning("Group %r: the membership has ended; lost %s.", self._group, _named(sorted(gone)))
        self._tenures.clear()
        if gone:
            self._holder.lost(gone)
        self._changed.notify_all()

    def _is_time_to_look(self, now: float) -> bool:
        return bool(self._member.watched_topics) and now - self._looked_at_topics >= self._look_at_topics_s

    def _look_at_topics(self) -> None:
        self._looked_at_topics = self._clock()
        wanted = self._member.standing.topics_wanted or self._member.watched_topics
        try:
            shapes = self._cluster.topic_shapes(wanted)
        except TRANSPORT_ERRORS:
            self._cluster.sleep(RETRY_S)
            return
        with self._changed:
            self._member.learn(shapes, self._clock())
            self._publish()
            is_settled = not self._member.standing.topics_wanted
        if not is_settled:  # a topic that this broker has not heard of yet
            self._cluster.sleep(RETRY_S)

    def _leave(self) -> None:
        ask = self._member.leave(for_good=self._leaves_for_good)
        if ask is None:
            return
        try:
            node = self._cluster.coordinator(CoordinatorKind.GROUP, self._group)
            pending = self._cluster.submit(node, ask.api, **ask.fields)
            self._cluster.wait_any([pending], timeout_ms=_LEAVE_PATIENCE_S * 1000)
        except TRANSPORT_ERRORS:
            return  # its session will end by itself


def _named(partitions: Sequence[TopicPartition]) -> str:
    names = [f"{topic}-{number}" for topic, number in partitions[:_NAMED_MAX]]
    more = len(partitions) - len(names)
    return (", ".join(names) or "nothing") + (f" and {more} more" if more else "")


def _unexpected(error: Exception) -> SemelError:
    failure = SemelError(
        f"The membership in the group ended by an error that nobody thought of ({error!r}); what was not committed is "
        "aborted and others will process it. Make a new session, and report it."
    )
    failure.__cause__ = error
    return failure


def _heartbeat_fields(identity: GroupMember) -> dict[str, Any]:
    return {
        "group_id": identity.group_id,
        "generation_id": identity.generation_id,
        "member_id": identity.member_id,
        "group_instance_id": identity.group_instance_id,
    }
