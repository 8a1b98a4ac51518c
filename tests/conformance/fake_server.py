"""Servers that are not the broker a client hopes for: each connection is answered once by a given function."""

from __future__ import annotations

import io
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta

from kio.schema.api_versions.v0.response import ApiVersion as ApiVersionV0
from kio.schema.api_versions.v0.response import ApiVersionsResponse as ApiVersionsResponseV0
from kio.schema.api_versions.v3.response import ApiVersion, ApiVersionsResponse
from kio.schema.errors import ErrorCode
from kio.serial import entity_writer
from kio.static.primitive import i16, i32, i32Timedelta
from kio.static.protocol import ResponsePayload

Answer = Callable[[bytes], bytes]


@contextmanager
def fake_server(answer: Answer) -> Iterator[str]:
    """Listens on a free port of the loopback interface; yields host:port. Connections get one answer and an end."""
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=_serve, args=(listener, answer))
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closing alone would not
        listener.close()
        thread.join()


def _serve(listener: socket.socket, answer: Answer) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # the listener was shut down
            return
        with connection, suppress(ConnectionError, TimeoutError):  # a client that has seen enough may hang up first
            connection.settimeout(5)
            connection.sendall(answer(connection.recv(65_536)))
            connection.recv(65_536)


def speak_http(request: bytes) -> bytes:
    return b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def broker_before_2_4(request: bytes) -> bytes:
    """ApiVersions 3 is not known to it: it says so in version 0, with an empty list."""
    nothing: tuple[ApiVersionV0, ...] = ()
    return _frame(request, ApiVersionsResponseV0(error_code=ErrorCode.unsupported_version, api_keys=nothing))


def broker_with(versions: Mapping[int, tuple[int, int]]) -> Answer:
    """A broker that offers these APIs, by key, in these versions."""
    keys = tuple(
        ApiVersion(api_key=i16(key), min_version=i16(low), max_version=i16(high))
        for key, (low, high) in versions.items()
    )

    def answer(request: bytes) -> bytes:
        none = ErrorCode.none
        return _frame(
            request, ApiVersionsResponse(error_code=none, api_keys=keys, throttle_time=i32Timedelta.parse(timedelta(0)))
        )

    return answer


def _frame(request: bytes, response: ResponsePayload) -> bytes:
    """The answer with the request's correlation id, which stands after size, API key and version."""
    (correlation_id,) = struct.unpack_from(">i", request, 8)
    header = response.__header_schema__(correlation_id=i32(correlation_id))
    buffer = io.BytesIO()
    entity_writer(type(header))(buffer, header)
    entity_writer(type(response))(buffer, response)
    body = buffer.getvalue()
    return struct.pack(">i", len(body)) + body
