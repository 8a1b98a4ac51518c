"""Kafka's own formats of `__consumer_offsets` for KIP-848 consumer groups: typed records, to bytes and back.

The first two bytes of a key tell its kind: 3 the group, 4 its partition metadata (written before Kafka 4.1, stepped
over here), 5 a member, 6 the epoch of the target assignment, 7 a member's target, 8 what a member has been given, 16 a
resolved regular expression. Tagged fields of a newer Kafka are stepped over.
"""

from __future__ import annotations

import enum
import io
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from sys import getsizeof
from typing import Final, TypeVar
from uuid import UUID

from kio.serial import readers, writers
from kio.serial.errors import SerialError
from kio.static.constants import uuid_zero
from kio.static.primitive import i8, i16, i32, i64

from semel.errors import WireError

_T = TypeVar("_T")
_KIND: Final = struct.Struct(">h")
_VALUE_VERSION: Final = 0
_METADATA_HASH_TAG: Final = 0
# One tagged field, number 0, one byte long: null. Kafka says so in every member that does not use the classic protocol.
_NO_CLASSIC_METADATA: Final = bytes([1, 0, 1, 0])

# Partitions by topic id; never changed once built.
Assignment = Mapping[UUID, frozenset[int]]
_NAME_BYTES: Final = 100
"""A place in the member's names, and its count in the group's index."""
_PARTITION_BYTES: Final = 300
"""Places in the target, in what the member has, and in the index of who has which partition."""
NOTHING: Final[Assignment] = {}


class MemberState(enum.IntEnum):
    """How far a member is on the way to its target; the numbers are those of Kafka's log."""

    STABLE = 0
    UNREVOKED_PARTITIONS = 1
    UNRELEASED_PARTITIONS = 2
    UNKNOWN = 127

    @classmethod
    def _missing_(cls, value: object) -> MemberState:
        """A state that a newer Kafka has added; such a member has to begin anew."""
        return cls.UNKNOWN


@dataclass(frozen=True, slots=True)
class MemberMetadata:
    """What a member says about itself."""

    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    subscribed_topic_names: tuple[str, ...] = ()
    subscribed_topic_regex: str = ""
    rebalance_timeout_ms: int = -1
    server_assignor: str | None = None

    @property
    def memory_bytes(self) -> int:
        """About what its texts take. Names are strings of its own, also where others subscribe to the same."""
        texts = (self.instance_id, self.rack_id, self.client_id, self.client_host, self.subscribed_topic_regex)
        names = self.subscribed_topic_names
        return sum(map(getsizeof, texts)) + sum(map(getsizeof, names)) + _NAME_BYTES * len(names)


@dataclass(frozen=True, slots=True)
class CurrentAssignment:
    """What the coordinator has given to a member, and what it still waits to get back from it."""

    member_epoch: int = 0
    previous_member_epoch: int = -1
    state: MemberState = MemberState.STABLE
    assigned: Assignment = field(default_factory=dict[UUID, frozenset[int]])
    pending_revocation: Assignment = field(default_factory=dict[UUID, frozenset[int]])


@dataclass(frozen=True, slots=True)
class ResolvedRegex:
    """The topics that a regular expression matched; `version` stands for the topic names it was tried on."""

    topics: tuple[str, ...]
    version: int
    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class GroupEpochRecord:
    """Kind 3: the group's epoch (None is the tombstone of the group) and a hash of the topics it reads."""

    group_id: str
    epoch: int | None
    metadata_hash: int = 0


@dataclass(frozen=True, slots=True)
class PartitionMetadataRecord:
    """Kind 4: only read. Kafka before 4.1 kept the partition counts here; now the hash in the group's record does."""

    group_id: str
    present: bool


@dataclass(frozen=True, slots=True)
class MemberMetadataRecord:
    """Kind 5: a member; None is its tombstone."""

    group_id: str
    member_id: str
    metadata: MemberMetadata | None


@dataclass(frozen=True, slots=True)
class TargetEpochRecord:
    """Kind 6: the group epoch that the target assignment was made for; None is the tombstone."""

    group_id: str
    assignment_epoch: int | None


@dataclass(frozen=True, slots=True)
class TargetMemberRecord:
    """Kind 7: the partitions that a member shall have in the end; None is the tombstone."""

    group_id: str
    member_id: str
    target: Assignment | None


@dataclass(frozen=True, slots=True)
class CurrentAssignmentRecord:
    """Kind 8: the partitions that a member has now; None is the tombstone."""

    group_id: str
    member_id: str
    current: CurrentAssignment | None


@dataclass(frozen=True, slots=True)
class ResolvedRegexRecord:
    """Kind 16: what a regular expression stands for; None is the tombstone."""

    group_id: str
    regex: str
    resolved: ResolvedRegex | None


ConsumerGroupRecord = (
    GroupEpochRecord
    | PartitionMetadataRecord
    | MemberMetadataRecord
    | TargetEpochRecord
    | TargetMemberRecord
    | CurrentAssignmentRecord
    | ResolvedRegexRecord
)

_KIND_OF: Final[Mapping[type[ConsumerGroupRecord], int]] = {
    GroupEpochRecord: 3,
    PartitionMetadataRecord: 4,
    MemberMetadataRecord: 5,
    TargetEpochRecord: 6,
    TargetMemberRecord: 7,
    CurrentAssignmentRecord: 8,
    ResolvedRegexRecord: 16,
}


_ONE_BYTE_LENGTHS: Final = 127
_BYTES: Final = [bytes([number]) for number in range(128)]
_PARTITION: Final = struct.Struct(">i")


def _number_of(item: tuple[UUID, object]) -> int:
    return item[0].int


_READ_BY_THEMSELVES: Final = (_KIND_OF[GroupEpochRecord], _KIND_OF[PartitionMetadataRecord])
"""Kinds whose decoder sees to the tagged fields: the one has a field there, the other is not read at all."""


def partitions_bytes(assignment: Assignment) -> int:
    """About what the partitions of a member's target take, with all that follows from it."""
    return _PARTITION_BYTES * sum(map(len, assignment.values()))


def memory_bytes_of(record: ConsumerGroupRecord) -> int:
    """About what a record adds to its group, besides its fixed part."""
    match record:
        case MemberMetadataRecord(_, member_id, MemberMetadata() as metadata):
            return getsizeof(member_id) + metadata.memory_bytes
        case TargetMemberRecord(_, _, Mapping() as target):
            return partitions_bytes(target)
        case _:
            return 0


def encode(record: ConsumerGroupRecord) -> tuple[bytes, bytes | None]:
    """Key and value as Kafka 4 writes them; the value is None for a tombstone.

    >>> encode(GroupEpochRecord("g", None))
    (b'\\x00\\x03\\x00\\x01g', None)
    """
    key = io.BytesIO()
    key.write(_KIND.pack(_KIND_OF[type(record)]))
    writers.write_legacy_string(key, record.group_id)
    if isinstance(record, MemberMetadataRecord | TargetMemberRecord | CurrentAssignmentRecord):
        writers.write_legacy_string(key, record.member_id)
    elif isinstance(record, ResolvedRegexRecord):
        writers.write_legacy_string(key, record.regex)
    return key.getvalue(), _encode_value(record)


def decode(key: bytes, value: bytes | None) -> ConsumerGroupRecord | None:
    """The typed record, or None for a kind of key that does not belong here. Raises `WireError` on damaged bytes.

    >>> decode(*encode(TargetEpochRecord("g", 7)))
    TargetEpochRecord(group_id='g', assignment_epoch=7)
    """
    try:
        (kind,) = _KIND.unpack_from(key)
        if kind not in _DECODERS:
            return None
        fields = None if value is None else _Cursor.of_value(value)
        record = _DECODERS[kind](_Cursor(key), fields)
        if fields is not None and kind not in _READ_BY_THEMSELVES:
            fields.tagged_fields()
        return record
    except (SerialError, ValueError, IndexError, OverflowError, struct.error) as error:
        raise WireError(
            f"A record of __consumer_offsets cannot be read ({error}): members or assignments of a consumer group may "
            "be missing. Restore the data directory from a copy, or delete that group."
        ) from error


def _encode_value(record: ConsumerGroupRecord) -> bytes | None:
    match record:
        case GroupEpochRecord(_, int(epoch), metadata_hash):
            return _encode_group_epoch(epoch, metadata_hash)
        case MemberMetadataRecord(_, _, MemberMetadata() as metadata):
            return _encode_member(metadata)
        case TargetEpochRecord(_, int(epoch)):
            out = _new_value()
            writers.write_int32(out, i32(epoch))
        case TargetMemberRecord(_, _, target) if target is not None:
            out = _new_value()
            _write_assignment(out, target)
        case CurrentAssignmentRecord(_, _, CurrentAssignment() as current):
            out = _new_value()
            writers.write_int32(out, i32(current.member_epoch))
            writers.write_int32(out, i32(current.previous_member_epoch))
            writers.write_int8(out, i8(current.state))
            _write_assignment(out, current.assigned)
            _write_assignment(out, current.pending_revocation)
        case ResolvedRegexRecord(_, _, ResolvedRegex() as resolved):
            out = _new_value()
            _write_strings(out, resolved.topics)
            writers.write_int64(out, i64(resolved.version))
            writers.write_int64(out, i64(resolved.timestamp_ms))
        case PartitionMetadataRecord(_, True):
            raise ValueError("partition metadata is no longer written, only its tombstone")
        case _:
            return None
    writers.write_empty_tagged_fields(out)
    return out.getvalue()


def _new_value() -> io.BytesIO:
    out = io.BytesIO()
    writers.write_int16(out, i16(_VALUE_VERSION))
    return out


def _encode_group_epoch(epoch: int, metadata_hash: int) -> bytes:
    out = _new_value()
    writers.write_int32(out, i32(epoch))
    if metadata_hash == 0:
        writers.write_empty_tagged_fields(out)
    else:
        # One tagged field: its number, its size in bytes, the hash (KIP-1101).
        out.write(bytes([1, _METADATA_HASH_TAG, 8]))
        writers.write_int64(out, i64(metadata_hash))
    return out.getvalue()


def _encode_member(metadata: MemberMetadata) -> bytes:
    out = _new_value()
    writers.write_nullable_compact_string(out, metadata.instance_id)
    writers.write_nullable_compact_string(out, metadata.rack_id)
    writers.write_compact_string(out, metadata.client_id)
    writers.write_compact_string(out, metadata.client_host)
    _write_strings(out, metadata.subscribed_topic_names)
    writers.write_nullable_compact_string(out, metadata.subscribed_topic_regex)
    writers.write_int32(out, i32(metadata.rebalance_timeout_ms))
    writers.write_nullable_compact_string(out, metadata.server_assignor)
    out.write(_NO_CLASSIC_METADATA)
    return out.getvalue()


def _write_strings(out: io.BytesIO, strings: tuple[str, ...]) -> None:
    writers.write_compact_array_length(out, len(strings))
    for string in strings:
        encoded = string.encode()
        # Most names are short: a length below 127 is one byte, and thousands of them are written much faster so.
        if len(encoded) < _ONE_BYTE_LENGTHS:
            out.write(_BYTES[len(encoded) + 1])
            out.write(encoded)
        else:
            writers.write_compact_string(out, string)


def _write_assignment(out: io.BytesIO, assignment: Assignment) -> None:
    writers.write_compact_array_length(out, len(assignment))
    # Without looking ids up, which costs more than all the rest: they are hashed in Python.
    for topic_id, numbers in sorted(assignment.items(), key=_number_of):
        out.write(topic_id.bytes)
        if len(numbers) < _ONE_BYTE_LENGTHS:
            out.write(_BYTES[len(numbers) + 1])
        else:
            writers.write_compact_array_length(out, len(numbers))
        for partition in sorted(numbers) if len(numbers) > 1 else numbers:
            out.write(_PARTITION.pack(partition))
        out.write(b"\0")  # no tagged fields


class _Cursor:
    """Reads one field after the other. Keys have the old layout of strings, values the compact one."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = _KIND.size

    @classmethod
    def of_value(cls, data: bytes) -> _Cursor:
        (version,) = _KIND.unpack_from(data)
        if version != _VALUE_VERSION:
            raise SerialError(f"unknown version {version} of a value")
        return cls(data)

    def _read(self, reader: Callable[[bytes, int], tuple[_T, int]]) -> _T:
        value, size = reader(self._data, self._at)
        self._at += size
        return value

    def key_string(self) -> str:
        return self._read(readers.read_legacy_string)

    def string(self) -> str:
        return self._read(readers.read_compact_string)

    def nullable_string(self) -> str | None:
        return self._read(readers.read_compact_string_nullable)

    def int8(self) -> int:
        return int(self._read(readers.read_int8))

    def int32(self) -> int:
        return int(self._read(readers.read_int32))

    def int64(self) -> int:
        return int(self._read(readers.read_int64))

    def array_length(self) -> int:
        length = self._read(readers.read_compact_array_length)
        if length is None:
            raise SerialError("an array is missing")
        return int(length)

    def strings(self) -> tuple[str, ...]:
        return tuple(self.string() for _ in range(self.array_length()))

    def assignment(self) -> Assignment:
        assignment: dict[UUID, frozenset[int]] = {}
        for _ in range(self.array_length()):
            topic_id = self._read(readers.read_uuid) or uuid_zero
            assignment[topic_id] = frozenset(self.int32() for _ in range(self.array_length()))
            self.tagged_fields()
        return assignment

    def tagged_fields(self) -> dict[int, bytes]:
        fields: dict[int, bytes] = {}
        for _ in range(self._read(readers.read_unsigned_varint)):
            tag = int(self._read(readers.read_unsigned_varint))
            size = int(self._read(readers.read_unsigned_varint))
            fields[tag] = self._data[self._at : self._at + size]
            self._at += size
        if self._at > len(self._data):
            raise SerialError("a tagged field is longer than the value")
        return fields


def _decode_group_epoch(key: _Cursor, value: _Cursor | None) -> GroupEpochRecord:
    group_id = key.key_string()
    if value is None:
        return GroupEpochRecord(group_id, None)
    epoch = value.int32()
    metadata_hash = value.tagged_fields().get(_METADATA_HASH_TAG)
    return GroupEpochRecord(group_id, epoch, int.from_bytes(metadata_hash or b"", signed=True))


def _decode_partition_metadata(key: _Cursor, value: _Cursor | None) -> PartitionMetadataRecord:
    return PartitionMetadataRecord(key.key_string(), present=value is not None)


def _decode_member(key: _Cursor, value: _Cursor | None) -> MemberMetadataRecord:
    group_id, member_id = key.key_string(), key.key_string()
    if value is None:
        return MemberMetadataRecord(group_id, member_id, None)
    metadata = MemberMetadata(
        instance_id=value.nullable_string(),
        rack_id=value.nullable_string(),
        client_id=value.string(),
        client_host=value.string(),
        subscribed_topic_names=value.strings(),
        subscribed_topic_regex=value.nullable_string() or "",
        rebalance_timeout_ms=value.int32(),
        server_assignor=value.nullable_string(),
    )
    return MemberMetadataRecord(group_id, member_id, metadata)


def _decode_target_epoch(key: _Cursor, value: _Cursor | None) -> TargetEpochRecord:
    return TargetEpochRecord(key.key_string(), None if value is None else value.int32())


def _decode_target_member(key: _Cursor, value: _Cursor | None) -> TargetMemberRecord:
    return TargetMemberRecord(key.key_string(), key.key_string(), None if value is None else value.assignment())


def _decode_current_assignment(key: _Cursor, value: _Cursor | None) -> CurrentAssignmentRecord:
    group_id, member_id = key.key_string(), key.key_string()
    if value is None:
        return CurrentAssignmentRecord(group_id, member_id, None)
    current = CurrentAssignment(
        value.int32(), value.int32(), MemberState(value.int8()), value.assignment(), value.assignment()
    )
    return CurrentAssignmentRecord(group_id, member_id, current)


def _decode_resolved_regex(key: _Cursor, value: _Cursor | None) -> ResolvedRegexRecord:
    group_id, regex = key.key_string(), key.key_string()
    if value is None:
        return ResolvedRegexRecord(group_id, regex, None)
    return ResolvedRegexRecord(group_id, regex, ResolvedRegex(value.strings(), value.int64(), value.int64()))


_DECODERS: Final[Mapping[int, Callable[[_Cursor, _Cursor | None], ConsumerGroupRecord]]] = {
    3: _decode_group_epoch,
    4: _decode_partition_metadata,
    5: _decode_member,
    6: _decode_target_epoch,
    7: _decode_target_member,
    8: _decode_current_assignment,
    16: _decode_resolved_regex,
}
