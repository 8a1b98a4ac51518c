"""Log compaction of one partition, on bytes: what `core.compaction` decides, written beside the log and swapped in.

Three steps: `plan_cleaning` looks whether there is enough to gain; `Cleaning.run` reads closed segments, which nobody
changes, and writes their successors, in any thread; `Cleaning.finish` puts these in place. A rename to `.swap` is the
decision: before it a crash leaves the old segments, after it the new one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from semel.broker.failpoints import reach
from semel.broker.storage.failures import DamagedLog, told_as
from semel.broker.storage.index import RELATIVE_OFFSET_MAX
from semel.broker.storage.log_file import LogFile, OpenFiles, remove_file
from semel.broker.storage.partition import Partition
from semel.broker.storage.recovery import CLEANED_SUFFIX, finish_swap, swap_path
from semel.broker.storage.segment import LOG_SUFFIX, Segment
from semel.broker.storage.walk import Walker
from semel.core.compaction import BatchPlan, Compaction
from semel.errors import CorruptRecords, RecordTooLarge
from semel.records.layout import BatchHeader

_WRITE_BYTES = 1024 * 1024
_KEYS_BYTES_MAX = 64 << 20
_COPY = BatchPlan("copy")

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Group:
    """Neighbouring segments that become one."""

    segments: list[Segment]
    end_offset: int
    successor: Segment | None = None

    @property
    def base_offset(self) -> int:
        return self.segments[0].base_offset


@dataclass(slots=True)
class Cleaning:
    """One compaction of a partition, up to `compaction.end_offset`."""

    partition: Partition
    compaction: Compaction
    first_dirty_offset: int
    groups: list[_Group]
    now_ms: int
    _files: OpenFiles = field(init=False)

    def __post_init__(self) -> None:
        # Its own handles: those of the partition may be closed by another thread at any time.
        self._files = OpenFiles(self.partition.files.disk, handles_max=4)

    def run(self) -> None:
        """Write the successors of all groups, synced. May be called in another thread; raises DamagedLog."""
        try:
            for group in self.groups:
                if self.first_dirty_offset < group.end_offset:
                    self._note_keys(group)
            if not self.is_stuck:
                for group in self.groups:
                    self._write_successor(group)
        except BaseException as error:
            self.discard()
            if isinstance(error, (CorruptRecords, RecordTooLarge)) and not isinstance(error, DamagedLog):
                # It was stored before the topic was compacted, when nobody looked at it. It does not get better.
                self.partition.stuck_offset = self.first_dirty_offset
            raise

    @property
    def is_stuck(self) -> bool:
        """Whether the very first batch has more keys than can be remembered."""
        return self.compaction.end_offset <= self.first_dirty_offset

    def finish(self) -> bool:
        """Put the successors in place; False if the segments changed meanwhile and all stays as it was."""
        partition = self.partition
        if self.is_stuck:
            partition.stuck_offset = self.first_dirty_offset
            logger.warning(
                "%s is not compacted from offset %d on: one batch there has keys of more than %d bytes. Its records "
                "are served. Delete them, or set cleanup.policy=delete, to go on.",
                partition.path,
                self.first_dirty_offset,
                _KEYS_BYTES_MAX,
            )
            return False
        present = set(map(id, partition.segments))
        old = [segment for group in self.groups for segment in group.segments]
        if partition.failure is not None or not all(id(segment) in present for segment in old):
            self.discard()
            return False
        partition.log.replay_forgotten_aborts(self.compaction.aborts_gone)
        for group in self.groups:
            if group.successor is not None:
                self._swap(group, group.successor)
        partition.note_cleaned(self.compaction.end_offset)
        return True

    def discard(self) -> None:
        """Throw away what `run` has written."""
        for group in self.groups:
            stem = group.segments[0].stem
            remove_file(self._files.disk, stem + LOG_SUFFIX + CLEANED_SUFFIX)

    def _note_keys(self, group: _Group) -> None:
        from semel.broker.storage.raw_records import facts_of  # it loads the codecs

        for header, batch in self._batches(group):
            if header.base_offset >= self.compaction.end_offset:
                return
            if header.last_offset >= self.first_dirty_offset and not header.is_control:
                self.compaction.note_keys(facts_of(header, batch))

    def _write_successor(self, group: _Group) -> None:
        from semel.broker.storage.raw_records import carry_out, facts_of

        settings, stem = self.partition.settings, group.segments[0].stem
        remove_file(self._files.disk, stem + LOG_SUFFIX + CLEANED_SUFFIX)
        successor = Segment(
            self._files,
            self.partition.path,
            group.base_offset,
            now_ms=self.now_ms,
            create=True,
            suffix=LOG_SUFFIX + CLEANED_SUFFIX,
        )
        is_changed = len(group.segments) > 1
        position, buffers, buffered = 0, list[bytes | memoryview](), 0
        for header, batch in self._batches(group):
            is_cleaned = header.last_offset < self.compaction.end_offset
            plan = self.compaction.plan_batch(facts_of(header, batch)) if is_cleaned else _COPY
            is_changed |= plan.action != "copy"
            stored = carry_out(plan, header, batch)
            if stored is None:
                continue
            successor.note(stored[0], position, settings.index_interval_bytes)
            position += len(stored[1])
            buffers.append(stored[1])
            buffered += len(stored[1])
            if buffered >= _WRITE_BYTES or len(buffers) >= 500:  # the system takes at most 1024 at once
                successor.file.append(buffers)
                buffers, buffered = [], 0
        if buffers:
            successor.file.append(buffers)
        if not is_changed:
            successor.file.discard()
            remove_file(self._files.disk, successor.file.path)
            return
        successor.file.sync()
        successor.file.close()
        group.successor = successor

    def _batches(self, group: _Group) -> Iterator[tuple[BatchHeader, memoryview]]:
        for segment in group.segments:
            file = LogFile(self._files, segment.file.path)
            try:
                for _, header, batch in Walker(file).batches(0, segment.base_offset, check_crc=True):
                    yield header, batch
            finally:
                file.close()

    def _swap(self, group: _Group, successor: Segment) -> None:
        partition = self.partition
        disk, path = partition.files.disk, partition.path
        before = sum(segment.size for segment in group.segments)
        for segment in group.segments:
            segment.file.discard()
        reach("before_swap")
        with told_as(f"The compacted segment at offset {group.base_offset} of {path} could not be put in place"):
            disk.rename(successor.file.path, swap_path(path, group.base_offset, group.end_offset))
            disk.sync_directory(path)
        reach("after_swap_named")
        finish_swap(partition.files, path, group.base_offset, group.end_offset)
        reach("after_swap")
        partition.replace_segments(group.segments, successor)
        logger.info(
            "Compacted %s from offset %d to %d: %d bytes became %d.",
            path,
            group.base_offset,
            group.end_offset,
            before,
            successor.size,
        )


def plan_cleaning(partition: Partition, now_ms: int, *, ignore_ratio: bool = False) -> Cleaning | None:
    """A compaction if the partition's settings ask for one now, as Kafka's cleaner decides; else None.

    Closed segments that are not synced yet wait: recovery relies on offsets without gaps above the recovery point.
    """
    settings, log = partition.settings, partition.log
    if not settings.compacts or partition.failure is not None or partition.has_unsynced_segments:
        return None
    end_offset = _first_uncleanable(partition, now_ms)
    first_dirty = partition.checkpoint.first_dirty_offset
    if not log.log_start_offset <= first_dirty <= partition.log_end_offset:
        first_dirty = log.log_start_offset
    if first_dirty >= end_offset or first_dirty == partition.stuck_offset:
        return None
    closed = [segment for segment in partition.segments[:-1] if segment.base_offset < end_offset]
    if any(segment.damage is not None for segment in closed):
        return None
    if not (ignore_ratio or _is_worthwhile(partition, closed, first_dirty, now_ms)):
        return None
    compaction = Compaction(
        end_offset,
        now_ms=now_ms,
        delete_retention_ms=settings.delete_retention_ms,
        # Those too whose marker is not below it: their records would else pass for the latest of their keys.
        aborted=[entry for entry in log.all_aborted() if entry.first_offset < end_offset],
        last_records=log.producers.last_records(),
        keys_bytes_max=_KEYS_BYTES_MAX,
    )
    return Cleaning(partition, compaction, first_dirty, _group(partition, closed), now_ms)


def _first_uncleanable(partition: Partition, now_ms: int) -> int:
    """The active segment, open transactions and records younger than min.compaction.lag.ms are left alone."""
    end_offset = min(partition.last_stable_offset, partition.active.base_offset)
    lag_ms = partition.settings.min_compaction_lag_ms
    if lag_ms > 0:
        young = (s.base_offset for s in partition.segments if s.largest_timestamp > now_ms - lag_ms)
        end_offset = min(end_offset, next(young, end_offset))
    return end_offset


def _is_worthwhile(partition: Partition, closed: list[Segment], first_dirty: int, now_ms: int) -> bool:
    settings = partition.settings
    ends = [segment.base_offset for segment in partition.segments[1 : len(closed) + 1]]
    dirty = [segment for segment, end in zip(closed, ends, strict=True) if end > first_dirty]
    dirty_bytes, all_bytes = sum(s.size for s in dirty), sum(s.size for s in closed)
    if dirty_bytes == 0:
        return False
    oldest = next((s.first_timestamp() for s in dirty if s.size and s.first_timestamp() >= 0), now_ms)
    if now_ms - oldest > settings.max_compaction_lag_ms:
        return True
    return dirty_bytes / all_bytes > settings.min_cleanable_dirty_ratio


def _group(partition: Partition, closed: list[Segment]) -> list[_Group]:
    """Neighbours that fit into one segment together, so that compaction does not leave many tiny ones."""
    groups: list[_Group] = []
    ends = [segment.base_offset for segment in partition.segments[1 : len(closed) + 1]]
    group_bytes = 0
    for segment, end in zip(closed, ends, strict=True):
        fits = groups and group_bytes + segment.size <= partition.settings.segment_bytes
        if fits and end - groups[-1].base_offset <= RELATIVE_OFFSET_MAX:
            groups[-1].segments.append(segment)
            groups[-1].end_offset = end
            group_bytes += segment.size
        else:
            groups.append(_Group([segment], end))
            group_bytes = segment.size
    return groups
