"""One partition: what `core` decides about it, carried out on its segment files.

Append: decide, stamp the offsets into the batch in place, write it with one call, replay. A batch that could not be
written whole is taken back, and nothing of it is known afterwards.
"""

from __future__ import annotations

import logging
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from crc32c import crc32c
from kio.schema.errors import ErrorCode

from semel.broker.failpoints import reach
from semel.broker.storage import recovery
from semel.broker.storage.checkpoint import Checkpoint
from semel.broker.storage.failures import StorageError, told_as
from semel.broker.storage.log_file import OpenFiles, directory_of
from semel.broker.storage.log_settings import LogSettings
from semel.broker.storage.persistence import Persistence, Unsynced
from semel.broker.storage.segment import Segment
from semel.core.batch_checks import decide_timestamp
from semel.core.partition_log import Append, PartitionLog, SegmentFacts
from semel.core.refusal import Refused
from semel.errors import SemelError
from semel.records.control import ControlMarker, MarkerKind, encode_control_batch
from semel.records.layout import CRC_POSITION, CRC_START, BatchHeader, read_header

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
    ) -> None:
        """Open the directory at `path`, which must exist, and recover what is in it."""
        self.topic = topic
        self.index = index
        self.path = path
        self.settings = settings
        self.hold_high_watermark = hold_high_watermark
        self.leader_epoch = leader_epoch
        self.watchers: dict[Callable[[], None], None] = {}
        self.files = files
        opened = recovery.open_partition(files, path, settings, now_ms=now_ms, leader_epoch=leader_epoch)
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
    ) -> Appended:
        """Store a producer's batch, whose checksum the caller has checked; `batch` is stamped in place.

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
        self._store(batch, stored, now_ms)
        self.log.replay_append(stored, now_ms=now_ms)
        self._appended()
        return Appended(decision.base_offset, decision.last_offset, log_append_time_ms, False)

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
        closed, base_offset = self.segments[-1], self.log.log_end_offset
        if closed.size == 0:
            return
        active = Segment(self.files, self.path, base_offset, now_ms=now_ms, create=True)
        reach("after_segment_created")
        self._persistence.note_names_changed()
        self.segments.append(active)
        self._bases.append(base_offset)
        closed.indexes_written = False  # a flush may have written them, before the last records came
        try:
            self._persistence.write_indexes(closed)
            self._persistence.write_snapshot()
        except StorageError as error:
            logger.warning("%s; the recovery point stays before it until a sync writes it.", error)

    # Reading

    def read(
        self, offset: int, *, bytes_max: int, end_offset: int | None = None, at_least_one: bool = True
    ) -> bytes | memoryview:
        """Whole batches from the one with `offset` on; none that begins at or behind `end_offset`.

        `end_offset` is the high watermark unless given. At most `bytes_max` bytes, but one batch if `at_least_one`.
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
                offset, bytes_max=bytes_max, end_offset=end if end < segment_end else None, at_least_one=at_least_one
            )
            if data or segment.position_of(offset) < segment.size:
                return data
            offset = max(offset, segment_end)  # compaction removed what was left of this segment
        return b""

    def batches(self, from_offset: int = 0) -> Iterator[tuple[BatchHeader, memoryview]]:
        """Each stored batch from the one with `from_offset` on, its checksum checked."""
        from_offset = max(from_offset, self.log.log_start_offset)
        first = max(bisect_right(self._bases, from_offset) - 1, 0)
        for segment in self.segments[first:]:
            yield from segment.batches(from_offset)

    def offset_for_timestamp(self, timestamp_ms: int) -> tuple[int, int] | None:
        """Timestamp and offset of the first record that is not older than `timestamp_ms`."""
        for segment in self.segments:
            if segment.largest_timestamp >= timestamp_ms:
                found = segment.find_timestamp(timestamp_ms, self.log.log_start_offset)
                if found is not None:
                    return found
        return None

    def max_timestamp(self) -> tuple[int, int] | None:
        """The largest timestamp and the first record that has it."""
        largest = max(segment.largest_timestamp for segment in self.segments)
        return None if largest < 0 else self.offset_for_timestamp(largest)

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
        """Remove the whole partition. Its directory is renamed first, so that a crash leaves no half of it."""
        for segment in self.segments:
            segment.file.discard()
        self.failure = StorageError(f"{self.topic}-{self.index} was deleted.")
        with told_as(f"{self.path} could not be deleted"):
            remove_directory(self.files, self.path)

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


def remove_directory(files: OpenFiles, path: str) -> None:
    """Rename a partition's directory, then remove it with its files."""
    disk = files.disk
    renamed = path if path.endswith(DELETED_SUFFIX) else path + DELETED_SUFFIX
    if renamed != path:
        disk.rename(path, renamed)
        disk.sync_directory(directory_of(path))
    for name, _ in disk.list(renamed):
        disk.remove(f"{renamed}/{name}")
    disk.remove_directory(renamed)


def _stamp_time(batch: bytearray | memoryview, attributes: int, max_timestamp: int) -> None:
    """LogAppendTime: these two fields are under the checksum, so it is made anew."""
    _ATTRIBUTES.pack_into(batch, CRC_START, attributes)
    _MAX_TIMESTAMP.pack_into(batch, _MAX_TIMESTAMP_POSITION, max_timestamp)
    _CRC.pack_into(batch, CRC_POSITION, crc32c(memoryview(batch)[CRC_START:]))
