"""What of a partition is on the disk for good: which files a sync must cover, the recovery point, indexes, snapshots.

The log file is the truth; what lies beside it is derived. A derived file counts only below the recovery point, which
moves only after all of them were synced. One that is already believed is therefore never replaced by unsynced content.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter

from semel.broker.failpoints import reach
from semel.broker.storage.checkpoint import CHECKPOINT_NAME, Checkpoint
from semel.broker.storage.failures import StorageError, told_as
from semel.broker.storage.index import encode_aborted, encode_checksums
from semel.broker.storage.log_file import LogFile, OpenFiles, directory_of, remove_file, replace_file
from semel.broker.storage.recovery import Opened
from semel.broker.storage.segment import (
    CHECKSUMS_SUFFIX,
    INDEX_SUFFIXES,
    SNAPSHOT_SUFFIX,
    Segment,
    offset_name,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Unsynced:
    """What must reach the disk so that every record below `end_offset` survives a power cut.

    `sync` may run in another thread; tell the partition with `mark_synced` afterwards.
    """

    end_offset: int
    active_base_offset: int
    files: tuple[LogFile, ...]
    derived: dict[str, int]
    directories: tuple[str, ...]
    names_changed: int
    _files: OpenFiles

    def sync(self) -> None:
        """Return when all of it is on the disk; StorageError if that cannot be said."""
        for file in self.files:
            file.sync()
        with told_as("The files beside a log could not be synced; after a crash they are rebuilt"):
            disk = self._files.disk
            for path, sync in [(path, disk.sync) for path in self.derived] + [
                (path, disk.sync_directory) for path in self.directories
            ]:
                try:
                    sync(path)
                except FileNotFoundError:
                    logger.debug("%s was removed while it was to be synced", path)


class Persistence:
    """Shares `segments` and `log` with its partition, which changes them."""

    def __init__(self, files: OpenFiles, path: str, opened: Opened) -> None:
        self.checkpoint = opened.checkpoint
        self._files = files
        self._path = path
        self._log = opened.log
        self._segments = opened.segments
        self._synced_offset = min(self.checkpoint.recovery_point, self._log.log_end_offset)
        # Whether the names found at start are on the disk is not known, so the first sync covers them.
        self._names_changed, self._names_synced = 1, 0
        self._derived: dict[str, int] = {}  # files written and not yet synced, with the change that wrote them

    @property
    def has_unsynced_segments(self) -> bool:
        active_base, first_base = self._segments[-1].base_offset, self._segments[0].base_offset
        return active_base > max(self.checkpoint.recovery_point, first_base)

    def note_names_changed(self) -> None:
        """A file was made or removed: the next sync covers the directory too."""
        self._names_changed += 1

    def dirty_files(self) -> Unsynced | None:
        end_offset = self._log.log_end_offset
        if end_offset <= self._synced_offset and self._names_changed == self._names_synced and not self._derived:
            return None
        first = max(bisect_right(self._segments, self._synced_offset, key=attrgetter("base_offset")) - 1, 0)
        return Unsynced(
            end_offset,
            self._write_missing_indexes(),
            tuple(segment.file for segment in self._segments[first:]),
            dict(self._derived),
            (self._path, directory_of(self._path)) if self._names_changed != self._names_synced else (),
            self._names_changed,
            self._files,
        )

    def _write_missing_indexes(self) -> int:
        """Write what a full disk kept from being written at a roll; returns up to which base offset all is there."""
        recovery_point = self.checkpoint.recovery_point
        first = max(bisect_right(self._segments, recovery_point, key=attrgetter("base_offset")) - 1, 0)
        for segment in self._segments[first:-1]:
            if not segment.indexes_written:
                try:
                    self.write_indexes(segment)
                except StorageError as error:
                    logger.warning("%s; the recovery point stays before it until a sync writes it.", error)
                    return segment.base_offset
        return self._segments[-1].base_offset

    def mark_synced(self, unsynced: Unsynced) -> None:
        self._take_synced(unsynced)
        if unsynced.active_base_offset > self.checkpoint.recovery_point:
            try:
                self._move_recovery_point(unsynced.active_base_offset)
            except StorageError as error:
                # The records are safe all the same; a start after a crash has more to scan.
                logger.warning("%s", error)

    def _take_synced(self, unsynced: Unsynced) -> None:
        self._synced_offset = max(self._synced_offset, unsynced.end_offset)
        self._names_synced = max(self._names_synced, unsynced.names_changed)
        for path, version in unsynced.derived.items():
            if self._derived.get(path) == version:
                del self._derived[path]

    def flush(self) -> None:
        log_end_offset = self._log.log_end_offset
        is_written = all(segment.indexes_written or not segment.size for segment in self._segments)
        # Nothing was made or removed since the start: a partition that nobody touched costs no sync.
        is_as_found = self._names_changed <= max(self._names_synced, 1)
        if log_end_offset == self.checkpoint.recovery_point and is_written and is_as_found and not self._derived:
            return
        for segment in self._segments:
            if not segment.indexes_written or segment is self._segments[-1]:
                self.write_indexes(segment)
        self.write_snapshot()
        unsynced = self.dirty_files()
        assert unsynced is not None, "the snapshot was just written"
        unsynced.sync()
        self._take_synced(unsynced)
        self._move_recovery_point(log_end_offset)
        kept = {log_end_offset, *(segment.base_offset for segment in self._segments)}
        self.remove_snapshots(lambda offset: offset in kept)

    def _move_recovery_point(self, offset: int) -> None:
        epochs = tuple(entry for entry in self._log.leader_epochs.entries if entry[1] < offset)
        self.save(replace(self.checkpoint, recovery_point=offset, leader_epochs=epochs))

    def save(self, checkpoint: Checkpoint) -> None:
        """Make the checkpoint durable."""
        replace_file(self._files.disk, f"{self._path}/{CHECKPOINT_NAME}", checkpoint.encode(), sync="all")
        self.checkpoint = checkpoint

    def write_indexes(self, segment: Segment) -> None:
        """Write the three indexes of a segment, and their checksums."""
        is_believed = segment.base_offset < self.checkpoint.recovery_point
        following = bisect_right(self._segments, segment.base_offset, key=attrgetter("base_offset"))
        is_active = following == len(self._segments)
        end = self._log.log_end_offset if is_active else self._segments[following].base_offset
        aborted = [e for e in self._log.all_aborted() if segment.base_offset <= e.last_offset < end]
        contents = (*segment.encode_indexes(), encode_aborted(aborted))
        for suffix, content in zip(INDEX_SUFFIXES, contents, strict=True):
            self._write_derived(segment.stem + suffix, content, is_believed)
        self._write_derived(segment.stem + CHECKSUMS_SUFFIX, encode_checksums(contents), is_believed)
        segment.indexes_written = True

    def write_snapshot(self) -> None:
        """Write what is known of the producers at the log end. It has a checksum, so a torn one is told at start."""
        path = f"{self._path}/{offset_name(self._log.log_end_offset)}{SNAPSHOT_SUFFIX}"
        reach("before_snapshot")
        self._write_derived(path, self._log.encode_snapshot(), False)
        reach("after_snapshot")

    def _write_derived(self, path: str, data: bytes, is_believed: bool) -> None:
        replace_file(self._files.disk, path, data, sync="content" if is_believed else "nothing")
        self._names_changed += 1
        self._derived[path] = self._names_changed

    def remove_snapshots(self, is_kept: Callable[[int], bool]) -> None:
        with told_as(f"Old snapshots in {self._path} could not be removed"):
            names = [name for name, _ in self._files.disk.list(self._path) if name.endswith(SNAPSHOT_SUFFIX)]
        for name in names:
            if not is_kept(int(name.removesuffix(SNAPSHOT_SUFFIX))):
                remove_file(self._files.disk, f"{self._path}/{name}")
