"""Commands that run until they are stopped: Ctrl-C ends them in order."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from typing import TypeVar

_R = TypeVar("_R")


def until_stopped(run: Callable[[threading.Event], _R]) -> _R:
    """What `run` returns. Ctrl-C sets the event."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    stop = threading.Event()

    def on_interrupt(*_: object) -> None:
        stop.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C ends it at once

    signal.signal(signal.SIGINT, on_interrupt)
    return run(stop)
