"""The readable codec: one record at a time, nothing clever. It is the oracle for the Arrow codec.

What it accepts and refuses is the definition: varints may be longer than needed, but not longer than 5 (lengths,
offsets) or 10 bytes (timestamps), nor hold more than 32 or 64 bits; -1 is the only negative length and means null; the
records fill the batch exactly; offsets rise within the range that the header states, with gaps where compaction removed
records. A record's own attribute byte is unused in Kafka and ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from semel.errors import CorruptRecords
from semel.records.compression import (
    DECOMPRESSED_BYTES_MAX,
    check_compression,
    compress,
    decompress,
    headers_max,
    too_many_headers,
)
from semel.records.layout import (
    HEADER_BYTES,
    LENGTH_FIELD_END,
    MAGIC,
    TIMESTAMP_TYPE_BIT,
    BatchHeader,
    as_bytes_view,
    check_batch_crc,
    check_header,
    make_attributes,
    read_header,
    write_header,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

Header = tuple[str, bytes | None]

_COPIED_BYTES_MAX = 64 * 1024


@dataclass(frozen=True, slots=True)
class Record:
    """One record; `offset` is absolute."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...] = ()


def encode_batch(
    records: Sequence[Record],
    *,
    compression: str = "none",
    compression_level: int | None = None,
    base_offset: int = 0,
    partition_leader_epoch: int = -1,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    transactional: bool = False,
    control: bool = False,
) -> bytes:
    """One batch of `records`, whose offsets count from `base_offset`.

    >>> batch = encode_batch([Record(0, 1000, b"k", b"v"), Record(1, 1001, None, None, (("trace", b"7"),))])
    >>> header, records = decode_batch(batch)
    >>> records[1].headers
    (('trace', b'7'),)
    """
    check_compression(compression, compression_level)
    base_timestamp = records[0].timestamp_ms if records else -1
    body = bytearray()
    for record in records:
        write_record(body, record, base_offset, base_timestamp)
    packed = compress(compression, body, compression_level)
    batch = bytearray(HEADER_BYTES) + as_bytes_view(packed)
    header = BatchHeader(
        base_offset=base_offset,
        batch_length=len(batch) - LENGTH_FIELD_END,
        partition_leader_epoch=partition_leader_epoch,
        magic=MAGIC,
        crc=0,
        attributes=make_attributes(compression=compression, transactional=transactional, control=control),
        last_offset_delta=records[-1].offset - base_offset if records else 0,
        base_timestamp=base_timestamp,
        max_timestamp=max((record.timestamp_ms for record in records), default=-1),
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        record_count=len(records),
    )
    write_header(batch, header)
    return bytes(batch)


def decode_batch(
    buffer: Buffer, *, check_crc: bool = True, decompressed_bytes_max: int = DECOMPRESSED_BYTES_MAX
) -> tuple[BatchHeader, list[Record]]:
    """Header and records of the one batch that fills `buffer`; control batches are read like any other.

    `decompressed_bytes_max` bounds the unpacked bytes, and the headers by the memory that they take.
    """
    batch = as_bytes_view(buffer)
    header = read_header(batch)
    check_header(header, batch)
    if check_crc:
        check_batch_crc(header, batch)
    return header, decode_body(header, unpack_body(header, batch, decompressed_bytes_max), decompressed_bytes_max)


def unpack_body(header: BatchHeader, batch: memoryview, decompressed_bytes_max: int) -> memoryview:
    """The records of a batch, unpacked; a batch that compaction emptied has none whatever its codec."""
    compression = header.compression
    packed = batch[HEADER_BYTES:]
    if len(packed) == 0:
        return packed
    return as_bytes_view(decompress(compression, packed, decompressed_bytes_max))


def decode_body(header: BatchHeader, body: memoryview, bytes_max: int | None = None) -> list[Record]:
    """The records in `body`, the unpacked bytes after the header.

    With `bytes_max`, raises RecordTooLarge before it makes headers that take more memory than that.
    """
    return list(iterate_body(header, body, bytes_max))


def iterate_body(header: BatchHeader, body: memoryview, bytes_max: int | None = None) -> Iterator[Record]:
    """The same one after the other, for callers that look at each record only once."""
    reader = _Reader(header.base_offset, body, bytes_max)
    last_offset_delta = -1
    for _ in range(header.record_count):
        offset_delta, record = reader.record(header)
        if not last_offset_delta < offset_delta <= header.last_offset_delta:
            raise reader.damaged(f"offset delta {offset_delta} after {last_offset_delta}")
        last_offset_delta = offset_delta
        yield record
    if reader.position != len(body):
        raise reader.damaged(f"{len(body) - reader.position} bytes after the last of {header.record_count} records")


def write_record(body: bytearray, record: Record, base_offset: int, base_timestamp: int) -> None:
    """Append the wire form of one record."""
    fields = bytearray(1)
    write_varint(fields, wrap_int64(record.timestamp_ms - base_timestamp))
    write_varint(fields, record.offset - base_offset)
    _write_bytes(fields, record.key)
    _write_bytes(fields, record.value)
    write_varint(fields, len(record.headers))
    for key, value in record.headers:
        _write_bytes(fields, key.encode("utf-8", errors="surrogateescape"))
        _write_bytes(fields, value)
    write_varint(body, len(fields))
    body += fields


def write_varint(out: bytearray, value: int) -> None:
    """Append a zigzag varint."""
    rest = (value << 1) if value >= 0 else (-value << 1) - 1
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)


def varint_bytes(value: int) -> bytes:
    """A zigzag varint on its own."""
    out = bytearray()
    write_varint(out, value)
    return bytes(out)


def wrap_int64(value: int) -> int:
    """Java's 64-bit arithmetic, so that any two timestamps have a delta."""
    return (value + 2**63) % 2**64 - 2**63


def _write_bytes(out: bytearray, value: bytes | None) -> None:
    if value is None:
        write_varint(out, -1)
        return
    write_varint(out, len(value))
    out += value


class _Reader:
    """A position in the records of one batch."""

    def __init__(self, base_offset: int, body: memoryview, bytes_max: int | None) -> None:
        self.base_offset = base_offset
        self.bytes_max = bytes_max
        self.headers_left = len(body) if bytes_max is None else headers_max(bytes_max)
        # Bytes are looked up and cut in half the time that a view takes; a large body is not copied for it.
        self.body = bytes(body) if len(body) <= _COPIED_BYTES_MAX else body
        self.position = 0

    def damaged(self, what: str) -> CorruptRecords:
        return CorruptRecords(
            f"The batch at offset {self.base_offset} is damaged at byte {self.position} of its records ({what}): "
            "none of its records can be trusted. Read it again, or skip the batch if the broker's copy is damaged."
        )

    def record(self, header: BatchHeader) -> tuple[int, Record]:
        length = self.varint(bits=32)
        end = self.position + length
        if length < 0 or end > len(self.body):
            raise self.damaged(f"record length {length}")
        self.skip_attributes()
        timestamp = wrap_int64(header.base_timestamp + self.varint(bits=64))
        if header.attributes & TIMESTAMP_TYPE_BIT:
            timestamp = header.max_timestamp
        offset_delta = self.varint(bits=32)
        key = self.nullable_bytes()
        value = self.nullable_bytes()
        headers = self.headers()
        if self.position != end:
            raise self.damaged(f"record length {length} does not fit its fields")
        return offset_delta, Record(header.base_offset + offset_delta, timestamp, key, value, headers)

    def skip_attributes(self) -> None:
        if self.position >= len(self.body):
            raise self.damaged("truncated")
        self.position += 1

    def headers(self) -> tuple[Header, ...]:
        count = self.varint(bits=32)
        if count < 0 or count > len(self.body) - self.position:
            raise self.damaged(f"header count {count}")
        self.headers_left -= count
        if self.headers_left < 0 and self.bytes_max is not None:
            raise too_many_headers(self.bytes_max)
        return tuple(self.header() for _ in range(count))

    def header(self) -> Header:
        key = self.nullable_bytes()
        if key is None:
            raise self.damaged("header without a key")
        # Not every client writes UTF-8 here; like the Java client, show what can be shown rather than refuse the batch.
        return key.decode("utf-8", errors="replace"), self.nullable_bytes()

    def nullable_bytes(self) -> bytes | None:
        length = self.varint(bits=32)
        if length == -1:
            return None
        end = self.position + length
        if length < 0 or end > len(self.body):
            raise self.damaged(f"length {length}")
        value = bytes(self.body[self.position : end])
        self.position = end
        return value

    def varint(self, *, bits: int) -> int:
        if self.position < len(self.body) and (byte := self.body[self.position]) < 0x80:  # most numbers are small
            self.position += 1
            return (byte >> 1) ^ -(byte & 1)
        result = 0
        for shift in range(0, bits, 7):
            if self.position >= len(self.body):
                raise self.damaged("truncated number")
            byte = self.body[self.position]
            self.position += 1
            result |= (byte & 0x7F) << shift
            if byte < 0x80:
                if result >> bits:
                    raise self.damaged(f"number of more than {bits} bits")
                return (result >> 1) ^ -(result & 1)
        raise self.damaged("number without end")
