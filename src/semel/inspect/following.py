"""Follows the partitions of a topic: records with their state, and the markers that decide on earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from semel.client.cluster import Cluster
from semel.client.offsets import edge_offsets
from semel.client.partitions import TopicPartition
from semel.inspect.log import LogReader, Seen
from semel.inspect.outcomes import LoggedBatch, Status
from semel.records import ControlMarker
from semel.records.reference import Record, decode_batch

_UNPACKED_BYTES_MAX: Final = 256 << 20
_POLL_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class TailedRecord:
    """A record with its state at the moment when it was read."""

    partition: TopicPartition
    record: Record
    status: Status
    batch: LoggedBatch


@dataclass(frozen=True, slots=True)
class TailedMarker:
    """The end of a transaction, and the offsets before it that were shown as open."""

    partition: TopicPartition
    marker: ControlMarker
    decided: tuple[tuple[int, int], ...]
    """First and last offsets."""


Tailed = TailedRecord | TailedMarker


def tail(
    cluster: Cluster,
    positions: Mapping[TopicPartition, int],
    *,
    follow: bool = False,
    committed_only: bool = False,
    is_over: Callable[[], bool] = lambda: False,
) -> Iterator[Tailed]:
    """From these offsets to the end of this moment, or on and on. Each partition keeps its order.

    With `committed_only` it stops where a reader of committed records does, and shows what such a reader sees.
    """
    readers = {named: LogReader(cluster, named, offset) for named, offset in positions.items()}
    isolation = "read_committed" if committed_only else "read_uncommitted"
    ends = edge_offsets(cluster, readers, "latest", isolation)
    while True:
        for named, reader in readers.items():
            while reader.position < ends[named]:
                yield from _read(reader, positions[named], ends[named], committed_only)
        if not follow or is_over():
            return
        cluster.sleep(_POLL_S)
        ends = edge_offsets(cluster, readers, "latest", isolation)


def _read(reader: LogReader, start: int, end: int, committed_only: bool) -> Iterator[Tailed]:
    if committed_only:
        reader.look()  # how far it may go without looking at what is open
    for seen in reader.read(end=end):
        yield from _tailed(reader.partition, seen, start, committed_only)


def _tailed(named: TopicPartition, seen: Seen, start: int, committed_only: bool) -> Iterator[Tailed]:
    batch = seen.batch
    if batch.status == "marker":
        if batch.marker is not None and not committed_only:
            spans: Sequence[tuple[int, int]] = [(max(one.base_offset, start), one.last_offset) for one in seen.decided]
            yield TailedMarker(named, batch.marker, tuple(spans))
        return
    if committed_only and batch.status not in ("plain", "committed"):
        return
    for record in decode_batch(seen.data, decompressed_bytes_max=_UNPACKED_BYTES_MAX)[1]:
        if record.offset >= start:
            yield TailedRecord(named, record, batch.status, batch)
