"""Going on after a lost connection, a deadlock or a full disk: growing pauses with jitter, up to a time."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Final

from semel.errors import DatabaseError, DatabaseUnreachable, SemelError

LOG: Final = logging.getLogger("semel.bridges")

_FIRST_S: Final = 0.1
_LONGEST_S: Final = 10.0
_LOOK_S: Final = 0.1
"""How long a pause may go on after the run was asked to end."""
_SHORTEST_S: Final = 0.05
"""With less than that left there is no further try: pauses that halve the rest would never end."""

_AFTER: Final = (
    "What was committed before is in the database together with the position, so a new start goes on from there and "
    "repeats nothing."
)


class Retries:
    """Counts from the first failure to the next success.

    >>> retries = Retries(60, lambda: False, pause=lambda seconds: None)
    >>> retries.failed(DatabaseError("a deadlock", is_transient=True))
    >>> retries.succeeded()
    """

    def __init__(
        self,
        retry_s: float,
        is_stopping: Callable[[], bool],
        *,
        what: str = "The database",
        after: str = _AFTER,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._retry_s = retry_s
        self._what = what
        self._after = after
        self._is_stopping = is_stopping
        self._clock = clock
        self._pause = pause
        self._since: float | None = None
        self._count = 0

    def failed(self, error: DatabaseError) -> None:
        """Wait before the next try. Raises if another one makes no sense, or if the time is over."""
        if not error.is_transient:
            raise error
        self.wait_after(error)

    def wait_after(self, error: SemelError) -> None:
        """The same after an error that is known to pass."""
        now = self._clock()
        self._since = now if self._since is None else self._since
        left_s = self._retry_s - (now - self._since)
        if left_s < _SHORTEST_S:
            given_up = self._give_up(error)
            raise given_up from (None if given_up is error else error)
        pause_s = min(_FIRST_S * 2 ** min(self._count, 10), _LONGEST_S, left_s) * random.uniform(0.5, 1.0)
        self._count += 1
        LOG.warning("%s Next try in %.1f s; giving up in %.0f s.", error, pause_s, left_s)
        until = now + pause_s
        while (rest_s := until - self._clock()) > 0 and not self._is_stopping():
            self._pause(min(rest_s, _LOOK_S))

    def succeeded(self) -> None:
        if self._since is not None:
            LOG.warning("%s is back after %.1f s.", self._what, self._clock() - self._since)
        self._since, self._count = None, 0

    def _give_up(self, error: SemelError) -> SemelError:
        if not isinstance(error, DatabaseError):
            error.add_note(f"Tried for retry_s={self._retry_s:g} s without success. {self._after}")
            return error
        kind = DatabaseUnreachable if isinstance(error, DatabaseUnreachable) else DatabaseError
        return kind(
            f"Tried for retry_s={self._retry_s:g} s without success. {error} {self._after}",
            sqlstate=error.sqlstate,
        )
