"""SIGTERM ends a session in order: the open transaction is committed, the member leaves, and the process exits.

Only where the program has no handler of its own, and only in the main thread, where Python runs handlers.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Final

EXIT_STATUS: Final = 128 + signal.SIGTERM
"""What a shell shows of a process that SIGTERM has ended."""

_watches: list[SigtermWatch] = []


def _forget_after_fork() -> None:
    """A forked worker has no session: SIGTERM ends it, as `multiprocessing.Pool` expects."""
    _watches.clear()
    if signal.getsignal(signal.SIGTERM) is _handle:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget_after_fork)


class SigtermWatch:
    """From `start` to `end`, SIGTERM calls `on_signal` instead of ending the process. A second one ends it at once."""

    def __init__(self, on_signal: Callable[[], None]) -> None:
        self._on_signal = on_signal
        self.was_raised = False

    def start(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if not _watches:
            if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, _handle):
                return  # the program's own handler decides
            signal.signal(signal.SIGTERM, _handle)
        _watches.append(self)

    def end(self) -> None:
        """Restore what was there. May be called more than once, and from any thread."""
        if self not in _watches:
            return
        _watches.remove(self)
        is_ours = signal.getsignal(signal.SIGTERM) is _handle
        if not _watches and is_ours and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def raise_exit(self) -> None:
        """What the signal asked for, once all is in order."""
        if self.was_raised:
            raise SystemExit(EXIT_STATUS)

    def note(self) -> None:
        self.was_raised = True
        self._on_signal()


def _handle(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for watch in list(_watches):
        watch.note()
    if not _watches:  # all of them were ended in other threads, which cannot restore the handler
        signal.raise_signal(signal.SIGTERM)
