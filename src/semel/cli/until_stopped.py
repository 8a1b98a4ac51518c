"""Commands that run until they are stopped: Ctrl-C ends them in order, and an error is one sentence."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from typing import TypeVar

import typer

from semel.errors import SemelError

_R = TypeVar("_R")


def until_stopped(run: Callable[[threading.Event], _R]) -> _R:
    """What `run` returns. Ctrl-C sets the event."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    stop = threading.Event()

    def on_interrupt(*_: object) -> None:
        stop.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C ends it at once

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        return run(stop)
    except SemelError as error:
        notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
        typer.echo(f"{error}{notes}", err=True)
        raise typer.Exit(1) from error
