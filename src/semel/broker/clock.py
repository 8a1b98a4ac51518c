"""The broker's time: wall time that never runs backwards, and calls at a later time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Cancellable(Protocol):
    """A call that has not happened yet."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """What the broker knows of time. Tests bring one that moves only when they say so."""

    def now_ms(self) -> int:
        """Milliseconds since 1970, never less than before."""
        ...

    def call_later(self, delay_ms: float, callback: Callable[[], None]) -> Cancellable: ...


class SystemClock:
    """Wall time at the start, and from then on the machine's monotonic clock.

    An operator or a time daemon that sets the wall clock back or forth cannot make a transaction run into its time-out
    or keep it from it. The wall clock is read anew at the next start.
    """

    def __init__(self) -> None:
        self._started_ms = time.time_ns() // 1_000_000
        self._started = time.monotonic_ns()

    def now_ms(self) -> int:
        return self._started_ms + (time.monotonic_ns() - self._started) // 1_000_000

    def call_later(self, delay_ms: float, callback: Callable[[], None]) -> Cancellable:
        return asyncio.get_running_loop().call_later(delay_ms / 1000, callback)
