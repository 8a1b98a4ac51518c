"""Consumer groups: members, committed offsets, and the true lag of each partition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from semel.client.admin import Admin, GroupDescription
from semel.client.cluster import Cluster
from semel.client.offsets import edge_offsets
from semel.client.partitions import TopicPartition
from semel.errors import KafkaError, SemelError, UnsupportedByBroker
from semel.inspect.lag import LagCount, TrueLag, needs_records
from semel.inspect.log import LogReader
from semel.records.reference import decode_batch
from semel.wire import ErrorCode

LAG_BYTES_MAX: Final = 256 << 20
"""How much of the logs is read for one report on lag."""


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """A partition of a group. `trouble` says in a sentence why there are no numbers."""

    topic: str
    partition: int
    committed: int
    log_start: int = -1
    last_stable_offset: int = -1
    high_watermark: int = -1
    lag: TrueLag | None = None
    member: str | None = None
    trouble: str | None = None

    @property
    def lost(self) -> int:
        """Offsets after the committed one that were deleted before the group has read them."""
        return max(0, self.log_start - self.committed) if self.log_start >= 0 else 0


@dataclass(frozen=True, slots=True)
class GroupReport:
    """A group in full."""

    group: str
    state: str
    protocol_type: str
    members: int
    partitions: tuple[PartitionLag, ...]
    is_pending: bool = False
    """An open transaction holds offsets of this group: the committed ones may move when it ends."""

    @property
    def uncounted(self) -> int:
        """Partitions that are not in `total`, because their lag could not be told."""
        return sum(one.lag is None for one in self.partitions)

    @property
    def total(self) -> TrueLag:
        return sum((one.lag for one in self.partitions if one.lag is not None), TrueLag(0))


def group_report(
    cluster: Cluster,
    group: str,
    *,
    bytes_max: int = LAG_BYTES_MAX,
    on_partition: Callable[[int, int], None] | None = None,
) -> GroupReport:
    """Members, offsets and lag of one group; its state is "Dead" if there is none of that name.

    The log is read from the committed offsets to the end, `bytes_max` in all. Where that is not enough, the rest is
    counted in `unread_offsets`. `on_partition` is called before each partition, with its number and how many there are.
    """
    admin = Admin(cluster)
    described = _describe(admin, group)
    committed = admin.committed_offsets(group, require_stable=False)
    owners = {named: member.client_id for member in described.members for named in member.assignment}
    partitions: list[PartitionLag] = []
    for number, named in enumerate(sorted(committed)):
        if on_partition is not None:
            on_partition(number + 1, len(committed))
        share = bytes_max // (len(committed) - number)
        found, used = _partition_lag(cluster, named, committed[named].offset, owners.get(named), share)
        bytes_max -= used
        partitions.append(found)
    pending = bool(committed) and _is_pending(cluster, group)
    return GroupReport(
        group, described.state, described.protocol_type, len(described.members), tuple(partitions), pending
    )


def _describe(admin: Admin, group: str) -> GroupDescription:
    """Of a group that the broker assigns (KIP-848), the classic request only says that it is dead."""
    described = admin.describe_groups(group)[group]
    if described.state == "Dead":
        try:
            return admin.describe_consumer_groups(group)[group]
        except UnsupportedByBroker:
            return described
        except KafkaError as error:
            if error.code != ErrorCode.group_id_not_found:
                raise
    return described


def _is_pending(cluster: Cluster, group: str) -> bool:
    """Asked once, without waiting."""
    try:
        Admin(cluster).committed_offsets(group, patience=cluster.patience(0))
    except KafkaError as error:
        if error.code == ErrorCode.unstable_offset_commit:
            return True
        raise
    return False


def _partition_lag(
    cluster: Cluster, named: TopicPartition, committed: int, member: str | None, bytes_max: int
) -> tuple[PartitionLag, int]:
    try:
        [log_start] = edge_offsets(cluster, [named], "earliest").values()
        [end] = edge_offsets(cluster, [named], "latest", "read_uncommitted").values()
        start = max(committed, log_start)
        if start > end:
            sentence = f"The group is at offset {committed}, and the partition ends at {end}: it was created again, or "
            return PartitionLag(*named, committed, log_start, -1, end, None, member, f"{sentence}lost records."), 0
        reader = LogReader(cluster, named, start)
        lag = count_lag(reader, bytes_max=bytes_max)
    except SemelError as error:
        return PartitionLag(*named, committed, member=member, trouble=str(error)), 0
    found = PartitionLag(*named, committed, log_start, lag.last_stable_offset, lag.high_watermark, lag.lag, member)
    return found, reader.bytes_read


@dataclass(frozen=True, slots=True)
class CountedLag:
    """A lag with the ends that it was counted up to."""

    lag: TrueLag
    last_stable_offset: int
    high_watermark: int


def count_lag(reader: LogReader, *, bytes_max: int) -> CountedLag:
    """Read on from the reader's position to the end of this moment, or until `bytes_max` have been read."""
    start = reader.position
    reader.look()
    stable, end = reader.last_stable_offset, reader.high_watermark
    count = LagCount(start=start, last_stable_offset=stable, high_watermark=end)
    while reader.position < end and reader.bytes_read < bytes_max:
        for seen in reader.read(end=end, bytes_max=bytes_max - reader.bytes_read):
            told = None
            if needs_records(seen.batch, start):
                _, records = decode_batch(seen.data)
                told = sum(record.offset >= start for record in records)
            count.add(seen.batch, decided=seen.decided, record_count=told)
    return CountedLag(count.result(looked_up_to=reader.position), stable, end)
