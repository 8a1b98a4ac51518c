"""How long to go on, and how long to pause between two tries."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from semel.wire import Verdict

_SOON_FIRST_MS = 1


@dataclass(slots=True)
class Patience:
    """A budget of time for one call, spent in growing pauses.

    Conditions marked `soon` (markers still being written, a coordinator loading) start at one millisecond instead of
    the usual back-off, or back-to-back transactions would each wait 100 ms for nothing.

    >>> patience = Patience(budget_ms=10_000, backoff_ms=100, backoff_max_ms=1_000)
    >>> patience.is_spent
    False
    """

    budget_ms: float
    backoff_ms: float
    backoff_max_ms: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _started: float = field(init=False)
    _pauses: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._started = self.clock()

    @property
    def elapsed_ms(self) -> float:
        return (self.clock() - self._started) * 1000

    @property
    def remaining_ms(self) -> float:
        return self.budget_ms - self.elapsed_ms

    @property
    def is_spent(self) -> bool:
        return self.remaining_ms <= 0

    def next_pause_ms(self, verdict: Verdict | None = None) -> float:
        """The pause before the next try, never beyond what remains."""
        first = _SOON_FIRST_MS if verdict is not None and verdict.soon else self.backoff_ms
        pause = min(first * 2 ** min(self._pauses, 20), self.backoff_max_ms)
        self._pauses += 1
        return max(0.0, min(pause, self.remaining_ms))

    def pause(self, verdict: Verdict | None = None) -> None:
        self.sleep(self.next_pause_ms(verdict) / 1000)
