"""Committed offsets of all groups, and those of open transactions that are not committed yet.

A transaction's offsets are pending until the marker of its producer arrives in the same partition of
`__consumer_offsets`. That partition (`log_partition`) and the record's offset in it (`log_offset`) come with every
replay: markers of one partition say nothing about another, and of two commits the later one in the log counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kio.schema.errors import ErrorCode

from semel.core.classic_state import ClassicGroup, Reply
from semel.core.group_records import LoggedRecord, OffsetAndMetadata, OffsetRecord

TopicPartition = tuple[str, int]


@dataclass(frozen=True, slots=True)
class OffsetCommit:
    """One partition of a commit."""

    topic: str
    partition: int
    offset: int
    leader_epoch: int = -1
    metadata: str | None = ""


@dataclass(frozen=True, slots=True)
class OffsetDecision:
    """What is to be logged, and a code for every partition asked for.

    `group` is the classic group's next value, for a commit keeps the member's session; None leaves it as it is.
    """

    records: tuple[LoggedRecord, ...] = ()
    codes: Mapping[TopicPartition, ErrorCode] = field(default_factory=dict[TopicPartition, ErrorCode])
    group: ClassicGroup | None = None
    replies: tuple[tuple[int, Reply], ...] = ()


@dataclass(frozen=True, slots=True)
class FetchedOffset:
    """The answer for one partition; `value` is None where nothing is committed or `code` tells an error."""

    value: OffsetAndMetadata | None = None
    code: ErrorCode = ErrorCode.none


@dataclass(frozen=True, slots=True)
class _Stored:
    value: OffsetAndMetadata
    log_offset: int


@dataclass(frozen=True, slots=True)
class ExpiryRule:
    """When a group's offsets expire: counted from `empty_since_ms`, or from each commit where that is None.

    Topics that the group is subscribed to are kept.
    """

    is_subscribed_to: Callable[[str], bool]
    empty_since_ms: int | None = None

    def is_expired(self, topic: str, value: OffsetAndMetadata, now_ms: int, retention_ms: int) -> bool:
        if self.is_subscribed_to(topic):
            return False
        if value.expire_timestamp_ms is not None:
            return now_ms >= value.expire_timestamp_ms
        since_ms = value.commit_timestamp_ms if self.empty_since_ms is None else self.empty_since_ms
        return now_ms - since_ms >= retention_ms


class GroupOffsets:
    """The offsets of every group. Only the two `replay_` methods change them.

    >>> offsets = GroupOffsets()
    >>> decision = offsets.decide_commit("g", [OffsetCommit("t", 0, 42)], now_ms=0)
    >>> offsets.replay_offset(decision.records[0], log_partition=0, log_offset=0)
    >>> offsets.decide_fetch("g", [("t", 0)])[("t", 0)].value.offset
    42
    """

    def __init__(self) -> None:
        self._committed: dict[str, dict[TopicPartition, _Stored]] = {}
        # By the partition of __consumer_offsets and the producer id, the unit that one marker ends.
        self._pending: dict[tuple[int, int], dict[tuple[str, TopicPartition], _Stored]] = {}
        # The same pending offsets by group, for the question that every consumer with RequireStable asks.
        self._open: dict[str, dict[TopicPartition, set[tuple[int, int]]]] = {}

    # Questions

    def memory_bytes(self, each_bytes: int) -> int:
        """About what they take, at `each_bytes` for one without its metadata."""
        tables = [*self._committed.values(), *self._pending.values()]
        return sum(each_bytes + len(stored.value.metadata) for table in tables for stored in table.values())

    def group_ids(self) -> set[str]:
        """All groups that have offsets, committed or pending."""
        return self._committed.keys() | self._open.keys()

    def has_group(self, group_id: str) -> bool:
        """Whether the group has offsets, committed or pending."""
        return group_id in self._committed or group_id in self._open

    def committed(self, group_id: str) -> dict[TopicPartition, OffsetAndMetadata]:
        """All committed offsets of a group."""
        return {where: stored.value for where, stored in self._committed.get(group_id, {}).items()}

    def pending_positions(self, producer_id: int, log_partition: int) -> set[TopicPartition]:
        """Where a producer's open transaction would move positions, as far as one partition of the log tells."""
        return {where for _, where in self._pending.get((log_partition, producer_id), {})}

    def has_pending(self, group_id: str) -> bool:
        """Whether an open transaction has offsets of this group."""
        return group_id in self._open

    def decide_fetch(
        self, group_id: str, partitions: Collection[TopicPartition] | None, *, require_stable: bool = False
    ) -> dict[TopicPartition, FetchedOffset]:
        """Committed offsets of these partitions, or of all that have one.

        With `require_stable` a partition with a pending offset is refused: its new owner would start from the old
        position and, when the transaction commits, process the same records a second time (KIP-447).
        """
        committed = self._committed.get(group_id, {})
        unstable = self._open.get(group_id, {}) if require_stable else {}
        fetched: dict[TopicPartition, FetchedOffset] = {}
        for where in committed if partitions is None else partitions:
            stored = committed.get(where)
            if where in unstable:
                fetched[where] = FetchedOffset(code=ErrorCode.unstable_offset_commit)
            else:
                fetched[where] = FetchedOffset(None if stored is None else stored.value)
        return fetched

    # Decisions

    def decide_commit(
        self,
        group_id: str,
        commits: Sequence[OffsetCommit],
        *,
        now_ms: int,
        retention_ms: int | None = None,
        metadata_max: int = 4096,
    ) -> OffsetDecision:
        """Offsets to log for a member that was checked; the same for a transaction, whose records are its own."""
        records: list[LoggedRecord] = []
        codes: dict[TopicPartition, ErrorCode] = {}
        expire_timestamp_ms = None if retention_ms is None else now_ms + retention_ms
        for commit in commits:
            metadata = commit.metadata or ""
            if len(metadata) > metadata_max:
                codes[commit.topic, commit.partition] = ErrorCode.offset_metadata_too_large
                continue
            value = OffsetAndMetadata(commit.offset, commit.leader_epoch, metadata, now_ms, expire_timestamp_ms)
            records.append(OffsetRecord(group_id, commit.topic, commit.partition, value))
            codes[commit.topic, commit.partition] = ErrorCode.none
        return OffsetDecision(tuple(records), codes)

    def decide_delete(self, group_id: str, partitions: Collection[TopicPartition] | None = None) -> OffsetDecision:
        """Tombstones for these partitions, or for all of the group; pending offsets go as well."""
        present = [*self._committed.get(group_id, {})]
        present += [where for where in self._open.get(group_id, {}) if where not in self._committed.get(group_id, {})]
        gone = present if partitions is None else [where for where in present if where in partitions]
        codes = dict.fromkeys(gone if partitions is None else partitions, ErrorCode.none)
        return OffsetDecision(_tombstones(group_id, gone), codes)

    def decide_topic_deleted(self, topic: str) -> Iterator[tuple[str, OffsetDecision]]:
        """Tombstones, group by group, for a topic that is gone: a new one of that name starts from nothing."""
        for group_id in sorted(self.group_ids()):
            present = [*self._committed.get(group_id, {}), *self._open.get(group_id, {})]
            gone = {where for where in present if where[0] == topic}
            if gone:
                yield group_id, self.decide_delete(group_id, gone)

    def decide_expired(self, group_id: str, rule: ExpiryRule, now_ms: int, retention_ms: int) -> OffsetDecision:
        """Tombstones for offsets that nobody asked to keep for the retention time; pending ones are left alone."""
        pending = self._open.get(group_id, {})
        gone = [
            where
            for where, stored in self._committed.get(group_id, {}).items()
            if where not in pending and rule.is_expired(where[0], stored.value, now_ms, retention_ms)
        ]
        return OffsetDecision(_tombstones(group_id, gone))

    # Replay

    def replay_offset(
        self, record: OffsetRecord, *, log_partition: int, log_offset: int, producer_id: int | None = None
    ) -> None:
        """Applies a logged offset; with a producer id it is pending until that producer's marker."""
        where = (record.topic, record.partition)
        if record.value is None:
            self._drop(record.group_id, where)
        elif producer_id is None:
            self._committed.setdefault(record.group_id, {})[where] = _Stored(record.value, log_offset)
        else:
            transaction = (log_partition, producer_id)
            pending = self._pending.setdefault(transaction, {})
            pending[record.group_id, where] = _Stored(record.value, log_offset)
            self._open.setdefault(record.group_id, {}).setdefault(where, set()).add(transaction)

    def replay_marker(self, producer_id: int, *, committed: bool, log_partition: int) -> None:
        """Ends the producer's transaction in this partition of the log: its offsets count from now on, or never did."""
        transaction = (log_partition, producer_id)
        for (group_id, where), stored in self._pending.pop(transaction, {}).items():
            self._close(group_id, where, transaction)
            if not committed:
                continue
            offsets = self._committed.setdefault(group_id, {})
            earlier = offsets.get(where)
            # A plain commit may have come after the transaction's; the later one in the log is the newer wish.
            if earlier is None or stored.log_offset > earlier.log_offset:
                offsets[where] = stored

    def _drop(self, group_id: str, where: TopicPartition) -> None:
        offsets = self._committed.get(group_id, {})
        offsets.pop(where, None)
        if not offsets:
            self._committed.pop(group_id, None)
        for transaction in tuple(self._open.get(group_id, {}).get(where, ())):
            pending = self._pending[transaction]
            del pending[group_id, where]
            if not pending:
                del self._pending[transaction]
            self._close(group_id, where, transaction)

    def _close(self, group_id: str, where: TopicPartition, transaction: tuple[int, int]) -> None:
        by_partition = self._open[group_id]
        by_partition[where].discard(transaction)
        if not by_partition[where]:
            del by_partition[where]
        if not by_partition:
            del self._open[group_id]


def _tombstones(group_id: str, gone: Collection[TopicPartition]) -> tuple[OffsetRecord, ...]:
    return tuple(OffsetRecord(group_id, topic, partition, None) for topic, partition in gone)
