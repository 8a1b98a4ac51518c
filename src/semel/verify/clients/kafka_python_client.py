"""kafka-python for the workloads."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa

from semel.errors import BrokerUnreachable, Fenced, InvalidState, RequestTimedOut, SemelError, TransactionAborted
from semel.verify.clients.face import (
    NOTHING,
    Acks,
    Clients,
    Delivered,
    Incoming,
    Integers,
    Outcome,
    Outgoing,
    Surroundings,
    underscored,
)
from semel.verify.history import Isolation, Phase

with warnings.catch_warnings():  # its import uses a call that Python 3.11 deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    import kafka
    import kafka.errors
    from kafka.coordinator.assignors.range import RangePartitionAssignor
    from kafka.structs import OffsetAndMetadata, TopicPartition

T = TypeVar("T")

_FENCED: Final = (kafka.errors.ProducerFencedError, kafka.errors.InvalidProducerEpochError)
_GROUP_POLL_MS: Final = 2_000
"""This client loses its assignment when the time of a poll runs out between the answer to its SyncGroup and the next
step: long enough for a rebalance to fit in."""
_CLOSE_S: Final = 5.0
_NIMBLE: Final = {
    "retry_backoff_ms": 20,
    "reconnect_backoff_ms": 20,
    "reconnect_backoff_max_ms": 200,
    "metrics_enabled": False,
}


def open_clients(surroundings: Surroundings) -> Clients:
    return Clients(surroundings, _TransactionalWriter, _PlainWriter, _Reader, _GroupConsumer)


def _settings(surroundings: Surroundings, **more: Any) -> dict[str, Any]:
    return {
        "bootstrap_servers": surroundings.bootstrap,
        "client_id": surroundings.client_id,
        "bootstrap_timeout_ms": int(surroundings.patience_s * 1000),
        **_NIMBLE,
        **more,
        **underscored(surroundings.settings, "kafka-python"),
    }


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except _FENCED as failure:
        raise Fenced(f"Another producer has taken over the transactional id: {failure!r}.") from failure
    except kafka.errors.KafkaError as failure:
        kind = BrokerUnreachable if getattr(failure, "retriable", False) else TransactionAborted
        raise kind(f"kafka-python has failed: {failure!r}.") from failure


def _within(seconds: float, call: Callable[[], T]) -> T:
    """For calls that may wait without end: after this time the thread in which it runs is left to itself."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as failure:
            done.set_exception(failure)

    threading.Thread(target=run, name="kafka-python call", daemon=True).start()
    if not wait([done], seconds).done:
        raise RequestTimedOut(f"No answer within {seconds:g} s: the broker is away.")
    return done.result()


class _Producing:
    """What both writers have in common."""

    def __init__(self, surroundings: Surroundings, settings: Mapping[str, Any]) -> None:
        self._surroundings = surroundings
        self._settings = _settings(surroundings, linger_ms=2, max_block_ms=5_000, **settings)
        self._producer: Any = None
        self._futures: list[Any] = []

    def _produce(self, records: Outgoing) -> None:
        producer, places = self._running, self._surroundings.partitions
        for number, payload, key in zip(
            records.partition.tolist(), records.payloads.to_pylist(), records.keys.to_pylist(), strict=True
        ):
            topic, index = places[number]
            self._futures.append(producer.send(topic, value=payload, key=key, partition=index))

    @property
    def _running(self) -> Any:
        if self._producer is None:
            raise InvalidState("There is no transaction: begin one first.")
        return self._producer

    def _forget(self) -> None:
        """Off the stage: a new producer of the same id settles whatever this one leaves."""
        producer, self._producer = self._producer, None
        if producer is not None:
            threading.Thread(target=_close_at_once, args=(producer,), daemon=True).start()

    def close(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            with suppress(RequestTimedOut, kafka.errors.KafkaError):  # what is left of it ends with the process
                _within(2 * _CLOSE_S, lambda: producer.close(timeout=_CLOSE_S))


def _close_at_once(producer: Any) -> None:
    with suppress(kafka.errors.KafkaError):  # what it could not flush is what its owner has given up
        producer.close(timeout=0)


class _TransactionalWriter(_Producing):
    def __init__(self, surroundings: Surroundings, transactional_id: str) -> None:
        super().__init__(
            surroundings,
            {"transactional_id": transactional_id, "transaction_timeout_ms": surroundings.transaction_timeout_ms},
        )
        self._fenced: Fenced | None = None

    def connect(self) -> None:
        if self._fenced is not None:
            raise self._fenced
        if self._producer is None:
            with _translated():
                producer = kafka.KafkaProducer(**self._settings)
                try:
                    self._initialize(producer)
                except BaseException:
                    _close_at_once(producer)
                    raise
            self._producer = producer

    def begin(self) -> None:
        self._futures = []
        self.connect()
        try:
            with _translated():
                self._running.begin_transaction()
        except SemelError as error:
            self._give_up(error)
            raise

    def _initialize(self, producer: Any) -> None:
        def attempt() -> bool:
            try:
                producer.init_transactions()
                return True
            except kafka.errors.KafkaTimeoutError:  # of its max_block_ms; it goes on where it was
                return False

        self._surroundings.keep_trying(attempt, "Taking over the transactional id")

    def send(self, records: Outgoing) -> None:
        with _translated():
            self._produce(records)

    def send_positions(self, positions: Mapping[int, int], group: str, member: object) -> None:
        places = self._surroundings.partitions
        offsets = {
            TopicPartition(*places[number]): OffsetAndMetadata(offset, "", -1) for number, offset in positions.items()
        }
        who: Any = group if member is None else member
        with _translated():
            _within(self._surroundings.patience_s, lambda: self._running.send_offsets_to_transaction(offsets, who))

    def flush(self) -> Integers:
        with _translated():
            self._running.flush(timeout=self._surroundings.patience_s)
            return np.array([future.get(timeout=0).offset for future in self._futures], np.int64)

    def commit(self) -> Outcome:
        try:
            with _translated():
                _within(self._surroundings.patience_s, self._running.commit_transaction)
            return Outcome.COMMITTED
        except SemelError as error:
            # It does not tell whether the commit had left when it failed; and a commit that was refused because of a
            # newer producer may have been carried out at an earlier try.
            self._give_up(error)
            return Outcome.UNKNOWN

    def abort(self) -> None:
        try:
            with _translated():
                _within(self._surroundings.patience_s, self._running.abort_transaction)
        except SemelError as error:
            self._give_up(error)
            raise

    def _give_up(self, error: SemelError) -> None:
        """A new producer of the same id settles what this one could not, unless this one was fenced."""
        self._forget()
        self._fenced = error if isinstance(error, Fenced) else None


class _PlainWriter(_Producing):
    def __init__(self, surroundings: Surroundings, idempotent: bool, acks: Acks) -> None:
        settings = {
            "enable_idempotence": idempotent,
            "acks": acks if acks == "all" else int(acks),
            "delivery_timeout_ms": int(surroundings.patience_s * 1000),
            "request_timeout_ms": int(surroundings.patience_s * 1000) - 1_000,
        }
        if acks == "0":  # a record then arrives at most once
            settings["retries"] = 0
        super().__init__(surroundings, settings)

    def write(self, records: Outgoing) -> Delivered:
        self._futures = []
        try:
            if self._producer is None:
                self._producer = kafka.KafkaProducer(**self._settings)
        except kafka.errors.KafkaError:
            return Delivered.all_alike(len(records), Phase.FAIL)
        try:
            self._produce(records)
            self._producer.flush(timeout=self._surroundings.patience_s + 5)
        except kafka.errors.KafkaError:
            self._forget()
        delivered = Delivered.all_alike(len(records), Phase.UNKNOWN)
        for row, future in enumerate(self._futures):
            if future.succeeded():
                delivered.phase[row] = Phase.OK
                if self._settings["acks"] != 0:  # then it counts from -1 on
                    delivered.offset[row] = future.value.offset
        delivered.phase[len(self._futures) :] = Phase.FAIL  # these were never handed over
        return delivered


class _Consuming:
    def __init__(self, surroundings: Surroundings, **settings: Any) -> None:
        self._surroundings = surroundings
        self._numbers = surroundings.number_of()
        with _translated():
            self._consumer: Any = kafka.KafkaConsumer(
                **_settings(surroundings, enable_auto_commit=False, fetch_max_wait_ms=50, **settings)
            )

    def _incoming(self, found: Mapping[Any, list[Any]], restarted: frozenset[int]) -> Incoming:
        if not found:
            return NOTHING
        records = [record for batch in found.values() for record in batch]
        return Incoming(
            np.array([self._numbers[record.topic, record.partition] for record in records], np.int16),
            np.array([record.offset for record in records], np.int64),
            pa.array([record.value for record in records], pa.binary()),
            restarted,
        )

    def close(self) -> None:
        with suppress(kafka.errors.KafkaError):  # its session ends by itself if the broker cannot be told
            self._consumer.close(timeout_ms=int(_CLOSE_S * 1000))


class _Reader(_Consuming):
    def __init__(self, surroundings: Surroundings, positions: Mapping[int, int], isolation: Isolation) -> None:
        super().__init__(surroundings, isolation_level=isolation, auto_offset_reset="none", group_id=None)
        self._consumer.assign([TopicPartition(*surroundings.partitions[number]) for number in positions])
        self.seek(positions)

    def poll(self, timeout_ms: int, records_max: int) -> Incoming:
        with _translated():
            return self._incoming(self._consumer.poll(timeout_ms, max_records=records_max), frozenset())

    def seek(self, positions: Mapping[int, int]) -> None:
        with _translated():
            for number, position in positions.items():
                self._consumer.seek(TopicPartition(*self._surroundings.partitions[number]), position)


class _Listener(kafka.ConsumerRebalanceListener):
    def __init__(self) -> None:
        self.changes = 0
        self.assigned: set[Any] = set()

    def on_partitions_assigned(self, assigned: Any) -> None:
        self.changes += 1
        self.assigned |= set(assigned)

    def on_partitions_revoked(self, revoked: Any) -> None:
        self.changes += 1


class _GroupConsumer(_Consuming):
    def __init__(self, surroundings: Surroundings, group: str, topic: str) -> None:
        super().__init__(
            surroundings,
            group_id=group,
            isolation_level="read_committed",
            auto_offset_reset="earliest",
            session_timeout_ms=surroundings.session_timeout_ms,
            heartbeat_interval_ms=500,
            partition_assignment_strategy=(RangePartitionAssignor,),
        )
        self._listener = _Listener()
        self._last: set[Any] = set()
        self._to_rewind: set[Any] = set()
        self._member: Any = None
        self._consumer.subscribe([topic], listener=self._listener)

    def poll(self, timeout_ms: int, records_max: int) -> Incoming:
        with _translated():
            self._go_back()
            changes = self._listener.changes
            found = self._consumer.poll(max(timeout_ms, _GROUP_POLL_MS), max_records=records_max)
            # The client rebalances on a thread of its own: this generation is the one that these records belong to.
            self._member = self._consumer.group_metadata()
        self._last = set(found)
        if changes != self._listener.changes:  # they may be from before
            self._to_rewind = set(found)
            return NOTHING
        new = self._listener.assigned & self._last
        self._listener.assigned -= new
        return self._incoming(found, frozenset(self._numbers[where.topic, where.partition] for where in new))

    def rewind(self) -> None:
        self._to_rewind |= self._last
        with _translated():
            self._go_back()

    def _go_back(self) -> None:
        """Nothing of these partitions is handed out before it has succeeded."""
        for where in sorted(self._to_rewind):
            committed = self._consumer.committed(where, timeout_ms=int(self._surroundings.patience_s * 1000))
            if where in self._consumer.assignment():
                self._consumer.seek(where, committed or 0)
            self._to_rewind.discard(where)

    def commit(self, positions: Mapping[int, int]) -> None:
        places = self._surroundings.partitions
        offsets = {TopicPartition(*places[number]): OffsetAndMetadata(at, "", -1) for number, at in positions.items()}
        with _translated():
            self._consumer.commit(offsets, timeout_ms=int(self._surroundings.patience_s * 1000))

    @property
    def member(self) -> object:
        return self._member
