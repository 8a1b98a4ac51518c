"""Consuming without a group's membership: a fixed share of the partitions, with positions kept in a group's name.

Only one process may have a share at a time. With transactions the `transactional.id` that goes with the share makes it
so: its next owner starts a producer with it, and whoever had it before can commit nothing any more. Without, it is so
only because a worker's next life begins when the former one is dead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from semel.client.admin import Admin
from semel.verify.clients.face import Incoming, Reader, Surroundings


class ManualConsumer:
    """A `GroupConsumer` for a library without one, or without a safe one. Rewind it before the first poll."""

    def __init__(self, surroundings: Surroundings, reader: Reader, group: str, partitions: Sequence[int]) -> None:
        self._places = {number: surroundings.partitions[number] for number in partitions}
        self._reader = reader
        self._group = group
        # Under the name of its worker, so that faults that are meant for this worker find these requests too.
        named = {"bootstrap.servers": surroundings.bootstrap, "client.id": surroundings.client_id}
        self._admin = Admin({**named, **surroundings.settings})
        self._restarted = frozenset(partitions)

    def poll(self, timeout_ms: int, records_max: int) -> Incoming:
        found = self._reader.poll(timeout_ms, records_max)
        if not len(found):
            return found
        restarted, self._restarted = self._restarted, frozenset()
        return Incoming(found.partition, found.offset, found.payloads, restarted)

    def rewind(self) -> None:
        committed = self._admin.committed_offsets(self._group, self._places.values(), require_stable=True)
        offsets = {(place.topic, place.partition): found.offset for place, found in committed.items()}
        self._reader.seek({number: offsets.get(place, 0) for number, place in self._places.items()})

    def commit(self, positions: Mapping[int, int]) -> None:
        self._admin.commit_offsets(self._group, {self._places[number]: at for number, at in positions.items()})

    @property
    def member(self) -> object:
        return None

    def close(self) -> None:
        self._reader.close()
        self._admin.close()
