"""No batch leaves after its delivery time-out, however long something else has taken."""

from __future__ import annotations

from typing import Any, cast

import pytest

from semel.client.cluster import Cluster, Leader
from semel.client.config import ClientConfig, ProducerConfig
from semel.client.ownership import ProducerIdentity
from semel.client.retry import Patience
from semel.client.sender import Sender
from semel.errors import RequestTimedOut
from semel.records import EncodedBatch
from semel.records.reference import Record, encode_batch


class SleepyCluster:
    """A machine that sleeps while a connection is being opened."""

    def __init__(self, sleep_s: float) -> None:
        self.config = ClientConfig(bootstrap=(("broker", 9092),))
        self.now = 0.0
        self.sent: list[list[int]] = []
        self._sleep_s = sleep_s

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def patience(self, budget_ms: float) -> Patience:
        return Patience(budget_ms, 1, 1, self.clock)

    def known_leaders(self, topic: str) -> dict[int, Leader]:
        return {0: Leader(1, 0)}

    def leader(self, topic: str, partition: int) -> Leader:
        return Leader(1, 0)

    def connection(self, node: int) -> None:
        self.now += self._sleep_s
        self._sleep_s = 0.0

    def submit(self, *_: Any, **request: Any) -> Any:
        [topic] = request["topic_data"]
        self.sent.append([data["index"] for data in topic["partition_data"]])

    def wait_any(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("no answer comes")


def make_sender(cluster: SleepyCluster) -> Sender:
    config = ProducerConfig(transactional_id="id", delivery_timeout_ms=8_000)
    sender = Sender(cast(Cluster, cluster), config, identity=ProducerIdentity(7, 0))
    enqueue(sender, 0)
    return sender


def enqueue(sender: Sender, partition: int) -> None:
    data = memoryview(bytearray(encode_batch([Record(0, 0, None, b"value")])))
    sender.enqueue("t", partition, EncodedBatch(data, 1))


def test_a_batch_does_not_leave_after_its_time() -> None:
    """A leader may have forgotten the producer by then, and would store a repeat a second time."""
    cluster = SleepyCluster(sleep_s=25)
    sender = make_sender(cluster)
    with pytest.raises(RequestTimedOut, match="not acknowledged within 8000 ms"):
        sender.drain()
    assert (cluster.sent, sender.buffered_bytes) == ([], 0)


def test_nothing_leaves_behind_a_batch_whose_time_was_over() -> None:
    """Its transaction is lost with it, and the leader would find a gap in the sequences."""
    cluster = SleepyCluster(sleep_s=7)
    sender = make_sender(cluster)
    cluster.now = 4.0
    enqueue(sender, 0)
    enqueue(sender, 1)
    with pytest.raises(RuntimeError, match="no answer comes"):
        sender.drain()
    assert cluster.sent == [[1]]


def test_a_batch_leaves_in_its_time() -> None:
    """The other side of it: a slow connection alone is no reason to give up."""
    cluster = SleepyCluster(sleep_s=7)
    with pytest.raises(RuntimeError, match="no answer comes"):
        make_sender(cluster).drain()
    assert cluster.sent == [[0]]
