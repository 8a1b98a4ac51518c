"""How long the event loop is held: one number per turn, so that a request that keeps all others waiting is seen."""

from __future__ import annotations

import asyncio
import math
import select
import selectors
import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Final

BOUNDS_S: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
"""Upper bounds of the histogram's buckets. The last bucket, which has none, follows."""
SOCKETS_AT_ONCE: Final = 64
"""In one turn. A thousand clients that send at the same moment are looked at in several, so that no turn is long."""


class TurnTimes:
    """A histogram of the turns of a loop, and the longest of them since it was last asked for.

    >>> times = TurnTimes()
    >>> times.note(0.002)
    >>> times.note(3.0)
    >>> times.counts, times.take_longest_s(), times.take_longest_s()
    ([0, 1, 0, 0, 0, 0, 0, 0, 1], 3.0, 0.0)
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0
        self._longest_s = 0.0

    def note(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds
        self._longest_s = max(self._longest_s, seconds)

    def take_longest_s(self) -> float:
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s


class LoopWatch:
    """What a watched loop has measured: by the clock on the wall, and by the processor time of its thread.

    A turn is everything between two looks at the sockets. The processor time leaves out the time in which the
    operating system let other processes run, and also the time in which the thread waited for a disk.
    """

    def __init__(self, *, is_measuring: bool = True) -> None:
        """To measure costs some microseconds a turn, which nobody needs to pay who does not look at the metrics."""
        self.is_measuring = is_measuring
        self.wall = TurnTimes()
        self.busy = TurnTimes()

    def new_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.SelectorEventLoop(_WatchedSelector(self))


class _WatchedSelector(selectors.DefaultSelector):
    def __init__(self, watch: LoopWatch) -> None:
        super().__init__()
        self._watch = watch
        self._began: tuple[float, float] | None = None

    def select(self, timeout: float | None = None) -> Sequence[tuple[selectors.SelectorKey, int]]:  # type: ignore[override]
        if not self._watch.is_measuring:
            return self._poll(timeout)
        if self._began is not None:
            self._watch.wall.note(time.perf_counter() - self._began[0])
            self._watch.busy.note(time.thread_time() - self._began[1])
        ready = self._poll(timeout)
        self._began = (time.perf_counter(), time.thread_time())
        return ready

    def _poll(self, timeout: float | None) -> Sequence[tuple[selectors.SelectorKey, int]]:
        """Some of the sockets that are ready. epoll goes on with the others at the next call."""
        epoll: Any = getattr(self, "_selector", None)
        if not hasattr(select, "epoll") or not isinstance(epoll, select.epoll):
            return super().select(timeout)
        try:
            # Rounded up, as asyncio's own selector does it: a shorter wait would be over before its timer is due.
            events = epoll.poll(-1 if timeout is None else max(0.0, math.ceil(timeout * 1e3) * 1e-3), SOCKETS_AT_ONCE)
        except InterruptedError:
            return []
        keys: Any = getattr(self, "_fd_to_key", None) or self.get_map()
        found = ((keys.get(descriptor), bits) for descriptor, bits in events)
        return [(key, _events(bits) & key.events) for key, bits in found if key is not None]


def _events(bits: int) -> int:
    return (selectors.EVENT_WRITE if bits & ~select.EPOLLIN else 0) | (
        selectors.EVENT_READ if bits & ~select.EPOLLOUT else 0
    )
