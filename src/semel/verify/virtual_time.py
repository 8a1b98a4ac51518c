"""An event loop whose time jumps to the next timer instead of waiting, and the clock of a broker that runs in it.

Nothing in it depends on the machine: the same calls run in the same order at the same times, whatever else goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

_START_MS = 1_700_000_000_000


class NothingLeftToDo(Exception):
    """No call is scheduled and none is ready, so what is waited for can never come."""


class _Jump:
    """What the loop takes for its selector: waiting is to set the time ahead."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise NothingLeftToDo("every client waits for something that nobody will do")
        self._loop.advance(timeout)
        return []


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """An asyncio loop without sockets, threads or waiting.

    >>> loop = VirtualTimeLoop()
    >>> loop.run_until_complete(asyncio.sleep(3600))
    >>> loop.time()
    3600.0
    >>> loop.close()
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._selector = _Jump(self)

    def time(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds

    # The two hooks by which a loop of the standard library hears of sockets and of other threads.

    def _process_events(self, event_list: list[Any]) -> None:
        assert not event_list

    def _write_to_self(self) -> None:
        return None


class ProcessClock:
    """The time as one run of the broker knows it. Has the face of `semel.broker.clock.Clock`.

    A process that is killed takes its timers with it; the wall clock may have been set back when the next one starts.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ahead_ms: int = 0) -> None:
        self._loop = loop
        self.ahead_ms = ahead_ms
        self.is_alive = True
        self.after_call: Callable[[], None] = lambda: None

    def now_ms(self) -> int:
        return _START_MS + self.ahead_ms + int(self._loop.time() * 1000)

    def call_later(self, delay_ms: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return self._loop.call_later(delay_ms / 1000, self._run, callback)

    def _run(self, callback: Callable[[], None]) -> None:
        if self.is_alive:
            callback()
            self._loop.call_soon(self.after_call)  # behind the first step of a task that the call has begun
