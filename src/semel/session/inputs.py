"""A session's reading side: which partitions it has, where each of them stands, and what was fetched ahead.

The group says who has which partition; where to begin is what the group has committed, read only when no open
transaction can change it. A partition that was lost and came back is a new one: its position is asked for again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import pyarrow as pa

from semel.client.cluster import Cluster
from semel.client.fetched import PartitionRecords, to_read_table
from semel.client.fetcher import Fetcher
from semel.client.group_offsets import fetch_group_offsets
from semel.client.membership import Membership
from semel.client.offsets import edge_offsets
from semel.client.partitions import TopicPartition
from semel.errors import OffsetOutOfRange
from semel.session.backlog import Backlog, partition_of
from semel.wire import ErrorCode

Reset = Literal["earliest", "latest", "error"]

_SLICE_MS: Final = 200
"""How long a fetch is waited for at a stretch, before a look at the group."""
_UNSTABLE_RETRY_S: Final = 0.01
_UNSTABLE_RETRY_MAX_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Portion:
    """What one transaction consumes."""

    table: pa.Table
    next_offsets: dict[TopicPartition, int]
    tenures: dict[TopicPartition, int]

    @property
    def is_empty(self) -> bool:
        """No record, though perhaps progress: markers and aborted records that were passed."""
        return self.table.num_rows == 0


@dataclass(frozen=True, slots=True)
class PortionLimits:
    """When a portion is full: whichever is reached first."""

    records_max: int = 100_000
    bytes_max: int = 32 * 1024 * 1024
    linger_ms: float = 0.0
    """How long to go on gathering after the first record."""


class Inputs:
    def __init__(
        self,
        cluster: Cluster,
        fetcher: Fetcher,
        membership: Membership,
        group: str,
        *,
        reset: Reset,
        require_stable: bool,
    ) -> None:
        self._cluster = cluster
        """For questions; a fetch that waits for records would keep them waiting."""
        self._fetcher = fetcher
        self._membership = membership
        self._group = group
        self._reset: Reset = reset
        self._require_stable = require_stable
        self._tenures: dict[TopicPartition, int] = {}
        self._committed: dict[TopicPartition, int] = {}
        """Where each partition goes on after an abort; it is read only if it is in here."""
        self._pins: dict[TopicPartition, int] = {}
        """Positions that nothing but this session knows: who begins at the end must not begin there twice."""
        self._backlog = Backlog()
        self._ask_again_at = 0.0
        self._ask_pause_s = _UNSTABLE_RETRY_S

    @property
    def partitions(self) -> frozenset[TopicPartition]:
        """Those that are being read."""
        return frozenset(self._committed)

    # -- reading ---------------------------------------------------------------------------------------------------

    def take(self, timeout_ms: float, limits: PortionLimits) -> Portion:
        """The next portion; an empty one if no record came in time."""
        clock = self._cluster.clock
        deadline = clock() + timeout_ms / 1000
        linger_until: float | None = None
        while True:
            self._membership.raise_fatal()
            self._follow_group()
            now = clock()
            if self._backlog.record_count:
                linger_until = now + limits.linger_ms / 1000 if linger_until is None else linger_until
                is_full = (
                    self._backlog.record_count >= limits.records_max or self._backlog.byte_count >= limits.bytes_max
                )
                if is_full or now >= linger_until:
                    break
            elif now >= deadline:
                break
            self._fetch((deadline if linger_until is None else linger_until) - now)
        return self._portion(self._backlog.take(limits.records_max, limits.bytes_max))

    def _portion(self, taken: list[PartitionRecords]) -> Portion:
        pins = {partition: at for partition, at in self._pins.items() if partition in self._committed}
        offsets = pins | {partition_of(records): records.next_offset for records in taken}
        return Portion(to_read_table(taken), offsets, {partition: self._tenures[partition] for partition in offsets})

    def _fetch(self, wait_s: float) -> None:
        if not self._committed:
            self._membership.wait_change(self._tenures, min(wait_s, self._pause_s()))
            return
        fetched = self._fetcher.fetch(max(0.0, min(wait_s, self._pause_s()) * 1000))
        self._backlog.add(records for records in fetched if partition_of(records) in self._committed)

    def _pause_s(self) -> float:
        if self._tenures.keys() == self._committed.keys():
            return _SLICE_MS / 1000
        return max(0.001, min(_SLICE_MS / 1000, self._ask_again_at - self._cluster.clock()))

    # -- positions -------------------------------------------------------------------------------------------------

    def _follow_group(self) -> None:
        tenures = dict(self._membership.tenures)
        if tenures != self._tenures:
            stays = {partition for partition, tenure in self._tenures.items() if tenures.get(partition) == tenure}
            self._tenures = tenures
            self._committed = {partition: at for partition, at in self._committed.items() if partition in stays}
            self._backlog.keep_only(self._committed)
            self._ask_again_at, self._ask_pause_s = 0.0, _UNSTABLE_RETRY_S
            self._read_on()
        if self._tenures.keys() != self._committed.keys() and self._cluster.clock() >= self._ask_again_at:
            self._begin_new()

    def _begin_new(self) -> None:
        """Positions of partitions that were gained; those that another's open transaction holds must wait for it."""
        gained = self._tenures.keys() - self._committed.keys()
        found = fetch_group_offsets(self._cluster, self._group, gained, require_stable=self._require_stable)
        if found.unstable:
            self._ask_again_at = self._cluster.clock() + self._ask_pause_s
            self._ask_pause_s = min(self._ask_pause_s * 2, _UNSTABLE_RETRY_MAX_S)
        if found.committed:
            known = {partition: offset for partition, offset in found.committed.items() if offset is not None}
            first = self._first_offsets(found.committed.keys() - known.keys())
            self._pins |= first if self._reset == "latest" else {}
            self._committed |= known | first
            self._read_on()

    def _first_offsets(self, partitions: set[TopicPartition]) -> dict[TopicPartition, int]:
        if not partitions:
            return {}
        if self._reset == "error":
            topic, partition = min(partitions)
            raise OffsetOutOfRange(
                f"Group {self._group!r} has committed no offset for {topic}-{partition}, and auto.offset.reset does "
                "not say where to begin; nothing was read. Write auto.offset.reset=earliest or latest.",
                code=ErrorCode.offset_out_of_range,
            )
        return edge_offsets(self._cluster, sorted(partitions), self._reset)

    def _read_on(self) -> None:
        """Let the fetcher read what we have, behind what it has fetched of it already."""
        ahead = self._fetcher.positions
        self._fetcher.assign({partition: ahead.get(partition, at) for partition, at in self._committed.items()})

    # -- how a transaction ended -----------------------------------------------------------------------------------

    def committed(self, portion: Portion) -> None:
        """What was taken is done with."""
        for partition, offset in portion.next_offsets.items():
            if self._tenures.get(partition) == portion.tenures[partition]:
                self._committed[partition] = offset
                self._pins.pop(partition, None)

    def rewind(self) -> None:
        """Go back to what is committed, also in partitions where nothing is: they begin where they began."""
        self._backlog.clear()
        self._fetcher.assign(self._committed)
