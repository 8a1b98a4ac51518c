"""The raw exchange tells apart the ways in which a broker can fail to answer."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from semel.errors import BrokerUnreachable, ConnectionLost, RequestTimedOut, WireError
from semel.testing.exchange import live_brokers, parse_bootstrap


@contextmanager
def server(answer: bytes | None) -> Iterator[tuple[str, int]]:
    """A server for one request: sends `answer` and hangs up, or with None says nothing until the client gives up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                if answer is None:
                    connection.recv(1)
                else:
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()
        thread.join(30)


def test_nobody_listening() -> None:
    """A refused connection means that nothing was sent."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with pytest.raises(BrokerUnreachable, match="No broker answers at 127"):
        live_brokers(address)


@pytest.mark.parametrize("answer", [b"", b"\0\0", struct.pack(">i", 100) + b"half"])
def test_connection_ends_before_the_answer(answer: bytes) -> None:
    """A hang-up at any point of the answer is a lost connection."""
    with server(answer) as address, pytest.raises(ConnectionLost, match="MetadataRequest"):
        live_brokers(address)


def test_no_answer_in_time() -> None:
    """Silence is a time-out."""
    with server(None) as address, pytest.raises(RequestTimedOut, match="MetadataRequest"):
        live_brokers(address, timeout_s=0.1)


@pytest.mark.parametrize("size", [-1, 0, 2**31 - 1])
def test_absurd_sizes_are_refused_before_reading(size: int) -> None:
    """A size that no answer has is an error at once, not an attempt to read it."""
    with server(struct.pack(">i", size)) as address, pytest.raises(WireError, match="claims"):
        live_brokers(address)


def test_answer_to_another_request_is_refused() -> None:
    """The correlation id has to be the request's own."""
    with server(struct.pack(">iib", 5, 77, 0)) as address, pytest.raises(WireError, match="correlation id 77"):
        live_brokers(address)


def test_bootstrap_lists_are_read() -> None:
    """Spaces do not matter, and the port is what follows the last colon."""
    assert parse_bootstrap("localhost:1, 127.0.0.1:2") == [("localhost", 1), ("127.0.0.1", 2)]
