"""A proxy that does to single requests and answers what networks do: cuts, delays, silence, repeats, another order.

>>> import semel
>>> with semel.Broker() as broker, FaultProxy(broker.bootstrap) as proxy:
...     trap = proxy.set_trap(Match(Api.METADATA, client_id="orders"), Cut.BEFORE)
...     with semel.Admin({"bootstrap.servers": proxy.bootstrap, "client.id": "orders"}) as admin:
...         print(admin.list_topics(), trap.wait_over(10))
[] True

A trap strikes once. What it holds up holds up everything behind it on the same connection, as a network would; other
connections go on.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from semel.testing.proxy import Address, Connection, Cut, Direction, KafkaProxy, Passage, connect, read_frame
from semel.wire import Api

_POLL_S: Final = 0.002
_ANSWER_S: Final = 10.0
"""How long a broker is given to answer a request that nobody waits for any more."""
_LAST_ANSWER_S: Final = 1.0
"""The same for the last request of a dead client, which with acks=0 has no answer."""


@dataclass(frozen=True, slots=True)
class Match:
    """Which frame a trap waits for: the `nth` that fits, from when the trap is set. None fits all."""

    api: Api | None = None
    direction: Direction = Direction.REQUEST
    client_id: str | None = None
    nth: int = 1

    def fits(self, passage: Passage) -> bool:
        """Whether it is one of them, whichever in number."""
        return (
            passage.direction is self.direction
            and (self.api is None or passage.api_key == self.api)
            and (self.client_id is None or passage.client_id == self.client_id)
        )


@dataclass(frozen=True, slots=True)
class Hold:
    """Wait in the proxy for so long, or until released, and then go on: also when the client has hung up meanwhile."""

    ms: float


@dataclass(frozen=True, slots=True)
class HoldUntil:
    """Wait until a frame of another connection that `overtaker` matches has gone past, but no longer than `ms`.

    A broker serves connections in any order: only who waits for the overtaker's answer is sure to be overtaken.
    """

    overtaker: Match
    ms: float


@dataclass(frozen=True, slots=True)
class Silence:
    """Vanish, and everything behind it in this direction too, while the connection stays open."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """A request goes on at once, and so much later once more, on a connection of its own; that answer is thrown away.

    To a broker this looks like a client's retry whose first try was stuck on the way.
    """

    after_ms: float


@dataclass(frozen=True, slots=True)
class Crash:
    """Let `kill` end the client while its request is here; the request then goes on (AFTER), or is gone with it."""

    kill: Callable[[], None]
    when: Cut


@dataclass(frozen=True, slots=True)
class Outlive:
    """The client loses its connection now; its request reaches the broker when the client has gone on without it.

    That is when each of `steps` has come by in turn, on other connections of the same client; after `ms` it goes on in
    any case. The last of them is held back until the broker has answered the late request, so that the client cannot
    run ahead of it. To a client nothing else has happened than to one whose request was lost with its connection.
    """

    steps: tuple[Match, ...]
    ms: float


Treatment = Crash | Cut | Hold | HoldUntil | Silence | Repeat | Outlive


class Trap:
    """A treatment that waits for its frame. Times are of the monotonic clock, None before they have come."""

    def __init__(self, match: Match, treatment: Treatment) -> None:
        self.match = match
        self.treatment = treatment
        self.passage: Passage | None = None
        self.began_ns: int | None = None
        self.ended_ns: int | None = None
        self._left = match.nth
        self._struck = threading.Event()
        self._over = threading.Event()
        self._released = threading.Event()

    def release(self) -> None:
        """Let go of what is held, now or as soon as it is."""
        self._released.set()

    def wait_struck(self, timeout_s: float) -> bool:
        """Wait until its frame has come; False if it did not in time."""
        return self._struck.wait(timeout_s)

    def wait_over(self, timeout_s: float) -> bool:
        """Wait until it is done.

        A held request then is with the broker, and answered if its client has hung up; a repeat is answered.
        """
        return self._over.wait(timeout_s)

    def takes(self, passage: Passage) -> bool:
        """Count it; True for the one that this trap is for."""
        if not self.match.fits(passage):
            return False
        self._left -= 1
        return self._left == 0

    def begin(self, passage: Passage) -> None:
        self.passage, self.began_ns = passage, time.monotonic_ns()
        self._struck.set()

    def hold(self, ms: float) -> None:
        self._released.wait(ms / 1000)

    def end(self) -> None:
        self.ended_ns = time.monotonic_ns()
        self._over.set()


@dataclass(slots=True)
class _Overtaken:
    """What waits to be overtaken: its connection, and by what in turn."""

    connection: int
    steps: list[Match]

    def is_over_with(self, passage: Passage) -> bool:
        """Count it; True when it was the last that had to come by."""
        if not self.steps or passage.connection == self.connection or not self.steps[0].fits(passage):
            return False
        del self.steps[0]
        return not self.steps


class FaultProxy(KafkaProxy):
    """Stands in front of all brokers behind `bootstrap`. Where they ask for a login, no request is repeated or late."""

    def __init__(self, bootstrap: str, *, keep_passages: bool = False) -> None:
        super().__init__(bootstrap, keep_passages=keep_passages)
        self.observe: Callable[[Passage, bytes], None] = lambda *_: None
        """Is shown every request before anything is done to it."""
        self._traps: list[Trap] = []
        self._held: dict[Trap, _Overtaken] = {}
        self._holding: set[Trap] = set()
        self._silent: set[tuple[int, Direction]] = set()

    @property
    def waiting_traps(self) -> int:
        """How many traps are set and have not struck."""
        return len(self._traps)

    def set_trap(self, match: Match, treatment: Treatment) -> Trap:
        """From now on wait for the frame that `match` says. Of several traps for one frame the oldest strikes."""
        if isinstance(treatment, Repeat | Outlive) and match.direction is Direction.RESPONSE:
            raise ValueError("only a request can be repeated or outlive its connection")
        trap = Trap(match, treatment)
        with self._lock:
            self._traps.append(trap)
        return trap

    def remove_trap(self, trap: Trap) -> bool:
        """Give up waiting for its frame; False if it has struck already."""
        with self._lock:
            if trap in self._traps:
                self._traps.remove(trap)
            return trap.began_ns is None

    def release_all(self) -> None:
        """No trap waits any more, and nothing is held back."""
        with self._lock:
            self._traps.clear()
            held = list(self._holding)
        for trap in held:
            trap.release()

    def close(self) -> None:
        self.release_all()
        super().close()

    def _treat(self, connection: Connection, passage: Passage, frame: bytes, deliver: Callable[[], None]) -> bool:
        if passage.direction is Direction.REQUEST:
            self.observe(passage, frame)
        trap = self._sprung_by(passage)
        for late in self._overtaken_by(passage, Outlive):
            late.release()
            late.wait_over(_ANSWER_S)
        if (connection.number, passage.direction) in self._silent:
            goes_on = True
        elif trap is None:
            deliver()
            goes_on = True
        else:
            goes_on = self._strike(trap, connection, passage, frame, deliver)
        for held in self._overtaken_by(passage, HoldUntil):
            held.release()
        return goes_on

    def _sprung_by(self, passage: Passage) -> Trap | None:
        with self._lock:
            found = next((trap for trap in self._traps if trap.takes(passage)), None)
            if found is not None:
                self._traps.remove(found)
                self._holding.add(found)
                found.begin(passage)
        return found

    def _strike(
        self, trap: Trap, connection: Connection, passage: Passage, frame: bytes, deliver: Callable[[], None]
    ) -> bool:
        treatment = trap.treatment
        try:
            match treatment:
                case Crash(kill, when):
                    kill()
                    if when is Cut.BEFORE:
                        return False
                    self._deliver_late(connection, passage, deliver, _LAST_ANSWER_S)
                case Cut():
                    if treatment is Cut.AFTER:
                        deliver()
                    return False
                case Hold(ms):
                    trap.hold(ms)
                    self._deliver_late(connection, passage, deliver)
                case HoldUntil(overtaker, ms):
                    with self._lock:
                        self._held[trap] = _Overtaken(passage.connection, [overtaker])
                    trap.hold(ms)
                    self._deliver_late(connection, passage, deliver)
                case Outlive(steps, ms):
                    own = [replace(step, client_id=passage.client_id) for step in steps]
                    with self._lock:
                        self._held[trap] = _Overtaken(passage.connection, own)
                        self._start(self._deliver_alone, trap, connection.upstream, frame, ms)
                    return False
                case Silence():
                    self._silent.add((connection.number, passage.direction))
                case Repeat(after_ms):
                    deliver()
                    with self._lock:
                        self._start(self._deliver_alone, trap, connection.upstream, frame, after_ms)
            return True
        finally:
            if not isinstance(treatment, Repeat | Outlive):
                self._finish(trap)

    def _finish(self, trap: Trap) -> None:
        with self._lock:
            self._holding.discard(trap)
            self._held.pop(trap, None)
        trap.end()

    def _deliver_late(
        self, connection: Connection, passage: Passage, deliver: Callable[[], None], answer_s: float = _ANSWER_S
    ) -> None:
        deliver()
        if passage.direction is Direction.REQUEST and _has_hung_up(connection.client):
            # The end of the connection must not reach the broker before it has taken the request.
            deadline = time.monotonic() + answer_s
            while passage.correlation_id in connection.asked and time.monotonic() < deadline:
                if self._closing.wait(_POLL_S):
                    return

    def _overtaken_by(self, passage: Passage, kind: type[HoldUntil | Outlive]) -> list[Trap]:
        """The held ones of a kind for which this was the last that had to come by."""
        with self._lock:
            held = [(trap, waiting) for trap, waiting in self._held.items() if isinstance(trap.treatment, kind)]
            return [trap for trap, waiting in held if waiting.is_over_with(passage)]

    def _deliver_alone(self, trap: Trap, upstream: Address, frame: bytes, after_ms: float) -> None:
        """In a while, on a connection that nobody else uses."""
        try:
            trap.hold(after_ms)
            with connect(upstream) as again:
                again.settimeout(_ANSWER_S)
                again.sendall(len(frame).to_bytes(4, "big") + frame)
                read_frame(again)
        except OSError:
            return  # the broker is away: then it never arrives
        finally:
            self._finish(trap)


def _has_hung_up(client: socket.socket) -> bool:
    try:
        return client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
