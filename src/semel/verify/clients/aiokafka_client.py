"""aiokafka for the workloads. It lives in an event loop of its own, in a thread; callers wait for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import TimeoutError as FutureTimedOut
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, TypeVar

import aiokafka
import numpy as np
import pyarrow as pa
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.errors import IllegalStateError, InvalidProducerEpoch, KafkaError, ProducerFenced
from aiokafka.helpers import create_ssl_context

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

T = TypeVar("T")
_RebalanceListener: Any = aiokafka.ConsumerRebalanceListener  # its callbacks may be coroutines, which its types deny
_FENCED: Final = (ProducerFenced, InvalidProducerEpoch)
_CLOSE_S: Final = 5.0
_MARGIN_S: Final = 5.0


class Loop:
    """The event loop, in a thread that ends with the process."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._live, name="aiokafka", daemon=True)
        self._thread.start()

    def _live(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(_cancel_all())
        finally:
            self._loop.close()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Wait for it; `RequestTimedOut` if it takes too long, and then it is cancelled."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(self._patience_s if timeout_s is None else timeout_s)
        except FutureTimedOut:
            future.cancel()
            raise RequestTimedOut("aiokafka has not done it in time: the broker is away.") from None

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)


async def _cancel_all() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def open_clients(surroundings: Surroundings) -> Clients:
    loop = Loop(surroundings.patience_s)
    return Clients(
        surroundings,
        partial(_TransactionalWriter, loop),
        partial(_PlainWriter, loop),
        partial(_Reader, loop),
        partial(_GroupConsumer, loop),
        loop.close,
    )


def _settings(surroundings: Surroundings, **more: Any) -> dict[str, Any]:
    given = underscored(surroundings.settings, "aiokafka")
    files = {name: given.pop(f"ssl_{name}", None) for name in ("cafile", "certfile", "keyfile", "password")}
    if str(given.get("security_protocol", "")).endswith("SSL"):
        given["ssl_context"] = create_ssl_context(**files)
    common = {"bootstrap_servers": surroundings.bootstrap, "client_id": surroundings.client_id, "retry_backoff_ms": 20}
    return {**common, **more, **given}


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except _FENCED as failure:
        raise Fenced(f"Another producer has taken over the transactional id: {failure!r}.") from failure
    except KafkaError as failure:
        kind = BrokerUnreachable if failure.retriable else TransactionAborted
        raise kind(f"aiokafka has failed: {failure!r}.") from failure
    except AssertionError as failure:  # its transaction manager asserts what state it is in
        raise TransactionAborted(f"aiokafka has failed: {failure}.") from failure


class _Producing:
    """What both writers have in common."""

    def __init__(self, loop: Loop, surroundings: Surroundings, settings: Mapping[str, Any]) -> None:
        self._surroundings = surroundings
        self._loop = loop
        self._settings = _settings(surroundings, linger_ms=2, **settings)
        self._producer: AIOKafkaProducer | None = None
        self._futures: list[asyncio.Future[Any]] = []

    async def _started(self) -> AIOKafkaProducer:
        producer = AIOKafkaProducer(**self._settings)
        try:
            await producer.start()
        except BaseException:
            await _stopped(producer)
            raise
        return producer

    async def _produce(self, records: Outgoing) -> None:
        producer, places = self._running, self._surroundings.partitions
        for number, payload, key in zip(
            records.partition.tolist(), records.payloads.to_pylist(), records.keys.to_pylist(), strict=True
        ):
            topic, index = places[number]
            self._futures.append(await producer.send(topic, value=payload, key=key, partition=index))

    @property
    def _running(self) -> AIOKafkaProducer:
        if self._producer is None:
            raise InvalidState("There is no transaction: begin one first.")
        return self._producer

    def _forget(self) -> None:
        """A new producer of the same id settles whatever this one leaves."""
        producer, self._producer = self._producer, None
        if producer is not None:
            with suppress(RequestTimedOut):
                self._loop.run(_stopped(producer), _CLOSE_S + 1)

    def close(self) -> None:
        self._forget()


async def _stopped(producer: AIOKafkaProducer) -> None:
    """Without the flush that `stop` would wait for, as long as the broker is away."""
    stopping = asyncio.ensure_future(producer.stop())
    await asyncio.wait([stopping], timeout=_CLOSE_S)
    if stopping.done():
        stopping.exception()  # it has been given up, whatever it still has to say
        return
    stopping.cancel()
    await producer.client.close()


class _TransactionalWriter(_Producing):
    def __init__(self, loop: Loop, surroundings: Surroundings, transactional_id: str) -> None:
        super().__init__(
            loop,
            surroundings,
            {"transactional_id": transactional_id, "transaction_timeout_ms": surroundings.transaction_timeout_ms},
        )
        self._fenced: Fenced | None = None

    def connect(self) -> None:
        if self._fenced is not None:
            raise self._fenced
        if self._producer is None:
            with _translated():
                self._producer = self._loop.run(self._started())

    def begin(self) -> None:
        self._futures = []
        self.connect()
        try:
            with _translated():
                self._loop.run(self._running.begin_transaction())
        except SemelError as error:
            self._give_up(error)
            raise

    def send(self, records: Outgoing) -> None:
        with _translated():
            self._loop.run(self._produce(records))

    def send_positions(self, positions: Mapping[int, int], group: str, member: object) -> None:
        places = self._surroundings.partitions
        offsets = {TopicPartition(*places[number]): offset for number, offset in positions.items()}
        with _translated():
            self._loop.run(self._running.send_offsets_to_transaction(offsets, group))

    def flush(self) -> Integers:
        with _translated():
            stored = self._loop.run(_all_stored(self._futures))
        return np.array([-1 if one.offset is None else one.offset for one in stored], np.int64)

    def commit(self) -> Outcome:
        try:
            with _translated():
                self._loop.run(self._running.commit_transaction())
            return Outcome.COMMITTED
        except SemelError as error:
            # Fenced or not: the coordinator may have carried out a try whose answer was lost.
            self._give_up(error)
            return Outcome.UNKNOWN

    def abort(self) -> None:
        try:
            with _translated():
                self._loop.run(self._running.abort_transaction())
        except SemelError as error:
            self._give_up(error)
            raise

    def _give_up(self, error: SemelError) -> None:
        """A new producer of the same id settles what this one could not, unless this one was fenced."""
        self._forget()
        self._fenced = error if isinstance(error, Fenced) else None


async def _all_stored(futures: list[asyncio.Future[Any]]) -> list[Any]:
    return [await future for future in futures]


class _PlainWriter(_Producing):
    def __init__(self, loop: Loop, surroundings: Surroundings, idempotent: bool, acks: Acks) -> None:
        settings = {
            "enable_idempotence": idempotent,
            "acks": acks if acks == "all" else int(acks),
            "request_timeout_ms": int((surroundings.patience_s - _MARGIN_S) * 1000),
        }
        super().__init__(loop, surroundings, settings)

    def write(self, records: Outgoing) -> Delivered:
        self._futures = []
        try:
            if self._producer is None:
                self._producer = self._loop.run(self._started())
        except (KafkaError, RequestTimedOut):
            return Delivered.all_alike(len(records), Phase.FAIL)
        try:
            self._loop.run(self._write(records))
        except (KafkaError, RequestTimedOut):
            self._forget()
        delivered = Delivered.all_alike(len(records), Phase.UNKNOWN)
        for row, future in enumerate(self._futures):
            if future.done() and not future.cancelled() and future.exception() is None:
                told = future.result()
                delivered.phase[row] = Phase.OK
                delivered.offset[row] = -1 if told is None or told.offset is None else told.offset
        return delivered

    async def _write(self, records: Outgoing) -> None:
        await self._produce(records)
        await asyncio.wait(self._futures)


class _Consuming:
    def __init__(self, loop: Loop, surroundings: Surroundings, **settings: Any) -> None:
        self._surroundings = surroundings
        self._loop = loop
        self._numbers = surroundings.number_of()
        self._settings = _settings(surroundings, enable_auto_commit=False, fetch_max_wait_ms=50, **settings)
        self._consumer: AIOKafkaConsumer | None = None

    async def _connect(self, consumer: AIOKafkaConsumer) -> None:
        try:
            await consumer.start()
        except BaseException:
            await consumer.stop()
            raise

    def _incoming(self, found: Mapping[Any, list[Any]], restarted: frozenset[int]) -> Incoming:
        records = [record for batch in found.values() for record in batch]
        if not records:
            return NOTHING
        return Incoming(
            np.array([self._numbers[record.topic, record.partition] for record in records], np.int16),
            np.array([record.offset for record in records], np.int64),
            pa.array([record.value for record in records], pa.binary()),
            restarted,
        )

    def close(self) -> None:
        if self._consumer is not None:
            with suppress(RequestTimedOut, KafkaError):  # its session ends by itself if the broker cannot be told
                self._loop.run(self._consumer.stop(), _CLOSE_S)


class _Reader(_Consuming):
    def __init__(
        self, loop: Loop, surroundings: Surroundings, positions: Mapping[int, int], isolation: Isolation
    ) -> None:
        super().__init__(loop, surroundings, isolation_level=isolation, auto_offset_reset="none")
        self._positions = dict(positions)

    def poll(self, timeout_ms: int, records_max: int) -> Incoming:
        with _translated():
            return self._incoming(self._loop.run(self._poll(timeout_ms, records_max)), frozenset())

    async def _poll(self, timeout_ms: int, records_max: int) -> Mapping[Any, list[Any]]:
        if self._consumer is None:
            consumer = AIOKafkaConsumer(**self._settings)  # wants a running loop when it is made
            await self._connect(consumer)
            consumer.assign([TopicPartition(*self._surroundings.partitions[number]) for number in self._positions])
            self._consumer = consumer
            self._move(self._positions)
        return await self._consumer.getmany(timeout_ms=timeout_ms, max_records=records_max)

    def seek(self, positions: Mapping[int, int]) -> None:
        self._positions.update(positions)
        if self._consumer is not None:
            self._loop.run(self._seek(positions))

    async def _seek(self, positions: Mapping[int, int]) -> None:
        self._move(positions)

    def _move(self, positions: Mapping[int, int]) -> None:
        assert self._consumer is not None
        for number, position in positions.items():
            self._consumer.seek(TopicPartition(*self._surroundings.partitions[number]), position)


class _Listener(_RebalanceListener):
    def __init__(self) -> None:
        self.changes = 0
        self.assigned: set[Any] = set()

    def on_partitions_revoked(self, revoked: Any) -> None:
        self.changes += 1

    def on_partitions_assigned(self, assigned: Any) -> None:
        self.changes += 1
        self.assigned |= set(assigned)


class _GroupConsumer(_Consuming):
    """Shows what happens without KIP-447; the safe way with this library is the manual one."""

    def __init__(self, loop: Loop, surroundings: Surroundings, group: str, topic: str) -> None:
        super().__init__(
            loop,
            surroundings,
            group_id=group,
            isolation_level="read_committed",
            auto_offset_reset="earliest",
            session_timeout_ms=surroundings.session_timeout_ms,
            heartbeat_interval_ms=500,
            partition_assignment_strategy=(RangePartitionAssignor,),
        )
        self._topic = topic
        self._listener = _Listener()
        self._last: set[Any] = set()
        self._to_rewind: set[Any] = set()

    def poll(self, timeout_ms: int, records_max: int) -> Incoming:
        with _translated():
            return self._loop.run(self._poll(timeout_ms, records_max))

    async def _poll(self, timeout_ms: int, records_max: int) -> Incoming:
        if self._consumer is None:
            consumer = AIOKafkaConsumer(**self._settings)
            consumer.subscribe([self._topic], listener=self._listener)
            await self._connect(consumer)
            self._consumer = consumer
        await self._go_back(self._consumer)
        changes = self._listener.changes
        found = await self._consumer.getmany(timeout_ms=timeout_ms, max_records=records_max)
        self._last = set(found)
        if changes != self._listener.changes:  # they may be from before
            self._to_rewind = set(found)
            return NOTHING
        new = self._listener.assigned & self._last
        self._listener.assigned -= new
        return self._incoming(found, frozenset(self._numbers[where.topic, where.partition] for where in new))

    def rewind(self) -> None:
        self._to_rewind |= self._last
        if self._consumer is not None:
            with _translated():
                self._loop.run(self._go_back(self._consumer))

    async def _go_back(self, consumer: AIOKafkaConsumer) -> None:
        """Nothing of these partitions is handed out before it has succeeded."""
        for where in sorted(self._to_rewind):
            committed = await consumer.committed(where)
            with suppress(IllegalStateError):  # it is no longer ours
                consumer.seek(where, committed or 0)
            self._to_rewind.discard(where)

    def commit(self, positions: Mapping[int, int]) -> None:
        places = self._surroundings.partitions
        offsets = {TopicPartition(*places[number]): at for number, at in positions.items()}
        if self._consumer is None:
            raise InvalidState("Nothing was read yet, so there is no position to commit.")
        with _translated():
            self._loop.run(self._consumer.commit(offsets))

    @property
    def member(self) -> object:
        return None
