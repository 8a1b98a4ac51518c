"""The holes that hostile input found in the broker, each with the request that found it, and the bounds they led to."""

from __future__ import annotations

import asyncio
import gc
import struct
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from hostile_calls import SECONDS_MAX, OnHost, body_of, runner_on_host
from kio.schema.errors import ErrorCode

from semel.broker import connection as connection_module
from semel.broker.batch_intake import check_batch
from semel.broker.fetch_sessions import FetchSessions
from semel.broker.held_memory import HeldMemory
from semel.core.refusal import Refused
from semel.records import reference
from semel.records.layout import HEADER_BYTES, read_header, write_header
from semel.verify.hostile_frames import World, with_size
from semel.verify.hostile_host import HostileHost, SocketlessConnection
from semel.verify.memory import rss_bytes
from semel.verify.simulated_network import make_request
from semel.wire.api import Api


@pytest.fixture
def on_host(tmp_path: Path) -> OnHost:
    return runner_on_host(tmp_path)


# Holes that were found, each with its frame.


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param("0003000c00000001000000ffffffff0f0000", id="two thousand million topics in 18 bytes"),
        pytest.param("0003000c00000001000000ffffffff070000", id="a thousand million"),
        pytest.param("001300070000000100000000000000000000", id="null where an array must be"),
        pytest.param("000300040000000100007fffffff0000", id="an array of the older layout"),
        pytest.param("00120003000000010000ffffffff0f00", id="tags of the header"),
    ],
)
def test_announced_arrays_that_are_not_there_are_refused(frame: str, on_host: OnHost) -> None:
    """The decoder makes room for what is announced: the first of these ended the process by an allocation of 32 GiB."""

    async def work(host: HostileHost, world: World) -> None:
        assert await host.offer(bytes.fromhex(frame)) == "refused"

    on_host(work)


def test_more_entries_than_any_client_asks_for_are_refused(on_host: OnHost) -> None:
    """A few hundred kilobytes that would keep everybody else waiting for minutes."""

    async def work(host: HostileHost, world: World) -> None:
        few = body_of(Api.DELETE_TOPICS, 1, topic_names=["x"] * 25_000, timeout=0)
        many = body_of(Api.DELETE_TOPICS, 1, topic_names=["x"] * 25_001, timeout=0)
        assert (await host.offer(few), await host.offer(many)) == ("answered", "refused")

    on_host(work)


def test_a_topic_asked_for_by_id_in_a_version_without_null_names_is_answered(on_host: OnHost) -> None:
    """Metadata 10 and 11 have the field; the answer could not be written, and the client waited for ever."""

    async def work(host: HostileHost, world: World) -> None:
        asked = {
            "topics": [{"topic_id": world.topic_ids[0], "name": "orders"}],
            "allow_auto_topic_creation": False,
            "include_cluster_authorized_operations": False,
            "include_topic_authorized_operations": False,
        }
        for version in (10, 11):
            answer = await host.ask(Api.METADATA, version, **asked)
            assert [topic.error_code for topic in answer.topics] == [ErrorCode.invalid_request]

    on_host(work)


def test_an_answer_that_cannot_be_written_closes_the_connection(
    on_host: OnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client would otherwise wait for its time-out, and the exception end in the event loop."""

    def fail(*_: object) -> None:
        raise TypeError("cannot be written")

    async def work(host: HostileHost, world: World) -> None:
        monkeypatch.setattr(connection_module, "encode_response", fail)
        client = SocketlessConnection(host.broker)
        client.receive(with_size(body_of(Api.METADATA, 4, topics=None, allow_auto_topic_creation=False)))
        assert client.is_closed
        assert host.broker.metrics.unexpected_errors == 1
        host.broker.metrics.unexpected_errors = 0

    on_host(work)


@pytest.mark.parametrize("name", ["--1", "-", "9" * 5000])
def test_broker_ids_that_are_no_numbers_are_refused(name: str, on_host: OnHost) -> None:
    """Python reads neither two signs nor more than 4,300 digits; a config's number is read the same way."""

    async def work(host: HostileHost, world: World) -> None:
        resources = [{"resource_type": 4, "resource_name": name, "configuration_keys": None}]
        answer = await host.ask(Api.DESCRIBE_CONFIGS, 1, resources=resources, include_synonyms=False)
        assert answer.results[0].error_code is ErrorCode.invalid_request
        config = {"name": "retention.ms", "config_operation": 0, "value": name}
        for resource_type, resource_name in ((4, name), (2, "orders")):
            altered = [{"resource_type": resource_type, "resource_name": resource_name, "configs": [config]}]
            answer = await host.ask(Api.INCREMENTAL_ALTER_CONFIGS, 0, resources=altered, validate_only=False)
            code = answer.responses[0].error_code
            assert code in (ErrorCode.invalid_request, ErrorCode.invalid_config)

    on_host(work)


def test_no_request_creates_more_than_ten_thousand_partitions(on_host: OnHost) -> None:
    """Kafka's own bound, for new topics and for old ones that grow."""

    async def work(host: HostileHost, world: World) -> None:
        new = {"name": "wide", "num_partitions": 2**31 - 1, "replication_factor": 1, "assignments": [], "configs": []}
        created = await host.ask(Api.CREATE_TOPICS, 4, topics=[new], timeout=1, validate_only=False)
        assert created.topics[0].error_code is ErrorCode.policy_violation
        for count, code in ((2**31 - 1, ErrorCode.policy_violation), (3, ErrorCode.none)):
            growing = [{"name": "orders", "count": count, "assignments": None}]
            grown = await host.ask(Api.CREATE_PARTITIONS, 1, topics=growing, timeout=1, validate_only=False)
            assert grown.results[0].error_code is code

    on_host(work)


@pytest.mark.parametrize(
    "pattern", ["(a+)+b", "(.*)*x", "(a|a)*" * 50 + "b", "((a{99}){99}){99}", "(" * 4000, r"(a)\1"]
)
def test_expressions_that_never_end_are_matched_or_refused_at_once(pattern: str, on_host: OnHost) -> None:
    """Of subscriptions and of ListTransactions: one such expression stopped the broker for good."""

    async def work(host: HostileHost, world: World) -> None:
        name = "a" * 200
        await host.ask(Api.METADATA, 4, topics=[{"name": name}], allow_auto_topic_creation=True)
        await host.ask(Api.INIT_PRODUCER_ID, 1, transactional_id=name, transaction_timeout=60_000)
        began = time.monotonic()
        heartbeat = {
            "group_id": "regex",
            "member_id": "member",
            "member_epoch": 0,
            "instance_id": None,
            "rack_id": None,
            "rebalance_timeout": 10_000,
            "subscribed_topic_names": None,
            "subscribed_topic_regex": pattern,
            "server_assignor": None,
            "topic_partitions": [],
        }
        joined = await host.ask(Api.CONSUMER_GROUP_HEARTBEAT, 1, **heartbeat)
        assert joined.error_code in (ErrorCode.none, ErrorCode.invalid_regular_expression)
        filters = {"state_filters": [], "producer_id_filters": [], "duration_filter": -1}
        listed = await host.ask(Api.LIST_TRANSACTIONS, 2, **filters, transactional_id_pattern=pattern)
        assert listed.error_code in (ErrorCode.none, ErrorCode.invalid_regular_expression)
        assert time.monotonic() - began < SECONDS_MAX

    on_host(work)


def test_metadata_of_members_and_commits_is_bounded(on_host: OnHost) -> None:
    """Megabytes of either would be kept in memory and logged again with each change of the group."""

    async def work(host: HostileHost, world: World) -> None:
        before = rss_bytes()
        join = {
            "group_id": "huge",
            "session_timeout": 10_000,
            "member_id": "",
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": bytes(10 << 20)}],
        }
        joined = await host.ask(Api.JOIN_GROUP, 0, **join)
        assert joined.error_code is ErrorCode.unknown_server_error
        partition = {"partition_index": 0, "committed_offset": 1, "committed_metadata": "m" * 30_000}
        commit = {
            "group_id": "huge",
            "generation_id_or_member_epoch": -1,
            "member_id": "",
            "retention_time": -1,
            "topics": [{"name": "orders", "partitions": [partition]}],
        }
        committed = await host.ask(Api.OFFSET_COMMIT, 2, **commit)
        assert committed.topics[0].partitions[0].error_code is ErrorCode.offset_metadata_too_large
        assert rss_bytes() - before < 200 << 20

    on_host(work)


def test_a_subscription_too_large_to_be_logged_is_refused(on_host: OnHost) -> None:
    """As Kafka refuses what does not fit into one batch of its offsets topic; the group stays what it was."""

    async def work(host: HostileHost, world: World) -> None:
        heartbeat = {
            "group_id": "long",
            "member_id": "member",
            "member_epoch": 0,
            "instance_id": None,
            "rack_id": None,
            "rebalance_timeout": 10_000,
            "subscribed_topic_names": [f"{number:05}-{'x' * 200}" for number in range(10_000)],
            "subscribed_topic_regex": None,
            "server_assignor": None,
            "topic_partitions": [],
        }
        answer = await host.ask(Api.CONSUMER_GROUP_HEARTBEAT, 1, **heartbeat)
        assert answer.error_code is ErrorCode.unknown_server_error
        described = await host.ask(
            Api.CONSUMER_GROUP_DESCRIBE, 0, group_ids=["long"], include_authorized_operations=False
        )
        assert described.groups[0].error_code is ErrorCode.group_id_not_found

    on_host(work)


def test_a_fetch_that_waits_for_weeks_ends_with_its_client(on_host: OnHost) -> None:
    """Its timer, its watchers and its task must not stay behind; `offer` checks that."""

    async def work(host: HostileHost, world: World) -> None:
        part = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1000}
        fetch = {"replica_id": -1, "max_wait": 2**31 - 1, "min_bytes": 2**31 - 1, "max_bytes": 1000}
        topics = [{"topic": "orders", "partitions": [part]}]
        body = body_of(Api.FETCH, 4, **fetch, isolation_level=1, topics=topics)
        assert await host.offer(body) == "waiting"
        partition = host.broker.partition("orders", 0)
        assert partition is not None
        assert not partition.watchers

    on_host(work)


def test_many_new_topics_in_one_request_keep_nobody_waiting(on_host: OnHost) -> None:
    """400 topics that are created by being asked for: another client is answered long before the last is there."""

    async def work(host: HostileHost, world: World) -> None:
        names = [{"name": f"many-{number}"} for number in range(400)]
        greedy, other = SocketlessConnection(host.broker), SocketlessConnection(host.broker)
        greedy.receive(with_size(body_of(Api.METADATA, 4, topics=names, allow_auto_topic_creation=True)))
        other.receive(with_size(body_of(Api.API_VERSIONS, 0)))
        assert other.sent
        assert greedy.is_busy
        while greedy.is_busy:
            await asyncio.sleep(0)
        assert len(host.broker.topics) >= 400
        assert greedy.sent

    on_host(work)


def test_asking_for_the_same_thing_often_is_answered_once(on_host: OnHost) -> None:
    """A broker's configs 5,000 times over would be half a gigabyte, out of 50 kB."""

    async def work(host: HostileHost, world: World) -> None:
        resources = [{"resource_type": 4, "resource_name": "1", "configuration_keys": None}] * 5_000
        configs = await host.ask(Api.DESCRIBE_CONFIGS, 1, resources=resources, include_synonyms=True)
        groups = await host.ask(
            Api.CONSUMER_GROUP_DESCRIBE, 0, group_ids=["modern"] * 5_000, include_authorized_operations=False
        )
        classic = await host.ask(Api.DESCRIBE_GROUPS, 0, groups=["classic"] * 5_000)
        assert (len(configs.results), len(groups.groups), len(classic.groups)) == (1, 1, 1)

    on_host(work)


def test_a_batch_that_unpacks_to_very_much_is_refused(on_host: OnHost) -> None:
    """A hundred kilobytes of gzip with eight million records in it, for a compacted topic, where all are looked at."""
    record = bytes([12, 0, 0, 0, 1, 1, 0])
    packed = zlib.compress(record * 8_000_000, wbits=31)
    empty = reference.encode_batch([reference.Record(0, 0, b"k", b"v")], compression="gzip")
    batch = bytearray(empty[:HEADER_BYTES] + packed)
    header = read_header(empty)._replace(batch_length=len(batch) - 12, record_count=8_000_000)
    write_header(batch, header)

    async def work(host: HostileHost, world: World) -> None:
        before, began = rss_bytes(), time.monotonic()
        with pytest.raises(Refused):
            check_batch(memoryview(batch), host.broker.topic_settings("compacted"), 9)
        assert rss_bytes() - before < 100 << 20
        assert time.monotonic() - began < SECONDS_MAX

    on_host(work)


@pytest.mark.parametrize("is_long", [False, True])
def test_a_request_that_is_cancelled_before_its_first_step_leaves_nothing_behind(
    is_long: bool, on_host: OnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory stayed noted, its connection busy, and the coroutine of its answer was never awaited."""
    part = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1}
    fetch = {"replica_id": -1, "max_wait": 60_000, "min_bytes": 1 << 20, "max_bytes": 1 << 20, "isolation_level": 0}
    waits = with_size(body_of(Api.FETCH, 4, **fetch, topics=[{"topic": "orders", "partitions": [part]}]))
    listed = with_size(body_of(Api.LIST_GROUPS, 0))

    async def work(host: HostileHost, world: World) -> None:
        tasks: list[asyncio.Task[None]] = []
        waited = host.broker.request_waits
        monkeypatch.setattr(host.broker, "request_waits", lambda task: (tasks.append(task), waited(task)))
        before = host.broker.held_memory.total_bytes
        client = SocketlessConnection(host.broker)
        client.receive(listed if is_long else waits)
        (task,) = tasks
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert not client.is_busy
        gc.collect()  # a coroutine that was not awaited is an error here
        client.receive(with_size(body_of(Api.API_VERSIONS, 0)))
        assert client.sent
        client.close()
        assert host.broker.held_memory.total_bytes == before

    on_host(work)


# What all clients together may take.


def test_fetch_sessions_hold_a_bounded_number_of_partitions() -> None:
    """A thousand sessions of a hundred thousand partitions that do not exist would fill the memory."""
    numbers = iter(range(1, 1000))
    sessions = FetchSessions(1000, lambda: next(numbers), partitions_max=100)

    def request(first: int, count: int) -> Any:
        part = {"fetch_offset": 0, "partition_max_bytes": 1, "log_start_offset": 0}
        partitions = [{"partition": index, **part} for index in range(first, first + count)]
        fields = {"session_id": 0, "session_epoch": 0, "replica_id": -1, "max_wait": 0, "min_bytes": 0, "max_bytes": 1}
        topics = [{"topic": "t", "partitions": partitions}]
        return make_request(
            Api.FETCH, 7, {**fields, "isolation_level": 0, "topics": topics, "forgotten_topics_data": []}
        )

    for _ in range(10):
        assert sessions.session_for(request(0, 40), "User:a").session_id
    assert len(sessions) == 2
    assert sessions.session_for(request(0, 101), "User:a").session_id == 0


def test_the_connection_that_holds_most_goes_when_all_hold_too_much(on_host: OnHost) -> None:
    """Frames of which most has come, and nothing more: the largest is refused, the others stay."""

    async def work(host: HostileHost, world: World) -> None:
        host.broker.held_memory = HeldMemory(bytes_max=24 << 20)
        small, large, last = (SocketlessConnection(host.broker) for _ in range(3))
        for client, megabytes in ((small, 2), (large, 9), (last, 3)):
            client.receive(struct.pack(">i", 50 << 20) + bytes(megabytes << 20))
        assert [client.is_closed for client in (small, large, last)] == [False, True, False]
        last.close()
        small.close()
        assert host.broker.held_memory.total_bytes == 0

    on_host(work)


def test_when_no_more_connections_fit_the_longest_idle_makes_room(on_host: OnHost) -> None:
    """Clients that connect and do nothing take no descriptor that the log needs, and keep nobody out."""

    async def work(host: HostileHost, world: World) -> None:
        host.broker.connections_max = host.broker.connection_count + 2
        idle, active, newest = SocketlessConnection(host.broker), SocketlessConnection(host.broker), None
        host.advance(1000)
        active.receive(with_size(body_of(Api.API_VERSIONS, 0)))
        newest = SocketlessConnection(host.broker)
        assert (idle.is_closed, active.is_closed, newest.is_closed) == (True, False, False)

    on_host(work)
