"""A broker's data directory: one process at a time, its partitions, its small metadata files, how it was left."""

from __future__ import annotations

import errno
import logging
import os
import re

from semel.broker.storage.disk import Disk, RealDisk
from semel.broker.storage.failures import DirectoryInUse, StorageError, UnknownLayout, storage_error, told_as
from semel.broker.storage.log_file import OpenFiles, directory_of, read_file, remove_file, replace_file
from semel.broker.storage.log_settings import LogSettings
from semel.broker.storage.partition import DELETED_SUFFIX, Partition, remove_renamed
from semel.core.producer_budget import ProducerBudget

LAYOUT_VERSION = 1
LOCK_NAME = ".semel-lock"
LAYOUT_NAME = ".semel-layout"
CLEAN_SHUTDOWN_NAME = ".semel-clean-shutdown"
META_SUFFIX = ".meta"

_PARTITION_NAME = re.compile(r"(.+)-(\d+)")
_BROKERS_FILE = re.compile(rf"\.semel-.+|.+{re.escape(META_SUFFIX)}")

logger = logging.getLogger(__name__)


class DataDirectory:
    """`DATA/<topic>-<partition>/...` as in Kafka, with a lock, a layout version and metadata files beside.

    `was_clean` tells whether the last broker closed it; otherwise partitions check what it may have left half-written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as path:
    ...     directory = DataDirectory(path)
    ...     partition = directory.open_partition("orders", 0, LogSettings(), now_ms=0)
    ...     offset = partition.append_records([(b"key", b"value")], now_ms=1000)
    ...     directory.write_meta("topics", b"orders")
    ...     partition.close()
    ...     directory.close()
    ...     again = DataDirectory(path)
    ...     print(again.was_clean, again.partitions(), again.read_meta("topics"))
    ...     again.close()
    True [('orders', 0)] b'orders'
    """

    def __init__(self, path: str, disk: Disk | None = None, *, process_id: int | None = None) -> None:
        self.path = path
        self._process_id = os.getpid() if process_id is None else process_id
        self.disk: Disk = RealDisk() if disk is None else disk
        self.files = OpenFiles(self.disk)
        self._lock: int | None = self._take()
        try:
            self._check_layout()
            self._make_private()
            self.was_clean = self._remove_clean_marker()
            self._remove_deleted()
        except BaseException:
            self._unlock()
            raise

    def partitions(self) -> list[tuple[str, int]]:
        """Topic and index of every partition that has a directory here."""
        with told_as(f"The data directory {self.path} cannot be listed"):
            names = sorted(name for name, is_directory in self.disk.list(self.path) if is_directory)
        found = (_PARTITION_NAME.fullmatch(name) for name in names)
        return sorted((match[1], int(match[2])) for match in found if match)

    def open_partition(
        self,
        topic: str,
        index: int,
        settings: LogSettings,
        *,
        now_ms: int,
        hold_high_watermark: bool = False,
        leader_epoch: int = 0,
        producer_budget: ProducerBudget | None = None,
    ) -> Partition:
        """Open a partition and recover it, or make an empty one."""
        path = f"{self.path}/{topic}-{index}"
        with told_as(f"The directory {path} could not be made and the partition holds nothing"):
            self.disk.make_directory(path)
        return Partition(
            self.files,
            path,
            topic,
            index,
            settings,
            now_ms=now_ms,
            hold_high_watermark=hold_high_watermark,
            leader_epoch=leader_epoch,
            producer_budget=producer_budget,
        )

    def read_meta(self, name: str) -> bytes | None:
        """What `write_meta` stored under the name, or None."""
        return read_file(self.disk, self._meta_path(name))

    def write_meta(self, name: str, data: bytes) -> None:
        """Store `data` durably; after a crash the old or the new content is there."""
        replace_file(self.disk, self._meta_path(name), data, sync="all")

    def close(self, clean: bool = True) -> None:
        """Let another process take the directory. `clean` after all partitions were closed without an error."""
        if self._lock is None:
            return
        try:
            if clean:
                replace_file(self.disk, f"{self.path}/{CLEAN_SHUTDOWN_NAME}", b"", sync="all")
        finally:
            self._unlock()

    def _meta_path(self, name: str) -> str:
        if "/" in name or name.startswith("."):
            raise ValueError(f"{name!r} is no name for a metadata file")
        return f"{self.path}/{name}{META_SUFFIX}"

    def _take(self) -> int:
        lock_path = f"{self.path}/{LOCK_NAME}"
        try:
            self._make()
            lock = self.disk.lock(lock_path)
        except BlockingIOError as error:
            owner = (read_file(self.disk, lock_path) or b"").decode(errors="replace").strip()
            by = f"process {owner}" if owner.isdecimal() else "another process"
            raise DirectoryInUse(
                f"The data directory {self.path} is in use by {by}, and two brokers would destroy each other's "
                "records: stop that one, or give this one a directory of its own."
            ) from error
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            self.disk.truncate(lock, 0)
            self.disk.write(lock, [str(self._process_id).encode()], 0)
        except OSError as error:
            # On a full disk the broker must still start, so that records can be read and deleted.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                self.disk.close(lock)
                raise self._unwritable(error) from error
        return lock

    def _make(self) -> None:
        try:
            self.disk.list(self.path)
        except FileNotFoundError:
            self.disk.make_directory(self.path)
            # Its own name too must survive a power cut, or everything in it would be gone with it.
            self.disk.sync_directory(directory_of(self.path))

    def _unwritable(self, error: OSError) -> StorageError:
        return storage_error(f"The data directory {self.path} cannot be written to, so no broker runs", error)

    def _unlock(self) -> None:
        if self._lock is not None:
            self.disk.close(self._lock)
            self._lock = None

    def _check_layout(self) -> None:
        path = f"{self.path}/{LAYOUT_NAME}"
        text = (read_file(self.disk, path) or b"").decode(errors="replace").strip()
        if not text:  # a new directory, or a power cut emptied the file
            replace_file(self.disk, path, f"{LAYOUT_VERSION}\n".encode(), sync="nothing")
        elif not text.isdecimal():
            raise StorageError(
                f"{path} holds {text[:20]!r} in place of a version: the directory may not be a broker's. Its files are "
                "untouched; give the broker a directory of its own."
            )
        elif int(text) > LAYOUT_VERSION:
            raise UnknownLayout(
                f"The data directory {self.path} has layout {text} and this version knows up to {LAYOUT_VERSION}. Its "
                "records are untouched: open it with the newer version of Semel."
            )

    def _make_private(self) -> None:
        """Earlier versions let the umask decide who could read records and password hashes.

        The directory itself may be the user's, with rights given on purpose: only what a broker made in it is changed.
        A partition's directory closes what is in it.
        """
        opened: list[str] = []
        try:
            for name, is_directory in self.disk.list(self.path):
                ours = _PARTITION_NAME.fullmatch(name) if is_directory else _BROKERS_FILE.fullmatch(name)
                if ours and self.disk.make_private(f"{self.path}/{name}"):
                    opened.append(name)
        except OSError as error:
            logger.warning(
                "Other users of this machine may be able to read what is in %s (%s): run chmod -R go= %s.",
                self.path,
                error.strerror,
                self.path,
            )
        if opened:
            logger.warning(
                "Other users of this machine could read %d files and directories in %s, such as %s. They no longer "
                "can. If SCRAM users were set while they could, change their passwords.",
                len(opened),
                self.path,
                min(opened),
            )

    def _remove_clean_marker(self) -> bool:
        path = f"{self.path}/{CLEAN_SHUTDOWN_NAME}"
        was_clean = read_file(self.disk, path) is not None
        if was_clean:
            remove_file(self.disk, path)
            with told_as(f"The data directory {self.path} could not be synced"):
                self.disk.sync_directory(self.path)
        elif self.partitions():
            logger.warning("%s was not closed by the last broker: partitions check their newest records.", self.path)
        return was_clean

    def _remove_deleted(self) -> None:
        with told_as(f"A deleted partition could not be removed from {self.path}"):
            for name, is_directory in self.disk.list(self.path):
                if is_directory and name.endswith(DELETED_SUFFIX):
                    remove_renamed(self.files, f"{self.path}/{name}")
