"""Which leader wrote which part of a log (KIP-101): a reader sees by it that records it has read were lost since."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from operator import itemgetter

from kio.schema.errors import ErrorCode

from semel.core.refusal import Refused

UNDEFINED = (-1, -1)


class LeaderEpochs:
    """The epochs that a log knows of, each with the offset at which it began; both only grow.

    >>> epochs = LeaderEpochs()
    >>> epochs.begin(0, 0)
    >>> epochs.begin(2, 18)
    >>> epochs.end_of(0, 30), epochs.end_of(1, 30), epochs.end_of(2, 30), epochs.end_of(3, 30)
    ((0, 18), (0, 18), (2, 30), (-1, -1))
    >>> epochs.of(17), epochs.of(18)
    (0, 2)
    """

    def __init__(self, entries: Iterable[tuple[int, int]] = ()) -> None:
        self._entries: list[tuple[int, int]] = []
        for epoch, start_offset in entries:
            self.begin(epoch, start_offset)

    @property
    def entries(self) -> tuple[tuple[int, int], ...]:
        return tuple(self._entries)

    @property
    def latest(self) -> int:
        return self._entries[-1][0] if self._entries else -1

    def check_current(self, epoch: int) -> None:
        """Refuse a client that knows an older leader, or one that has not been yet; -1 does not compare."""
        if 0 <= epoch < self.latest:
            raise Refused(ErrorCode.fenced_leader_epoch, f"leader epoch {epoch} is over")
        if epoch > self.latest:
            raise Refused(ErrorCode.unknown_leader_epoch, f"leader epoch {epoch} has not been yet")

    def begin(self, epoch: int, start_offset: int) -> None:
        """A leader takes over, or its first batch is found. One that is known changes nothing; one that wrote nothing
        leaves no trace.
        """
        if epoch <= self.latest:
            return
        while self._entries and self._entries[-1][1] >= start_offset:
            self._entries.pop()
        self._entries.append((epoch, start_offset))

    def of(self, offset: int) -> int:
        """The epoch of the record at `offset`, or -1 if nobody knows."""
        found = bisect_right(self._entries, offset, key=itemgetter(1)) - 1
        return self._entries[found][0] if found >= 0 else -1

    def end_of(self, epoch: int, log_end_offset: int) -> tuple[int, int]:
        """The last epoch that is not behind `epoch`, and where it ended. One that has not been yet is undefined.

        Of an epoch before all that are known, the records are gone: it ended where the known ones begin.
        """
        if epoch < 0 or epoch > self.latest:
            return UNDEFINED
        following = bisect_right(self._entries, epoch, key=itemgetter(0))
        found = epoch if following == 0 else self._entries[following - 1][0]
        return found, self._entries[following][1] if following < len(self._entries) else log_end_offset
