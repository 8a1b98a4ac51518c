"""Two clusters, transactions that span topics, and checks with confluent-kafka of what a mirror made of them."""

from __future__ import annotations

import json
import random
import threading
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, Producer, TopicPartition

import semel
from semel.bridges.mirror.options import ORIGIN_HEADER
from semel.client.config import FetchConfig
from semel.client.fetcher import Fetcher
from semel.records import decode_batches, read_header
from semel.testing.embedded import EmbeddedBroker

READ_TIMEOUT_S = 60.0
BROKER_CONFIG = {"group.initial.rebalance.delay.ms": "0", "offsets.topic.num.partitions": "4"}


class Record(NamedTuple):
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    timestamp_ms: int

    @property
    def transaction(self) -> str:
        return str(json.loads(self.value or b"{}")["transaction"])


def settings(bootstrap: str, **more: Any) -> dict[str, Any]:
    return {"bootstrap.servers": bootstrap, **{name.replace("_", "."): value for name, value in more.items()}}


def create(bootstrap: str, name: str, partitions: int = 1, **config: str) -> None:
    with semel.Admin(settings(bootstrap)) as admin:
        admin.create_topics(name, partitions=partitions, config={k.replace("_", "."): v for k, v in config.items()})


def partition_count(bootstrap: str, topic: str) -> int:
    with semel.Admin(settings(bootstrap)) as admin:
        return len(admin.describe_topics(topic)[topic].partitions)


def read(bootstrap: str, topic: str) -> dict[int, list[tuple[int, Record]]]:
    """Every committed record with its offset, by partition, read by librdkafka."""
    consumer = Consumer(
        settings(
            bootstrap,
            group_id="reader",
            isolation_level="read_committed",
            enable_partition_eof=True,
            fetch_wait_max_ms=10,
            enable_auto_commit=False,
        )
    )
    count = partition_count(bootstrap, topic)
    consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in range(count)])
    found: dict[int, list[tuple[int, Record]]] = {number: [] for number in range(count)}
    finished: set[int] = set()
    while len(finished) < count:
        message = consumer.poll(READ_TIMEOUT_S)
        assert message is not None, f"{topic}: no end within {READ_TIMEOUT_S:g} s"
        if (error := message.error()) is not None:
            if error.name() != "_PARTITION_EOF":
                raise KafkaException(error)
            finished.add(message.partition() or 0)
            continue
        record = Record(message.key(), message.value(), _headers(message.headers()), message.timestamp()[1])
        found[message.partition() or 0].append((message.offset() or 0, record))
    consumer.close()
    return found


def _headers(found: Any) -> list[tuple[str, bytes | None]]:
    return list(found or [])


def records(bootstrap: str, topic: str) -> dict[int, list[Record]]:
    """The same without offsets, and without the header that a mirror adds."""
    return {
        number: [
            one._replace(headers=[header for header in one.headers if header[0] != ORIGIN_HEADER]) for _, one in found
        ]
        for number, found in read(bootstrap, topic).items()
    }


def torn(bootstrap: str, topics: Mapping[str, int]) -> set[str]:
    """Source transactions whose records lie in more than one transaction of the target, by the batches' epochs."""
    homes: dict[str, set[tuple[int, int]]] = defaultdict(set)
    named = [(topic, number) for topic, count in topics.items() for number in range(count)]
    config = FetchConfig(isolation="read_committed", wait_ms_max=100)
    with Fetcher(settings(bootstrap), config, prefetch=False) as fetcher:
        fetcher.assign(dict.fromkeys(named, "earliest"))
        ends = fetcher.end_offsets()
        while any(fetcher.positions[one] < end for one, end in ends.items()):
            for answer in fetcher.fetch_raw(1_000):
                for batch in answer.batches:
                    header = read_header(batch)
                    for value in decode_batches([batch]).column("value").to_pylist():
                        if b"transaction" in (value or b""):
                            homes[json.loads(value)["transaction"]].add((header.producer_id, header.producer_epoch))
    return {transaction for transaction, found in homes.items() if len(found) > 1}


class Writer:
    """A transactional producer of the source. librdkafka speaks protocol 1: all its transactions share an epoch."""

    def __init__(self, bootstrap: str, topics: Mapping[str, int], rng: random.Random, *, protocol: int = 2) -> None:
        self.topics = dict(topics)
        self._rng = rng
        self._name = f"writer-{uuid.uuid4().hex[:8]}"
        self._number = 0
        self._protocol = protocol
        if protocol == 2:
            self._semel = semel.Producer(settings(bootstrap, transactional_id=self._name, linger_ms=0))
        else:
            self._other = Producer(settings(bootstrap, transactional_id=self._name, linger_ms=0))
            self._other.init_transactions()

    def close(self) -> None:
        if self._protocol == 2:
            self._semel.close()

    def write(self, *, abort: bool | None = None) -> str:
        """One transaction of a few records over random partitions of random topics; a third is aborted."""
        rng = self._rng
        self._number += 1
        transaction = f"{self._name}-{self._number}"
        self._begin()
        count = rng.randint(2, 6)
        for number in range(count):
            topic = rng.choice(list(self.topics))
            value = json.dumps({"transaction": transaction, "number": number, "of": count}).encode()
            headers = [("n", str(number).encode()), ("empty", None)] if rng.random() < 0.5 else []
            key = f"k{rng.randint(0, 9)}".encode() if rng.random() < 0.8 else None
            self._send(topic, rng.randrange(self.topics[topic]), key, value, headers, 1_600_000_000_000 + number)
            if rng.random() < 0.4:
                self._flush()
        self._end(abort=rng.random() < 0.33 if abort is None else abort)
        return transaction

    def _begin(self) -> None:
        if self._protocol == 2:
            self._semel.begin()
        else:
            self._other.begin_transaction()

    def _send(self, topic: str, partition: int, key: bytes | None, value: bytes, headers: Any, time_ms: int) -> None:
        if self._protocol == 2:
            self._semel.send(topic, value, key=key, partition=partition, headers=headers, timestamp_ms=time_ms)
        else:
            self._other.produce(topic, value, key, partition, headers=headers, timestamp=time_ms)

    def _flush(self) -> None:
        if self._protocol == 2:
            self._semel.flush()
        else:
            self._other.flush()

    def _end(self, *, abort: bool) -> None:
        if self._protocol == 2:
            self._semel.abort() if abort else self._semel.commit()
        elif abort:
            self._other.abort_transaction()
        else:
            self._other.commit_transaction()


class Scene:
    """Source and target, and topics with names of their own."""

    def __init__(self, source: str, target: str) -> None:
        self.source, self.target = source, target
        unique = uuid.uuid4().hex[:8]
        self.name = f"mirror-{unique}"
        self.prefix = f"{unique}-"
        self.topics: dict[str, int] = {}

    def create(self, name: str, partitions: int = 2, **config: str) -> str:
        topic = self.prefix + name
        create(self.source, topic, partitions, **config)
        self.topics[topic] = partitions
        return topic

    def options(self, **more: Any) -> dict[str, Any]:
        return {
            "name": self.name,
            "source": self.source,
            "target": self.target,
            "topics": f"{self.prefix}.*",
            "groups": None,
            "retry_s": 60.0,
            "end_on_sigterm": False,
            **more,
        }

    def mirror(self, **more: Any):
        """Until nothing is left."""
        return semel.mirror(**self.options(idle_ms=250, **more))

    def assert_equal(self) -> None:
        """Every committed record of the source is at the target once, in its partition and in order; nothing more."""
        for topic in self.topics:
            assert records(self.target, topic) == records(self.source, topic), topic

    def assert_whole(self) -> None:
        assert torn(self.target, self.topics) == set()


class RunningMirror:
    """A mirror in a thread, for as long as the block lasts."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._stop, self.ready = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        self.report: Any = None
        self.progress: list[Any] = []
        given = {"stop": self._stop, "on_ready": self.ready.set, "on_progress": self.progress.append, **options}
        self._thread = threading.Thread(target=self._run, args=(given,), daemon=True)

    def _run(self, options: dict[str, Any]) -> None:
        try:
            self.report = semel.mirror(**options)
        except BaseException as error:
            self.error = error
            self.ready.set()

    def __enter__(self) -> RunningMirror:
        self._thread.start()
        assert self.ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stop.set()
        self.join()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.fixture(scope="module")
def clusters() -> Iterator[tuple[str, str]]:
    with EmbeddedBroker(config=BROKER_CONFIG) as source, EmbeddedBroker(config=BROKER_CONFIG) as target:
        yield source.bootstrap, target.bootstrap


@pytest.fixture
def scene(clusters: tuple[str, str]) -> Scene:
    return Scene(*clusters)
