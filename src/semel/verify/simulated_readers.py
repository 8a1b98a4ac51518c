"""Readers of committed and of all records, which filter as Kafka's consumers do and remember what they saw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kio.schema.errors import ErrorCode

from semel.records.layout import iter_batches
from semel.verify.simulated_clients import Client, Surroundings
from semel.verify.simulated_network import Lost
from semel.verify.simulation_ledger import TopicPartition, Violation
from semel.verify.simulation_views import marker_of, records_of
from semel.wire.api import Api

_NO_SESSION = 0


def visible_records(partition: Any, position: int, *, is_committed: bool) -> tuple[list[tuple[int, str]], int]:
    """Offset and value of the fetched records that a reader at `position` gets, and its next position."""
    records: list[tuple[int, str]] = []
    aborted = sorted((one.first_offset, one.producer_id) for one in partition.aborted_transactions or ())
    active: set[int] = set()
    for header, batch in iter_batches(partition.records or b""):
        while aborted and aborted[0][0] <= header.last_offset:
            active.add(aborted.pop(0)[1])
        if header.is_control:
            marker = marker_of(batch)
            if marker is not None and marker.kind == "abort":
                active.discard(marker.producer_id)
        elif not (is_committed and header.is_transactional and header.producer_id in active):
            for record in records_of(batch):
                if record.offset >= position:
                    records.append((record.offset, (record.value or b"").decode()))
        position = max(position, header.last_offset + 1)
    return records, position


class Fetching(Client):
    """A client that fetches, with or without a fetch session."""

    def __init__(self, world: Surroundings, name: str, seed: int) -> None:
        super().__init__(world, name, seed)
        self.is_committed = True
        self._wants_session = self.chance.random() < 0.5
        self._session = (_NO_SESSION, 0)
        self._named: dict[TopicPartition, tuple[int, int]] = {}
        self.leader_epoch = -1
        self.is_fenced = False
        """Whether a new leader has refused the epoch: what was read may be gone."""

    async def fetch(self, positions: dict[TopicPartition, int], **how: Any) -> list[tuple[TopicPartition, Any]]:
        """What the broker has from these positions on; nothing when the answer was lost."""
        session_id, epoch = self._session if self._wants_session else (_NO_SESSION, -1)
        changed = (
            positions
            if epoch <= 0
            else {
                where: offset
                for where, offset in positions.items()
                if self._named.get(where) != (offset, self.leader_epoch)
            }
        )
        bytes_max = self.world.fetch_bytes_max
        topics: dict[str, list[dict[str, Any]]] = {}
        for (topic, index), offset in changed.items():
            topics.setdefault(topic, []).append(
                {
                    "partition": index,
                    "current_leader_epoch": self.leader_epoch,
                    "fetch_offset": offset,
                    "partition_max_bytes": bytes_max * 2 // 5,
                }
            )
        forgotten: dict[str, list[int]] = {}
        for topic, index in self._named if epoch > 0 else ():
            if (topic, index) not in positions:
                forgotten.setdefault(topic, []).append(index)
        self._session, self._named = (_NO_SESSION, 0), {}
        try:
            answer = await self.call(
                Api.FETCH,
                replica_id=-1,
                max_wait=self.chance.choice((0, 30, 150)),
                min_bytes=1,
                max_bytes=bytes_max,
                isolation_level=int(self.is_committed),
                session_id=session_id,
                session_epoch=epoch,
                topics=[{"topic": topic, "partitions": partitions} for topic, partitions in topics.items()],
                forgotten_topics_data=[{"topic": topic, "partitions": indexes} for topic, indexes in forgotten.items()],
                # A repeat would be a second reader of the session, whose answers the first one then misses.
                may_repeat=lambda: not self._wants_session,
                **how,
            )
        except Lost:
            return []
        if getattr(answer, "error_code", ErrorCode.none) is not ErrorCode.none:
            return []
        if self._wants_session and getattr(answer, "session_id", 0):
            self._session = (answer.session_id, max(epoch, 0) + 1)
            self._named = {where: (offset, self.leader_epoch) for where, offset in positions.items()}
        found = [((topic.topic, one.partition_index), one) for topic in answer.responses for one in topic.partitions]
        for where, _ in found:
            if where not in positions:
                raise Violation(f"{self.name} asked for {list(positions)} and is answered about {where}")
        self.is_fenced = any(one.error_code is ErrorCode.fenced_leader_epoch for _, one in found)
        return [(where, one) for where, one in found if one.error_code is ErrorCode.none]


class Reader(Fetching):
    """Reads some partitions from their beginning to their end, and goes on."""

    def __init__(
        self, world: Any, name: str, seed: int, partitions: Sequence[TopicPartition], *, is_committed: bool
    ) -> None:
        super().__init__(world, name, seed)
        self.is_committed = is_committed
        self.positions = dict.fromkeys(partitions, 0)
        self.seen: dict[TopicPartition, list[tuple[int, str]]] = {where: [] for where in partitions}
        self._world = world
        self._starts = 0

    async def run(self) -> None:
        while not self._world.is_over:
            await self.pause(350)
            starts = self._starts
            found = await self.fetch(dict(self.positions), peek=self._peek if self.is_committed else None)
            for where, partition in found if starts == self._starts else ():
                records, self.positions[where] = visible_records(
                    partition, self.positions[where], is_committed=self.is_committed
                )
                self.seen[where].extend(records)

    def _peek(self, answer: Any) -> None:
        """At the moment of the answer every record in it must be decided."""
        for topic in answer.responses:
            for one in topic.partitions:
                records, _ = visible_records(one, 0, is_committed=True)
                self._world.checker.check_readable((topic.topic, one.partition_index), records)

    def begin_again(self) -> None:
        """What was read may be gone with the power, and other records may come to stand in its place."""
        self._starts += 1
        for where in self.positions:
            self.positions[where] = 0
            self.seen[where].clear()

    def has_read_to(self, ends: Iterator[tuple[str, int, int]]) -> bool:
        return all(self.positions.get((topic, index), end) >= end for topic, index, end in ends)
