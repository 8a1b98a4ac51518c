"""Which batches a `read_committed` reader may see, decided batch by batch.

A broker never sends `read_committed` data beyond the last stable offset, so every transaction in a response is decided.
Beside the data it lists the aborted ones, each by its producer id and first offset. Where one ends is not in that list:
the abort marker in the log tells. A batch has one producer, so no look at single records is needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from semel.records import BatchHeader
from semel.records.control import MarkerKind


class AbortedTransaction(NamedTuple):
    """A transaction that was aborted in a partition, as a Fetch response names it."""

    producer_id: int
    first_offset: int


class Visibility:
    """Walks over the batches of one response, in log order.

    >>> from semel.records import encode_control_batch, read_header
    >>> from semel.records.reference import Record, encode_batch
    >>> dirty = encode_batch([Record(4, 0, None, b"v")], base_offset=4, producer_id=7, transactional=True)
    >>> clean = encode_batch([Record(5, 0, None, b"v")], base_offset=5, producer_id=8, transactional=True)
    >>> visibility = Visibility([AbortedTransaction(producer_id=7, first_offset=4)])
    >>> [visibility.admits(read_header(batch), lambda: None) for batch in (dirty, clean)]
    [False, True]
    """

    def __init__(self, aborted: Iterable[AbortedTransaction] = ()) -> None:
        # Brokers list them in the order in which they ended, which is not the order in which they began.
        self._to_come = deque(sorted(aborted, key=lambda transaction: transaction.first_offset))
        self._aborting: set[int] = set()

    def admits(self, header: BatchHeader, read_marker: Callable[[], MarkerKind | None]) -> bool:
        """Whether the records of the next batch are committed records.

        `read_marker` is asked for the kind of a control batch, and only where it matters, since it has to unpack it.
        """
        while self._to_come and self._to_come[0].first_offset <= header.last_offset:
            self._aborting.add(self._to_come.popleft().producer_id)
        if header.is_control:
            if header.producer_id in self._aborting and read_marker() == "abort":
                # The same producer's next transaction may be a committed one.
                self._aborting.remove(header.producer_id)
            return False
        return not (header.is_transactional and header.producer_id in self._aborting)
