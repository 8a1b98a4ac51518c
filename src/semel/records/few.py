"""A few records to batches, one by one: below some dozens of rows a vectorised encoder is mostly overhead.

The bytes are those that `encode_table` makes of the same rows; a test holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from semel.errors import RecordTooLarge
from semel.records.compression import check_compression, compress
from semel.records.layout import (
    HEADER_BYTES,
    LENGTH_FIELD_END,
    MAGIC,
    BatchHeader,
    as_bytes_view,
    make_attributes,
    write_header,
)
from semel.records.reference import Record, write_record
from semel.records.schema import EncodedBatch

FEW_ROWS = 32
"""So many take as long either way."""


def encode_few(
    records: Sequence[Record], *, compression: str, compression_level: int | None, batch_bytes_max: int
) -> list[EncodedBatch]:
    """Records, whose offsets count from 0, as batches of at most `batch_bytes_max` bytes before compression.

    >>> records = [Record(number, 1000, None, value) for number, value in enumerate((b"a", b"b", b"c"))]
    >>> batches = encode_few(records, compression="none", compression_level=None, batch_bytes_max=80)
    >>> [batch.record_count for batch in batches]
    [2, 1]
    """
    check_compression(compression, compression_level)
    batches: list[EncodedBatch] = []
    first = 0
    while first < len(records):
        body, count = _next_body(records, first, batch_bytes_max - HEADER_BYTES)
        batch = bytearray(HEADER_BYTES)
        batch += as_bytes_view(compress(compression, body, compression_level))
        taken = records[first : first + count]
        write_header(
            batch,
            BatchHeader(
                base_offset=0,
                batch_length=len(batch) - LENGTH_FIELD_END,
                partition_leader_epoch=-1,
                magic=MAGIC,
                crc=0,
                attributes=make_attributes(compression=compression, transactional=False),
                last_offset_delta=count - 1,
                base_timestamp=taken[0].timestamp_ms,
                max_timestamp=max(record.timestamp_ms for record in taken),
                producer_id=-1,
                producer_epoch=-1,
                base_sequence=-1,
                record_count=count,
            ),
        )
        batches.append(EncodedBatch(memoryview(batch), count))
        first += count
    return batches


def _next_body(records: Sequence[Record], first: int, records_bytes_max: int) -> tuple[bytearray, int]:
    """As many records from `first` on as fit, and how many they are."""
    body = bytearray()
    base_timestamp = records[first].timestamp_ms
    for row in range(first, len(records)):
        size = len(body)
        write_record(body, records[row], first, base_timestamp)
        if len(body) > records_bytes_max:
            if row == first:
                raise too_large(row, len(body) + HEADER_BYTES, records_bytes_max + HEADER_BYTES)
            del body[size:]
            return body, row - first
    return body, len(records) - first


def too_large(row: int, size: int, limit: int) -> RecordTooLarge:
    """What a user is told of a record that fits into no batch."""
    return RecordTooLarge(
        f"Row {row} takes {size} bytes in a batch of its own, more than the limit of {limit}; no row was encoded. "
        "Raise max.request.size here and max.message.bytes of the topic (message.max.bytes of the broker), or make the "
        "record smaller."
    )
