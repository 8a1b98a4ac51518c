"""Many clients and long work side by side: what one turn of the loop does is bounded."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from group_calls import counting_turns, running
from kio.schema.errors import ErrorCode

from semel.broker.durability import Fsync
from semel.broker.frames import FRAMES_AT_ONCE, SHARED_BUFFER_BYTES, FrameReader
from semel.broker.garbage import ShortCollections
from semel.broker.loop_watch import SOCKETS_AT_ONCE, LoopWatch
from semel.broker.pacing import QuickLane
from semel.wire.api import Api


def test_connections_with_full_queues_are_served_some_at_a_time() -> None:
    """A thousand of them in one turn kept everybody else waiting until all had been served."""

    async def served_by_turn() -> list[int]:
        lane, served, seen = QuickLane(at_once=10), 0, list[int]()

        def serve() -> None:
            nonlocal served
            served += 1

        for _ in range(25):
            lane.call_in_turn(serve)
        while served < 25:
            await asyncio.sleep(0)
            seen.append(served)
        return seen

    assert asyncio.run(served_by_turn()) == [10, 20, 25]


def test_work_that_asks_for_its_next_turn_waits_behind_the_others() -> None:
    """A connection asks again while it is served; it must neither be lost nor be served twice in a turn."""

    async def run() -> list[str]:
        lane, order = QuickLane(at_once=2), list[str]()

        def again() -> None:
            order.append("again")
            if len(order) < 6:
                lane.call_in_turn(again)

        lane.call_in_turn(again)
        lane.call_in_turn(lambda: order.append("once"))
        for _ in range(10):
            await asyncio.sleep(0)
        return order

    assert asyncio.run(run()) == ["again", "once", "again", "again", "again", "again"]


def test_thousands_of_tiny_frames_are_split_off_some_at_a_time() -> None:
    """A buffer full of the smallest frames took 5 ms to split, for each of a thousand connections in one turn."""
    reader = FrameReader(bytearray(SHARED_BUFFER_BYTES), 1 << 20)
    bodies = [b"%08d" % number for number in range(3 * FRAMES_AT_ONCE + 5)]
    stream = b"".join(struct.pack(">i", len(body)) + body for body in bodies) + b"\0\0"
    reader.buffer()[: len(stream)] = stream
    found = [list(map(bytes, reader.received(len(stream))))]
    while reader.has_more:
        found.append(list(map(bytes, reader.more())))
    assert [len(some) for some in found] == [FRAMES_AT_ONCE] * 3 + [5]
    assert [body for some in found for body in some] == bodies
    assert reader.held_bytes == 2


def test_a_turn_looks_at_some_of_the_sockets_and_the_next_at_the_others() -> None:
    """A thousand clients that send at the same moment must not make one long turn."""
    watch = LoopWatch()
    loop = watch.new_loop()
    pairs = [socket.socketpair() for _ in range(2 * SOCKETS_AT_ONCE)]
    turns: list[set[int]] = [set()]

    def read(receiver: socket.socket) -> None:
        receiver.recv(1)
        turns[-1].add(receiver.fileno())

    async def run() -> None:
        for _, receiver in pairs:
            loop.add_reader(receiver.fileno(), read, receiver)
        for sender, _ in pairs:
            sender.send(b"x")
        while sum(map(len, turns)) < len(pairs):
            turns.append(set())
            await asyncio.sleep(0)

    try:
        loop.run_until_complete(run())
    finally:
        loop.close()
        for pair in pairs:
            for one in pair:
                one.close()
    assert max(map(len, turns)) <= SOCKETS_AT_ONCE
    assert sum(map(len, turns)) == len(pairs)


def test_offsets_of_many_partitions_are_committed_in_several_turns(tmp_path: Path) -> None:
    """All of them are there in the end, each with its own code; other clients had their turns in between."""

    async def run() -> tuple[list[Any], int, list[Any]]:
        async with running(tmp_path, fsync=Fsync.NEVER) as asker:
            broker, turns = asker.broker, 0
            broker.topics.create(broker.topics.decide_create("wide", broker.settings, partition_count=700))
            parts = [
                {"partition_index": index, "committed_offset": index, "commit_timestamp": -1, "committed_metadata": ""}
                for index in range(701)
            ]
            fields = {
                "group_id": "g",
                "generation_id_or_member_epoch": -1,
                "member_id": "",
                "retention_time": -1,
                "topics": [{"name": "wide", "partitions": parts}],
            }
            lane_turn = broker.lane.wait_turn

            async def counted() -> None:
                nonlocal turns
                turns += 1
                await lane_turn()

            broker.lane.wait_turn = counted  # type: ignore[method-assign]
            answer = await asker.ask(Api.OFFSET_COMMIT, 2, **fields)
            stored = broker.groups.coordinator.offsets.committed("g")
            return [one.error_code for one in answer.topics[0].partitions], turns, list(stored)

    codes, turns, stored = asyncio.run(run())
    assert codes == [ErrorCode.none] * 700 + [ErrorCode.unknown_topic_or_partition]
    assert len(stored) == 700
    assert turns >= 2


class _Timer:
    def __init__(self) -> None:
        self.callback: Any = None

    def now_ms(self) -> int:
        return 0

    def call_later(self, delay_ms: float, callback: Any) -> _Timer:
        self.callback = callback
        return self

    def cancel(self) -> None:
        self.callback = None


@pytest.fixture
def collections() -> Iterator[tuple[ShortCollections, _Timer, list[int]]]:
    timer, requests = _Timer(), [0]
    found = ShortCollections(timer, lambda: requests[0])
    found.start()
    try:
        yield found, timer, requests
    finally:
        found.stop()


class _Node:
    """Something that can be part of a cycle."""

    def __init__(self) -> None:
        self.other: _Node | None = None


def _ring_of(count: int) -> list[_Node]:
    nodes = [_Node() for _ in range(count)]
    for one, other in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
        one.other = other
    return nodes


def test_a_full_collection_looks_only_at_what_has_come_since_the_last(collections: Any) -> None:
    """With half a million objects it took a quarter of a second, every time."""
    state = [_Node() for _ in range(1_000)]
    gc.collect()
    assert not any(isinstance(one, _Node) for one in gc.get_objects())
    assert gc.get_freeze_count() > len(state)


def test_cycles_that_were_set_aside_are_found_when_nobody_asks_for_anything(collections: Any) -> None:
    """The rare object that dies in a cycle after it was set aside must not stay for ever."""
    _, timer, requests = collections
    state = _ring_of(gc.get_freeze_count())
    gc.collect()
    frozen, count = gc.get_freeze_count(), len(state)
    state.clear()
    timer.callback()  # the first look only notes how many requests there were
    requests[0] += 1
    timer.callback()
    assert gc.get_freeze_count() > frozen - 100, "it must not collect while clients ask for something"
    timer.callback()
    assert gc.get_freeze_count() < frozen - count // 2


def test_a_page_of_many_topics_and_partitions_is_gone_through_in_slices(tmp_path: Path) -> None:
    """24,000 names that are no topic held the loop for 115 ms, and for 430 ms among many ACLs."""

    async def ask_all() -> None:
        async with running(tmp_path) as asker:
            turns = counting_turns(asker)
            names = [{"name": f"none{number:04}"} for number in range(1_000)]
            page: dict[str, Any] = {"response_partition_limit": 2_000, "cursor": None}
            answer = await asker.ask(Api.DESCRIBE_TOPIC_PARTITIONS, topics=[*names, {"name": "t"}], **page)
            assert [topic.name for topic in answer.topics] == [*(one["name"] for one in names), "t"]
            assert [topic.error_code for topic in answer.topics[:-1]] == [ErrorCode.unknown_topic_or_partition] * 1_000
            assert len(answer.topics[-1].partitions) == 2
            assert len(turns) >= 3

    asyncio.run(ask_all())


def test_the_partitions_of_one_topic_are_gone_through_in_slices(tmp_path: Path) -> None:
    """A page has up to 2,000 of them."""

    async def ask_all() -> None:
        async with running(tmp_path) as asker:
            topics = asker.broker.topics
            topics.create(topics.decide_create("wide", asker.broker.settings, partition_count=600, configs={}))
            turns = counting_turns(asker)
            page: dict[str, Any] = {"response_partition_limit": 550, "cursor": None}
            answer = await asker.ask(Api.DESCRIBE_TOPIC_PARTITIONS, topics=[{"name": "wide"}], **page)
            (topic,) = answer.topics
            assert [partition.partition_index for partition in topic.partitions] == list(range(550))
            assert answer.next_cursor.partition_index == 550
            assert len(turns) >= 2

    asyncio.run(ask_all())
