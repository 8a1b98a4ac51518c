"""One blocking socket to one broker, with time-outs and pipelined requests. Not for use from several threads.

Kafka answers a connection's requests in order, so what is under way is a queue, and a lost connection or a missed
deadline leaves the fate of everything in the queue unknown: each `Pending` then carries the error instead of a
response.
"""

from __future__ import annotations

import math
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kio.static.protocol import RequestPayload

from semel.client.config import ClientConfig
from semel.client.security import explain_sasl_failure, explain_tls_failure, make_ssl_context, sasl_client
from semel.errors import BrokerUnreachable, ConnectionLost, RequestTimedOut, SemelError, WireError
from semel.wire import (
    Api,
    BrokerCapabilities,
    ErrorCode,
    VersionRange,
    build,
    decode_response,
    encode_request,
    read_correlation_id,
    read_frame_size,
    response_type_for,
)

# Java's client takes 85 to 95 %: early enough for a slow login, late enough not to log in all the time.
_SHARE_OF_SESSION: Final = 0.9


class Stream(Protocol):
    """What a connection needs of a socket."""

    def settimeout(self, value: float | None, /) -> None: ...

    def sendmsg(self, buffers: Iterable[memoryview], /) -> int: ...

    def recv_into(self, buffer: memoryview, /) -> int: ...

    def fileno(self) -> int: ...

    def close(self) -> None: ...


Connect = Callable[[str, int, float], Stream]
"""Opens a stream to a host and port within so many seconds, or raises OSError."""


def connect_tcp(host: str, port: int, timeout_s: float) -> socket.socket:
    plain = socket.create_connection((host, port), timeout=timeout_s)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return plain


@dataclass(slots=True, eq=False)
class Pending:
    """A request under way, later its response, or the error that leaves its fate unknown."""

    request: RequestPayload
    correlation_id: int
    deadline: float
    answered: bool = True
    response: Any = None
    error: SemelError | None = None

    @property
    def done(self) -> bool:
        return self.response is not None or self.error is not None

    def result(self) -> Any:
        """The response; raises what happened instead."""
        if self.error is not None:
            raise self.error
        return self.response


class Connection:
    """A connection that is open from construction on, authenticated, its broker's versions known."""

    def __init__(
        self,
        host: str,
        port: int,
        config: ClientConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        connect: Connect = connect_tcp,
    ) -> None:
        self.address = f"{host}:{port}"
        self._config = config
        self._clock = clock
        self._under_way: deque[Pending] = deque()
        self._next_correlation_id = 0
        self._has_answered = False
        self._log_in_again_at = math.inf
        self._security = config.security
        self._socket = self._open(host, port, connect)
        try:
            self.capabilities = self._ask_versions(host, port)
            if self._security.uses_sasl:
                self._authenticate()
        except (ConnectionLost, RequestTimedOut) as error:
            self._socket.close()
            # Only the set-up was under way: no request of the caller is in doubt.
            raise BrokerUnreachable(
                f"The connection to {self.address} broke off while it was being set up ({error.__cause__}); nothing "
                "was sent. Check that the broker runs, and security.protocol and the sasl.* settings."
            ) from error.__cause__
        except BaseException:
            self._socket.close()
            raise

    # -- opening ---------------------------------------------------------------------------------------------------

    def _open(self, host: str, port: int, connect: Connect) -> Stream | ssl.SSLSocket:
        timeout = self._config.connection_setup_timeout_ms / 1000
        context = make_ssl_context(self._security) if self._security.uses_tls else None
        try:
            plain = connect(host, port, timeout)
        except OSError as error:
            raise BrokerUnreachable(
                f"No connection to {self.address} ({error}), so nothing was sent. Check bootstrap.servers, and that "
                "the broker runs and its advertised.listeners can be reached from here."
            ) from error
        if context is None:
            return plain
        assert isinstance(plain, socket.socket), "TLS is for the system's own sockets"
        try:
            return context.wrap_socket(plain, server_hostname=host)
        except OSError as error:
            plain.close()
            raise explain_tls_failure(error, host, port) from error

    def _ask_versions(self, host: str, port: int) -> BrokerCapabilities:
        """ApiVersions v3; a broker that does not know v3 answers in v0 with the list all the same (KIP-511)."""
        request = build(Api.API_VERSIONS, 3, client_software_name="semel", client_software_version="0.1.0")
        setup_ms = self._config.connection_setup_timeout_ms
        pending = self.send(request, timeout_ms=min(setup_ms, self._config.request_timeout_ms))
        try:
            if pending.error is not None:
                raise pending.error
            frame = self._read_frame(pending, is_first=True)
        except ConnectionLost as error:
            cause = error.__cause__
            if self._security.uses_tls and isinstance(cause, OSError):
                # TLS 1.3 tells that a client certificate is missing only when the first bytes are read.
                raise explain_tls_failure(cause, host, port, handshake_done=True) from cause
            raise BrokerUnreachable(
                f"{self.address} closed the connection at the first request; nothing was sent. It may expect TLS or "
                f"SASL: check security.protocol (now {self._security.protocol})."
            ) from cause
        except RequestTimedOut as error:
            raise BrokerUnreachable(
                f"{self.address} took the connection and then said nothing for {setup_ms} ms "
                "(socket.connection.setup.timeout.ms); nothing was sent. Check that it is the port of a Kafka broker."
            ) from error.__cause__
        finally:
            self._under_way.clear()
        response_type = response_type_for(request)
        if len(frame) >= 6 and struct.unpack_from(">h", frame, 4)[0] == ErrorCode.unsupported_version:
            response_type = response_type_for(build(Api.API_VERSIONS, 0))
        response = decode_response(response_type, frame)
        return BrokerCapabilities(
            versions={key.api_key: VersionRange(key.min_version, key.max_version) for key in response.api_keys},
            finalized_features={f.name: f.max_version_level for f in getattr(response, "finalized_features", ())},
            finalized_features_epoch=getattr(response, "finalized_features_epoch", -1),
        )

    def _authenticate(self) -> None:
        exchange = sasl_client(self._security)
        handshake = self.call(Api.SASL_HANDSHAKE, mechanism=self._security.sasl_mechanism)
        if handshake.error_code != ErrorCode.none:
            raise explain_sasl_failure(self._security, self.address, offered=handshake.mechanisms)
        token: bytes | None = exchange.first()
        while token is not None:
            answer = self.call(Api.SASL_AUTHENTICATE, auth_bytes=token)
            if answer.error_code != ErrorCode.none:
                raise explain_sasl_failure(self._security, self.address, said=answer.error_message)
            token = exchange.next(answer.auth_bytes)
            if lifetime := getattr(answer, "session_lifetime", None):
                self._log_in_again_at = self._clock() + lifetime.total_seconds() * _SHARE_OF_SESSION

    def _log_in_again(self) -> SemelError | None:
        """Prolong the session before the broker ends it (KIP-368). What is returned is why that failed, if it did."""
        self._log_in_again_at = math.inf
        try:
            self._authenticate()
        except SemelError as error:
            self.fail(error)
            return error
        return None

    # -- requests --------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._socket.fileno() >= 0

    @property
    def under_way(self) -> int:
        """How many requests wait for their answers."""
        return len(self._under_way)

    @property
    def next_deadline(self) -> float:
        """When the oldest request under way will have waited too long."""
        return self._under_way[0].deadline

    def fileno(self) -> int:
        return self._socket.fileno()

    def has_buffered(self) -> bool:
        """TLS may hold decrypted bytes that `select` does not see."""
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    def call(self, api: Api, **fields: Any) -> Any:
        """Send one request in the highest shared version and wait for its answer."""
        pending = self.send(build(api, self.capabilities.version_for(api), **fields))
        while not pending.done:
            self.receive()
        return pending.result()

    def send(self, request: RequestPayload, *, timeout_ms: int | None = None, answered: bool = True) -> Pending:
        """Write a request without waiting. If the connection breaks, the returned `Pending` carries the error.

        `answered=False` is for acks=0, which the broker never answers.
        """
        correlation_id = self._next_correlation_id
        self._next_correlation_id = (correlation_id + 1) & 0x7FFFFFFF
        deadline = self._clock() + (self._config.request_timeout_ms if timeout_ms is None else timeout_ms) / 1000
        pending = Pending(request, correlation_id, deadline, answered)
        if not self.is_open:
            pending.error = ConnectionLost(f"The connection to {self.address} is closed; the request was not sent.")
            return pending
        if self._clock() >= self._log_in_again_at and not self._under_way:
            pending.error = self._log_in_again()
            if pending.error is not None:
                return pending
        chunks = encode_request(request, correlation_id, self._config.client_id)
        self._under_way.append(pending)
        try:
            self._write(chunks, deadline)
        except OSError as error:
            lost = self._lost(error)
            lost.__cause__ = error
            self.fail(lost)
        if not answered and not pending.done:
            self._under_way.remove(pending)
            pending.response = ()
        return pending

    def receive(self) -> Pending:
        """Wait for the answer to the oldest request under way, and return it done."""
        pending = self._under_way[0]
        try:
            frame = self._read_frame(pending)
            if read_correlation_id(frame) != pending.correlation_id:
                raise WireError(f"{self.address} answered out of order; the connection was closed.")
            response = decode_response(response_type_for(pending.request), frame)
        except (ConnectionLost, RequestTimedOut, WireError) as error:
            self.fail(error)
            return pending
        self._under_way.popleft()
        self._has_answered = True
        pending.response = response
        return pending

    def fail(self, error: SemelError) -> None:
        """Close, and leave everything under way with `error`."""
        self._socket.close()
        while self._under_way:
            self._under_way.popleft().error = error

    def close(self) -> None:
        self.fail(ConnectionLost(f"The connection to {self.address} was closed by this client."))

    # -- bytes -----------------------------------------------------------------------------------------------------

    def _lost(self, error: OSError) -> ConnectionLost | RequestTimedOut:
        if isinstance(error, TimeoutError):
            return RequestTimedOut(
                f"{self.address} took longer than {self._config.request_timeout_ms} ms (request.timeout.ms) to answer."
            )
        hint = ""
        if not self._has_answered and not self._security.uses_sasl:  # a port that expects a login hangs up like this
            protocol = "SASL_SSL" if self._security.uses_tls else "SASL_PLAINTEXT"
            hint = f" It was its first request: if the port expects a login, write security.protocol={protocol}."
        return ConnectionLost(f"The connection to {self.address} was lost: {error}.{hint}")

    def _set_timeout(self, deadline: float) -> None:
        # A zero time-out would mean non-blocking; a passed deadline must raise TimeoutError instead.
        self._socket.settimeout(max(deadline - self._clock(), 0.000_1))

    def _write(self, chunks: list[bytes | memoryview], deadline: float) -> None:
        self._set_timeout(deadline)
        if isinstance(self._socket, ssl.SSLSocket):
            for chunk in chunks:
                self._socket.sendall(chunk)
            return
        views = [memoryview(chunk) for chunk in chunks]
        while views:
            sent = self._socket.sendmsg(views)
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if views:
                views[0] = views[0][sent:]

    def _read_frame(self, pending: Pending, *, is_first: bool = False) -> memoryview:
        try:
            prefix = self._read_exactly(4, pending.deadline)
            if is_first:
                self._refuse_other_protocols(bytes(prefix))
            size = read_frame_size(prefix, frame_bytes_max=self._config.receive_message_bytes_max)
            return self._read_exactly(size, pending.deadline).toreadonly()
        except OSError as error:
            raise self._lost(error) from error

    def _refuse_other_protocols(self, first: bytes) -> None:
        """Read as a frame's size, another protocol's first bytes would only make an absurd number."""
        if first[0] in (0x15, 0x16) and first[1] == 3:  # an alert or a handshake of TLS
            raise WireError(
                f"{self.address} speaks TLS and security.protocol={self._security.protocol} does not; nothing was "
                "sent. Write security.protocol=SSL (SASL_SSL with a login)."
            )
        if first == b"HTTP":
            raise WireError(
                f"{self.address} speaks HTTP, not Kafka's protocol; nothing was sent. "
                "Write the address of a Kafka broker in bootstrap.servers."
            )

    def _read_exactly(self, size: int, deadline: float) -> memoryview:
        buffer = memoryview(bytearray(size))
        received = 0
        while received < size:
            self._set_timeout(deadline)
            count = self._socket.recv_into(buffer[received:])
            if count == 0:
                raise ConnectionResetError("closed by the broker")
            received += count
        return buffer
