"""The records of a batch as slices of its bytes, for compaction: it needs keys, and must change nothing it keeps.

The readable codec would do, but it turns header keys into text, and bytes that are no UTF-8 would not survive that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from semel.core.compaction import BatchFacts, BatchPlan, RecordFacts, emptied_header, rewritten_header
from semel.errors import CorruptRecords
from semel.records.compression import DECOMPRESSED_BYTES_MAX, compress
from semel.records.control import read_control_batch
from semel.records.layout import HEADER_BYTES, LENGTH_FIELD_END, BatchHeader, as_bytes_view, write_header
from semel.records.reference import unpack_body, wrap_int64, write_varint


@dataclass(frozen=True, slots=True)
class RawRecord:
    """One record; `tail` is everything from the key on."""

    attributes: int
    timestamp_delta: int
    offset_delta: int
    key: bytes | None
    is_tombstone: bool
    tail: bytes


def raw_records(header: BatchHeader, batch: memoryview) -> list[RawRecord]:
    """The records of a batch whose checksum was checked.

    >>> from semel.records.layout import read_header
    >>> from semel.records.reference import Record, encode_batch
    >>> batch = encode_batch([Record(0, 10, b"key", None), Record(1, 12, None, b"value")])
    >>> records = raw_records(read_header(batch), memoryview(batch))
    >>> [(record.offset_delta, record.timestamp_delta, record.key, record.is_tombstone) for record in records]
    [(0, 0, b'key', True), (1, 2, None, False)]
    """
    body = bytes(unpack_body(header, batch, DECOMPRESSED_BYTES_MAX))
    try:
        return list(_records(body, header.record_count))
    except IndexError:
        raise CorruptRecords(f"The batch at offset {header.base_offset} ends within a record.") from None


def _records(body: bytes, count: int) -> Iterator[RawRecord]:
    position = 0
    for _ in range(count):
        length, start = _varint(body, position)
        timestamp_delta, at = _varint(body, start + 1)
        offset_delta, at = _varint(body, at)
        key_bytes, key_start = _varint(body, at)
        key_end = key_start + max(key_bytes, 0)
        value_bytes, _ = _varint(body, key_end)
        position = start + length
        if length < 0 or position > len(body) or key_end > position:
            raise IndexError
        key = None if key_bytes < 0 else body[key_start:key_end]
        yield RawRecord(body[start], timestamp_delta, offset_delta, key, value_bytes < 0, body[at:position])


def _varint(body: bytes, position: int) -> tuple[int, int]:
    """A zigzag number and where it ends."""
    byte = body[position]
    position += 1
    result, shift = byte & 0x7F, 7
    while byte >= 0x80:
        byte = body[position]
        position += 1
        result |= (byte & 0x7F) << shift
        shift += 7
    return (result >> 1) ^ -(result & 1), position


def facts_of(header: BatchHeader, batch: memoryview) -> BatchFacts:
    """What `core` needs to decide about a batch."""
    if header.is_control:
        return BatchFacts(header, marker=read_control_batch(batch, check_crc=False))
    base_offset = header.base_offset
    return BatchFacts(
        header,
        [RecordFacts(base_offset + r.offset_delta, r.key, r.is_tombstone) for r in raw_records(header, batch)],
    )


def carry_out(plan: BatchPlan, header: BatchHeader, batch: memoryview) -> tuple[BatchHeader, bytes | memoryview] | None:
    """The batch as it is stored after compaction, or None if it goes."""
    if plan.action == "drop":
        return None
    if plan.action == "copy":
        return header, batch
    if plan.action == "empty":
        return _finished(emptied_header(header), b"")
    kept = set(plan.kept_offsets)
    records = [r for r in raw_records(header, batch) if header.base_offset + r.offset_delta in kept]
    return _rewrite(header, rewritten_header(header, plan), records)


def _rewrite(old: BatchHeader, new: BatchHeader, records: Sequence[RawRecord]) -> tuple[BatchHeader, bytes]:
    body = bytearray()
    timestamps = [wrap_int64(old.base_timestamp + record.timestamp_delta) for record in records]
    for record, timestamp_ms in zip(records, timestamps, strict=True):
        fields = bytearray((record.attributes,))
        write_varint(fields, wrap_int64(timestamp_ms - new.base_timestamp))
        write_varint(fields, record.offset_delta)
        fields += record.tail
        write_varint(body, len(fields))
        body += fields
    if not old.timestamp_type:
        new = new._replace(max_timestamp=max(timestamps, default=-1))
    return _finished(new, as_bytes_view(compress(old.compression, body, None)))


def _finished(header: BatchHeader, packed: bytes | memoryview) -> tuple[BatchHeader, bytes]:
    batch = bytearray(HEADER_BYTES) + packed
    header = header._replace(batch_length=len(batch) - LENGTH_FIELD_END)
    write_header(batch, header)
    return header, bytes(batch)
