"""A proxy between Kafka clients and brokers that reads the protocol and can sever the connection at any frame.

>>> with KafkaProxy("127.0.0.1:9092") as proxy:                         # doctest: +SKIP
...     proxy.decide = lambda passage: Cut.BEFORE if passage.index == 7 else None
...     run_a_client(proxy.bootstrap)
...     print(proxy.passages)

Brokers tell clients their own addresses, so the proxy listens once for every broker and puts its own addresses into the
answers that name brokers. It works with any client.
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
_REQUEST_START = struct.Struct(">hhi")
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
    """One frame on its way; `index` counts all frames of the proxy."""

    index: int
    direction: Direction
    api_key: int
    api_version: int
    correlation_id: int


Address = tuple[str, int]


class KafkaProxy:
    """Passes frames between clients and the brokers behind `bootstrap` until told to cut."""

    def __init__(self, bootstrap: str) -> None:
        self.decide: Callable[[Passage], Cut | None] = lambda _: None
        self.passages: list[Passage] = []
        self._lock = threading.Lock()
        self._listeners: dict[Address, socket.socket] = {}
        self._open_sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closing = False
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
        self._closing = True
        with self._lock:
            sockets = [*self._listeners.values(), *self._open_sockets]
        for each in sockets:
            _sever(each)
        for thread in self._threads:
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
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket, upstream: Address) -> None:
        while not self._closing:
            try:
                client, _ = listener.accept()
            except OSError:
                return  # closed
            try:
                broker = socket.create_connection(upstream, timeout=10)
            except OSError:
                client.close()
                continue
            broker.settimeout(None)
            with self._lock:
                self._open_sockets |= {client, broker}
            asked: dict[int, tuple[int, int]] = {}
            self._start(self._pump, Direction.REQUEST, client, broker, asked)
            self._start(self._pump, Direction.RESPONSE, broker, client, asked)

    def _pump(
        self,
        direction: Direction,
        source: socket.socket,
        sink: socket.socket,
        asked: dict[int, tuple[int, int]],
    ) -> None:
        try:
            while (frame := _read_frame(source)) is not None:
                passage = self._note(direction, frame, asked)
                cut = self.decide(passage)
                if cut is not Cut.BEFORE:
                    if direction is Direction.RESPONSE:
                        frame = self._with_own_addresses(passage, frame)
                    sink.sendall(_SIZE.pack(len(frame)) + frame)
                if cut is not None:
                    return
        except OSError:
            return  # the other side is gone, and with it this connection
        finally:
            _sever(source)
            _sever(sink)
            with self._lock:
                self._open_sockets -= {source, sink}

    def _note(self, direction: Direction, frame: bytes, asked: dict[int, tuple[int, int]]) -> Passage:
        with self._lock:
            if direction is Direction.REQUEST:
                api_key, version, correlation_id = _REQUEST_START.unpack_from(frame)
                asked[correlation_id] = (api_key, version)
            else:
                (correlation_id,) = _SIZE.unpack_from(frame)
                api_key, version = asked.pop(correlation_id)
            passage = Passage(len(self.passages), direction, api_key, version, correlation_id)
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


def _parse(entry: str) -> Address:
    host, _, port = entry.strip().rpartition(":")
    return host, int(port)


def _read_frame(source: socket.socket) -> bytes | None:
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


def _sever(each: socket.socket) -> None:
    with suppress(OSError):  # already gone
        each.shutdown(socket.SHUT_RDWR)
    each.close()
