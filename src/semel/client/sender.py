"""Encoded batches to the leaders of their partitions: pipelined, in order, each stored once.

No thread of its own: it sends and collects answers whenever it is called, and `drain` goes on until nothing is left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from semel.client.cluster import TRANSPORT_ERRORS, UNKNOWN_TOPIC_PATIENCE_MS, Cluster
from semel.client.config import ProducerConfig
from semel.client.connection import Pending
from semel.client.failures import failure
from semel.client.ownership import NOBODY, ProducerIdentity
from semel.client.partitions import TopicPartition
from semel.client.retry import Patience
from semel.client.send_queue import OutgoingBatch, SendQueue
from semel.client.undelivered import Undelivered
from semel.errors import KafkaError, RequestTimedOut, SemelError
from semel.records import EncodedBatch, stamp
from semel.wire import PROTOCOL_2_VERSIONS, Action, Api, ErrorCode, Refresh, Verdict, verdict

_STORED_BEFORE = ErrorCode.duplicate_sequence_number
"""The broker has this very batch but no longer its offset: stored, which is what was wanted."""

_STORED_MAX = 100_000
"""A service that never calls `flush` must not remember every batch it ever sent."""

_UNDELIVERED_BYTES_MAX = 32 * 1024 * 1024

_GAP_CODES = (ErrorCode.out_of_order_sequence_number, ErrorCode.unknown_producer_id)


class Stored(NamedTuple):
    """A batch that the leader has acknowledged; `base_offset` is -1 where the broker did not tell it."""

    topic: str
    partition: int
    base_offset: int
    record_count: int


@dataclass(slots=True, eq=False)
class _Flight:
    node: int
    pending: Pending
    batches: list[OutgoingBatch]


@dataclass(slots=True, eq=False)
class _Lane:
    """A partition's queue and its patience with the broker."""

    queue: SendQueue = field(default_factory=SendQueue)
    patience: Patience | None = None
    unknown_since: float | None = None
    """Since when brokers answer that they have no such topic."""
    is_broken: bool = False
    """A batch failed for good: what was in flight behind it is given up with it, never reordered (KIP-360)."""


class Sender:
    """Sends under one producer identity, which its owner may change between transactions."""

    def __init__(
        self,
        cluster: Cluster,
        config: ProducerConfig,
        *,
        identity: ProducerIdentity = NOBODY,
        before_first_write: Callable[[Collection[TopicPartition]], None] | None = None,
        next_identity: Callable[[ProducerIdentity], ProducerIdentity] | None = None,
    ) -> None:
        self._cluster = cluster
        self._config = config
        self.identity = identity
        self.protocol = 1
        self.failure: SemelError | None = None
        """The first batch that failed for good. A transactional sender stops at it."""
        self.stored: list[Stored] = []
        self.buffered_bytes = 0
        self.failed_records = 0
        self.undelivered: list[Undelivered] = []
        """Outside of transactions: what was given up since the failure was last asked for."""
        self._undelivered_bytes = 0
        self._before_first_write = before_first_write
        self._next_identity = next_identity
        self._registered: set[TopicPartition] = set()
        self._lanes: dict[TopicPartition, _Lane] = {}
        self._known: set[TopicPartition] = set()
        """Whose leaders have batches of this producer id from an earlier transaction."""
        self._flights: list[_Flight] = []
        self._bump_wanted = False

    @property
    def is_idle(self) -> bool:
        return not self._flights and all(lane.queue.is_empty for lane in self._lanes.values())

    @property
    def record_counts(self) -> tuple[int, int]:
        """How many records never left, and how many left and have no answer yet."""
        counts = [lane.queue.record_counts for lane in self._lanes.values()]
        return sum(never_sent for never_sent, _ in counts), sum(unanswered for _, unanswered in counts)

    def take_failure(self) -> SemelError | None:
        """The first failure since the last call, if any, with all that was given up."""
        failed, self.failure = self.failure, None
        undelivered, self.undelivered, self._undelivered_bytes = self.undelivered, [], 0
        given_up, self.failed_records = self.failed_records, 0
        if failed is not None:
            by_partition: dict[str, int] = {}
            for one in undelivered:
                where = f"{one.topic}-{one.partition}"
                by_partition[where] = by_partition.get(where, 0) + one.record_count
            failed.undelivered = tuple(undelivered)
            names = ", ".join(f"{count} for {where}" for where, count in by_partition.items())
            failed.add_note(
                f"Given up: {given_up} records ({names}). `undelivered` of this exception holds them; "
                "all others were stored."
            )
        return failed

    def enqueue(self, topic: str, partition: int, batch: EncodedBatch, *, sequence: int | None = None) -> None:
        """Take a batch; `sequence` sets where a partition's numbering starts (a writer that goes on after another)."""
        tp = TopicPartition(topic, partition)
        lane = self._lanes.get(tp)
        if lane is None:
            lane = self._lanes[tp] = _Lane(SendQueue(is_known=tp in self._known))
        if sequence is not None:
            lane.queue.next_sequence = sequence
            lane.queue.is_known |= sequence > 0
        data = memoryview(batch.data)
        if data.readonly:  # it is stamped in place
            data = memoryview(bytearray(data))
        deadline = self._cluster.clock() + self._config.delivery_timeout_ms / 1000
        lane.queue.add(OutgoingBatch(topic, partition, data, batch.record_count, deadline))
        self.buffered_bytes += len(data)

    def start_over(self, identity: ProducerIdentity) -> None:
        """A new identity for a new transaction: sequences begin at 0."""
        if identity.producer_id == self.identity.producer_id:
            self._known.update(tp for tp, lane in self._lanes.items() if lane.queue.is_known)
        else:
            self._known.clear()
        self.identity = identity
        self.failure = None
        self.failed_records = 0
        self.undelivered, self._undelivered_bytes = [], 0
        self._bump_wanted = False
        self._registered.clear()
        self._lanes.clear()
        self.stored = []

    def discard(self, *, patience_ms: float) -> None:
        """Give up all batches. What is in flight is fenced by the epoch that the abort brings."""
        for lane in self._lanes.values():
            lane.queue.clear()
        self.buffered_bytes = 0
        patience = self._cluster.patience(patience_ms)
        while self._flights and not patience.is_spent:
            self._cluster.wait_any([f.pending for f in self._flights], timeout_ms=max(0, patience.remaining_ms))
            self._flights = [flight for flight in self._flights if not flight.pending.done]
        for flight in self._flights:
            self._cluster.disconnect(flight.node)
        self._flights.clear()

    # -- sending ---------------------------------------------------------------------------------------------------

    def drain(self, *, down_to_bytes: int = 0, timeout_ms: float | None = None) -> None:
        """Send and collect until at most `down_to_bytes` are buffered, a failure stops it, or the time is over."""
        until = None if timeout_ms is None else self._cluster.clock() + timeout_ms / 1000
        while not self.is_idle and (self.buffered_bytes > down_to_bytes or down_to_bytes == 0):
            self._raise_if_stopped()
            if until is not None and self._cluster.clock() >= until:
                return
            sent = self._send_ready()
            pause_ms = self._until_retry_ms()
            if until is not None:
                left_ms = max(1.0, (until - self._cluster.clock()) * 1000)
                pause_ms = left_ms if pause_ms is None else min(pause_ms, left_ms)
            if self._flights:
                self._cluster.wait_any([flight.pending for flight in self._flights], timeout_ms=pause_ms)
                self._collect()
            elif not sent:
                self._cluster.sleep((pause_ms or 1) / 1000)
        self._raise_if_stopped()

    def nudge(self) -> None:
        """Send what may leave and collect what has arrived, without waiting."""
        self._raise_if_stopped()
        self._send_ready()
        if self._flights:
            self._cluster.wait_any([flight.pending for flight in self._flights], timeout_ms=0)
            self._collect()

    @property
    def _is_stopped(self) -> bool:
        return self.failure is not None and self._config.transactional_id is not None

    def _raise_if_stopped(self) -> None:
        if self._is_stopped:
            assert self.failure is not None
            raise self.failure

    def _until_retry_ms(self) -> float | None:
        now = self._cluster.clock()
        waits = [lane.queue.not_before - now for lane in self._lanes.values() if lane.queue.not_before > now]
        return max(1.0, min(waits) * 1000) if waits else None

    def _send_ready(self) -> bool:
        """Fill every leader's pipeline; True if anything left."""
        if self._bump_wanted:
            self._bump_when_settled()
        try:
            by_node = self._ready_by_leader()
            self._register(tp for lanes in by_node.values() for tp, _ in lanes)
        except TRANSPORT_ERRORS as error:
            self._postpone_all(error)
            return False
        sent = False
        for node, lanes in by_node.items():
            # A batch that was too late to leave has stopped a transaction, and the next one would come behind a gap.
            while not self._is_stopped and self._in_flight(node) < self._config.in_flight_max:
                batches = list(self._pack(lanes))
                if not batches or not self._send(node, batches):
                    break
                sent = True
        return sent

    def _in_flight(self, node: int) -> int:
        return sum(flight.node == node for flight in self._flights)

    def _ready_by_leader(self) -> dict[int, list[tuple[TopicPartition, _Lane]]]:
        now = self._cluster.clock()
        ready = [
            (tp, lane)
            for tp, lane in self._lanes.items()
            if lane.queue.not_before <= now and lane.queue.peek(repeats_only=self._bump_wanted) is not None
        ]
        by_node: dict[int, list[tuple[TopicPartition, _Lane]]] = {}
        for tp, lane in self._with_known_leaders(ready):
            try:
                leader = self._cluster.leader(*tp).node
            except KafkaError as error:  # the topic is gone, or forbidden: its batches fail, not those of others
                self._fail_waiting(lane, error)
                continue
            if leader < 0:
                self._postpone(lane, verdict(ErrorCode.leader_not_available, Api.PRODUCE))
                self._cluster.forget_leaders([tp.topic])
                self._expire(lane)
            else:
                by_node.setdefault(leader, []).append((tp, lane))
        return by_node

    def _with_known_leaders(self, ready: list[tuple[TopicPartition, _Lane]]) -> Iterator[tuple[TopicPartition, _Lane]]:
        """Ask for leaders in one try: a call that must not wait, or only so long, is not held up by a lost broker."""
        unknown = {tp.topic for tp, _ in ready if self._cluster.known_leaders(tp.topic) is None}
        codes = self._cluster.try_refresh_topics(unknown) if unknown else {}
        for tp, lane in ready:
            code = codes.get(tp.topic)
            if code is None:
                lane.unknown_since = None
                yield tp, lane
                continue
            judged = verdict(code, Api.METADATA)
            is_missing = code == ErrorCode.unknown_topic_or_partition and self._is_unknown_for_long(lane)
            if judged.action is Action.RETRIABLE and not is_missing:
                self._postpone(lane, judged)
                self._expire(lane)
            else:
                self._fail_waiting(lane, failure(code, Api.METADATA, f"topic {tp.topic!r}"))

    def _is_unknown_for_long(self, lane: _Lane) -> bool:
        now = self._cluster.clock()
        lane.unknown_since = now if lane.unknown_since is None else lane.unknown_since
        # Before the batches run out of time: a topic that is not there is the better explanation.
        patience_ms = min(UNKNOWN_TOPIC_PATIENCE_MS, self._config.delivery_timeout_ms / 2)
        return (now - lane.unknown_since) * 1000 >= patience_ms

    def _register(self, partitions: Iterable[TopicPartition]) -> None:
        """Protocol 1: the coordinator must know a partition before the first write to it."""
        new = [tp for tp in partitions if tp not in self._registered]
        if new and self._before_first_write is not None and self.protocol == 1:
            self._before_first_write(new)
            self._registered.update(new)

    def _pack(self, lanes: list[tuple[TopicPartition, _Lane]]) -> Iterator[OutgoingBatch]:
        """One batch of each partition, as many as fit into a request."""
        packed_bytes = 0
        for _, lane in lanes:
            head = lane.queue.peek(repeats_only=self._bump_wanted)
            if head is None or (packed_bytes and packed_bytes + len(head.data) > self._config.request_bytes_max):
                continue
            packed_bytes += len(head.data)
            yield lane.queue.take()

    def _send(self, node: int, batches: list[OutgoingBatch]) -> bool:
        """Put one request into flight; False if the broker cannot be reached, or no batch is left to send."""
        try:
            # To open a connection takes time, and so does the sleep of a machine. No batch leaves after its own: by
            # then a leader may have forgotten the producer, and would not recognise a repeat.
            self._cluster.connection(node)
            batches = [batch for batch in batches if not self._fail_if_overdue(batch)]
            if not batches:
                return False
            for batch in batches:
                batch.may_have_left = True
            pending = self._cluster.submit(
                node,
                Api.PRODUCE,
                highest=PROTOCOL_2_VERSIONS[Api.PRODUCE] - 1 if self.protocol == 1 else None,
                transactional_id=self._config.transactional_id,
                acks=self._config.acks,
                timeout=self._cluster.config.request_timeout_ms,
                topic_data=self._stamped(batches),
            )
        except TRANSPORT_ERRORS as error:
            self._cluster.forget_leaders({batch.topic for batch in batches})
            for batch in batches:
                self._again(batch, error, None)
            return False
        except SemelError as error:
            # No repeat cures it: a certificate or a login that this broker refuses, or a broker that is too old.
            for batch in batches:
                self._fail(batch, error)
            return False
        self._flights.append(_Flight(node, pending, batches))
        return True

    def _fail_if_overdue(self, batch: OutgoingBatch) -> bool:
        is_overdue = self._cluster.clock() >= batch.deadline
        if is_overdue:
            self._fail(batch, self._out_of_time(batch, batch.last_error or RequestTimedOut("no broker was reached.")))
        return is_overdue

    def _stamped(self, batches: list[OutgoingBatch]) -> list[dict[str, Any]]:
        """The batches by topic, under the identity and the sequences they go by."""
        topics: dict[str, list[dict[str, Any]]] = {}
        for batch in batches:
            if self._config.idempotent:
                assert batch.sequence is not None
                stamp(
                    batch.data,
                    producer_id=self.identity.producer_id,
                    producer_epoch=self.identity.producer_epoch,
                    base_sequence=batch.sequence,
                    transactional=self._config.transactional_id is not None,
                )
            topics.setdefault(batch.topic, []).append({"index": batch.partition, "records": batch.data})
        return [{"name": topic, "partition_data": data} for topic, data in topics.items()]

    # -- answers ---------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        done = [flight for flight in self._flights if flight.pending.done]
        self._flights = [flight for flight in self._flights if not flight.pending.done]
        for flight in done:
            if flight.pending.error is not None:
                self._cluster.forget_leaders({batch.topic for batch in flight.batches})
                for batch in flight.batches:
                    self._again(batch, flight.pending.error, None)
            elif not flight.pending.answered:
                for batch in flight.batches:
                    self._store(batch, -1)
            else:
                self._read_answers(flight)

    def _read_answers(self, flight: _Flight) -> None:
        answers = {
            (topic.name, partition.index): partition
            for topic in flight.pending.response.responses
            for partition in topic.partition_responses
        }
        for batch in flight.batches:
            answer = answers.get((batch.topic, batch.partition))
            if answer is None:
                lost = RequestTimedOut(f"The broker's answer leaves out {batch.topic}-{batch.partition}.")
                self._again(batch, lost, None)
            else:
                self._read_answer(batch, answer)

    def _read_answer(self, batch: OutgoingBatch, answer: Any) -> None:
        code: ErrorCode = answer.error_code
        if code in (ErrorCode.none, _STORED_BEFORE):
            self._store(batch, answer.base_offset if code == ErrorCode.none else -1)
            return
        judged = verdict(code, Api.PRODUCE)
        where = f"{batch.topic}-{batch.partition}"
        error = failure(code, Api.PRODUCE, where, getattr(answer, "error_message", None))
        lane = self._lane(batch)
        if code in _GAP_CODES and not lane.queue.is_oldest_unsettled(batch):
            # The gap is the batch before this one, which is on its way again.
            self._again(batch, error, None)
        elif judged.action is Action.RETRIABLE:
            if judged.refresh is Refresh.LEADER:
                self._cluster.forget_leaders([batch.topic])
            self._again(batch, error, judged)
        else:
            self._fail(batch, error)

    def _lane(self, batch: OutgoingBatch) -> _Lane:
        return self._lanes[TopicPartition(batch.topic, batch.partition)]

    def _store(self, batch: OutgoingBatch, base_offset: int) -> None:
        lane = self._lane(batch)
        lane.queue.settle(batch, is_stored=True)
        lane.patience = None
        self.buffered_bytes -= len(batch.data)
        self.stored.append(Stored(batch.topic, batch.partition, base_offset, batch.record_count))
        if len(self.stored) >= 2 * _STORED_MAX and self._config.transactional_id is None:
            del self.stored[:-_STORED_MAX]

    def _again(self, batch: OutgoingBatch, error: SemelError, judged: Verdict | None) -> None:
        if self._cluster.clock() >= batch.deadline:
            self._fail(batch, self._out_of_time(batch, error))
            return
        lane = self._lane(batch)
        batch.last_error = error
        lane.queue.give_back(batch)
        self._postpone(lane, judged)

    def _out_of_time(self, batch: OutgoingBatch, error: SemelError) -> SemelError:
        if isinstance(error, KafkaError) and error.code == ErrorCode.unknown_topic_or_partition:
            return error
        return RequestTimedOut(
            f"{batch.record_count} records for {batch.topic}-{batch.partition} were not acknowledged within "
            f"{self._config.delivery_timeout_ms} ms (delivery.timeout.ms); they may or may not be stored. Last: {error}"
        )

    def _postpone(self, lane: _Lane, judged: Verdict | None) -> None:
        lane.patience = lane.patience or self._cluster.patience(self._config.delivery_timeout_ms)
        lane.queue.not_before = self._cluster.clock() + lane.patience.next_pause_ms(judged) / 1000

    def _postpone_all(self, error: SemelError) -> None:
        """Metadata or the coordinator cannot be reached: nothing leaves for a moment, and what is overdue fails."""
        for lane in self._lanes.values():
            if not lane.queue.is_empty:
                self._postpone(lane, None)
                self._expire(lane, error)

    def _expire(self, lane: _Lane, error: SemelError | None = None) -> None:
        head = lane.queue.peek()
        if head is not None and self._cluster.clock() >= head.deadline:
            batch = lane.queue.take()
            error = error or batch.last_error or RequestTimedOut("the partition has no leader.")
            self._fail(batch, self._out_of_time(batch, error))

    def _fail_waiting(self, lane: _Lane, error: SemelError) -> None:
        while lane.queue.peek() is not None:
            self._fail(lane.queue.take(), error)

    def _fail(self, batch: OutgoingBatch, error: SemelError) -> None:
        """For good. A transaction is doomed by it; an idempotent producer goes on under a new epoch (KIP-360)."""
        lane = self._lane(batch)
        lane.queue.settle(batch, is_stored=False)
        self._give_up([batch])
        self.failure = self.failure or error
        if self._next_identity is not None:
            lane.is_broken = True
            self._bump_wanted = True

    def _give_up(self, batches: Iterable[OutgoingBatch]) -> None:
        for batch in batches:
            self.buffered_bytes -= len(batch.data)
            self.failed_records += batch.record_count
            if self._config.transactional_id is None:
                self._undelivered_bytes += len(batch.data)
                is_kept = self._undelivered_bytes <= _UNDELIVERED_BYTES_MAX
                data = bytes(batch.data) if is_kept else None
                self.undelivered.append(Undelivered(batch.topic, batch.partition, batch.record_count, data))

    def _bump_when_settled(self) -> None:
        """Raise the epoch once no batch is left whose fate is open: under a new epoch it could be stored twice."""
        for lane in self._lanes.values():
            if lane.is_broken and not lane.queue.has_in_flight:
                self._give_up(lane.queue.fail_unsettled())
        if any(lane.queue.has_unsettled for lane in self._lanes.values()):
            return
        assert self._next_identity is not None, "only a sender that may bump wants a bump"
        self.identity = self._next_identity(self.identity)
        for lane in self._lanes.values():
            lane.queue.restart_sequences()
            lane.is_broken = False
        self._bump_wanted = False
