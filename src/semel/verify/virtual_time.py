"""An event loop whose time jumps to the next timer instead of waiting, and the clock of a broker that runs in it.

Nothing in it depends on the machine: the same calls run in the same order at the same times, whatever else goes on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context
from heapq import heappop, heappush
from typing import Any

_START_MS = 1_700_000_000_000


class NothingLeftToDo(Exception):
    """No call is scheduled and none is ready, so what is waited for can never come."""


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """An asyncio loop without sockets, threads or waiting. Calls at the same time run in the order they were asked for.

    >>> loop = VirtualTimeLoop()
    >>> loop.run_until_complete(asyncio.sleep(3600))
    >>> loop.time()
    3600.0
    >>> loop.close()
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._queue: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._asked = 0
        self._ready = self._queue  # where the standard loop has it
        self._stopping = False

    def time(self) -> float:
        return self._now

    # The standard loop's own versions of these take half of a run's time in the loop.

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._queue.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._asked += 1
        heappush(self._timers, (when, self._asked, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        return None  # it is passed over when its time comes

    def _run_once(self) -> None:
        queue, timers = self._queue, self._timers
        while timers and timers[0][2]._cancelled:
            heappop(timers)
        if not queue and not self._stopping:
            if not timers:
                raise NothingLeftToDo("every client waits for something that nobody will do")
            self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            queue.append(heappop(timers)[2])
        for _ in range(len(queue)):
            handle = queue.popleft()
            if not handle._cancelled:
                handle._run()

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
