"""Copying many byte strings of different lengths in one call.

Arrow's conversion from `binary_view` to `binary` is a gather in C++: each view names a length and where the bytes are,
in one of several buffers, or holds them itself when there are at most twelve. So an array of views made by NumPy over
any buffers becomes one contiguous run of bytes.
"""
# pyarrow comes without types, so what it returns is unknown to the checker.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from semel.records.layout import as_bytes_view
from semel.records.varints import Bytes, Integers, gather_words

INLINE_BYTES_MAX = 12
POSITION_MAX = 2**31 - 1  # views count in 32 bits

Views = npt.NDArray[np.uint32]  # one row of four for each view: length, then bytes or (prefix, buffer, position)


def fill_views(views: Views, buffer_index: int, data: Bytes, positions: Integers, lengths: Integers) -> None:
    """Let `views` name `lengths` bytes at rising `positions` of `data`, which is buffer number `buffer_index`."""
    views[:, 0] = lengths
    shortest = int(lengths.min()) if len(lengths) else 0
    if shortest > INLINE_BYTES_MAX:
        views[:, 2] = buffer_index
        views[:, 3] = positions
        return
    longest = int(lengths.max()) if len(lengths) else 0
    if longest <= INLINE_BYTES_MAX:
        _fill_inline(views, data, positions, longest)
        return
    views[:, 2] = buffer_index
    views[:, 3] = positions
    small = np.flatnonzero(lengths <= INLINE_BYTES_MAX)
    inline = np.empty((len(small), 4), np.uint32)
    inline[:, 0] = lengths[small]
    _fill_inline(inline, data, positions[small], INLINE_BYTES_MAX)
    views[small] = inline


def _fill_inline(views: Views, data: Bytes, positions: Integers, longest: int) -> None:
    if longest == 0:
        return
    words = gather_words(data, positions)
    views[:, 1] = words
    views[:, 2] = words >> np.uint64(32)
    if longest > 8:
        # A position of the second word may lie beyond the end for a string of eight bytes or less.
        views[:, 3] = gather_words(data, np.minimum(positions + 8, len(data)))


def gather_binary(data: Bytes, positions: Integers, lengths: Integers) -> pa.BinaryArray:
    """A binary array of the given slices of `data`, null where the length is -1."""
    count = len(lengths)
    shortest = int(lengths.min()) if count else 0
    if 0 < shortest <= 8 and shortest == int(lengths.max()):
        return _gather_short(data, positions, shortest)
    views = np.empty((count, 4), np.uint32)
    present = None
    if shortest < 0:
        present = lengths >= 0
        lengths = np.where(present, lengths, 0)
    fill_views(views, 0, data, positions, lengths)
    gathered = _copy_views(views, [data])
    if present is None:
        return gathered
    validity = pa.py_buffer(np.packbits(present, bitorder="little"))
    return pa.Array.from_buffers(pa.binary(), count, [validity, *gathered.buffers()[1:]])


def _gather_short(data: Bytes, positions: Integers, length: int) -> pa.BinaryArray:
    """Strings of one length that fit into a word."""
    words = gather_words(data, positions)
    content = words if length == 8 else np.ascontiguousarray(words.view(np.uint8).reshape(-1, 8)[:, :length])
    offsets = np.arange(0, length * len(words) + 1, length, dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), len(words), [None, pa.py_buffer(offsets), pa.py_buffer(content)])


def join_views(views: Views, buffers: list[Bytes]) -> memoryview:
    """The bytes of all views, one after another."""
    joined = _copy_views(views, buffers).buffers()[2]
    return memoryview(b"") if joined is None else as_bytes_view(joined)


def _takes_view_buffers() -> bool:
    """Whether this pyarrow makes arrays of views over buffers that it is given; old ones do not."""
    try:
        pa.Array.from_buffers(pa.binary_view(), 0, [None, pa.py_buffer(b""), pa.py_buffer(b"")])
    except ValueError:
        return False
    return True


_TAKES_VIEW_BUFFERS = _takes_view_buffers()


def _copy_views(views: Views, buffers: list[Bytes]) -> pa.BinaryArray:
    """The strings that the views name, as a plain binary array."""
    if not _TAKES_VIEW_BUFFERS:
        return _copy_views_by_take(views, buffers)
    sources = [pa.py_buffer(buffer) for buffer in buffers]
    return pa.Array.from_buffers(pa.binary_view(), len(views), [None, pa.py_buffer(views), *sources]).cast(pa.binary())


def _copy_views_by_take(views: Views, buffers: list[Bytes]) -> pa.BinaryArray:
    """The same for old pyarrows: all buffers become one, and the strings and gaps in it one array to take from."""
    count = len(views)
    if count == 0:
        return pa.nulls(0, pa.binary())
    lengths = views[:, 0].astype(np.int64)
    inline = lengths <= INLINE_BYTES_MAX
    # The views themselves come first: they hold the short strings, four bytes into each view of sixteen.
    parts = [np.ascontiguousarray(views).reshape(-1).view(np.uint8), *buffers]
    bases = np.cumsum([0, *(len(part) for part in parts)])
    source = np.where(inline, 0, views[:, 2].astype(np.int64) + 1)
    starts = bases[source] + np.where(inline, 16 * np.arange(count) + 4, views[:, 3])
    # Within each source they rise, so sorted by source they all do, as the offsets of an array must.
    order = np.argsort(source, kind="stable")
    offsets = np.empty(2 * count, np.int64)
    offsets[0::2] = starts[order]
    offsets[1::2] = starts[order] + lengths[order]
    strings_and_gaps = pa.Array.from_buffers(
        pa.large_binary(), 2 * count - 1, [None, pa.py_buffer(offsets), pa.py_buffer(np.concatenate(parts))]
    )
    chosen = np.empty(count, np.int64)
    chosen[order] = 2 * np.arange(count)
    return strings_and_gaps.take(pa.array(chosen)).cast(pa.binary())
