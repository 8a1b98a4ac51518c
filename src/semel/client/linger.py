"""The thread that sends what has waited for `linger.ms`, for producers without transactions.

It starts when a call leaves something unsent or unanswered. While nothing waits it sleeps and costs nothing. It holds
its producer by a weak reference only, so that a producer which was forgotten can be collected and can say what it lost.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Final, Protocol

StartThread = Callable[[Callable[[], None]], threading.Thread]
"""Runs a function in a thread of its own."""

_PAUSE_S_MIN: Final = 0.001
_PAUSE_S_MAX: Final = 0.05


class Advancing(Protocol):
    """A producer, as its thread sees it."""

    def advance(self) -> bool:
        """Send what waits and read the answers that are there; True if nothing is left to do."""
        ...


def start_daemon(run: Callable[[], None]) -> threading.Thread:
    """A thread that does not keep the interpreter from exiting."""
    thread = threading.Thread(target=run, name="semel-linger", daemon=True)
    thread.start()
    return thread


class Linger:
    """Calls `advance` of a producer `linger_ms` after `wake`, and again until nothing is left."""

    def __init__(self, producer: Advancing, linger_ms: float, start: StartThread = start_daemon) -> None:
        self._producer = weakref.ref(producer)
        self._linger_s = linger_ms / 1000
        self._start = start
        self._thread: threading.Thread | None = None
        self._work = threading.Event()
        self._stop = threading.Event()

    def wake(self) -> None:
        """Something waits. Called after it was put where `advance` finds it."""
        if self._thread is None:
            self._thread = self._start(self._run)
        self._work.set()

    def stop(self) -> None:
        """Let the thread end; it may still be in a call of `advance`."""
        self._stop.set()
        self._work.set()

    def wait_stopped(self, timeout_s: float) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            self._work.wait()
            self._work.clear()
            pause_s = self._linger_s
            while not self._stop.wait(pause_s):
                if self._is_done():
                    break
                pause_s = min(max(2 * pause_s, _PAUSE_S_MIN), _PAUSE_S_MAX)
            if self._stop.is_set():
                return

    def _is_done(self) -> bool:
        producer = self._producer()
        return producer is None or producer.advance()
