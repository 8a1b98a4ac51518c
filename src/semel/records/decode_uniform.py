"""Decode batches whose records all have one shape, by predicting what they must look like.

From the first record and the number of records follows every byte of the others but keys, values and timestamps, if
nothing else changes: where each record starts, its length, its offset delta and the lengths of key and value. The
prediction is compared with the bytes, a few calls for thousands of records; if anything differs, the batch is decoded
in another way.
"""
# pyarrow comes without types, so what it returns is unknown to the checker.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa

from semel.records.decode_runs import Column, Layout, copy_strings, layout_of, read_shape
from semel.records.shape import OFFSET_WIDTH_ENDS, Shape, shape_of
from semel.records.varints import Bytes, Integers, Words, unzigzag_bytes

_COUNT_MAX = 65536  # a prediction takes eight bytes or more for each record and is kept for the next batch
_VALUE_LENGTH_KINDS = {1: "u1", 2: "<u2", 4: "<u4"}


@dataclass(frozen=True, slots=True)
class _Part:
    """Records with offset deltas of one width: `first_row` and `count` of those compared, and where the first starts.

    `low` and `high` are the first bytes expected of each, and the masks tell which bits of them are known.
    """

    start: int
    first_row: int
    count: int
    shape: Shape
    low: Words
    low_mask: np.uint64
    high: Words | None
    high_mask: np.uint64
    value_length_kind: str
    value_length_word: int


@dataclass(frozen=True, slots=True)
class _Prediction:
    """All parts, and where keys and values lie; `row_count` strings of one length share their Arrow offsets too."""

    size: int
    row_count: int
    parts: tuple[_Part, ...]
    key_columns: list[Column]
    value_columns: list[Column]
    key_layout: Layout
    value_layout: Layout


@dataclass(slots=True)
class Uniform:
    """The records of a batch that came out as predicted."""

    data: Bytes
    timestamps: list[Bytes]
    prediction: _Prediction

    def timestamp_deltas(self) -> Integers:
        return unzigzag_bytes(np.concatenate(self.timestamps))

    def copy_keys(self) -> pa.BinaryArray:
        return copy_strings(self.data, self.prediction.key_columns, self.prediction.key_layout)

    def copy_values(self) -> pa.BinaryArray:
        return copy_strings(self.data, self.prediction.value_columns, self.prediction.value_layout)


def read_uniform(data: Bytes, count: int) -> Uniform | None:
    """The records of `data` if they are all as the first and their number let expect, down to the last byte."""
    first, offset_delta = read_shape(data, 0)
    if first is None or offset_delta != 0 or first.timestamp_width != 1 or count > _COUNT_MAX:
        return None
    prediction = _predict(first.key_length, first.value_length, count)
    if prediction is None or prediction.size != len(data) or data[-1] != 0:
        return None
    shape = prediction.parts[0].shape
    if (shape.stride, shape.key_position - 1, shape.value_position - 1) != (
        first.stride,
        first.key_position,
        first.value_position,
    ):
        return None
    timestamps = [data[first.deltas_position : first.deltas_position + 1]]
    for part in prediction.parts:
        if part.count:
            heads = _compare(data, part)
            if heads is None:
                return None
            timestamps.append(heads.view(np.uint8)[part.shape.timestamp_position :: 8])
    return Uniform(data, timestamps, prediction)


def _compare(data: Bytes, part: _Part) -> Words | None:
    """The first eight bytes of each record of a part, or None if any is not as predicted."""
    shape, stride = part.shape, part.shape.stride
    heads: Words = np.ndarray((part.count,), "<u8", data, part.start - 1, (stride,)).copy()
    differs = heads ^ part.low
    differs &= part.low_mask
    if np.count_nonzero(differs):
        return None
    if part.high is not None:
        differs = np.ndarray((part.count,), "<u8", data, part.start + 7, (stride,)) ^ part.high
        differs &= part.high_mask
        if np.count_nonzero(differs):
            return None
    position = part.start - 1 + shape.value_length_position
    # Copied before they are compared: NumPy compares what lies side by side much faster.
    lengths = np.ndarray((part.count,), part.value_length_kind, data, position, (stride,)).copy()
    return None if np.count_nonzero(lengths != part.value_length_word) else heads


@lru_cache(maxsize=8)
def _predict(key_length: int, value_length: int, count: int) -> _Prediction | None:
    """What `count` records look like if nothing but keys, values and small timestamp deltas differs."""
    parts: list[_Part] = []
    key_columns: list[Column] = []
    value_columns: list[Column] = []
    position = row = 0
    for offset_width, limit in enumerate(OFFSET_WIDTH_ENDS, start=1):
        if row == count:
            break
        rows = min(limit, count) - row
        shape = shape_of(1, offset_width, key_length, value_length)
        if shape.stride < 16 or shape.key_position > 16 or len(shape.value_length_bytes) not in _VALUE_LENGTH_KINDS:
            return None
        # The very first record has no byte before it to be compared with; it was read on its own.
        parts.append(
            _predict_part(shape, position, row, rows) if row else _predict_part(shape, shape.stride, 1, rows - 1)
        )
        key_columns.append((position - 1 + shape.key_position, shape.stride, rows, key_length))
        value_columns.append((position - 1 + shape.value_position, shape.stride, rows, value_length))
        position += rows * shape.stride
        row += rows
    return _Prediction(
        size=position,
        row_count=count,
        parts=tuple(parts),
        key_columns=key_columns,
        value_columns=value_columns,
        key_layout=layout_of(key_columns),
        value_layout=layout_of(value_columns),
    )


def _predict_part(shape: Shape, start: int, first_row: int, count: int) -> _Part:
    # All bytes up to the key are known but the attributes, which mean nothing, and the timestamp delta's value.
    mask = bytearray(b"\xff" * shape.key_position).ljust(16, b"\x00")
    mask[shape.timestamp_position - 1] = 0
    mask[shape.timestamp_position] = 0x80
    low_mask, high_mask = np.frombuffer(mask, "<u8")
    end = first_row + count
    return _Part(
        start=start,
        first_row=first_row,
        count=count,
        shape=shape,
        low=shape.head_words(first_row, end, 0, None),
        low_mask=low_mask,
        high=shape.head_words(first_row, end, 8, None) if shape.key_position > 8 else None,
        high_mask=high_mask,
        value_length_kind=_VALUE_LENGTH_KINDS[len(shape.value_length_bytes)],
        value_length_word=int.from_bytes(shape.value_length_bytes, "little"),
    )
