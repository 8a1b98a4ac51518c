"""How many records a function of rows is given at once, so that a slow one can be stopped, and loses little by it.

The results of a portion are committed together. One that lasts for minutes would hold up SIGTERM, and a process that is
killed then begins again with the same portion. So portions begin small and grow as long as they take a few seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

import pyarrow as pa

from semel.session.transaction import Row, rows_of

_FIRST: Final = 100
_GROWTH: Final = 16
_PORTION_S: Final = 4.0
_GRACE_S: Final = 3.0
"""How long a run that is to end goes on with its portion, before it is given up."""
_LIMIT_MAX: Final = 2**31
_STRIDE_MAX: Final = 64


class RunStopped(Exception):
    """The run was asked to end, and its portion would take too long: nothing of it was written, it comes again."""


class RowPace:
    """
    >>> times = iter([0.0, 2.0])
    >>> pace = RowPace(lambda: False, clock=lambda: next(times))
    >>> table = pa.table({name: [1] * 100 for name in ("topic", "partition", "offset", "key", "value", "headers")})
    >>> table = table.set_column(5, "headers", pa.nulls(100)).append_column("timestamp", pa.nulls(100))
    >>> len(list(pace.rows(table))), pace.limit
    (100, 200)
    """

    def __init__(self, is_stopping: Callable[[], bool], *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = _FIRST
        """How many records the next portion should have."""
        self._is_stopping = is_stopping
        self._clock = clock

    def rows(self, table: pa.Table) -> Iterator[Row]:
        """The rows one by one. Raises `RunStopped` in between."""
        began = self._clock()
        give_up_at: float | None = None
        # A look at the clock or at the event for each row would cost fast functions more than it tells.
        stride = min(_STRIDE_MAX, max(1, self.limit // 256))
        for number, row in enumerate(rows_of(table)):
            if number % stride == 0 and self._is_stopping():
                now = self._clock()
                give_up_at = now + _GRACE_S if give_up_at is None else give_up_at
                if now >= give_up_at:
                    raise RunStopped
            yield row
        self._learn(table.num_rows, self._clock() - began)

    def _learn(self, records: int, took_s: float) -> None:
        fitting = int(min(_LIMIT_MAX, records * _PORTION_S / max(took_s, 1e-6)))
        # A few records that came by themselves say nothing about many.
        most = self.limit * _GROWTH if records * 2 >= self.limit else self.limit
        if records:
            self.limit = max(1, min(fitting, most))
