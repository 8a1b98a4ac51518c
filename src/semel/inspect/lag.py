"""True lag: how many records a group still has to read, in place of the distance between two offsets. Pure.

Markers take an offset each and are read by nobody, and aborted records are never shown to a reader of committed
records. So `end - committed` does not reach 0 on a transactional topic, and alarms on it cannot be set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from semel.inspect.outcomes import LoggedBatch, Status


@dataclass(frozen=True, slots=True)
class TrueLag:
    """What lies between a group's committed offset and the end of a partition.

    `readable` is the true lag. What lies beyond the last stable offset nobody can read as committed yet: `waiting`
    records will be readable as soon as older transactions end, `open` ones depend on their own transaction.
    """

    naive: int
    """End minus committed offset, as most tools show it."""
    readable: int = 0
    waiting: int = 0
    open: int = 0
    aborted: int = 0
    markers: int = 0
    unread_offsets: int = 0
    """Offsets up to the last stable one that were not looked at because of the limit. Each may be a record or not."""
    unread_beyond: int = 0
    """The same beyond the last stable offset."""

    @property
    def is_exact(self) -> bool:
        return self.unread_offsets == self.unread_beyond == 0

    @property
    def at_most(self) -> int:
        """The true lag cannot be above it."""
        return self.readable + self.unread_offsets

    def __add__(self, other: TrueLag) -> TrueLag:
        return TrueLag(
            self.naive + other.naive,
            self.readable + other.readable,
            self.waiting + other.waiting,
            self.open + other.open,
            self.aborted + other.aborted,
            self.markers + other.markers,
            self.unread_offsets + other.unread_offsets,
            self.unread_beyond + other.unread_beyond,
        )


class LagCount:
    """Counts batches in log order. Where a batch begins before the committed offset, tell how many records count.

    >>> count = LagCount(start=5, last_stable_offset=9, high_watermark=9)
    >>> count.result(looked_up_to=5)
    TrueLag(naive=4, readable=0, waiting=0, open=0, aborted=0, markers=0, unread_offsets=4, unread_beyond=0)
    """

    def __init__(self, *, start: int, last_stable_offset: int, high_watermark: int) -> None:
        self._start = start
        self._stable = last_stable_offset
        self._end = high_watermark
        self._counts: Counter[str] = Counter()
        self._told: dict[int, int] = {}

    def add(self, batch: LoggedBatch, *, decided: Iterable[LoggedBatch] = (), record_count: int | None = None) -> None:
        """`decided` are batches that were added as open and are ended by this one."""
        if record_count is not None:
            self._told[batch.base_offset] = record_count
        for earlier in decided:
            self._count("open", earlier, -self._records_of(earlier))
            self._count(earlier.status, earlier, self._records_of(earlier))
        self._count(batch.status, batch, self._records_of(batch))

    def _records_of(self, batch: LoggedBatch) -> int:
        if batch.base_offset in self._told:
            return self._told[batch.base_offset]
        # In a batch that compaction has not touched, offsets are without gaps.
        return min(batch.record_count, batch.last_offset - max(batch.base_offset, self._start) + 1)

    def _count(self, status: Status, batch: LoggedBatch, records: int) -> None:
        if status in ("plain", "committed"):
            self._counts["readable" if batch.base_offset < self._stable else "waiting"] += records
        else:
            self._counts["markers" if status == "marker" else status] += records

    def result(self, *, looked_up_to: int) -> TrueLag:
        """`looked_up_to` is the first offset that was not looked at."""
        looked = max(looked_up_to, self._start)
        unread = max(0, self._stable - looked)
        beyond = max(0, self._end - max(looked, self._stable))
        naive = max(0, self._end - self._start)
        return TrueLag(naive, **self._counts, unread_offsets=unread, unread_beyond=beyond)


def needs_records(batch: LoggedBatch, start: int) -> bool:
    """Whether the header cannot tell how many records of the batch are at `start` or later.

    That is so where compaction has left a batch with gaps and the committed offset lies inside of it.
    """
    return batch.base_offset < start and batch.record_count != batch.last_offset - batch.base_offset + 1
