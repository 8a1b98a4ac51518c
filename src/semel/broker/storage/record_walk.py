"""A walk over the records of one batch that never holds the whole batch, nor looks at what it does not need.

A kilobyte of zstd can hold a record with millions of headers, or millions of records. So a batch is unpacked piece by
piece, and a record is stepped over by its length: its headers are not read, and so not checked either.
"""

from __future__ import annotations

import ctypes
import importlib.util
import io
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from semel.errors import CorruptRecords
from semel.records.compression import decompress, too_large
from semel.records.layout import HEADER_BYTES, BatchHeader, as_bytes_view

if TYPE_CHECKING:
    from typing_extensions import Buffer

PIECE_BYTES: Final = 256 << 10
_XERIAL_MAGIC: Final = b"\x82SNAPPY\x00"
_XERIAL_HEADER_BYTES: Final = 16
_GZIP_WBITS: Final = 31
_VARINT_BYTES_MAX: Final = 5
_CODEC_BYTES: Final = 6 << 20
"""Measured: what a codec and Arrow's buffers around it take at first."""

NoteHeld = Callable[[int], None]
"""Hears what a walk takes, each time that a piece has been unpacked."""
ReadPacked = Callable[[int, int], "bytes | memoryview"]
"""Gives up to so many bytes from a place in the packed records of a batch."""


def are_codecs_loaded() -> bool:
    return "pyarrow" in sys.modules


def load_codecs() -> None:
    """Load what unpacks zstd, lz4 and snappy. That takes long, and most brokers never need it.

    An import holds Python's lock while it loads a library, and Arrow's is large: from a cold disk that takes hundreds
    of milliseconds, in which the event loop would stand still. Loaded before as a plain library, it does not.
    """
    found = importlib.util.find_spec("pyarrow")
    if found is not None and found.origin is not None:
        for library in sorted(Path(found.origin).parent.glob("libarrow.*")):
            try:
                ctypes.CDLL(str(library))
            except OSError:  # not a library for this system; the import will tell
                continue
    import pyarrow  # noqa: F401


class WalkedRecord(NamedTuple):
    """One record, as far as it was asked for.

    `key` is empty where keys were not asked for and there is one. `tail` is everything from the key on.
    """

    attributes: int
    timestamp_delta: int
    offset_delta: int
    key: bytes | None
    is_tombstone: bool
    tail: bytes


class RecordWalk:
    """The records of a batch in their order, and None wherever a piece was unpacked and others may have a turn.

    Raises CorruptRecords where the batch is damaged, and RecordTooLarge when it unpacks to more than `bytes_max`.

    >>> from semel.records.layout import read_header
    >>> from semel.records.reference import Record, encode_batch
    >>> batch = memoryview(encode_batch([Record(0, 10, b"key", None), Record(1, 12, None, b"value")]))
    >>> walk = RecordWalk.of_batch(read_header(batch), batch, bytes_max=1000, keys=True)
    >>> [(one.offset_delta, one.timestamp_delta, one.key, one.is_tombstone) for one in walk if one is not None]
    [(0, 0, b'key', True), (1, 2, None, False)]
    """

    def __init__(
        self, header: BatchHeader, read: ReadPacked, *, bytes_max: int, keys: bool = False, tails: bool = False
    ) -> None:
        """`keys` also tells tombstones; `tails` asks for all there is."""
        self._header = header
        self._read = read
        self._bytes_max = bytes_max
        self._keys = keys or tails
        self._tails = tails
        self.unpacked_bytes = 0

    @property
    def held_bytes(self) -> int:
        """What the walk takes at most. zstd's window can be as large as all that it has unpacked."""
        return _CODEC_BYTES + self.unpacked_bytes

    @classmethod
    def of_batch(
        cls, header: BatchHeader, batch: memoryview, *, bytes_max: int, keys: bool = False, tails: bool = False
    ) -> RecordWalk:
        packed = batch[HEADER_BYTES:]
        return cls(header, lambda at, size: packed[at : at + size], bytes_max=bytes_max, keys=keys, tails=tails)

    def __iter__(self) -> Iterator[WalkedRecord | None]:
        header, pieces, keys, tails = self._header, self._pieces(), self._keys, self._tails
        buffer, at, last_delta = b"", 0, -1
        for _ in range(header.record_count):
            while at > len(buffer):  # the record before was stepped over
                at -= len(buffer)
                buffer = self._next(pieces)
                yield None
            while True:
                wanted = 0
                try:
                    length, start = _varint(buffer, at, 32)
                    end = start + length
                    timestamp_delta, position = _varint(buffer, start + 1, 64)
                    offset_delta, position = _varint(buffer, position, 32)
                    key_bytes, key_start = _varint(buffer, position, 32)
                    key_end = key_start + max(key_bytes, 0)
                    if length < 0 or key_bytes < -1 or key_end >= end:
                        raise self._damaged("a length does not fit")
                    is_tombstone = False
                    if keys:
                        wanted = end if tails else min(key_end + _VARINT_BYTES_MAX, end)
                        if wanted > len(buffer):
                            raise IndexError
                        is_tombstone = _varint(buffer, key_end, 32)[0] < 0
                    break
                except IndexError:
                    missing = max(wanted - len(buffer), 1)
                # Not in the handler above: its exception would keep this frame, and the codec, if nobody came back.
                gathered = [buffer[at:]]
                while missing > 0:
                    gathered.append(self._next(pieces))
                    missing -= len(gathered[-1])
                    yield None
                buffer, at = b"".join(gathered), 0
            if not last_delta < offset_delta <= header.last_offset_delta:
                raise self._damaged(f"offset delta {offset_delta} after {last_delta}")
            last_delta = offset_delta
            key = None if key_bytes < 0 else buffer[key_start:key_end] if keys else b""
            tail = buffer[position:end] if tails else b""
            yield WalkedRecord(buffer[start], timestamp_delta, offset_delta, key, is_tombstone, tail)
            at = end
        at -= len(buffer)
        for piece in pieces:
            at -= len(piece)
            yield None
        if at != 0:
            raise self._damaged(f"the records do not end where the last of {header.record_count} does")

    def _next(self, pieces: Iterator[bytes]) -> bytes:
        for piece in pieces:
            return piece
        raise self._damaged("it ends within a record")

    def _damaged(self, what: str) -> CorruptRecords:
        return CorruptRecords(
            f"The batch at offset {self._header.base_offset} is damaged ({what}): none of its records can be trusted."
        )

    # Unpacking

    def _pieces(self) -> Iterator[bytes]:
        for piece in self._unpack(self._header.compression):
            self.unpacked_bytes += len(piece)
            if self.unpacked_bytes > self._bytes_max:
                raise too_large(self._bytes_max)
            yield piece

    def _unpack(self, compression: str) -> Iterator[bytes]:
        if len(self._read(0, 1)) == 0:
            return iter(())  # compaction has emptied it, whatever its codec
        if compression == "none":
            return self._packed()
        if compression == "gzip":
            return self._unpack_gzip()
        if compression == "snappy":
            return self._unpack_snappy()
        return self._unpack_stream(compression)

    def _packed(self) -> Iterator[bytes]:
        at = 0
        while piece := bytes(self._read(at, PIECE_BYTES)):
            at += len(piece)
            yield piece

    def _unpack_gzip(self) -> Iterator[bytes]:
        at, member = 0, zlib.decompressobj(_GZIP_WBITS)
        packed: bytes | memoryview = b""
        try:
            while True:
                if not packed:
                    packed = self._read(at, PIECE_BYTES)
                    at += len(packed)
                if not packed:
                    break
                if member.eof:
                    member = zlib.decompressobj(_GZIP_WBITS)
                    # zlib copies what it leaves: thousands of tiny members would else be quadratic.
                    at -= max(len(packed) - 1024, 0)
                    packed = packed[:1024]
                if piece := member.decompress(packed, PIECE_BYTES):
                    yield piece
                packed = member.unconsumed_tail or member.unused_data
        except zlib.error as error:
            raise self._damaged(f"it does not unpack: {error}") from error
        if not member.eof:
            raise self._damaged("its last member is not whole")

    def _unpack_snappy(self) -> Iterator[bytes]:
        # A block unpacks to twenty times its size at most, and tells its size first.
        if bytes(self._read(0, len(_XERIAL_MAGIC))) != _XERIAL_MAGIC:
            whole = self._read(0, self._header.total_bytes)
            yield from _cut(decompress("snappy", whole, self._bytes_max))
            return
        at = _XERIAL_HEADER_BYTES
        while length := self._read(at, 4):
            size = int.from_bytes(length, "big")
            block = self._read(at + 4, size) if 0 < size < self._header.total_bytes else b""
            if len(block) != size or not block:
                raise self._damaged("its blocks do not fit")
            at += 4 + size
            yield from _cut(decompress("snappy", block, self._bytes_max - self.unpacked_bytes))

    def _unpack_stream(self, compression: str) -> Iterator[bytes]:
        import pyarrow as pa

        try:
            with pa.CompressedInputStream(pa.PythonFile(_PackedFile(self._read), mode="r"), compression) as stream:
                while piece := stream.read(PIECE_BYTES):
                    yield piece
        except (OSError, pa.ArrowException) as error:
            raise self._damaged(f"it does not unpack: {error}") from error


class _PackedFile(io.RawIOBase):
    """The packed records as a file, for Arrow."""

    def __init__(self, read: ReadPacked) -> None:
        self._read = read
        self._at = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        data = bytes(self._read(self._at, size))
        self._at += len(data)
        return data


def _cut(unpacked: Buffer) -> Iterator[bytes]:
    view = as_bytes_view(unpacked)
    for at in range(0, len(view), PIECE_BYTES):
        yield bytes(view[at : at + PIECE_BYTES])


def _varint(buffer: bytes, at: int, bits: int) -> tuple[int, int]:
    """A zigzag number and where it ends. Raises IndexError where the buffer is too short."""
    byte = buffer[at]
    at += 1
    if byte < 0x80:
        return (byte >> 1) ^ -(byte & 1), at
    result = byte & 0x7F
    for shift in range(7, bits, 7):
        byte = buffer[at]
        at += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            if result >> bits:
                break
            return (result >> 1) ^ -(result & 1), at
    raise CorruptRecords(f"A batch holds a number of more than {bits} bits: it is damaged.")
