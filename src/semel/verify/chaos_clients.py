"""The load of a chaos run: real clients in threads, each of which notes what it sent and what it was told."""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any, Final

import confluent_kafka

from semel.client.admin import Admin
from semel.client.producer import Outcome, Producer
from semel.errors import CommitUnknown, SemelError
from semel.verify.chaos_ledger import Fate, Ledger, TopicPartition, Transaction
from semel.verify.chaos_reading import place_and_value

SHARED: Final[Mapping[str, int]] = {"a": 3, "b": 2}
"""Topics that all transactional producers write to."""
INPUT, COPIED, COMPACTED, RETAINED = "input", "copied", "compacted", "retained"
COPY_PARTITIONS: Final = 2
GROUP: Final = "copiers"
TRANSACTION_TIMEOUT_MS: Final = 15_000
_PATIENCE_S: Final = 30.0
_KEYS: Final = 12

_NIMBLE: Final = {
    "reconnect.backoff.ms": 20,
    "reconnect.backoff.max.ms": 150,
    "retry.backoff.ms": 20,
    "retry.backoff.max.ms": 150,
    "topic.metadata.refresh.interval.ms": 2_000,
    "socket.connection.setup.timeout.ms": 2_000,
    # With the default, librdkafka 2.16 forgets the only broker there is when it is down, makes another object for it,
    # and may leave a TxnOffsetCommit for ever in the queue of the old one.
    "metadata.recovery.strategy": "none",
    "log_level": 0,
}


class Client:
    """A thread that works until it is told to stop, whatever becomes of the broker."""

    def __init__(self, name: str, bootstrap: str, ledger: Ledger, seed: int) -> None:
        self.name = name
        self.bootstrap = bootstrap
        self.ledger = ledger
        self.chance = random.Random(seed)
        self._stopping = threading.Event()
        self._numbers = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def wait_ended(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self.ledger.fail(f"{self.name} has not ended {timeout_s:g} s after it was told to")

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def pause(self, seconds: float) -> None:
        self._stopping.wait(seconds * (0.5 + self.chance.random()))

    def next_value(self) -> str:
        self._numbers += 1
        return f"{self.name}/{self._numbers}"

    def live(self) -> None:
        """One life; it returns to begin another, or when it is stopped."""
        raise NotImplementedError

    def _run(self) -> None:
        while not self.is_stopping:
            try:
                self.live()
            except (SemelError, confluent_kafka.KafkaException):
                self.pause(0.1)  # its next life tries again
            except Exception:
                self.ledger.fail(f"{self.name} failed: {traceback.format_exc()}")
                return

    def kafka_settings(self, **more: Any) -> dict[str, Any]:
        names = {name.replace("_", "."): value for name, value in more.items()}
        return {"bootstrap.servers": self.bootstrap, **_NIMBLE, **names}

    def some_records(self, transaction: Transaction) -> dict[str, TopicPartition]:
        """Values for several partitions of several topics, noted before they are sent."""
        partitions = [(topic, index) for topic, count in SHARED.items() for index in range(count)]
        wheres = self.chance.choices(partitions, k=self.chance.randint(1, 6))
        transaction.values.update({self.next_value(): where for where in wheres})
        return transaction.values


class SemelTransactions(Client):
    """Semel's producer. Anything but CommitUnknown means that the transaction is not committed."""

    def live(self) -> None:
        settings = {
            "bootstrap.servers": self.bootstrap,
            "transactional.id": self.name,
            "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS,
            "retry.backoff.ms": 20,
            "retry.backoff.max.ms": 150,
            "default.api.timeout.ms": 20_000,
        }
        with Producer(settings) as producer:
            while not self.is_stopping:
                self._transact(producer)

    def _transact(self, producer: Producer) -> None:
        transaction = self.ledger.begin(self.name)
        try:
            producer.begin()
            for value, (topic, index) in self.some_records(transaction).items():
                producer.send(topic, value.encode(), partition=index)
            if self.chance.random() < 0.2:
                producer.flush()
                producer.abort()
                fate = Fate.ABORTED
            else:
                producer.commit()
                fate = Fate.COMMITTED
        except CommitUnknown:
            fate = self._resolve(producer)
        except SemelError:
            self.ledger.end(self.name, transaction, Fate.ABORTED)
            raise
        self.ledger.end(self.name, transaction, fate)

    def _resolve(self, producer: Producer) -> Fate:
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            try:
                return Fate.COMMITTED if producer.resolve() is Outcome.COMMITTED else Fate.ABORTED
            except SemelError:
                time.sleep(0.05)
        return Fate.UNKNOWN


class KafkaTransactions(Client):
    """librdkafka's transactional producer."""

    def live(self) -> None:
        producer = self.new_producer()
        while not self.is_stopping:
            transaction = self.ledger.begin(self.name)
            producer.begin_transaction()
            for value, (topic, index) in self.some_records(transaction).items():
                producer.produce(topic, value.encode(), partition=index)
            fate = self.end(producer, committed=self.chance.random() >= 0.2)
            self.ledger.end(self.name, transaction, fate)
            if fate is Fate.UNKNOWN:
                return

    def new_producer(self) -> confluent_kafka.Producer:
        settings = self.kafka_settings(transactional_id=self.name, transaction_timeout_ms=TRANSACTION_TIMEOUT_MS)
        producer = confluent_kafka.Producer({**settings, "linger.ms": 2})
        producer.init_transactions(_PATIENCE_S)
        return producer

    def end(self, producer: confluent_kafka.Producer, *, committed: bool) -> Fate:
        """Commit or abort, however often it must be tried."""
        deadline = time.monotonic() + 2 * _PATIENCE_S
        while time.monotonic() < deadline:
            try:
                if committed:
                    producer.commit_transaction(_PATIENCE_S)
                else:
                    producer.abort_transaction(_PATIENCE_S)
                return Fate.COMMITTED if committed else Fate.ABORTED
            except confluent_kafka.KafkaException as failure:
                error = failure.args[0]
                if error.txn_requires_abort():
                    committed = False
                elif not error.retriable():
                    return Fate.UNKNOWN if committed else Fate.ABORTED
        return Fate.UNKNOWN


class KafkaIdempotent(Client):
    """librdkafka's idempotent producer with acks=all: each record is acknowledged or its fate is not known."""

    def live(self) -> None:
        producer = confluent_kafka.Producer(
            self.kafka_settings(enable_idempotence=True, acks="all", linger_ms=2, message_timeout_ms=60_000)
        )
        while not self.is_stopping:
            for _ in range(self.chance.randint(1, 6)):
                self._produce(producer, INPUT, self.chance.randrange(COPY_PARTITIONS))
            self._produce(producer, RETAINED, 0)
            self._produce(producer, COMPACTED, 0, f"{self.name}-{self.chance.randrange(_KEYS)}")
            producer.poll(0)
            self.pause(0.03)
            if len(producer) > 200:  # the broker is away; what waits is enough
                producer.flush(1)
        if producer.flush(_PATIENCE_S):
            self.ledger.fail(f"{len(producer)} records of {self.name} were never acknowledged")

    def _produce(self, producer: confluent_kafka.Producer, topic: str, index: int, key: str | None = None) -> None:
        value = self.next_value()
        self.ledger.send(value, (topic, index), key)

        def delivered(error: confluent_kafka.KafkaError | None, message: confluent_kafka.Message) -> None:
            if error is None:
                offset = message.offset()
                self.ledger.acknowledge(self.name, value, (topic, index), -1 if offset is None else offset)

        producer.produce(
            topic, value.encode(), key=None if key is None else key.encode(), partition=index, on_delivery=delivered
        )


class Copier(KafkaTransactions):
    """Consume, produce, and commit the positions in the same transaction; in the end each input is there once."""

    def live(self) -> None:
        producer = self.new_producer()
        consumer = confluent_kafka.Consumer(
            self.kafka_settings(
                group_id=GROUP,
                isolation_level="read_committed",
                enable_auto_commit=False,
                auto_offset_reset="earliest",
                session_timeout_ms=6_000,
                heartbeat_interval_ms=500,
                fetch_wait_max_ms=50,
            )
        )
        try:
            consumer.subscribe([INPUT])
            while not self.is_stopping and self._copy(producer, consumer):
                pass
        finally:
            consumer.close()

    def _copy(self, producer: confluent_kafka.Producer, consumer: confluent_kafka.Consumer) -> bool:
        messages = [one for one in consumer.consume(50, timeout=0.1) if one.error() is None]
        if not messages:
            return True
        positions: dict[int, int] = {}
        producer.begin_transaction()
        for message in messages:
            (_, index), offset, value = place_and_value(message)
            producer.produce(COPIED, value.encode(), partition=index)
            positions[index] = max(positions.get(index, 0), offset + 1)
        offsets = [confluent_kafka.TopicPartition(INPUT, index, offset) for index, offset in positions.items()]
        committed = self._send_offsets(producer, consumer, offsets)
        fate = self.end(producer, committed=committed)
        if fate is Fate.COMMITTED:
            self.ledger.note_topic(self.name, COPIED, "there")
        return fate is Fate.COMMITTED  # else its next life begins at the positions that are committed

    def _send_offsets(
        self,
        producer: confluent_kafka.Producer,
        consumer: confluent_kafka.Consumer,
        offsets: list[confluent_kafka.TopicPartition],
    ) -> bool:
        while True:
            try:
                producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), _PATIENCE_S)
                return True
            except confluent_kafka.KafkaException as failure:
                if not failure.args[0].retriable():
                    return False


class Reader(Client):
    """Reads committed records as they come, from the beginning on and never back."""

    def __init__(self, name: str, bootstrap: str, ledger: Ledger, seed: int) -> None:
        super().__init__(name, bootstrap, ledger, seed)
        partitions = [(topic, index) for topic, count in SHARED.items() for index in range(count)]
        partitions += [(COPIED, index) for index in range(COPY_PARTITIONS)]
        self.seen: dict[TopicPartition, list[tuple[int, str]]] = {where: [] for where in partitions}
        self._known: set[str] = set()

    def live(self) -> None:
        consumer = confluent_kafka.Consumer(
            self.kafka_settings(
                group_id=self.name,
                isolation_level="read_committed",
                enable_auto_commit=False,
                auto_offset_reset="error",
                fetch_wait_max_ms=50,
            )
        )
        try:
            consumer.assign(
                [
                    confluent_kafka.TopicPartition(topic, index, values[-1][0] + 1 if values else 0)
                    for (topic, index), values in self.seen.items()
                ]
            )
            while not self.is_stopping:
                for message in consumer.consume(500, timeout=0.1):
                    self._take(message)
        finally:
            consumer.close()

    def _take(self, message: confluent_kafka.Message) -> None:
        error = message.error()
        if error is not None:
            if error.code() == confluent_kafka.KafkaError._AUTO_OFFSET_RESET:
                self.ledger.fail(f"the reader's position is beyond the log, so records are lost: {error}")
            return
        where, offset, text = place_and_value(message)
        if text in self._known:
            self.ledger.fail(f"the reader got {text} a second time, at offset {offset} of {where[0]}-{where[1]}")
        self._known.add(text)
        self.seen[where].append((offset, text))


class TopicMaker(Client):
    """Creates topics and deletes them again."""

    def live(self) -> None:
        with Admin({"bootstrap.servers": self.bootstrap, "default.api.timeout.ms": 20_000}) as admin:
            while not self.is_stopping:
                self._numbers += 1
                name = f"passing-{self._numbers}"
                self.ledger.note_topic(self.name, name, "coming")
                admin.create_topics(name, partitions=3)
                self.ledger.note_topic(self.name, name, "there")
                if self._numbers % 8:
                    self.ledger.note_topic(self.name, name, "going")
                    admin.delete_topics(name)
                    self.ledger.note_topic(self.name, name, "gone")
                self.pause(0.1)
