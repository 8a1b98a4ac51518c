"""One client's connection: its requests, served one after the other, and who it has shown itself to be. No socket."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final

from semel.broker.context import Answer, Encoded
from semel.broker.dispatch import Request, read_request, serve
from semel.broker.frames import FrameReader
from semel.broker.held_memory import NOTED_BYTES
from semel.errors import WireError
from semel.wire.server import encode_response

if TYPE_CHECKING:
    from semel.broker.listeners import ListenerSettings
    from semel.broker.sasl import SaslExchange
    from semel.broker.state import Broker

_LOG: Final = logging.getLogger("semel.broker")

ANONYMOUS: Final = "User:ANONYMOUS"

# A client may send many requests without waiting. What it has sent and not been answered is held to this, and so is
# what it has been answered and not yet read: the rest waits in the kernel's buffers, and so in the client.
_QUEUED_FRAMES_MAX: Final = 64
_QUEUED_BYTES_MAX: Final = 8 << 20
OUTGOING_BYTES_MAX: Final = 4 << 20


class Connection:
    """Takes bytes in and gives bytes out, through the hooks that a binding to a socket fills in.

    One request is served at a time and answered before the next begins, as in Kafka: the order of answers and of
    appends is the order in which the client sent.
    """

    def __init__(self, broker: Broker, listener: ListenerSettings, host: str, shared: bytearray) -> None:
        self.broker = broker
        self.listener = listener
        self.host = host
        self.principal = ANONYMOUS
        self.sasl: SaslExchange | None = broker.new_sasl_exchange(listener)
        self.frames = FrameReader(shared, listener.frame_bytes_max)
        if self.sasl is not None:
            self.frames.frame_bytes_max = listener.frame_bytes_max_before_authentication
        self.last_active_ms = broker.clock.now_ms()
        self.is_closed = False
        self.on_close: dict[Callable[[], None], None] = {}
        """Called when the connection ends, for requests that wait: nobody is left to answer."""
        self._queue: deque[bytearray] = deque()
        self._queued_bytes = 0
        self._task: asyncio.Task[None] | None = None
        self._reading = True
        self._has_noted = False

    @property
    def is_busy(self) -> bool:
        return self._task is not None

    # What a binding provides.

    def send_bytes(self, pieces: Sequence[bytes | memoryview]) -> None:
        raise NotImplementedError

    def outgoing_bytes(self) -> int:
        raise NotImplementedError

    def set_reading(self, reading: bool) -> None:
        raise NotImplementedError

    def close_socket(self) -> None:
        raise NotImplementedError

    # What a binding calls.

    def bytes_received(self, count: int) -> None:
        self.last_active_ms = self.broker.clock.now_ms()
        try:
            for frame in self.frames.received(count):
                self._queue.append(frame)
                self._queued_bytes += len(frame)
        except WireError as error:
            self.refuse(error)
            return
        self.work()
        self.note_held()

    def note_held(self) -> None:
        """Tell the broker what this client makes it hold, where that is worth mentioning."""
        held_bytes = self.frames.held_bytes + self._queued_bytes + self.outgoing_bytes()
        if held_bytes >= NOTED_BYTES or self._has_noted:
            self._has_noted = held_bytes >= NOTED_BYTES
            self.broker.held_memory.note(self, held_bytes)

    def work(self) -> None:
        """Serve what is queued, until a request has to wait or the client does not read its answers."""
        while self._queue and self._task is None and not self.is_closed:
            if self.outgoing_bytes() > OUTGOING_BYTES_MAX:
                break
            frame = self._queue.popleft()
            self._queued_bytes -= len(frame)
            self._serve(frame)
        full = len(self._queue) >= _QUEUED_FRAMES_MAX or self._queued_bytes >= _QUEUED_BYTES_MAX
        if not self.is_closed and full is self._reading:
            self._reading = not full
            self.set_reading(self._reading)

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._queue.clear()
            self._queued_bytes = 0
            # A request that is being carried out goes on to its end: half a commit would be worse than an answer lost.
            for call in list(self.on_close):
                call()
            self.broker.connection_closed(self)
            self.close_socket()

    def refuse(self, error: Exception) -> None:
        """End a conversation that cannot go on; the client sees the connection close, as Kafka does it."""
        _LOG.warning("closed the connection from %s: %s", self.host, error)
        self.broker.metrics.refused_connections += 1
        self.close()

    def authenticated(self, principal: str) -> None:
        """From here on the client may send anything, in frames of the usual size."""
        self.principal = principal
        self.frames.frame_bytes_max = self.listener.frame_bytes_max

    def _serve(self, frame: bytearray) -> None:
        try:
            if self.sasl is not None and self.sasl.expects_raw_tokens:
                self._serve_token(self.sasl, frame)
                return
            request = read_request(self, frame)
            self.broker.metrics.count_request(request.api)
            faults = self.broker.faults
            if faults is not None and (fault := faults.next_for(request)) is not None:
                self._wait_for(request, fault.serve(self, request))
                return
            reply = serve(self.broker, self, request)
        except WireError as error:
            self.refuse(error)
        except Exception:
            self._failed()
        else:
            if isinstance(reply, Awaitable):
                self._wait_for(request, reply)
            else:
                self._answer(request, reply)

    def _serve_token(self, sasl: SaslExchange, frame: bytearray) -> None:
        """A token of the first SASL handshake (version 0), which has no header around it."""
        token = sasl.authenticate_raw(bytes(frame))
        if sasl.is_complete:
            self.authenticated(sasl.principal)
        self.send_bytes([len(token).to_bytes(4, "big"), token])

    def _wait_for(self, request: Request, reply: Awaitable[Answer]) -> None:
        self._task = asyncio.ensure_future(self._answer_later(request, reply))
        self.broker.request_waits(self._task)

    async def _answer_later(self, request: Request, reply: Awaitable[Answer]) -> None:
        try:
            answer = await reply
        except WireError as error:
            self._task = None
            self.refuse(error)
        except Exception:
            self._task = None
            self._failed()
        else:
            self._task = None
            self._answer(request, answer)
            self.work()

    def _answer(self, request: Request, answer: Answer) -> None:
        if self.is_closed or answer is None:
            return
        if isinstance(answer, Encoded):
            pieces = answer.pieces
        else:
            try:
                pieces = encode_response(answer, request.correlation_id)
            except Exception:  # a client that got neither an answer nor an end would wait for its time-out
                self._failed()
                return
        self.send_bytes(pieces)
        if self.sasl is not None and self.sasl.is_failed:
            self.close()  # Kafka hangs up on a failed login, once it has said so

    def _failed(self) -> None:
        _LOG.exception("a request from %s failed", self.host)
        self.broker.metrics.unexpected_errors += 1
        self.close()
