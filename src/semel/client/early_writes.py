"""Whether the next transaction's first write may come too early: before the last one's markers are written.

On transaction protocol 2 EndTxn is answered when the outcome is decided. A broker that is given a write of the next
transaction before the markers are there holds it back for 20 ms (add.partitions.to.txn.retry.backoff.ms), which is many
times what a transaction of one record takes. To look at the transaction's state first costs a short exchange, so it is
done only in quick succession, and only for a while after a write that was late. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

HELD_BACK_S: Final = 0.020
LATE_S: Final = 0.015
"""A first write that took so long was most likely held back."""
LOOKS: Final = 100
"""For so many transactions after it."""


@dataclass(slots=True)
class EarlyWrites:
    """
    >>> early = EarlyWrites()
    >>> early.note_first_write(0.021)
    >>> early.note_end(7.0)
    >>> early.is_likely(7.001), early.is_likely(7.5)
    (True, False)
    """

    _ended_at_s: float = float("-inf")
    _looks_left: int = 0

    def note_end(self, now_s: float) -> None:
        """A transaction was ended, and its markers are on their way."""
        self._ended_at_s = now_s
        self._looks_left = max(0, self._looks_left - 1)

    def note_first_write(self, took_s: float) -> None:
        if took_s >= LATE_S:
            self._looks_left = LOOKS

    def is_likely(self, now_s: float) -> bool:
        """Whether to look before the first write; after the time of one holding back there is nothing to gain."""
        return self._looks_left > 0 and now_s - self._ended_at_s < HELD_BACK_S
