"""Producers that were not closed: flushed when the interpreter exits, and reported if records were lost with them.

Exit is a safe place to flush: the program has ended, sockets and logging still work, and the wait is bounded. Garbage
collection is not: it can run in any thread at any line, so a producer that is collected only reports.
"""

from __future__ import annotations

import atexit
import logging
import os
import warnings
import weakref
from typing import Final, Protocol

from semel.errors import SemelError

LOG: Final = logging.getLogger("semel.client")
EXIT_FLUSH_MS: Final = 10_000


class LeftOpen(Protocol):
    """What is asked of a producer that nobody closed."""

    @property
    def unsent(self) -> tuple[int, int]:
        """How many records never left, and how many left without an answer so far."""
        ...

    def flush_at_exit(self, timeout_ms: float) -> None:
        """Send what can be sent in this time, and close."""
        ...


_OPEN: Final[weakref.WeakSet[LeftOpen]] = weakref.WeakSet()
_PROCESS: Final = os.getpid()


def watch(producer: LeftOpen) -> None:
    """Flush this producer at exit, unless it was closed by then."""
    _OPEN.add(producer)


def forget(producer: LeftOpen) -> None:
    _OPEN.discard(producer)


def report_lost(producer: LeftOpen, when: str) -> None:
    """A ResourceWarning and an error in the log, if records are lost with this producer."""
    never_sent, unanswered = producer.unsent
    if not never_sent and not unanswered:
        return
    lost = f"{never_sent} records were never sent"
    if unanswered:
        lost += f", and {unanswered} were sent without an answer and may or may not be stored"
    LOG.error("A producer was not closed %s: %s. Call close(), or use it in a `with` block.", when, lost)
    warnings.warn(f"A semel.Producer was not closed {when}: {lost}.", ResourceWarning, stacklevel=3, source=producer)


@atexit.register
def _flush_at_exit() -> None:
    if os.getpid() != _PROCESS:  # a forked child: the records and the sockets are its parent's
        return
    for producer in list(_OPEN):
        if producer.unsent == (0, 0):
            continue
        try:
            producer.flush_at_exit(EXIT_FLUSH_MS)
        except SemelError as error:
            LOG.error("A producer that was not closed could not be flushed when the program ended: %s", error)
        report_lost(producer, "before the program ended")
