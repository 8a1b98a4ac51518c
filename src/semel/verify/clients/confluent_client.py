"""confluent-kafka (librdkafka) for the workloads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import confluent_kafka
import numpy as np
import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from semel.errors import BrokerUnreachable, Fenced, InvalidState, RequestTimedOut, SemelError, TransactionAborted
from semel.verify.clients.face import (
    NOTHING,
    RETRY_S,
    Acks,
    Clients,
    Delivered,
    Incoming,
    Integers,
    Outcome,
    Outgoing,
    Surroundings,
)
from semel.verify.history import Isolation, Phase

_NIMBLE: Final = {
    "reconnect.backoff.ms": 20,
    "reconnect.backoff.max.ms": 200,
    "retry.backoff.ms": 20,
    "retry.backoff.max.ms": 200,
    "topic.metadata.refresh.interval.ms": 5_000,
    "socket.connection.setup.timeout.ms": 2_000,
    # With the default, librdkafka 2.16 forgets the only broker there is when it is down, makes another object for it,
    # and may leave a TxnOffsetCommit for ever in the queue of the old one.
    "metadata.recovery.strategy": "none",
    "log_level": 0,
}
_NO_RETRIES: Final = {"retries": 0}
"""With acks=0, whose meaning is that a record arrives at most once."""
_CALL_S: Final = 5.0
"""Of one try, between which is looked whether the process is to stop."""
_FENCED_CODES: Final = (KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED)


def open_clients(surroundings: Surroundings) -> Clients:
    return Clients(surroundings, _TransactionalWriter, _PlainWriter, _Reader, _GroupConsumer)


def _settings(surroundings: Surroundings, **more: Any) -> dict[str, Any]:
    return {
        "bootstrap.servers": surroundings.bootstrap,
        "client.id": surroundings.client_id,
        **_NIMBLE,
        **{name.replace("_", "."): value for name, value in more.items()},
        **surroundings.settings,
    }


def _error(failure: KafkaException) -> KafkaError:
    return failure.args[0]


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except KafkaException as failure:
        raise _translate(_error(failure)) from failure


def _translate(error: KafkaError) -> SemelError:
    if error.code() in _FENCED_CODES:
        return Fenced(f"Another producer has taken over the transactional id: {error.str()}.")
    if error.txn_requires_abort() or error.fatal():
        return TransactionAborted(f"The transaction cannot be committed: {error.str()}.")
    return BrokerUnreachable(f"confluent-kafka has failed: {error.str()}.")


class _Deliveries:
    """Collects what librdkafka reports of each record, in the order of sending."""

    def __init__(self) -> None:
        self.offsets: list[int] = []
        self.errors: dict[int, KafkaError] = {}
        self.open = 0

    def next_report(self) -> Callable[[KafkaError | None, Message], None]:
        row = len(self.offsets)
        self.offsets.append(-1)
        self.open += 1

        def delivered(error: KafkaError | None, message: Message) -> None:
            self.open -= 1
            if error is None:
                offset = message.offset()
                self.offsets[row] = -1 if offset is None or offset < 0 else offset
            else:
                self.errors[row] = error

        return delivered


class _Producing:
    """What both writers have in common. Its `poll` and `flush` raise what is fatal."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings
        self._producer: confluent_kafka.Producer | None = None
        self._deliveries = _Deliveries()

    def _produce(self, records: Outgoing) -> None:
        producer, places, deliveries = self._running, self._surroundings.partitions, self._deliveries
        for number, payload, key in zip(
            records.partition.tolist(), records.payloads.to_pylist(), records.keys.to_pylist(), strict=True
        ):
            topic, index = places[number]
            report = deliveries.next_report()
            while True:
                try:
                    producer.produce(topic, payload, key, index, on_delivery=report)
                    break
                except BufferError:  # its queue is full: let some of it go
                    producer.poll(RETRY_S)
                except KafkaException as failure:
                    deliveries.errors[len(deliveries.offsets) - 1] = _error(failure)
                    deliveries.open -= 1
                    break
        producer.poll(0)

    def _wait_delivered(self) -> None:
        deadline = time.monotonic() + self._surroundings.patience_s
        while self._flush(_CALL_S if not self._surroundings.is_stopping() else 1.0):
            if time.monotonic() > deadline:
                raise RequestTimedOut("The records were not acknowledged in time: the broker is away.")

    def _flush(self, timeout_s: float) -> int:
        """How many records are not settled yet."""
        try:
            return self._running.flush(timeout_s)
        except SystemError:
            # It met a fatal error and has lost it on the way. What became of the records says which it was.
            time.sleep(RETRY_S)
            return len(self._running)

    @property
    def _running(self) -> confluent_kafka.Producer:
        if self._producer is None:
            raise InvalidState("There is no transaction: begin one first.")
        return self._producer


class _TransactionalWriter(_Producing):
    def __init__(self, surroundings: Surroundings, transactional_id: str) -> None:
        super().__init__(surroundings)
        self._settings = _settings(
            surroundings,
            transactional_id=transactional_id,
            transaction_timeout_ms=surroundings.transaction_timeout_ms,
            linger_ms=2,
        )
        self._outsiders: dict[str, object] = {}
        self._fenced: Fenced | None = None

    def connect(self) -> None:
        if self._fenced is not None:
            raise self._fenced
        if self._producer is None:
            producer = confluent_kafka.Producer(self._settings)
            with _translated():
                self._until_done(lambda: producer.init_transactions(_CALL_S))
            self._producer = producer

    def begin(self) -> None:
        self._deliveries = _Deliveries()
        self.connect()
        try:
            with _translated():
                self._running.begin_transaction()
        except SemelError as error:
            self._give_up(error)
            raise

    def send(self, records: Outgoing) -> None:
        with _translated():
            self._produce(records)

    def send_positions(self, positions: Mapping[int, int], group: str, member: object) -> None:
        offsets = [TopicPartition(*self._surroundings.partitions[number], at) for number, at in positions.items()]
        metadata = self._outsider(group) if member is None else member
        with _translated():
            self._until_done(lambda: self._running.send_offsets_to_transaction(offsets, metadata, _CALL_S))

    def _outsider(self, group: str) -> object:
        """Someone who is no member of the group; only a consumer can make the object that says so."""
        if group not in self._outsiders:
            consumer = confluent_kafka.Consumer(_settings(self._surroundings, group_id=group))
            self._outsiders[group] = consumer.consumer_group_metadata()
            consumer.close()
        return self._outsiders[group]

    def flush(self) -> Integers:
        with _translated():
            self._wait_delivered()
        for error in self._deliveries.errors.values():
            raise _translate(error)
        return np.array(self._deliveries.offsets, np.int64)

    def commit(self) -> Outcome:
        try:
            self._until_done(lambda: self._running.commit_transaction(_CALL_S))
            return Outcome.COMMITTED
        except KafkaException as failure:
            if _error(failure).txn_requires_abort():
                return self._abort_instead()
            # Also if fenced: the coordinator may have carried out an earlier try, whose answer was lost.
            self._give_up(_translate(_error(failure)))
        except RequestTimedOut as failure:
            self._give_up(failure)
        return Outcome.UNKNOWN

    def _abort_instead(self) -> Outcome:
        """An abort that the coordinator accepts means that there was no commit."""
        try:
            self.abort()
            return Outcome.ABORTED
        except SemelError:
            return Outcome.UNKNOWN

    def abort(self) -> None:
        try:
            with _translated():
                self._until_done(lambda: self._running.abort_transaction(_CALL_S))
        except SemelError as error:
            self._give_up(error)
            raise

    def _give_up(self, error: SemelError) -> None:
        """A new producer of the same id settles what this one could not, unless this one was fenced."""
        self._producer = None
        self._fenced = error if isinstance(error, Fenced) else None

    def _until_done(self, call: Callable[[], None]) -> None:
        """Calls again what the client says may be called again."""

        def attempt() -> bool:
            try:
                call()
                return True
            except KafkaException as failure:
                if not _error(failure).retriable():
                    raise
                return False

        self._surroundings.keep_trying(attempt, "A step of the transaction")

    def close(self) -> None:
        self._producer = None


class _PlainWriter(_Producing):
    def __init__(self, surroundings: Surroundings, idempotent: bool, acks: Acks) -> None:
        super().__init__(surroundings)
        self._settings = _settings(
            surroundings,
            enable_idempotence=idempotent,
            acks=acks,
            **_NO_RETRIES if acks == "0" else {},
            linger_ms=2,
            message_timeout_ms=int(surroundings.patience_s * 1000),
        )

    def write(self, records: Outgoing) -> Delivered:
        if self._producer is None:
            self._producer = confluent_kafka.Producer(self._settings)
        self._deliveries = deliveries = _Deliveries()
        try:
            with _translated():
                self._produce(records)
                self._wait_delivered()
        except SemelError:
            self._producer = None
            return Delivered.all_alike(len(records), Phase.UNKNOWN)
        delivered = Delivered.all_alike(len(records), Phase.OK)
        delivered.offset[:] = deliveries.offsets
        for row in deliveries.errors:
            delivered.phase[row] = Phase.UNKNOWN
        if any(error.fatal() for error in deliveries.errors.values()):
            self._producer = None
        return delivered

    def close(self) -> None:
        self._producer = None


def _consumer_settings(surroundings: Surroundings, group: str, isolation: Isolation) -> dict[str, Any]:
    return _settings(
        surroundings,
        group_id=group,
        isolation_level=isolation,
        enable_auto_commit=False,
        fetch_wait_max_ms=50,
        fetch_error_backoff_ms=50,
        queued_max_messages_kbytes=16_384,
    )


class _Consuming:
    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings
        self._numbers = surroundings.number_of()

    def _incoming(self, messages: Sequence[Message], restarted: frozenset[int]) -> Incoming:
        if not messages:
            return NOTHING
        return Incoming(
            np.array([self._number(message) for message in messages], np.int16),
            np.array([message.offset() for message in messages], np.int64),
            pa.array([message.value() for message in messages], pa.binary()),
            restarted,
        )

    def _number(self, where: Message | TopicPartition) -> int:
        if isinstance(where, TopicPartition):
            return self._numbers[where.topic, where.partition]
        return self._numbers[str(where.topic()), int(where.partition() or 0)]


def _sound(messages: Sequence[Message]) -> list[Message]:
    """Without the events; one that no retry cures is raised."""
    records: list[Message] = []
    for message in messages:
        error = message.error()
        if error is None:
            records.append(message)
        elif error.fatal() or error.code() == KafkaError._AUTO_OFFSET_RESET:
            raise _translate(error)
    return records


class _Reader(_Consuming):
    def __init__(self, surroundings: Surroundings, positions: Mapping[int, int], isolation: Isolation) -> None:
        super().__init__(surroundings)
        settings = _consumer_settings(surroundings, f"{surroundings.client_id}-reader", isolation)
        settings.pop("group.protocol", None)
        self._consumer = confluent_kafka.Consumer({**settings, "auto.offset.reset": "error"})
        self._positions = dict(positions)
        self._assign()

    def _assign(self) -> None:
        places = self._surroundings.partitions
        self._consumer.assign([TopicPartition(*places[number], at) for number, at in self._positions.items()])

    def poll(self, timeout_ms: int, records_max: int) -> Incoming:
        with _translated():
            return self._incoming(_sound(self._consumer.consume(records_max, timeout_ms / 1000)), frozenset())

    def seek(self, positions: Mapping[int, int]) -> None:
        # All of them are sought at once by those who seek; an assignment drops what was fetched ahead.
        self._positions.update(positions)
        with _translated():
            self._assign()

    def close(self) -> None:
        self._consumer.close()


class _GroupConsumer(_Consuming):
    def __init__(self, surroundings: Surroundings, group: str, topic: str) -> None:
        super().__init__(surroundings)
        settings = _consumer_settings(surroundings, group, "read_committed")
        settings["auto.offset.reset"] = "earliest"
        if settings.get("group.protocol") != "consumer":  # there the session is the broker's
            settings |= {"session.timeout.ms": surroundings.session_timeout_ms, "heartbeat.interval.ms": 500}
        self._consumer = confluent_kafka.Consumer(settings)
        self._assigned: set[int] = set()
        self._taken: set[int] = set()
        self._last: set[int] = set()
        self._to_rewind: set[int] = set()
        self._consumer.subscribe([topic], on_assign=self._on_assign, on_revoke=self._on_taken, on_lost=self._on_taken)

    def _on_assign(self, consumer: confluent_kafka.Consumer, partitions: list[TopicPartition]) -> None:
        self._assigned |= {self._number(one) for one in partitions}

    def _on_taken(self, consumer: confluent_kafka.Consumer, partitions: list[TopicPartition]) -> None:
        self._taken |= {self._number(one) for one in partitions}

    def poll(self, timeout_ms: int, records_max: int) -> Incoming:
        self._go_back()
        self._taken.clear()
        with _translated():
            messages = _sound(self._consumer.consume(records_max, timeout_ms / 1000))
        # Of a partition that went (and perhaps came again) during the call, nobody can tell which of its records are
        # from before: all of them are read again.
        self._to_rewind = self._taken & {self._number(message) for message in messages}
        messages = [message for message in messages if self._number(message) not in self._taken]
        self._last = {self._number(message) for message in messages}
        restarted = frozenset(self._assigned & self._last)
        self._assigned -= restarted
        return self._incoming(messages, restarted)

    def rewind(self) -> None:
        self._to_rewind |= self._last
        self._go_back()

    def _go_back(self) -> None:
        """Nothing of these partitions is handed out before it has succeeded."""
        ours = {self._number(one) for one in self._consumer.assignment()}
        asked = [TopicPartition(*self._surroundings.partitions[number]) for number in sorted(self._to_rewind & ours)]
        with _translated():
            for answer in self._committed(asked) if asked else ():
                self._consumer.seek(TopicPartition(answer.topic, answer.partition, max(0, answer.offset)))
        self._to_rewind.clear()

    def _committed(self, asked: list[TopicPartition]) -> list[TopicPartition]:
        answers: list[TopicPartition] = []

        def ask() -> bool:
            try:
                answers[:] = self._consumer.committed(asked, _CALL_S)
            except KafkaException as failure:
                if not (_error(failure).retriable() or _error(failure).code() == KafkaError._TIMED_OUT):
                    raise
                return False
            return all(answer.error is None for answer in answers)

        self._surroundings.keep_trying(ask, "Asking for the group's positions")
        return answers

    def commit(self, positions: Mapping[int, int]) -> None:
        offsets = [TopicPartition(*self._surroundings.partitions[number], at) for number, at in positions.items()]
        with _translated():
            answers = self._consumer.commit(offsets=offsets, asynchronous=False) or []
        for answer in answers:
            if answer.error is not None:
                raise _translate(answer.error)

    @property
    def member(self) -> object:
        return self._consumer.consumer_group_metadata()

    def close(self) -> None:
        self._consumer.close()
