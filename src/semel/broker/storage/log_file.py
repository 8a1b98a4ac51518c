"""A file that only grows, by whole appends or not at all; and small files that are replaced in one step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from semel.broker.storage.disk import Disk
from semel.broker.storage.failures import StorageError, storage_error, told_as

if TYPE_CHECKING:
    from typing_extensions import Buffer

_LOG = logging.getLogger(__name__)

HANDLES_MAX = 256  # most systems let a process open 1024, and connections need the rest
TEMPORARY_SUFFIX = ".tmp"


class OpenFiles:
    """Bounds how many log files are open at once: the one that was opened first is closed, and reopened on use."""

    def __init__(self, disk: Disk, handles_max: int = HANDLES_MAX) -> None:
        self.disk = disk
        self.handles_max = handles_max
        self._open: dict[LogFile, int] = {}
        self._staged_count = 0

    def __len__(self) -> int:
        return len(self._open)

    def open(self, file: LogFile, *, create: bool) -> int:
        while len(self._open) >= self.handles_max:
            next(iter(self._open)).close()
        handle = self._open[file] = self.disk.open(file.path, create=create)
        return handle

    def stage(self, directory: str) -> StagedFile:
        """A file to write aside. No two have the same name: a topic may be deleted and created again meanwhile."""
        self._staged_count += 1
        return StagedFile(self.disk, f"{directory}/staged-{self._staged_count}{TEMPORARY_SUFFIX}")

    def close(self, file: LogFile) -> None:
        handle = self._open.pop(file, None)
        if handle is not None:
            self.disk.close(handle)


class LogFile:
    """One log file. Only `sync` may be called from another thread than the one that appends.

    After a failed sync the system may have dropped the pages and would call the next sync a success, so the failure
    stays until the file is opened anew; likewise when a half-written append could not be taken back.

    >>> from semel.broker.storage.disk import RealDisk
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     file = LogFile(OpenFiles(RealDisk()), f"{directory}/a.log", create=True)
    ...     print(file.append([b"one"]), file.append([b"two", b"three"]), file.read(3, 100))
    ...     file.close()
    0 3 b'twothree'
    """

    __slots__ = ("_files", "_handle", "_is_discarded", "failure", "path", "size")

    def __init__(self, files: OpenFiles, path: str, *, create: bool = False) -> None:
        self._files = files
        self._handle: int | None = None
        self._is_discarded = False
        self.failure: StorageError | None = None
        self.path = path
        self.size = 0
        if create:
            with told_as(f"The log file {path} could not be made and nothing was stored in it"):
                self._handle = files.open(self, create=True)
        with told_as(f"The log file {path} cannot be opened and its records are not served"):
            self.size = files.disk.size(path)

    def append(self, buffers: Sequence[Buffer]) -> int:
        """Write all of `buffers` behind the end; returns where they begin. On an error nothing of them stays."""
        if self.failure is not None:
            raise self.failure
        start = self.size
        wanted = 0
        for buffer in buffers:
            wanted += len(buffer) if isinstance(buffer, bytes | bytearray) else memoryview(buffer).nbytes
        try:
            handle = self._handle
            if handle is None:
                handle = self._open()
            written = self._files.disk.write(handle, buffers, start)
            if written < wanted:
                self._write_rest(handle, buffers, start, written)
        except OSError as error:
            self._take_back(start)
            raise storage_error(f"Nothing of the batch was stored in {self.path}", error) from error
        self.size = start + wanted
        return start

    def read(self, position: int, count: int) -> bytes:
        """The bytes from `position` on, fewer than `count` only at the end of the file."""
        with told_as(f"{self.path} could not be read at byte {position}; its bytes were left as they are"):
            handle = self._handle
            if handle is None:
                handle = self._open()
            count = min(count, self.size - position)
            data = self._files.disk.read(handle, count, position) if count > 0 else b""
            if len(data) == count or count <= 0:
                return data
            pieces = [data]
            while data and (missing := count - sum(map(len, pieces))) > 0:
                data = self._files.disk.read(handle, missing, position + count - missing)
                pieces.append(data)
            return b"".join(pieces)

    def truncate(self, size: int) -> None:
        with told_as(f"{self.path} could not be cut to {size} bytes"):
            self._files.disk.truncate(self._open() if self._handle is None else self._handle, size)
        self.size = size

    def sync(self) -> None:
        """Return when everything appended before the call survives a power cut."""
        if self._is_discarded:
            return
        if self.failure is not None:
            raise self.failure
        try:
            self._files.disk.sync(self.path)
        except OSError as error:
            if self._is_discarded:
                return  # deleted on purpose in the meantime
            self.failure = storage_error(
                f"{self.path} could not be synced, and what was appended since the last sync may be lost in a power "
                "cut; the partition takes no more records until the broker starts anew",
                error,
            )
            raise self.failure from error

    def close(self) -> None:
        """Give the handle back; the next use opens the file again."""
        self._handle = None
        self._files.close(self)

    def discard(self) -> None:
        """Close the file for good, because its content is deleted or replaced: a later `sync` has nothing to do."""
        self._is_discarded = True
        self.close()

    def _open(self) -> int:
        self._handle = self._files.open(self, create=False)
        return self._handle

    def _write_rest(self, handle: int, buffers: Sequence[Buffer], start: int, written: int) -> None:
        rest = memoryview(b"".join(buffers))[written:]  # a partial write is rare, so the copy does not matter
        position = start + written
        while rest:
            count = self._files.disk.write(handle, [rest], position)
            if count <= 0:
                raise OSError(f"the disk took {count} bytes")
            rest = rest[count:]
            position += count

    def _take_back(self, size: int) -> None:
        try:
            self._files.disk.truncate(self._open() if self._handle is None else self._handle, size)
            # No later sync may cover this: to the log nothing has happened. Were the cut lost with the power, and the
            # half batch not, a start would find damage in front of records that are safe.
            self._files.disk.sync(self.path)
        except OSError as error:
            # Half a batch may stand behind the end. Recovery cuts it off; until then nothing may follow it.
            self.failure = storage_error(
                f"Half a batch could not be taken back from {self.path}; nothing that was acknowledged is lost, but "
                "the partition takes no more records until the broker starts anew",
                error,
            )


class StagedFile:
    """A new file that is written aside and takes its place when it is complete. `write` may run in any thread.

    Until then it has a name that a start removes.
    """

    def __init__(self, disk: Disk, path: str) -> None:
        self.path = path
        self._disk = disk

    def write(self, data: Buffer, position: int) -> None:
        """Make the file, with `data` from `position` on. On an error nothing of it stays."""
        with told_as(f"Nothing of the batch was stored in {self.path}"):
            handle = self._disk.open(self.path, create=True)
            try:
                self._write_all(handle, memoryview(data), position)
            except OSError:
                self.discard()
                raise
            finally:
                self._disk.close(handle)

    def put_in_place(self, head: Buffer, path: str) -> None:
        """Write what stands before the rest and give the file its name."""
        with told_as(f"Nothing of the batch was stored in {path}"):
            try:
                handle = self._disk.open(self.path)
                try:
                    self._write_all(handle, memoryview(head), 0)
                finally:
                    self._disk.close(handle)
                self._disk.rename(self.path, path)
            except OSError:
                self.discard()
                raise

    def discard(self) -> None:
        """Remove what was written."""
        try:
            remove_file(self._disk, self.path)
        except StorageError as error:
            _LOG.warning("%s; the next start removes it.", error)

    def _write_all(self, handle: int, rest: memoryview, position: int) -> None:
        while rest:
            count = self._disk.write(handle, [rest], position)
            if count <= 0:
                raise OSError(f"the disk took {count} bytes")
            rest = rest[count:]
            position += count


def replace_file(disk: Disk, path: str, data: bytes, *, sync: Literal["nothing", "content", "all"]) -> None:
    """Make `data` the content of the file: after a crash it has the old or the new content, never half of one.

    With "nothing" that holds for a killed process only; after a power cut the file may be empty or torn. With "content"
    it is the old or the new one even then, with "all" the new one.
    """
    temporary = path + TEMPORARY_SUFFIX
    with told_as(f"{path} could not be written and keeps its old content"):
        handle = disk.open(temporary, create=True)
        try:
            disk.truncate(handle, 0)
            rest = memoryview(data)
            while rest:
                rest = rest[disk.write(handle, [rest], len(data) - len(rest)) :]
        finally:
            disk.close(handle)
        if sync != "nothing":
            disk.sync(temporary)
        disk.rename(temporary, path)
        if sync == "all":
            disk.sync_directory(directory_of(path))


def read_file(disk: Disk, path: str) -> bytes | None:
    """The whole content of a small file, or None if there is none."""
    try:
        handle = disk.open(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error(f"{path} cannot be opened", error) from error
    with told_as(f"{path} cannot be read"):
        try:
            size = disk.size(path)
            data = disk.read(handle, size, 0)
            while len(data) < size and (more := disk.read(handle, size - len(data), len(data))):
                data += more
            return data
        finally:
            disk.close(handle)


def remove_file(disk: Disk, path: str) -> None:
    """Remove a file that may be gone already."""
    try:
        disk.remove(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise storage_error(f"{path} could not be removed", error) from error


def directory_of(path: str) -> str:
    return path.rpartition("/")[0]
