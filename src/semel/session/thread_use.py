"""A session belongs to one thread at a time. Use from two at once is refused, before it can do harm."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from semel.errors import InvalidState


class ThreadUse:
    """Who uses a session now."""

    def __init__(self) -> None:
        self.is_async = False
        """Under asyncio the loop's thread writes and another one commits; they take turns."""
        self._step = threading.RLock()
        self._turn_of: int | None = None

    @contextmanager
    def step(self, *, in_turn: bool = False) -> Iterator[None]:
        """Around everything that uses the session's clients. `in_turn`: it is part of the open transaction."""
        me = threading.get_ident()
        if in_turn and not self.is_async and self._turn_of not in (None, me):
            raise _in_two_threads("this transaction was begun in another thread")
        if not self._step.acquire(blocking=False):
            raise _in_two_threads("another thread is using it at this moment")
        try:
            yield
        finally:
            self._step.release()

    def begin_turn(self) -> None:
        self._turn_of = threading.get_ident()

    def end_turn(self) -> None:
        self._turn_of = None


def _in_two_threads(why: str) -> InvalidState:
    return InvalidState(
        f"A session belongs to one thread, and {why}; this call has changed nothing. Compute in other threads if you "
        "like, and write in the one of the transaction; or give each thread its own session. To end a session from "
        "outside, call stop()."
    )
