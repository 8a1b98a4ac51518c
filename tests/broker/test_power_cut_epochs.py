"""After a power cut that took readable records, readers are told by the leader epoch, and go back to what is there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import confluent_kafka
import pytest
from kio.schema.errors import ErrorCode

from semel.broker.storage.failures import StorageError
from semel.client.admin import Admin
from semel.client.fetcher import Fetcher
from semel.client.producer import Producer
from semel.errors import OffsetOutOfRange
from semel.testing.embedded import EmbeddedBroker
from semel.testing.simulated_disk import SimulatedDisk
from semel.verify.chaos_reading import ask
from semel.wire.api import Api

TOPIC = "orders"
KEPT, LOST, NEW = 3, 4, 9


class Scene:
    """A broker on a disk that can lose what was not synced, with a topic of one partition."""

    def __init__(self) -> None:
        self.disk = SimulatedDisk(seed=1)
        self.disk.make_directory("data")
        self.disk.sync_directory("")
        self.broker = EmbeddedBroker(disk=self.disk)

    def put(self, kind: str, count: int) -> None:
        with Producer(bootstrap_servers=self.broker.bootstrap) as producer:
            for number in range(count):
                producer.send(TOPIC, f"{kind} {number}".encode(), partition=0)

    def cut_power(self) -> None:
        self.broker.crash()
        self.disk = self.disk.reboot(power_cut=True, seed=1)
        self.broker.restart(disk=self.disk, power_was_cut=True)

    def leader_epoch(self) -> int:
        with Admin({"bootstrap.servers": self.broker.bootstrap}) as admin:
            return admin.describe_topics(TOPIC)[TOPIC].partitions[0].leader_epoch

    def end_of_epoch(self, epoch: int, current: int = -1) -> tuple[ErrorCode, int, int]:
        partition = {"partition": 0, "current_leader_epoch": current, "leader_epoch": epoch}
        topics = [{"topic": TOPIC, "partitions": [partition]}]
        answer = ask(self.broker.bootstrap, Api.OFFSET_FOR_LEADER_EPOCH, 4, replica_id=-1, topics=topics)
        [found] = answer.topics[0].partitions
        return found.error_code, found.leader_epoch, found.end_offset


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    with made.broker as broker:
        with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            admin.create_topics(TOPIC, partitions=1)
        made.put("kept", KEPT)
        broker.restart()  # a clean stop syncs everything
        made.put("lost", LOST)
        yield made


def values(fetcher: Fetcher) -> list[str]:
    return [value.decode() for records in fetcher.fetch(2_000) for value in records.table["value"].to_pylist()]


def read_all(fetcher: Fetcher, count: int) -> list[str]:
    found: list[str] = []
    for _ in range(10):
        found += values(fetcher)
        if len(found) >= count:
            return found
    raise AssertionError(f"only {found} came")


def test_only_a_power_cut_raises_the_leader_epoch(scene: Scene) -> None:
    """A stop and a kill lose nothing that was readable; the history of epochs outlives every kind of restart."""
    assert scene.leader_epoch() == 0
    scene.broker.crash()
    scene.broker.restart()
    assert (scene.leader_epoch(), scene.end_of_epoch(0)) == (0, (ErrorCode.none, 0, KEPT + LOST))
    scene.put("lost", 1)
    scene.cut_power()
    assert scene.leader_epoch() == 1
    kept = scene.end_of_epoch(0)[2]
    assert KEPT <= kept <= KEPT + LOST + 1
    scene.put("new", NEW)
    for end in (scene.broker.stop, scene.broker.crash):
        end()
        scene.broker.restart()
        assert scene.leader_epoch() == 1
        assert scene.end_of_epoch(0) == (ErrorCode.none, 0, kept)
        assert scene.end_of_epoch(1) == (ErrorCode.none, 1, kept + NEW)
        assert scene.end_of_epoch(2) == (ErrorCode.none, -1, -1)
    assert scene.end_of_epoch(0, current=0)[0] is ErrorCode.fenced_leader_epoch
    assert scene.end_of_epoch(0, current=2)[0] is ErrorCode.unknown_leader_epoch


def test_a_reader_goes_back_to_where_the_lost_records_were(scene: Scene) -> None:
    """Other records stand where it had read: without the epoch it would go on behind them and never see them."""
    settings = {"bootstrap.servers": scene.broker.bootstrap, "auto.offset.reset": "earliest"}
    with Fetcher(settings) as fetcher:
        fetcher.assign({(TOPIC, 0): 0})
        read_all(fetcher, KEPT + LOST)
        fetcher.assign(fetcher.positions)  # as when a group gives it one more partition
        scene.cut_power()
        kept = scene.end_of_epoch(0)[2]
        assert kept < KEPT + LOST, "the power cut took nothing, so this proves nothing"
        scene.put("new", NEW)
        assert read_all(fetcher, NEW) == [f"new {number}" for number in range(NEW)]


def test_a_reader_without_a_reset_is_told_what_it_lost(scene: Scene) -> None:
    """Each time it asks, until it seeks: then it reads what is there now."""
    with Fetcher({"bootstrap.servers": scene.broker.bootstrap}) as fetcher:
        fetcher.assign({(TOPIC, 0): 0})
        read_all(fetcher, KEPT + LOST)
        scene.cut_power()
        kept = scene.end_of_epoch(0)[2]
        scene.put("new", NEW)
        for _ in range(2):
            with pytest.raises(OffsetOutOfRange, match=f"only up to offset {kept}"):
                read_all(fetcher, 1)
        fetcher.seek(TOPIC, 0, kept)
        assert read_all(fetcher, NEW) == [f"new {number}" for number in range(NEW)]


def test_a_reader_whose_records_are_all_there_goes_on(scene: Scene) -> None:
    """The new leader is asked, has everything, and nothing is read twice."""
    with Fetcher({"bootstrap.servers": scene.broker.bootstrap}) as fetcher:
        fetcher.assign({(TOPIC, 0): 0})
        read_all(fetcher, KEPT + LOST)
        scene.broker.restart()
        scene.cut_power()
        assert scene.end_of_epoch(0)[2] == KEPT + LOST
        scene.put("new", NEW)
        assert read_all(fetcher, NEW) == [f"new {number}" for number in range(NEW)]


def test_librdkafka_notices_the_lost_records_too(scene: Scene) -> None:
    """A client of somebody else validates its position by the same epochs and sees every new record."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": scene.broker.bootstrap,
            "group.id": "g",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "reconnect.backoff.max.ms": 200,
        }
    )
    try:
        consumer.assign([confluent_kafka.TopicPartition(TOPIC, 0, 0)])
        seen: list[str] = []

        def poll_until(done: int) -> None:
            while sum(value.startswith("new") for value in seen) < done or len(seen) < KEPT + LOST:
                message = consumer.poll(10)
                assert message is not None, seen
                if message.error() is None:
                    seen.append((message.value() or b"").decode())

        poll_until(0)
        scene.cut_power()
        scene.put("new", NEW)
        poll_until(NEW)
    finally:
        consumer.close()
    assert [value for value in seen if value.startswith("new")] == [f"new {number}" for number in range(NEW)]


def test_a_disk_too_full_for_the_epoch_delays_it_and_nothing_else(scene: Scene) -> None:
    """Records are served under the new epoch; until it is stored, every next start comes to the same one."""
    scene.broker.crash()
    scene.disk = scene.disk.reboot(power_cut=False)
    scene.disk.free_bytes = 0
    scene.broker.restart(disk=scene.disk, power_was_cut=True)
    assert scene.leader_epoch() == 1
    scene.broker.crash()
    scene.disk = scene.disk.reboot(power_cut=False)
    scene.broker.restart(disk=scene.disk)
    assert scene.leader_epoch() == 1
    scene.disk.free_bytes = -1
    scene.broker.restart()
    assert scene.leader_epoch() == 1


def test_a_damaged_epoch_is_an_error_and_not_a_guess(tmp_path: Path) -> None:
    """A lower epoch than clients have seen would keep them waiting for ever."""
    broker = EmbeddedBroker(data=tmp_path)
    with broker:
        pass
    (tmp_path / "leader_epoch.meta").write_bytes(b"\xff")
    with pytest.raises(StorageError, match=r"leader_epoch\.meta .* is damaged"):
        broker.start()
