"""Postgres' `pg_snapshot` as a value: which transactions had ended when it was taken. Pure.

A snapshot counts top-level transactions only, and so does the column that the relay reads: `pg_current_xact_id()` gives
the top-level id inside a savepoint too. A row's system column `xmin` would be the savepoint's own id, of 32 bits.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass
from typing import Final, Self

_FORM: Final = re.compile(r"(\d+):(\d+):((?:\d+(?:,\d+)*)?)")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`in_progress` holds the ids from `xmin` up to, but not including, `xmax` that had not ended, in order."""

    xmin: int
    """All lower ids have ended."""
    xmax: int
    """This id and all higher ones have not ended, or not begun."""
    in_progress: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """
        >>> Snapshot.parse("10:20:10,14")
        Snapshot(xmin=10, xmax=20, in_progress=(10, 14))
        """
        found = _FORM.fullmatch(text)
        if found is None:
            raise ValueError(f"{text[:100]!r} is not a snapshot of Postgres.")
        xmin, xmax, ids = found.groups()
        return cls(int(xmin), int(xmax), tuple(map(int, ids.split(","))) if ids else ())

    def __str__(self) -> str:
        """As Postgres writes it.

        >>> str(Snapshot(10, 20, (10, 14)))
        '10:20:10,14'
        """
        return f"{self.xmin}:{self.xmax}:{','.join(map(str, self.in_progress))}"

    def sees(self, xid: int) -> bool:
        """Whether the transaction had ended, as `pg_visible_in_snapshot` says.

        >>> [Snapshot.parse("10:20:10,14").sees(xid) for xid in (9, 10, 13, 14, 19, 20)]
        [True, False, True, False, True, False]
        """
        if xid < self.xmin or xid >= self.xmax:
            return xid < self.xmin
        at = bisect_left(self.in_progress, xid)
        return at == len(self.in_progress) or self.in_progress[at] != xid

    def may_follow(self, earlier: Snapshot) -> bool:
        """Whether this one can have been taken later on the same server: what has ended stays ended.

        >>> Snapshot(10, 20, (10,)).may_follow(Snapshot(10, 15)), Snapshot(12, 20).may_follow(Snapshot(10, 15, (10,)))
        (False, True)
        """
        still_open = (xid for xid in self.in_progress if xid < earlier.xmax)
        return (
            self.xmin >= earlier.xmin and self.xmax >= earlier.xmax and all(not earlier.sees(xid) for xid in still_open)
        )


NOTHING: Final = Snapshot(0, 0)
"""Sees no transaction: where a relay begins."""
