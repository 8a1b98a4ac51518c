"""When the broker syncs, and in which thread."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from semel.broker.durability import Durability, Fsync
from semel.broker.storage.data_directory import DataDirectory
from semel.broker.storage.disk import RealDisk
from semel.broker.storage.log_settings import LogSettings
from semel.client.admin import Admin
from semel.client.fetcher import Fetcher
from semel.client.partitions import TopicPartition
from semel.client.producer import Producer
from semel.testing.embedded import EmbeddedBroker
from semel.testing.simulated_disk import SimulatedDisk

TOPIC = "orders"


class WatchedDisk(RealDisk):
    """Notes which thread syncs, and takes as long for it as the test's own time says."""

    def __init__(self) -> None:
        self.sync_s = 0.0
        self.now_s = 0.0
        self.threads: list[threading.Thread] = []

    def sync(self, path: str) -> None:
        self.threads.append(threading.current_thread())
        self.now_s += self.sync_s


def test_a_quick_disk_is_waited_for_in_place_and_a_slow_one_in_a_thread(tmp_path: Path) -> None:
    """Handing a sync over costs more than a quick one takes; a slow one must not keep other clients waiting."""
    disk = WatchedDisk()

    async def sync(count: int) -> list[bool]:
        """Whether each of these syncs was in place."""
        disk.threads.clear()
        for _ in range(count):
            partition.append_records([(b"key", b"value")], now_ms=0)
            await durability.wait_committed([partition])
        return [thread is threading.current_thread() for thread in disk.threads]

    async def run() -> None:
        assert not (await sync(1))[0], "nobody knows yet how long it takes"
        assert (await sync(60))[-1]
        disk.sync_s = 0.005
        assert not (await sync(5))[-1]
        disk.sync_s = 0.0001
        assert (await sync(60))[-1]
        await durability.close()

    durability = Durability(Fsync.COMMIT, lambda error: pytest.fail(str(error)), timer=lambda: disk.now_s)
    directory = DataDirectory(str(tmp_path), disk)
    partition = directory.open_partition(TOPIC, 0, LogSettings(), now_ms=0)
    asyncio.run(run())
    partition.close()
    directory.close()


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


@pytest.mark.parametrize("version", [0, 1, 2])
def test_what_a_committed_transaction_consumed_survives_a_power_cut_with_it(version: int) -> None:
    """Or its position would stand behind the end of the log, and what comes there would never be consumed."""
    for seed in range(10):
        disk = SimulatedDisk()
        with EmbeddedBroker(disk=disk, config={"transaction.version": str(version)}) as broker:
            to = {"bootstrap.servers": broker.bootstrap}
            with Admin(to) as admin:
                admin.create_topics("in", partitions=2)
                admin.create_topics("out", partitions=1)
            with Producer(to) as plain, Producer(to, transactional_id="copier") as copier:
                for number in range(3):
                    plain.send("in", f"{number}".encode(), partition=number % 2)
                plain.flush()
                with copier.transaction():
                    copier.send("out", b"copies", partition=0)
                    copier.send_offsets({TopicPartition("in", 0): 2, TopicPartition("in", 1): 1}, "group")
            broker.crash()
            broker.restart(disk=disk.reboot(power_cut=True, seed=seed), power_was_cut=True)
            with Fetcher(to) as fetcher:
                fetcher.assign({("in", 0): "earliest", ("in", 1): "earliest"})
                tables = list(fetcher.read_until(fetcher.end_offsets()))
        values = [value for table in tables for value in table["value"].to_pylist()]
        assert sorted(values) == [b"0", b"1", b"2"], f"seed {seed}"
