"""The broker's small files are written by another thread: a disk that hangs holds up only those who change them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from load_attacks import frame_of

from semel.broker.acls import META_NAME as ACLS
from semel.broker.credentials import META_NAME as CREDENTIALS
from semel.broker.state import Broker, BrokerOptions
from semel.broker.storage.disk import RealDisk
from semel.broker.topics import META_NAME as TOPICS
from semel.records import reference
from semel.wire.api import Api

PATIENCE_S = 30.0


class HangingDisk(RealDisk):
    """A disk whose syncs of one file hang while `is_free` is not set."""

    def __init__(self) -> None:
        self.is_free = threading.Event()
        self.is_free.set()
        self.is_hanging = threading.Event()
        self.name = ""

    def sync(self, path: str) -> None:
        if self.name and self.name in path and not self.is_free.is_set():
            self.is_hanging.set()
            assert self.is_free.wait(PATIENCE_S)
        super().sync(path)


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def close(self) -> None:
        self._writer.close()

    async def ask(self, api: Api, version: int, **fields: Any) -> bytes:
        self._writer.write(frame_of(api, version, **fields))
        size = int.from_bytes(await self._reader.readexactly(4), "big")
        return await self._reader.readexactly(size)


def new_topic(name: str) -> dict[str, Any]:
    topic = {"name": name, "num_partitions": 1, "replication_factor": 1, "assignments": [], "configs": []}
    return {"topics": [topic], "timeout": 1000, "validate_only": False}


def new_rule(name: str) -> dict[str, Any]:
    rule = {"resource_type": 2, "resource_name": name, "resource_pattern_type": 3, "principal": "User:ann"}
    return {"creations": [{**rule, "host": "*", "operation": 3, "permission_type": 3}]}


def new_user(name: str) -> dict[str, Any]:
    user = {"name": name, "mechanism": 1, "iterations": 4096, "salt": b"salt", "salted_password": bytes(32)}
    return {"deletions": [], "upsertions": [user]}


def new_config(name: str) -> dict[str, Any]:
    config = {"name": name, "config_operation": 0, "value": "60000"}
    return {"resources": [{"resource_type": 2, "resource_name": "there", "configs": [config]}], "validate_only": False}


Change = tuple[str, Api, int, Callable[[str], dict[str, Any]], tuple[str, str]]
CHANGES: list[Change] = [
    (TOPICS, Api.CREATE_TOPICS, 4, new_topic, ("one", "two")),
    (TOPICS, Api.INCREMENTAL_ALTER_CONFIGS, 0, new_config, ("retention.ms", "segment.ms")),
    (ACLS, Api.CREATE_ACLS, 1, new_rule, ("one", "two")),
    (CREDENTIALS, Api.ALTER_USER_SCRAM_CREDENTIALS, 0, new_user, ("one", "two")),
]


Work = Callable[[Broker, list[Client]], Awaitable[None]]


def on_broker(folder: Path, disk: RealDisk, work: Work) -> None:
    async def run() -> None:
        config = {"authorizer.class.name": "acls", "super.users": "User:ANONYMOUS"}
        broker = Broker(BrokerOptions(data=folder, config=config), disk=disk)
        await broker.start()
        clients = [Client(*await asyncio.open_connection("127.0.0.1", broker.ports()[0])) for _ in range(3)]
        try:
            await asyncio.wait_for(work(broker, clients), PATIENCE_S)
        finally:
            for client in clients:
                client.close()
            await broker.stop()

    asyncio.run(run())


@pytest.mark.parametrize(("file", "api", "version", "fields", "names"), CHANGES, ids=[one[1].name for one in CHANGES])
def test_a_change_waits_for_a_disk_that_hangs_and_nobody_else_does(
    file: str, api: Api, version: int, fields: Callable[[str], dict[str, Any]], names: tuple[str, str], tmp_path: Path
) -> None:
    """The change is neither answered nor seen while its file is not safe; the next change is not lost beneath it."""
    disk = HangingDisk()
    path = tmp_path / f"{file}.meta"

    async def work(broker: Broker, others: list[Client]) -> None:
        await others[2].ask(Api.CREATE_TOPICS, 4, **new_topic("there"))
        for one in names:  # handlers are loaded in other threads when they are first asked for
            await others[2].ask(api, version, **fields(f"before-{one}"))
        before = path.read_bytes()
        disk.name = file
        disk.is_free.clear()
        changes = [
            asyncio.ensure_future(client.ask(api, version, **fields(name)))
            for client, name in zip(others, names, strict=False)
        ]
        while not disk.is_hanging.is_set():
            await asyncio.sleep(0)
        for _ in range(50):
            await others[2].ask(Api.METADATA, 4, topics=[{"name": "there"}], allow_auto_topic_creation=False)
        assert not any(change.done() for change in changes)
        assert path.read_bytes() == before
        assert not any(name in broker.topics for name in names)
        disk.is_free.set()
        await asyncio.gather(*changes)
        text = path.read_text()
        assert all(f'"{name}"' in text for name in names), text

    on_broker(tmp_path, disk, work)
    # What was answered is there after a restart too.
    on_broker(tmp_path, disk, lambda broker, _: _is_there(broker, api, names))


async def _is_there(broker: Broker, api: Api, names: tuple[str, str]) -> None:
    if api is Api.CREATE_TOPICS:
        assert all(broker.partition(name, 0) is not None for name in names)
    elif api is Api.INCREMENTAL_ALTER_CONFIGS:
        topic = broker.topics.get("there")
        assert topic is not None
        assert all(name in topic.configs for name in names)
    elif api is Api.CREATE_ACLS:
        assert {one.name for one in broker.authorizer.bindings} >= set(names)
    else:
        assert set(broker.credentials.scram_users()) >= set(names)


class SlowDisk(RealDisk):
    """Counts the syncs of checkpoints, each of which takes some milliseconds."""

    def __init__(self) -> None:
        self.syncs = 0

    def sync(self, path: str) -> None:
        if "checkpoint" in path:
            self.syncs += 1
            time.sleep(0.005)
        super().sync(path)


def test_others_have_their_turns_while_records_of_many_partitions_are_deleted(tmp_path: Path) -> None:
    """Each deletion is synced on its own. All of them in one turn of the loop would hold everybody up for seconds."""
    disk = SlowDisk()
    partitions = 40

    async def work(broker: Broker, clients: list[Client]) -> None:
        wide = new_topic("wide")
        wide["topics"][0]["num_partitions"] = partitions
        await clients[0].ask(Api.CREATE_TOPICS, 4, **wide)
        batch = reference.encode_batch([reference.Record(0, 0, b"k", b"v")])
        data = [{"name": "wide", "partition_data": [{"index": n, "records": batch} for n in range(partitions)]}]
        await clients[0].ask(Api.PRODUCE, 7, transactional_id=None, acks=1, timeout=1000, topic_data=data)
        gone = [{"name": "wide", "partitions": [{"partition_index": n, "offset": 1} for n in range(partitions)]}]
        before = disk.syncs
        deleting = asyncio.ensure_future(clients[0].ask(Api.DELETE_RECORDS, 1, topics=gone, timeout=1000))
        seen = set[int]()
        while not deleting.done():
            await clients[1].ask(Api.METADATA, 4, topics=[], allow_auto_topic_creation=False)
            seen.add(disk.syncs - before)
        assert disk.syncs - before == partitions
        assert len(seen) > partitions // 4, seen

    on_broker(tmp_path, disk, work)


def test_the_coordinators_topic_is_created_without_holding_the_loop(tmp_path: Path) -> None:
    """The first to ask for a group's coordinator waits for the topic; a second one beside it gets the same answer."""
    disk = HangingDisk()

    async def work(broker: Broker, clients: list[Client]) -> None:
        disk.name = TOPICS
        disk.is_free.clear()
        asking = [
            asyncio.ensure_future(client.ask(Api.FIND_COORDINATOR, 1, key="g", key_type=0)) for client in clients[:2]
        ]
        while not disk.is_hanging.is_set():
            await asyncio.sleep(0)
        for _ in range(50):
            await clients[2].ask(Api.METADATA, 4, topics=[], allow_auto_topic_creation=False)
        assert not any(one.done() for one in asking)
        disk.is_free.set()
        first, second = await asyncio.gather(*asking)
        assert first == second
        assert broker.partition("__consumer_offsets", 0) is not None

    on_broker(tmp_path, disk, work)
