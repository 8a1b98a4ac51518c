"""Kafka's zigzag varints for whole arrays at once.

A varint travels as a little-endian 64-bit word that holds its bytes, and its width in bytes. Eight bytes carry 56 bits:
enough for every length and offset, and for time differences of a million years. The codecs leave anything longer to the
reference codec.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
Words: TypeAlias = npt.NDArray[np.uint64]
Integers: TypeAlias = npt.NDArray[np.int64]

WORD_VALUE_MAX = 2**56 - 1

_ONE = np.uint64(1)
_SEVEN = np.uint64(7)
_PAYLOAD = np.uint64(0x7F7F_7F7F_7F7F_7F7F)
_STOPS = np.uint64(0x8080_8080_8080_8080)
_BYTE_ONES = np.uint64(0x0101_0101_0101_0101)


class NotVectorisable(Exception):
    """The data is damaged or so unusual that the reference codec has to judge it."""


_OFFSETS_CACHED = 65536


def read_varint(data: bytes, position: int, *, bits: int) -> tuple[int, int]:
    """One signed number and the position after it; raises NotVectorisable for what the reference codec refuses."""
    result = shift = 0
    for byte in data[position : position + (bits + 6) // 7]:
        position += 1
        if byte < 0x80:
            result |= byte << shift
            if result >> bits:
                break
            return (result >> 1) ^ -(result & 1), position
        result |= (byte & 0x7F) << shift
        shift += 7
    raise NotVectorisable


def gather_words(data: Bytes, positions: Integers) -> Words:
    """The eight bytes from each position on, as one word each; bytes beyond the end read as zero.

    Positions must not fall, and none may lie beyond the end.
    """
    whole = max(len(data) - 7, 0)
    if len(positions) == 0 or positions[-1] < whole:
        return np.ndarray((whole,), "<u8", data, 0, (1,))[positions]
    # Only the last few positions can reach over the end: these are read from a padded copy of the tail.
    cut = int(np.searchsorted(positions, whole))
    tail = np.zeros(len(data) - whole + 8, np.uint8)
    tail[: len(data) - whole] = data[whole:]
    words = np.empty(len(positions), np.uint64)
    if cut:
        words[:cut] = np.ndarray((whole,), "<u8", data, 0, (1,))[positions[:cut]]
    words[cut:] = np.ndarray((len(tail) - 7,), "<u8", tail, 0, (1,))[positions[cut:] - whole]
    return words


def read_varints(words: Words) -> tuple[Words, Integers | int]:
    """Value (before zigzag) and width of the varint at the low end of each word; a width that all share is one number.

    Raises NotVectorisable if one has more than eight bytes.
    """
    longer = np.count_nonzero(words & np.uint64(0x80))
    if longer == 0:
        return words & np.uint64(0x7F), 1
    if longer == len(words) and not np.count_nonzero(words & np.uint64(0x8000)):
        return words & np.uint64(0x7F) | words >> _ONE & np.uint64(0x3F80), 2
    if not np.count_nonzero(words & np.uint64(0x8080) == np.uint64(0x8080)):
        more = words >> _SEVEN & _ONE
        second = (words >> np.uint64(8) & np.uint64(0x7F)) * more
        return words & np.uint64(0x7F) | second << _SEVEN, (more + _ONE).view(np.int64)
    stops = ~words & _STOPS
    if not stops.all():
        raise NotVectorisable
    lowest = stops & (~stops + _ONE)
    upto = lowest ^ (lowest - _ONE)
    widths = ((upto & _BYTE_ONES) * _BYTE_ONES >> np.uint64(56)).view(np.int64)
    return join_septets(words & upto & _PAYLOAD), widths


def join_septets(payload: Words) -> Words:
    """Close the gaps that the continuation bits leave: eight groups of seven bits become one number."""
    pairs = payload & np.uint64(0x007F_007F_007F_007F) | payload >> _ONE & np.uint64(0x3F80_3F80_3F80_3F80)
    fours = pairs & np.uint64(0x0000_3FFF_0000_3FFF) | pairs >> np.uint64(2) & np.uint64(0x0FFF_C000_0FFF_C000)
    return fours & np.uint64(0x0FFF_FFFF) | fours >> np.uint64(4) & np.uint64(0x00FF_FFFF_F000_0000)


def unzigzag(values: Words) -> Integers:
    """Signed numbers from their zigzag form."""
    if not np.count_nonzero(values & _ONE):
        return (values >> _ONE).view(np.int64)
    return (values >> _ONE).view(np.int64) ^ -(values & _ONE).view(np.int64)


def unzigzag_bytes(values: Bytes) -> Integers:
    """Signed numbers from their zigzag form in one byte each."""
    halves = values >> 1
    signs = values & 1
    if np.count_nonzero(signs):
        return (halves.view(np.int8) ^ -signs.view(np.int8)).astype(np.int64)
    return halves.astype(np.int64)


def zigzag(values: Integers) -> Words:
    """The zigzag form of signed numbers."""
    return (values << np.int64(1) ^ values >> np.int64(63)).view(np.uint64)


def write_varints(values: Words) -> tuple[Words, Integers | int]:
    """Word and width of each value (in zigzag form, at most WORD_VALUE_MAX); a width that all share is one number."""
    highest = int(values.max()) if len(values) else 0
    if highest < 0x80:
        return values, 1
    words = values & np.uint64(0x7F)
    widths = np.ones(len(values), np.int64)
    rest = values >> _SEVEN
    shift = 8
    while highest >> 7:
        more = rest > 0
        widths += more
        words |= more.astype(np.uint64) << np.uint64(shift - 1)
        words |= (rest & np.uint64(0x7F)) << np.uint64(shift)
        rest >>= _SEVEN
        highest >>= 7
        shift += 8
    first = int(widths[0])
    return words, first if (widths == first).all() else widths


@cache
def _cached_offset_delta_varints() -> tuple[Words, Integers]:
    words, widths = write_varints(zigzag(np.arange(_OFFSETS_CACHED, dtype=np.int64)))
    assert not isinstance(widths, int)
    words.flags.writeable = False
    widths.flags.writeable = False
    return words, widths


def offset_delta_varints(count: int) -> tuple[Words, Integers]:
    """Words and widths of the offset deltas from 0 to before `count`."""
    if count <= _OFFSETS_CACHED:
        words, widths = _cached_offset_delta_varints()
        return words[:count], widths[:count]
    words, widths = write_varints(zigzag(np.arange(count, dtype=np.int64)))
    assert not isinstance(widths, int)
    return words, widths


@lru_cache(maxsize=16)
def _moved_offset_delta_words(moved_bytes: int) -> Words:
    words = move_bytes(_cached_offset_delta_varints()[0], moved_bytes)
    words.flags.writeable = False
    return words


def offset_delta_words(first: int, end: int, moved_bytes: int = 0) -> Words:
    """Words of the offset deltas from `first` to before `end`, moved up by some bytes, or down by minus that."""
    if end <= _OFFSETS_CACHED:
        return _moved_offset_delta_words(moved_bytes)[first:end]
    return move_bytes(write_varints(zigzag(np.arange(first, end, dtype=np.int64)))[0], moved_bytes)


def move_bytes(words: Words, byte_count: int) -> Words:
    """The words moved up by some bytes, or down by minus that."""
    if not -8 < byte_count < 8:
        return np.zeros(len(words), np.uint64)
    return words << np.uint64(8 * byte_count) if byte_count >= 0 else words >> np.uint64(-8 * byte_count)


def read_column(words: Words, width: int) -> Integers:
    """The signed numbers in the low `width` bytes of each word."""
    if width == 1:
        return unzigzag(words & np.uint64(0x7F))
    if width == 2:
        return unzigzag(words & np.uint64(0x7F) | words >> _ONE & np.uint64(0x3F80))
    return unzigzag(join_septets(words & np.uint64(0x7F7F_7F7F_7F7F_7F7F >> 8 * (8 - width))))


@lru_cache(maxsize=1024)
def opaque(size: int) -> np.dtype[Any]:
    """Elements of `size` bytes without a meaning, which NumPy copies with one memmove each."""
    return np.dtype((np.void, size))
