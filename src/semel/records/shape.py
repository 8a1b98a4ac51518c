"""The shape of a record without headers: where its fields lie when the widths of all its varints are known."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from semel.records.reference import varint_bytes
from semel.records.varints import Words, move_bytes, offset_delta_words

# The first offset delta that a varint of one byte, of two and so on cannot hold (zigzag takes a bit).
OFFSET_WIDTH_ENDS = (1 << 6, 1 << 13, 1 << 20, 1 << 27, 1 << 31)


class Shape:
    """Positions count from the byte before the record, which is the header count of the one before.

    Looking at that byte together with the record saves looking at the header count of each record on its own.
    """

    def __init__(self, timestamp_width: int, offset_width: int, key_length: int, value_length: int) -> None:
        self.timestamp_width = timestamp_width
        self.key_length, self.value_length = key_length, value_length
        self.key_size, self.value_size = max(key_length, 0), max(value_length, 0)
        key_length_bytes, self.value_length_bytes = varint_bytes(key_length), varint_bytes(value_length)
        deltas = timestamp_width + offset_width
        strings = len(key_length_bytes) + self.key_size + len(self.value_length_bytes) + self.value_size
        body_bytes = varint_bytes(1 + deltas + strings + 1)
        self.stride = len(body_bytes) + 1 + deltas + strings + 1
        before = b"\x00" + body_bytes + b"\x00"
        self.timestamp_position = len(before)
        self.offset_position = len(before) + timestamp_width
        self.key_position = len(before) + deltas + len(key_length_bytes)
        self.value_length_position = self.key_position + self.key_size
        self.value_position = self.value_length_position + len(self.value_length_bytes)
        # The head up to the key, with gaps for the deltas.
        self.head = int.from_bytes(before + bytes(deltas) + key_length_bytes, "little")

    def head_words(self, first: int, end: int, skip: int, timestamps: Words | None) -> Words:
        """Eight bytes of the heads of the rows from `first` to before `end`, after the first `skip` of each.

        Without `timestamps` the timestamp deltas are zero.
        """
        constant = np.uint64(self.head >> 8 * skip & 0xFFFF_FFFF_FFFF_FFFF)
        words = offset_delta_words(first, end, self.offset_position - skip) | constant
        if timestamps is not None:
            words |= move_bytes(timestamps, self.timestamp_position - skip)
        return words


@lru_cache(maxsize=256)
def shape_of(timestamp_width: int, offset_width: int, key_length: int, value_length: int) -> Shape:
    """A shape, which the next batch is likely to have again."""
    return Shape(timestamp_width, offset_width, key_length, value_length)
