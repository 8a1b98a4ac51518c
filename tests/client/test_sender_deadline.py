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
        self.sent = 0
        self._sleep_s = sleep_s

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def patience(self, budget_ms: float) -> Patience:
        return Patience(budget_ms, 1, 1, self.clock)

    def leader(self, topic: str, partition: int) -> Leader:
        return Leader(1, 0)

    def connection(self, node: int) -> None:
        self.now += self._sleep_s

    def submit(self, *_: Any, **__: Any) -> Any:
        self.sent += 1
        raise RuntimeError("sent")


def make_sender(cluster: SleepyCluster) -> Sender:
    config = ProducerConfig(transactional_id="id", delivery_timeout_ms=8_000)
    sender = Sender(cast(Cluster, cluster), config, identity=ProducerIdentity(7, 0))
    data = memoryview(bytearray(encode_batch([Record(0, 0, None, b"value")])))
    sender.enqueue("t", 0, EncodedBatch(data, 1))
    return sender


def test_a_batch_does_not_leave_after_its_time() -> None:
    """A leader may have forgotten the producer by then, and would store a repeat a second time."""
    cluster = SleepyCluster(sleep_s=25)
    sender = make_sender(cluster)
    with pytest.raises(RequestTimedOut, match="not acknowledged within 8000 ms"):
        sender.drain()
    assert (cluster.sent, sender.buffered_bytes) == (0, 0)


def test_a_batch_leaves_in_its_time() -> None:
    """The other side of it: a slow connection alone is no reason to give up."""
    cluster = SleepyCluster(sleep_s=7)
    with pytest.raises(RuntimeError, match="sent"):
        make_sender(cluster).drain()
    assert cluster.sent == 1
