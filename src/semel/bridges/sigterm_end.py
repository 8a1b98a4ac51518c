"""Runs that go on until an event is set or SIGTERM comes, and then end after the present transaction."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from semel.bridges.retries import LOG
from semel.session.sigterm import SigtermWatch


@contextmanager
def ends_on_sigterm(what: str, stop: threading.Event | None, *, watches: bool = True) -> Iterator[Callable[[], bool]]:
    """Gives whether to end. After the block the process exits, if the signal asked for it."""
    terminated = threading.Event()

    def on_sigterm() -> None:
        LOG.info("SIGTERM: the %s ends after the present transaction. A second one ends the process at once.", what)
        terminated.set()

    sigterm = SigtermWatch(on_sigterm)
    if watches:
        sigterm.start()
    try:
        yield lambda: terminated.is_set() or (stop is not None and stop.is_set())
    finally:
        sigterm.end()
    sigterm.raise_exit()
