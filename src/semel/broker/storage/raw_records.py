"""Batches for compaction: what `core` needs to know of their records, and the batch that is left of them.

Records are walked over each time that they are needed, and never kept: a batch of some kilobytes can hold millions.
What stays of a record keeps its bytes: headers are not decoded, as bytes that are no UTF-8 would not survive that.
"""

from __future__ import annotations

from collections.abc import Iterator

from semel.broker.storage.record_walk import RecordWalk, WalkedRecord
from semel.core.compaction import BatchFacts, BatchPlan, RecordFacts, emptied_header, rewritten_header
from semel.records.compression import DECOMPRESSED_BYTES_MAX, compress
from semel.records.control import read_control_batch
from semel.records.layout import HEADER_BYTES, LENGTH_FIELD_END, BatchHeader, as_bytes_view, write_header
from semel.records.reference import wrap_int64, write_varint


class _Records:
    """The records of a batch, walked over by each loop."""

    def __init__(self, header: BatchHeader, batch: memoryview) -> None:
        self._header = header
        self._batch = batch

    def __iter__(self) -> Iterator[RecordFacts]:
        base_offset = self._header.base_offset
        for record in RecordWalk.of_batch(self._header, self._batch, bytes_max=DECOMPRESSED_BYTES_MAX, keys=True):
            if record is not None:
                yield RecordFacts(base_offset + record.offset_delta, record.key, record.is_tombstone)


def facts_of(header: BatchHeader, batch: memoryview) -> BatchFacts:
    """What `core` needs to decide about a batch.

    >>> from semel.records.layout import read_header
    >>> from semel.records.reference import Record, encode_batch
    >>> batch = encode_batch([Record(0, 10, b"key", None), Record(1, 12, None, b"value")])
    >>> [*facts_of(read_header(batch), memoryview(batch)).records]
    [RecordFacts(offset=0, key=b'key', is_tombstone=True), RecordFacts(offset=1, key=None, is_tombstone=False)]
    """
    if header.is_control:
        return BatchFacts(header, marker=read_control_batch(batch, check_crc=False))
    return BatchFacts(header, _Records(header, batch))


def carry_out(plan: BatchPlan, header: BatchHeader, batch: memoryview) -> tuple[BatchHeader, bytes | memoryview] | None:
    """The batch as it is stored after compaction, or None if it goes."""
    if plan.action == "drop":
        return None
    if plan.action == "copy":
        return header, batch
    if plan.action == "empty":
        return _finished(emptied_header(header), b"")
    return _rewrite(header, batch, plan)


def _rewrite(old: BatchHeader, batch: memoryview, plan: BatchPlan) -> tuple[BatchHeader, bytes]:
    new = rewritten_header(old, plan)
    body = bytearray()
    max_timestamp: int | None = None
    for record in _kept(old, batch, plan):
        timestamp_ms = wrap_int64(old.base_timestamp + record.timestamp_delta)
        max_timestamp = timestamp_ms if max_timestamp is None else max(max_timestamp, timestamp_ms)
        fields = bytearray((record.attributes,))
        write_varint(fields, wrap_int64(timestamp_ms - new.base_timestamp))
        write_varint(fields, record.offset_delta)
        fields += record.tail
        write_varint(body, len(fields))
        body += fields
    if not old.timestamp_type:
        new = new._replace(max_timestamp=-1 if max_timestamp is None else max_timestamp)
    return _finished(new, as_bytes_view(compress(old.compression, body, None)))


def _kept(header: BatchHeader, batch: memoryview, plan: BatchPlan) -> Iterator[WalkedRecord]:
    """The records of the plan, whose offsets rise as those of the batch do."""
    offsets = iter(plan.kept_offsets)
    wanted = next(offsets, None)
    for record in RecordWalk.of_batch(header, batch, bytes_max=DECOMPRESSED_BYTES_MAX, tails=True):
        if record is not None and header.base_offset + record.offset_delta == wanted:
            yield record
            wanted = next(offsets, None)


def _finished(header: BatchHeader, packed: bytes | memoryview) -> tuple[BatchHeader, bytes]:
    batch = bytearray(HEADER_BYTES) + packed
    header = header._replace(batch_length=len(batch) - LENGTH_FIELD_END)
    write_header(batch, header)
    return header, bytes(batch)
