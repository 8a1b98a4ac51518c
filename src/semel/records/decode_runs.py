"""Decode batches whose records come in runs of equal shape: a few strided copies for each run.

If a record has the lengths of the one before and the varints in it the same widths, each field lies at the same place
in it. So one record is read, and how many of the following share its shape is found by comparing, for all of them at
once, the bytes that make up the shape. Nothing is assumed: a record belongs to the run only if all these are equal.
"""
# pyarrow comes without types, so what it returns is unknown to the checker.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from semel.records.varints import (
    Bytes,
    Integers,
    NotVectorisable,
    Words,
    offset_delta_words,
    opaque,
    read_column,
    read_varint,
    unzigzag_bytes,
)

_RUN_WORTHWHILE = 24  # records; a shorter run costs more in NumPy calls than it saves
_SHORT_RUNS_MAX = 3  # so many short runs in a row, and the batch counts as ragged
_LOOK_AHEAD = 8  # records
_HEAD_SAMPLE_BYTES = 64
_OFFSET_WIDTH_CHANGES = (64, 8192)  # rows at which the offset delta needs one more byte, if none are missing


class Shape(NamedTuple):
    """Where the fields of a record lie, counted from the first byte of its length; lengths are -1 for null."""

    stride: int
    deltas_position: int
    timestamp_width: int
    offset_width: int
    key_position: int
    key_length: int
    value_length_position: int
    value_length_width: int
    value_length: int

    @property
    def value_position(self) -> int:
        return self.value_length_position + self.value_length_width


Column = tuple[int, int, int, int]  # strings at equal distances: first position, distance, count, length or -1 for null


class Layout(NamedTuple):
    """Number and bytes of some strings, and their Arrow offsets and validity."""

    row_count: int
    size: int
    offsets: pa.Buffer
    validity: pa.Buffer | None


@dataclass(slots=True)
class Run:
    """`count` records of one shape, the first at `start`.

    `low` and `high` are the first eight bytes of each and the eight after, from `lead` bytes before the record on.
    """

    start: int
    count: int
    shape: Shape
    lead: int
    low: Words
    high: Words | None

    def deltas(self) -> Words:
        """Words with the two deltas of each record at their low end."""
        shift = 8 * (self.lead + self.shape.deltas_position)
        deltas = self.low[: self.count] >> np.uint64(shift)
        return deltas if self.high is None else deltas | self.high[: self.count] << np.uint64(64 - shift)


@dataclass(slots=True)
class Runs:
    """All records of a batch; without gaps the offset deltas are the row numbers."""

    data: Bytes
    row_count: int
    runs: list[Run]
    have_gaps: bool

    def timestamp_deltas(self) -> Integers:
        if all(run.shape.timestamp_width == 1 for run in self.runs):
            # As bytes out of the words, which is an eighth of the work.
            columns = [
                run.low.view(np.uint8)[run.lead + run.shape.deltas_position :: 8][: run.count] for run in self.runs
            ]
            return unzigzag_bytes(np.concatenate(columns))
        return np.concatenate([read_column(run.deltas(), run.shape.timestamp_width) for run in self.runs])

    def offset_deltas(self) -> Integers:
        return np.concatenate(
            [
                read_column(run.deltas() >> np.uint64(8 * run.shape.timestamp_width), run.shape.offset_width)
                for run in self.runs
            ]
        )

    def copy_keys(self) -> pa.BinaryArray:
        columns = [
            (run.start + run.shape.key_position, run.shape.stride, run.count, run.shape.key_length) for run in self.runs
        ]
        return copy_strings(self.data, columns, layout_of(columns))

    def copy_values(self) -> pa.BinaryArray:
        columns = [
            (run.start + run.shape.value_position, run.shape.stride, run.count, run.shape.value_length)
            for run in self.runs
        ]
        return copy_strings(self.data, columns, layout_of(columns))


def read_runs(data: Bytes, count: int) -> Runs | None:
    """The records of `data` as runs of equal shape that fill it exactly.

    None if they are too ragged for that or have headers; raises NotVectorisable if they are damaged or otherwise odd.
    """
    runs: list[Run] = []
    position = row = short_runs = 0
    have_gaps = False
    while row < count:
        shape, offset_delta = read_shape(data, position)
        if shape is None:
            return None
        have_gaps = have_gaps or offset_delta != row
        # Where the offset delta needs another byte, a run ends: looking further would be wasted.
        most = min((limit for limit in _OFFSET_WIDTH_CHANGES if row < limit < count), default=count) - row
        first_row = None if have_gaps else row
        run = _measure_run(data, position, shape, min(most, (len(data) - position) // shape.stride), first_row)
        if run is None:
            return None
        short_runs = short_runs + 1 if run.count < min(_RUN_WORTHWHILE, most) else 0
        if short_runs > _SHORT_RUNS_MAX:
            return None
        runs.append(run)
        row += run.count
        position += run.count * shape.stride
    if position != len(data):
        raise NotVectorisable
    # Each header count but the last one's was looked at together with the record after.
    return Runs(data, count, runs, have_gaps) if data[-1] == 0 else None


def read_shape(data: Bytes, start: int) -> tuple[Shape | None, int]:
    """Shape and offset delta of the record at `start`; no shape if it has headers or not the room that a run needs."""
    head = data[start : start + _HEAD_SAMPLE_BYTES].tobytes()
    length, body = read_varint(head, 0, bits=32)
    stride = body + length
    if length < 0 or start + stride > len(data):
        raise NotVectorisable
    deltas = body + 1
    _, after_timestamp = read_varint(head, deltas, bits=64)
    offset_delta, after_offset = read_varint(head, after_timestamp, bits=32)
    key_length, key = read_varint(head, after_offset, bits=32)
    value_length_position = key + max(key_length, 0)
    if value_length_position + 5 > len(head):
        # The key is long, or the data ends here.
        head = data[start + value_length_position : start + value_length_position + 5].tobytes()
        value_length, value_length_width = read_varint(head, 0, bits=32)
    else:
        value_length, value = read_varint(head, value_length_position, bits=32)
        value_length_width = value - value_length_position
    last = value_length_position + value_length_width + max(value_length, 0)
    if key_length < -1 or value_length < -1 or last >= stride:
        raise NotVectorisable
    has_headers = last != stride - 1 or data[start + last] != 0
    if has_headers or key > 15 or stride < 16 or after_offset - deltas > 8:
        return None, offset_delta
    shape = Shape(
        stride,
        deltas,
        after_timestamp - deltas,
        after_offset - after_timestamp,
        key,
        key_length,
        value_length_position,
        value_length_width,
        value_length,
    )
    return shape, offset_delta


def _measure_run(data: Bytes, start: int, shape: Shape, most: int, first_row: int | None) -> Run | None:
    """The run of all records from `start` on, at most `most`, that have the shape of the first.

    Their heads are compared from the byte before each on, which is the header count of the record before: None if that
    is not zero for the first. With `first_row` given, their offset deltas must count on from there as well.
    """
    stride = shape.stride
    lead = 1 if start else 0
    if lead and data[start - 1] != 0:
        return None
    if most > _OFFSET_WIDTH_CHANGES[0]:
        # A look at one record not far off: where sizes differ, comparing them all would be wasted.
        look = start + stride * _LOOK_AHEAD
        if (data[look : look + shape.deltas_position - 1] != data[start : start + shape.deltas_position - 1]).any():
            most = _LOOK_AHEAD
    low_mask, high_mask = _head_masks(shape, lead, first_row is not None)
    place = lead + shape.deltas_position + shape.timestamp_width
    low: Words = np.ndarray((most,), "<u8", data, start - lead, (stride,)).copy()
    expected = None if first_row is None or place > 7 else offset_delta_words(first_row, first_row + most, place)
    count = _count_equal(low, expected, low_mask)
    high = None
    if high_mask is not None:
        high = np.ndarray((count,), "<u8", data, start - lead + 8, (stride,)).copy()
        expected = None if first_row is None else offset_delta_words(first_row, first_row + count, place - 8)
        count = _count_equal(high, expected, high_mask)
    count = _compare_bytes(data, start + shape.value_length_position, stride, count, shape.value_length_width)
    if not lead:
        count = _compare_bytes(data, start + stride - 1, stride, count, 1)
    return Run(start, count, shape, lead, low, high)


@lru_cache(maxsize=256)
def _head_masks(shape: Shape, lead: int, with_offsets: bool) -> tuple[np.uint64, np.uint64 | None]:
    """Which bits up to the key make up the shape, in eight bytes and in the eight after them if needed.

    Lengths count whole, of the deltas only where they end, unless offsets are to be compared as well. `lead` is the
    number of bytes before the record to look at, which count whole too. The attributes before the deltas do not count.
    """
    mask = b"\xff" * (lead + shape.deltas_position - 1) + b"\x00"
    mask += b"\x80" * shape.timestamp_width
    mask += (b"\xff" if with_offsets else b"\x80") * shape.offset_width
    mask += b"\xff" * (lead + shape.key_position - len(mask))
    low, high = np.frombuffer(mask.ljust(16, b"\x00"), "<u8")
    return low, high if len(mask) > 8 else None


def _count_equal(words: Words, expected: Words | None, mask: np.uint64) -> int:
    """How many words differ from what is expected by as much as the first one does, where `mask` has bits."""
    if expected is None:
        masked = words & mask
    else:
        masked = words ^ expected
        masked &= mask
    # The first one never differs from itself, so zero means that none does.
    return int((masked != masked[0]).argmax()) or len(words)


def _compare_bytes(data: Bytes, start: int, stride: int, most: int, width: int) -> int:
    """How many records have the same `width` bytes at `start` as the first."""
    if width == 2:
        column = np.ndarray((most,), "<u2", data, start, (stride,))
        return int((column != column[0]).argmax()) or most
    for position in range(start, start + width):
        column = np.ndarray((most,), "u1", data, position, (stride,))
        most = int((column != column[0]).argmax()) or most
    return most


def layout_of(columns: list[Column]) -> Layout:
    """Arrow's side of the strings of some columns."""
    lengths = [length for _, _, _, length in columns]
    counts = [count for _, _, count, _ in columns]
    row_count, length = sum(counts), lengths[0]
    if length > 0 and lengths.count(length) == len(lengths):
        offsets = np.arange(0, length * row_count + 1, length, dtype=np.int32)
        return Layout(row_count, length * row_count, pa.py_buffer(offsets), None)
    of_each_row = np.repeat(np.array(lengths), counts)
    offsets = np.zeros(row_count + 1, np.int32)
    np.cumsum(np.maximum(of_each_row, 0), out=offsets[1:])
    validity = pa.py_buffer(np.packbits(of_each_row >= 0, bitorder="little")) if min(lengths) < 0 else None
    return Layout(row_count, int(offsets[-1]), pa.py_buffer(offsets), validity)


def copy_strings(data: Bytes, columns: list[Column], layout: Layout) -> pa.BinaryArray:
    """All strings of some columns as one array."""
    buffer = pa.allocate_buffer(layout.size)
    filled = 0
    for position, stride, count, length in columns:
        if length > 0:
            kind = opaque(length)
            np.ndarray((count,), kind, buffer, filled)[:] = np.ndarray((count,), kind, data, position, (stride,))
            filled += length * count
    return pa.Array.from_buffers(pa.binary(), layout.row_count, [layout.validity, layout.offsets, buffer])
