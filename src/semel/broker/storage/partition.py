"""One partition: what `core` decides about it, carried out on its segment files.

Append: decide, stamp the offsets into the batch in place, write it with one call, replay. A batch that could not be
written whole is taken back, and nothing of it is known afterwards. A batch of many megabytes is staged first: another
thread writes it into a file of its own, which becomes the next segment. So others can append meanwhile.
"""

from __future__ import annotations

import logging
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from crc32c import crc32c
from kio.schema.errors import ErrorCode

from semel.broker.failpoints import reach
from semel.broker.pacing import Slices
from semel.broker.storage import recovery
from semel.broker.storage.checkpoint import Checkpoint
from semel.broker.storage.failures import StorageError, told_as
from semel.broker.storage.log_file import OpenFiles, StagedFile, directory_of, remove_file
from semel.broker.storage.log_settings import LogSettings
from semel.broker.storage.persistence import Persistence, Unsynced
from semel.broker.storage.segment import LOG_SUFFIX, LargeBatch, Segment, offset_name
from semel.core.batch_checks import decide_timestamp
from semel.core.partition_log import Append, PartitionLog, SegmentFacts
from semel.core.producer_budget import ProducerBudget
from semel.core.refusal import Refused
from semel.errors import SemelError
from semel.records.control import ControlMarker, MarkerKind, encode_control_batch
from semel.records.layout import CRC_POSITION, CRC_START, HEADER_BYTES, INT64_MAX, BatchHeader, read_header

if TYPE_CHECKING:
    from semel.broker.storage.record_walk import NoteHeld

DELETED_SUFFIX = "-delete"

_BASE_OFFSET = struct.Struct(">q")
_LEADER_EPOCH = struct.Struct(">i")
_CRC = struct.Struct(">I")
_ATTRIBUTES = struct.Struct(">h")
_MAX_TIMESTAMP = struct.Struct(">q")
_LEADER_EPOCH_POSITION = 12
_MAX_TIMESTAMP_POSITION = 35

logger = logging.getLogger(__name__)


class Appended(NamedTuple):
    """Where a batch stands. A repeat has the offsets of its first copy."""

    base_offset: int
    last_offset: int
    log_append_time_ms: int
    is_duplicate: bool


class Partition:
    """A partition's log. One thread uses it; only `Unsynced.sync` and a compaction's `run` may be elsewhere.

    `hold_high_watermark`: appends do not move the high watermark; `advance_high_watermark` does, after a sync.
    `watchers` are called after records became visible, or the log start moved.
    """

    def __init__(
        self,
        files: OpenFiles,
        path: str,
        topic: str,
        index: int,
        settings: LogSettings,
        *,
        now_ms: int,
        hold_high_watermark: bool = False,
        leader_epoch: int = 0,
        producer_budget: ProducerBudget | None = None,
    ) -> None:
        """Open the directory at `path`, which must exist, and recover what is in it."""
        self.topic = topic
        self.index = index
        self.path = path
        self.settings = settings
        self.hold_high_watermark = hold_high_watermark
        self.leader_epoch = leader_epoch
        self.stuck_offset: int | None = None
        """Where compaction could not go on when it was last tried, because a batch has too many keys."""
        self.watchers: dict[Callable[[], None], None] = {}
        self.files = files
        opened = recovery.open_partition(
            files, path, settings, now_ms=now_ms, leader_epoch=leader_epoch, budget=producer_budget
        )
        self.log: PartitionLog = opened.log
        self.segments: list[Segment] = opened.segments
        self.failure: SemelError | None = opened.failure
        self._bases = [segment.base_offset for segment in self.segments]
        self._persistence = Persistence(files, path, opened)
        if opened.was_repaired and self.failure is None:
            self._flush_repairs()

    def _flush_repairs(self) -> None:
        try:
            self.flush()
        except StorageError as error:
            # A full disk may be why the last broker died: its records must still be readable, and deletable.
            logger.warning("%s The records are served, and the next start scans them again.", error)

    # Offsets

    @property
    def log_start_offset(self) -> int:
        return self.log.log_start_offset

    @property
    def log_end_offset(self) -> int:
        return self.log.log_end_offset

    @property
    def high_watermark(self) -> int:
        return self.log.high_watermark

    @property
    def last_stable_offset(self) -> int:
        return self.log.last_stable_offset

    @property
    def size_bytes(self) -> int:
        return sum(segment.size for segment in self.segments)

    @property
    def active(self) -> Segment:
        return self.segments[-1]

    def advance_high_watermark(self, offset: int) -> None:
        """Show records below `offset` to readers."""
        before = self.log.high_watermark
        self.log.replay_high_watermark(offset)
        if self.log.high_watermark != before:
            self._notify()

    # Appending

    def append(
        self,
        batch: bytearray | memoryview,
        header: BatchHeader,
        *,
        now_ms: int,
        from_client: bool = True,
        protocol_2: bool = False,
        staged: StagedFile | None = None,
    ) -> Appended:
        """Store a producer's batch, whose checksum the caller has checked; `batch` is stamped in place.

        `staged` is what `stage` gave, with all of the batch but its header written to it.
        Raises Refused as `core` decides, StorageError when the disk does not take it.
        """
        if self.failure is not None:
            raise self.failure
        decision = self.log.decide_append(header, now_ms=now_ms, from_client=from_client, protocol_2=protocol_2)
        if not isinstance(decision, Append):
            return Appended(decision.base_offset, decision.last_offset, decision.timestamp_ms, True)
        settings = self.settings
        attributes, max_timestamp, log_append_time_ms = header.attributes, header.max_timestamp, -1
        if from_client:
            stamps = decide_timestamp(
                header,
                now_ms=now_ms,
                timestamp_type=settings.message_timestamp_type,
                before_max_ms=settings.message_timestamp_before_max_ms,
                after_max_ms=settings.message_timestamp_after_max_ms,
            )
            log_append_time_ms = stamps.log_append_time_ms
            if log_append_time_ms >= 0:
                attributes, max_timestamp = stamps.attributes, stamps.max_timestamp
                _stamp_time(batch, attributes, max_timestamp)
        stored = BatchHeader(
            decision.base_offset,
            header.batch_length,
            self.leader_epoch,
            header.magic,
            header.crc,
            attributes,
            header.last_offset_delta,
            header.base_timestamp,
            max_timestamp,
            header.producer_id,
            header.producer_epoch,
            header.base_sequence,
            header.record_count,
        )
        _BASE_OFFSET.pack_into(batch, 0, decision.base_offset)
        _LEADER_EPOCH.pack_into(batch, _LEADER_EPOCH_POSITION, self.leader_epoch)
        if staged is None:
            self._store(batch, stored, now_ms)
        else:
            self._store_staged(staged, memoryview(batch)[:HEADER_BYTES], stored, now_ms)
        self.log.replay_append(stored, now_ms=now_ms)
        self._appended()
        return Appended(decision.base_offset, decision.last_offset, log_append_time_ms, False)

    def stage(self, header: BatchHeader, *, now_ms: int, protocol_2: bool = False) -> StagedFile | None:
        """A file to write a large batch to before it is appended; None if it would not be stored in any case."""
        try:
            decision = self.log.decide_append(header, now_ms=now_ms, protocol_2=protocol_2)
        except Refused:
            return None
        if self.failure is not None or not isinstance(decision, Append):
            return None
        return self.files.stage(self.path)

    def append_marker(
        self,
        kind: MarkerKind,
        *,
        producer_id: int,
        producer_epoch: int,
        coordinator_epoch: int,
        now_ms: int,
        protocol_2: bool = False,
    ) -> int:
        """End a producer's transaction here; returns the marker's offset."""
        if self.failure is not None:
            raise self.failure
        decision = self.log.decide_marker(kind, producer_id, producer_epoch, coordinator_epoch, protocol_2=protocol_2)
        batch = encode_control_batch(
            kind,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            coordinator_epoch=coordinator_epoch,
            timestamp_ms=now_ms,
            base_offset=decision.base_offset,
            partition_leader_epoch=self.leader_epoch,
        )
        header = read_header(batch)
        self._store(batch, header, now_ms)
        marker = ControlMarker(kind, coordinator_epoch, producer_id, producer_epoch, decision.base_offset)
        self.log.replay_append(header, marker, now_ms=now_ms)
        self._appended()
        return decision.base_offset

    def append_records(
        self,
        records: Sequence[tuple[bytes, bytes | None]],
        *,
        now_ms: int,
        producer_id: int = -1,
        producer_epoch: int = -1,
    ) -> int:
        """Store a coordinator's keys and values as one batch, transactional if a producer is given."""
        from semel.records.reference import Record, encode_batch  # it loads the codecs, which a start does not need

        batch = bytearray(
            encode_batch(
                [Record(number, now_ms, key, value) for number, (key, value) in enumerate(records)],
                producer_id=producer_id,
                producer_epoch=producer_epoch,
                transactional=producer_id >= 0,
            )
        )
        return self.append(batch, read_header(batch), now_ms=now_ms, from_client=False).base_offset

    def _store(self, batch: bytes | bytearray | memoryview, header: BatchHeader, now_ms: int) -> None:
        settings = self.settings
        if self.segments[-1].must_roll(
            header.total_bytes,
            header.last_offset,
            header.max_timestamp,
            now_ms=now_ms,
            segment_bytes=settings.segment_bytes,
            after_ms=settings.roll_after_ms,
        ):
            self.roll(now_ms)
        self.segments[-1].append((batch,), header, settings.index_interval_bytes)

    def _store_staged(self, staged: StagedFile, head: memoryview, header: BatchHeader, now_ms: int) -> None:
        """Let the staged file be the next segment."""
        base_offset = header.base_offset
        path = f"{self.path}/{offset_name(base_offset)}{LOG_SUFFIX}"
        replaced = self.segments[-1] if self.segments[-1].size == 0 else None
        if replaced is not None:
            assert replaced.base_offset == base_offset, "an empty segment begins at the log end"
            replaced.close()
        staged.put_in_place(head, path)
        try:
            segment = self._create_segment(base_offset, now_ms)
        except StorageError as error:
            self._take_back_staged(path, is_replaced=replaced is not None)
            raise error
        segment.note(header, 0, self.settings.index_interval_bytes)
        if replaced is None:
            self._begin(segment)
        else:
            self._persistence.note_names_changed()
            self.segments[-1] = segment

    def _take_back_staged(self, path: str, *, is_replaced: bool) -> None:
        try:
            if is_replaced:
                self.segments[-1].truncate(0)
            else:
                remove_file(self.files.disk, path)
        except StorageError as error:
            # A batch that nobody was told of stands behind the end. A start serves it; nothing else may come there.
            self.failure = error

    def _appended(self) -> None:
        if not self.hold_high_watermark:
            self.log.replay_high_watermark(self.log.log_end_offset)
        if self.watchers:
            self._notify()

    def _notify(self) -> None:
        for watcher in tuple(self.watchers):
            watcher()

    def roll(self, now_ms: int) -> None:
        """Close the active segment and begin a new one at the log end."""
        if self.segments[-1].size == 0:
            return
        self._begin(self._create_segment(self.log.log_end_offset, now_ms))

    def _create_segment(self, base_offset: int, now_ms: int) -> Segment:
        segment = Segment(self.files, self.path, base_offset, now_ms=now_ms, create=True)
        reach("after_segment_created")
        return segment

    def _begin(self, active: Segment) -> None:
        closed = self.segments[-1]
        self._persistence.note_names_changed()
        self.segments.append(active)
        self._bases.append(active.base_offset)
        closed.indexes_written = False  # a flush may have written them, before the last records came
        try:
            self._persistence.write_indexes(closed)
            self._persistence.write_snapshot()
        except StorageError as error:
            logger.warning("%s; the recovery point stays before it until a sync writes it.", error)

    # Reading

    def read(
        self,
        offset: int,
        *,
        bytes_max: int,
        end_offset: int | None = None,
        at_least_one: bool = True,
        one_bytes_max: int = INT64_MAX,
    ) -> bytes | memoryview:
        """Whole batches from the one with `offset` on; none that begins at or behind `end_offset`.

        `end_offset` is the high watermark unless given. At most `bytes_max` bytes, but one batch if `at_least_one`,
        unless it has more than `one_bytes_max`; `large_batch` gives that one.
        Batches come from one segment at a time, as in Kafka.
        """
        log = self.log
        if not log.log_start_offset <= offset <= log.log_end_offset:
            raise Refused(
                ErrorCode.offset_out_of_range,
                f"{self.topic}-{self.index} holds offsets {log.log_start_offset} to {log.log_end_offset}, not {offset}",
            )
        end = log.high_watermark if end_offset is None else min(end_offset, log.log_end_offset)
        number = bisect_right(self._bases, offset) - 1
        while offset < end and number < len(self.segments):
            segment = self.segments[number]
            number += 1
            segment_end = self._bases[number] if number < len(self._bases) else log.log_end_offset
            data = segment.read(
                offset,
                bytes_max=bytes_max,
                end_offset=end if end < segment_end else None,
                one_bytes_max=one_bytes_max if at_least_one else 0,
            )
            if data or segment.position_of(offset) < segment.size:
                return data
            offset = max(offset, segment_end)  # compaction removed what was left of this segment
        return b""

    def large_batch(self, offset: int, end_offset: int) -> LargeBatch | None:
        """The first batch from the one with `offset` on that begins before `end_offset`, for another thread to read."""
        number = max(bisect_right(self._bases, offset) - 1, 0)
        while number < len(self.segments) and offset < end_offset:
            batch = self.segments[number].large_batch(offset, end_offset)
            if batch is not None:
                return batch
            number += 1
            offset = max(offset, self._bases[number] if number < len(self._bases) else end_offset)
        return None

    def batches(self, from_offset: int = 0) -> Iterator[tuple[BatchHeader, memoryview]]:
        """Each stored batch from the one with `from_offset` on, its checksum checked."""
        from_offset = max(from_offset, self.log.log_start_offset)
        first = max(bisect_right(self._bases, from_offset) - 1, 0)
        for segment in self.segments[first:]:
            yield from segment.batches(from_offset)

    def offset_for_timestamp(
        self, timestamp_ms: int, note_held: NoteHeld = lambda _: None
    ) -> Slices[tuple[int, int] | None]:
        """Timestamp and offset of the first record that is not older than `timestamp_ms`."""
        number = 0
        while number < len(self.segments):
            segment = self.segments[number]
            number += 1
            if segment.largest_timestamp < timestamp_ms:
                continue
            finding = segment.find_timestamp(timestamp_ms, self.log.log_start_offset, note_held)
            while True:
                try:
                    next(finding)
                except StopIteration as end:
                    found = end.value
                    break
                yield
                if number > len(self.segments) or self.segments[number - 1] is not segment:
                    # Retention or compaction has removed segments meanwhile: look again from the start.
                    found, number = None, 0
                    break
            if found is not None:
                return found
        return None

    def max_timestamp(self, note_held: NoteHeld = lambda _: None) -> Slices[tuple[int, int] | None]:
        """The largest timestamp and the first record that has it."""
        largest = max(segment.largest_timestamp for segment in self.segments)
        return None if largest < 0 else (yield from self.offset_for_timestamp(largest, note_held))

    # Deleting

    def delete_records(self, offset: int) -> int:
        """Move the log start to `offset` (-1: the high watermark), durably; returns the new log start."""
        log_start_offset = self.log.decide_delete_records(offset)
        if log_start_offset > self.checkpoint.log_start_offset:
            # Also where retention was there before: a power cut may bring back what it removed.
            self._persistence.save(replace(self.checkpoint, log_start_offset=log_start_offset))
        if log_start_offset > self.log.log_start_offset:
            self.log.replay_log_start(log_start_offset)
            self._remove_segments(sum(1 for base in self._bases[1:] if base <= log_start_offset))
            self._notify()
        return log_start_offset

    def apply_retention(self, now_ms: int) -> int:
        """Remove the segments that retention.ms, retention.bytes or the log start have passed; returns how many."""
        disk, settings = self.files.disk, self.settings
        with told_as(f"The segments of {self.path} cannot be looked at and none was removed"):
            facts = [
                SegmentFacts(s.base_offset, s.size, s.largest_timestamp, disk.modified_ms(s.file.path))
                for s in self.segments
            ]
        count = self.log.decide_retention(
            facts,
            now_ms=now_ms,
            retention_ms=settings.retention_ms if settings.deletes else -1,
            retention_bytes=settings.retention_bytes if settings.deletes else -1,
        )
        if count == len(self.segments):
            self.roll(now_ms)
        if count:
            self._remove_segments(count)
            self._notify()
        return count

    def _remove_segments(self, count: int) -> None:
        if count == 0:
            return
        if self.segments[count].base_offset > self.checkpoint.recovery_point:
            # What is known of the producers must be safe before the records that tell it are gone.
            self.flush()
        for segment in self.segments[:count]:
            segment.remove()
            reach("between_removed_segments")
        del self.segments[:count], self._bases[:count]
        self._persistence.note_names_changed()
        self.log.replay_log_start(self._bases[0])
        self._persistence.remove_snapshots(lambda offset: offset >= self._bases[0])
        logger.info("Removed %d segments of %s below offset %d.", count, self.path, self._bases[0])

    def expire_producers(self, now_ms: int) -> int:
        """Forget the producers that were idle for producer.id.expiration.ms; returns how many."""
        expired = self.log.producers.expired(now_ms, self.settings.producer_id_expiration_ms)
        self.log.producers.replay_expiry(expired)
        return len(expired)

    def delete(self) -> None:
        """Remove the whole partition."""
        self.discard()
        for _ in remove_directories(self.files, [self.path]):
            continue

    def discard(self) -> None:
        """Take no more records, since the partition is deleted: its files are about to be removed."""
        for segment in self.segments:
            segment.file.discard()
        self.failure = StorageError(f"{self.topic}-{self.index} was deleted.")
        self.log.producers.leave_budget()

    # Compaction, see cleaner.py

    def replace_segments(self, old: Sequence[Segment], successor: Segment) -> None:
        """Serve a compacted segment, whose log file has been put in place, instead of `old`."""
        first = self.segments.index(old[0])
        segment = Segment(self.files, self.path, old[0].base_offset, now_ms=old[0].created_ms)
        segment.take_indexes_of(successor)
        self.segments[first : first + len(old)] = [segment]
        self._bases[first : first + len(old)] = [segment.base_offset]
        self._persistence.write_indexes(segment)

    def note_cleaned(self, end_offset: int) -> None:
        """The next compaction need not look for keys below `end_offset`."""
        self._persistence.save(replace(self.checkpoint, first_dirty_offset=end_offset))

    # Durability, see persistence.py

    @property
    def checkpoint(self) -> Checkpoint:
        return self._persistence.checkpoint

    @property
    def has_unsynced_segments(self) -> bool:
        """Whether closed segments wait for a sync, without which a start after a crash scans them again."""
        return self._persistence.has_unsynced_segments

    def dirty_files(self) -> Unsynced | None:
        """What a sync must cover now, or None if all is on the disk."""
        return self._persistence.dirty_files()

    def mark_synced(self, unsynced: Unsynced) -> None:
        """Take note that `unsynced.sync()` has returned. After a roll this moves the recovery point."""
        self._persistence.mark_synced(unsynced)

    def flush(self) -> None:
        """Sync everything and write indexes and a snapshot, so that the next start has nothing to scan."""
        self._persistence.flush()

    def close(self, clean: bool = True) -> None:
        """Give the files back; `clean` makes everything durable first."""
        if clean and self.failure is None:
            self.flush()
        for segment in self.segments:
            segment.close()
        self.log.producers.leave_budget()


def remove_directories(files: OpenFiles, paths: Sequence[str]) -> Iterator[None]:
    """Remove partitions' directories with their files; yields after each step.

    All of them are renamed first, durably, so that a crash leaves no half of one under its old name.
    """
    disk = files.disk
    with told_as(f"{', '.join(paths[:3])} could not be deleted"):
        for path in paths:
            disk.rename(path, path + DELETED_SUFFIX)
            yield
        if paths:
            disk.sync_directory(directory_of(paths[0]))
        for path in paths:
            remove_renamed(files, path + DELETED_SUFFIX)
            yield


def remove_renamed(files: OpenFiles, path: str) -> None:
    """Remove what is left of a partition whose directory was renamed."""
    for name, _ in files.disk.list(path):
        files.disk.remove(f"{path}/{name}")
    files.disk.remove_directory(path)


def _stamp_time(batch: bytearray | memoryview, attributes: int, max_timestamp: int) -> None:
    """LogAppendTime: these two fields are under the checksum, so it is made anew."""
    _ATTRIBUTES.pack_into(batch, CRC_START, attributes)
    _MAX_TIMESTAMP.pack_into(batch, _MAX_TIMESTAMP_POSITION, max_timestamp)
    _CRC.pack_into(batch, CRC_POSITION, crc32c(memoryview(batch)[CRC_START:]))
