"""Put producer id, epoch and sequence into a batch that was encoded without them."""

from __future__ import annotations

import struct

from semel.errors import ConfigError
from semel.records.layout import CRC_POSITION, CRC_START, HEADER_BYTES, TRANSACTIONAL_BIT, batch_crc, read_header

_ATTRIBUTES = struct.Struct(">h")
_PRODUCER = struct.Struct(">qhi")
_PRODUCER_POSITION = 43
_CRC = struct.Struct(">I")


def stamp(
    batch: bytearray | memoryview,
    *,
    producer_id: int,
    producer_epoch: int,
    base_sequence: int,
    transactional: bool,
) -> None:
    """Set the producer's fields, the transactional bit and the checksum, in place; the records stay as they are.

    >>> from semel.records.layout import read_header
    >>> from semel.records.reference import Record, encode_batch
    >>> batch = bytearray(encode_batch([Record(0, 1000, None, b"hello")]))
    >>> stamp(batch, producer_id=7, producer_epoch=0, base_sequence=12, transactional=True)
    >>> read_header(batch).base_sequence
    12
    """
    view = memoryview(batch)
    if view.readonly:
        raise ConfigError("stamp() writes into the batch: pass a bytearray or a writable memoryview, not bytes.")
    header = read_header(view)
    if header.total_bytes != len(view) or len(view) < HEADER_BYTES:
        raise ConfigError(
            f"stamp() takes exactly one whole batch; {len(view)} bytes given, {header.total_bytes} needed."
        )
    attributes = header.attributes & ~TRANSACTIONAL_BIT
    if transactional:
        attributes |= TRANSACTIONAL_BIT
    _ATTRIBUTES.pack_into(view, CRC_START, attributes)
    _PRODUCER.pack_into(view, _PRODUCER_POSITION, producer_id, producer_epoch, base_sequence)
    _CRC.pack_into(view, CRC_POSITION, batch_crc(view))
