"""Kafka's formats of `__consumer_offsets`: committed offsets and classic groups as typed records, to bytes and back.

The first two bytes of a key tell its kind: 0 and 1 an offset, 2 a classic group. Other kinds belong to KIP-848 groups
or to a newer Kafka; `decode` answers None for them, and the reader steps over.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from kio.serial import readers, writers
from kio.serial.errors import SerialError
from kio.static.primitive import i32, i64

from semel.errors import WireError

_T = TypeVar("_T")
_KIND: Final = struct.Struct(">h")
_OFFSET_KINDS: Final = (0, 1)
_GROUP_KIND: Final = 2
# Kafka 4 writes the highest versions without tagged fields, so that any older broker and tool reads them.
_OFFSET_VALUE_VERSION: Final = 3
_OFFSET_VALUE_VERSION_WITH_EXPIRY: Final = 1
_GROUP_VALUE_VERSION: Final = 3
_NEWEST_VALUE_VERSION: Final = 4
_FIRST_FLEXIBLE_VERSION: Final = 4
_UNSET: Final = -1


@dataclass(frozen=True, slots=True)
class OffsetAndMetadata:
    """A committed position. `expire_timestamp_ms` is set only by OffsetCommit 2-4, which bring their own retention."""

    offset: int
    leader_epoch: int = -1
    metadata: str = ""
    commit_timestamp_ms: int = -1
    expire_timestamp_ms: int | None = None


@dataclass(frozen=True, slots=True)
class OffsetRecord:
    """One group's position in one partition; `value` None is the tombstone."""

    group_id: str
    topic: str
    partition: int
    value: OffsetAndMetadata | None


@dataclass(frozen=True, slots=True)
class StoredMember:
    """A member as the log keeps it: only the subscription of the chosen protocol is stored."""

    member_id: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    subscription: bytes
    assignment: bytes


@dataclass(frozen=True, slots=True)
class GroupMetadata:
    """A generation of a classic group: who belongs to it and what each of them was given."""

    protocol_type: str
    generation_id: int
    protocol_name: str | None
    leader_id: str | None
    state_since_ms: int
    members: tuple[StoredMember, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A classic group; `metadata` None is the tombstone."""

    group_id: str
    metadata: GroupMetadata | None


LoggedRecord = OffsetRecord | GroupRecord


def encode(record: LoggedRecord) -> tuple[bytes, bytes | None]:
    """Key and value as Kafka 4 writes them; the value is None for a tombstone.

    >>> encode(GroupRecord("g", None))
    (b'\\x00\\x02\\x00\\x01g', None)
    """
    key = io.BytesIO()
    if isinstance(record, OffsetRecord):
        key.write(_KIND.pack(_OFFSET_KINDS[-1]))
        writers.write_legacy_string(key, record.group_id)
        writers.write_legacy_string(key, record.topic)
        writers.write_int32(key, i32(record.partition))
        return key.getvalue(), None if record.value is None else _encode_offset(record.value)
    key.write(_KIND.pack(_GROUP_KIND))
    writers.write_legacy_string(key, record.group_id)
    return key.getvalue(), None if record.metadata is None else _encode_group(record.metadata)


def decode(key: bytes, value: bytes | None) -> LoggedRecord | None:
    """The typed record, or None for a kind of key that does not belong here. Raises `WireError` on damaged bytes.

    >>> decode(*encode(OffsetRecord("g", "t", 0, None)))
    OffsetRecord(group_id='g', topic='t', partition=0, value=None)
    """
    try:
        (kind,) = _KIND.unpack_from(key)
        if kind in _OFFSET_KINDS:
            return _decode_offset_record(key, value)
        return _decode_group_record(key, value) if kind == _GROUP_KIND else None
    except (SerialError, ValueError, IndexError, OverflowError, struct.error) as error:
        raise WireError(
            f"A record of __consumer_offsets cannot be read ({error}): offsets or members of a group may be missing. "
            "Restore the data directory from a copy, or delete that group."
        ) from error


def _encode_offset(value: OffsetAndMetadata) -> bytes:
    with_expiry = value.expire_timestamp_ms is not None
    out = io.BytesIO()
    out.write(_KIND.pack(_OFFSET_VALUE_VERSION_WITH_EXPIRY if with_expiry else _OFFSET_VALUE_VERSION))
    writers.write_int64(out, i64(value.offset))
    if not with_expiry:
        writers.write_int32(out, i32(value.leader_epoch))
    writers.write_legacy_string(out, value.metadata)
    writers.write_int64(out, i64(value.commit_timestamp_ms))
    if value.expire_timestamp_ms is not None:
        writers.write_int64(out, i64(value.expire_timestamp_ms))
    return out.getvalue()


def _encode_group(metadata: GroupMetadata) -> bytes:
    out = io.BytesIO()
    out.write(_KIND.pack(_GROUP_VALUE_VERSION))
    writers.write_legacy_string(out, metadata.protocol_type)
    writers.write_int32(out, i32(metadata.generation_id))
    writers.write_nullable_legacy_string(out, metadata.protocol_name)
    writers.write_nullable_legacy_string(out, metadata.leader_id)
    writers.write_int64(out, i64(metadata.state_since_ms))
    writers.write_int32(out, i32(len(metadata.members)))
    for member in metadata.members:
        writers.write_legacy_string(out, member.member_id)
        writers.write_nullable_legacy_string(out, member.group_instance_id)
        writers.write_legacy_string(out, member.client_id)
        writers.write_legacy_string(out, member.client_host)
        writers.write_int32(out, i32(member.rebalance_timeout_ms))
        writers.write_int32(out, i32(member.session_timeout_ms))
        writers.write_legacy_bytes(out, member.subscription)
        writers.write_legacy_bytes(out, member.assignment)
    return out.getvalue()


class _Cursor:
    """Reads one field after the other; strings, bytes and arrays by the layout of the value's version."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = _KIND.size
        (self.version,) = _KIND.unpack_from(data)
        self._flexible = False

    @classmethod
    def of_value(cls, data: bytes) -> _Cursor:
        cursor = cls(data)
        if not 0 <= cursor.version <= _NEWEST_VALUE_VERSION:
            raise SerialError(f"unknown version {cursor.version} of a value")
        cursor._flexible = cursor.version >= _FIRST_FLEXIBLE_VERSION
        return cursor

    def _read(self, reader: Callable[[bytes, int], tuple[_T, int]]) -> _T:
        value, size = reader(self._data, self._at)
        self._at += size
        return value

    def int32(self) -> int:
        return int(self._read(readers.read_int32))

    def int64(self) -> int:
        return int(self._read(readers.read_int64))

    def string(self) -> str:
        return self._read(readers.read_compact_string if self._flexible else readers.read_legacy_string)

    def nullable_string(self) -> str | None:
        if self._flexible:
            return self._read(readers.read_compact_string_nullable)
        return self._read(readers.read_nullable_legacy_string)

    def data(self) -> bytes:
        return self._read(readers.read_compact_string_as_bytes if self._flexible else readers.read_legacy_bytes)

    def array_length(self) -> int:
        return (
            self._read(readers.read_compact_array_length if self._flexible else readers.read_legacy_array_length) or 0
        )

    def step_over_tagged_fields(self) -> None:
        if not self._flexible:
            return
        for _ in range(self._read(readers.read_unsigned_varint)):
            self._read(readers.read_unsigned_varint)
            self._at += self._read(readers.read_unsigned_varint)


def _decode_offset_record(key: bytes, value: bytes | None) -> OffsetRecord:
    at = _Cursor(key)
    group_id, topic, partition = at.string(), at.string(), at.int32()
    return OffsetRecord(group_id, topic, partition, None if value is None else _decode_offset(_Cursor.of_value(value)))


def _decode_offset(at: _Cursor) -> OffsetAndMetadata:
    offset = at.int64()
    leader_epoch = at.int32() if at.version >= 3 else _UNSET
    metadata, commit_timestamp_ms = at.string(), at.int64()
    expire_timestamp_ms = at.int64() if at.version == _OFFSET_VALUE_VERSION_WITH_EXPIRY else _UNSET
    return OffsetAndMetadata(
        offset,
        leader_epoch,
        metadata,
        commit_timestamp_ms,
        None if expire_timestamp_ms == _UNSET else expire_timestamp_ms,
    )


def _decode_group_record(key: bytes, value: bytes | None) -> GroupRecord:
    group_id = _Cursor(key).string()
    return GroupRecord(group_id, None if value is None else _decode_group(_Cursor.of_value(value)))


def _decode_group(at: _Cursor) -> GroupMetadata:
    protocol_type, generation_id = at.string(), at.int32()
    protocol_name, leader_id = at.nullable_string(), at.nullable_string()
    state_since_ms = at.int64() if at.version >= 2 else _UNSET
    members = tuple(_decode_member(at) for _ in range(at.array_length()))
    return GroupMetadata(protocol_type, generation_id, protocol_name, leader_id, state_since_ms, members)


def _decode_member(at: _Cursor) -> StoredMember:
    member_id = at.string()
    group_instance_id = at.nullable_string() if at.version >= 3 else None
    client_id, client_host = at.string(), at.string()
    rebalance_timeout_ms = at.int32() if at.version >= 1 else _UNSET
    session_timeout_ms = at.int32()
    subscription, assignment = at.data(), at.data()
    at.step_over_tagged_fields()
    return StoredMember(
        member_id,
        group_instance_id,
        client_id,
        client_host,
        session_timeout_ms if rebalance_timeout_ms == _UNSET else rebalance_timeout_ms,
        session_timeout_ms,
        subscription,
        assignment,
    )
