"""Kafka's own format of `__transaction_state`: the state of a transactional id as key and value bytes, and back.

The value has version 0 where transaction.version is 0 and version 1, with tagged fields, above. Version 0 does not keep
the previous and next producer id: there, as in Kafka, a repeated InitProducerId is fenced after a restart.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from kio.serial import readers, writers
from kio.serial.errors import SerialError
from kio.static.primitive import uvarint

from semel.core.transaction_metadata import (
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    TopicPartition,
    TransactionMetadata,
    TransactionStatus,
)
from semel.errors import CorruptRecords

_T = TypeVar("_T")
_KEY_VERSION: Final = struct.Struct(">h")
_TRANSACTION_KEY: Final = 0
_HEAD: Final = struct.Struct(">hqhib")  # version, producer id, producer epoch, time-out, status
_TIMES: Final = struct.Struct(">qq")  # last update, start
_INT64: Final = struct.Struct(">q")
_INT32: Final = struct.Struct(">i")
_INT16: Final = struct.Struct(">h")
_NEWEST_VALUE_VERSION: Final = 1
_FIRST_FLEXIBLE_VERSION: Final = 1

_PREVIOUS_PRODUCER_ID: Final = 0
_NEXT_PRODUCER_ID: Final = 1
_CLIENT_TRANSACTION_VERSION: Final = 2
_NEXT_PRODUCER_EPOCH: Final = 3
# Kafka does not log it, so that its coordinator, once restarted, fences a producer whose InitProducerId it has just
# carried out. A tag far from Kafka's own, which every other reader steps over (KIP-482), keeps recovery equal to live.
_LAST_PRODUCER_EPOCH: Final = 7_000
_END_OFFSETS: Final = 7_001  # ours too: without it every commit would have to wait until its markers are synced


@dataclass(frozen=True, slots=True)
class TransactionTombstone:
    """The transactional id is forgotten."""

    transactional_id: str


def encode_transaction(metadata: TransactionMetadata, *, transaction_version: int) -> tuple[bytes, bytes]:
    """Key and value. `transaction_version` is the coordinator's, not the client's.

    >>> key, value = encode_transaction(TransactionMetadata("id", 7, producer_epoch=3), transaction_version=2)
    >>> decode_transaction(key, value).producer_epoch
    3
    """
    version = min(transaction_version, _NEWEST_VALUE_VERSION)
    buffer = io.BytesIO()
    buffer.write(
        _HEAD.pack(version, metadata.producer_id, metadata.producer_epoch, metadata.timeout_ms, metadata.status)
    )
    _write_partitions(buffer, metadata, version)
    buffer.write(_TIMES.pack(metadata.last_update_ms, metadata.start_ms))
    if version >= _FIRST_FLEXIBLE_VERSION:
        _write_tagged_fields(buffer, metadata)
    return encode_key(metadata.transactional_id), buffer.getvalue()


def encode_tombstone(transactional_id: str) -> tuple[bytes, None]:
    return encode_key(transactional_id), None


def encode_key(transactional_id: str) -> bytes:
    name = transactional_id.encode()
    return struct.pack(f">hh{len(name)}s", _TRANSACTION_KEY, len(name), name)


def decode_transaction(key: bytes, value: bytes | None) -> TransactionMetadata | TransactionTombstone | None:
    """None for a key of another kind, which a newer Kafka may write: the reader steps over it.

    Raises CorruptRecords for bytes that are not what they claim, and for a value of a version that is not known, since
    to step over it would be to forget a transaction.
    """
    try:
        (version,) = _KEY_VERSION.unpack_from(key)
        if version != _TRANSACTION_KEY:
            return None
        transactional_id, _ = readers.read_legacy_string(key, _KEY_VERSION.size)
        if value is None:
            return TransactionTombstone(transactional_id)
        return _decode_value(transactional_id, value)
    except (SerialError, struct.error, UnicodeDecodeError, OverflowError) as error:
        raise CorruptRecords(
            f"A record of __transaction_state cannot be read ({error}): the state of a transaction is lost with it. "
            "Restore the data directory from a copy."
        ) from error


def _write_partitions(buffer: io.BytesIO, metadata: TransactionMetadata, version: int) -> None:
    is_flexible = version >= _FIRST_FLEXIBLE_VERSION
    if metadata.status is TransactionStatus.EMPTY:
        buffer.write(b"\x00" if is_flexible else b"\xff\xff\xff\xff")
        return
    by_topic: dict[str, list[int]] = {}
    for topic, partition in sorted(metadata.partitions):
        by_topic.setdefault(topic, []).append(partition)
    _write_length(buffer, len(by_topic), is_flexible)
    for topic, partitions in by_topic.items():
        name = topic.encode()
        buffer.write(_unsigned_varint(len(name) + 1) if is_flexible else _INT16.pack(len(name)))
        buffer.write(name)
        _write_length(buffer, len(partitions), is_flexible)
        buffer.write(struct.pack(f">{len(partitions)}i", *partitions))
        if is_flexible:
            buffer.write(b"\x00")


def _write_length(buffer: io.BytesIO, length: int, is_flexible: bool) -> None:
    buffer.write(_unsigned_varint(length + 1) if is_flexible else _INT32.pack(length))


def _write_tagged_fields(buffer: io.BytesIO, metadata: TransactionMetadata) -> None:
    fields: list[bytes] = []
    if metadata.previous_producer_id != NO_PRODUCER_ID:
        fields.append(_tagged_field(_PREVIOUS_PRODUCER_ID, _INT64.pack(metadata.previous_producer_id)))
    if metadata.next_producer_id != NO_PRODUCER_ID:
        fields.append(_tagged_field(_NEXT_PRODUCER_ID, _INT64.pack(metadata.next_producer_id)))
    if metadata.client_transaction_version != 0:
        fields.append(_tagged_field(_CLIENT_TRANSACTION_VERSION, _INT16.pack(metadata.client_transaction_version)))
    if metadata.next_producer_epoch != NO_PRODUCER_EPOCH:
        fields.append(_tagged_field(_NEXT_PRODUCER_EPOCH, _INT16.pack(metadata.next_producer_epoch)))
    if metadata.last_producer_epoch != NO_PRODUCER_EPOCH:
        fields.append(_tagged_field(_LAST_PRODUCER_EPOCH, _INT16.pack(metadata.last_producer_epoch)))
    if metadata.end_offsets:
        fields.append(_tagged_field(_END_OFFSETS, struct.pack(f">{len(metadata.end_offsets)}q", *metadata.end_offsets)))
    buffer.write(_unsigned_varint(len(fields)))
    buffer.write(b"".join(fields))


def _tagged_field(tag: int, content: bytes) -> bytes:
    return _unsigned_varint(tag) + _unsigned_varint(len(content)) + content


def _unsigned_varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    buffer = io.BytesIO()
    writers.write_unsigned_varint(buffer, uvarint(value))
    return buffer.getvalue()


class _Cursor:
    """Reads one value after another."""

    def __init__(self, content: bytes, position: int) -> None:
        self.content = content
        self.position = position

    def read(self, reader: Callable[[bytes, int], tuple[_T, int]]) -> _T:
        value, size = reader(self.content, self.position)
        self.position += size
        return value

    def take(self, size: int) -> bytes:
        taken = self.content[self.position : self.position + size]
        if size < 0 or len(taken) != size:
            raise struct.error(f"{size} bytes are announced, {len(taken)} are there")
        self.position += size
        return taken


def _decode_value(transactional_id: str, value: bytes) -> TransactionMetadata:
    version, producer_id, producer_epoch, timeout_ms, status = _HEAD.unpack_from(value)
    if not 0 <= version <= _NEWEST_VALUE_VERSION:
        raise CorruptRecords(
            f"__transaction_state holds a record of version {version} for {transactional_id!r}, which a newer release "
            "has written: its transaction cannot be known. Start that release again."
        )
    cursor = _Cursor(value, _HEAD.size)
    partitions = _read_partitions(cursor, is_flexible=version >= _FIRST_FLEXIBLE_VERSION)
    last_update_ms, start_ms = _TIMES.unpack(cursor.take(_TIMES.size))
    tagged = _read_tagged_fields(cursor) if version >= _FIRST_FLEXIBLE_VERSION else {}
    return TransactionMetadata(
        transactional_id,
        producer_id,
        previous_producer_id=_tagged(tagged, _PREVIOUS_PRODUCER_ID, _INT64, NO_PRODUCER_ID),
        next_producer_id=_tagged(tagged, _NEXT_PRODUCER_ID, _INT64, NO_PRODUCER_ID),
        next_producer_epoch=_tagged(tagged, _NEXT_PRODUCER_EPOCH, _INT16, NO_PRODUCER_EPOCH),
        producer_epoch=producer_epoch,
        last_producer_epoch=_tagged(tagged, _LAST_PRODUCER_EPOCH, _INT16, NO_PRODUCER_EPOCH),
        timeout_ms=timeout_ms,
        status=_read_status(status),
        partitions=partitions,
        start_ms=start_ms,
        last_update_ms=last_update_ms,
        client_transaction_version=_tagged(tagged, _CLIENT_TRANSACTION_VERSION, _INT16, 0),
        end_offsets=tuple(offset for (offset,) in _INT64.iter_unpack(tagged.get(_END_OFFSETS, b""))),
    )


def _read_status(number: int) -> TransactionStatus:
    try:
        return TransactionStatus(number)
    except ValueError as error:
        raise struct.error(f"status {number} does not exist") from error


def _read_partitions(cursor: _Cursor, *, is_flexible: bool) -> frozenset[TopicPartition]:
    found: set[TopicPartition] = set()
    for _ in range(_read_length(cursor, is_flexible)):
        topic = cursor.read(readers.read_compact_string if is_flexible else readers.read_legacy_string)
        count = _read_length(cursor, is_flexible)
        content = cursor.take(count * _INT32.size)
        found.update((topic, partition) for (partition,) in _INT32.iter_unpack(content))
        if is_flexible:
            _read_tagged_fields(cursor)
    return frozenset(found)


def _read_length(cursor: _Cursor, is_flexible: bool) -> int:
    if is_flexible:
        return max(cursor.read(readers.read_unsigned_varint) - 1, 0)
    (length,) = _INT32.unpack(cursor.take(_INT32.size))
    return max(length, 0)


def _read_tagged_fields(cursor: _Cursor) -> dict[int, bytes]:
    fields: dict[int, bytes] = {}
    for _ in range(cursor.read(readers.read_unsigned_varint)):
        tag = cursor.read(readers.read_unsigned_varint)
        fields[tag] = cursor.take(cursor.read(readers.read_unsigned_varint))
    return fields


def _tagged(fields: dict[int, bytes], tag: int, layout: struct.Struct, default: int) -> int:
    content = fields.get(tag)
    return default if content is None else layout.unpack(content)[0]
