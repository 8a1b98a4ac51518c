"""Progress of long commands: on standard error, where that is a terminal, and nowhere else."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_PATIENCE_S: Final = 0.5
"""What is over sooner needs no line."""

_lines: list[Callable[[str], None]] = []


def tell(what: str) -> None:
    """What the command works at now, if there is a line that says so."""
    if _lines:
        _lines[-1](what)


class ProgressView:
    """Shows the latest of what it is given, in one place."""

    def __init__(self, live: Live | None) -> None:
        self._live = live

    def update(self, view: RenderableType) -> None:
        if self._live is not None:
            self._live.update(view)

    def aside(self, say: Callable[[], None]) -> None:
        """Print something that stays, above what moves."""
        if self._live is None:
            say()
            return
        self._live.stop()
        say()
        self._live.start()


@contextmanager
def progress_view() -> Iterator[ProgressView]:
    """It is gone when the block ends."""
    if not sys.stderr.isatty():
        yield ProgressView(None)
        return
    with Live(console=Console(stderr=True), refresh_per_second=4, transient=True) as live:
        yield ProgressView(live)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Says what is worked at, and for how long already, if it takes long. `tell` changes the words."""
    if not sys.stderr.isatty():
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    line = Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4)
    task = line.add_task(what, total=None)
    patience = threading.Timer(_PATIENCE_S, line.start)
    patience.start()
    _lines.append(lambda what: line.update(task, description=what))
    try:
        yield
    finally:
        _lines.pop()
        patience.cancel()
        patience.join()
        line.stop()
