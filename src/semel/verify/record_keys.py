"""Records, and places in logs, as single numbers: what is sorted and searched by the million must be compact.

The key of a record stands for its topic, origin and sequence; a place is a partition and an offset in it.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from semel.verify.history import Manifest

Array = npt.NDArray[Any]

OFFSET_BITS: Final = 48
_LOW_HALF: Final = 0xFFFFFFFF


def places(partition: Array, offset: Array) -> Array:
    """A partition and an offset in it as one number, in the same order; -1 where the offset is not known."""
    packed = (partition.astype(np.int64) << OFFSET_BITS) | offset
    packed[(partition < 0) | (offset < 0)] = -1
    return packed


def partition_and_offset(place: int) -> tuple[int, int]:
    """What `places` packed.

    >>> partition_and_offset(int(places(np.array([3]), np.array([17]))[0]))
    (3, 17)
    """
    return place >> OFFSET_BITS, place & ((1 << OFFSET_BITS) - 1)


def distinct(values: Array) -> Array:
    """The different values, sorted."""
    ordered = np.sort(values)
    return ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))] if len(ordered) else ordered


def look_up(ordered: Array, values: Array) -> Array:
    """Where in `ordered` each of the values first is, or -1.

    >>> look_up(np.array([2, 4, 4]), np.array([4, 3, 9])).tolist()
    [1, -1, -1]
    """
    if not len(ordered):
        return np.full(len(values), -1, np.int64)
    # Random probes into a large array miss the cache at every step: in order they take a tenth of the time.
    order = np.argsort(values)
    found = np.empty(len(values), np.int64)
    found[order] = np.searchsorted(ordered, values[order])
    found[found == len(ordered)] = -1
    found[ordered[found] != values] = -1
    return found


class Lanes:
    """Numbers for the pairs of topic and origin that occur: a lane and a sequence make the key of a record."""

    def __init__(self, manifest: Manifest) -> None:
        self.topics = list(dict.fromkeys(topic for topic, _ in manifest.partitions))
        numbers = [self.topics.index(topic) for topic, _ in manifest.partitions]
        # The last stands for partition -1: a record whose partition the client chose is in no topic until it is told.
        self.topic_of_partition = np.array([*numbers, -1], np.int64)
        self._pairs = np.empty(0, np.int64)

    def add(self, partition: Array, origin: Array) -> None:
        found = distinct(self._pair(self.topic_of_partition[partition], origin))
        if len(self._pairs) == 0 or (look_up(self._pairs, found) < 0).any():
            self._pairs = distinct(np.concatenate((self._pairs, found)))

    @property
    def topic(self) -> Array:
        return (self._pairs >> 32) - 1

    @property
    def origin(self) -> Array:
        return self._pairs.astype(np.int32)

    def keys(self, partition: Array, origin: Array, sequence: Array) -> Array:
        """The keys of records in the topics of these partitions, -1 for a topic and origin that do not occur."""
        return self.keys_in(self.topic_of_partition[partition], origin, sequence)

    def keys_in(self, topic: Array, origin: Array, sequence: Array) -> Array:
        lane = look_up(self._pairs, self._pair(topic, origin))
        return np.where(lane < 0, -1, (lane << 32) | (sequence.astype(np.int64) & _LOW_HALF))

    def range_of(self, topic: int) -> tuple[int, int]:
        """The keys of a topic lie between these two."""
        first, end = np.searchsorted(self._pairs, [(topic + 1) << 32, (topic + 2) << 32])
        return int(first) << 32, int(end) << 32

    def in_topic(self, keys: Array, topic: int) -> Array:
        """The keys that records with the same origins and sequences have in another topic, or -1."""
        origin_of_lane = self.origin
        moved = look_up(self._pairs, self._pair(np.full(len(origin_of_lane), topic), origin_of_lane))
        lane = moved[keys >> 32]
        return np.where(lane < 0, -1, (lane << 32) | (keys & _LOW_HALF))

    def origin_and_sequence(self, key: int) -> tuple[int, int]:
        return int(self.origin[key >> 32]), int(np.int64(key).astype(np.int32))

    def _pair(self, topic: Array, origin: Array) -> Array:
        return ((topic + 1) << 32) | (origin.astype(np.int64) & _LOW_HALF)
