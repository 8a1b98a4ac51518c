"""An embedded broker of either transaction protocol, and a producer that writes to it what a test wants."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.producer import Producer
from semel.client.settings import parse_config
from semel.records.reference import Record, encode_batch
from semel.testing.embedded import EmbeddedBroker
from semel.wire import Api, ErrorCode

# As brokers before Kafka 3.6, which took a late write for one of a new transaction.
TRUSTING: Final = {"transaction.partition.verification.enable": "false", "num.partitions": "1"}
_LAST_OF_PROTOCOL_1: Final = 11


@dataclass(frozen=True, slots=True)
class Scene:
    """A broker, and a connection to it."""

    bootstrap: str
    cluster: Cluster

    @property
    def settings(self) -> dict[str, object]:
        return {"bootstrap.servers": self.bootstrap}

    @property
    def admin(self) -> Admin:
        return Admin(self.cluster)

    def producer(self, transactional_id: str | None = None) -> Producer:
        more = {} if transactional_id is None else {"transactional.id": transactional_id}
        return Producer({**self.settings, **more})

    def write_late(self, producer: Producer, topic: str, *values: bytes, sequence: int) -> None:
        """A batch of protocol 1 under the producer's id and epoch, past every transaction that it has begun."""
        identity = producer.identity
        batch = encode_batch(
            [Record(number, int(time.time() * 1000), None, value) for number, value in enumerate(values)],
            producer_id=identity.producer_id,
            producer_epoch=identity.producer_epoch,
            base_sequence=sequence,
            transactional=True,
        )
        answer = self.cluster.call(
            self.cluster.leader(topic, 0).node,
            Api.PRODUCE,
            highest=_LAST_OF_PROTOCOL_1,
            transactional_id=producer.config.transactional_id,
            acks=-1,
            timeout=10_000,
            topic_data=[{"name": topic, "partition_data": [{"index": 0, "records": batch}]}],
        )
        told = answer.responses[0].partition_responses[0]
        assert told.error_code is ErrorCode.none, told

    def hang(self, topic: str, transactional_id: str, *values: bytes) -> Producer:
        """A committed transaction, and a write that comes after it."""
        with self.producer(transactional_id) as producer:
            with producer.transaction():
                producer.send(topic, b"in time", partition=0)
            is_bumped = producer.transaction_protocol == 2
            self.write_late(producer, topic, *(values or [b"too late"]), sequence=0 if is_bumped else 1)
            return producer


@contextmanager
def scene(transaction_version: int) -> Iterator[Scene]:
    config = {**TRUSTING, "transaction.version": str(transaction_version)}
    with EmbeddedBroker(config=config, fsync="never") as broker:
        settings = {"bootstrap.servers": broker.bootstrap, "default.api.timeout.ms": 20_000}
        with Cluster(parse_config(settings).client) as cluster:
            yield Scene(broker.bootstrap, cluster)
