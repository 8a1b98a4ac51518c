"""The batches of one partition on their way to its leader: waiting, in flight, back for a retry. No IO, no clock.

The order in which an idempotent producer's batches were first sent is the order of their sequences, and a repeat must
keep both. So when one batch comes back, nothing more of this partition leaves until all that is in flight has settled;
then everything unsettled goes again, oldest first, with the sequences it had.

A leader recognises a repeat only among the last five batches it stored. Answers can settle later batches before an
earlier one (the earlier was refused for a moment, the later recognised as stored), so five in flight is not enough of a
rule: a new batch leaves only while the oldest unsettled one is less than five batches behind it.

A leader that knows nothing of a producer takes any sequence as its first. If the first batch were refused for a moment
(a topic that is only just there) and the second stored, the first could never follow. So the first batch goes alone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from semel.errors import SemelError

SEQUENCES: Final = 2**31
"""Sequences count from 0 to 2**31 - 1 and wrap."""

REMEMBERED_BATCHES: Final = 5
"""How many batches of a producer a leader remembers for each partition."""


@dataclass(slots=True, eq=False)
class OutgoingBatch:
    """An encoded batch, stamped when it is first sent."""

    topic: str
    partition: int
    data: memoryview
    record_count: int
    deadline: float
    sequence: int | None = None
    number: int = -1
    """Counts a partition's batches in the order in which they were first sent."""
    may_have_left: bool = False
    """Whether any of it was given to a connection."""
    last_error: SemelError | None = None
    """What the last try came to."""


@dataclass(slots=True)
class SendQueue:
    """
    >>> queue = SendQueue()
    >>> queue.add(OutgoingBatch("t", 0, memoryview(b""), 10, 0.0))
    >>> batch = queue.take()
    >>> batch.sequence, queue.next_sequence
    (0, 10)
    """

    next_sequence: int = 0
    next_number: int = 0
    is_known: bool = False
    """Whether the leader has stored a batch of this producer, and so knows which sequence comes next."""
    not_before: float = 0.0
    """When a retry may leave, on the clock of whoever drives the queue."""
    _waiting: deque[OutgoingBatch] = field(default_factory=deque[OutgoingBatch])
    _in_flight: list[OutgoingBatch] = field(default_factory=list[OutgoingBatch])
    _returned: list[OutgoingBatch] = field(default_factory=list[OutgoingBatch])

    def add(self, batch: OutgoingBatch) -> None:
        self._waiting.append(batch)

    @property
    def is_empty(self) -> bool:
        return not (self._waiting or self._in_flight or self._returned)

    @property
    def has_in_flight(self) -> bool:
        return bool(self._in_flight)

    @property
    def has_unsettled(self) -> bool:
        """Whether any batch was sent and may or may not be stored."""
        return bool(self._in_flight or self._returned or (self._waiting and self._waiting[0].sequence is not None))

    @property
    def record_counts(self) -> tuple[int, int]:
        """How many records never left, and how many left and have no answer yet."""
        counts = [0, 0]
        for batch in (*self._waiting, *self._in_flight, *self._returned):
            counts[batch.may_have_left] += batch.record_count
        return counts[False], counts[True]

    def peek(self, *, repeats_only: bool = False) -> OutgoingBatch | None:
        """The batch that may leave next, if any; with `repeats_only`, only one that was sent before."""
        self._requeue_when_drained()
        if self._returned or not self._waiting:
            return None
        head = self._waiting[0]
        if head.sequence is None and (repeats_only or self._must_wait_for_the_oldest()):
            return None
        return head

    def _must_wait_for_the_oldest(self) -> bool:
        if not self._in_flight:
            return False
        return not self.is_known or self.next_number - self._in_flight[0].number >= REMEMBERED_BATCHES

    def take(self) -> OutgoingBatch:
        """Move the batch that `peek` showed into flight; the first time it gets its sequence."""
        batch = self.peek()
        assert batch is not None, "take() follows a peek() that showed a batch"
        self._waiting.popleft()
        if batch.sequence is None:
            batch.sequence = self.next_sequence
            self.next_sequence = (self.next_sequence + batch.record_count) % SEQUENCES
            batch.number = self.next_number
            self.next_number += 1
        self._in_flight.append(batch)
        return batch

    def settle(self, batch: OutgoingBatch, *, is_stored: bool) -> None:
        """The batch is stored, or has failed for good."""
        self._in_flight.remove(batch)
        self.is_known |= is_stored

    def give_back(self, batch: OutgoingBatch) -> None:
        """The batch must go again."""
        self._in_flight.remove(batch)
        self._returned.append(batch)

    def is_oldest_unsettled(self, batch: OutgoingBatch) -> bool:
        """Whether every batch sent before this one is stored: then a gap in the sequences is real."""
        return not self._returned and self._in_flight[0] is batch

    def fail_unsettled(self) -> list[OutgoingBatch]:
        """Give up all that was sent and is not known to be stored (KIP-360: refused together, never reordered)."""
        self._requeue_when_drained()
        failed = list(self._returned)
        while self._waiting and self._waiting[0].sequence is not None:
            failed.append(self._waiting.popleft())
        self._returned.clear()
        return failed

    def clear(self) -> list[OutgoingBatch]:
        """Give up everything, as an abort does."""
        dropped = [*self._in_flight, *self._returned, *self._waiting]
        self._in_flight.clear()
        self._returned.clear()
        self._waiting.clear()
        return dropped

    def restart_sequences(self) -> None:
        """Begin at 0 under a new epoch; only when nothing sent is unsettled."""
        assert not self.has_unsettled, "a batch of unknown fate would be stored twice under a new epoch"
        self.next_sequence = 0

    def _requeue_when_drained(self) -> None:
        if self._returned and not self._in_flight:
            # In the order of sending, which is not always that of return: a batch that finds no connection comes back
            # before those that were lost with the last one.
            self._waiting.extendleft(sorted(self._returned, key=lambda batch: -batch.number))
            self._returned.clear()
