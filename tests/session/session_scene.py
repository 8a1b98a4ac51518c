"""An input, an output and sessions between them, on an embedded broker of either transaction protocol."""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from semel.client.admin import Admin
from semel.client.fetcher import Fetcher
from semel.client.producer import Producer
from semel.session.session import Session

BROKER_CONFIG = {
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "300",
    "group.consumer.min.session.timeout.ms": "300",
    "group.consumer.session.timeout.ms": "3000",
    "group.consumer.min.heartbeat.interval.ms": "50",
    "group.consumer.heartbeat.interval.ms": "100",
}
GROUP_PROTOCOLS = ["range", "cooperative-sticky", "consumer"]
WAIT_S = 30.0


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not after {timeout_s:g} s: {what}"
        time.sleep(0.01)


@contextmanager
def once_logged(caplog: pytest.LogCaptureFixture, words: str, action: Callable[[], object]) -> Iterator[None]:
    """In the block, `action` runs in another thread as soon as the log has these words, or after `WAIT_S` without."""

    def act() -> None:
        try:
            wait_until(lambda: words in caplog.text, f"{words!r} in the log")
        finally:
            action()

    thread = threading.Thread(target=act)
    thread.start()
    try:
        yield
    finally:
        thread.join()


class Pipeline:
    """Topics `in` and `out` of its own, and a group."""

    def __init__(self, bootstrap: str, protocol: str = "cooperative-sticky", partitions: int = 2) -> None:
        self.bootstrap = bootstrap
        self.protocol = protocol
        self.partitions = partitions
        name = uuid.uuid4().hex[:8]
        self.source, self.target, self.group = f"in-{name}", f"out-{name}", f"group-{name}"
        with Admin({"bootstrap.servers": bootstrap}) as admin:
            admin.create_topics(self.source, partitions=partitions)
            admin.create_topics(self.target, partitions=partitions)

    def session(self, instance: str | None = None, **more: Any) -> Session:
        options: dict[str, Any] = {
            "bootstrap": self.bootstrap,
            "group": self.group,
            "topics": [self.source],
            "name": self.group,
            "instance": instance,
            "session_timeout_ms": 3_000,
            "heartbeat_interval_ms": 100,
            "fetch_max_wait_ms": 50,
        }
        if self.protocol == "consumer":
            options["group_protocol"] = "consumer"
        else:
            options["partition_assignment_strategy"] = self.protocol
        return Session(**{**options, **more})

    def write(self, numbers: Iterable[int], partition: int | None = None) -> None:
        """Number n goes into partition n modulo their count, unless one is named."""
        with Producer(bootstrap_servers=self.bootstrap) as producer:
            for number in numbers:
                where = number % self.partitions if partition is None else partition
                producer.send(self.source, str(number).encode(), key=f"k{number % 7}".encode(), partition=where)
            producer.flush()

    def read(self, topic: str | None = None, *, partitions: int | None = None) -> list[dict[str, Any]]:
        """Everything that a reader of committed records sees, partition by partition in order."""
        topic, partitions = topic or self.target, partitions or self.partitions
        with Fetcher({"bootstrap.servers": self.bootstrap}) as fetcher:
            fetcher.assign({(topic, partition): "earliest" for partition in range(partitions)})
            return [row for table in fetcher.read_until(fetcher.end_offsets()) for row in table.to_pylist()]

    def counts(self) -> Counter[int]:
        return Counter(int(row["value"]) for row in self.read())

    def committed(self) -> dict[int, int]:
        with Admin({"bootstrap.servers": self.bootstrap}) as admin:
            offsets = admin.committed_offsets(self.group)
        return {partition.partition: found.offset for partition, found in offsets.items()}

    def open_transactions(self) -> list[str]:
        with Admin({"bootstrap.servers": self.bootstrap}) as admin:
            listed = admin.list_transactions()
        return [
            one.transactional_id
            for one in listed
            if one.state == "Ongoing" and one.transactional_id.startswith(self.group)
        ]


def copy_turn(session: Session, pipeline: Pipeline, timeout_ms: float = 1_000) -> int:
    """One transaction that copies what it reads; how many records were committed."""
    with session.transaction(timeout_ms) as transaction:
        if not transaction.is_empty:
            transaction.send_table(pipeline.target, transaction.table)
    committed = transaction.outcome is not None and transaction.outcome.value == "committed"
    return transaction.table.num_rows if committed else 0


def copy_all(session: Session, pipeline: Pipeline, count: int) -> None:
    """Copy until so many records were committed by this session."""
    copied, deadline = 0, time.monotonic() + WAIT_S
    while copied < count:
        assert time.monotonic() < deadline, f"{copied} of {count} records"
        copied += copy_turn(session, pipeline, 200)
