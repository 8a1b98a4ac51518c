"""Where a mirror may cut, so that no transaction of the source is torn. Pure: batches and markers in, offsets out.

A cut is an offset in each partition. What lies below it goes over as one transaction of the target. It tears nothing if
every committed transaction of the source is below it in all of its partitions, or in none.

Two questions must be answered from the logs alone, because describing transactions needs rights that a mirror seldom
has, and tells nothing about those that are over:

- **Is all of a transaction known?** Its records are written, in every partition, before its first marker anywhere. So
  whoever has read a marker, then asks where all partitions end (a `Barrier`), and then reads up to there, has met all
  of its records.
- **Is it one transaction or several?** A producer under transaction protocol 2 uses each epoch once, and its markers
  bear a higher epoch than its records. Under protocol 1 one epoch has many transactions, whose markers bear the same
  epoch. Each begins only after all markers of the one before are written. So if nothing of the epoch is open when a
  barrier is asked for, and nothing of it lies between what was read then and the barrier, then no transaction of the
  epoch crosses the barrier. Until such a moment comes, its transactions go over together.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from semel.client.partitions import TopicPartition
from semel.records.control import MarkerKind

NOT_TRANSACTIONAL = (-1, -1)


@dataclass(slots=True, eq=False)
class Part:
    """What one transaction wrote into one partition."""

    partition: TopicPartition
    first: int
    group: Group
    outcome: MarkerKind | None = None


@dataclass(slots=True, eq=False)
class Group:
    """A transaction, or several of one epoch that cannot be told apart yet. Aborted parts are no longer in it."""

    producer_id: int
    producer_epoch: int
    since: float
    """When the first of its records was read, by the caller's clock."""
    parts: list[Part] = field(default_factory=list[Part])
    open_parts: int = 0
    last_event: int = 0
    first_marker: int | None = None
    has_shared_epoch: bool = False
    """A marker with the epoch of its records was read (protocol 1): other transactions may have this epoch too."""
    is_whole: bool = False
    """All of its records were read, and nothing of another transaction will be added."""
    is_excluded: bool = False

    @property
    def can_go(self) -> bool:
        return self.is_whole and not self.open_parts


@dataclass(frozen=True, slots=True)
class Piece:
    """A batch of records in a partition. `part` is None outside of transactions; `data` is the caller's."""

    start: int
    end: int
    size: int
    part: Part | None
    data: Any = None

    @property
    def is_committed(self) -> bool:
        return self.part is None or self.part.outcome == "commit"


def in_portions(pieces: Iterable[Piece], bytes_max: int) -> Iterator[list[Piece]]:
    """The same in lists of about so many bytes.

    >>> [len(some) for some in in_portions([Piece(0, 1, 6, None), Piece(1, 2, 6, None), Piece(2, 3, 1, None)], 10)]
    [2, 1]
    """
    some: list[Piece] = []
    size = 0
    for piece in pieces:
        some.append(piece)
        size += piece.size
        if size >= bytes_max:
            yield some
            some, size = [], 0
    if some:
        yield some


@dataclass(slots=True)
class _Log:
    """A partition: what was read and not cut yet."""

    cut: int
    position: int
    pieces: list[Piece] = field(default_factory=list[Piece])
    size: int = 0
    """Of all pieces."""
    open_parts: dict[tuple[int, int], Part] = field(default_factory=dict[tuple[int, int], Part])

    def between(self, start: int, end: int) -> list[Piece]:
        first = bisect_left(self.pieces, start, key=lambda piece: piece.start)
        return self.pieces[first : bisect_left(self.pieces, end, key=lambda piece: piece.start)]


@dataclass(frozen=True, slots=True)
class Barrier:
    """Where all partitions ended at a moment, asked for after event number `event` was read."""

    event: int
    ends: Mapping[TopicPartition, int]


@dataclass(frozen=True, slots=True)
class Cut:
    """New ends of the partitions that move, and the committed batches below them."""

    ends: Mapping[TopicPartition, int]
    pieces: Mapping[TopicPartition, list[Piece]]

    @property
    def is_empty(self) -> bool:
        return not self.ends


class CutFinder:
    """Takes batches and markers in the order of each partition, and finds the largest cut that tears nothing.

    >>> finder = CutFinder({TopicPartition("orders", 0): 0})
    >>> finder.add_batch(TopicPartition("orders", 0), 0, 3, producer=(7, 0), size=100, now=0.0)
    >>> finder.find_ends()
    {}
    """

    def __init__(self, positions: Mapping[TopicPartition, int]) -> None:
        self._logs = {partition: _Log(offset, offset) for partition, offset in positions.items()}
        self._groups: dict[tuple[int, int], Group] = {}
        """Those that may still grow, by producer id and epoch."""
        self._stuck: set[Group] = set()
        """Whole, with parts that have no marker yet."""
        self._events = 0
        self._barrier: Barrier | None = None

    # -- what was read -----------------------------------------------------------------------------------------------

    @property
    def positions(self) -> dict[TopicPartition, int]:
        """The next offset to read in each partition."""
        return {partition: log.position for partition, log in self._logs.items()}

    def position_of(self, partition: TopicPartition) -> int:
        return self._logs[partition].position

    @property
    def cut_offsets(self) -> dict[TopicPartition, int]:
        """Where the last cut ended in each partition."""
        return {partition: log.cut for partition, log in self._logs.items()}

    def add_partition(self, partition: TopicPartition, offset: int) -> None:
        self._logs[partition] = _Log(offset, offset)

    def add_batch(
        self,
        partition: TopicPartition,
        start: int,
        end: int,
        *,
        producer: tuple[int, int] = NOT_TRANSACTIONAL,
        size: int,
        now: float,
        data: Any = None,
    ) -> None:
        """Records from `start` up to but without `end`. `producer` is producer id and epoch if in a transaction."""
        log = self._logs[partition]
        part = None if producer == NOT_TRANSACTIONAL else self._part_for(log, partition, producer, start, now)
        log.pieces.append(Piece(start, end, size, part, data))
        log.size += size
        log.position = max(log.position, end)

    def _part_for(
        self, log: _Log, partition: TopicPartition, producer: tuple[int, int], start: int, now: float
    ) -> Part:
        self._events += 1
        part = log.open_parts.get(producer)
        if part is None:
            group = self._groups.get(producer)
            if group is None:
                group = self._groups[producer] = Group(*producer, since=now)
            part = log.open_parts[producer] = Part(partition, start, group)
            group.parts.append(part)
            group.open_parts += 1
        part.group.last_event = self._events
        return part

    def add_marker(self, partition: TopicPartition, offset: int, producer: tuple[int, int], kind: MarkerKind) -> None:
        """The end of a transaction in a partition. It also ends what lower epochs of the producer left open there."""
        self._events += 1
        log = self._logs[partition]
        log.position = max(log.position, offset + 1)
        producer_id, epoch = producer
        for key in [key for key in log.open_parts if key[0] == producer_id and key[1] <= epoch]:
            self._close(log.open_parts.pop(key), kind, shares_epoch=key[1] == epoch)
        group = self._groups.get(producer)
        if group is not None:
            group.last_event = self._events

    def _close(self, part: Part, kind: MarkerKind, *, shares_epoch: bool) -> None:
        group = part.group
        part.outcome = kind
        group.open_parts -= 1
        group.has_shared_epoch = group.has_shared_epoch or shares_epoch
        group.last_event = self._events
        if group.first_marker is None:
            group.first_marker = self._events
        if kind == "abort":
            group.parts.remove(part)
        if not group.open_parts:
            self._stuck.discard(group)

    def pass_gap(self, partition: TopicPartition, position: int) -> None:
        """Nothing lies between the last batch and here."""
        log = self._logs[partition]
        log.position = max(log.position, position)

    # -- barriers ----------------------------------------------------------------------------------------------------

    @property
    def event(self) -> int:
        """The number of the last event, for a barrier: take it before the ends are asked for."""
        return self._events

    @property
    def barrier(self) -> Barrier | None:
        """The one that was set and not reached yet."""
        return self._barrier

    @property
    def needs_barrier(self) -> bool:
        """Whether one would tell more: some transaction has a marker and is not known to be whole."""
        return self._barrier is None and any(
            group.first_marker is not None and not (group.has_shared_epoch and group.open_parts)
            for group in self._groups.values()
        )

    def set_barrier(self, event: int, ends: Mapping[TopicPartition, int]) -> None:
        """`ends` of all partitions, asked for after `event`. Read on up to them, then call `try_pass_barrier`."""
        self._barrier = Barrier(event, ends)

    def try_pass_barrier(self) -> bool:
        """True if everything up to the barrier was read: more transactions may be whole now."""
        barrier = self._barrier
        if barrier is None or any(self._logs[named].position < end for named, end in barrier.ends.items()):
            return False
        self._barrier = None
        for key, group in list(self._groups.items()):
            if self._is_whole_at(group, barrier):
                group.is_whole = True
                del self._groups[key]
                if group.open_parts:
                    self._stuck.add(group)
        return True

    def _is_whole_at(self, group: Group, barrier: Barrier) -> bool:
        if group.first_marker is None:
            return False
        if group.has_shared_epoch:
            return group.last_event <= barrier.event and not group.open_parts
        return group.first_marker <= barrier.event

    # -- cuts --------------------------------------------------------------------------------------------------------

    def find_ends(self, bytes_max: int | None = None) -> dict[TopicPartition, int]:
        """The ends of the largest cut, of the partitions that move; empty if none does.

        With `bytes_max` the cut is about so large, or larger where a smaller one would tear something.
        """
        while bytes_max is not None:
            budget = self._within(bytes_max)
            if budget is None:
                break
            found = self._largest_below(budget)
            if found:
                return found
            bytes_max *= 2
        return self._largest_below(self.positions)

    def _within(self, bytes_max: int) -> dict[TopicPartition, int] | None:
        """How far each partition may go if they share so many bytes; None if everything fits."""
        busy = [log for log in self._logs.values() if log.pieces]
        if self.buffered_bytes <= bytes_max:
            return None
        share = max(1, bytes_max // max(1, len(busy)))
        limits: dict[TopicPartition, int] = {}
        for partition, log in self._logs.items():
            limits[partition] = log.position
            taken = 0
            for piece in log.pieces:
                if taken and taken + piece.size > share:
                    limits[partition] = piece.start
                    break
                taken += piece.size
        return limits

    def _largest_below(self, limits: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Lower the ends until nothing is torn. Whatever is above an end pulls down the rest of its transaction."""
        ends = self.positions
        work = [(partition, limit) for partition, limit in limits.items() if limit < ends[partition]]
        excluded: list[Group] = []

        def exclude(group: Group) -> None:
            if not group.is_excluded:
                group.is_excluded = True
                excluded.append(group)
                work.extend((part.partition, part.first) for part in group.parts)

        for group in (*self._groups.values(), *self._stuck):
            exclude(group)
        while work:
            partition, limit = work.pop()
            before = ends[partition]
            if limit >= before:
                continue
            ends[partition] = limit
            for piece in self._logs[partition].between(limit, before):
                if piece.part is not None and piece.part.outcome != "abort":
                    exclude(piece.part.group)
        for group in excluded:
            group.is_excluded = False
        return {partition: end for partition, end in ends.items() if end > self._logs[partition].cut}

    def take(self, ends: Mapping[TopicPartition, int]) -> Cut:
        """Forget what lies below `ends`, which `find_ends` gave, and return what of it is committed."""
        pieces: dict[TopicPartition, list[Piece]] = {}
        for partition, end in ends.items():
            log = self._logs[partition]
            count = bisect_left(log.pieces, end, key=lambda piece: piece.start)
            passed = log.pieces[:count]
            committed = [piece for piece in passed if piece.is_committed]
            log.size -= sum(piece.size for piece in passed)
            if committed:
                pieces[partition] = committed
            del log.pieces[:count]
            log.cut = end
        return Cut(dict(ends), pieces)

    # -- what is waited for ------------------------------------------------------------------------------------------

    def waiting(self) -> Iterable[Group]:
        """Transactions without their end, or of which more may come."""
        return (*self._groups.values(), *self._stuck)

    @property
    def buffered_bytes(self) -> int:
        """What was read and not cut yet."""
        return sum(log.size for log in self._logs.values())
