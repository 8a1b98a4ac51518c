"""Connections bound to real sockets, plain or with TLS in between, and the listeners that accept them."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from semel.broker.connection import ANONYMOUS, OUTGOING_BYTES_MAX, Connection
from semel.broker.frames import SHARED_BUFFER_BYTES
from semel.broker.listeners import plain_address
from semel.errors import ConfigError

if TYPE_CHECKING:
    import ssl

    from semel.broker.listeners import ListenerSettings
    from semel.broker.state import Broker
    from semel.broker.tls import TlsChannel

_LOG: Final = logging.getLogger("semel.broker")
_BACKLOG: Final = 1024
_ACCEPTS_AT_ONCE: Final = 64
_PIECES_AT_ONCE: Final = 64
_PAUSE_WITHOUT_DESCRIPTORS_MS: Final = 1000
_PARTING_MS: Final = 1000
_RECEIVED_AT_ONCE: Final = 512 << 10
"""A client that sends as fast as it can must not keep the loop at its own socket."""
_SENT_AT_ONCE: Final = 4 << 20
"""Likewise a client that reads as fast as it can."""
_ENCRYPTED_AT_ONCE: Final = 1 << 20
_HANDSHAKE_BYTES_AT_ONCE: Final = 16 << 10
_TLS_BYTES: Final = 64 << 10
"""About what OpenSSL keeps for a connection."""


class PlainConnection(Connection):
    """A non-blocking socket, received straight into frames and sent from the pieces of an answer without joining them.

    asyncio's own transport copies what does not leave at once, and shifts the rest after each send.
    """

    def __init__(self, broker: Broker, listener: ListenerSettings, peer: socket.socket, shared: bytearray) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = peer
        self._outgoing: deque[memoryview] = deque()
        self._outgoing_bytes = 0
        self._is_writing = False
        super().__init__(broker, listener, _host_of(peer.getpeername()), shared)
        self._loop.add_reader(peer.fileno(), self._readable)

    def _readable(self) -> None:
        if count := self._receive(self.frames.buffer()[:_RECEIVED_AT_ONCE]):
            self.bytes_received(count)

    def _receive(self, buffer: memoryview) -> int:
        """How many bytes have come; with 0 there is nothing to do, and the connection may have ended."""
        try:
            count = self._socket.recv_into(buffer)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            count = 0
        if count == 0:
            self.client_left()
        return count

    def send_bytes(self, pieces: Sequence[bytes | memoryview]) -> None:
        for piece in pieces:
            if len(piece):
                self._outgoing.append(memoryview(piece))
                self._outgoing_bytes += len(piece)
        if not self._is_writing:
            self._write()

    def outgoing_bytes(self) -> int:
        return self._outgoing_bytes

    def set_reading(self, reading: bool) -> None:
        if reading:
            self._loop.add_reader(self._socket.fileno(), self._readable)
        else:
            self._loop.remove_reader(self._socket.fileno())

    def close_socket(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()

    def _write(self) -> None:
        left = _SENT_AT_ONCE
        while left > 0 and (self._outgoing or self._refill()):
            try:
                sent = self._socket.sendmsg(list(islice(self._outgoing, _PIECES_AT_ONCE)))
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                self.close()
                return
            self._outgoing_bytes -= sent
            left -= sent
            while sent:
                first = self._outgoing[0]
                if sent < len(first):
                    self._outgoing[0] = first[sent:]
                    break
                sent -= len(first)
                self._outgoing.popleft()
        is_left = self.outgoing_bytes() > 0
        if is_left is not self._is_writing:
            self._is_writing = is_left
            if self._is_writing:
                self._loop.add_writer(self._socket.fileno(), self._writable)
            else:
                self._loop.remove_writer(self._socket.fileno())
        if not self.is_closed:
            self.note_held()

    def _refill(self) -> bool:
        """Make more of an answer ready to be sent. Whether there was more."""
        return False

    def _writable(self) -> None:
        self._write()
        if not self.is_closed and self.outgoing_bytes() <= OUTGOING_BYTES_MAX:
            self.work()


class TlsConnection(PlainConnection):
    """The same with TLS between the socket and the frames."""

    def __init__(
        self,
        broker: Broker,
        listener: ListenerSettings,
        peer: socket.socket,
        shared: bytearray,
        channel: TlsChannel,
        ciphertext: bytearray,
    ) -> None:
        """`ciphertext` is shared as well: it is handed to the channel as soon as something is in it."""
        self._channel = channel
        self._is_parting = False
        self._ciphertext = ciphertext
        self._plain: deque[memoryview] = deque()
        """What is to be encrypted when the socket can take it."""
        self._plain_bytes = 0
        super().__init__(broker, listener, peer, shared)

    @property
    def own_bytes(self) -> int:
        return _TLS_BYTES

    @property
    def is_logged_in(self) -> bool:
        """Until the handshake is over it is anyone who has reached the port, also where a certificate is required."""
        return self._channel.is_established and super().is_logged_in

    def _readable(self) -> None:
        is_established = self._channel.is_established
        count = self._receive(memoryview(self._ciphertext)[: None if is_established else _HANDSHAKE_BYTES_AT_ONCE])
        if not count or self._is_parting:
            return
        self._channel.feed(memoryview(self._ciphertext)[:count])
        if is_established:
            self._read_plain()
        else:
            # To sign takes milliseconds. Until its turn comes nothing more is received.
            self._loop.remove_reader(self._socket.fileno())
            self.broker.handshake_lane.call_in_turn(self._shake_hands)

    def _shake_hands(self) -> None:
        if self.is_closed:
            return
        self._read_plain()
        if self.is_closed:
            return
        if self._channel.is_established:
            self.note_login()
        if not self.is_closed and self._reading and not self._is_left:
            self._loop.add_reader(self._socket.fileno(), self._readable)

    def _read_plain(self) -> None:
        from semel.broker.tls import TlsFailed

        read: int | None = 0
        try:
            while not self.is_closed and (read := self._channel.read_into(self.frames.buffer())):
                self._identify()
                self.bytes_received(read)
            self._send_outgoing()
        except TlsFailed as failure:
            self._send_outgoing()
            self._part_with(failure)
            return
        if not self.is_closed and read is None:
            self.client_left()

    def _part_with(self, failure: Exception) -> None:
        """Close when the client has closed: with bytes of it unread the kernel would cut off the alert just sent."""
        self._is_parting = True
        _LOG.warning("TLS with %s failed: %s", self.host, failure)
        self.broker.metrics.refused_connections += 1
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.close()
            return
        self.broker.clock.call_later(_PARTING_MS, self.close)

    def _identify(self) -> None:
        if self.sasl is None and self.principal == ANONYMOUS:
            self.principal = self._channel.principal

    def send_bytes(self, pieces: Sequence[bytes | memoryview]) -> None:
        for piece in pieces:
            if len(piece):
                self._plain.append(memoryview(piece))
                self._plain_bytes += len(piece)
        if not self._is_writing:
            self._write()

    def outgoing_bytes(self) -> int:
        return self._outgoing_bytes + self._plain_bytes

    def _refill(self) -> bool:
        if not self._plain:
            return False
        left = _ENCRYPTED_AT_ONCE
        while self._plain and left > 0:
            first = self._plain.popleft()
            if len(first) > left:
                self._plain.appendleft(first[left:])
                first = first[:left]
            self._channel.write(first)
            self._plain_bytes -= len(first)
            left -= len(first)
        ciphertext = memoryview(self._channel.take_outgoing())
        self._outgoing.append(ciphertext)
        self._outgoing_bytes += len(ciphertext)
        return True

    def _send_outgoing(self) -> None:
        if not self.is_closed and (ciphertext := self._channel.take_outgoing()):
            super().send_bytes([ciphertext])

    def close_socket(self) -> None:
        self._plain.clear()
        self._plain_bytes = 0
        if self._channel.is_established and not self._is_parting:
            self._channel.end()
            farewell = memoryview(self._channel.take_outgoing())
            self._outgoing.append(farewell)
            self._outgoing_bytes += len(farewell)
            self._write()
        super().close_socket()


class Listener:
    """One address that the broker listens on."""

    def __init__(self, broker: Broker, settings: ListenerSettings) -> None:
        self.settings = settings
        self._broker = broker
        self._shared = bytearray(SHARED_BUFFER_BYTES)
        self._ciphertext = bytearray(SHARED_BUFFER_BYTES)
        self._tls = _tls_context(settings)
        self._socket = _bound(settings.host, settings.port)
        self.port: int = self._socket.getsockname()[1]

    def start(self) -> None:
        try:
            self._socket.listen(_BACKLOG)
        except OSError as error:  # somebody else, bound to the same port, was first
            raise cannot_listen(self.settings.host, self.port, error) from error
        self._accept_on()

    def close(self) -> None:
        self._accept_off()
        self._socket.close()

    def _accept_on(self) -> None:
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._socket.fileno(), self._accept)

    def _accept_off(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket.fileno())

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                peer, _address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                # The kernel keeps the waiting clients; asking again at once would only burn the processor.
                _LOG.error("no more connections can be taken: %s. Close some or raise the limit (ulimit -n).", error)
                self._accept_off()
                self._broker.clock.call_later(_PAUSE_WITHOUT_DESCRIPTORS_MS, self._accept_on)
                return
            self._take(peer)
            if self._broker.is_full:
                return  # to find the one that goes takes a look at all: once a turn

    def _take(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            connection = self._connection(peer)
        except OSError:  # the client has gone already
            peer.close()
        else:
            self._broker.connection_opened(connection)

    def _connection(self, peer: socket.socket) -> PlainConnection:
        if self._tls is None:
            return PlainConnection(self._broker, self.settings, peer, self._shared)
        from semel.broker.tls import TlsChannel

        channel = TlsChannel(self._tls)
        return TlsConnection(self._broker, self.settings, peer, self._shared, channel, self._ciphertext)


def _tls_context(settings: ListenerSettings) -> ssl.SSLContext | None:
    if not settings.uses_tls:
        return None
    from semel.broker.tls import server_context  # here and not above: most brokers never need it

    return server_context(settings)


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise cannot_listen(host, port, error) from error
    bound.setblocking(False)
    return bound


def cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    """Why an address cannot be had, in words."""
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"Port {port} of {host} is in use: stop what listens there, or take another (0: a free one)")
    return ConfigError(f"The broker cannot listen on {host}:{port} ({error.strerror or error}): check host and port.")


def _host_of(address: Any) -> str:
    return f"/{plain_address(address[0])}"
