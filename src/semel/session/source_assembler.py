"""Which transactions of a source database are whole, from their events in many partitions and their end records. Pure.

It holds numbers and no records: how many events of each transaction were seen in each topic, beside how many its end
record names. Within a partition transactions follow each other in commit order, as one relay writes them. So what is
whole is always the front of every partition, and one offset in each says where it ends.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from semel.client.partitions import TopicPartition
from semel.client.source_transactions import TransactionEnd
from semel.errors import TransactionIncomplete


class EventRun(NamedTuple):
    """Events of one transaction that follow each other in one partition."""

    transaction: int
    offset: int
    """Of the first."""
    events: int
    first_index: int
    last_index: int


class WholeTransactions(NamedTuple):
    """Transactions that follow each other, all of them whole."""

    ends: tuple[TransactionEnd, ...]
    events: int
    """Those in the topics that are read."""
    positions: dict[TopicPartition, int]
    """For each partition, the first offset that is needed after them. Events before it and not yet taken are theirs."""

    @property
    def first(self) -> int:
        return self.ends[0].transaction

    @property
    def last(self) -> int:
        return self.ends[-1].transaction


@dataclass(slots=True)
class _Lane:
    """One partition with events."""

    next_offset: int
    """Everything before it was seen."""
    last: tuple[int, int] = (-1, -1)
    """Transaction and index of the last event."""
    runs: deque[EventRun] = field(default_factory=deque[EventRun])

    @property
    def needed(self) -> int:
        return self.runs[0].offset if self.runs else self.next_offset


class Assembler:
    """
    >>> assembler = Assembler("shop", ["orders"], applied=6)
    >>> orders, ends = TopicPartition("orders", 0), TopicPartition("shop.transactions", 0)
    >>> assembler.add_partition(orders, 40)
    >>> assembler.begin_ends(ends, 9)
    >>> assembler.add_events(orders, [EventRun(7, 40, 2, 0, 1), EventRun(8, 42, 1, 0, 0)], 43)
    >>> assembler.add_ends([(9, TransactionEnd("shop", 7, {"orders": 2}))], 11)
    >>> assembler.take(events_max=1000).positions
    {TopicPartition(topic='orders', partition=0): 42, TopicPartition(topic='shop.transactions', partition=0): 11}
    """

    def __init__(self, source: str, topics: Collection[str], *, applied: int | None) -> None:
        """`applied` is the last transaction that needs no more; None if the first one there is must be the first."""
        self._source = source
        self._topics = frozenset(topics)
        self._applied = applied
        self._whole = applied
        self._begun_after = applied
        """Events up to this transaction may come, where reading begins before them."""
        self._lanes: dict[TopicPartition, _Lane] = {}
        self._seen: dict[int, Counter[str]] = {}
        """By transaction and topic, of those that are not applied."""
        self._ends: deque[tuple[int, TransactionEnd]] = deque()
        """With their offsets; those that are not applied, without gaps."""
        self._ends_place = TopicPartition("", 0)
        self._ends_next = 0
        self._passes_ends = False
        self._whole_count = 0
        """How many of the ends belong to whole transactions."""

    # -- what was read -----------------------------------------------------------------------------------------------

    def add_partition(self, place: TopicPartition, next_offset: int) -> None:
        self._lanes[place] = _Lane(next_offset)

    def begin_ends(self, place: TopicPartition, next_offset: int, *, has_applied: bool = False) -> None:
        """Where end records are read from, and whether those of applied transactions come before the others."""
        self._ends_place, self._ends_next = place, next_offset
        self._passes_ends = has_applied

    def add_events(self, place: TopicPartition, runs: Iterable[EventRun], next_offset: int) -> None:
        lane = self._lanes[place]
        for run in runs:
            if (run.transaction, run.first_index) <= lane.last:
                raise self._out_of_order(place, run, lane.last)
            lane.last = (run.transaction, run.last_index)
            if self._begun_after is not None and run.transaction <= self._begun_after:
                continue
            if self._applied is not None and run.transaction <= self._applied:
                raise self._too_late(place, run)
            lane.runs.append(run)
            self._seen.setdefault(run.transaction, Counter())[place.topic] += run.events
        lane.next_offset = next_offset
        self._look()

    def add_ends(self, ends: Iterable[tuple[int, TransactionEnd]], next_offset: int) -> None:
        for offset, end in ends:
            if end.source == self._source:
                self._add_end(offset, end)
        self._ends_next = next_offset
        self._look()

    def _add_end(self, offset: int, end: TransactionEnd) -> None:
        if self._applied is None:
            self._begin_with(end.transaction)
        if self._passes_ends and self._applied is not None and end.transaction <= self._applied:
            return
        self._passes_ends = False
        expected = self._last_known + 1
        if end.transaction < expected:
            raise TransactionIncomplete(
                f"The end of transaction {end.transaction} of source {self._source!r} is in "
                f"{self._ends_place.topic!r} again, after that of {expected - 1}: its relay has begun to count from "
                "the start, so it has lost its progress, or another database is behind it now. Nothing of it was "
                "applied. Start over with empty tables, under another name=, or with another name of the relay."
            )
        if end.transaction > expected:
            raise TransactionIncomplete(
                f"Transaction {expected} of source {self._source!r} can never be whole: its end record is missing in "
                f"{self._ends_place.topic!r}, which goes on with {end.transaction}. Records of that topic were deleted "
                f"before they were read. Nothing of it was applied; everything up to {expected - 1} was. Fill the "
                f"tables from the source and go on after that: see after=."
            )
        self._ends.append((offset, end))

    def _begin_with(self, first: int) -> None:
        if first > 1:
            raise TransactionIncomplete(
                f"The oldest end record in {self._ends_place.topic!r} is that of transaction {first} of source "
                f"{self._source!r}: earlier ones were deleted, so the tables would lack them. Nothing was applied. "
                f"Fill the tables from the source up to some transaction, and pass after= with its number."
            )
        if first == 1 and 0 in self._seen:
            raise TransactionIncomplete(
                f"Source {self._source!r} has written a snapshot (transaction 0), and its end record is missing in "
                f"{self._ends_place.topic!r}. Nothing was applied. Let the relay make the snapshot again."
            )
        self._applied = self._whole = self._begun_after = first - 1

    @property
    def _last_known(self) -> int:
        assert self._applied is not None
        return self._ends[-1][1].transaction if self._ends else self._applied

    def _look(self) -> None:
        """Move on over the transactions that are whole now."""
        while self._whole_count < len(self._ends):
            _, end = self._ends[self._whole_count]
            seen = self._seen.get(end.transaction, Counter[str]())
            wanted = {topic: end.topics.get(topic, 0) for topic in self._topics}
            if any(seen[topic] > count for topic, count in wanted.items()):
                raise self._too_many(end, seen)
            if any(seen[topic] < count for topic, count in wanted.items()):
                return
            self._whole_count += 1
            self._whole = end.transaction

    # -- what is whole -----------------------------------------------------------------------------------------------

    @property
    def applied(self) -> int | None:
        """The last transaction that was taken."""
        return self._applied

    @property
    def ends_waiting(self) -> int:
        """How many end records are held."""
        return len(self._ends)

    @property
    def has_whole(self) -> bool:
        return self._whole_count > 0

    def take(self, events_max: int) -> WholeTransactions | None:
        """The next whole transactions, as many as have so many events together; at least one if there is any."""
        taken: list[TransactionEnd] = []
        events = 0
        while self._whole_count:
            _, end = self._ends[0]
            count = sum(end.topics.get(topic, 0) for topic in self._topics)
            if taken and events + count > events_max:
                break
            self._ends.popleft()
            self._whole_count -= 1
            self._seen.pop(end.transaction, None)
            events += count
            taken.append(end)
        if not taken:
            return None
        self._applied = taken[-1].transaction
        for lane in self._lanes.values():
            while lane.runs and lane.runs[0].transaction <= self._applied:
                lane.runs.popleft()
        return WholeTransactions(tuple(taken), events, self.positions)

    @property
    def positions(self) -> dict[TopicPartition, int]:
        """How far each partition is done with: the lowest offset that is still needed."""
        found = {place: lane.needed for place, lane in self._lanes.items()}
        found[self._ends_place] = self._ends[0][0] if self._ends else self._ends_next
        return found

    # -- what is not -------------------------------------------------------------------------------------------------

    def wanted(self) -> set[TopicPartition]:
        """The partitions in which the next transaction may go on. The others are ahead of it."""
        if self._applied is None or not self._ends:
            found = {self._ends_place}
            upcoming = 0 if self._applied is None else self._applied + 1
        else:
            found, upcoming = set[TopicPartition](), self._ends[0][1].transaction
        return found | {place for place, lane in self._lanes.items() if lane.last[0] <= upcoming}

    def lacking(self) -> tuple[TransactionEnd, dict[str, int]] | None:
        """The next transaction whose end is known, and how many events of each topic it lacks; None if it is whole."""
        if not self._ends or self._whole_count:
            return None
        _, end = self._ends[0]
        seen = self._seen.get(end.transaction, Counter[str]())
        return end, {
            topic: end.topics.get(topic, 0) - seen[topic]
            for topic in sorted(self._topics)
            if end.topics.get(topic, 0) > seen[topic]
        }

    def has_passed(self, topic: str, high_watermarks: Mapping[TopicPartition, int]) -> bool:
        """Whether no partition of a topic can bring an event of the next transaction any more.

        The high watermarks were asked for after its end record was read: its events are before them.
        """
        upcoming = self._ends[0][1].transaction
        return all(
            self._lanes[place].last[0] > upcoming or self._lanes[place].next_offset >= high_watermark
            for place, high_watermark in high_watermarks.items()
            if place.topic == topic
        )

    def started(self) -> list[int]:
        """Transactions of which something was read, and which are not whole."""
        return sorted(number for number in self._seen if self._whole is None or number > self._whole)

    # -- what is wrong -----------------------------------------------------------------------------------------------

    def _out_of_order(self, place: TopicPartition, run: EventRun, last: tuple[int, int]) -> TransactionIncomplete:
        return TransactionIncomplete(
            f"{place.topic}-{place.partition} at offset {run.offset} has event {run.first_index} of transaction "
            f"{run.transaction} of source {self._source!r}, after event {last[1]} of transaction {last[0]}. One relay "
            "writes them in commit order, so two of them write under one name, or the relay has lost its progress and "
            "begun again. Nothing of it was applied. Start over with empty tables, under another name=."
        )

    def _too_late(self, place: TopicPartition, run: EventRun) -> TransactionIncomplete:
        return TransactionIncomplete(
            f"{place.topic}-{place.partition} at offset {run.offset} has an event of transaction {run.transaction} of "
            f"source {self._source!r}, which was whole without it and is applied. Something else than its relay writes "
            "events with its headers. Nothing more was applied. Find the writer, then start over with empty tables."
        )

    def _too_many(self, end: TransactionEnd, seen: Mapping[str, int]) -> TransactionIncomplete:
        found = ", ".join(f"{seen.get(topic, 0)} in {topic!r}" for topic in sorted(self._topics))
        said = ", ".join(f"{end.topics.get(topic, 0)} in {topic!r}" for topic in sorted(self._topics))
        return TransactionIncomplete(
            f"Transaction {end.transaction} of source {self._source!r} has more events than its end record says: "
            f"{found}, and there should be {said}. Something else than its relay writes events with its headers. "
            "Nothing of the transaction was applied. Find the writer, then start over with empty tables."
        )
