"""Batches of many megabytes go to the disk and back in another thread: in order, whole, and durable when answered."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from load_attacks import bomb, configured, frame_of, look_up_time, record_with_headers, store

from semel.broker.handlers import k00_produce
from semel.broker.process import Broker
from semel.broker.storage.disk import RealDisk
from semel.records import reference
from semel.records.layout import iter_batches
from semel.testing.embedded import EmbeddedBroker
from semel.verify.hostile_sockets import ask, read_frame
from semel.wire.api import Api

SIZE = 6 << 20


class HangingDisk(RealDisk):
    """A disk that takes no large write while `is_free` is not set."""

    def __init__(self) -> None:
        self.is_free = threading.Event()
        self.is_hanging = threading.Event()

    def write(self, handle: int, buffers: Any, position: int) -> int:
        if sum(map(len, buffers)) > k00_produce.STAGED_BYTES_MIN and not self.is_free.is_set():
            self.is_hanging.set()
            assert self.is_free.wait(30)
        return super().write(handle, buffers, position)


@pytest.fixture
def disk() -> HangingDisk:
    return HangingDisk()


@pytest.fixture
def broker(disk: HangingDisk, tmp_path: Path) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(data=tmp_path, disk=disk) as broker:
        yield broker


def connect(bootstrap: str) -> socket.socket:
    host, _, port = bootstrap.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def batch_of(value: bytes, **fields: Any) -> bytes:
    return reference.encode_batch([reference.Record(0, 1_000, b"k", value)], **fields)


def produce_frame(batch: bytes) -> bytes:
    data = [{"name": "t", "partition_data": [{"index": 0, "records": batch}]}]
    return frame_of(Api.PRODUCE, 7, transactional_id=None, acks=1, timeout=30_000, topic_data=data)


def stored(client: socket.socket, batch: bytes) -> tuple[int, int]:
    answer = store(client, "t", batch).responses[0].partition_responses[0]
    return answer.error_code, answer.base_offset


def fetch(client: socket.socket, offset: int, *, isolation_level: int = 0) -> Any:
    part = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": 1 << 20}
    limits = {"replica_id": -1, "max_wait": 0, "min_bytes": 1, "max_bytes": 1 << 20, "isolation_level": isolation_level}
    answer = ask(client, Api.FETCH, 4, **limits, topics=[{"topic": "t", "partitions": [part]}])
    return answer.responses[0].partitions[0]


def values_from(client: socket.socket, offset: int, end: int) -> list[bytes]:
    found: list[bytes] = []
    while offset < end:
        for header, batch in iter_batches(fetch(client, offset).records):
            found += [record.value or b"" for record in reference.decode_batch(batch)[1]]
            offset = header.last_offset + 1
    return found


def test_others_write_to_the_same_partition_while_a_large_batch_is_on_its_way(
    broker: EmbeddedBroker, disk: HangingDisk
) -> None:
    """Small batches are stored and read meanwhile. The large one comes behind them, and all are there after a kill."""
    large, small = os.urandom(SIZE), [b"%d" % number for number in range(10)]
    with closing(connect(broker.bootstrap)) as client, closing(connect(broker.bootstrap)) as other:
        configured(client, "t", max_message_bytes=2 * SIZE)
        assert stored(other, batch_of(small[0])) == (0, 0)
        client.sendall(produce_frame(batch_of(large)))
        assert disk.is_hanging.wait(30)
        for number in range(1, 10):
            assert stored(other, batch_of(small[number])) == (0, number)
        assert values_from(other, 0, 10) == small
        disk.is_free.set()
        assert read_frame(client) is not None
        assert stored(other, batch_of(b"behind")) == (0, 11)
        assert values_from(client, 0, 12) == [*small, large, b"behind"]
    broker.crash()
    broker.restart()
    with closing(connect(broker.bootstrap)) as client:
        assert values_from(client, 0, 12) == [*small, large, b"behind"]


FIRST_STORED = struct.pack(">ii2s1sii", 1, 1, b"\0\1", b"t", 1, 0) + struct.pack(">hq", 0, 0)
"""An answer to Produce, up to the offset."""


def test_a_repeated_large_batch_is_stored_once_and_leaves_no_file(
    broker: EmbeddedBroker, disk: HangingDisk, tmp_path: Path
) -> None:
    """Two copies under way at the same time: both are answered with the first offset. A gap is refused."""
    disk.is_free.set()
    batch = batch_of(os.urandom(SIZE), producer_id=7, producer_epoch=0, base_sequence=0)
    late = batch_of(os.urandom(SIZE), producer_id=7, producer_epoch=0, base_sequence=5)
    with closing(connect(broker.bootstrap)) as client, closing(connect(broker.bootstrap)) as other:
        configured(client, "t", max_message_bytes=2 * SIZE)
        disk.is_free.clear()
        for one in (client, other):
            one.sendall(produce_frame(batch))
        assert disk.is_hanging.wait(30)
        disk.is_free.set()
        for one in (client, other):
            assert (read_frame(one) or b"")[:29] == FIRST_STORED
        assert stored(client, batch) == (0, 0)
        assert stored(client, late)[0] == ErrorCode.out_of_order_sequence_number
        assert fetch(client, 0).high_watermark == 1
    assert not [*tmp_path.rglob("*.tmp")]


def test_a_topic_deleted_and_created_again_does_not_get_the_batch_of_the_first(
    broker: EmbeddedBroker, disk: HangingDisk, tmp_path: Path
) -> None:
    """What was on its way into the deleted one is refused, or stored in the new one: nothing of it is left over."""
    with closing(connect(broker.bootstrap)) as client, closing(connect(broker.bootstrap)) as other:
        configured(client, "t", max_message_bytes=2 * SIZE)
        client.sendall(produce_frame(batch_of(os.urandom(SIZE))))
        assert disk.is_hanging.wait(30)
        ask(other, Api.DELETE_TOPICS, 1, topic_names=["t"], timeout=1000)
        configured(other, "t", max_message_bytes=2 * SIZE)
        disk.is_free.set()
        assert read_frame(client) is not None
        end = fetch(other, 0).high_watermark
        assert stored(other, batch_of(b"next")) == (0, end)
        assert values_from(other, end, end + 1) == [b"next"]
    assert not [*tmp_path.rglob("*.tmp")]


def test_a_search_for_which_there_is_no_memory_is_refused_for_its_partition_only() -> None:
    """The connection goes on. It was closed before, so that the client asked again and again."""
    with (
        Broker(config={"semel.client.memory.max.bytes": 32 << 20}) as broker,
        closing(connect(broker.bootstrap)) as client,
    ):
        for name in ("bomb", "plain"):
            configured(client, name)
        store(client, "bomb", bomb(record_with_headers(30_000_000), 1))
        store(client, "plain", batch_of(b"v"))
        parts = {"bomb": {"partition_index": 0, "timestamp": 5_000}, "plain": {"partition_index": 0, "timestamp": 500}}
        topics = [{"name": name, "partitions": [part]} for name, part in parts.items()]
        answer = ask(client, Api.LIST_OFFSETS, 5, replica_id=-1, isolation_level=0, topics=topics)
        refused, found = (topic.partitions[0] for topic in answer.topics)
        assert (refused.error_code, refused.offset) == (ErrorCode.policy_violation, -1)
        assert (found.error_code, found.offset) == (ErrorCode.none, 0)
        assert look_up_time(client, "plain", 500).topics[0].partitions[0].offset == 0
