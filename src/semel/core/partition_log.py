"""What is known about one partition's log without its bytes: offsets, producers, open and aborted transactions."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from kio.schema.errors import ErrorCode

from semel.core import batch_checks, retention
from semel.core.batch_checks import Timestamps as Timestamps
from semel.core.batch_checks import TimestampType as TimestampType
from semel.core.batch_checks import decide_timestamp as decide_timestamp
from semel.core.leader_epochs import LeaderEpochs
from semel.core.producer_budget import ProducerBudget
from semel.core.producer_snapshot import decode_snapshot, encode_snapshot
from semel.core.producer_state import PRODUCERS_MAX, CompletedTransaction, ProducerEntry, ProducerStates
from semel.core.producer_state import Duplicate as Duplicate
from semel.core.refusal import Refused
from semel.core.retention import SegmentFacts as SegmentFacts
from semel.records.control import ControlMarker, MarkerKind
from semel.records.layout import BatchHeader

HIGH_WATERMARK = -1  # DeleteRecords: "up to the high watermark"


@dataclass(frozen=True, slots=True)
class Append:
    """The batch is to be stored at these offsets."""

    base_offset: int
    last_offset: int


@dataclass(frozen=True, slots=True)
class AbortedTransaction:
    """An entry of the aborted transaction index; `last_offset` is the marker's."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


class PartitionLog:
    """One partition's offsets, producers and transactions.

    On recovery: make one with the log start, load the newest good snapshot at or above it and the aborted transactions
    whose markers are below the snapshot's offset, replay the batches from there on, then set the high watermark.

    >>> from semel.records.layout import read_header
    >>> from semel.records.reference import Record, encode_batch
    >>> log = PartitionLog()
    >>> header = read_header(encode_batch([Record(0, 1000, None, b"a", ())]))
    >>> log.decide_append(header, now_ms=1000)
    Append(base_offset=0, last_offset=0)
    >>> log.replay_append(header)
    >>> log.log_end_offset, log.high_watermark
    (1, 0)
    """

    def __init__(
        self, log_start_offset: int = 0, *, producers_max: int = PRODUCERS_MAX, budget: ProducerBudget | None = None
    ) -> None:
        self.log_start_offset = log_start_offset
        self.log_end_offset = log_start_offset
        self.high_watermark = log_start_offset
        self.producers = ProducerStates(producers_max=producers_max, budget=budget)
        self.leader_epochs = LeaderEpochs()
        self._covered_to = log_start_offset  # what lies below needs no replay: deleted, or in the snapshot
        self._open: dict[int, int] = {}  # first offset -> producer id; offsets only grow, so in order
        self._unsettled: dict[int, int] = {}  # first offset -> marker's offset, the marker not below the high watermark
        self._aborted: list[AbortedTransaction] = []  # by last_offset

    # Recovery

    def load_snapshot(self, snapshot: bytes, offset: int, *, now_ms: int | None = None) -> None:
        """Start from a producer snapshot taken at log end `offset`. CorruptRecords leaves everything as it was."""
        entries = decode_snapshot(snapshot)
        if offset < self.log_start_offset or self.log_end_offset != self._covered_to:
            raise ValueError(f"a snapshot at offset {offset} cannot be loaded here: records come after it")
        self.producers.replay_entries(entries, now_ms=now_ms)
        started = {e.transaction_first_offset: e.producer_id for e in entries if e.transaction_first_offset is not None}
        self._open = dict(sorted(started.items()))
        self._covered_to = self.log_end_offset = offset

    def load_aborted(self, entries: Iterable[AbortedTransaction]) -> None:
        """Start from a stored aborted transaction index; entries that replay will find again are left out."""
        kept = (entry for entry in entries if self.log_start_offset <= entry.last_offset < self._covered_to)
        self._aborted = sorted(kept, key=attrgetter("last_offset"))

    def encode_snapshot(self) -> bytes:
        """The producer snapshot as of the log end."""
        return encode_snapshot(self.producers)

    # Appending

    def decide_append(
        self, header: BatchHeader, *, now_ms: int, from_client: bool = True, protocol_2: bool = False
    ) -> Append | Duplicate:
        """Where a data batch goes, or the answer that its first copy got."""
        batch_checks.check_header(header, from_client=from_client)
        duplicate = self.producers.decide_batch(header, now_ms=now_ms, from_client=from_client, protocol_2=protocol_2)
        if duplicate is not None:
            return duplicate
        return Append(self.log_end_offset, self.log_end_offset + header.last_offset_delta)

    def decide_marker(
        self,
        kind: MarkerKind,
        producer_id: int,
        producer_epoch: int,
        coordinator_epoch: int,
        *,
        protocol_2: bool = False,
    ) -> Append:
        """Where a transaction's marker goes. It is written even where the transaction has no records, as in Kafka."""
        self.producers.decide_marker(producer_id, producer_epoch, coordinator_epoch, protocol_2=protocol_2)
        return Append(self.log_end_offset, self.log_end_offset)

    def replay_append(
        self, header: BatchHeader, marker: ControlMarker | None = None, *, now_ms: int | None = None
    ) -> AbortedTransaction | None:
        """Take up a stored batch; returns the new entry of the aborted index, if its marker aborted something.

        A batch that the log start or the snapshot already covers changes nothing. `now_ms` lets an idle producer be
        told from one that sends old timestamps.
        """
        if header.last_offset < self._covered_to:
            return None
        # The log start may lie within the first batch, after DeleteRecords.
        if header.base_offset < self.log_end_offset and self.log_end_offset != self._covered_to:
            raise ValueError(f"a batch at offset {header.base_offset} cannot follow log end {self.log_end_offset}")
        if marker is not None:
            completed = self.producers.replay_marker(marker, header.base_offset, header.max_timestamp, now_ms=now_ms)
        else:
            completed = None
            self._replay_data(header, now_ms)
        if header.partition_leader_epoch > self.leader_epochs.latest:
            self.leader_epochs.begin(header.partition_leader_epoch, header.base_offset)
        self.log_end_offset = header.last_offset + 1
        return None if completed is None else self._complete(completed)

    def _replay_data(self, header: BatchHeader, now_ms: int | None) -> None:
        if header.is_control:
            self.producers.replay_emptied_marker(header, now_ms=now_ms)
            return
        self.producers.replay_batch(header, now_ms=now_ms)
        if header.is_transactional:
            first_offset = self.producers.transaction_first_offset(header.producer_id)
            if first_offset is not None:
                self._open[first_offset] = header.producer_id

    def _complete(self, completed: CompletedTransaction) -> AbortedTransaction | None:
        del self._open[completed.first_offset]
        if completed.last_offset >= self.high_watermark:
            self._unsettled[completed.first_offset] = completed.last_offset
        if not completed.is_aborted:
            return None
        last_stable_offset = next(iter(self._open), completed.last_offset + 1)
        entry = AbortedTransaction(
            completed.producer_id, completed.first_offset, completed.last_offset, last_stable_offset
        )
        self._aborted.append(entry)
        return entry

    # Offsets

    @property
    def last_stable_offset(self) -> int:
        """Below it every transaction is decided, and the decision itself is below the high watermark."""
        unstable = min(next(iter(self._open), self.high_watermark), min(self._unsettled, default=self.high_watermark))
        return min(max(unstable, self.log_start_offset), self.high_watermark)

    def replay_high_watermark(self, offset: int) -> None:
        """Move the high watermark up to `offset`, never back and never past the log end."""
        self.high_watermark = max(self.high_watermark, min(offset, self.log_end_offset))
        self._settle()

    def _settle(self) -> None:
        if self._unsettled:
            self._unsettled = {first: last for first, last in self._unsettled.items() if last >= self.high_watermark}

    def decide_delete_records(self, offset: int) -> int:
        """The log start that a DeleteRecords request leads to; below the present one it changes nothing."""
        wanted = self.high_watermark if offset == HIGH_WATERMARK else offset
        if not 0 <= wanted <= self.high_watermark:
            raise Refused(
                ErrorCode.offset_out_of_range,
                f"records can be deleted up to the high watermark {self.high_watermark}, not up to {offset}",
            )
        return max(wanted, self.log_start_offset)

    def replay_log_start(self, offset: int) -> None:
        """Move the log start up to `offset`; what lies below is deleted.

        An open transaction that began below stays open, as in Kafka: its later records still wait for the marker.
        """
        if offset <= self.log_start_offset:
            return
        self.log_start_offset = offset
        if offset > self.log_end_offset:
            self._covered_to = self.log_end_offset = offset
        self.high_watermark = max(self.high_watermark, offset)
        self._settle()
        self._aborted = self._aborted[bisect_left(self._aborted, offset, key=attrgetter("last_offset")) :]

    def decide_retention(
        self, segments: Sequence[SegmentFacts], *, now_ms: int, retention_ms: int, retention_bytes: int
    ) -> int:
        """How many of the oldest segments go; see `semel.core.retention`. All of them: roll a new one first."""
        return retention.count_expired(
            segments,
            log_start_offset=self.log_start_offset,
            log_end_offset=self.log_end_offset,
            high_watermark=self.high_watermark,
            now_ms=now_ms,
            retention_ms=retention_ms,
            retention_bytes=retention_bytes,
        )

    # Transactions

    def aborted_transactions(self, from_offset: int, to_offset: int) -> list[AbortedTransaction]:
        """Aborted transactions that overlap `from_offset` <= offset < `to_offset`, by first offset as clients need."""
        found: list[AbortedTransaction] = []
        for index in range(bisect_left(self._aborted, from_offset, key=attrgetter("last_offset")), len(self._aborted)):
            entry = self._aborted[index]
            if entry.first_offset < to_offset:
                found.append(entry)
            if entry.last_stable_offset >= to_offset:
                break  # transactions that ended later began at or above that offset
        return sorted(found, key=attrgetter("first_offset"))

    def all_aborted(self) -> tuple[AbortedTransaction, ...]:
        """The whole aborted index, in the order of the markers."""
        return tuple(self._aborted)

    def replay_forgotten_aborts(self, entries: Iterable[AbortedTransaction]) -> None:
        """Drop entries of which compaction has removed every record and the marker."""
        gone = set(entries)
        self._aborted = [entry for entry in self._aborted if entry not in gone]

    def active_producers(self) -> list[ProducerEntry]:
        """All producers that are remembered, for DescribeProducers."""
        return list(self.producers)

    def open_transactions(self) -> list[ProducerEntry]:
        """The producers with an open transaction, oldest transaction first."""
        entries = (self.producers.get(producer_id) for producer_id in self._open.values())
        return [entry for entry in entries if entry is not None]

    def producer_checks_for_transaction(self, producer_id: int, producer_epoch: int | None = None) -> int | None:
        """First offset of the producer's open transaction (of that epoch, if given), or None."""
        entry = self.producers.get(producer_id)
        if entry is None or producer_epoch not in (None, entry.producer_epoch):
            return None
        return entry.transaction_first_offset
