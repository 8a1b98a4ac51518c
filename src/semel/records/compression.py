"""The codecs of a record batch, with a bound on what unpacking may cost.

Each writer produces what the Java client's reader accepts, always the same bytes for the same input. Each reader
accepts what the Java client, librdkafka and this module write. A size that a format declares is checked against the
bound before anything is allocated; where a format declares none, unpacking goes piece by piece and stops at the bound.
"""
# pyarrow comes without types, so what it returns is unknown to the checker.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

import zlib
from functools import cache
from typing import TYPE_CHECKING

from semel.errors import ConfigError, CorruptRecords, RecordTooLarge
from semel.records.layout import COMPRESSION_NAMES, as_bytes_view

if TYPE_CHECKING:
    import pyarrow as pa
    from typing_extensions import Buffer

# Kafka's default message.max.bytes is 1 MB; 128 MiB leaves room for a compression of two orders of magnitude and for
# topics with much larger batches, and a small container can still unpack several batches at once.
DECOMPRESSED_BYTES_MAX = 128 * 1024 * 1024

HEADER_MEMORY_BYTES = 128
"""What a header may take while it is decoded: two bytes in a batch can be a whole header.

Measured at the peak of a reader, for a million empty ones: 70 bytes each, and 126 if the reference codec decodes them.
"""

# A whole batch of the default size comes out in one piece, which then need not be joined to others.
_PIECE_BYTES = 1024 * 1024 + 65536

_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER = _XERIAL_MAGIC + b"\x00\x00\x00\x01" * 2  # version, oldest compatible version
_XERIAL_BLOCK_BYTES = 32 * 1024

# Version 01, independent blocks, no checksums, no content size; blocks of 64 KiB; and the checksum byte of these two.
# Java's reader refuses linked blocks, and Arrow's own frame writer links them above 64 KiB.
_LZ4_HEADER = b"\x04\x22\x4d\x18\x60\x40\x82"
_LZ4_BLOCK_BYTES = 64 * 1024
_LZ4_STORED_BIT = 0x8000_0000
_LZ4_END = b"\x00\x00\x00\x00"

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

_GZIP_WBITS = (
    31  # zlib's way to say: gzip framing, largest window; it writes no time stamp, so the bytes are repeatable
)
_LEVELS = {"gzip": range(1, 10), "zstd": range(-7, 23)}


def check_compression(compression: str, level: int | None = None) -> None:
    """Raise ConfigError for a codec that Kafka does not have or a level that the codec does not have."""
    if compression not in COMPRESSION_NAMES:
        raise ConfigError(f"compression {compression!r} is unknown; Kafka has {', '.join(COMPRESSION_NAMES)}.")
    if level is None:
        return
    levels = _LEVELS.get(compression)
    if levels is None:
        raise ConfigError(f"compression_level is only for gzip and zstd, not for {compression}; leave it out.")
    if level not in levels:
        raise ConfigError(f"compression_level {level} is outside of {compression}'s {levels[0]} to {levels[-1]}.")


def compress(compression: str, data: Buffer, level: int | None = None) -> Buffer:
    """Pack `data`; the same input always gives the same bytes."""
    if compression == "none":
        return data
    if compression == "gzip":
        return zlib.compress(data, -1 if level is None else level, wbits=_GZIP_WBITS)
    if compression == "snappy":
        return _compress_snappy(as_bytes_view(data))
    if compression == "lz4":
        return _compress_lz4(as_bytes_view(data))
    return _codec("zstd", level).compress(data)


def decompress(compression: str, data: Buffer, bytes_max: int = DECOMPRESSED_BYTES_MAX) -> Buffer:
    """Unpack `data` into at most `bytes_max` bytes.

    Raises RecordTooLarge beyond the bound and CorruptRecords for anything that is not what the codec writes.
    """
    view = as_bytes_view(data)
    if compression == "none":
        return view
    try:
        if compression == "gzip":
            return _decompress_gzip(view, bytes_max)
        return _decompress_with_arrow(compression, view, bytes_max)
    except (zlib.error, OSError) as error:
        raise _undone(compression, error) from error


def _decompress_with_arrow(compression: str, view: memoryview, bytes_max: int) -> Buffer:
    import pyarrow as pa  # here and not above: a broker packs and unpacks nothing until it compacts

    try:
        if compression == "snappy":
            return _decompress_snappy(view, bytes_max)
        if compression == "zstd":
            return _decompress_zstd(view, bytes_max)
        return _decompress_stream("lz4", view, bytes_max)
    except pa.ArrowException as error:
        raise _undone(compression, error) from error


def _undone(compression: str, error: Exception) -> CorruptRecords:
    return CorruptRecords(
        f"The records of a batch do not unpack as {compression} ({error}): the batch is damaged and cannot be read."
    )


@cache
def _codec(name: str, level: int | None = None) -> pa.Codec:
    import pyarrow as pa

    return pa.Codec(name, compression_level=level)


def too_large(bytes_max: int) -> RecordTooLarge:
    """For a batch beyond the bound. A client has the bound from a setting of the same name."""
    return RecordTooLarge(
        f"A compressed batch unpacks to more than {bytes_max} bytes of memory and was refused unread. If the topic "
        "really holds batches of that size, raise fetch.decompressed.max.bytes."
    )


def headers_max(bytes_max: int) -> int:
    """How many headers the records of a batch may have altogether."""
    return bytes_max // HEADER_MEMORY_BYTES


def too_many_headers(bytes_max: int) -> RecordTooLarge:
    """For a batch whose headers alone are beyond the bound."""
    return RecordTooLarge(
        f"The records of a batch have more than {headers_max(bytes_max)} headers, which take more than {bytes_max} "
        "bytes of memory, and the batch was refused. If the topic really holds batches with so many, raise "
        "fetch.decompressed.max.bytes."
    )


def _damaged(compression: str) -> CorruptRecords:
    return CorruptRecords(
        f"The records of a batch are not a whole {compression} block: the batch is damaged and cannot be read."
    )


def _compress_snappy(view: memoryview) -> bytes:
    codec = _codec("snappy")
    pieces: list[bytes] = [_XERIAL_HEADER]
    for start in range(0, len(view), _XERIAL_BLOCK_BYTES):
        block = codec.compress(view[start : start + _XERIAL_BLOCK_BYTES], asbytes=True)
        pieces += (len(block).to_bytes(4, "big"), block)
    return b"".join(pieces)


def _compress_lz4(view: memoryview) -> bytes:
    codec = _codec("lz4_raw")
    pieces: list[bytes | memoryview] = [_LZ4_HEADER]
    for start in range(0, len(view), _LZ4_BLOCK_BYTES):
        plain = view[start : start + _LZ4_BLOCK_BYTES]
        block = codec.compress(plain, asbytes=True)
        if len(block) < len(plain):
            pieces += (len(block).to_bytes(4, "little"), block)
        else:
            pieces += ((len(plain) | _LZ4_STORED_BIT).to_bytes(4, "little"), plain)
    pieces.append(_LZ4_END)
    return b"".join(pieces)


def _decompress_gzip(view: memoryview, bytes_max: int) -> Buffer:
    pieces: list[bytes] = []
    room = bytes_max
    position = 0
    feed_bytes = len(view)
    while position < len(view) or not pieces:
        # A fresh object for each member. Input after the first member is fed in growing portions, because zlib copies
        # what it did not use: with thousands of tiny members that would be quadratic.
        member = zlib.decompressobj(_GZIP_WBITS)
        while not member.eof:
            portion = member.unconsumed_tail or view[position : position + feed_bytes]
            if not portion:
                raise _damaged("gzip")
            if portion is not member.unconsumed_tail:
                position += len(portion)
                feed_bytes *= 2
            piece = member.decompress(portion, room + 1)
            room -= len(piece)
            if room < 0:
                raise too_large(bytes_max)
            pieces.append(piece)
        position -= len(member.unused_data)
        feed_bytes = 1024
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _decompress_snappy(view: memoryview, bytes_max: int) -> Buffer:
    if bytes(view[: len(_XERIAL_MAGIC)]) != _XERIAL_MAGIC:
        return _decompress_snappy_block(view, bytes_max, bytes_max)
    if len(view) < len(_XERIAL_HEADER):
        raise _damaged("snappy")
    pieces: list[Buffer] = []
    room = bytes_max
    position = len(_XERIAL_HEADER)
    while position < len(view):
        start = position + 4
        position = start + int.from_bytes(view[position:start], "big")
        if position > len(view) or position <= start:
            raise _damaged("snappy")
        block = _decompress_snappy_block(view[start:position], room, bytes_max)
        room -= len(block)
        pieces.append(block)
    return b"".join(pieces)


def _decompress_snappy_block(view: memoryview, room: int, bytes_max: int) -> pa.Buffer:
    size = 0
    for index, byte in enumerate(view[:5]):
        size |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            break
    else:
        raise _damaged("snappy")
    if size > room:
        raise too_large(bytes_max)
    return _codec("snappy").decompress(view, decompressed_size=size)


def _decompress_zstd(view: memoryview, bytes_max: int) -> Buffer:
    size = _zstd_content_bytes(view, bytes_max)
    if size is not None:
        try:
            return _codec("zstd").decompress(view, decompressed_size=size)
        except OSError:
            # Several frames in a row do not fit into the size of the first; the stream below tells them from damage.
            return _decompress_stream("zstd", view, bytes_max)
    return _decompress_stream("zstd", view, bytes_max)


def _zstd_content_bytes(view: memoryview, bytes_max: int) -> int | None:
    """The size that the first frame declares, if it does; refuses what would need more memory than the bound."""
    if bytes(view[:4]) != _ZSTD_MAGIC or len(view) < 18:
        return None
    descriptor = view[4]
    single_segment = bool(descriptor & 0x20)
    position = 5 if single_segment else 6
    if not single_segment:
        window_base = 1 << (10 + (view[5] >> 3))
        if window_base + (window_base >> 3) * (view[5] & 7) > max(bytes_max, 1024):
            raise too_large(bytes_max)
    position += (0, 1, 2, 4)[descriptor & 3]
    width = (1 if single_segment else 0, 2, 4, 8)[descriptor >> 6]
    if width == 0:
        return None
    size = int.from_bytes(view[position : position + width], "little") + (256 if width == 2 else 0)
    if size > bytes_max:
        raise too_large(bytes_max)
    return size


def _decompress_stream(name: str, view: memoryview, bytes_max: int) -> Buffer:
    import pyarrow as pa

    stream = pa.CompressedInputStream(pa.BufferReader(view), name)
    pieces: list[bytes] = []
    room = bytes_max
    while piece := stream.read(min(_PIECE_BYTES, room + 1)):
        room -= len(piece)
        if room < 0:
            raise too_large(bytes_max)
        pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
