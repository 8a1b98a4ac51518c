"""Four other clients of Kafka behind one face: each writes records to a topic and reads a topic to its end.

`PeerRecord` of the Java peer is the common form of a record; `writable` takes out of it what a client refuses to write.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import confluent_kafka
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from java_peer import Compression, JavaPeer, PeerRecord

with warnings.catch_warnings():
    # It reads its own data files by a function that newer Pythons call deprecated; tests turn warnings into errors.
    warnings.simplefilter("ignore", DeprecationWarning)
    from kafka import KafkaConsumer, KafkaProducer
    from kafka.structs import TopicPartition as KafkaPythonPartition

TIMEOUT_S = 30
LINGER_MS = 20
"""Long enough for the records of a test to share batches."""
BATCH_BYTES = 500_000
"""Above the block sizes of snappy (32 KB) and lz4 (64 KB)."""


class Peer(Protocol):
    """A client of Kafka as tests use it. With keys it must choose partitions as the Java client does."""

    @property
    def name(self) -> str: ...

    def write(self, bootstrap: str, topic: str, records: Sequence[PeerRecord], compression: Compression) -> None:
        """Write the records in their order and return when the broker has them."""
        ...

    def read(self, bootstrap: str, topic: str) -> list[PeerRecord]:
        """All committed records up to where the partitions end now, with partition and offset."""
        ...

    def writable(self, record: PeerRecord) -> PeerRecord:
        """The record without what this client refuses to write."""
        ...


class Confluent:
    name = "confluent-kafka"

    def writable(self, record: PeerRecord) -> PeerRecord:
        return record

    def write(self, bootstrap: str, topic: str, records: Sequence[PeerRecord], compression: Compression) -> None:
        failures: list[object] = []
        producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": bootstrap,
                "compression.type": compression,
                "partitioner": "murmur2_random",  # the Java client's way; librdkafka's own is another
                "enable.idempotence": True,
                "linger.ms": LINGER_MS,
                "batch.size": BATCH_BYTES,
            }
        )
        for record in records:
            producer.produce(
                topic,
                record.value,
                record.key,
                headers=list(record.headers),
                partition=-1 if record.partition is None else record.partition,
                timestamp=record.timestamp_ms or 0,
                on_delivery=lambda error, _: failures.append(error) if error else None,
            )
        left = producer.flush(TIMEOUT_S)
        assert not left
        assert not failures

    def read(self, bootstrap: str, topic: str) -> list[PeerRecord]:
        settings: dict[str, Any] = {
            "bootstrap.servers": bootstrap,
            "group.id": "not used",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
            "check.crcs": True,
        }
        consumer = confluent_kafka.Consumer(settings)
        try:
            partitions = consumer.list_topics(topic, timeout=TIMEOUT_S).topics[topic].partitions
            beginning = confluent_kafka.OFFSET_BEGINNING
            consumer.assign([confluent_kafka.TopicPartition(topic, partition, beginning) for partition in partitions])
            read: list[PeerRecord] = []
            ended: set[int | None] = set()
            while len(ended) < len(partitions):
                message = consumer.poll(TIMEOUT_S)
                assert message is not None, f"nothing came for {TIMEOUT_S} s"
                if (error := message.error()) is None:
                    read.append(_from_confluent(message))
                else:
                    assert error.code() == confluent_kafka.KafkaError._PARTITION_EOF, error
                    ended.add(message.partition())
            return read
        finally:
            consumer.close()


def _from_confluent(message: confluent_kafka.Message) -> PeerRecord:
    key, value, headers = cast(Any, (message.key(), message.value(), message.headers()))  # their stubs allow text too
    return PeerRecord(
        key=key,
        value=value,
        headers=tuple(headers or ()),
        timestamp_ms=message.timestamp()[1],
        partition=message.partition(),
        offset=message.offset(),
    )


class KafkaPython:
    name = "kafka-python"

    def writable(self, record: PeerRecord) -> PeerRecord:
        headers = tuple((name, content or b"") for name, content in record.headers)
        return replace(_with_key_or_value(record), headers=headers)

    def write(self, bootstrap: str, topic: str, records: Sequence[PeerRecord], compression: Compression) -> None:
        producer = KafkaProducer(
            bootstrap_servers=bootstrap,
            compression_type=None if compression == "none" else compression,
            linger_ms=LINGER_MS,
            batch_size=BATCH_BYTES,
            allow_auto_create_topics=False,
        )
        try:
            sent = [
                producer.send(
                    topic,
                    value=record.value,
                    key=record.key,
                    headers=[(name, content or b"") for name, content in record.headers],
                    partition=record.partition,
                    timestamp_ms=record.timestamp_ms,
                )
                for record in records
            ]
            for one in sent:
                one.get(TIMEOUT_S)
        finally:
            producer.close(timeout=TIMEOUT_S)

    def read(self, bootstrap: str, topic: str) -> list[PeerRecord]:
        consumer = KafkaConsumer(
            bootstrap_servers=bootstrap,
            isolation_level="read_committed",
            enable_auto_commit=False,
        )
        try:
            numbers = sorted(consumer.partitions_for_topic(topic) or ())
            partitions = [KafkaPythonPartition(topic, partition) for partition in numbers]
            consumer.assign(partitions)
            consumer.seek_to_beginning(*partitions)
            ends = consumer.end_offsets(partitions)
            read: list[PeerRecord] = []
            while any((consumer.position(partition) or 0) < ends[partition] for partition in partitions):
                for batch in consumer.poll(timeout_ms=1000).values():
                    read += map(_from_record, batch)
            return read
        finally:
            consumer.close(autocommit=False)


class AioKafka:
    name = "aiokafka"

    def writable(self, record: PeerRecord) -> PeerRecord:
        return _with_key_or_value(record)

    def write(self, bootstrap: str, topic: str, records: Sequence[PeerRecord], compression: Compression) -> None:
        asyncio.run(self._write(bootstrap, topic, records, compression))

    async def _write(self, bootstrap: str, topic: str, records: Sequence[PeerRecord], compression: Compression) -> None:
        producer = AIOKafkaProducer(
            bootstrap_servers=bootstrap,
            compression_type=None if compression == "none" else compression,
            linger_ms=LINGER_MS,
            max_batch_size=BATCH_BYTES,
            enable_idempotence=True,
        )
        await producer.start()
        try:
            sent = [
                await producer.send(
                    topic,
                    record.value,
                    record.key,
                    headers=list(record.headers),
                    partition=record.partition,
                    timestamp_ms=record.timestamp_ms,
                )
                for record in records
            ]
            await asyncio.wait_for(asyncio.gather(*sent), TIMEOUT_S)
        finally:
            await producer.stop()

    def read(self, bootstrap: str, topic: str) -> list[PeerRecord]:
        return asyncio.run(self._read(bootstrap, topic))

    async def _read(self, bootstrap: str, topic: str) -> list[PeerRecord]:
        consumer = AIOKafkaConsumer(
            topic,
            bootstrap_servers=bootstrap,
            group_id=None,  # then it takes all partitions by itself
            isolation_level="read_committed",
            auto_offset_reset="earliest",
        )
        await consumer.start()
        try:
            partitions = consumer.assignment()
            ends = await consumer.end_offsets(partitions)
            read: list[PeerRecord] = []
            while any([await (consumer.position(partition) or 0) < ends[partition] for partition in partitions]):
                for batch in (await consumer.getmany(timeout_ms=1000)).values():
                    read += map(_from_record, batch)
            return read
        finally:
            await consumer.stop()


def _with_key_or_value(record: PeerRecord) -> PeerRecord:
    return replace(record, value=b"") if record.key is None and record.value is None else record


def _from_record(record: Any) -> PeerRecord:
    """kafka-python and aiokafka, which grew out of it, have the same fields."""
    return PeerRecord(
        key=record.key,
        value=record.value,
        headers=tuple(record.headers),
        timestamp_ms=record.timestamp,
        partition=record.partition,
        offset=record.offset,
    )


@dataclass(frozen=True)
class Java:
    program: JavaPeer
    name: str = "java"

    def writable(self, record: PeerRecord) -> PeerRecord:
        return record

    def write(self, bootstrap: str, topic: str, records: Sequence[PeerRecord], compression: Compression) -> None:
        config = {"linger.ms": str(LINGER_MS), "batch.size": str(BATCH_BYTES)}
        self.program.produce(bootstrap, topic, records, compression=compression, config=config)

    def read(self, bootstrap: str, topic: str) -> list[PeerRecord]:
        return self.program.consume(bootstrap, topic, timeout_s=TIMEOUT_S)
