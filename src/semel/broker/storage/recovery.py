"""Opening a partition's directory: finish or undo an interrupted compaction, check what a crash may have torn, replay.

Everything below the recovery point was synced together with its indexes and snapshots and is believed. From there on
each batch is checked, the tail that is not whole is cut off, and producer state is replayed from the last snapshot at
or below the recovery point. Snapshots above it may have survived a power cut that took what they were made from.
"""

from __future__ import annotations

import logging
import re
import struct
from bisect import bisect_right
from dataclasses import dataclass, field
from operator import attrgetter

from semel.broker.failpoints import reach
from semel.broker.storage.checkpoint import CHECKPOINT_NAME, Checkpoint
from semel.broker.storage.failures import DamagedLog, UnknownLayout, told_as
from semel.broker.storage.index import check_content, decode_aborted
from semel.broker.storage.log_file import (
    TEMPORARY_SUFFIX,
    LogFile,
    OpenFiles,
    read_file,
    remove_file,
)
from semel.broker.storage.log_settings import LogSettings
from semel.broker.storage.segment import (
    ABORTED_SUFFIX,
    CHECKSUMS_SUFFIX,
    INDEX_SUFFIXES,
    LOG_SUFFIX,
    SNAPSHOT_SUFFIX,
    Segment,
    offset_name,
)
from semel.core.leader_epochs import LeaderEpochs
from semel.core.partition_log import AbortedTransaction, PartitionLog
from semel.core.producer_budget import ProducerBudget
from semel.errors import CorruptRecords
from semel.records.control import read_control_batch
from semel.records.layout import HEADER_BYTES, INT64_MAX, LENGTH_FIELD_END, MAGIC, BatchHeader, read_header, verify_crc

CLEANED_SUFFIX = ".cleaned"
SWAP_SUFFIX = ".swap"
DAMAGED_SUFFIX = ".damaged"

_LOG_NAME = re.compile(r"(\d{20})\.log")
_SNAPSHOT_NAME = re.compile(r"(\d{20})\.snapshot")
_INDEX_NAME = re.compile(r"(\d{20})\.(?:index|timeindex|txnindex|indexsums)")
_SWAP_NAME = re.compile(r"(\d{20})\.log\.(\d{20})\.swap")
_EPOCH_AND_MAGIC = struct.Struct(">ib")  # at LENGTH_FIELD_END of every batch
_base_offset = attrgetter("base_offset")
_COPY_BYTES = 4 * 1024 * 1024

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Opened:
    """A partition's files and state, ready to serve. `was_repaired`: something had to be scanned, cut or rebuilt."""

    log: PartitionLog
    segments: list[Segment]
    checkpoint: Checkpoint
    was_repaired: bool = False
    failure: CorruptRecords | None = None


@dataclass(slots=True)
class _Directory:
    """The names in a partition's directory, sorted by what they are."""

    path: str
    files: OpenFiles
    leader_epoch: int
    bases: list[int] = field(default_factory=list[int])
    snapshots: list[int] = field(default_factory=list[int])
    swaps: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    indexes: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])

    def read(self) -> None:
        with told_as(f"The directory {self.path} cannot be listed and its partition is not served"):
            names = sorted(name for name, is_directory in self.files.disk.list(self.path) if not is_directory)
        for name in names:
            if match := _LOG_NAME.fullmatch(name):
                self.bases.append(int(match[1]))
            elif match := _SNAPSHOT_NAME.fullmatch(name):
                self.snapshots.append(int(match[1]))
            elif match := _SWAP_NAME.fullmatch(name):
                self.swaps.append((int(match[1]), int(match[2])))
            elif match := _INDEX_NAME.fullmatch(name):
                self.indexes.append((int(match[1]), name))
            elif name.endswith((CLEANED_SUFFIX, TEMPORARY_SUFFIX)):
                remove_file(self.files.disk, f"{self.path}/{name}")  # left over from a write that did not finish
        for base, name in self.indexes:
            if base not in self.bases:
                remove_file(self.files.disk, f"{self.path}/{name}")  # left over from a segment that was deleted

    def stem(self, offset: int) -> str:
        return f"{self.path}/{offset_name(offset)}"


def open_partition(
    files: OpenFiles,
    path: str,
    settings: LogSettings,
    *,
    now_ms: int,
    leader_epoch: int,
    budget: ProducerBudget | None = None,
) -> Opened:
    """Read the directory, repair what a crash left, and tell every repair to the log; `leader_epoch` begins there."""
    directory = _Directory(path, files, leader_epoch)
    directory.read()
    for base, end in directory.swaps:
        logger.warning("Finishing the compaction of %s that a crash interrupted.", directory.stem(base))
        finish_swap(files, path, base, end)
        directory.bases = sorted({base, *(b for b in directory.bases if not base < b < end)})
    checkpoint = _read_checkpoint(files, path)
    bases = directory.bases or [checkpoint.log_start_offset]
    segments = [Segment(files, path, base, now_ms=now_ms, create=not directory.bases) for base in bases]
    log = PartitionLog(bases[0], producers_max=settings.producers_max, budget=budget)
    opened = Opened(log, segments, checkpoint)
    opened.log.leader_epochs = LeaderEpochs(checkpoint.leader_epochs)
    _check_tail(opened, directory, settings)
    _replay(opened, directory, now_ms)
    _apply_log_start(opened, files, path, now_ms)
    log.leader_epochs.begin(leader_epoch, log.log_end_offset)
    log.replay_high_watermark(log.log_end_offset)
    return opened


def _read_checkpoint(files: OpenFiles, path: str) -> Checkpoint:
    data = read_file(files.disk, f"{path}/{CHECKPOINT_NAME}")
    if data is None:
        return Checkpoint()
    try:
        return Checkpoint.decode(data)
    except UnknownLayout as error:
        raise UnknownLayout(f"{path}: {error}") from error
    except (CorruptRecords, ValueError, KeyError) as error:
        logger.error(
            "%s/%s is damaged (%s): the whole log is scanned, and records deleted before may appear again.",
            path,
            CHECKPOINT_NAME,
            error,
        )
        return Checkpoint()


# Checking what was not synced


def _check_tail(opened: Opened, directory: _Directory, settings: LogSettings) -> None:
    """Scan from the recovery point on and cut off what is not whole."""
    recovery_point = opened.checkpoint.recovery_point
    segments = opened.segments
    first = max(0, sum(1 for segment in segments if segment.base_offset < recovery_point) - 1)
    for segment in segments[:first]:
        segment.indexes_written = True
    for number in range(first, len(segments)):
        segment = segments[number]
        before = segments[number - 1]
        if number > first and segment.base_offset > recovery_point and segment.base_offset != before.next_offset:
            why = f"the next segment begins at offset {segment.base_offset}"
            _cut(opened, directory, number - 1, before.walker().damage(before.size, before.next_offset, why))
            break
        position = segment.load_indexes_below(recovery_point, may_end_before=number + 1 < len(segments))
        segment.indexes_written = position == segment.size
        damage = _scan(segment, position, recovery_point, settings.index_interval_bytes)
        opened.was_repaired |= position < segment.size
        if damage is None:
            continue
        if damage.offset >= recovery_point:
            _cut(opened, directory, number, damage)
            break
        _keep_damaged(opened, segment, damage)
    end = segments[-1].next_offset
    if end < recovery_point and opened.failure is None:
        logger.error(
            "%s ends at offset %d, but records up to offset %d were safely stored: someone removed them.",
            directory.path,
            end,
            recovery_point,
        )


def _scan(segment: Segment, position: int, recovery_point: int, index_interval_bytes: int) -> DamagedLog | None:
    walker = segment.walker(gapless_from=recovery_point)
    try:
        for at, header, _ in walker.batches(position, segment.next_offset, check_crc=True):
            segment.note(header, at, index_interval_bytes)
    except DamagedLog as damage:
        return damage
    return None


def _keep_damaged(opened: Opened, segment: Segment, damage: DamagedLog) -> None:
    """Bit rot in what was safely stored: keep the bytes and serve what lies before."""
    logger.error("%s The bytes were left as they are.", damage)
    segment.damage = damage
    if segment is opened.segments[-1]:
        opened.failure = damage  # the end of the log is not known, so nothing may be appended


def _cut(opened: Opened, directory: _Directory, number: int, damage: DamagedLog) -> None:
    """Cut the log at the first batch that is not whole. Sound batches behind it are kept aside, never thrown away."""
    opened.was_repaired = True
    segment = opened.segments[number]
    later = opened.segments[number + 1 :]
    tail_bytes = segment.size - damage.position
    if any(lost.size for lost in later) or _has_sound_batch(
        segment.file, damage.position + 1, damage.offset, directory.leader_epoch
    ):
        kept = f"{segment.file.path}.{damage.position}{DAMAGED_SUFFIX}"
        _copy_tail(directory.files, segment.file, damage.position, kept)
        logger.error(
            "%s was torn at byte %d before its records were synced: %d bytes from offset %d on and %d later segments "
            "are no longer served and were moved aside to files that end in %s.",
            segment.file.path,
            damage.position,
            tail_bytes,
            damage.offset,
            len(later),
            DAMAGED_SUFFIX,
        )
    else:
        logger.warning(
            "%s ended within a batch: the %d bytes from byte %d on were cut off, since their write had not finished.",
            segment.file.path,
            tail_bytes,
            damage.position,
        )
    segment.truncate(damage.position)
    disk = directory.files.disk
    for lost in reversed(later):
        lost.file.discard()
        if lost.size == 0:
            lost.remove()
            continue
        with told_as(f"{lost.file.path} could not be moved aside"):
            disk.rename(lost.file.path, lost.file.path + DAMAGED_SUFFIX)
        lost.remove()
    del opened.segments[number + 1 :]


def _has_sound_batch(file: LogFile, position: int, next_offset: int, leader_epoch: int) -> bool:
    """Whether a whole batch with a later offset stands somewhere behind `position`."""
    tail = file.read(position, file.size - position)
    for epoch in range(leader_epoch + 1):
        epoch_and_magic = _EPOCH_AND_MAGIC.pack(epoch, MAGIC)
        found = tail.find(epoch_and_magic)
        while found >= 0:
            start = found - LENGTH_FIELD_END
            if start >= 0 and _is_sound_batch(memoryview(tail)[start:], next_offset):
                return True
            found = tail.find(epoch_and_magic, found + 1)
    return False


def _is_sound_batch(tail: memoryview, next_offset: int) -> bool:
    if len(tail) < HEADER_BYTES:
        return False
    try:
        header = read_header(tail)
        if header.base_offset < next_offset or header.total_bytes > len(tail):
            return False
        verify_crc(tail[: header.total_bytes])
    except CorruptRecords:
        return False
    return True


def _copy_tail(files: OpenFiles, source: LogFile, position: int, path: str) -> None:
    target = LogFile(files, path, create=True)
    target.truncate(0)
    while position < source.size:
        data = source.read(position, _COPY_BYTES)
        target.append([data])
        position += len(data)
    target.sync()
    target.discard()


# Replaying producers and transactions


def _replay(opened: Opened, directory: _Directory, now_ms: int) -> None:
    log, segments = opened.log, opened.segments
    aborted, from_offset = _load_aborted(opened, directory)
    recovery_point = opened.checkpoint.recovery_point
    newest = min(recovery_point, segments[-1].next_offset, from_offset)
    for offset in reversed(directory.snapshots):
        if offset > newest or offset < segments[0].base_offset:
            if offset > recovery_point:
                remove_file(directory.files.disk, directory.stem(offset) + SNAPSHOT_SUFFIX)
            continue
        data = read_file(directory.files.disk, directory.stem(offset) + SNAPSHOT_SUFFIX)
        try:
            log.load_snapshot(data or b"", offset, now_ms=now_ms)
        except CorruptRecords as error:
            logger.warning("%s%s: %s", directory.stem(offset), SNAPSHOT_SUFFIX, error)
            opened.was_repaired = True
            continue
        log.load_aborted(aborted)
        break
    if log.log_end_offset < recovery_point:
        opened.was_repaired = True
        # Compaction may have taken the records of an aborted transaction and left its marker: what is rebuilt does not
        # know it any more, and the stored index must not bring it back at the next start.
        for segment in segments[max(bisect_right(segments, log.log_end_offset, key=_base_offset) - 1, 0) :]:
            segment.indexes_written = False
        logger.warning(
            "The state of producers and transactions of %s is rebuilt from the records from offset %d on.",
            directory.path,
            log.log_end_offset,
        )
    _replay_batches(opened, now_ms)


def _replay_batches(opened: Opened, now_ms: int) -> None:
    log, segments = opened.log, opened.segments
    start = log.log_end_offset
    for number, segment in enumerate(segments):
        is_below = number + 1 < len(segments) and segments[number + 1].base_offset <= start
        if is_below or (segment is segments[-1] and segment.next_offset <= start):
            continue
        try:
            for header, batch in segment.batches(start, check_crc=False):
                replay_stored(log, header, batch, now_ms)
        except CorruptRecords as damage:
            logger.error("%s The state of its producers cannot be rebuilt.", damage)
            opened.failure = opened.failure or damage
            if segment.damage is None and isinstance(damage, DamagedLog):
                segment.damage = damage


def replay_stored(log: PartitionLog, header: BatchHeader, batch: memoryview, now_ms: int) -> None:
    marker = read_control_batch(batch, check_crc=False) if header.is_control else None
    log.replay_append(header, marker, now_ms=now_ms)


def _load_aborted(opened: Opened, directory: _Directory) -> tuple[list[AbortedTransaction], int]:
    """The stored aborted index, and the offset up to which it is complete."""
    entries: list[AbortedTransaction] = []
    recovery_point = opened.checkpoint.recovery_point
    for number, segment in enumerate(opened.segments):
        if segment.base_offset >= recovery_point:
            break
        end = opened.segments[number + 1].base_offset if number + 1 < len(opened.segments) else INT64_MAX
        path = segment.stem + ABORTED_SUFFIX
        data = read_file(directory.files.disk, path)
        try:
            if data is None:
                raise CorruptRecords("it is missing")
            checksums = read_file(directory.files.disk, segment.stem + CHECKSUMS_SUFFIX)
            check_content(data, INDEX_SUFFIXES.index(ABORTED_SUFFIX), checksums)
            found = decode_aborted(data)
            if found and not (segment.base_offset <= found[0].last_offset and found[-1].last_offset < end):
                raise CorruptRecords("it holds transactions of another segment")
        except CorruptRecords as error:
            logger.warning("Rebuilding %s from the log: %s. No record is lost.", path, error)
            opened.was_repaired = True
            segment.indexes_written = False
            return entries, segment.base_offset
        entries.extend(found)
    return entries, recovery_point


def _apply_log_start(opened: Opened, files: OpenFiles, path: str, now_ms: int) -> None:
    """Records below the log start stay deleted, even if a power cut took the log's end with it."""
    log, segments = opened.log, opened.segments
    log.replay_log_start(max(opened.checkpoint.log_start_offset, segments[0].base_offset))
    end = max(log.log_end_offset, segments[-1].base_offset)
    if log.log_end_offset > segments[-1].next_offset and opened.failure is None:
        opened.was_repaired = True
        segments.append(Segment(files, path, end, now_ms=now_ms, create=True))


# Compaction


def finish_swap(files: OpenFiles, path: str, base: int, end: int) -> None:
    """Put a compacted segment into the place of those from `base` up to `end`, in an order that any crash may cut.

    The swap file's existence is the decision; doing this twice does no harm.
    """
    disk = files.disk
    with told_as(f"The compacted segment at offset {base} of {path} could not be put in place; no record is lost"):
        bases = [int(match[1]) for name, _ in disk.list(path) if (match := _LOG_NAME.fullmatch(name))]
        # The old indexes first: beside the new log they would be lies.
        for old in sorted(b for b in bases if base <= b < end):
            for suffix in (*INDEX_SUFFIXES, CHECKSUMS_SUFFIX):
                remove_file(disk, f"{path}/{offset_name(old)}{suffix}")
        for old in sorted(b for b in bases if base < b < end):
            remove_file(disk, f"{path}/{offset_name(old)}{LOG_SUFFIX}")
        disk.sync_directory(path)
        reach("within_swap")
        disk.rename(swap_path(path, base, end), f"{path}/{offset_name(base)}{LOG_SUFFIX}")
        disk.sync_directory(path)


def swap_path(path: str, base: int, end: int) -> str:
    return f"{path}/{offset_name(base)}{LOG_SUFFIX}.{offset_name(end)}{SWAP_SUFFIX}"
