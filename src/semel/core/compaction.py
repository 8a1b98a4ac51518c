"""Kafka's log cleaner without the bytes: which records, batches and markers of a compacted partition survive.

Two walks over the cleanable part, in order: `note_keys` learns the latest offset of each key, `plan_batch` then says
what becomes of each batch. Only committed records count; those of aborted transactions go. What must outlive them: a
tombstone and a marker, until `delete.retention.ms` after a cleaning first met them without need (KIP-534), and the
last batch of each producer, from which recovery learns its sequence and epoch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, NamedTuple

from semel.core.partition_log import AbortedTransaction
from semel.core.producer_state import NO_TIMESTAMP, LastRecord
from semel.records.control import ControlMarker
from semel.records.layout import COMPRESSION_MASK, DELETE_HORIZON_BIT, HEADER_BYTES, LENGTH_FIELD_END, BatchHeader

_KEY_BYTES = 150
"""About what a key takes besides its own bytes."""

Action = Literal["copy", "rewrite", "empty", "drop"]


class RecordFacts(NamedTuple):
    """What compaction needs to know of a record."""

    offset: int
    key: bytes | None
    is_tombstone: bool


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """A stored batch. `marker` is that of a control batch, None once compaction has emptied it.

    `records` may be read from the batch each time: nothing here keeps them, as there can be millions.
    """

    header: BatchHeader
    records: Iterable[RecordFacts] = ()
    marker: ControlMarker | None = None


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What becomes of one batch.

    copy: its bytes as they are. rewrite: the records at `kept_offsets`, under `rewritten_header`, whose base_timestamp
    their timestamp deltas count from. empty: `emptied_header` alone, without records. drop: nothing.
    `delete_horizon_ms` is what the stored batch carries afterwards. Base and last offset never change.
    """

    action: Action
    kept_offsets: tuple[int, ...] = ()
    delete_horizon_ms: int | None = None


DROP = BatchPlan("drop")


class Compaction:
    """One cleaning of one partition.

    `end_offset` is the first offset not to be touched: at most the last stable offset and the base of the active
    segment. `aborted` are the aborted transactions that begin below it, `last_records` comes from
    `ProducerStates.last_records`.
    Records written before an earlier cleaning's `end_offset` need no `note_keys`, as they were the latest then.

    `keys_bytes_max` bounds the keys that are remembered. When they are too many, `end_offset` moves to the batch that
    did not fit, as in Kafka: the next cleaning goes on from there.
    """

    def __init__(
        self,
        end_offset: int,
        *,
        now_ms: int,
        delete_retention_ms: int,
        aborted: Iterable[AbortedTransaction] = (),
        last_records: Mapping[int, LastRecord] | None = None,
        keys_bytes_max: int | None = None,
    ) -> None:
        self.end_offset = end_offset
        self.now_ms = now_ms
        self.delete_retention_ms = delete_retention_ms
        self._last_records = last_records or {}
        self._latest: dict[bytes, int] = {}
        self._keys_bytes_left = keys_bytes_max
        self._seen_in_transaction: set[int] = set()
        self._aborts_gone: list[AbortedTransaction] = []
        self._aborts: dict[int, list[AbortedTransaction]] = {}
        for entry in sorted(aborted, key=attrgetter("first_offset")):
            self._aborts.setdefault(entry.producer_id, []).append(entry)

    @property
    def aborts_gone(self) -> tuple[AbortedTransaction, ...]:
        """Aborted transactions that leave no batch behind: `PartitionLog.replay_forgotten_aborts` takes them."""
        return tuple(self._aborts_gone)

    def note_keys(self, batch: BatchFacts) -> None:
        """First walk: remember the latest committed offset of each key."""
        header = batch.header
        if header.last_offset >= self.end_offset or header.is_control or self._find_abort(header) is not None:
            return
        latest = self._latest
        for record in batch.records:
            if record.key is None:
                continue
            if self._keys_bytes_left is not None and record.key not in latest:
                self._keys_bytes_left -= _KEY_BYTES + len(record.key)
                if self._keys_bytes_left < 0:
                    # Keys of this batch that were noted already do no harm: their records stay, as all from here on.
                    self.end_offset = header.base_offset
                    return
            latest[record.key] = record.offset

    def plan_batch(self, batch: BatchFacts) -> BatchPlan:
        """Second walk, over all batches from the log start in order."""
        header = batch.header
        if header.last_offset >= self.end_offset:
            return BatchPlan("copy", tuple(record.offset for record in batch.records), _horizon(header))
        if header.is_control:
            return self._plan_marker(batch)
        if header.is_transactional:
            self._seen_in_transaction.add(header.producer_id)
        if self._find_abort(header) is not None:
            return self._plan_without_records(header)
        kept: list[int] = []
        needs_horizon = False
        for record in batch.records:
            if self._survives(record, header):
                kept.append(record.offset)
                needs_horizon |= record.is_tombstone
        if not kept:
            return self._plan_without_records(header)
        return self._plan_with_records(header, tuple(kept), needs_horizon)

    def _plan_marker(self, batch: BatchFacts) -> BatchPlan:
        header = batch.header
        if batch.marker is None:
            return self._plan_without_records(header)
        # Any batch of the transaction met in this walk, even an empty one, needs the marker: without it, recovery would
        # take the transaction for open, and readers those records for committed.
        is_needed = header.producer_id in self._seen_in_transaction
        self._seen_in_transaction.discard(header.producer_id)
        horizon = _horizon(header)
        if is_needed or horizon is None or self.now_ms < horizon:
            return self._plan_with_records(header, (batch.marker.offset,), needs_horizon=not is_needed)
        abort = self._find_abort(header)
        if abort is not None:
            self._aborts_gone.append(abort)
        return self._plan_without_records(header)

    def _plan_with_records(self, header: BatchHeader, kept: tuple[int, ...], needs_horizon: bool) -> BatchPlan:
        horizon = _horizon(header)
        if needs_horizon and horizon is None:
            return BatchPlan("rewrite", kept, self.now_ms + self.delete_retention_ms)
        return BatchPlan("copy" if len(kept) == header.record_count else "rewrite", kept, horizon)

    def _plan_without_records(self, header: BatchHeader) -> BatchPlan:
        # The last batch of the cleaned part stays, so that the log's offsets have no hole at the place where the next
        # cleaning begins.
        if not self._is_last_of_producer(header) and header.last_offset + 1 != self.end_offset:
            return DROP
        return BatchPlan("copy" if header.record_count == 0 else "empty")

    def _is_last_of_producer(self, header: BatchHeader) -> bool:
        last = self._last_records.get(header.producer_id) if header.producer_id >= 0 else None
        if last is None:
            return False
        if last.last_data_offset is not None:
            return header.last_offset == last.last_data_offset
        return header.is_control and header.producer_epoch == last.producer_epoch

    def _survives(self, record: RecordFacts, header: BatchHeader) -> bool:
        if record.key is None or record.offset < self._latest.get(record.key, -1):
            return False
        horizon = _horizon(header)
        return not record.is_tombstone or horizon is None or self.now_ms < horizon

    def _find_abort(self, header: BatchHeader) -> AbortedTransaction | None:
        """The aborted transaction that a batch or a marker belongs to."""
        entries = self._aborts.get(header.producer_id) if header.is_transactional else None
        if not entries:
            return None
        index = bisect_right(entries, header.last_offset, key=attrgetter("first_offset")) - 1
        if index < 0 or entries[index].last_offset < header.last_offset:
            return None
        return entries[index]


def plan_compaction(compaction: Compaction, batches: Sequence[BatchFacts]) -> list[BatchPlan]:
    """Both walks over batches that fit into memory.

    >>> from semel.records.layout import read_header
    >>> from semel.records.reference import Record, encode_batch
    >>> batches = [
    ...     BatchFacts(read_header(encode_batch([Record(n, 0, b"key", b"value", ())], base_offset=n)),
    ...                [RecordFacts(n, b"key", False)])
    ...     for n in range(2)
    ... ]
    >>> [plan.action for plan in plan_compaction(Compaction(5, now_ms=0, delete_retention_ms=0), batches)]
    ['drop', 'copy']
    """
    for batch in batches:
        compaction.note_keys(batch)
    return [compaction.plan_batch(batch) for batch in batches]


def rewritten_header(header: BatchHeader, plan: BatchPlan) -> BatchHeader:
    """The header over the kept records; batch_length and crc are for the writer, who knows the bytes.

    base_timestamp becomes the delete horizon (KIP-534): readers add the deltas to it, so those must count from it too.
    """
    if plan.delete_horizon_ms is None:
        return header._replace(record_count=len(plan.kept_offsets))
    return header._replace(
        attributes=header.attributes | DELETE_HORIZON_BIT,
        base_timestamp=plan.delete_horizon_ms,
        record_count=len(plan.kept_offsets),
    )


def emptied_header(header: BatchHeader) -> BatchHeader:
    """The header of a batch that keeps only its producer's id, epoch and sequences, as Kafka writes it."""
    return header._replace(
        batch_length=HEADER_BYTES - LENGTH_FIELD_END,
        attributes=header.attributes & ~(COMPRESSION_MASK | DELETE_HORIZON_BIT),
        base_timestamp=NO_TIMESTAMP,
        record_count=0,
    )


def _horizon(header: BatchHeader) -> int | None:
    return header.base_timestamp if header.has_delete_horizon else None
