"""How many records one transaction may take, so that the work on them fits into the transaction timeout. Pure.

A transaction that outlives `transaction.timeout.ms` is aborted by its coordinator and its records come again. The same
portion would be aborted again, for ever: so the next one is smaller, and grows again when the work is quick.
"""

from __future__ import annotations

from typing import Final

from semel.errors import WorkTooLong

_AIM: Final = 0.5
"""Of the timeout: work that takes longer leaves too little room for a slow commit."""
_QUICK: Final = 0.25
_TRIES_OF_ONE: Final = 2
"""A pause of the machine may hit a portion of one record too, once."""


class Pace:
    """
    >>> pace = Pace(timeout_s=30, records_max=100_000)
    >>> pace.timed_out(records=1_000, took_s=60)
    >>> pace.limit
    250
    >>> pace.committed(records=250, took_s=5)
    >>> pace.limit
    500
    """

    def __init__(self, timeout_s: float, records_max: int) -> None:
        self.limit = records_max
        """How many records the next portion may have."""
        self._timeout_s = timeout_s
        self._records_max = records_max
        self._lone_timeouts = 0

    def committed(self, records: int, took_s: float) -> None:
        self._lone_timeouts = 0
        if took_s > self._timeout_s * _AIM:
            self.limit = min(self.limit, self._fitting(records, took_s))
        elif took_s < self._timeout_s * _QUICK and records >= self.limit:
            self.limit = min(self._records_max, self.limit * 2)

    def timed_out(self, records: int, took_s: float) -> None:
        """The coordinator ended the transaction because of its age. Raises if there is nothing left to shrink."""
        self.limit = min(max(1, records // 2), self._fitting(records, took_s))
        if records > 1:
            self._lone_timeouts = 0
            return
        self._lone_timeouts += 1
        if self._lone_timeouts >= _TRIES_OF_ONE:
            raise WorkTooLong(
                f"One record alone took {took_s:.1f} s, and the coordinator aborts a transaction after "
                f"{self._timeout_s:g} s (transaction.timeout.ms). It was tried {_TRIES_OF_ONE} times and nothing of it "
                "was committed; what came before it is. Raise transaction.timeout.ms together with session.timeout.ms "
                "(the broker allows up to transaction.max.timeout.ms), or do the slow work before the first write."
            )

    def _fitting(self, records: int, took_s: float) -> int:
        return max(1, int(records * self._timeout_s * _AIM / max(took_s, 0.001)))
