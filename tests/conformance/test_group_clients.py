"""Other clients as ordinary members of consumer groups, with every protocol of groups that they speak.

Partitions are shared, taken over, kept for static members and resumed where they were committed. The members are
programs of their own (`copiers/*_reader.py`, `java/Reader.java`, `go/reader`).
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer
from java_peer import JavaPeer, PeerRecord
from member_processes import Client, Member, go_program, java_program, python_program
from observer import committed_offsets, records_of
from targets import KafkaUnderTest, NewTopic

from semel.broker.process import Broker

PARTITIONS = 4
SESSION_TIMEOUT_MS = 3_000
STATIC_SESSION_TIMEOUT_MS = 20_000
BROKER_SESSION_TIMEOUT_MS = 6_000
"""What the broker of the tests has for the groups of KIP-848, where the members have no say."""
HEARTBEAT_MS = 500
INTERNAL = {"__consumer_offsets", "__transaction_state"}

CONFLUENT = python_program("copiers/confluent_reader.py")
KAFKA_PYTHON = python_program("copiers/kafka_python_reader.py")
AIOKAFKA = python_program("copiers/aiokafka_reader.py")
JAVA = java_program("Reader")
FRANZ_GO = go_program("reader")
CLIENTS = [
    *(Client("confluent", protocol, CONFLUENT) for protocol in ("eager", "cooperative", "consumer")),
    *(Client("kafka-python", protocol, KAFKA_PYTHON) for protocol in ("eager", "cooperative")),
    Client("aiokafka", "eager", AIOKAFKA),
    *(Client("java", protocol, JAVA) for protocol in ("eager", "cooperative", "consumer")),
    *(Client("franz-go", protocol, FRANZ_GO, needs="go") for protocol in ("eager", "cooperative", "consumer")),
]
# With the groups of KIP-848, franz-go does not tell the broker that a static member leaves for a while (epoch -2), and
# its place is free again only when its session has ended: a rebalance on Apache Kafka too.
STATIC_CLIENTS = [client for client in CLIENTS if (client.name, client.protocol) != ("franz-go", "consumer")]
ONE_OF_EACH = [
    Client("confluent", "eager", CONFLUENT),
    Client("kafka-python", "eager", KAFKA_PYTHON),
    Client("aiokafka", "eager", AIOKAFKA),
    Client("java", "consumer", JAVA),
    Client("franz-go", "cooperative", FRANZ_GO, needs="go"),
]
# librdkafka's consumer does not find the topic that its own request has created, on Apache Kafka neither.
CREATING_CLIENTS = [client for client in ONE_OF_EACH if client.name != "confluent"]


class Readers:
    """Members of one group on one topic, all of the same client."""

    def __init__(self, client: Client, bootstrap: str, topic: str, folder: Path) -> None:
        self._client = client
        self._folder = folder
        self.group = f"readers-{uuid.uuid4().hex[:8]}"
        self._settings = {
            "bootstrap": bootstrap,
            "source": topic,
            "group": self.group,
            "protocol": client.protocol,
            "session_timeout_ms": SESSION_TIMEOUT_MS,
        }

    def member(self, name: str, *, instance_id: str | None = None) -> Member:
        # A static member that is away must not miss its session while its successor is started on a busy machine.
        static = {"instance_id": instance_id, "session_timeout_ms": STATIC_SESSION_TIMEOUT_MS}
        own = {} if instance_id is None else static
        return Member(name, self._client, self._folder, {**self._settings, **own})


def write(bootstrap: str, topic: str, numbers: Sequence[int], *, timestamp_ms: int = 0) -> None:
    """Message n is n, in partition n modulo their number."""
    producer = Producer({"bootstrap.servers": bootstrap})
    for number in numbers:
        producer.produce(topic, str(number), partition=number % PARTITIONS, timestamp=timestamp_ms)
    assert producer.flush(30) == 0


def read_by(*members: Member) -> Counter[int]:
    return Counter(int(value) for member in members for values in member.events("read") for value in values)


def wait_read(numbers: Sequence[int], *members: Member) -> None:
    """Until the members have read these, as often as they are named here; then they have read nothing else."""
    wanted = Counter(numbers)
    members[0].wait_until(lambda: read_by(*members) >= wanted, f"read by {[one.name for one in members]}")
    assert read_by(*members) == wanted


def wait_shared(*members: Member) -> None:
    """Until every partition has one owner, and every member has some."""

    def is_shared() -> bool:
        assignments = [member.assignment() for member in members]
        together = sorted(partition for assignment in assignments for partition in assignment)
        return all(assignments) and together == list(range(PARTITIONS))

    members[0].wait_until(is_shared, f"shared among {[one.name for one in members]}")


@pytest.mark.parametrize("client", CLIENTS, ids=str)
def test_members_share_partitions_and_others_go_on_where_they_committed(
    client: Client, kafka: KafkaUnderTest, new_topic: NewTopic, tmp_path: Path
) -> None:
    """A second member gets its share, its leaving gives it back, and a later member reads only what came after."""
    topic = new_topic(partitions=PARTITIONS)
    readers = Readers(client, kafka.bootstrap, topic, tmp_path)
    with readers.member("first") as first, readers.member("second") as second, readers.member("third") as third:
        first.join()
        wait_shared(first)
        second.join()
        wait_shared(first, second)
        write(kafka.bootstrap, topic, range(40))
        wait_read(range(40), first, second)
        second.leave()
        wait_shared(first)
        write(kafka.bootstrap, topic, range(40, 80))
        wait_read(range(80), first, second)
        first.leave()
        assert committed_offsets(kafka.bootstrap, readers.group, {topic: PARTITIONS}) == {
            (topic, partition): 20 for partition in range(PARTITIONS)
        }
        write(kafka.bootstrap, topic, range(80, 90))
        third.join()
        wait_read(range(80, 90), third)
        third.leave()


@pytest.mark.parametrize("client", CLIENTS, ids=str)
def test_partitions_of_a_killed_member_are_taken_over_after_its_session(
    client: Client, kafka: KafkaUnderTest, new_topic: NewTopic, tmp_path: Path
) -> None:
    """Its closed connections mean nothing; when its heartbeats have stayed away, the others get its partitions."""
    topic = new_topic(partitions=PARTITIONS)
    readers = Readers(client, kafka.bootstrap, topic, tmp_path)
    session_ms = BROKER_SESSION_TIMEOUT_MS if client.protocol == "consumer" else SESSION_TIMEOUT_MS
    with readers.member("first") as first, readers.member("second") as second:
        first.join()
        second.join()
        wait_shared(first, second)
        write(kafka.bootstrap, topic, range(20))
        wait_read(range(20), first, second)
        second.kill()
        killed_at = time.monotonic()
        wait_shared(first)
        took_ms = (time.monotonic() - killed_at) * 1000
        assert took_ms > session_ms - 2 * HEARTBEAT_MS
        write(kafka.bootstrap, topic, range(20, 40))
        wait_read(range(40), first, second)
        first.leave()


@pytest.mark.parametrize("client", STATIC_CLIENTS, ids=str)
def test_a_static_member_that_comes_back_gets_its_partitions_without_a_rebalance(
    client: Client, kafka: KafkaUnderTest, new_topic: NewTopic, tmp_path: Path
) -> None:
    """KIP-345: the other member is not told of anything."""
    topic = new_topic(partitions=PARTITIONS)
    readers = Readers(client, kafka.bootstrap, topic, tmp_path)
    with (
        readers.member("first", instance_id="one") as first,
        readers.member("second", instance_id="two") as second,
        readers.member("second-again", instance_id="two") as again,
    ):
        first.join()
        second.join()
        wait_shared(first, second)
        write(kafka.bootstrap, topic, range(20))
        wait_read(range(20), first, second)
        assignment = second.assignment()
        changes = len(first.events("assigned")) + len(first.events("revoked"))
        again.wait_until(lambda: bool(again.events("ready")), "loaded")
        second.leave()
        again.join()
        again.wait_until(lambda: again.assignment() == assignment, "the owner of what it had")
        write(kafka.bootstrap, topic, range(20, 40))
        wait_read(range(40), first, second, again)
        assert len(first.events("assigned")) + len(first.events("revoked")) == changes, first.last_words()
        again.leave()
        first.leave()


@pytest.mark.parametrize("client", ONE_OF_EACH, ids=str)
def test_a_member_goes_to_the_offsets_of_a_time(
    client: Client, kafka: KafkaUnderTest, new_topic: NewTopic, tmp_path: Path
) -> None:
    """The broker finds the first offset at or after the time, and reading goes on from there."""
    topic = new_topic(partitions=PARTITIONS)
    for step in range(5):
        write(kafka.bootstrap, topic, range(step * 20, step * 20 + 20), timestamp_ms=1_700_000_000_000 + step * 1000)
    with Readers(client, kafka.bootstrap, topic, tmp_path).member("only") as only:
        only.join()
        wait_read(range(100), only)
        only.tell("seek", 1_700_000_002_001)
        only.wait_until(lambda: bool(only.events("sought")), "at the offsets of the time")
        assert only.events("sought") == [[f"{partition}:15" for partition in range(PARTITIONS)]]
        wait_read([*range(100), *range(60, 100)], only)
        only.leave()


@pytest.fixture(scope="module")
def creating_broker() -> Iterator[Broker]:
    """A broker as it is by default: topics come into being when they are asked for."""
    quick = {"group.initial.rebalance.delay.ms": 0, "group.min.session.timeout.ms": 100}
    with Broker(config={"num.partitions": PARTITIONS, **quick}) as broker:
        yield broker


@pytest.mark.parametrize("client", CREATING_CLIENTS, ids=str)
def test_a_topic_that_a_member_subscribes_to_is_created(
    client: Client, creating_broker: Broker, tmp_path: Path
) -> None:
    """With the number of partitions that the broker has for it, and the group gets them."""
    topic = f"made-{uuid.uuid4().hex[:8]}"
    with Readers(client, creating_broker.bootstrap, topic, tmp_path).member("only") as only:
        only.join()
        wait_shared(only)
        write(creating_broker.bootstrap, topic, range(20))
        wait_read(range(20), only)
        only.leave()


def test_a_topic_that_a_producer_writes_to_is_created(creating_broker: Broker) -> None:
    """The producer asks again until it is there, and its records arrive."""
    topic = f"made-{uuid.uuid4().hex[:8]}"
    write(creating_broker.bootstrap, topic, range(20))
    found = records_of(creating_broker.bootstrap, topic, PARTITIONS)
    assert {partition: list(map(int, values)) for partition, values in found.items()} == {
        partition: list(range(partition, 20, PARTITIONS)) for partition in range(PARTITIONS)
    }


def test_internal_topics_can_be_seen_and_read(kafka: KafkaUnderTest, new_topic: NewTopic, java_peer: JavaPeer) -> None:
    """Other tools find the offsets and the transactions where Kafka keeps them."""
    topic, name = new_topic(), f"internal-{uuid.uuid4().hex[:8]}"
    java_peer.produce(kafka.bootstrap, topic, [PeerRecord(value=b"1")], transactional_id=name)
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": name, "auto.offset.reset": "earliest"})
    try:
        consumer.subscribe([topic])
        message = consumer.poll(30)
        assert message is not None
        assert message.error() is None
        consumer.commit(asynchronous=False)
        assert set(consumer.list_topics(timeout=30).topics) >= INTERNAL
    finally:
        consumer.close()
    for internal in INTERNAL:
        keys = [record.key or b"" for record in java_peer.consume(kafka.bootstrap, internal)]
        assert any(name.encode() in key for key in keys), internal
