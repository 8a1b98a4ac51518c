"""The sparse indexes of one segment as compact arrays, and their files byte for byte as Kafka's.

`.index`: per entry the last offset of a batch, relative to the segment's base, and the batch's position (int32 each).
`.timeindex`: the largest timestamp so far (int64) and the relative last offset of the batch that has it (int32).
`.txnindex`: version (int16), producer id, first offset, last offset, last stable offset (int64 each).
`.indexsums` is our own: a checksum of each of them. Kafka's have none, and one that was cut between two entries does
not contradict itself: aborted records would be shown, and retention would take a segment too early.
All are derived from the log: a file that is not sound is refused here, and the caller rebuilds it.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from crc32c import crc32c

from semel.core.partition_log import AbortedTransaction
from semel.errors import CorruptRecords

RELATIVE_OFFSET_MAX = 2**31 - 1

_TIME_ENTRY = struct.Struct(">qi")
_ABORTED_ENTRY = struct.Struct(">hqqqq")
_ABORTED_VERSION = 0
_CHECKSUM = struct.Struct(">I")


class OffsetIndex:
    """From an offset to a position at or before its batch.

    >>> index = OffsetIndex()
    >>> index.add(99, 5000)
    >>> index.floor(98), index.floor(99), index.floor(1000)
    (None, (99, 5000), (99, 5000))
    """

    __slots__ = ("_offsets", "_positions")

    def __init__(self) -> None:
        self._offsets = array("i")
        self._positions = array("i")

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, relative_offset: int, position: int) -> None:
        self._offsets.append(relative_offset)
        self._positions.append(position)

    def floor(self, relative_offset: int) -> tuple[int, int] | None:
        """The last entry at or below the offset."""
        if relative_offset > RELATIVE_OFFSET_MAX:
            relative_offset = RELATIVE_OFFSET_MAX
        found = bisect_right(self._offsets, relative_offset) - 1
        return None if found < 0 else (self._offsets[found], self._positions[found])

    def floor_position(self, position: int) -> tuple[int, int] | None:
        """The last entry whose position is at or below `position`."""
        found = bisect_right(self._positions, position) - 1
        return None if found < 0 else (self._offsets[found], self._positions[found])

    def last(self) -> tuple[int, int] | None:
        return (self._offsets[-1], self._positions[-1]) if self._offsets else None

    def encode(self) -> bytes:
        pairs = array("i", bytes(8 * len(self._offsets)))
        pairs[0::2] = self._offsets
        pairs[1::2] = self._positions
        return _big_endian(pairs).tobytes()

    @classmethod
    def decode(cls, data: bytes, *, log_bytes: int) -> OffsetIndex:
        if len(data) % 8:
            raise CorruptRecords(f"it has {len(data)} bytes, which is no whole number of entries")
        pairs = array("i")
        pairs.frombytes(data)
        _big_endian(pairs)
        index = cls()
        index._offsets, index._positions = pairs[0::2], pairs[1::2]
        if not (_rises(index._offsets) and _rises(index._positions)):
            raise CorruptRecords("its entries are not in order")
        if index._offsets and (index._offsets[0] < 0 or index._positions[0] < 0 or index._positions[-1] >= log_bytes):
            raise CorruptRecords(f"it points outside of the log's {log_bytes} bytes")
        return index


class TimeIndex:
    """From a timestamp to an offset before which every record is older.

    >>> index = TimeIndex()
    >>> index.add(1000, 7); index.add(1000, 9); index.add(2000, 20)
    >>> index.floor(999), index.floor(1500), index.last(), len(index)
    (None, (1000, 7), (2000, 20), 2)
    """

    __slots__ = ("_offsets", "_timestamps")

    def __init__(self) -> None:
        self._timestamps = array("q")
        self._offsets = array("i")

    def __len__(self) -> int:
        return len(self._timestamps)

    def add(self, timestamp_ms: int, relative_offset: int) -> None:
        """Only a timestamp above the last one makes an entry."""
        if timestamp_ms >= 0 and (not self._timestamps or timestamp_ms > self._timestamps[-1]):
            self._timestamps.append(timestamp_ms)
            self._offsets.append(relative_offset)

    def floor(self, timestamp_ms: int) -> tuple[int, int] | None:
        """The last entry at or below the timestamp."""
        found = bisect_right(self._timestamps, timestamp_ms) - 1
        return None if found < 0 else (self._timestamps[found], self._offsets[found])

    def last(self) -> tuple[int, int] | None:
        return (self._timestamps[-1], self._offsets[-1]) if self._timestamps else None

    def encode(self) -> bytes:
        return b"".join(map(_TIME_ENTRY.pack, self._timestamps, self._offsets))

    @classmethod
    def decode(cls, data: bytes) -> TimeIndex:
        if len(data) % _TIME_ENTRY.size:
            raise CorruptRecords(f"it has {len(data)} bytes, which is no whole number of entries")
        index = cls()
        for timestamp_ms, relative_offset in _TIME_ENTRY.iter_unpack(data):
            index._timestamps.append(timestamp_ms)
            index._offsets.append(relative_offset)
        if not (_rises(index._timestamps) and _rises(index._offsets)):
            raise CorruptRecords("its entries are not in order")
        if index._timestamps and (index._timestamps[0] < 0 or index._offsets[0] < 0):
            raise CorruptRecords("its entries are negative")
        return index


def encode_aborted(entries: Iterable[AbortedTransaction]) -> bytes:
    """The bytes of a `.txnindex` file.

    >>> decode_aborted(encode_aborted([AbortedTransaction(7, 0, 5, 6)]))
    [AbortedTransaction(producer_id=7, first_offset=0, last_offset=5, last_stable_offset=6)]
    """
    return b"".join(
        _ABORTED_ENTRY.pack(
            _ABORTED_VERSION, entry.producer_id, entry.first_offset, entry.last_offset, entry.last_stable_offset
        )
        for entry in entries
    )


def decode_aborted(data: bytes) -> list[AbortedTransaction]:
    if len(data) % _ABORTED_ENTRY.size:
        raise CorruptRecords(f"it has {len(data)} bytes, which is no whole number of entries")
    entries: list[AbortedTransaction] = []
    for version, *fields in _ABORTED_ENTRY.iter_unpack(data):
        entry = AbortedTransaction(*fields)
        if version != _ABORTED_VERSION:
            raise CorruptRecords(f"an entry has version {version}")
        if not 0 <= entry.first_offset <= entry.last_offset or (
            entries and entry.last_offset <= entries[-1].last_offset
        ):
            raise CorruptRecords("its entries are not in order")
        entries.append(entry)
    return entries


def encode_checksums(contents: Sequence[bytes]) -> bytes:
    """The bytes of an `.indexsums` file for the contents of the others.

    >>> check_content(b"two", 1, encode_checksums([b"one", b"two"]))
    """
    sums = b"".join(_CHECKSUM.pack(crc32c(content)) for content in contents)
    return sums + _CHECKSUM.pack(crc32c(sums))


def check_content(content: bytes, number: int, checksums: bytes | None) -> None:
    """Raise CorruptRecords unless `content` is what the checksum of that number was made of."""
    if checksums is None:
        raise CorruptRecords("its checksum is missing")
    sums, seal = checksums[: -_CHECKSUM.size], checksums[-_CHECKSUM.size :]
    if seal != _CHECKSUM.pack(crc32c(sums)):
        raise CorruptRecords("its checksum is damaged")
    at = number * _CHECKSUM.size
    if sums[at : at + _CHECKSUM.size] != _CHECKSUM.pack(crc32c(content)):
        raise CorruptRecords("its checksum does not match")


def _rises(values: array[int]) -> bool:
    return all(map(int.__lt__, values, memoryview(values)[1:])) if len(values) > 1 else True


def _big_endian(values: array[int]) -> array[int]:
    if sys.byteorder == "little":
        values.byteswap()
    return values
