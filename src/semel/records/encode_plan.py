"""What the records of a table weigh on the wire, and how many of them fit into one batch."""
# pyarrow comes without types, so what it returns is unknown to the checker.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from semel.errors import ConfigError
from semel.records.schema import RecordColumns
from semel.records.varints import (
    WORD_VALUE_MAX,
    Bytes,
    Integers,
    NotVectorisable,
    Words,
    offset_delta_varints,
    write_varints,
    zigzag,
)

Widths = Integers | int


class Strings:
    """A column of byte strings: Arrow's offsets, which count from `base` bytes before `data`, and -1 for null."""

    def __init__(self, data: Bytes, base: int, offsets: npt.NDArray[Any], nulls: npt.NDArray[np.bool_] | None) -> None:
        self.data = data
        self.base = base
        self.offsets = offsets
        sizes = offsets[1:] - offsets[:-1]
        self.lengths: npt.NDArray[Any] = sizes if nulls is None else np.where(nulls, -1, sizes)

    @property
    def positions(self) -> Integers:
        return self.offsets[:-1].astype(np.int64) - self.base

    @property
    def common_length(self) -> int | None:
        """The length of all strings, if it is the same."""
        if len(self.lengths) == 0:
            return None
        first = self.lengths[0]
        return None if np.count_nonzero(self.lengths != first) else int(first)

    def head(self, count: int) -> Strings:
        part = object.__new__(Strings)
        part.data, part.base = self.data, self.base
        part.offsets, part.lengths = self.offsets[: count + 1], self.lengths[:count]
        return part


@dataclass(frozen=True, slots=True)
class Lengths:
    """The varints in front of the strings of a column; a width that all share is one number."""

    words: Words
    widths: Widths
    sizes: Integers  # bytes of the strings themselves


@dataclass(frozen=True, slots=True)
class HeaderColumns:
    """The headers of the rows of a window: how many each has, and keys and values of all of them in a row."""

    counts: Integers
    keys: Strings
    values: Strings

    def head(self, count: int) -> HeaderColumns:
        headers = int(self.counts[:count].sum())
        return HeaderColumns(self.counts[:count], self.keys.head(headers), self.values.head(headers))


@dataclass(frozen=True, slots=True)
class Plan:
    """The first records of a window that make one batch, with everything that is needed to write them."""

    count: int
    records_bytes: int
    keys: Strings | None
    values: Strings
    headers: HeaderColumns | None
    timestamp_words: Words
    timestamp_widths: Widths
    offset_words: Words
    offset_widths: Integers
    key_lengths: Lengths | None
    value_lengths: Lengths
    section_sizes: Widths
    body_sizes: Integers
    body_words: Words
    body_widths: Widths


class Window:
    """Some rows of a table as NumPy sees them."""

    def __init__(self, columns: RecordColumns, first: int, count: int, default_timestamp_ms: int) -> None:
        self.count = count
        self.values = read_strings(_rows(columns.value, first, count))
        self.keys = None if columns.key is None else read_strings(_rows(columns.key, first, count))
        self.headers = None if columns.headers is None else _read_headers(_rows(columns.headers, first, count), first)
        self.timestamps: Integers | None = None
        if columns.timestamp is not None:
            rows = _rows(columns.timestamp, first, count)
            self.timestamps = (rows.fill_null(default_timestamp_ms) if rows.null_count else rows).to_numpy()
        self.default_timestamp_ms = default_timestamp_ms

    def plan(self, bytes_max: int) -> Plan:
        """As many records as fit into `bytes_max` bytes, perhaps none.

        Raises NotVectorisable for time differences so large that their varints do not fit into a word.
        """
        timestamp_words, timestamp_widths = self.timestamp_varints()
        if timestamp_words is None:
            timestamp_words = np.zeros(self.count, np.uint64)
        offset_words, offset_widths = offset_delta_varints(self.count)
        key_lengths = None if self.keys is None else _length_varints(self.keys.lengths)
        value_lengths = _length_varints(self.values.lengths)
        sections = 1 if self.headers is None else _section_sizes(self.headers)
        body_sizes = offset_widths + value_lengths.sizes
        body_sizes += value_lengths.widths + timestamp_widths
        body_sizes += 1 + sections
        body_sizes += 1 if key_lengths is None else key_lengths.sizes + key_lengths.widths
        body_words, body_widths = write_varints(zigzag(body_sizes))
        ends = np.cumsum(body_sizes + body_widths)
        count = int(np.searchsorted(ends, bytes_max, side="right"))
        return Plan(
            count=count,
            records_bytes=int(ends[count - 1]) if count else int(ends[0]),
            keys=None if self.keys is None else self.keys.head(count),
            values=self.values.head(count),
            headers=None if self.headers is None else self.headers.head(count),
            timestamp_words=timestamp_words[:count],
            timestamp_widths=_head(timestamp_widths, count),
            offset_words=offset_words[:count],
            offset_widths=offset_widths[:count],
            key_lengths=None if key_lengths is None else _lengths_head(key_lengths, count),
            value_lengths=_lengths_head(value_lengths, count),
            section_sizes=_head(sections, count),
            body_sizes=body_sizes[:count],
            body_words=body_words[:count],
            body_widths=_head(body_widths, count),
        )

    def timestamp_varints(self) -> tuple[Words | None, Widths]:
        """Words and widths of the timestamp deltas; no words if the deltas are all zero."""
        if self.timestamps is None:
            return None, 1
        base, lowest, highest = int(self.timestamps[0]), int(self.timestamps.min()), int(self.timestamps.max())
        if lowest == highest:
            return None, 1
        # Wraps around like Java's arithmetic, so any two timestamps have a delta.
        deltas = self.timestamps - self.timestamps[0]
        if lowest == base and highest - base < 64:
            return (deltas << np.int64(1)).view(np.uint64), 1
        values = zigzag(deltas)
        if int(values.max()) > WORD_VALUE_MAX:
            raise NotVectorisable
        return write_varints(values)

    def timestamp_range(self, count: int) -> tuple[int, int]:
        """Base timestamp and largest timestamp of the first `count` rows."""
        if self.timestamps is None or count == 0:
            return self.default_timestamp_ms, self.default_timestamp_ms
        return int(self.timestamps[0]), int(self.timestamps[:count].max())


def read_strings(column: pa.Array) -> Strings:
    """The strings of a binary or large_binary array."""
    _, offsets_buffer, data_buffer = column.buffers()
    kind = np.int64 if pa.types.is_large_binary(column.type) else np.int32
    if offsets_buffer is None or len(column) == 0:
        return Strings(np.empty(0, np.uint8), 0, np.zeros(1, np.int64), None)
    offsets = np.frombuffer(offsets_buffer, kind)[column.offset : column.offset + len(column) + 1]
    first, last = int(offsets[0]), int(offsets[-1])
    data = np.empty(0, np.uint8) if data_buffer is None else np.frombuffer(data_buffer, np.uint8)
    nulls = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
    # Views count in 32 bits, and a window is small: its bytes alone are sure to be within reach.
    return Strings(data[first:last], first, offsets, nulls)


def _rows(column: pa.ChunkedArray, first: int, count: int) -> pa.Array:
    rows = column.slice(first, count)
    if rows.num_chunks == 1:
        return rows.chunk(0)
    combined = rows.combine_chunks()
    return combined if isinstance(combined, pa.Array) else pa.concat_arrays(rows.chunks)


def _read_headers(rows: pa.ListArray, first_row: int) -> HeaderColumns | None:
    counts = rows.value_lengths().fill_null(0).to_numpy().astype(np.int64)
    if not counts.any():
        return None
    entries = rows.flatten()
    keys, values = read_strings(entries.field("key")), read_strings(entries.field("value"))
    if entries.null_count or (keys.lengths < 0).any():
        row = first_row + int(np.repeat(np.arange(len(counts)), counts)[np.argmin(keys.lengths)])
        raise ConfigError(f"Row {row} has a header without a key, which Kafka does not allow. Nothing was encoded.")
    return HeaderColumns(counts, keys, values)


def _length_varints(lengths: npt.NDArray[Any]) -> Lengths:
    lengths = lengths.astype(np.int64)
    shortest = int(lengths.min()) if len(lengths) else 0
    words, widths = write_varints(zigzag(lengths))
    return Lengths(words, widths, lengths if shortest >= 0 else np.maximum(lengths, 0))


def _section_sizes(headers: HeaderColumns) -> Integers:
    """Bytes of each row's headers, with their count."""
    _, count_widths = write_varints(zigzag(headers.counts))
    keys, values = _length_varints(headers.keys.lengths), _length_varints(headers.values.lengths)
    ends = np.zeros(len(keys.sizes) + 1, np.int64)
    np.cumsum(keys.sizes + keys.widths + values.sizes + values.widths, out=ends[1:])
    last = np.cumsum(headers.counts)
    return ends[last] - ends[last - headers.counts] + count_widths


def _head(widths: Widths, count: int) -> Widths:
    return widths if isinstance(widths, int) else widths[:count]


def _lengths_head(lengths: Lengths, count: int) -> Lengths:
    return Lengths(lengths.words[:count], _head(lengths.widths, count), lengths.sizes[:count])
