"""Where each record of a batch starts.

A record only tells its own length, so the starts form a chain that seems to need one step per record. Two shortcuts
avoid most steps, both exact. If the length bytes repeat at equal distances, the whole run follows from its first
record. And where lengths differ, records betray themselves: a zero header count, a length, a zero attribute byte.
Positions that look like this are collected in one sweep, and if each leads exactly to the next, from the first byte to
the last, they are the chain.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from semel.records.varints import Bytes, Integers, NotVectorisable, Words, gather_words, read_varint, read_varints

_RUN_WORTHWHILE = 24  # records; a shorter run costs more in NumPy calls than single steps
_SHORT_RUNS_MAX = 3  # so many short runs in a row, and the lengths count as ragged
_SWEEP_WORTHWHILE = 256  # records
_SAMPLE = 32  # records walked step by step to learn how wide their lengths are

_ONE = np.uint64(1)
_BYTE_ONES = np.uint64(0x0101_0101_0101_0101)
_SOON_STOPS = np.uint64(0x80_8080_8080)  # the top bits of five bytes: a length ends within them


@dataclass(frozen=True, slots=True)
class _Run:
    """`count` records of `stride` bytes, the first at `start`."""

    start: int
    stride: int
    count: int


@dataclass(frozen=True, slots=True)
class Chain:
    """Where each record's body starts after its length, where it ends, and the eight bytes from its length on."""

    widths: Integers | int  # of the lengths
    bodies: Integers
    ends: Integers
    words: Words


def _find_runs(data: Bytes, count: int) -> list[_Run] | None:
    """The chain as runs of equal records that fill `data` exactly, or None if it is too ragged for that."""
    runs: list[_Run] = []
    position = 0
    short_runs = 0
    while count:
        length, width = read_varint(data[position : position + 5].tobytes(), 0, bits=32)
        stride = width + length
        if length < 0:
            raise NotVectorisable
        most = min(count, (len(data) - position) // stride)
        if most == 0:
            raise NotVectorisable
        found = _count_equal(data, position, stride, width, most)
        short_runs = short_runs + 1 if found < min(_RUN_WORTHWHILE, count) else 0
        if short_runs > _SHORT_RUNS_MAX:
            return None
        runs.append(_Run(position, stride, found))
        count -= found
        position += found * stride
    if position != len(data):
        raise NotVectorisable
    return runs


def find_chain(data: Bytes, count: int) -> Chain:
    """The chain of `count` records that fill `data` exactly; raises NotVectorisable if they do not."""
    runs = _find_runs(data, count)
    if runs is not None:
        return _verified(data, np.concatenate([_starts(run) for run in runs]))
    if count >= _SWEEP_WORTHWHILE:
        # With records of usual size the sample lies within these bytes, otherwise it is just smaller.
        head = data[: 64 * 1024].tobytes()
        sample = walk(head, _SAMPLE, partial=True)
        widths = sorted({read_varint(head, start, bits=32)[1] - start for start in sample})
        for with_headers in (False, True):
            chain = _sweep(data, count, widths, with_headers)
            if chain is not None:
                return chain
    return _verified(data, np.array(walk(data.tobytes(), count), np.int64))


def _verified(data: Bytes, starts: Integers) -> Chain:
    chain = check_chain(data, starts)
    if chain is None:
        raise NotVectorisable
    return chain


def _starts(run: _Run) -> Integers:
    return run.start + run.stride * np.arange(run.count, dtype=np.int64)


def walk(raw: bytes, count: int, position: int = 0, *, partial: bool = False) -> list[int]:
    """The starts of `count` records step by step, unchecked; `partial` allows `raw` to end before the last."""
    starts: list[int] = []
    try:
        for _ in range(count):
            byte = raw[position]
            starts.append(position)
            if byte < 0x80:
                position += 1 + (byte >> 1)
                continue
            second = raw[position + 1]
            if second < 0x80:
                position += 2 + ((byte & 0x7F | second << 7) >> 1)
                continue
            length, width = byte & 0x7F | (second & 0x7F) << 7, 2
            while second >= 0x80 and width < 5:
                second = raw[position + width]
                length |= (second & 0x7F) << 7 * width
                width += 1
            position += width + (length >> 1)
    except IndexError:
        if not partial:
            raise NotVectorisable from None
        # The last start may belong to a length that is cut off.
        return starts[:-1]
    return starts


def check_chain(data: Bytes, starts: Integers) -> Chain | None:
    """The chain, if the lengths at `starts` lead from the first byte of `data` over all of them to its end."""
    if len(starts) == 0 or starts[0] != 0:
        return None
    words = gather_words(data, starts)
    lengths, widths = read_varints(words)
    bodies = starts + widths
    ends = bodies + (lengths >> _ONE).view(np.int64)
    # An odd number is a negative length, and one of more than 32 bits is none at all.
    if (lengths & _ONE).any() or int(np.max(widths)) > 5 or int(lengths.max()) >> 32:
        return None
    if ends[-1] != len(data) or not (ends[:-1] == starts[1:]).all():
        return None
    return Chain(widths, bodies, ends, words)


def _count_equal(data: Bytes, position: int, stride: int, width: int, most: int) -> int:
    """How many records from `position` on carry the same length bytes at the distance `stride`."""
    probe = min(most, _RUN_WORTHWHILE)
    found = _count_equal_within(data, position, stride, width, probe)
    # A short look first: where lengths differ, the long one would be wasted.
    return found if found < probe or probe == most else _count_equal_within(data, position, stride, width, most)


def _count_equal_within(data: Bytes, position: int, stride: int, width: int, most: int) -> int:
    for column in range(position, position + width):
        differs = data[column : column + stride * (most - 1) + 1 : stride] != data[column]
        if differs.any():
            most = int(differs.argmax())
    return most


def _sweep(data: Bytes, count: int, widths: list[int], with_headers: bool) -> Chain | None:
    """The chain by looking at all bytes at once, or None if that leaves a doubt."""
    candidates = _find_candidates(data, widths, with_headers)
    if not count <= len(candidates) <= 2 * count:
        return None
    words = gather_words(data, candidates)
    plausible = (~words & _SOON_STOPS) != 0
    if not plausible.all():
        candidates, words = candidates[plausible], words[plausible]
    if len(candidates) > count:
        candidates = _prune(candidates, words, count // 4)
    return check_chain(data, candidates) if len(candidates) == count else None


def _find_candidates(data: Bytes, widths: list[int], with_headers: bool) -> Integers:
    zero = data == 0
    marks: npt.NDArray[np.bool_] | None = None
    for width in widths:
        if with_headers:
            # The bytes of the length, all but the last with their top bit set, then the attributes.
            looks = zero[width:] & (data[width - 1 : -1] < 0x80)
            for column in range(width - 1):
                looks &= data[column : column - width] >= 0x80
        else:
            # The header count of the record before, and the attributes of this one.
            looks = zero[: -width - 1] & zero[width + 1 :]
        if marks is None:
            marks = looks
        else:
            # Widths rise, so these are fewer.
            marks[: len(looks)] |= looks
    if marks is None:
        return np.zeros(1, np.int64)
    if with_headers:
        return _true_positions(marks)
    positions = _true_positions(marks)
    # These are the bytes before the records; the first record has none before it.
    return np.append(0, positions + 1)


def _true_positions(marks: npt.NDArray[np.bool_]) -> Integers:
    """np.flatnonzero for few marks among many: looks at eight at a time."""
    whole = len(marks) // 8 * 8
    words = marks[:whole].view(np.uint64)
    index = np.flatnonzero(words != 0)
    rest = words[index]
    found: list[Integers] = []
    while len(index):
        lowest = rest & (~rest + _ONE)
        found.append(8 * index + ((lowest - _ONE & _BYTE_ONES) * _BYTE_ONES >> np.uint64(56)).view(np.int64))
        rest = rest ^ lowest
        more = rest != 0
        index, rest = index[more], rest[more]
    positions = np.concatenate(found) if found else np.empty(0, np.int64)
    if len(found) > 1:
        positions = np.sort(positions, kind="stable")
    tail = np.flatnonzero(marks[whole:])
    return np.concatenate([positions, tail + whole]) if len(tail) else positions


def _prune(candidates: Integers, words: Words, limit: int) -> Integers:
    """Drop candidates that the chain passes over; gives up, and returns too many, if there are more than `limit`."""
    lengths, widths = read_varints(words)
    following = candidates + widths + (lengths >> _ONE).view(np.int64)
    keep = np.ones(len(candidates), np.bool_)
    reached = 0  # all candidates before this one are settled
    breaks = np.flatnonzero(following[:-1] != candidates[1:]).tolist()
    if len(breaks) > 2 * limit:
        return candidates
    for index in breaks:
        if index < reached:
            continue
        # The chain leads from this candidate over some others, which cannot be records.
        target = following[index]
        reached = index + 1
        while reached < len(candidates) and candidates[reached] < target:
            keep[reached] = False
            reached += 1
    return candidates[keep]
