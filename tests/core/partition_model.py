"""A partition by brute force: a list of all stored batches, from which every answer is worked out anew."""

from __future__ import annotations

from dataclasses import dataclass, field

from kio.schema.errors import ErrorCode

from semel.core.partition_log import AbortedTransaction, Append
from semel.core.producer_state import Duplicate
from semel.records.control import ControlMarker, MarkerKind
from semel.records.layout import CONTROL_BIT, TRANSACTIONAL_BIT, BatchHeader

SEQUENCES = 2**31


def make_header(
    *,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    count: int = 1,
    base_offset: int = 0,
    transactional: bool = False,
    control: bool = False,
    timestamp_ms: int = 1000,
) -> BatchHeader:
    attributes = (TRANSACTIONAL_BIT if transactional else 0) | (CONTROL_BIT if control else 0)
    return BatchHeader(
        base_offset=base_offset,
        batch_length=100,
        partition_leader_epoch=0,
        magic=2,
        crc=0,
        attributes=attributes,
        last_offset_delta=count - 1,
        base_timestamp=timestamp_ms,
        max_timestamp=timestamp_ms,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        record_count=count,
    )


def make_marker(
    kind: MarkerKind, producer_id: int, producer_epoch: int, offset: int, *, coordinator_epoch: int = 0
) -> tuple[BatchHeader, ControlMarker]:
    header = make_header(
        producer_id=producer_id, producer_epoch=producer_epoch, base_offset=offset, transactional=True, control=True
    )
    return header, ControlMarker(kind, coordinator_epoch, producer_id, producer_epoch, offset)


def at_offset(header: BatchHeader, base_offset: int) -> BatchHeader:
    return header._replace(base_offset=base_offset)


@dataclass
class PartitionModel:
    """Stored batches, and two offsets."""

    stored: list[tuple[BatchHeader, ControlMarker | None]] = field(default_factory=list)
    log_start_offset: int = 0
    high_watermark: int = 0

    @property
    def log_end_offset(self) -> int:
        return max([self.log_start_offset, *(header.last_offset + 1 for header, _ in self.stored)])

    def decide_append(self, header: BatchHeader) -> Append | Duplicate | ErrorCode:
        place = Append(self.log_end_offset, self.log_end_offset + header.last_offset_delta)
        mine = [stored for stored, _ in self.stored if stored.producer_id == header.producer_id]
        if header.producer_id < 0 or not mine:
            return place
        epoch = mine[-1].producer_epoch
        if header.producer_epoch < epoch:
            return ErrorCode.invalid_producer_epoch
        changes = [n for n in range(len(mine)) if n == 0 or mine[n].producer_epoch != mine[n - 1].producer_epoch]
        of_epoch = [stored for stored in mine[changes[-1] :] if not stored.is_control]
        if header.producer_epoch > epoch:
            expected = 0
        else:
            for stored in of_epoch[-5:]:
                if (stored.base_sequence, stored.record_count) == (header.base_sequence, header.record_count):
                    return Duplicate(stored.base_offset, stored.last_offset, stored.max_timestamp)
            sent = of_epoch[-1].base_sequence + of_epoch[-1].record_count if of_epoch else 0
            expected = sent % SEQUENCES
        if header.base_sequence != expected:
            return ErrorCode.out_of_order_sequence_number
        if self.open_since(header.producer_id) is not None and not header.is_transactional:
            return ErrorCode.invalid_txn_state
        return place

    def decide_marker(self, producer_id: int, producer_epoch: int, coordinator_epoch: int) -> Append | ErrorCode:
        mine = [stored for stored, _ in self.stored if stored.producer_id == producer_id]
        markers = [marker for stored, marker in self.stored if stored.producer_id == producer_id and marker is not None]
        if mine and producer_epoch < mine[-1].producer_epoch:
            return ErrorCode.invalid_producer_epoch
        if markers and coordinator_epoch < markers[-1].coordinator_epoch:
            return ErrorCode.transaction_coordinator_fenced
        return Append(self.log_end_offset, self.log_end_offset)

    def transactions(self) -> list[tuple[int, int, ControlMarker | None]]:
        """All with records: producer id, first offset, and the marker if there is one."""
        found: list[tuple[int, int, ControlMarker | None]] = []
        for producer_id in {header.producer_id for header, _ in self.stored if header.is_transactional}:
            first_offset = None
            for header, marker in self.stored:
                if header.producer_id != producer_id:
                    continue
                if marker is not None:
                    if first_offset is not None:
                        found.append((producer_id, first_offset, marker))
                    first_offset = None
                elif header.is_transactional and first_offset is None:
                    first_offset = header.base_offset
            if first_offset is not None:
                found.append((producer_id, first_offset, None))
        return found

    def open_since(self, producer_id: int) -> int | None:
        return next(
            (first for found, first, marker in self.transactions() if found == producer_id and not marker), None
        )

    @property
    def last_stable_offset(self) -> int:
        unstable = [
            first for _, first, marker in self.transactions() if marker is None or marker.offset >= self.high_watermark
        ]
        return min(max(min(unstable, default=self.high_watermark), self.log_start_offset), self.high_watermark)

    def aborted(self, from_offset: int, to_offset: int) -> list[AbortedTransaction]:
        found: list[AbortedTransaction] = []
        for producer_id, first, marker in self.transactions():
            if marker is None or marker.kind != "abort" or marker.offset < max(from_offset, self.log_start_offset):
                continue
            still_open = [
                other_first
                for _, other_first, other in self.transactions()
                if other_first < marker.offset and (other is None or other.offset > marker.offset)
            ]
            stable = min(still_open, default=marker.offset + 1)
            if first < to_offset:
                found.append(AbortedTransaction(producer_id, first, marker.offset, stable))
        return sorted(found, key=lambda entry: entry.first_offset)
