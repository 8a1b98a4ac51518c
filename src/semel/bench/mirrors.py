"""Mirrors to measure side by side: Semel's, and MirrorMaker 2 with exactly-once, each as a process of its own."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from semel.processes import spawn
from semel.testing.apache_kafka import LATEST
from semel.testing.kafka_node import FULL_SPEED
from semel.testing.maven import jars, java_command

TUNING: Final = {
    "tasks.max": "2",
    "A.consumer.isolation.level": "read_committed",
    "A.consumer.max.poll.records": "20000",
    "A.consumer.fetch.max.bytes": "52428800",
    "A.consumer.max.partition.fetch.bytes": "8388608",
    "B.producer.batch.size": "1000000",
    "B.producer.max.request.size": "1048576",
    "B.producer.linger.ms": "5",
}
"""Large fetches and batches, as its own users advise; each poll is a transaction (transaction.boundary=poll)."""

_SETTINGS: Final = {
    "clusters": "A, B",
    "A->B.enabled": "true",
    "B->A.enabled": "false",
    "A.exactly.once.source.support": "enabled",
    "B.exactly.once.source.support": "enabled",
    "dedicated.mode.enable.internal.rest": "true",
    "listeners": "http://127.0.0.1:0",
    "replication.policy.class": "org.apache.kafka.connect.mirror.IdentityReplicationPolicy",
    "sync.topic.acls.enabled": "false",
    "replication.factor": "1",
    "checkpoints.topic.replication.factor": "1",
    "heartbeats.topic.replication.factor": "1",
    "offset-syncs.topic.replication.factor": "1",
    "offset.storage.replication.factor": "1",
    "status.storage.replication.factor": "1",
    "config.storage.replication.factor": "1",
}
_SEMEL: Final = "import json, sys, semel; semel.mirror(**json.loads(sys.argv[1]))"


@contextmanager
def semel_mirror(source: str, target: str, topic: str) -> Iterator[None]:
    """`semel.mirror` at its defaults."""
    options = {"name": f"bench-{topic}", "source": source, "target": target, "topics": [topic]}
    with _running([sys.executable, "-c", _SEMEL, json.dumps(options)]):
        yield


@contextmanager
def mirror_maker(source: str, target: str, topic: str) -> Iterator[None]:
    """MirrorMaker 2 in its dedicated mode, exactly once."""
    settings = {
        **_SETTINGS,
        **TUNING,
        "A.bootstrap.servers": source,
        "B.bootstrap.servers": target,
        "A->B.topics": topic,
        # Each turn has state of its own, so that none begins by looking for the last one's workers.
        "B.group.id": topic,
        "A.group.id": f"{topic}-back",
    }
    folder = jars(
        f"kafka-mirror/{LATEST}", [f"org.apache.kafka:connect-mirror:{LATEST}", "org.slf4j:slf4j-simple:1.7.36"]
    )
    with tempfile.TemporaryDirectory(prefix="semel-bench-") as home:
        file = Path(home) / "mirror.properties"
        file.write_text("".join(f"{name} = {value}\n" for name, value in settings.items()))
        command = [java_command(), *FULL_SPEED, "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"]
        with _running([*command, "-cp", f"{folder}/*", "org.apache.kafka.connect.mirror.MirrorMaker", str(file)]):
            yield


@contextmanager
def _running(command: list[str]) -> Iterator[None]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="semel-bench-")))
        process = spawn(command, folder=folder, output=folder / "log")
        stack.callback(process.wait)
        stack.callback(process.kill)
        yield
