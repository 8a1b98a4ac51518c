"""The brokers of one cluster: who leads which partition, who coordinates what, and a connection to each.

One `Cluster` belongs to one thread. It answers three kinds of calls: to a given broker, to a partition's leader and to
a coordinator; the last two find the broker, and find it anew when it has moved.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import Any, Final, Self
from uuid import UUID

from kio.schema.errors import ErrorCode

from semel.client.config import ClientConfig
from semel.client.connection import Connect, Connection, Pending, connect_tcp
from semel.client.failures import failure
from semel.client.retry import Patience
from semel.errors import (
    BrokerUnreachable,
    ConnectionLost,
    RequestTimedOut,
    SemelError,
    UnknownTopic,
)
from semel.wire import Action, Api, Refresh, Verdict, build, verdict

# A topic that was just created takes a moment to reach every broker; one that is still unknown after this is missing.
UNKNOWN_TOPIC_PATIENCE_MS = 3_000

# Until a broker has answered, a wrong address or listener is likelier than an outage that is worth waiting for.
FIRST_ANSWER_PATIENCE_MS = 3_000

TRANSPORT_ERRORS = (BrokerUnreachable, ConnectionLost, RequestTimedOut)
"""No answer came: the broker may have carried the request out or not."""


@dataclass(frozen=True, slots=True)
class TopicShape:
    """A topic's id (None before Kafka 2.8) and number of partitions."""

    topic_id: UUID | None
    partition_count: int


class CoordinatorKind(IntEnum):
    GROUP = 0
    TRANSACTION = 1


@dataclass(frozen=True, slots=True)
class Leader:
    """Who leads a partition; `node` is -1 while nobody does."""

    node: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Answered:
    """What one try of a call came to: a response, or why the call should be tried again."""

    code: ErrorCode
    message: str | None = None


# `select` alone cannot watch file descriptors above 1023, which a busy process soon has.
_Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)


def wait_readable(connections: Iterable[Connection], timeout_s: float) -> list[Connection]:
    """Those that have something to read, as soon as there is one; none after `timeout_s`."""
    with _Selector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ, connection)
        return [key.data for key, _ in selector.select(timeout_s)]


WaitReadable = Callable[[Iterable[Connection], float], list[Connection]]
"""Waits at most so many seconds until some of these have something to read, and returns those."""

_OPEN_ANSWERS: Final = frozenset(
    {
        ErrorCode.coordinator_not_available,
        ErrorCode.not_coordinator,
        ErrorCode.request_timed_out,
        ErrorCode.network_exception,
        ErrorCode.kafka_storage_error,
    }
)
"""Told when what was asked for is written, and not yet safe: a coordinator that comes after may still carry it out."""


class Cluster:
    """
    >>> from semel.client.settings import parse_config
    >>> with Cluster(parse_config({"bootstrap.servers": bootstrap}).client) as cluster:
    ...     cluster.transaction_protocol
    2
    """

    def __init__(
        self,
        config: ClientConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        connect: Connect = connect_tcp,
        wait_readable: WaitReadable = wait_readable,
    ) -> None:
        self.config = config
        self.clock = clock
        self.sleep = sleep
        self._connect = connect
        self._wait_readable = wait_readable
        # Bootstrap addresses have negative ids until metadata tells the brokers' own; -1 stands for "no leader".
        self._bootstrap = {-2 - index: address for index, address in enumerate(config.bootstrap)}
        self._nodes: dict[int, tuple[str, int]] = {}
        self._connections: dict[int, Connection] = {}
        self._topics: dict[str, Mapping[int, Leader]] = {}
        self._topics_known_since: dict[str, float] = {}
        self._topic_ids: dict[str, UUID | None] = {}
        self._coordinators: dict[tuple[CoordinatorKind, str], int] = {}
        self.controller: int = -1
        self._has_answered = False
        self._transaction_protocol: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def patience(self, budget_ms: float | None = None) -> Patience:
        """A budget for one call, by default `default.api.timeout.ms`."""
        config = self.config
        budget = config.api_timeout_ms if budget_ms is None else budget_ms
        return Patience(budget, config.retry_backoff_ms, config.retry_backoff_max_ms, self.clock, self.sleep)

    # -- connections -----------------------------------------------------------------------------------------------

    def connection(self, node: int) -> Connection:
        """An open connection to this broker, a new one if need be; `BrokerUnreachable` if that fails."""
        known = self._connections.get(node)
        if known is not None and known.is_open:
            return known
        address = self._nodes.get(node) or self._bootstrap.get(node)
        if address is None:
            raise BrokerUnreachable(f"Broker {node} is not in the cluster's metadata (any more); nothing was sent.")
        connection = self._take_bootstrap_connection(address) or Connection(
            *address, self.config, clock=self.clock, connect=self._connect
        )
        self._connections[node] = connection
        return connection

    def disconnect(self, node: int) -> None:
        """Close the connection to this broker, if there is one; what is under way on it is left unknown."""
        connection = self._connections.pop(node, None)
        if connection is not None:
            connection.close()

    def _take_bootstrap_connection(self, address: tuple[str, int]) -> Connection | None:
        """The connection that was made before the broker's id was known: a second login would be for nothing."""
        for bootstrap, known_address in self._bootstrap.items():
            connection = self._connections.get(bootstrap)
            if known_address == address and connection is not None and connection.is_open:
                return self._connections.pop(bootstrap)
        return None

    def any_connection(self) -> Connection:
        """A connection to whichever broker can be reached: an open one first, bootstrap addresses last (KIP-1102)."""
        for connection in self._connections.values():
            if connection.is_open:
                return connection
        last_error: SemelError | None = None
        for node in (*self._nodes, *self._bootstrap):
            try:
                return self.connection(node)
            except BrokerUnreachable as error:
                last_error = error
        assert last_error is not None, "a configuration has at least one bootstrap address"
        raise last_error

    def _wait_connection(self) -> Connection:
        patience = self.patience()
        while True:
            try:
                return self.any_connection()
            except BrokerUnreachable:
                if self.gives_up(patience):
                    raise
            patience.pause()

    def gives_up(self, patience: Patience) -> bool:
        """Whether to stop trying after a request that nobody has answered."""
        waited_ms = patience.budget_ms - patience.remaining_ms
        return patience.is_spent or (not self._has_answered and waited_ms >= FIRST_ANSWER_PATIENCE_MS)

    @property
    def transaction_protocol(self) -> int:
        """1 or 2, as the cluster has finalized it, or had when last a broker could be reached."""
        connection = next((known for known in self._connections.values() if known.is_open), None)
        if connection is None and self._transaction_protocol is None:
            connection = self._wait_connection()
        if connection is not None:
            self._transaction_protocol = connection.capabilities.transaction_protocol
        assert self._transaction_protocol is not None, "it is known from the first connection on"
        return self._transaction_protocol

    def speaks(self, api: Api, version: int) -> bool:
        """Whether brokers offer this version of a request."""
        offered = self._wait_connection().capabilities.versions.get(api)
        return offered is not None and offered.highest >= version

    # -- requests --------------------------------------------------------------------------------------------------

    def submit(
        self, node: int, api: Api, *, highest: int | None = None, timeout_ms: int | None = None, **fields: Any
    ) -> Pending:
        """Send to this broker without waiting; `wait_any` collects the answer."""
        connection = self.connection(node)
        request = build(api, connection.capabilities.version_for(api, highest=highest), **fields)
        return connection.send(request, timeout_ms=timeout_ms, answered=not _is_unanswered(api, fields))

    def wait_any(self, pendings: Iterable[Pending], *, timeout_ms: float | None = None) -> bool:
        """Wait until at least one of these is done; False if `timeout_ms` passed first."""
        waited_for = list(pendings)
        deadline = None if timeout_ms is None else self.clock() + timeout_ms / 1000
        while not any(pending.done for pending in waited_for):
            busy = [connection for connection in self._connections.values() if connection.under_way]
            if not busy:
                raise ConnectionLost("A request was waited for on a connection that is gone.")
            readable = [connection for connection in busy if connection.has_buffered()]
            if not readable:
                until = min(connection.next_deadline for connection in busy)
                until = until if deadline is None else min(until, deadline)
                readable = self._wait_readable(busy, max(0.0, until - self.clock()))
            for connection in readable:
                connection.receive()
            if not readable:
                self._expire(busy)
                if deadline is not None and self.clock() >= deadline:
                    return any(pending.done for pending in waited_for)
        return True

    def _expire(self, connections: Iterable[Connection]) -> None:
        now = self.clock()
        for connection in connections:
            if connection.under_way and connection.next_deadline <= now:
                connection.fail(
                    RequestTimedOut(
                        f"{connection.address} took longer than {self.config.request_timeout_ms} ms "
                        "(request.timeout.ms) to answer."
                    )
                )

    def call(self, node: int | None, api: Api, *, highest: int | None = None, **fields: Any) -> Any:
        """Send to one broker (`None`: whichever can be reached) and wait. One try, no retry."""
        connection = self.any_connection() if node is None else self.connection(node)
        request = build(api, connection.capabilities.version_for(api, highest=highest), **fields)
        pending = connection.send(request)
        self.wait_any([pending])
        response = pending.result()
        self._has_answered = True
        return response

    def call_until_settled(
        self,
        find_node: Callable[[], int | None],
        forget_node: Callable[[], None],
        api: Api,
        read_answer: Callable[[Any], Answered],
        *,
        what: str,
        patience: Patience | None = None,
        highest: int | None = None,
        **fields: Any,
    ) -> Any:
        """Call until the answer is none of "not now" and "not here"; safe only for requests that may be repeated.

        Raises the `KafkaError` of an answer that no repeat can cure, and the last transport error when patience is
        spent.
        """
        patience = patience or self.patience()
        is_try_open = False
        while True:
            judged: Verdict | None = None
            try:
                response = self.call(find_node(), api, highest=highest, **fields)
            except BrokerUnreachable as error:
                forget_node()
                if self.gives_up(patience):
                    if is_try_open:
                        raise _still_unknown(error) from error.__cause__
                    raise
            except (ConnectionLost, RequestTimedOut):
                is_try_open = True
                forget_node()
                if self.gives_up(patience):
                    raise
            else:
                answer = read_answer(response)
                if answer.code == ErrorCode.none:
                    return response
                judged = verdict(answer.code, api)
                is_try_open = is_try_open or answer.code in _OPEN_ANSWERS
                if judged.action is not Action.RETRIABLE or patience.is_spent or _is_missing(answer.code, patience):
                    error = failure(answer.code, api, what, answer.message)
                    error.is_earlier_try_open = is_try_open
                    raise error
                if judged.refresh is not Refresh.NOTHING:
                    forget_node()
            patience.pause(judged)

    # -- leaders ---------------------------------------------------------------------------------------------------

    def leaders(self, topic: str) -> Mapping[int, Leader]:
        """The topic's partitions and their leaders; `UnknownTopic` if it is not there."""
        known = self._topics.get(topic)
        fresh_since = self.clock() - self.config.metadata_max_age_ms / 1000
        if known is None or self._topics_known_since[topic] < fresh_since:
            self.refresh_topics([topic])
        return self._topics[topic]

    def leader(self, topic: str, partition: int) -> Leader:
        """Who leads this partition, as far as is known; `UnknownTopic` if there is no such partition."""
        leaders = self.leaders(topic)
        if partition not in leaders:
            self.refresh_topics([topic])
            leaders = self.leaders(topic)
        if partition not in leaders:
            raise UnknownTopic(
                f"Topic {topic!r} has {len(leaders)} partitions and none numbered {partition}; nothing was written to "
                "it or read from it. Add partitions to the topic, or check the number.",
                code=ErrorCode.unknown_topic_or_partition,
            )
        return leaders[partition]

    def forget_leaders(self, topics: Collection[str] | None = None) -> None:
        """Ask for these topics' leaders anew before the next use (`None`: of all topics)."""
        for topic in list(self._topics) if topics is None else topics:
            self._topics.pop(topic, None)

    def refresh_topics(self, topics: Collection[str]) -> None:
        """Fetch these topics' metadata; waits a moment for topics that are not known yet or have no leader."""
        patience = self.patience()
        while True:
            try:
                codes = self._fetch_metadata(topics)
            except TRANSPORT_ERRORS:
                if self.gives_up(patience):
                    raise
                codes = {"": ErrorCode.network_exception}
            judged = None
            for topic, code in codes.items():
                judged = verdict(code, Api.METADATA)
                if judged.action is not Action.RETRIABLE or patience.is_spent or _is_missing(code, patience):
                    raise failure(code, Api.METADATA, f"topic {topic!r}")
            if judged is None:
                return
            patience.pause(judged)

    def _fetch_metadata(self, topics: Collection[str] | None) -> Mapping[str, ErrorCode]:
        """One Metadata request, its result kept; returns the topics that have an error."""
        response = self.call(
            None,
            Api.METADATA,
            topics=None if topics is None else [{"topic_id": None, "name": topic} for topic in sorted(topics)],
            allow_auto_topic_creation=False,
            include_cluster_authorized_operations=False,
            include_topic_authorized_operations=False,
        )
        self._nodes = {broker.node_id: (broker.host, broker.port) for broker in response.brokers}
        self.controller = response.controller_id
        now = self.clock()
        failed: dict[str, ErrorCode] = {}
        for topic in response.topics:
            if topic.error_code != ErrorCode.none:
                failed[topic.name] = topic.error_code
                continue
            self._topics_known_since[topic.name] = now
            self._topic_ids[topic.name] = getattr(topic, "topic_id", None)
            self._topics[topic.name] = {
                partition.partition_index: Leader(partition.leader_id, getattr(partition, "leader_epoch", -1))
                for partition in topic.partitions
            }
        return failed

    def known_leaders(self, topic: str) -> Mapping[int, Leader] | None:
        """What `leaders` returned last, if it is still fresh. Asks no broker."""
        known = self._topics.get(topic)
        if known is None or self._topics_known_since[topic] < self.clock() - self.config.metadata_max_age_ms / 1000:
            return None
        return known

    def try_refresh_topics(self, topics: Collection[str]) -> Mapping[str, ErrorCode]:
        """Fetch these topics' metadata, in one try; returns the topics that have an error."""
        return self._fetch_metadata(topics)

    def topic_shapes(self, topics: Collection[str]) -> dict[str, TopicShape]:
        """As they are at this moment, those that are there. One try, no retry."""
        failed = self._fetch_metadata(topics)
        return {
            topic: TopicShape(self._topic_ids.get(topic), len(self._topics[topic]))
            for topic in topics
            if topic not in failed and topic in self._topics
        }

    def topic_id(self, topic: str) -> UUID | None:
        """The id that a topic had when its leaders were asked for; another one after it was created again.

        None where brokers have none (before Kafka 2.8), and where nothing was asked.
        """
        return self._topic_ids.get(topic)

    def list_topics(self) -> Mapping[str, Mapping[int, Leader]]:
        """Every topic this client may see."""
        self._topics.clear()
        self._fetch_metadata(None)
        return dict(self._topics)

    def nodes(self) -> Mapping[int, tuple[str, int]]:
        """The brokers, by id."""
        if not self._nodes:
            self._fetch_metadata([])
        return dict(self._nodes)

    # -- coordinators ----------------------------------------------------------------------------------------------

    def coordinator(self, kind: CoordinatorKind, key: str) -> int:
        """The broker that coordinates this group or transactional id."""
        known = self._coordinators.get((kind, key))
        if known is not None:
            return known

        def read(response: Any) -> Answered:
            return Answered(response.error_code, response.error_message)

        response = self.call_until_settled(
            lambda: None,
            lambda: None,
            Api.FIND_COORDINATOR,
            read,
            what=f"{'group' if kind is CoordinatorKind.GROUP else 'transactional.id'} {key!r}",
            key=key,
            key_type=int(kind),
        )
        self._nodes[response.node_id] = (response.host, response.port)
        self._coordinators[(kind, key)] = response.node_id
        return response.node_id

    def forget_coordinator(self, kind: CoordinatorKind, key: str) -> None:
        self._coordinators.pop((kind, key), None)

    def call_coordinator(
        self,
        kind: CoordinatorKind,
        key: str,
        api: Api,
        read_answer: Callable[[Any], Answered],
        *,
        what: str,
        patience: Patience | None = None,
        highest: int | None = None,
        **fields: Any,
    ) -> Any:
        """`call_until_settled` at the coordinator, wherever it moves."""
        return self.call_until_settled(
            lambda: self.coordinator(kind, key),
            lambda: self.forget_coordinator(kind, key),
            api,
            read_answer,
            what=what,
            patience=patience,
            highest=highest,
            **fields,
        )


def _is_missing(code: ErrorCode, patience: Patience) -> bool:
    return code == ErrorCode.unknown_topic_or_partition and patience.elapsed_ms > UNKNOWN_TOPIC_PATIENCE_MS


def _still_unknown(error: BrokerUnreachable) -> ConnectionLost:
    return ConnectionLost(f"{error} An earlier try was sent, and what became of it is not known.")


def _is_unanswered(api: Api, fields: Mapping[str, Any]) -> bool:
    return api is Api.PRODUCE and fields.get("acks") == 0
