"""One bound for what all partitions together remember of producers."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final, Protocol

_MADE_ROOM: Final = 64
"""When the budget is spent, one part in so many is made free at once: to look for the oldest takes a while."""

Idle = tuple[int, int, int]
"""When a producer was last seen, its id, and the bytes that it takes."""


class Remembering(Protocol):
    """What one partition remembers of producers."""

    def idle(self) -> Iterator[Idle]:
        """Those without an open transaction, the longest unused first."""
        ...

    def forget(self, producer_id: int, /) -> None: ...


class ProducerBudget:
    """Counts bytes. When they are too many, the longest idle producers of all partitions are forgotten.

    A producer with an open transaction is never forgotten. If only such are left, `is_full` says so.

    >>> ProducerBudget(bytes_max=1000).is_full
    False
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0
        self.forgotten_count = 0
        self._partitions: dict[Remembering, None] = {}

    @property
    def is_full(self) -> bool:
        return self.held_bytes > self.bytes_max

    def add(self, changed_bytes: int) -> None:
        """A partition remembers so much more, or less."""
        self.held_bytes += changed_bytes

    def settle(self, partition: Remembering) -> None:
        """Make room, if it is needed, after this partition has added something. May call `forget` of any partition."""
        self._partitions[partition] = None
        if self.is_full:
            self._make_room()

    def leave(self, partition: Remembering, held_bytes: int) -> None:
        """A partition is closed or deleted."""
        self.held_bytes -= held_bytes
        self._partitions.pop(partition, None)

    def _make_room(self) -> None:
        surplus = self.held_bytes - self.bytes_max + self.bytes_max // _MADE_ROOM
        oldest = heapq.merge(*(_each_idle(partition, number) for number, partition in enumerate(self._partitions)))
        chosen: list[tuple[Remembering, int]] = []
        partitions = list(self._partitions)
        for _, producer_id, entry_bytes, number in oldest:
            if surplus <= 0:
                break
            surplus -= entry_bytes
            chosen.append((partitions[number], producer_id))
        for partition, producer_id in chosen:
            partition.forget(producer_id)
        self.forgotten_count += len(chosen)


def _each_idle(partition: Remembering, number: int) -> Iterator[tuple[int, int, int, int]]:
    return ((*idle, number) for idle in partition.idle())
