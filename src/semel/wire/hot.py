"""Produce and Fetch by hand, the two messages that carry data: views of the records instead of copies.

The generated messages are the oracle: tests compare the two for every version.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from semel.errors import WireError
from semel.wire.shape import REQUEST_ENTRIES_MAX

_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_ACKS_TIMEOUT: Final = struct.Struct(">hi")
_HEAD_BYTES: Final = 8  # API key, version, correlation id

_PRODUCE_FLEXIBLE: Final = 9
_FETCH_FLEXIBLE: Final = 12


@dataclass(frozen=True, slots=True)
class ProducePartition:
    """The records for one partition: a writable view into the frame, or None."""

    index: int
    records: memoryview | None


@dataclass(frozen=True, slots=True)
class ProduceTopic:
    name: str
    partitions: list[ProducePartition]


@dataclass(frozen=True, slots=True)
class ProduceRequest:
    """A Produce request of any version from 3 to 12."""

    version: int
    client_id: str | None
    transactional_id: str | None
    acks: int
    timeout_ms: int
    topics: list[ProduceTopic]


class TooManyEntries(WireError):
    """A request has more entries than its reader takes."""


class _Reader:
    """A position in a frame; every read checks that the bytes are there."""

    __slots__ = ("entries_left", "position", "view")

    def __init__(self, view: memoryview, position: int, entries_max: int) -> None:
        self.view = view
        self.position = position
        self.entries_left = entries_max

    def take(self, size: int) -> memoryview:
        end = self.position + size
        if size < 0 or end > len(self.view):
            raise WireError("A Produce request ends before its fields do.")
        piece = self.view[self.position : end]
        self.position = end
        return piece

    def int16(self) -> int:
        return _INT16.unpack(self.take(2))[0]

    def int32(self) -> int:
        return _INT32.unpack(self.take(4))[0]

    def varint(self) -> int:
        value = shift = 0
        for _ in range(5):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        raise WireError("A Produce request has a length of more than five bytes.")

    def text(self, size: int) -> str:
        try:
            return str(self.take(size), "utf-8")
        except UnicodeDecodeError as error:
            raise WireError("A Produce request has a name that is not UTF-8.") from error

    def string_or_none(self, flexible: bool) -> str | None:
        size = self.varint() - 1 if flexible else self.int16()
        if size == -1:
            return None
        return self.text(size)

    def string(self, flexible: bool) -> str:
        value = self.string_or_none(flexible)
        if value is None:
            raise WireError("A Produce request has null where a name must be.")
        return value

    def count(self, flexible: bool) -> int:
        """How many entries follow; each takes at least one byte, so a lie is found before anything is allocated."""
        size = self.varint() - 1 if flexible else self.int32()
        if not 0 <= size <= len(self.view) - self.position:
            raise WireError("A Produce request claims more entries than it has bytes.")
        return self._bounded(size)

    def _bounded(self, size: int) -> int:
        self.entries_left -= size
        if self.entries_left < 0:
            raise TooManyEntries("A Produce request has more entries than are taken: send fewer batches at a time.")
        return size

    def records(self, flexible: bool) -> memoryview | None:
        size = self.varint() - 1 if flexible else self.int32()
        return None if size == -1 else self.take(size)

    def skip_tags(self, flexible: bool) -> None:
        if flexible:
            for _ in range(self._bounded(self.varint())):
                self.varint()
                self.take(self.varint())


def read_produce_request(frame: memoryview, version: int, *, entries_max: int = REQUEST_ENTRIES_MAX) -> ProduceRequest:
    """Read a frame (without its size) whose head says Produce, version 3 to 12. Raises TooManyEntries, a WireError."""
    flexible = version >= _PRODUCE_FLEXIBLE
    reader = _Reader(frame, _HEAD_BYTES, entries_max)
    client_id = reader.string_or_none(flexible=False)  # the client id keeps its old layout in every header
    reader.skip_tags(flexible)
    transactional_id = reader.string_or_none(flexible)
    acks, timeout_ms = _ACKS_TIMEOUT.unpack(reader.take(_ACKS_TIMEOUT.size))
    topics: list[ProduceTopic] = []
    for _ in range(reader.count(flexible)):
        name = reader.string(flexible)
        partitions: list[ProducePartition] = []
        for _ in range(reader.count(flexible)):
            partitions.append(ProducePartition(reader.int32(), reader.records(flexible)))
            reader.skip_tags(flexible)
        reader.skip_tags(flexible)
        topics.append(ProduceTopic(name, partitions))
    reader.skip_tags(flexible)
    return ProduceRequest(version, client_id, transactional_id, acks, timeout_ms, topics)


@dataclass(frozen=True, slots=True)
class ProducedPartition:
    """What is answered for one partition. Offsets are -1 with an error."""

    index: int
    error_code: int
    base_offset: int = -1
    log_append_time_ms: int = -1
    log_start_offset: int = -1
    error_message: str | None = None


_PRODUCED: Final = struct.Struct(">ihqqq")
_PRODUCED_V3: Final = struct.Struct(">ihqq")


def write_produce_response(
    version: int, correlation_id: int, topics: Sequence[tuple[str, Sequence[ProducedPartition]]]
) -> bytes:
    """The whole frame, size included."""
    flexible = version >= _PRODUCE_FLEXIBLE
    out = _frame_start(correlation_id, flexible)
    _put_count(out, len(topics), flexible)
    for name, partitions in topics:
        _put_string(out, name, flexible)
        _put_count(out, len(partitions), flexible)
        for one in partitions:
            if version >= 5:
                out += _PRODUCED.pack(
                    one.index, one.error_code, one.base_offset, one.log_append_time_ms, one.log_start_offset
                )
            else:
                out += _PRODUCED_V3.pack(one.index, one.error_code, one.base_offset, one.log_append_time_ms)
            if version >= 8:
                _put_count(out, 0, flexible)  # no record is refused on its own: a batch is stored whole or not at all
                _put_nullable_string(out, one.error_message, flexible)
            _put_no_tags(out, flexible)
        _put_no_tags(out, flexible)
    out += _INT32.pack(0)  # throttle time
    _put_no_tags(out, flexible)
    _INT32.pack_into(out, 0, len(out) - 4)
    return bytes(out)


@dataclass(frozen=True, slots=True)
class FetchedPartition:
    """What is answered for one partition: `records` in pieces that are passed on as they are."""

    index: int
    error_code: int
    high_watermark: int = -1
    last_stable_offset: int = -1
    log_start_offset: int = -1
    aborted: Sequence[tuple[int, int]] | None = None
    """Producer id and first offset of each aborted transaction; None for a reader who did not ask."""
    records: Sequence[bytes | memoryview] = ()


_FETCHED: Final = struct.Struct(">ihqqq")
_FETCHED_V4: Final = struct.Struct(">ihqq")
_ABORTED: Final = struct.Struct(">qq")


def write_fetch_response(
    version: int,
    correlation_id: int,
    session_id: int,
    error_code: int,
    topics: Sequence[tuple[str, Sequence[FetchedPartition]]],
) -> list[bytes | memoryview]:
    """The whole frame in pieces, size included; records are passed on by reference."""
    flexible = version >= _FETCH_FLEXIBLE
    out = _frame_start(correlation_id, flexible)
    out += _INT32.pack(0)  # throttle time
    if version >= 7:
        out += _INT16.pack(error_code) + _INT32.pack(session_id)
    pieces: list[bytes | memoryview] = []
    size = 0
    _put_count(out, len(topics), flexible)
    for name, partitions in topics:
        _put_string(out, name, flexible)
        _put_count(out, len(partitions), flexible)
        for one in partitions:
            _put_fetched_head(out, version, one, flexible)
            if one.records:
                size += len(out) + sum(map(len, one.records))
                pieces.append(bytes(out))
                pieces.extend(one.records)
                out = bytearray()
            _put_no_tags(out, flexible)
        _put_no_tags(out, flexible)
    _put_no_tags(out, flexible)
    pieces.append(bytes(out))
    size += len(out)
    pieces[0] = _INT32.pack(size - 4) + pieces[0][4:]
    return pieces


def _put_fetched_head(out: bytearray, version: int, one: FetchedPartition, flexible: bool) -> None:
    if version >= 5:
        out += _FETCHED.pack(
            one.index, one.error_code, one.high_watermark, one.last_stable_offset, one.log_start_offset
        )
    else:
        out += _FETCHED_V4.pack(one.index, one.error_code, one.high_watermark, one.last_stable_offset)
    if one.aborted is None:
        _put_count(out, -1, flexible)
    else:
        _put_count(out, len(one.aborted), flexible)
        for producer_id, first_offset in one.aborted:
            out += _ABORTED.pack(producer_id, first_offset)
            _put_no_tags(out, flexible)
    if version >= 11:
        out += _INT32.pack(-1)  # no replica is nearer than the leader
    _put_count(out, sum(map(len, one.records)), flexible)


def _frame_start(correlation_id: int, flexible: bool) -> bytearray:
    """Room for the size, and the response header."""
    out = bytearray(4)
    out += _INT32.pack(correlation_id)
    _put_no_tags(out, flexible)
    return out


def _put_no_tags(out: bytearray, flexible: bool) -> None:
    if flexible:
        out.append(0)


def _put_varint(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _put_count(out: bytearray, count: int, flexible: bool) -> None:
    """The length of an array or of bytes; -1 is null."""
    if flexible:
        _put_varint(out, count + 1)
    else:
        out += _INT32.pack(count)


def _put_string(out: bytearray, text: str, flexible: bool) -> None:
    data = text.encode()
    if flexible:
        _put_varint(out, len(data) + 1)
    else:
        out += _INT16.pack(len(data))
    out += data


def _put_nullable_string(out: bytearray, text: str | None, flexible: bool) -> None:
    if text is not None:
        _put_string(out, text, flexible)
    elif flexible:
        out.append(0)
    else:
        out += _INT16.pack(-1)
