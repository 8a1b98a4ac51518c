"""Write records that come in runs of equal shape: each field of a run is one strided copy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from semel.records.encode_plan import Plan, Strings, Widths, Window
from semel.records.layout import HEADER_BYTES
from semel.records.shape import OFFSET_WIDTH_ENDS, Shape, shape_of
from semel.records.varints import Bytes, Words, opaque

SLACK_BYTES = 16  # words written to the end of the last record may reach this far over it
_RUN_ROWS_MIN = 48  # shorter runs on average are better written row by row in vectors
_STRIDE_MIN = 8  # words of eight bytes are written, and must not reach over the head of the record after


class Run(NamedTuple):
    """The rows from `first` to before `end`, which share a shape."""

    first: int
    end: int
    shape: Shape


def plan_uniform(window: Window, timestamp_widths: Widths, bytes_max: int) -> list[Run]:
    """The runs that fit into `bytes_max` if all records have one shape but for their offset deltas; none otherwise."""
    key_length = -1 if window.keys is None else window.keys.common_length
    value_length = window.values.common_length
    if (
        window.headers is not None
        or key_length is None
        or value_length is None
        or not isinstance(timestamp_widths, int)
    ):
        return []
    runs: list[Run] = []
    first = 0
    for offset_width, limit in enumerate(OFFSET_WIDTH_ENDS, start=1):
        shape = shape_of(timestamp_widths, offset_width, key_length, value_length)
        if not suits(shape):
            return []
        end = min(limit, window.count, first + bytes_max // shape.stride)
        if end > first:
            runs.append(Run(first, end, shape))
            bytes_max -= (end - first) * shape.stride
        if end < limit:
            break
        first = end
    return runs


def find_runs(plan: Plan) -> list[Run] | None:
    """The records of a plan as runs, or None if there are too many, or headers, or too little room to write words."""
    if plan.headers is not None:
        return None
    changes = plan.offset_widths[1:] != plan.offset_widths[:-1]
    for column in (plan.values.lengths, None if plan.keys is None else plan.keys.lengths, plan.timestamp_widths):
        if isinstance(column, np.ndarray):
            changes |= column[1:] != column[:-1]
    count = np.count_nonzero(changes) + 1
    if count > 3 and count * _RUN_ROWS_MIN > plan.count:
        return None
    starts: list[int] = [0, *(np.flatnonzero(changes) + 1).tolist()]
    runs = [
        Run(
            first,
            end,
            shape_of(
                _at(plan.timestamp_widths, first),
                int(plan.offset_widths[first]),
                -1 if plan.keys is None else int(plan.keys.lengths[first]),
                int(plan.values.lengths[first]),
            ),
        )
        for first, end in zip(starts, [*starts[1:], plan.count], strict=True)
    ]
    return runs if all(suits(run.shape) for run in runs) else None


def suits(shape: Shape) -> bool:
    """Whether records of this shape can be written by words."""
    return shape.stride >= _STRIDE_MIN and shape.key_position <= 16


def write_runs(
    runs: list[Run], keys: Strings | None, values: Strings, timestamp_words: Words | None, target: Bytes
) -> None:
    """Write the records into `target` behind the room for the batch header; it has SLACK_BYTES more than they need.

    Without `timestamp_words` all timestamp deltas are zero.
    """
    position = HEADER_BYTES
    for first, end, shape in runs:
        count, stride = end - first, shape.stride
        # From the byte before the record on; before the first one that is still the header, which is written later.
        start = position - 1
        timestamps = None if timestamp_words is None else timestamp_words[first:end]
        # Front to back within a record, but the upper half of a head before the lower: what a word writes too much is
        # written over by what comes after it.
        if shape.key_position > 8:
            np.ndarray((count,), "<u8", target, start + 8, (stride,))[:] = shape.head_words(first, end, 8, timestamps)
        np.ndarray((count,), "<u8", target, start, (stride,))[:] = shape.head_words(first, end, 0, timestamps)
        if keys is not None:
            _copy(keys, first, count, shape.key_size, target, start + shape.key_position, stride)
        _fill(target, start + shape.value_length_position, stride, count, shape.value_length_bytes)
        _copy(values, first, count, shape.value_size, target, start + shape.value_position, stride)
        position += count * stride
    target[position - 1] = 0  # the header count of the last record


def _copy(strings: Strings, first: int, count: int, size: int, target: Bytes, position: int, stride: int) -> None:
    if size == 0:
        return
    kind = opaque(size)
    source = np.ndarray((count,), kind, strings.data, int(strings.offsets[first]) - strings.base)
    np.ndarray((count,), kind, target, position, (stride,))[:] = source


def _fill(target: Bytes, position: int, stride: int, count: int, content: bytes) -> None:
    """The same few bytes in each record."""
    if len(content) == 2:
        np.ndarray((count,), "<u2", target, position, (stride,))[:] = int.from_bytes(content, "little")
        return
    for index, byte in enumerate(content):
        target[position + index : position + index + stride * (count - 1) + 1 : stride] = byte


def _at(widths: Widths, row: int) -> int:
    return widths if isinstance(widths, int) else int(widths[row])
