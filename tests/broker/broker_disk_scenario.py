"""A fixed day in the life of a broker on a simulated disk, with the disk and the promises of every moment of it."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

from kio.schema.errors import ErrorCode

from semel.broker.durability import Fsync
from semel.broker.state import Broker, BrokerOptions
from semel.records.reference import Record, encode_batch
from semel.testing.simulated_disk import SimulatedDisk
from semel.verify.simulated_network import SimulatedConnection, make_request
from semel.verify.virtual_time import ProcessClock, VirtualTimeLoop
from semel.wire.api import Api
from semel.wire.messages import decode_response, encode_request, read_correlation_id, response_type_for

TopicPartition = tuple[str, int]

CONFIG = {
    "transaction.state.log.num.partitions": "1",
    "transaction.state.log.segment.bytes": "900",
    "offsets.topic.num.partitions": "1",
    "offsets.topic.segment.bytes": "500",
    "log.cleaner.backoff.ms": "400",
    "log.cleaner.min.cleanable.ratio": "0.1",
}
TRANSACTIONAL_ID = "writer"
TRANSACTION_TIMEOUT_MS = 1500
GROUP = "readers"
TOPICS = {"a": 2, "b": 1, "compacted": 1, "doomed": 1}
_PLAIN, _TRANSACTIONAL = "plain", "transactional"


@dataclass
class Transaction:
    """`state` is what the client knows: open, ending, committed, aborted or (timed out) abandoned."""

    values: dict[str, TopicPartition] = field(default_factory=dict[str, TopicPartition])
    position: int | None = None
    state: str = "open"
    wants_commit: bool = False


@dataclass
class Promises:
    """What the client has sent and what it was told."""

    plain: dict[str, TopicPartition] = field(default_factory=dict[str, TopicPartition])
    acknowledged: set[str] = field(default_factory=set[str])
    transactions: list[Transaction] = field(default_factory=list[Transaction])
    topics: dict[str, str] = field(default_factory=dict[str, str])
    pending: tuple[Api, int, dict[str, Any]] | None = None


@dataclass
class Moment:
    """The disk just before an operation. `write` is what the operation is about to write, if it writes."""

    number: int
    what: str
    disk: SimulatedDisk
    promises: Promises
    write: tuple[str, int, bytes] | None = None

    def torn_after(self, count: int) -> SimulatedDisk:
        """The disk of a process that was killed when only so many bytes of the write had gone out."""
        assert self.write is not None
        path, position, data = self.write
        disk = self.disk.reboot(power_cut=False)
        disk.write(disk.open(path), [data[:count]], position)
        return disk


class RecordingDisk(SimulatedDisk):
    """Keeps a copy of itself and of the promises before each of its operations."""

    def __init__(self, promises: Promises) -> None:
        super().__init__()
        self.moments: list[Moment] = []
        self._promises = promises
        self._writing: tuple[str, int, bytes] | None = None

    def write(self, handle: int, buffers: Sequence[Any], position: int) -> int:
        file = self._handles[handle]
        path = next(path for path, there in self._names.items() if there is file)
        self._writing = (path, position, b"".join(bytes(buffer) for buffer in buffers))
        try:
            return super().write(handle, buffers, position)
        finally:
            self._writing = None

    def _operation(self, *, may_be_partial: bool = False) -> bool:
        what = f"write {self._writing[0]}" if self._writing else "an operation"
        self.moments.append(
            Moment(self.operations, what, self.reboot(power_cut=False), copy.deepcopy(self._promises), self._writing)
        )
        return super()._operation(may_be_partial=may_be_partial)


class Host:
    """A broker on a disk, and one client's connection to it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        disk: SimulatedDisk,
        *,
        fsync: Fsync,
        protocol: int,
        boot: str,
        ahead_ms: int = 0,
    ) -> None:
        ids = iter(range(1, 10**6))
        self.fatal: list[Exception] = []
        self.broker = Broker(
            BrokerOptions(data=Path("data"), config={**CONFIG, "transaction.version": str(protocol)}, fsync=fsync),
            clock=ProcessClock(loop, ahead_ms),
            disk=disk,
            boot_id=boot,
            new_id=lambda: UUID(int=next(ids) << 64 | len(disk.paths()), version=4),
            on_fatal=self.fatal.append,
            sync_in_thread=False,
        )
        self.protocol = protocol
        self._answers: dict[int, bytes] = {}
        self._hooks: dict[int, Callable[[bytes], None]] = {}
        self._number = 0

    async def start(self) -> None:
        await self.broker.start(listen=False)
        self._connection = SimulatedConnection(self.broker, self._answered, lambda: None)

    def _answered(self, data: bytes) -> None:
        number = read_correlation_id(memoryview(data)[4:])
        self._answers[number] = data
        self._hooks.pop(number)(data)

    async def ask(
        self, api: Api, version: int, fields: dict[str, Any], then: Callable[[Any], None] = lambda answer: None
    ) -> Any:
        """Send a request and wait for its answer; `then` sees it at the moment when the broker gives it."""
        request = make_request(api, version, fields)
        self._number += 1
        number = self._number
        self._hooks[number] = lambda data: then(decode_response(response_type_for(request), data[4:]))
        self._connection.receive(b"".join(encode_request(request, number, "scenario")))
        for _ in range(10_000):
            if number in self._answers:
                return decode_response(response_type_for(request), self._answers[number][4:])
            await asyncio.sleep(0.001)
        raise AssertionError(f"{api.name} was never answered")


class Producing:
    """A producer of either protocol, by single requests."""

    def __init__(self, host: Host, promises: Promises, *, transactional: bool) -> None:
        self._host = host
        self._promises = promises
        self._is_transactional = transactional
        self._identity = (-1, -1)
        self._sequences: dict[TopicPartition, int] = {}
        self._is_2 = host.protocol >= 2

    async def send(self, api: Api, version: int, then: Callable[[Any], None], **fields: Any) -> Any:
        self._promises.pending = (api, version, fields)

        def answered(answer: Any) -> None:
            assert code_of(api, answer) is ErrorCode.none, (api.name, code_of(api, answer))
            self._promises.pending = None
            then(answer)

        return await self._host.ask(api, version, fields, answered)

    async def begin_life(self) -> None:
        answer = await self.send(
            Api.INIT_PRODUCER_ID,
            4,
            lambda answer: None,
            transactional_id=TRANSACTIONAL_ID if self._is_transactional else None,
            transaction_timeout=TRANSACTION_TIMEOUT_MS,
            producer_id=-1,
            producer_epoch=-1,
        )
        self._take(answer)

    def _take(self, answer: Any) -> None:
        if self._identity != (answer.producer_id, answer.producer_epoch):
            self._identity = (answer.producer_id, answer.producer_epoch)
            self._sequences = {}

    async def produce(self, values: dict[str, TopicPartition], key: str | None = None) -> None:
        """One request with a batch for each partition."""
        batches: dict[TopicPartition, list[str]] = {}
        for value, where in values.items():
            batches.setdefault(where, []).append(value)
        if self._is_transactional:
            self._promises.transactions[-1].values.update(values)
            if not self._is_2:
                await self._add_partitions(list(batches))
        else:
            self._promises.plain.update(values)
        topics: dict[str, list[dict[str, Any]]] = {}
        for (topic, index), texts in batches.items():
            records = self._batch((topic, index), texts, key)
            topics.setdefault(topic, []).append({"index": index, "records": records})
        await self.send(
            Api.PRODUCE,
            12 if self._is_2 else 9,
            lambda answer: None if self._is_transactional else self._promises.acknowledged.update(values),
            transactional_id=TRANSACTIONAL_ID if self._is_transactional else None,
            acks=-1,
            timeout=1000,
            topic_data=[{"name": topic, "partition_data": data} for topic, data in topics.items()],
        )

    def _batch(self, where: TopicPartition, texts: list[str], key: str | None) -> bytes:
        sequence = self._sequences.get(where, 0)
        self._sequences[where] = sequence + len(texts)
        keyed = None if key is None else key.encode()
        return encode_batch(
            [Record(number, 1_700_000_000_000, keyed, text.encode()) for number, text in enumerate(texts)],
            producer_id=self._identity[0],
            producer_epoch=self._identity[1],
            base_sequence=sequence,
            transactional=self._is_transactional,
        )

    # Transactions

    def begin(self) -> Transaction:
        self._promises.transactions.append(Transaction())
        return self._promises.transactions[-1]

    def _mine(self) -> dict[str, Any]:
        return {
            "transactional_id": TRANSACTIONAL_ID,
            "producer_id": self._identity[0],
            "producer_epoch": self._identity[1],
        }

    async def _add_partitions(self, wheres: list[TopicPartition]) -> None:
        await self.send(
            Api.ADD_PARTITIONS_TO_TXN,
            3,
            lambda answer: None,
            **{f"v3_and_below_{name}": value for name, value in self._mine().items()},
            v3_and_below_topics=[{"name": topic, "partitions": [index]} for topic, index in wheres],
        )

    async def commit_offset(self, position: int) -> None:
        transaction = self._promises.transactions[-1]
        transaction.position = position
        if not self._is_2:
            await self.send(Api.ADD_OFFSETS_TO_TXN, 3, lambda answer: None, group_id=GROUP, **self._mine())
        one = {"partition_index": 0, "committed_offset": position, "committed_metadata": ""}
        await self.send(
            Api.TXN_OFFSET_COMMIT,
            5 if self._is_2 else 3,
            lambda answer: None,
            group_id=GROUP,
            topics=[{"name": "a", "partitions": [one]}],
            **self._mine(),
        )

    async def end(self, *, committed: bool) -> None:
        transaction = self._promises.transactions[-1]
        transaction.state, transaction.wants_commit = "ending", committed

        def answered(answer: Any) -> None:
            transaction.state = "committed" if committed else "aborted"

        answer = await self.send(Api.END_TXN, 5 if self._is_2 else 3, answered, committed=committed, **self._mine())
        if self._is_2:
            self._take(answer)


def code_of(api: Api, answer: Any) -> ErrorCode:
    """The first error in an answer."""
    if api is Api.PRODUCE:
        codes = [one.error_code for topic in answer.responses for one in topic.partition_responses]
    elif api is Api.ADD_PARTITIONS_TO_TXN:
        topics = answer.results_by_topic_v3_and_below
        codes = [one.partition_error_code for topic in topics for one in topic.results_by_partition]
    elif api is Api.TXN_OFFSET_COMMIT:
        codes = [one.error_code for topic in answer.topics for one in topic.partitions]
    elif api is Api.CREATE_TOPICS:
        codes = [topic.error_code for topic in answer.topics]
    elif api is Api.DELETE_TOPICS:
        codes = [topic.error_code for topic in answer.responses]
    else:
        codes = [answer.error_code]
    return next((code for code in codes if code is not ErrorCode.none), ErrorCode.none)


async def create(host: Host, promises: Promises, producing: Producing, name: str) -> None:
    promises.topics[name] = "coming"
    configs = {"internal.segment.bytes": "700"}
    if name == "compacted":
        configs = {"internal.segment.bytes": "350", "cleanup.policy": "compact"}
    shape = {"name": name, "num_partitions": TOPICS[name], "replication_factor": 1, "assignments": []}
    await producing.send(
        Api.CREATE_TOPICS,
        5,
        lambda answer: promises.topics.update({name: "there"}),
        topics=[{**shape, "configs": [{"name": key, "value": value} for key, value in configs.items()]}],
        timeout=1000,
        validate_only=False,
    )


async def play(host: Host, promises: Promises) -> None:
    """The scenario. Everything in it follows from nothing but these lines."""
    plain = Producing(host, promises, transactional=False)
    writer = Producing(host, promises, transactional=True)
    for name in TOPICS:
        await create(host, promises, plain, name)
    await plain.begin_life()
    await plain.produce({"doomed/0": ("doomed", 0)})
    for number in range(3):
        await plain.produce({f"plain/{number}.0": ("a", 0), f"plain/{number}.1": ("a", 0)})
        await plain.produce({f"compacted/{number}": ("compacted", 0)}, key="key")
    await writer.begin_life()
    for number in range(6):
        transaction = writer.begin()
        wheres: list[TopicPartition] = [("a", 0), ("a", 1), ("b", 0)]
        await writer.produce({f"transaction/{number}.{part}": where for part, where in enumerate(wheres)})
        if number != 1:
            await writer.commit_offset(10 + number)
        await writer.produce({f"transaction/{number}.again": ("a", 1)})
        await writer.end(committed=number not in (1, 3))
        assert transaction.state in ("committed", "aborted")
        await plain.produce({f"between/{number}": ("a", number % 2)})
        await plain.produce({f"compacted/{3 + number}": ("compacted", 0)}, key="key")
    await asyncio.sleep(1)  # retention and compaction look around
    promises.topics["doomed"] = "going"
    await plain.send(
        Api.DELETE_TOPICS,
        4,
        lambda answer: promises.topics.update(doomed="gone"),
        topic_names=["doomed"],
        timeout=1000,
    )
    left_open = writer.begin()
    await writer.produce({"left open": ("b", 0)})
    await writer.commit_offset(99)
    await asyncio.sleep(TRANSACTION_TIMEOUT_MS / 1000 + 0.5)
    left_open.state = "abandoned"
    await writer.begin_life()
    writer.begin()
    await writer.produce({"last/0": ("a", 0), "last/1": ("b", 0)})
    await writer.commit_offset(50)
    await writer.end(committed=True)


def record(fsync: Fsync, protocol: int) -> list[Moment]:
    """Play it once; returns every moment at which the process could have died."""
    loop = VirtualTimeLoop()
    promises = Promises()
    disk = RecordingDisk(promises)
    disk.make_directory("data")
    disk.sync_directory("")
    disk.moments.clear()  # the folder is the user's
    host = Host(loop, disk, fsync=fsync, protocol=protocol, boot="first")

    async def run() -> None:
        await host.start()
        await play(host, promises)
        await host.broker.stop()

    try:
        loop.run_until_complete(run())
    finally:
        loop.close()
    assert not host.fatal
    assert host.broker.metrics.unexpected_errors == 0
    return disk.moments
