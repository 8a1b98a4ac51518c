"""A broker without sockets for hostile frames: each frame in, and what came of it judged."""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from kio.index import load_response_schema
from kio.serial import entity_reader
from kio.serial.errors import SerialError

from semel.broker.connection import Connection
from semel.broker.durability import Fsync
from semel.broker.listeners import ListenerSettings
from semel.broker.state import Broker, BrokerOptions
from semel.broker.storage.disk import RealDisk
from semel.testing.manual_clock import ManualClock
from semel.verify.hostile_frames import GROUPS, TOPICS, TRANSACTIONAL_IDS, World, with_size
from semel.verify.simulated_network import make_request
from semel.wire.api import Api
from semel.wire.describe_transactions import DescribeTransactionsResponse
from semel.wire.messages import encode_request, response_type_for
from semel.wire.server import SERVER_VERSIONS

FRAME_SECONDS_MAX: Final = 20.0
"""What is longer is a hang. Thousands of partitions in one request take a second or two, on a busy machine several."""

_LISTENER: Final = ListenerSettings()
_SHARED: Final = bytearray(64 * 1024)
_MS_PER_FRAME: Final = 5
_TURNS_MAX: Final = 3_000
_MAY_WAIT: Final = frozenset({Api.FETCH, Api.JOIN_GROUP, Api.SYNC_GROUP})
_UNREADABLE: Final = (SerialError, ValueError, LookupError, OverflowError, struct.error)


class Violation(AssertionError):
    """The broker did what no input may make it do."""


class QuickDisk(RealDisk):
    """Real files that nobody waits for: a power cut is not what is tried here."""

    def sync(self, path: str) -> None:
        return None

    def sync_directory(self, path: str) -> None:
        return None


class BrokerLog(logging.Handler):
    """Keeps the last traceback that the broker logged, and is silent about the rest."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.last = logging.Formatter().format(record)


class SocketlessConnection(Connection):
    """The broker's end of a connection; what it sends is kept."""

    def __init__(self, broker: Broker, listener: ListenerSettings = _LISTENER) -> None:
        super().__init__(broker, listener, "/127.0.0.1", _SHARED)
        self.sent = bytearray()
        self.was_refused = False
        broker.connection_opened(self)

    def receive(self, data: bytes) -> None:
        position = 0
        while position < len(data) and not self.is_closed:
            buffer = self.frames.buffer()
            count = min(len(data) - position, len(buffer))
            buffer[:count] = data[position : position + count]
            position += count
            self.bytes_received(count)

    def refuse(self, error: Exception) -> None:
        self.was_refused = True
        super().refuse(error)

    def send_bytes(self, pieces: Sequence[bytes | memoryview]) -> None:
        for piece in pieces:
            self.sent += piece

    def outgoing_bytes(self) -> int:
        return 0

    def set_reading(self, reading: bool) -> None:
        return None

    def close_socket(self) -> None:
        return None


class HostileHost:
    """A broker with something alive on it. Every frame goes through `offer`, which raises Violation."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._clock = ManualClock(now_ms=World().now_ms)
        self.log = BrokerLog()
        self.broker = self._new_broker()
        self._connection: SocketlessConnection | None = None
        self.slowest_s = 0.0
        self._level_before = logging.NOTSET

    def _new_broker(self) -> Broker:
        # Failed logins are answered at once: thousands of them are judged one by one.
        config = {"num.partitions": "2", "connection.failed.authentication.delay.ms": "0"}
        options = BrokerOptions(data=self._folder, fsync=Fsync.COMMIT, config=config)
        return Broker(options, clock=self._clock, disk=QuickDisk(), sync_in_thread=False)

    async def start(self) -> None:
        logger = logging.getLogger("semel.broker")
        logger.addHandler(self.log)
        logger.propagate = False
        self._level_before = logger.level
        logger.setLevel(logging.ERROR)  # it warns of each connection that it refuses, of which there are thousands
        await self.broker.start(listen=False)

    async def stop(self) -> None:
        await self.broker.stop()
        logger = logging.getLogger("semel.broker")
        logger.removeHandler(self.log)
        logger.propagate = True
        logger.setLevel(self._level_before)

    async def restart(self) -> None:
        """What hostile frames have left on disk must not keep the next broker from starting."""
        await self.broker.stop()
        self._connection = None
        self.broker = self._new_broker()
        await self.broker.start(listen=False)

    async def populate(self) -> World:
        """Topics, producers with transactional ids and a group with a member."""
        topics = [
            {
                "name": name,
                "num_partitions": 2,
                "replication_factor": 1,
                "assignments": [],
                "configs": [{"name": "cleanup.policy", "value": "compact"}] if name == "compacted" else [],
            }
            for name in TOPICS
        ]
        await self.ask(Api.CREATE_TOPICS, 5, topics=topics, timeout=1000, validate_only=False)
        world = World(topic_ids=[topic.topic_id for topic in self.broker.topics])
        await self.revive(world)
        return world

    async def revive(self, world: World) -> None:
        """Producers that are not fenced, and a member that has not been thrown out."""
        for name in TRANSACTIONAL_IDS:
            answer = await self.ask(Api.INIT_PRODUCER_ID, 1, transactional_id=name, transaction_timeout=60_000)
            world.producers[name] = (answer.producer_id, answer.producer_epoch)
        world.sequences.clear()
        modern = await self.ask(
            Api.CONSUMER_GROUP_HEARTBEAT,
            0,
            group_id=GROUPS[-1],
            member_id="",
            member_epoch=0,
            instance_id=None,
            rack_id=None,
            rebalance_timeout=10_000,
            subscribed_topic_names=["orders"],
            server_assignor=None,
            topic_partitions=[],
        )
        world.member_ids = [modern.member_id or "", "member-1"]

    async def ask(self, api: Api, version: int, /, **fields: Any) -> Any:
        """A sound request and its answer."""
        request = make_request(api, version, fields)
        connection = SocketlessConnection(self.broker)
        connection.receive(b"".join(encode_request(request, 1, "sound")))
        await self._settle(connection)
        body = bytes(connection.sent[4:])
        connection.close()
        if not body:
            raise Violation(f"a sound {api.name} was not answered: {self.log.last}")
        return _read_whole(response_type_for(request), body)

    def advance(self, ms: int) -> None:
        self._clock.move(ms)

    async def offer(self, body: bytes, *, must_be_answered: bool = False) -> str:
        """Send one request (without its size). Returns what came of it: answered, refused, waiting or silent."""
        connection = self._connection
        if connection is None or connection.is_closed or connection.is_busy:
            connection = self._connection = SocketlessConnection(self.broker)
        connection.sent.clear()
        began = time.perf_counter()
        try:
            connection.receive(with_size(body))
            await self._settle(connection)
        except Exception as error:
            raise Violation(f"an exception left the connection for {body.hex()}") from error
        took_s = time.perf_counter() - began
        self.slowest_s = max(self.slowest_s, took_s)
        outcome = self._judge(connection, body)
        if took_s > FRAME_SECONDS_MAX:
            raise Violation(f"{took_s:.1f} s for {body.hex()}")
        if must_be_answered and outcome == "refused" and struct.unpack_from(">h", body)[0] != Api.PRODUCE:
            raise Violation(f"a valid request was refused: {body.hex()}")
        if outcome == "waiting":
            await self._leave(connection, body)
        self._clock.move(_MS_PER_FRAME)
        return outcome

    async def _settle(self, connection: SocketlessConnection) -> None:
        for _ in range(_TURNS_MAX):
            await asyncio.sleep(0)
            if not connection.is_busy:
                return

    async def _leave(self, connection: SocketlessConnection, body: bytes) -> None:
        """The client goes away while it waits."""
        connection.close()
        api, _ = struct.unpack_from(">hh", body)
        if api == Api.FETCH:
            await self._settle(connection)
            if connection.is_busy:
                raise Violation(f"a fetch goes on waiting for a client that has gone: {body.hex()}")

    def _judge(self, connection: SocketlessConnection, body: bytes) -> str:
        if self.broker.metrics.unexpected_errors:
            raise Violation(f"an unexpected error for {body.hex()}\n{self.log.last}")
        if connection.sent:
            _check_answer(bytes(connection.sent), body)
            return "answered"
        if connection.is_closed:
            if not connection.was_refused:
                raise Violation(f"closed without being refused: {body.hex()}")
            return "refused"
        if connection.is_busy:
            api = struct.unpack_from(">h", body)[0]
            if api not in _MAY_WAIT:
                raise Violation(f"API {api} hangs: {body.hex()}")
            return "waiting"
        if struct.unpack_from(">h", body)[0] != Api.PRODUCE:
            raise Violation(f"neither answered nor refused: {body.hex()}")
        return "silent"


def _check_answer(sent: bytes, body: bytes) -> None:
    key, version, correlation_id = struct.unpack_from(">hhi", body)
    size, answered = struct.unpack_from(">ii", sent)
    if size != len(sent) - 4:
        raise Violation(f"an answer of {len(sent) - 4} bytes says it has {size}, for {body.hex()}")
    if answered != correlation_id:
        raise Violation(f"the answer is to {answered} and not to {correlation_id}: {body.hex()}")
    api = Api(key)
    versions = SERVER_VERSIONS[api]
    if not versions.lowest <= version <= versions.highest:
        _read_whole(load_response_schema(api, 0), sent[4:])  # only ApiVersions answers versions it does not serve
    else:
        _read_whole(_response_type(api, version), sent[4:])


@cache
def _response_type(api: Api, version: int) -> Any:
    return DescribeTransactionsResponse if api is Api.DESCRIBE_TRANSACTIONS else load_response_schema(api, version)


def _read_whole(response_type: Any, data: bytes) -> Any:
    try:
        _, header_bytes = entity_reader(response_type.__header_schema__)(data, 0)
        response, body_bytes = entity_reader(response_type)(data, header_bytes)
    except _UNREADABLE as error:
        raise Violation(f"{response_type.__name__} cannot be read: {data.hex()}") from error
    if header_bytes + body_bytes != len(data):
        raise Violation(f"{response_type.__name__} has bytes behind its end: {data.hex()}")
    return response
