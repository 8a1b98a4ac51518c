"""The 61-byte header of a record batch (magic 2) and the walk from batch to batch.

Needs neither NumPy nor Arrow: a broker that only looks at headers stays light.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from crc32c import crc32c

from semel.errors import CorruptRecords

if TYPE_CHECKING:
    from typing_extensions import Buffer

HEADER_BYTES = 61
MAGIC = 2
LENGTH_FIELD_END = 12  # batch_length counts the bytes after itself
MAGIC_POSITION = 16  # the same place in the older formats, which is how they are told apart
CRC_POSITION = 17
CRC_START = 21  # the checksum covers the attributes and everything after them
RECORD_BYTES_MIN = 7  # length, attributes, two deltas, key length, value length, header count: one byte each

COMPRESSION_MASK = 0x07
TIMESTAMP_TYPE_BIT = 0x08
TRANSACTIONAL_BIT = 0x10
CONTROL_BIT = 0x20
DELETE_HORIZON_BIT = 0x40

COMPRESSION_NAMES = ("none", "gzip", "snappy", "lz4", "zstd")
SEQUENCE_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

_HEADER = struct.Struct(">qiibIhiqqqhii")
_CRC = struct.Struct(">I")


class BatchHeader(NamedTuple):
    """The fields of a batch header, as they stand on the wire. A tuple, as one is made for each batch that is met."""

    base_offset: int
    batch_length: int
    partition_leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def total_bytes(self) -> int:
        """Size of the whole batch, header included."""
        return LENGTH_FIELD_END + self.batch_length

    @property
    def compression(self) -> str:
        """Name of the codec; raises CorruptRecords for a number that no codec has."""
        number = self.attributes & COMPRESSION_MASK
        if number >= len(COMPRESSION_NAMES):
            raise CorruptRecords(
                f"The batch at offset {self.base_offset} names compression {number}, which does not exist: "
                "its bytes are damaged and it cannot be read."
            )
        return COMPRESSION_NAMES[number]

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & TRANSACTIONAL_BIT)

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & CONTROL_BIT)

    @property
    def has_delete_horizon(self) -> bool:
        """Whether compaction put the delete horizon (KIP-534) into base_timestamp; deltas then count from it."""
        return bool(self.attributes & DELETE_HORIZON_BIT)

    @property
    def timestamp_type(self) -> int:
        """0: set by the producer, 1: by the broker on append (every record then has max_timestamp)."""
        return (self.attributes & TIMESTAMP_TYPE_BIT) >> 3

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def last_sequence(self) -> int:
        """Sequence of the last record, or -1 without an idempotent producer."""
        if self.base_sequence < 0:
            return -1
        return next_sequence(self.base_sequence, self.last_offset_delta)


def next_sequence(sequence: int, increment: int) -> int:
    """Kafka's sequence arithmetic: after 2**31-1 comes 0.

    >>> next_sequence(2**31 - 1, 1)
    0
    """
    return (sequence + increment) & SEQUENCE_MAX


def as_bytes_view(buffer: Buffer) -> memoryview:
    """A flat byte view of anything with the buffer protocol."""
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def read_header(buffer: Buffer, position: int = 0) -> BatchHeader:
    """Read and check the header at `position`; the records after it need not be there.

    >>> from semel.records.reference import Record, encode_batch
    >>> read_header(encode_batch([Record(0, 1000, None, b"hello", ())])).record_count
    1
    """
    view = as_bytes_view(buffer)
    remaining = len(view) - position
    if remaining < HEADER_BYTES:
        if remaining > MAGIC_POSITION:
            check_magic(view[position + MAGIC_POSITION])
        raise CorruptRecords(f"A batch header has {HEADER_BYTES} bytes and only {max(remaining, 0)} are there.")
    header = BatchHeader._make(_HEADER.unpack_from(view, position))
    if header.magic != MAGIC:
        check_magic(view[position + MAGIC_POSITION])
    if header.batch_length < HEADER_BYTES - LENGTH_FIELD_END:
        raise CorruptRecords(
            f"The batch at offset {header.base_offset} claims a length of {header.batch_length} bytes, less than its "
            "own header: its bytes are damaged and it cannot be read."
        )
    return header


def check_magic(magic: int) -> None:
    if magic == MAGIC:
        return
    if magic in (0, 1):
        raise CorruptRecords(
            f"The data holds messages in Kafka's old format (magic {magic}), which only brokers before 4.0 still keep "
            "and which is not read here. Rewrite the topic with a producer of version 0.11 or newer."
        )
    raise CorruptRecords(f"The data has format {magic} where a record batch (magic 2) should start: it is damaged.")


def iter_batches(buffer: Buffer) -> Iterator[tuple[BatchHeader, memoryview]]:
    """The batches in `buffer`, one after another, as views without a copy.

    An incomplete last batch ends the walk without an error, since fetch responses are cut at a byte limit. A caller
    that gets no batch at all out of a non-empty response should ask for more bytes.

    >>> from semel.records.reference import Record, encode_batch
    >>> batch = encode_batch([Record(0, 1000, None, b"hello", ())])
    >>> [header.record_count for header, view in iter_batches(batch + batch + batch[:40])]
    [1, 1]
    """
    view = as_bytes_view(buffer)
    position = 0
    while len(view) - position > MAGIC_POSITION:
        if len(view) - position < HEADER_BYTES:
            check_magic(view[position + MAGIC_POSITION])
            return
        header = read_header(view, position)
        end = position + header.total_bytes
        if end > len(view):
            return
        yield header, view[position:end]
        position = end


def check_header(header: BatchHeader, batch: memoryview) -> None:
    """Raise CorruptRecords unless `batch` is one whole batch and its header makes sense."""
    if header.total_bytes != len(batch):
        raise CorruptRecords(
            f"The batch at offset {header.base_offset} claims {header.total_bytes} bytes and {len(batch)} are there: "
            "it is truncated or damaged and cannot be read."
        )
    if header.record_count < 0 or header.last_offset_delta < 0:
        raise CorruptRecords(
            f"The batch at offset {header.base_offset} claims {header.record_count} records up to offset "
            f"{header.last_offset}: its header is damaged and it cannot be read."
        )
    if header.record_count > header.last_offset_delta + 1 or header.last_offset > INT64_MAX:
        raise CorruptRecords(
            f"The batch at offset {header.base_offset} claims {header.record_count} records within "
            f"{header.last_offset_delta + 1} offsets: its header is damaged and it cannot be read."
        )


def batch_crc(batch: memoryview) -> int:
    """CRC-32C over everything from the attributes on."""
    return crc32c(batch[CRC_START:])


def verify_crc(batch: Buffer) -> None:
    """Raise CorruptRecords unless the checksum in the header is that of the bytes."""
    view = as_bytes_view(batch)
    check_batch_crc(read_header(view), view)


def check_batch_crc(header: BatchHeader, batch: memoryview) -> None:
    if batch_crc(batch) != header.crc:
        raise CorruptRecords(
            f"The checksum of the batch at offset {header.base_offset} does not match its bytes: they were damaged "
            "in transit or on disk. Read it again; if it stays so, the broker's copy is damaged."
        )


def write_header(batch: bytearray | memoryview, header: BatchHeader) -> None:
    """Put `header` over the first 61 bytes of `batch` and the checksum of the result into it.

    `header.crc` is ignored, since it depends on the rest.
    """
    _HEADER.pack_into(
        batch,
        0,
        header.base_offset,
        header.batch_length,
        header.partition_leader_epoch,
        header.magic,
        0,
        header.attributes,
        header.last_offset_delta,
        header.base_timestamp,
        header.max_timestamp,
        header.producer_id,
        header.producer_epoch,
        header.base_sequence,
        header.record_count,
    )
    _CRC.pack_into(batch, CRC_POSITION, batch_crc(memoryview(batch)))


def make_attributes(*, compression: str, transactional: bool, control: bool = False) -> int:
    attributes = COMPRESSION_NAMES.index(compression)
    if transactional:
        attributes |= TRANSACTIONAL_BIT
    if control:
        attributes |= CONTROL_BIT
    return attributes
