"""Decode batches whose records differ in shape: every field of all records in lock step."""
# pyarrow comes without types, so what it returns is unknown to the checker.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from semel.records.chain import Chain
from semel.records.ragged import gather_binary
from semel.records.schema import HEADER_TYPE, HEADERS_TYPE
from semel.records.varints import (
    Bytes,
    Integers,
    NotVectorisable,
    Words,
    gather_words,
    read_varint,
    read_varints,
    unzigzag,
)

_INT32_VALUES_MAX = 2**32 - 1  # zigzag form of 32 bits
_FEW_ROWS = 48  # below this many rows with further headers, their headers are read one by one
_STEPS_MIN = 8  # and not before so many headers of each were read in lock step


class TooManyHeaders(NotVectorisable):
    """The records declare more headers than they may have."""


@dataclass(frozen=True, slots=True)
class Slices:
    """Byte strings within a buffer: position and length of each, -1 for null."""

    positions: Integers
    lengths: Integers


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of many records; `header_counts` is None if no record has headers."""

    timestamp_deltas: Integers
    offset_deltas: Integers
    keys: Slices
    values: Slices
    header_counts: Integers | None
    header_keys: Slices | None
    header_values: Slices | None


def read_fields(data: Bytes, chain: Chain, headers_max: int) -> Fields:
    """All fields of all records, each checked to lie within its record and the record to end with the last.

    Raises TooManyHeaders before anything is made of the headers if there are more than `headers_max` altogether.
    """
    cursor = _Cursor(data, chain.bodies, chain.ends)
    cursor.take_words(chain.words, 8, chain.widths)
    cursor.skip_attributes()
    timestamp_deltas = unzigzag(cursor.numbers(bits=64))
    offset_deltas = unzigzag(cursor.numbers(bits=32))
    keys = cursor.slices()
    values = cursor.slices()
    counts = unzigzag(cursor.numbers(bits=32))
    if not counts.any():
        cursor.finish()
        return Fields(timestamp_deltas, offset_deltas, keys, values, None, None, None)
    if int(counts.min()) < 0 or (counts > cursor.ends - cursor.positions).any():
        raise NotVectorisable
    if int(counts.sum()) > headers_max:
        raise TooManyHeaders
    header_keys, header_values = _read_headers(cursor, counts)
    return Fields(timestamp_deltas, offset_deltas, keys, values, counts, header_keys, header_values)


class _Cursor:
    """One position in each record."""

    def __init__(self, data: Bytes, positions: Integers, ends: Integers) -> None:
        self.data = data
        self.positions = positions
        self.ends = ends
        self.words: Words | None = None  # what was read from the positions on, as far as it goes
        self.words_bytes = 0

    def take_words(self, words: Words, bytes_left: int, used: Integers | int) -> None:
        """Keep the part of `words`, good for `bytes_left` bytes, that lies after the first `used` bytes."""
        self.words_bytes = bytes_left - int(np.max(used))
        self.words = words >> np.asarray(used, np.uint64) * np.uint64(8) if self.words_bytes > 0 else None

    def skip_attributes(self) -> None:
        self.positions = self.positions + 1
        if self.words is not None:
            self.take_words(self.words, self.words_bytes, 1)

    def _read(self) -> tuple[Words, Integers | int]:
        """The varint at each position, out of the words at hand if they hold all of it."""
        if self.words is not None:
            values, widths = read_varints(self.words)
            if int(np.max(widths)) <= self.words_bytes:
                self.take_words(self.words, self.words_bytes, widths)
                return values, widths
        words = gather_words(self.data, self.positions)
        values, widths = read_varints(words)
        self.take_words(words, 8, widths)
        return values, widths

    def numbers(self, *, bits: int) -> Words:
        """The next varint of each record, before zigzag."""
        if (self.positions >= self.ends).any():
            raise NotVectorisable
        values, widths = self._read()
        self.positions = self.positions + widths
        if bits == 32 and (int(np.max(widths)) > 5 or int(values.max()) > _INT32_VALUES_MAX):
            raise NotVectorisable
        return values

    def slices(self) -> Slices:
        """The next byte string of each record."""
        lengths = unzigzag(self.numbers(bits=32))
        starts = self.positions
        shortest = int(lengths.min())
        if shortest < -1:
            raise NotVectorisable
        self.positions = starts + (lengths if shortest >= 0 else np.maximum(lengths, 0))
        self.words = None
        if (self.positions > self.ends).any():
            raise NotVectorisable
        return Slices(starts, lengths)

    def finish(self) -> None:
        if not (self.positions == self.ends).all():
            raise NotVectorisable


def _read_headers(cursor: _Cursor, counts: Integers) -> tuple[Slices, Slices]:
    """Keys and values of all headers in the order of the records: first the first header of each record, and so on."""
    first_headers = np.cumsum(counts) - counts
    total = int(counts.sum())
    columns = tuple(np.empty(total, np.int64) for _ in range(4))
    key_positions, key_lengths, value_positions, value_lengths = columns
    rows = np.flatnonzero(counts)
    final = cursor.positions.copy()
    part = _Cursor(cursor.data, cursor.positions[rows], cursor.ends[rows])
    for number in range(int(counts.max())):
        if number:
            going_on = counts[rows] > number
            final[rows] = part.positions
            if not going_on.all():
                rows = rows[going_on]
                part = _Cursor(cursor.data, part.positions[going_on], part.ends[going_on])
        if number >= _STEPS_MIN and len(rows) < _FEW_ROWS:
            for row, position, end in zip(rows.tolist(), part.positions.tolist(), part.ends.tolist(), strict=True):
                rest = slice(int(first_headers[row]) + number, int(first_headers[row] + counts[row]))
                final[row] = _read_one_by_one(cursor.data, position, end, tuple(column[rest] for column in columns))
            break
        keys = part.slices()
        values = part.slices()
        if int(keys.lengths.min()) < 0:
            raise NotVectorisable
        index = first_headers[rows] + number
        key_positions[index], key_lengths[index] = keys.positions, keys.lengths
        value_positions[index], value_lengths[index] = values.positions, values.lengths
    else:
        final[rows] = part.positions
    cursor.positions = final
    cursor.finish()
    return Slices(key_positions, key_lengths), Slices(value_positions, value_lengths)


def _read_one_by_one(data: Bytes, position: int, end: int, columns: tuple[Integers, ...]) -> int:
    """Fill the columns with the headers of one record from `position` on; returns the position after the last."""
    view = data.data[:end]  # a plain loop looks bytes up in a view far faster than in an array
    found = tuple(array("q") for _ in range(4))
    add_key, add_key_length, add_value, add_value_length = (column.append for column in found)
    try:
        for _ in range(len(columns[0])):
            length = view[position]
            if length < 0x80 and not length & 1:  # most are short
                length, position = length >> 1, position + 1
            else:
                length, position = _read_length(view, position)
            if length < 0:
                raise NotVectorisable
            add_key(position)
            add_key_length(length)
            position += length
            length = view[position]
            if length < 0x80 and not length & 1:
                length, position = length >> 1, position + 1
            else:
                length, position = _read_length(view, position)
            add_value(position)
            add_value_length(length)
            position += max(length, 0)
    except IndexError:
        raise NotVectorisable from None
    if position > end:
        raise NotVectorisable
    for column, numbers in zip(columns, found, strict=True):
        column[:] = np.frombuffer(numbers, np.int64)
    return position


def _read_length(view: memoryview, position: int) -> tuple[int, int]:
    length, width = read_varint(bytes(view[position : position + 5]), 0, bits=32)
    if length < -1:
        raise NotVectorisable
    return length, position + width


def headers_array(data: Bytes, fields: Fields) -> pa.ListArray:
    """The headers column."""
    assert fields.header_counts is not None
    assert fields.header_keys is not None
    assert fields.header_values is not None
    keys = as_text(gather_binary(data, fields.header_keys.positions, fields.header_keys.lengths))
    values = gather_binary(data, fields.header_values.positions, fields.header_values.lengths)
    entries = pa.Array.from_buffers(HEADER_TYPE, len(keys), [None], children=[keys, values])
    offsets = np.zeros(len(fields.header_counts) + 1, np.int32)
    np.cumsum(fields.header_counts, out=offsets[1:])
    return pa.Array.from_buffers(HEADERS_TYPE, len(offsets) - 1, [None, pa.py_buffer(offsets)], children=[entries])


def as_text(keys: pa.BinaryArray) -> pa.StringArray:
    """Header keys as strings; what is not UTF-8 is shown with replacement characters, as the Java client does."""
    try:
        return keys.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([key.decode("utf-8", errors="replace") for key in keys.to_pylist()], pa.string())
