"""Decode batches whose records come in runs of equal shape: a few strided copies for each run.

If a record has the lengths of the one before and the varints in it the same widths, each field lies at the same place in
it. So one record is read, and how many of the following share its shape is found by comparing, for all of them at once,
the bytes that make up the shape. Nothing is assumed: a record belongs to the run only if all these bytes are equal.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from semel.records.varints import (
    Bytes,
    Integers,
    NotVectorisable,
    Words,
    join_septets,
    offset_delta_words,
    read_varint,
    unzigzag,
)

_RUN_WORTHWHILE = 24  # records; a shorter run costs more in NumPy calls than it saves
_LOOK_AHEAD = 8  # records
_HEAD_SAMPLE_BYTES = 64
_SHORT_RUNS_MAX = 3  # so many short runs in a row, and the batch counts as ragged


@dataclass(frozen=True, slots=True)
class Shape:
    """Where the fields of a record lie, counted from the first byte of its length; lengths are -1 for null."""

    stride: int
    deltas_position: int
    timestamp_width: int
    offset_width: int
    key_position: int
    key_length: int
    value_length_position: int
    value_position: int
    value_length: int
    length_bytes: bytes

    def head_masks(self) -> tuple[np.uint64, ...]:
        """Which bits of the first 8 or 16 bytes make up the shape: the lengths, and where the deltas end."""
        deltas_end = self.deltas_position + self.timestamp_width + self.offset_width
        lengths = (1 << 8 * self.key_position) - (1 << 8 * deltas_end) | (1 << 8 * (self.deltas_position - 1)) - 1
        ends = 0x8080_8080_8080_8080_8080_8080_8080_8080 & (1 << 8 * deltas_end) - (1 << 8 * self.deltas_position)
        low, high = (lengths | ends) & 0xFFFF_FFFF_FFFF_FFFF, (lengths | ends) >> 64
        return (np.uint64(low),) if self.key_position <= 8 else (np.uint64(low), np.uint64(high))


@dataclass(frozen=True, slots=True)
class Run:
    """`count` records of one shape, the first at `start`; `deltas` has each one's two deltas at its low end."""

    start: int
    count: int
    shape: Shape
    deltas: Words


def read_runs(data: Bytes, count: int) -> list[Run] | None:
    """The records of `data` as runs of equal shape that fill it exactly.

    None if they are too ragged for that or have headers; raises NotVectorisable if they are damaged or otherwise odd.
    """
    runs: list[Run] = []
    position = short_runs = 0
    while count:
        shape = _read_shape(data, position)
        if shape is None:
            return None
        run = _measure_run(data, position, shape, min(count, (len(data) - position) // shape.stride))
        short_runs = short_runs + 1 if run.count < min(_RUN_WORTHWHILE, count) else 0
        if short_runs > _SHORT_RUNS_MAX:
            return None
        runs.append(run)
        count -= run.count
        position += run.count * shape.stride
    if position != len(data):
        raise NotVectorisable
    return runs


def _read_shape(data: Bytes, start: int) -> Shape | None:
    """The shape of the record at `start`, or None if it has headers or not the room that a run needs."""
    head = data[start : start + _HEAD_SAMPLE_BYTES].tobytes()
    length, body = read_varint(head, 0, bits=32)
    stride = body + length
    if length < 0 or start + stride > len(data):
        raise NotVectorisable
    deltas = body + 1
    _, after_timestamp = read_varint(head, deltas, bits=64)
    _, after_offset = read_varint(head, after_timestamp, bits=32)
    key_length, key = read_varint(head, after_offset, bits=32)
    value_length_position = key + max(key_length, 0)
    if value_length_position + 5 > len(head):
        # The key is long; its end may also be that of the data.
        value_length, width = read_varint(data[start + value_length_position :][:5].tobytes(), 0, bits=32)
        value = value_length_position + width
    else:
        value_length, value = read_varint(head, value_length_position, bits=32)
    last = value + max(value_length, 0)
    if key_length < -1 or value_length < -1 or last >= stride:
        raise NotVectorisable
    head_bytes = 8 if key <= 8 else 16
    if last != stride - 1 or data[start + last] != 0 or not key <= head_bytes <= stride or after_offset - deltas > 8:
        return None
    return Shape(
        stride=stride,
        deltas_position=deltas,
        timestamp_width=after_timestamp - deltas,
        offset_width=after_offset - after_timestamp,
        key_position=key,
        key_length=key_length,
        value_length_position=value_length_position,
        value_position=value,
        value_length=value_length,
        length_bytes=head[:body],
    )


def _measure_run(data: Bytes, start: int, shape: Shape, most: int) -> Run:
    """How many records from `start` on, at most `most`, have the shape of the first."""
    stride = shape.stride
    # A look at one record not far off: where sizes differ, comparing them all would be wasted.
    look = start + stride * min(most - 1, _LOOK_AHEAD)
    if data[look : look + len(shape.length_bytes)].tobytes() != shape.length_bytes:
        most = min(most, _LOOK_AHEAD)
    count = most
    heads: list[Words] = []
    for position, mask in zip((start, start + 8), shape.head_masks(), strict=False):
        head = np.ndarray((count,), "<u8", data, position, (stride,)).copy()
        count = _count_zero((head ^ head[0]) & mask)
        heads.append(head)
    for position in (*range(start + shape.value_length_position, start + shape.value_position), start + stride - 1):
        count = _count_zero(data[position : position + stride * (count - 1) + 1 : stride] ^ data[position])
    shift = 8 * shape.deltas_position
    deltas = heads[0][:count] >> np.uint64(shift)
    if len(heads) > 1:
        deltas |= heads[1][:count] << np.uint64(64 - shift)
    return Run(start, count, shape, deltas)


def _count_zero(differences: Words | Bytes) -> int:
    """How many of the first elements are zero."""
    return int((differences != 0).argmax()) if np.count_nonzero(differences) else len(differences)


def read_timestamp_deltas(runs: list[Run]) -> Integers:
    return np.concatenate([_column(run.deltas, run.shape.timestamp_width) for run in runs])


def offsets_have_gaps(runs: list[Run]) -> bool:
    """Whether the offset deltas are anything but the row numbers; only compaction leaves gaps."""
    row = 0
    for run in runs:
        expected = offset_delta_words(row, row + run.count)
        bits = np.uint64(((1 << 8 * run.shape.offset_width) - 1) << 8 * run.shape.timestamp_width)
        if expected is None or np.count_nonzero((run.deltas ^ expected << np.uint64(8 * run.shape.timestamp_width)) & bits):
            return True
        row += run.count
    return False


def read_offset_deltas(runs: list[Run]) -> Integers:
    return np.concatenate(
        [_column(run.deltas >> np.uint64(8 * run.shape.timestamp_width), run.shape.offset_width) for run in runs]
    )


def _column(words: Words, width: int) -> Integers:
    """The signed numbers in the low `width` bytes of each word."""
    if width == 1:
        return unzigzag(words & np.uint64(0x7F))
    if width == 2:
        return unzigzag(words & np.uint64(0x7F) | words >> np.uint64(1) & np.uint64(0x3F80))
    return unzigzag(join_septets(words & np.uint64(0x7F7F_7F7F_7F7F_7F7F >> 8 * (8 - width))))


def copy_keys(data: Bytes, runs: list[Run]) -> pa.BinaryArray:
    return _copy_strings(
        data,
        [(run.start + run.shape.key_position, run.shape.stride, run.count, run.shape.key_length) for run in runs],
    )


def copy_values(data: Bytes, runs: list[Run]) -> pa.BinaryArray:
    return _copy_strings(
        data,
        [(run.start + run.shape.value_position, run.shape.stride, run.count, run.shape.value_length) for run in runs],
    )


def _copy_strings(data: Bytes, parts: list[tuple[int, int, int, int]]) -> pa.BinaryArray:
    """One array of all strings; each part is (first position, distance, count, length), with length -1 for nulls."""
    row_count = sum(count for _, _, count, _ in parts)
    buffer = pa.allocate_buffer(sum(count * max(length, 0) for _, _, count, length in parts))
    target: Bytes = np.frombuffer(buffer, np.uint8)
    offsets = np.empty(row_count + 1, np.int32)
    row = filled = 0
    for position, stride, count, length in parts:
        if length > 0:
            # As opaque elements of `length` bytes NumPy copies them with one memmove each.
            kind = np.dtype((np.void, length))
            np.ndarray((count,), kind, target, filled)[:] = np.ndarray((count,), kind, data, position, (stride,))
            offsets[row : row + count] = np.arange(filled, filled + length * count, length, np.int32)
        else:
            offsets[row : row + count] = filled
        row += count
        filled += max(length, 0) * count
    offsets[row_count] = filled
    validity = None
    if any(length < 0 for _, _, _, length in parts):
        present = np.repeat([length >= 0 for _, _, _, length in parts], [count for _, _, count, _ in parts])
        validity = pa.py_buffer(np.packbits(present, bitorder="little"))
    return pa.Array.from_buffers(pa.binary(), row_count, [validity, pa.py_buffer(offsets), buffer])
