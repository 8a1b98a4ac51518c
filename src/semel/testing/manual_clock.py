"""A clock that moves only when a test says so."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable


class _Call:
    """A call that waits for its time."""

    __slots__ = ("_callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self._callback = None

    def run(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class ManualClock:
    """Has the face of `semel.broker.clock.Clock`. It begins at the real time unless told otherwise.

    >>> clock = ManualClock(now_ms=1000)
    >>> timer = clock.call_later(500, lambda: print("due at", clock.now_ms()))
    >>> clock.advance(ms=499)
    >>> clock.advance(ms=1)
    due at 1500

    In an `EmbeddedBroker`, `advance` is the broker's: it runs what is due in the broker's thread and returns when that
    is done, so that a test can look at once.
    """

    def __init__(self, now_ms: int | None = None) -> None:
        # Clients stamp their records by the real time, and a broker refuses those that come from far in its future.
        self._now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
        self._calls: list[tuple[float, int, _Call]] = []
        self._numbers = itertools.count()
        self.advance_by: Callable[[int], None] = self.move
        """How `advance` is carried out; an embedded broker puts its own way here."""

    def now_ms(self) -> int:
        return self._now_ms

    def call_later(self, delay_ms: float, callback: Callable[[], None]) -> _Call:
        call = _Call(callback)
        heapq.heappush(self._calls, (self._now_ms + delay_ms, next(self._numbers), call))
        return call

    def advance(self, *, ms: int) -> None:
        """Let so much time pass."""
        if ms < 0:
            raise ValueError(f"time does not run backwards: ms={ms}")
        self.advance_by(ms)

    def move(self, ms: int) -> None:
        """Let time pass in the calling thread. Each call that is due sees the time it was due at."""
        end_ms = self._now_ms + ms
        while self._calls and self._calls[0][0] <= end_ms:
            due_ms, _, call = heapq.heappop(self._calls)
            self._now_ms = max(self._now_ms, math.ceil(due_ms))
            call.run()
        self._now_ms = end_ms

    def forget_calls(self) -> None:
        """Nobody waits any more: the process that did has ended."""
        self._calls.clear()
