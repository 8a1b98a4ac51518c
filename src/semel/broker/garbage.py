"""Python's cyclic garbage collector, kept from stopping the broker for long.

A full collection looks at every object there is, and everything waits meanwhile: 40 ms with 3,000 topics, a quarter of
a second with all that the memory budget lets clients leave behind. So what has survived one full collection is set
aside (`gc.freeze`), and the next looks only at what has come since.

Objects that were set aside are still freed when nothing refers to them any more, as nearly all are: the broker's state
has no cycles, and connections break theirs when they close. For the rest everything is looked at once more when nobody
has asked for anything for a while.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from semel.broker.clock import Cancellable, Clock

_OLDEST: Final = 2
_IDLE_MS: Final = 60_000
_GROWTH: Final = 1.5


class ShortCollections:
    """Bounds the pauses of this process's garbage collector between `start` and `stop`."""

    def __init__(self, clock: Clock, count_requests: Callable[[], int]) -> None:
        """`count_requests` tells whether clients have asked for anything since it was last called."""
        self._clock = clock
        self._count_requests = count_requests
        self._requests = -1
        self._looked_at = 0
        self._timer: Cancellable | None = None

    def start(self) -> None:
        gc.callbacks.append(_set_survivors_aside)
        gc.collect()
        self._looked_at = gc.get_freeze_count()
        self._timer = self._clock.call_later(_IDLE_MS, self._collect_if_idle)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            gc.callbacks.remove(_set_survivors_aside)
            gc.unfreeze()

    def _collect_if_idle(self) -> None:
        requests = self._count_requests()
        if requests == self._requests and gc.get_freeze_count() > self._looked_at * _GROWTH:
            gc.unfreeze()
            gc.collect()
            self._looked_at = gc.get_freeze_count()
        self._requests = requests
        self._timer = self._clock.call_later(_IDLE_MS, self._collect_if_idle)


def _set_survivors_aside(phase: str, info: dict[str, Any]) -> None:
    if phase == "stop" and info["generation"] == _OLDEST:
        gc.freeze()
