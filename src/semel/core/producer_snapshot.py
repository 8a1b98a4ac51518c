"""Kafka's producer snapshot file, version 1: the producers of a partition as of one offset, under a checksum.

Only the last batch of each producer is in it, as in Kafka: after a restart a repeat of an older one is refused as out
of order instead of being answered as a duplicate, unless the log behind the snapshot still tells.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from crc32c import crc32c

from semel.core.producer_state import NO_SEQUENCE, ProducerBatch, ProducerEntry
from semel.errors import CorruptRecords

SNAPSHOT_VERSION = 1

_HEAD = struct.Struct(">hI")  # version, CRC-32C of all that follows
_COUNT = struct.Struct(">i")
# producer id, epoch, last sequence, last offset, offset delta, timestamp, coordinator epoch, transaction first offset
_ENTRY = struct.Struct(">qhiqiqiq")


def encode_snapshot(entries: Iterable[ProducerEntry]) -> bytes:
    """The bytes of a snapshot file.

    >>> decode_snapshot(encode_snapshot([ProducerEntry(7, 1)]))[0].producer_epoch
    1
    """
    packed = [_pack_entry(entry) for entry in entries]
    body = _COUNT.pack(len(packed)) + b"".join(packed)
    return _HEAD.pack(SNAPSHOT_VERSION, crc32c(body)) + body


def decode_snapshot(data: bytes) -> tuple[ProducerEntry, ...]:
    """The producers in a snapshot file; CorruptRecords if its bytes are not what was written."""
    if len(data) < _HEAD.size + _COUNT.size:
        raise _damaged(f"it has only {len(data)} bytes")
    version, checksum = _HEAD.unpack_from(data)
    if version != SNAPSHOT_VERSION:
        raise _damaged(f"it has version {version}")
    body = memoryview(data)[_HEAD.size :]
    if crc32c(body) != checksum:
        raise _damaged("its checksum does not match")
    (count,) = _COUNT.unpack_from(body)
    if count < 0 or _COUNT.size + count * _ENTRY.size != len(body):
        raise _damaged(f"it claims {count} producers in {len(body)} bytes")
    return tuple(_unpack_entry(fields) for fields in _ENTRY.iter_unpack(body[_COUNT.size :]))


def _pack_entry(entry: ProducerEntry) -> bytes:
    last = entry.batches[-1] if entry.batches else ProducerBatch(NO_SEQUENCE, -1, 0, entry.last_timestamp_ms)
    first_offset = entry.transaction_first_offset
    return _ENTRY.pack(
        entry.producer_id,
        entry.producer_epoch,
        last.last_sequence,
        last.last_offset,
        last.offset_delta,
        entry.last_timestamp_ms,
        entry.coordinator_epoch,
        -1 if first_offset is None else first_offset,
    )


def _unpack_entry(fields: tuple[int, ...]) -> ProducerEntry:
    producer_id, epoch, last_sequence, last_offset, offset_delta, timestamp_ms, coordinator_epoch, first_offset = fields
    batches = () if last_offset < 0 else (ProducerBatch(last_sequence, last_offset, offset_delta, timestamp_ms),)
    return ProducerEntry(
        producer_id, epoch, coordinator_epoch, timestamp_ms, None if first_offset < 0 else first_offset, batches
    )


def _damaged(detail: str) -> CorruptRecords:
    return CorruptRecords(
        f"A producer snapshot is damaged: {detail}. No record is lost: delete it, and the state is rebuilt from an "
        "older snapshot and the log."
    )
