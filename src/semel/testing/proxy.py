"""A proxy between Kafka clients and brokers that reads the protocol and can sever the connection at any frame.

>>> from semel import Producer
>>> with KafkaProxy(bootstrap) as proxy:
...     proxy.decide = lambda passage: Cut.BEFORE if passage.index == 7 else None
...     with Producer(bootstrap_servers=proxy.bootstrap) as producer:
...         producer.send("orders", b"value")
...     len(proxy.passages) > 7
True

Brokers tell clients their own addresses, so the proxy listens once for every broker and puts its own addresses into the
answers that name brokers. It works with any client that speaks without TLS. More than cuts can be had from a subclass:
see `semel.verify.faults.proxy`.
"""

from __future__ import annotations

import dataclasses
import io
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from types import TracebackType
from typing import Any, Self

from kio.index import load_response_schema
from kio.serial import entity_reader, entity_writer

from semel.wire import Api

_SIZE = struct.Struct(">i")
_REQUEST_START = struct.Struct(">hhih")
_NAMING_BROKERS = (Api.METADATA, Api.FIND_COORDINATOR, Api.DESCRIBE_CLUSTER)


class Direction(Enum):
    REQUEST = "request"
    RESPONSE = "response"


class Cut(Enum):
    """Sever the connection, both sides, before or after the frame is passed on."""

    BEFORE = "before"
    AFTER = "after"


@dataclasses.dataclass(frozen=True, slots=True)
class Passage:
    """One frame on its way; `index` counts all frames of the proxy, `connection` its connections."""

    index: int
    direction: Direction
    api_key: int
    api_version: int
    correlation_id: int
    connection: int
    client_id: str | None
    """What the request says; an answer has that of its request."""


Address = tuple[str, int]


@dataclasses.dataclass(eq=False, slots=True)
class Connection:
    """A client's connection, and the proxy's own to the broker in its place."""

    number: int
    upstream: Address
    client: socket.socket
    broker: socket.socket
    asked: dict[int, Passage] = dataclasses.field(default_factory=dict[int, Passage])
    """The requests that wait for their answers, by correlation id."""


class KafkaProxy:
    """Passes frames between clients and the brokers behind `bootstrap` until told to cut."""

    def __init__(self, bootstrap: str, *, keep_passages: bool = True) -> None:
        self.decide: Callable[[Passage], Cut | None] = lambda _: None
        self.passages: list[Passage] = []
        self._keep_passages = keep_passages
        self._lock = threading.Lock()
        self._listeners: dict[Address, socket.socket] = {}
        self._connections: set[Connection] = set()
        self._threads: set[threading.Thread] = set()
        self._frame_count = 0
        self._connection_count = 0
        self._closing = threading.Event()
        self._upstream = [_parse(entry) for entry in bootstrap.split(",")]

    def __enter__(self) -> Self:
        for address in self._upstream:
            self._listen_for(address)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def bootstrap(self) -> str:
        return ",".join(f"127.0.0.1:{self._listen_for(address)}" for address in self._upstream)

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            sockets = [*self._listeners.values()]
            for connection in self._connections:
                sockets += [connection.client, connection.broker]
            threads = list(self._threads)
        for each in sockets:
            sever(each)
        for thread in threads:
            thread.join(timeout=5)

    def _listen_for(self, upstream: Address) -> int:
        """The port that stands for this broker."""
        with self._lock:
            listener = self._listeners.get(upstream)
            if listener is None:
                listener = socket.create_server(("127.0.0.1", 0))
                self._listeners[upstream] = listener
                self._start(self._accept, listener, upstream)
        return listener.getsockname()[1]

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        """Run something in a thread that `close` waits for. With the lock held."""

        def run() -> None:
            try:
                target(*arguments)
            finally:
                with self._lock:
                    self._threads.discard(thread)

        thread = threading.Thread(target=run, daemon=True)
        self._threads.add(thread)
        thread.start()

    def _accept(self, listener: socket.socket, upstream: Address) -> None:
        while not self._closing.is_set():
            try:
                client, _ = listener.accept()
            except OSError:
                return  # closed
            try:
                broker = connect(upstream)
            except OSError:
                client.close()
                continue
            for each in (client, broker):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                if self._closing.is_set():
                    sever(client)
                    sever(broker)
                    return
                self._connection_count += 1
                connection = Connection(self._connection_count, upstream, client, broker)
                self._connections.add(connection)
                self._start(self._pump, Direction.REQUEST, connection)
                self._start(self._pump, Direction.RESPONSE, connection)

    def _pump(self, direction: Direction, connection: Connection) -> None:
        source, sink = connection.client, connection.broker
        if direction is Direction.RESPONSE:
            source, sink = sink, source
        try:
            while (frame := read_frame(source)) is not None:
                passage = self._note(direction, frame, connection)

                def deliver(passage: Passage = passage, frame: bytes = frame) -> None:
                    if direction is Direction.RESPONSE:
                        frame = self._with_own_addresses(passage, frame)
                    sink.sendall(_SIZE.pack(len(frame)) + frame)

                if not self._treat(connection, passage, frame, deliver):
                    return
        except OSError:
            return  # the other side is gone, and with it this connection
        finally:
            sever(source)
            sever(sink)
            with self._lock:
                self._connections.discard(connection)

    def _treat(self, connection: Connection, passage: Passage, frame: bytes, deliver: Callable[[], None]) -> bool:
        """Let the frame go on by `deliver`, or not; False ends the connection. What waits here holds up its followers.

        It runs in the thread of the connection's direction.
        """
        cut = self.decide(passage)
        if cut is not Cut.BEFORE:
            deliver()
        return cut is None

    def _note(self, direction: Direction, frame: bytes, connection: Connection) -> Passage:
        with self._lock:
            index, self._frame_count = self._frame_count, self._frame_count + 1
            if direction is Direction.REQUEST:
                api_key, version, correlation_id, size = _REQUEST_START.unpack_from(frame)
                at = _REQUEST_START.size
                client_id = None if size < 0 else frame[at : at + size].decode(errors="replace")
                passage = Passage(index, direction, api_key, version, correlation_id, connection.number, client_id)
                connection.asked[correlation_id] = passage
            else:
                (correlation_id,) = _SIZE.unpack_from(frame)
                request = connection.asked.pop(correlation_id)
                passage = dataclasses.replace(request, index=index, direction=direction)
            if self._keep_passages:
                self.passages.append(passage)
            return passage

    def _with_own_addresses(self, passage: Passage, frame: bytes) -> bytes:
        if passage.api_key not in _NAMING_BROKERS:
            return frame
        response_type = load_response_schema(passage.api_key, passage.api_version)
        header, header_bytes = entity_reader(response_type.__header_schema__)(frame, 0)
        response, _ = entity_reader(response_type)(frame, header_bytes)
        buffer = io.BytesIO()
        entity_writer(type(header))(buffer, header)
        entity_writer(response_type)(buffer, self._readdressed(response))
        return buffer.getvalue()

    def _readdressed(self, entity: Any) -> Any:
        """The response (or the part of one) with every host and port replaced."""
        if getattr(entity, "host", ""):
            entity = dataclasses.replace(entity, host="127.0.0.1", port=self._listen_for((entity.host, entity.port)))
        for name in ("brokers", "coordinators"):
            if hasattr(entity, name):
                replaced = tuple(self._readdressed(item) for item in getattr(entity, name))
                entity = dataclasses.replace(entity, **{name: replaced})
        return entity


def connect(upstream: Address) -> socket.socket:
    """A connection to a broker."""
    broker = socket.create_connection(upstream, timeout=10)
    if broker.getsockname() == broker.getpeername():
        # Nobody listens there now, and by chance the system chose that very port for this end.
        broker.close()
        raise ConnectionRefusedError(f"no broker at {upstream}")
    broker.settimeout(None)
    return broker


def _parse(entry: str) -> Address:
    host, _, port = entry.strip().rpartition(":")
    return host, int(port)


def read_frame(source: socket.socket) -> bytes | None:
    """A whole frame, or None at the end of the stream."""
    prefix = _read_exactly(source, 4)
    return None if prefix is None else _read_exactly(source, _SIZE.unpack(prefix)[0])


def _read_exactly(source: socket.socket, size: int) -> bytes | None:
    buffer = bytearray()
    while len(buffer) < size:
        received = source.recv(min(size - len(buffer), 1 << 20))
        if not received:
            return None
        buffer += received
    return bytes(buffer)


def sever(each: socket.socket) -> None:
    with suppress(OSError):  # already gone
        each.shutdown(socket.SHUT_RDWR)
    each.close()
