"""What the logs say, read batch by batch as they grow, by rules of its own: nothing of `core` decides here.

A view follows one partition; it knows which records are committed, aborted or open, from the markers alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from semel.broker.storage.partition import Partition
from semel.broker.storage.segment import Segment
from semel.core.group_coordinator import decode_record
from semel.core.group_records import OffsetRecord
from semel.core.transaction_metadata import TransactionStatus
from semel.core.transaction_records import TransactionTombstone, decode_transaction
from semel.records import ControlMarker, read_control_batch
from semel.records.layout import BatchHeader
from semel.records.reference import Record, decode_batch
from semel.verify.simulation_ledger import Ledger, Outcome, TopicPartition, Violation, transaction_key

Fate = Literal["plain", "open", "commit", "abort"]
Decisions = dict[int, list[TransactionStatus]]
"""By producer id, the states in `__transaction_state`: that of the last look, and those that have come since."""

_COMMITTED = (TransactionStatus.PREPARE_COMMIT, TransactionStatus.COMPLETE_COMMIT)


def records_of(batch: memoryview) -> Sequence[Record]:
    """The records of a batch. The same bytes are met often, in the log and by every reader; they are decoded once."""
    return _decoded(bytes(batch))


@lru_cache(maxsize=10_000)
def _decoded(batch: bytes) -> tuple[Record, ...]:
    return tuple(decode_batch(batch)[1])


def marker_of(batch: memoryview) -> ControlMarker | None:
    """The marker in a control batch, likewise."""
    return _marker(bytes(batch))


@lru_cache(maxsize=10_000)
def _marker(batch: bytes) -> ControlMarker | None:
    return read_control_batch(batch)


@dataclass(slots=True)
class SeenRecord:
    """A record of a log and what became of it."""

    value: str
    fate: Fate


class LogView:
    """Reads what is new in a partition: markers end the open transactions of their producers."""

    def __init__(self, partition: Partition, decisions: Decisions) -> None:
        self.name: TopicPartition = (partition.topic, partition.index)
        self.decisions = decisions
        self.end_offset = 0
        self.last_stable_offset = 0
        self.is_old = False
        """What is read now was written long ago: decisions have been taken since."""
        self._first_offsets: dict[int, int] = {}
        self.last_look = (-1, -1)
        """The log's end and its high watermark at the last look: while they stand, nothing was written or shown."""
        self._tail: tuple[Segment | None, int] = (None, 0)

    @property
    def where(self) -> str:
        return f"{self.name[0]}-{self.name[1]}"

    def first_open_offset(self) -> int | None:
        return min(self._first_offsets.values(), default=None)

    def read(self, partition: Partition) -> None:
        """Take up all batches that were not seen yet, and hold the partition's own offsets against them."""
        if partition.log_end_offset < self.end_offset:
            raise Violation(f"{self.where} has shrunk from {self.end_offset} to {partition.log_end_offset}")
        if partition.log_end_offset > self.end_offset:
            for header, batch in self._new_batches(partition):
                if header.base_offset >= self.end_offset:
                    self._take(header, batch)
                    self.end_offset = header.last_offset + 1
            self.end_offset = partition.log_end_offset
            self._tail = (partition.active, partition.active.size)
        self._check_offsets(partition)
        self.last_look = (partition.log_end_offset, partition.high_watermark)

    def _new_batches(self, partition: Partition) -> Iterator[tuple[BatchHeader, memoryview]]:
        """From where the last look ended: what stands in the segment that is written to is never moved."""
        segment, position = self._tail
        if segment is None or segment is not partition.active:
            yield from partition.batches(self.end_offset)
            return
        for _, header, batch in segment.walker().batches(position, self.end_offset, check_crc=True):
            yield header, batch

    def _take(self, header: BatchHeader, batch: memoryview) -> None:
        if header.is_control:
            marker = marker_of(batch)
            if marker is not None:
                self._first_offsets.pop(marker.producer_id, None)
                decided = self.decisions.get(marker.producer_id, [])
                # A commit that a crash could still undo is none.
                if marker.kind == "commit" and not self.is_old and not any(one in _COMMITTED for one in decided):
                    raise Violation(f"{self.where} has a commit marker of {marker.producer_id}, which is {decided}")
                self.on_marker(marker.producer_id, marker.kind)
            return
        if header.is_transactional:
            self._first_offsets.setdefault(header.producer_id, header.base_offset)
        self.on_records(header, records_of(batch))

    def _check_offsets(self, partition: Partition) -> None:
        stable, high_watermark = partition.last_stable_offset, partition.high_watermark
        limit = self.first_open_offset()
        if stable > high_watermark or (limit is not None and stable > limit):
            raise Violation(
                f"the last stable offset of {self.where} is {stable}, past the open transaction at {limit} or the "
                f"high watermark {high_watermark}"
            )
        if stable < self.last_stable_offset:
            raise Violation(f"the last stable offset of {self.where} went back: {self.last_stable_offset} to {stable}")
        self.last_stable_offset = stable

    def on_marker(self, producer_id: int, outcome: Outcome) -> None:
        raise NotImplementedError

    def on_records(self, header: BatchHeader, records: Sequence[Record]) -> None:
        raise NotImplementedError

    def state(self) -> object:
        """What has been learned from the log."""
        return self.end_offset


class DecisionsView(LogView):
    """A partition of `__transaction_state`."""

    def on_records(self, header: BatchHeader, records: Sequence[Record]) -> None:
        for record in records:
            decoded = None if record.key is None else decode_transaction(record.key, record.value)
            if decoded is not None and not isinstance(decoded, TransactionTombstone):
                self.decisions.setdefault(decoded.producer_id, []).append(decoded.status)

    def on_marker(self, producer_id: int, outcome: Outcome) -> None:
        raise Violation(f"{self.where} holds a marker of {producer_id}")


class TopicView(LogView):
    """A partition of a user's topic."""

    def __init__(
        self,
        partition: Partition,
        decisions: Decisions,
        ledger: Ledger,
        places: dict[str, tuple[TopicPartition, int]],
    ) -> None:
        super().__init__(partition, decisions)
        self._ledger = ledger
        self._places = places
        self._open: dict[int, list[int]] = {}
        self._sequences: set[tuple[int, int, int]] = set()
        self._last_numbers: dict[str, int] = {}
        self.records: dict[int, SeenRecord] = {}

    def state(self) -> object:
        return self.end_offset, self._first_offsets, self._open, self.records

    def committed(self) -> Iterator[tuple[int, str]]:
        """Offset and value of all that a reader of committed records is to see, in order."""
        return ((offset, record.value) for offset, record in self.records.items() if record.fate in ("plain", "commit"))

    def on_records(self, header: BatchHeader, records: Sequence[Record]) -> None:
        if header.producer_id >= 0:
            sequence = (header.producer_id, header.producer_epoch, header.base_sequence)
            if sequence in self._sequences:
                raise Violation(f"{self.where} holds producer id, epoch and sequence {sequence} twice")
            self._sequences.add(sequence)
        for record in records:
            value = (record.value or b"").decode()
            place = (self.name, record.offset)
            if self._places.setdefault(value, place) != place:
                raise Violation(f"{value} is at {place} and at {self._places[value]}")
            self._check_order(value)
            self.records[record.offset] = SeenRecord(value, "open" if header.is_transactional else "plain")
            if header.is_transactional:
                self._open.setdefault(header.producer_id, []).append(record.offset)

    def _check_order(self, value: str) -> None:
        key, _, rest = value.partition("/")
        number = rest.partition("=")[0]
        if number.isdigit():  # others write under more than one producer id, where nothing keeps the order
            if int(number) <= self._last_numbers.get(key, -1):
                raise Violation(f"{self.where} has {value} behind number {self._last_numbers[key]}, sent after it")
            self._last_numbers[key] = int(number)

    def on_marker(self, producer_id: int, outcome: Outcome) -> None:
        for offset in self._open.pop(producer_id, ()):
            record = self.records[offset]
            record.fate = outcome
            self._ledger.transactions[transaction_key(record.value)].settle(outcome, self.where)


@dataclass(frozen=True, slots=True)
class SeenOffset:
    """A position of a group, and where in the log it stands."""

    offset: int
    log_offset: int
    transaction: str = ""
    is_late: bool = field(default=False, compare=False)
    """Written when the transaction that it names had its end: by a copy of a request that was long under way."""


class OffsetsView(LogView):
    """A partition of `__consumer_offsets`: offsets of transactions count from their commit marker on."""

    def __init__(self, partition: Partition, decisions: Decisions, ledger: Ledger) -> None:
        super().__init__(partition, decisions)
        self._ledger = ledger
        self._pending: dict[int, dict[tuple[str, TopicPartition], SeenOffset]] = {}
        self._ended: set[str] = set()
        self.committed: dict[str, dict[TopicPartition, SeenOffset]] = {}
        self.touched: dict[str, None] = {}

    def state(self) -> object:
        return self.end_offset, {group_id: offsets for group_id, offsets in self.committed.items() if offsets}

    def on_records(self, header: BatchHeader, records: Sequence[Record]) -> None:
        for record in records:
            decoded = None if record.key is None else decode_record(record.key, record.value)
            if not isinstance(decoded, OffsetRecord):
                continue
            where = (decoded.topic, decoded.partition)
            self.touched[decoded.group_id] = None
            if decoded.value is None:
                self.committed.get(decoded.group_id, {}).pop(where, None)
                for pending in self._pending.values():
                    pending.pop((decoded.group_id, where), None)
            elif header.is_transactional:
                pending = self._pending.setdefault(header.producer_id, {})
                name = decoded.value.metadata
                pending[decoded.group_id, where] = SeenOffset(
                    decoded.value.offset, record.offset, name, is_late=name in self._ended
                )
            else:
                stored = SeenOffset(decoded.value.offset, record.offset)
                self.committed.setdefault(decoded.group_id, {})[where] = stored

    def on_marker(self, producer_id: int, outcome: Outcome) -> None:
        for (group_id, where), stored in self._pending.pop(producer_id, {}).items():
            # In protocol 1 late copies can begin another transaction while the epoch is still the same. To abort it is
            # right, and says nothing of the transaction whose name they bear.
            named = self._ledger.transactions.get(stored.transaction)
            if named is not None and not (stored.is_late and outcome == "abort"):
                named.settle(outcome, self.where)
                self._ended.add(stored.transaction)
            self.touched[group_id] = None
            if outcome == "commit":
                offsets = self.committed.setdefault(group_id, {})
                if where not in offsets or offsets[where].log_offset < stored.log_offset:
                    offsets[where] = stored
