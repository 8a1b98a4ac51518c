"""One client's connection: its requests, served one after the other, and who it has shown itself to be. No socket."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from semel.broker.context import Answer, Encoded
from semel.broker.dispatch import Decoded, Request, needs_preparation, prepare, read_request, serve
from semel.broker.frames import FrameReader
from semel.core.refusal import Refused
from semel.errors import WireError
from semel.wire.api import Api
from semel.wire.server import encode_response

if TYPE_CHECKING:
    from semel.broker.listeners import ListenerSettings
    from semel.broker.sasl import SaslExchange
    from semel.broker.state import Broker

_LOG: Final = logging.getLogger("semel.broker")

ANONYMOUS: Final = "User:ANONYMOUS"
_OWN_BYTES: Final = 4 << 10

# A client may send many requests without waiting. What it has sent and not been answered is held to this, and so is
# what it has been answered and not yet read: the rest waits in the kernel's buffers, and so in the client.
_QUEUED_FRAMES_MAX: Final = 64
_QUEUED_BYTES_MAX: Final = 8 << 20
OUTGOING_BYTES_MAX: Final = 4 << 20

# What a request takes while it is carried out: its frame, its texts once more, and its entries as objects.
_TIMES_DECODED: Final = 20
_ENTRIES_BYTES_MAX: Final = 12 << 20

# Requests that wait for their turn among the long ones: of administrators, who are few and in no hurry, and large ones.
_LONG: Final = frozenset(
    {
        Api.LIST_GROUPS,
        Api.CREATE_TOPICS,
        Api.DELETE_TOPICS,
        Api.DESCRIBE_ACLS,
        Api.CREATE_ACLS,
        Api.DELETE_ACLS,
        Api.DESCRIBE_CONFIGS,
        Api.ALTER_CONFIGS,
        Api.DESCRIBE_LOG_DIRS,
        Api.CREATE_PARTITIONS,
        Api.INCREMENTAL_ALTER_CONFIGS,
        Api.LIST_TRANSACTIONS,
        Api.DESCRIBE_USER_SCRAM_CREDENTIALS,
        Api.ALTER_USER_SCRAM_CREDENTIALS,
    }
)
_LONG_FRAME_BYTES: Final = 16 << 10


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
        self._waiting_bytes = 0
        self._working_bytes = 0
        self._is_fetching = False
        self.is_refused = False
        self._is_left = False
        self._task: asyncio.Task[None] | None = None
        self._has_turn = False
        self._reading = True
        self._noted_bytes = 0

    @property
    def is_busy(self) -> bool:
        return self._task is not None or self._has_turn

    @property
    def is_logged_in(self) -> bool:
        return self.sasl is None or self.sasl.is_complete

    @property
    def own_bytes(self) -> int:
        """About what the connection takes by being there."""
        return _OWN_BYTES

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
        if self._take(self.frames.received(count)):
            self.work()
            self.note_held()

    def _take(self, frames: Iterable[bytearray]) -> bool:
        """Queue frames. False when the stream cannot be followed, and the connection is closed."""
        try:
            for frame in frames:
                self._queue.append(frame)
                self._queued_bytes += len(frame)
        except WireError as error:
            self.refuse(error)
            return False
        return True

    def note_held(self) -> None:
        """Tell the broker what this client makes it hold."""
        held_bytes = (
            self.own_bytes
            + self.frames.held_bytes
            + self._queued_bytes
            + self._waiting_bytes
            + self._working_bytes
            + self.outgoing_bytes()
        )
        if held_bytes != self._noted_bytes:
            self._noted_bytes = held_bytes
            self.broker.held_memory.note(self, held_bytes)

    def note_working(self, working_bytes: int) -> None:
        """Count what a request takes up while it is carried out, besides its frame."""
        self._working_bytes = working_bytes
        self.note_held()

    def take_working(self, working_bytes: int, code: ErrorCode) -> None:
        """The same where the request can be refused (Refused) if there is no room: then nothing is counted for it.

        What goes over the budget otherwise closes the connection that holds most.
        """
        try:
            self.broker.held_memory.check_room(self, working_bytes - self._working_bytes, code)
        except Refused:
            self.note_working(0)
            raise
        self.note_working(working_bytes)

    def work(self) -> None:
        """Serve the next request that is queued, unless one is being served or the client does not read its answers.

        One in each turn of the loop: a client that sends a thousand requests at once does not go before the others.
        """
        if self._may_serve() and not self._has_turn:
            frame = self._queue.popleft()
            self._queued_bytes -= len(frame)
            if self._is_left and _is_fetch(frame):
                pass  # nobody is left to read the answer
            elif self._is_login(frame):
                self._waiting_bytes = len(frame)
                self._start(self._log_in_in_turn(frame))
            elif self._is_long(frame):
                self._waiting_bytes = len(frame)
                self._start(self._serve_in_turn(frame))
            else:
                self._serve(frame)
            if not self._queue and self.frames.has_more and not self.is_closed and not self._take(self.frames.more()):
                return
            if self._may_serve():
                self._has_turn = True
                self.broker.quick_lane.call_in_turn(self._work_on)
        self._close_if_done()
        self._read_or_wait()

    def _is_login(self, frame: bytearray) -> bool:
        """Whether it may hold a password, which takes milliseconds to compare, whether it is right or wrong."""
        if self.sasl is None or self.is_logged_in:
            return False
        return self.sasl.expects_raw_tokens or int.from_bytes(frame[:2], "big") == Api.SASL_AUTHENTICATE

    async def _log_in_in_turn(self, frame: bytearray) -> None:
        """One login in each turn of the loop: hundreds at the same moment hold nobody up who has logged in."""
        await self.broker.login_lane.wait_turn()
        self._ended()
        if not self.is_closed:
            self._serve(frame)
            self.work()
            self.note_held()

    def _is_long(self, frame: bytearray) -> bool:
        """Whether it may take long to read or to carry out. The login is never kept waiting, nor is a producer."""
        if not self.is_logged_in:
            return False
        key = int.from_bytes(frame[:2], "big")
        return key in _LONG or self._is_prepared_aside(frame)

    def _is_prepared_aside(self, frame: bytearray) -> bool:
        """Whether to read it takes long, or its handler must be loaded first. A simulation does all in one thread."""
        key = int.from_bytes(frame[:2], "big")
        is_large = len(frame) > _LONG_FRAME_BYTES and key != Api.PRODUCE
        return is_large or (self.broker.durability.uses_threads and needs_preparation(key))

    async def _serve_in_turn(self, frame: bytearray) -> None:
        try:
            await self.broker.lane.wait_turn()
            decoded = await self._prepare(frame) if self._is_prepared_aside(frame) else None
        except WireError as error:
            self._ended()
            self.refuse(error)
            return
        except Exception:
            self._ended()
            self._failed()
            return
        self._ended()
        # What a client asked for before it left is done, as a request is that needs no turn. What was too much is not.
        if not self.is_refused and not (self.is_closed and _is_fetch(frame)):
            self._serve(frame, decoded)
        if not self.is_closed:
            self.work()
            self.note_held()

    async def _prepare(self, frame: bytearray) -> Decoded | None:
        """Read the request in another thread."""
        request = read_request(self, frame)
        self._waiting_bytes = _bytes_while_served(request)
        self.note_held()
        if self.is_refused:
            return None
        durability = self.broker.durability
        is_long = len(frame) > _LONG_FRAME_BYTES
        aside = durability.compute_long_aside if is_long else durability.compute_aside
        decoded = await aside(lambda: prepare(request))
        await self.broker.lane.wait_turn()
        return decoded

    def _may_serve(self) -> bool:
        is_free = bool(self._queue) and self._task is None and not self.is_closed
        return is_free and self.outgoing_bytes() <= OUTGOING_BYTES_MAX

    def _work_on(self) -> None:
        self._has_turn = False
        if not self.is_closed:
            self.work()
            self.note_held()

    def _read_or_wait(self) -> None:
        """Read no further than is useful: the rest waits in the kernel, and so in the client."""
        full = (
            self.frames.has_more
            or len(self._queue) >= _QUEUED_FRAMES_MAX
            or self._queued_bytes >= _QUEUED_BYTES_MAX
            or (bool(self._queue) and self.broker.held_memory.is_tight)
        )
        if not self.is_closed and not self._is_left and full is self._reading:
            self._reading = not full
            self.set_reading(self._reading)

    def client_left(self) -> None:
        """The client has hung up. Carry out what it sent before that, then close.

        A producer with acks=0 counts on it, and Kafka does the same (KAFKA-3703), until an answer cannot be sent.
        """
        if not self.is_closed:
            self._is_left = True
            self.set_reading(False)
            self._end_waits()
            self._close_if_done()

    def _close_if_done(self) -> None:
        if self._is_left and not self._queue and not self.frames.has_more:
            self.close()

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._queue.clear()
            self._queued_bytes = 0
            self._end_waits()
            self.broker.connection_closed(self)
            self.close_socket()

    def _end_waits(self) -> None:
        """End what only waits for something to send to the client, which has gone.

        A request that is being carried out goes on to its end: half a commit would be worse than an answer lost. A
        fetch changes nothing, and must not hold its partitions.
        """
        if self._task is not None and self._is_fetching:
            self._task.cancel()
        for call in list(self.on_close):
            call()

    def refuse(self, error: Exception) -> None:
        """End a conversation that cannot go on; the client sees the connection close, as Kafka does it."""
        _LOG.warning("closed the connection from %s: %s", self.host, error)
        self.is_refused = True
        self.broker.metrics.refused_connections += 1
        self.close()

    def authenticated(self, principal: str) -> None:
        """From here on the client may send anything, in frames of the usual size."""
        self.principal = principal
        self.frames.frame_bytes_max = self.listener.frame_bytes_max
        self.note_login()

    def note_login(self) -> None:
        """From here on it counts among the connections that have logged in."""
        self._noted_bytes = -1
        self.note_held()

    def _serve(self, frame: bytearray, decoded: Decoded | None = None) -> None:
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
            reply = serve(self.broker, self, request, decoded)
        except WireError as error:
            self.refuse(error)
        except Exception:
            self._failed()
        else:
            if self.sasl is not None and self.sasl.is_failed and not isinstance(reply, Awaitable):
                reply = self._failed_login(reply)
            if isinstance(reply, Awaitable):
                self._wait_for(request, reply)
            else:
                self._answer(request, reply)

    def _serve_token(self, sasl: SaslExchange, frame: bytearray) -> None:
        """A token of the first SASL handshake (version 0), which has no header around it."""
        token = sasl.authenticate_raw(bytes(frame))
        if token is None:
            self._start(self._close_after_failed_login())
            return
        if sasl.is_complete:
            self.authenticated(sasl.principal)
        self.send_bytes([len(token).to_bytes(4, "big"), token])

    def _failed_login(self, answer: Answer) -> Awaitable[Answer]:
        from semel.broker.failed_logins import answer_late, note_failed_login

        note_failed_login(self)
        return answer_late(self, answer)

    async def _close_after_failed_login(self) -> None:
        """Bare tokens have no form for a refusal: the connection is closed when an answer would have come."""
        await self._failed_login(None)
        self._task = None
        self.close()

    def _wait_for(self, request: Request, reply: Awaitable[Answer]) -> None:
        self._waiting_bytes = _bytes_while_served(request)
        self._is_fetching = request.api is Api.FETCH
        self._start(self._answer_later(request, reply), reply)

    def _start(self, work: Coroutine[Any, Any, None], reply: Awaitable[Answer] | None = None) -> None:
        """Begin to serve a request that has to wait. `reply` is what `work` awaits, if it was made already."""
        task = self._task = asyncio.ensure_future(work)
        self.broker.request_waits(task)

        def clean_up(_: asyncio.Task[None]) -> None:
            # A task that is cancelled before its first step runs none of its own code, and leaves `reply` unawaited.
            if isinstance(reply, Coroutine):
                reply.close()
            if self._task is task:
                self._ended()
                if self._is_left and not self.is_closed:
                    self.work()

        task.add_done_callback(clean_up)

    async def _answer_later(self, request: Request, reply: Awaitable[Answer]) -> None:
        try:
            answer = await reply
        except WireError as error:
            self._ended()
            self.refuse(error)
        except Exception:
            self._ended()
            self._failed()
        else:
            self._ended()
            self._answer(request, answer)
            self.work()
            self.note_held()

    def _ended(self) -> None:
        self._task = None
        self._waiting_bytes = self._working_bytes = 0
        self._is_fetching = False

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


def _is_fetch(frame: bytearray) -> bool:
    return int.from_bytes(frame[:2], "big") == Api.FETCH


def _bytes_while_served(request: Request) -> int:
    size = len(request.frame)
    if request.api is Api.PRODUCE:
        return size
    return 2 * size + min(_TIMES_DECODED * size, _ENTRIES_BYTES_MAX)
