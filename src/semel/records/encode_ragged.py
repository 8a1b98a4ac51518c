"""Write records of any shape: every record is a few views, and Arrow copies what they name into one run of bytes."""

from __future__ import annotations

import numpy as np

from semel.records.encode_plan import HeaderColumns, Plan, Widths
from semel.records.ragged import INLINE_BYTES_MAX, Views, fill_views, join_views
from semel.records.varints import Bytes, Integers, NotVectorisable, Words, move_bytes, write_varints, zigzag

_FULL = np.uint64(63)
_SAME_COUNT_MAX = 16


class Packed:
    """Byte strings of up to sixteen bytes, built from varints one after another."""

    def __init__(self, words: Words, widths: Widths) -> None:
        self.low = words
        self.high = np.zeros(len(words), np.uint64)
        self.widths: Widths = widths

    def append(self, words: Words, widths: Widths) -> None:
        if isinstance(self.widths, int):
            self.low = self.low | move_bytes(words, self.widths)
            if self.widths + int(np.max(widths)) > 8:
                self.high = self.high | move_bytes(words, self.widths - 8)
        else:
            shift = (self.widths << np.int64(3)).view(np.uint64)
            # Shifting a word by its whole width is undefined, hence in two steps.
            fits = shift < np.uint64(64)
            low_part = words << (shift & _FULL)
            self.low = self.low | np.where(fits, low_part, np.uint64(0))
            if int((self.widths + widths).max()) > 8:
                over = words >> np.uint64(1) >> (_FULL - (shift & _FULL))
                self.high = self.high | np.where(fits, over, low_part)
        self.widths = self.widths + widths

    def longest(self) -> int:
        return int(np.max(self.widths))

    def fill(self, views: Views) -> None:
        views[:, 0] = self.widths
        views[:, 1] = self.low & np.uint64(0xFFFF_FFFF)
        views[:, 2] = self.low >> np.uint64(32)
        views[:, 3] = self.high & np.uint64(0xFFFF_FFFF)


def write_ragged(plan: Plan) -> memoryview:
    """The records of a plan as they stand in an uncompressed batch."""
    count = plan.count
    heads = _heads(plan)
    pieces = len(heads) + (plan.keys is not None) + 2 + (plan.headers is not None)
    views = np.zeros((count * pieces + 1, 4), np.uint32)
    rows = views[:-1].reshape(count, pieces, 4)
    for index, head in enumerate(heads):
        head.fill(rows[:, index])
    index = len(heads)
    buffers: list[Bytes] = [plan.values.data]
    if plan.keys is not None and plan.key_lengths is not None:
        fill_views(rows[:, index], len(buffers), plan.keys.data, plan.keys.positions, plan.key_lengths.sizes)
        buffers.append(plan.keys.data)
        index += 1
    _fill_varints(rows[:, index], plan.value_lengths.words, plan.value_lengths.widths)
    fill_views(rows[:, index + 1], 0, plan.values.data, plan.values.positions, plan.value_lengths.sizes)
    if plan.headers is None:
        views[-1, 0] = 1  # the header count of the last record; those of the others stand at the start of the next
    else:
        sections = np.frombuffer(_write_sections(plan.headers), np.uint8)
        sizes = np.broadcast_to(np.asarray(plan.section_sizes), count)
        fill_views(rows[:, index + 2], len(buffers), sections, np.cumsum(sizes) - sizes, sizes)
        buffers.append(sections)
    return join_views(views, buffers)


def _heads(plan: Plan) -> list[Packed]:
    """Everything in front of the key, in one piece if it is short enough for a view to hold, otherwise in two."""
    if plan.headers is None:
        # A zero in front: the header count of the record before, so that it needs no view of its own.
        first = Packed(plan.body_words << np.uint64(8), plan.body_widths + 1)
        leading: Integers = np.ones(plan.count, np.int64)
        leading[0] = 0
        first.low[0] >>= np.uint64(8)
        first.widths = plan.body_widths + leading
    else:
        first = Packed(plan.body_words, plan.body_widths)
    first.widths = first.widths + 1  # the attributes, a zero byte
    if plan.key_lengths is None:
        key_words, key_widths = np.ones(plan.count, np.uint64), 1  # zigzag of -1
    else:
        key_words, key_widths = plan.key_lengths.words, plan.key_lengths.widths
    second = Packed(plan.timestamp_words, plan.timestamp_widths)
    second.append(plan.offset_words, plan.offset_widths)
    second.append(key_words, key_widths)
    if first.longest() + second.longest() <= INLINE_BYTES_MAX and second.longest() <= 8:
        first.append(second.low, second.widths)
        return [first]
    if second.longest() > INLINE_BYTES_MAX:
        raise NotVectorisable
    return [first, second]


def _fill_varints(views: Views, words: Words, widths: Widths) -> None:
    views[:, 0] = widths
    views[:, 1] = words & np.uint64(0xFFFF_FFFF)
    views[:, 2] = words >> np.uint64(32)


def _write_sections(headers: HeaderColumns) -> memoryview:
    """The header sections of all rows: the count, then each header's key and value with their lengths."""
    counts = headers.counts
    header_count = int(counts.sum())
    views = np.zeros((len(counts) + 4 * header_count, 4), np.uint32)
    most = int(counts.max())
    if most <= _SAME_COUNT_MAX and most == int(counts.min()):
        _fill_same_sections(views, headers, most)
    else:
        count_views = np.zeros((len(counts), 4), np.uint32)
        _fill_varints(count_views, *write_varints(zigzag(counts)))
        views[np.arange(len(counts)) + 4 * (np.cumsum(counts) - counts)] = count_views
        parts = np.zeros((header_count, 4, 4), np.uint32)
        _fill_headers(parts, headers, slice(None))
        places = np.repeat(np.arange(len(counts)), counts) + 1 + 4 * np.arange(header_count)
        views[places[:, None] + np.arange(4)] = parts
    return join_views(views, [headers.keys.data, headers.values.data])


def _fill_same_sections(views: Views, headers: HeaderColumns, count: int) -> None:
    """If all rows have as many headers, their views lie at equal distances and can be filled in place."""
    rows = len(headers.counts)
    of_each_row = views.reshape(rows, 1 + 4 * count, 4)
    of_each_row[:, 0, 0] = 1
    of_each_row[:, 0, 1] = 2 * count  # zigzag, and short enough for one byte
    for number in range(count):
        _fill_headers(of_each_row[:, 1 + 4 * number : 5 + 4 * number], headers, slice(number, None, count))


def _fill_headers(parts: Views, headers: HeaderColumns, chosen: slice) -> None:
    """Four views for each chosen header: length of the key, key, length of the value, value."""
    for index, strings in enumerate((headers.keys, headers.values)):
        lengths = strings.lengths[chosen].astype(np.int64)
        _fill_varints(parts[:, 2 * index], *write_varints(zigzag(lengths)))
        fill_views(parts[:, 2 * index + 1], index, strings.data, strings.positions[chosen], np.maximum(lengths, 0))
