"""The few file operations that storage is built on, as a protocol, and the real disk behind them.

Operations raise OSError as the system does; `log_file.py` gives them meaning. The simulated disk of the tests has the
same face, so that every crash point can be tried in memory.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from typing_extensions import Buffer


_sync_data = getattr(os, "fdatasync", os.fsync)  # macOS has only fsync

# Records and password hashes are nobody else's business, whatever the umask says.
_FILE_MODE: Final = 0o600
_DIRECTORY_MODE: Final = 0o700
_OF_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


class Disk(Protocol):
    """Paths are strings; a handle is what `open` returned."""

    def open(self, path: str, *, create: bool = False) -> int:
        """A handle for reading and writing; `create` makes an empty file where none is."""
        ...

    def close(self, handle: int) -> None: ...

    def read(self, handle: int, count: int, position: int) -> bytes:
        """Up to `count` bytes, fewer at the end of the file."""
        ...

    def write(self, handle: int, buffers: Sequence[Buffer], position: int) -> int:
        """Write the buffers one after another from `position` on; returns how many bytes went out, maybe not all."""
        ...

    def truncate(self, handle: int, size: int) -> None: ...

    def sync(self, path: str) -> None:
        """Return when the content of the file survives a power cut. May be called from another thread."""
        ...

    def sync_directory(self, path: str) -> None:
        """Return when the names in the directory survive a power cut. May be called from another thread."""
        ...

    def rename(self, path: str, new_path: str) -> None:
        """Also for directories; a file at `new_path` is replaced in one step."""
        ...

    def remove(self, path: str) -> None: ...

    def make_directory(self, path: str) -> None:
        """With its parents; one that is there already is fine."""
        ...

    def make_private(self, path: str) -> bool:
        """Take all rights of other users away from a file or directory; returns whether they had any."""
        ...

    def remove_directory(self, path: str) -> None: ...

    def list(self, path: str) -> list[tuple[str, bool]]:
        """Name and whether it is a directory, in no order; a directory that is not there raises FileNotFoundError."""
        ...

    def size(self, path: str) -> int: ...

    def modified_ms(self, path: str) -> int: ...

    def lock(self, path: str) -> int:
        """A handle of the file, made if missing, which no other process gets until it is closed: BlockingIOError."""
        ...


class RealDisk:
    """The operating system's files, unbuffered.

    >>> import tempfile
    >>> disk = RealDisk()
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     handle = disk.open(f"{directory}/a.log", create=True)
    ...     written = disk.write(handle, [b"one", b"two"], 0)
    ...     print(written, disk.read(handle, 10, 3), disk.list(directory))
    ...     disk.close(handle)
    6 b'two' [('a.log', False)]
    """

    def open(self, path: str, *, create: bool = False) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        return os.open(path, flags, _FILE_MODE)

    def close(self, handle: int) -> None:
        os.close(handle)

    def read(self, handle: int, count: int, position: int) -> bytes:
        return os.pread(handle, count, position)

    def write(self, handle: int, buffers: Sequence[Buffer], position: int) -> int:
        return os.pwritev(handle, buffers, position)

    def truncate(self, handle: int, size: int) -> None:
        os.ftruncate(handle, size)

    def sync(self, path: str) -> None:
        # Its own descriptor: the loop may close the one it appends with while another thread waits here.
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _sync_data(descriptor)
        finally:
            os.close(descriptor)

    def sync_directory(self, path: str) -> None:
        descriptor = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, path: str, new_path: str) -> None:
        os.replace(path, new_path)

    def remove(self, path: str) -> None:
        os.unlink(path)

    def make_directory(self, path: str) -> None:
        os.makedirs(path, _DIRECTORY_MODE, exist_ok=True)

    def make_private(self, path: str) -> bool:
        status = os.lstat(path)
        is_open = bool(status.st_mode & _OF_OTHERS) and not stat.S_ISLNK(status.st_mode)
        if is_open:
            os.chmod(path, stat.S_IMODE(status.st_mode) & ~_OF_OTHERS)
        return is_open

    def remove_directory(self, path: str) -> None:
        os.rmdir(path)

    def list(self, path: str) -> list[tuple[str, bool]]:
        with os.scandir(path) as entries:
            return [(entry.name, entry.is_dir()) for entry in entries]

    def lock(self, path: str) -> int:
        import fcntl  # not on Windows, where the rest of this class works

        handle = self.open(path, create=True)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise
        return handle

    def size(self, path: str) -> int:
        return os.stat(path).st_size

    def modified_ms(self, path: str) -> int:
        return os.stat(path).st_mtime_ns // 1_000_000
