"""Sessions on every broker: a topic is copied exactly once while members come and go, by both protocols of groups."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from member_processes import Client, Member, java_program
from observer import committed_offsets, values_of
from targets import KafkaUnderTest, NewTopic

from semel.client.producer import Outcome
from semel.errors import Fenced
from semel.session.session import Session

PARTITIONS = 4
PROTOCOLS = [
    "range",
    "cooperative-sticky",
    pytest.param("consumer", marks=pytest.mark.needs("has_consumer_groups")),
]
WAIT_S = 60.0
JAVA_MEMBERS = [Client("java", protocol, java_program("Reader")) for protocol in ("eager", "cooperative", "consumer")]


class Scene:
    def __init__(self, kafka: KafkaUnderTest, new_topic: NewTopic, protocol: str) -> None:
        self.bootstrap = kafka.bootstrap
        self.source, self.target = new_topic(PARTITIONS), new_topic(PARTITIONS)
        self.group = f"{self.source}-group"
        self._protocol = protocol

    def session(self, instance: str, **more: Any) -> Session:
        settings: dict[str, object] = {"session.timeout.ms": 6_000, "heartbeat.interval.ms": 300, **more}
        if self._protocol == "consumer":
            settings["group.protocol"] = "consumer"
        else:
            settings["partition.assignment.strategy"] = self._protocol
        return Session(
            settings,
            bootstrap=self.bootstrap,
            group=self.group,
            topics=[self.source],
            name=self.group,
            instance=instance,
            transaction_records_max=50,
        )

    def write(self, numbers: range) -> None:
        producer = Producer({"bootstrap.servers": self.bootstrap})
        for number in numbers:
            producer.produce(self.source, str(number), key=str(number), partition=number % PARTITIONS)
        assert producer.flush(30) == 0

    def copied(self) -> Counter[int]:
        return Counter(int(value) for value in values_of(self.bootstrap, self.target, PARTITIONS))


def copy(session: Session, scene: Scene, timeout_ms: float = 200) -> int:
    with session.transaction(timeout_ms) as transaction:
        if not transaction.is_empty:
            transaction.send_table(scene.target, transaction.table)
    return transaction.table.num_rows if transaction.outcome is Outcome.COMMITTED else 0


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, f"not after {WAIT_S:g} s: {what}"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_topic_is_copied_once_while_members_come_and_go(
    kafka: KafkaUnderTest, new_topic: NewTopic, protocol: str
) -> None:
    """D1, D2: one member, then two, then the other one alone; the offsets are at the end."""
    scene = Scene(kafka, new_topic, protocol)
    scene.write(range(400))
    done = 0
    with scene.session("b") as second:
        with scene.session("a") as first:
            threads_done = threading.Event()

            def copy_on() -> None:
                nonlocal done
                while not threads_done.is_set():
                    done += copy(second, scene)

            beside = threading.Thread(target=copy_on)
            beside.start()
            try:
                mine = 0
                wait_until(lambda: copy(first, scene) >= 0 and len(first.partitions) == 2, "two partitions")
                scene.write(range(400, 600))
                while first.partitions and mine < 50:
                    mine += copy(first, scene)
            finally:
                threads_done.set()
                beside.join()
        scene.write(range(600, 700))
        wait_until(lambda: copy(second, scene) >= 0 and len(scene.copied()) == 700, "everything")
    assert scene.copied() == Counter(range(700))
    offsets = committed_offsets(scene.bootstrap, scene.group, {scene.source: PARTITIONS})
    assert offsets == {(scene.source, partition): 175 for partition in range(PARTITIONS)}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_transaction_aborts_when_its_partitions_are_asked_back(
    kafka: KafkaUnderTest, new_topic: NewTopic, protocol: str
) -> None:
    """D2, D3: the newcomer processes the records, and the one who had them leaves no trace."""
    scene = Scene(kafka, new_topic, protocol)
    scene.write(range(40))
    with scene.session("a") as first, scene.session("b") as second:
        transaction = first.transaction(20_000)
        with transaction:
            assert not transaction.is_empty
            transaction.send_table(scene.target, transaction.table)
            wait_until(lambda: copy(second, scene) > 0 or len(second.partitions) == 4, "records for the newcomer")
        wait_until(lambda: copy(first, scene) + copy(second, scene) >= 0 and len(scene.copied()) == 40, "everything")
    assert scene.copied() == Counter(range(40))


@pytest.mark.parametrize("client", JAVA_MEMBERS, ids=str)
@pytest.mark.parametrize("leader", ["semel", "java"])
def test_a_session_and_the_java_client_share_a_group(
    kafka: KafkaUnderTest, new_topic: NewTopic, tmp_path: Path, client: Client, leader: str
) -> None:
    """C5: whoever leads, each understands the other, and every record is read by one of them."""
    protocols = {"eager": "range", "cooperative": "cooperative-sticky", "consumer": "consumer"}
    scene = Scene(kafka, new_topic, protocols[client.protocol])
    settings = {
        "bootstrap": scene.bootstrap,
        "source": scene.source,
        "group": scene.group,
        "protocol": client.protocol,
        "session_timeout_ms": 6_000,
    }
    with Member("java", client, tmp_path, settings) as java, ExitStack() as stack:
        if leader == "java":
            java.join()
            java.wait_until(lambda: len(java.assignment()) == PARTITIONS, "partitions for the Java client")
        session = stack.enter_context(scene.session("a"))
        if leader == "semel":
            wait_until(lambda: copy(session, scene) >= 0 and len(session.partitions) == PARTITIONS, "all partitions")
            java.join()

        def is_shared() -> bool:
            copy(session, scene, 50)
            mine = [partition.partition for partition in session.partitions]
            return sorted([*mine, *java.assignment()]) == list(range(PARTITIONS)) and len(mine) == 2

        wait_until(is_shared, "two partitions for each")
        scene.write(range(100))
        read: set[int] = set()

        def has_all() -> bool:
            copy(session, scene)
            read.update(int(value) for values in java.events("read") for value in values)
            return read | set(scene.copied()) == set(range(100))

        wait_until(has_all, "every record, read by one or the other")
        assert not read & set(scene.copied())
        java.leave()
        wait_until(lambda: copy(session, scene) >= 0 and len(session.partitions) == PARTITIONS, "all partitions")


def test_a_session_whose_instance_is_started_again_is_fenced(kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
    """D5, B4: one clear error, and the successor goes on where the last commit was."""
    scene = Scene(kafka, new_topic, "range")
    scene.write(range(20))
    with scene.session("same") as first:
        wait_until(lambda: copy(first, scene) > 0, "the first records")
        with scene.session("same") as second:
            scene.write(range(20, 40))

            def commit_late() -> None:
                for _ in range(1_000):
                    copy(first, scene)

            with pytest.raises(Fenced):
                commit_late()
            first.close()
            wait_until(lambda: copy(second, scene) >= 0 and len(scene.copied()) == 40, "everything")
    assert scene.copied() == Counter(range(40))
