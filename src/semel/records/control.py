"""Control batches: the commit and abort markers that end a transaction in a partition."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from semel.errors import CorruptRecords, RecordTooLarge
from semel.records.layout import as_bytes_view

if TYPE_CHECKING:
    from typing_extensions import Buffer

MarkerKind = Literal["commit", "abort"]

_KEY = struct.Struct(">hh")  # version, type
_VALUE = struct.Struct(">hi")  # version, coordinator epoch
_KINDS: dict[int, MarkerKind] = {0: "abort", 1: "commit"}
_TYPES: dict[MarkerKind, int] = {kind: number for number, kind in _KINDS.items()}

_MARKER_BYTES_MAX = 65536
"""Kafka's take some twenty, and are not compressed."""


@dataclass(frozen=True, slots=True)
class ControlMarker:
    """The end of one producer's transaction in one partition."""

    kind: MarkerKind
    coordinator_epoch: int
    producer_id: int
    producer_epoch: int
    offset: int


def encode_control_batch(
    kind: MarkerKind,
    *,
    producer_id: int,
    producer_epoch: int,
    coordinator_epoch: int,
    timestamp_ms: int,
    base_offset: int = 0,
    partition_leader_epoch: int = -1,
) -> bytes:
    """A batch of one marker, byte for byte as Kafka's brokers write it.

    >>> batch = encode_control_batch(
    ...     "commit", producer_id=7, producer_epoch=1, coordinator_epoch=0, timestamp_ms=1000, base_offset=5
    ... )
    >>> read_control_batch(batch)
    ControlMarker(kind='commit', coordinator_epoch=0, producer_id=7, producer_epoch=1, offset=5)
    """
    from semel.records import reference  # it loads the codecs, which a reader of headers does not need

    record = reference.Record(base_offset, timestamp_ms, _KEY.pack(0, _TYPES[kind]), _VALUE.pack(0, coordinator_epoch))
    return reference.encode_batch(
        [record],
        base_offset=base_offset,
        partition_leader_epoch=partition_leader_epoch,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        transactional=True,
        control=True,
    )


def read_control_batch(batch: Buffer, *, check_crc: bool = True) -> ControlMarker | None:
    """The marker in a control batch, or None for control records of another kind.

    Kafka writes other control types into its own metadata log and may add more; readers are meant to step over them. A
    control batch that compaction emptied holds no marker any more either.
    """
    from semel.records import reference

    view = as_bytes_view(batch)
    try:
        header, records = reference.decode_batch(view, check_crc=check_crc, decompressed_bytes_max=_MARKER_BYTES_MAX)
    except RecordTooLarge as error:
        raise CorruptRecords(f"A transaction marker unpacks to over {_MARKER_BYTES_MAX} bytes: it is none.") from error
    if not header.is_control:
        raise CorruptRecords(f"The batch at offset {header.base_offset} holds user records, not a transaction marker.")
    if not records:
        return None
    record = records[0]
    if record.key is None or len(record.key) < _KEY.size:
        raise CorruptRecords(f"The control record at offset {record.offset} has no type: the batch is damaged.")
    _, number = _KEY.unpack_from(record.key)
    kind = _KINDS.get(number)
    if kind is None:
        return None
    if record.value is None or len(record.value) < _VALUE.size:
        raise CorruptRecords(f"The transaction marker at offset {record.offset} is cut short: the batch is damaged.")
    _, coordinator_epoch = _VALUE.unpack_from(record.value)
    return ControlMarker(kind, coordinator_epoch, header.producer_id, header.producer_epoch, record.offset)
