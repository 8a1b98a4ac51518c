"""When the broker syncs, and in which thread."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from semel.broker.storage.disk import RealDisk
from semel.client.admin import Admin
from semel.client.producer import Producer
from semel.testing.embedded import EmbeddedBroker

TOPIC = "orders"


class WatchedDisk(RealDisk):
    """Notes which thread syncs, and can be slow."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.threads: list[str] = []

    def sync(self, path: str) -> None:
        self.threads.append(threading.current_thread().name)
        time.sleep(self.delay_s)  # instead of a real sync, whose time is the machine's


def commit(producer: Producer, count: int) -> None:
    for _ in range(count):
        with producer.transaction():
            producer.send(TOPIC, b"value", partition=0)


def test_a_quick_disk_is_waited_for_in_place_and_a_slow_one_in_a_thread(tmp_path: Path) -> None:
    """Handing a sync over costs more than a quick one takes; a slow one must not keep other clients waiting."""
    disk = WatchedDisk()
    with EmbeddedBroker(data=tmp_path / "data", disk=disk) as broker:
        with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            admin.create_topics(TOPIC, partitions=1)
        with Producer(bootstrap_servers=broker.bootstrap, transactional_id="t") as producer:
            commit(producer, 40)
            assert not disk.threads[-1].startswith("semel-disk")
            disk.delay_s = 0.005
            commit(producer, 5)
            assert disk.threads[-1].startswith("semel-disk")


def test_closed_segments_are_synced_though_nobody_waits_for_them(tmp_path: Path) -> None:
    """What is synced need not be looked through after a crash, however long the log."""
    with EmbeddedBroker(data=tmp_path / "data", fsync="never") as broker:
        with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            admin.create_topics(TOPIC, partitions=1, config={"internal.segment.bytes": "2000"})
        with Producer(bootstrap_servers=broker.bootstrap) as producer:
            for _ in range(50):
                producer.send(TOPIC, b"x" * 200, partition=0)
                producer.flush()

        def recovery_point() -> tuple[int, int]:
            partition = broker.broker.partition(TOPIC, 0)
            assert partition is not None
            return partition.checkpoint.recovery_point, partition.segments[-1].base_offset

        deadline = time.monotonic() + 10
        while (found := broker.call(recovery_point))[0] < found[1]:
            assert time.monotonic() < deadline, found
            time.sleep(0.02)
        assert found[1] > 0
