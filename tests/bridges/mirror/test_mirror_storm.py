"""Transactions over 12 partitions are mirrored while mirror, source and target are killed, and a reader watches.

CI size by default. The bar, and other clusters, by the environment:

    SEMEL_MIRROR_TRANSACTIONS=20000 pytest -m chaos tests/bridges/mirror/test_mirror_storm.py
    SEMEL_MIRROR_SOURCE=3.9.2 SEMEL_MIRROR_TARGET=4.3.0 ...   (releases of Apache Kafka)
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, TopicPartition
from mirror_scene import Scene, Writer, records, settings
from session_scene import wait_until

import semel
from semel.testing.apache_kafka import ApacheKafka

pytestmark = pytest.mark.chaos

TRANSACTIONS = int(os.environ.get("SEMEL_MIRROR_TRANSACTIONS", "600"))
KILLS = int(os.environ.get("SEMEL_MIRROR_KILLS", str(max(6, TRANSACTIONS // 200))))
SOURCE = os.environ.get("SEMEL_MIRROR_SOURCE", "embedded")
TARGET = os.environ.get("SEMEL_MIRROR_TARGET", "embedded")
HALF_S = 30.0
"""How long a reader may have seen a part of a transaction only: markers reach partitions one by one."""
WRITERS = 3


class Embedded:
    """`semel.Broker` with the verbs of the storm."""

    def __init__(self) -> None:
        self.broker = semel.Broker(fsync="never")

    @property
    def bootstrap(self) -> str:
        return self.broker.bootstrap

    def crash(self) -> None:
        self.broker.kill()
        self.broker.restart()


class Apache:
    """One node of Apache Kafka with the verbs of the storm."""

    def __init__(self, kafka: ApacheKafka) -> None:
        self.kafka = kafka

    @property
    def bootstrap(self) -> str:
        return self.kafka.bootstrap

    def crash(self) -> None:
        self.kafka.node(0).kill()
        self.kafka.node(0).start()


@contextmanager
def cluster(kind: str) -> Iterator[Embedded | Apache]:
    if kind == "embedded":
        embedded = Embedded()
        with embedded.broker:
            yield embedded
    else:
        with ApacheKafka(kind) as kafka:
            yield Apache(kafka)


class Watch:
    """A reader of committed records at the target that never stops, and what it has seen of each transaction."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._stop = threading.Event()
        self._missing: dict[str, Any] = {}
        self._since: dict[str, float] = {}
        self.records = 0
        self.longest_half_s = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)

    def _run(self) -> None:
        consumer = Consumer(
            settings(self._scene.target, group_id="watch", isolation_level="read_committed", enable_auto_commit=False)
        )
        named = [(topic, number) for topic, count in self._scene.topics.items() for number in range(count)]
        consumer.assign([TopicPartition(*one, OFFSET_BEGINNING) for one in named])
        while not self._stop.is_set():
            message = consumer.poll(0.1)
            if message is not None and message.error() is None:
                self._note(json.loads(message.value() or b""))
        consumer.close()

    def _note(self, value: dict[str, Any]) -> None:
        self.records += 1
        name = value["transaction"]
        left = self._missing[name] = self._missing.get(name, value["of"]) - 1
        assert left >= 0, f"{name} has more records than it wrote"
        now = time.monotonic()
        since = self._since.setdefault(name, now)
        if left == 0:
            self.longest_half_s = max(self.longest_half_s, now - since)
            del self._since[name]

    @property
    def halves(self) -> list[str]:
        """Transactions of which a part has been visible for too long."""
        now = time.monotonic()
        return [name for name, since in list(self._since.items()) if now - since > HALF_S]


def write(scene: Scene, rng: random.Random, count: int, protocol: int, done: Callable[[], None]) -> None:
    """So many transactions; a writer whose broker was killed is replaced by a new one."""
    written = 0
    while written < count:
        with suppress(semel.SemelError, KafkaException):
            writer = Writer(scene.source, scene.topics, rng, protocol=protocol)
            while written < count:
                writer.write()
                written += 1
                done()
            writer.close()


class MirrorProcess:
    """`semel mirror`, started again after every kill."""

    def __init__(self, scene: Scene, log: Path) -> None:
        self._command = [
            str(Path(sys.executable).parent / "semel"),
            *("mirror", "--from", scene.source, "--to", scene.target, "--name", scene.name),
            *("--topics", f"{scene.prefix}.*", "--retry-s", "120"),
        ]
        self._log = log.open("ab")
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self.start()

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        time.sleep(1)
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        status = self._process.wait(60)
        self._log.close()
        assert status in (143, -signal.SIGTERM), status


def test_no_reader_sees_half_a_transaction_whatever_is_killed(rng: random.Random, tmp_path: Path) -> None:
    """H2: a third of the transactions aborted, both protocols; equality of all records at the end."""
    with cluster(SOURCE) as source, cluster(TARGET) as target:
        scene = Scene(source.bootstrap, target.bootstrap)
        for name in ("orders", "items", "payments"):
            topic = scene.create(name, 4)
            with semel.Admin(settings(scene.target)) as admin:
                admin.create_topics(topic, partitions=4)
        log = tmp_path / "mirror.log"
        mirror = MirrorProcess(scene, log)
        written = 0

        def count_one() -> None:
            nonlocal written
            written += 1

        threads = [
            threading.Thread(
                target=write,
                args=(scene, random.Random(rng.random()), TRANSACTIONS // WRITERS, 1 + number % 2, count_one),
                daemon=True,
            )
            for number in range(WRITERS)
        ]
        with Watch(scene) as watch:
            for thread in threads:
                thread.start()
            for number in range(KILLS):
                until = (number + 1) * TRANSACTIONS // (KILLS + 2)
                wait_until(lambda n=until: written >= n, f"{until} transactions", timeout_s=1200)
                [mirror.kill, mirror.pause, target.crash, mirror.kill, source.crash][number % 5]()
                assert not watch.halves
            for thread in threads:
                thread.join()
            mirror.end()
            scene.mirror()
            scene.assert_equal()
            scene.assert_whole()
            total = _records(scene)
            wait_until(lambda: watch.records == total, "everything seen", timeout_s=120)
            assert not watch._since
        half = watch.longest_half_s
        print(f"{written} transactions, {total} records, {KILLS} kills; half visible for {half:.3f} s at most")


def _records(scene: Scene) -> int:
    return sum(len(found) for topic in scene.topics for found in records(scene.target, topic).values())
