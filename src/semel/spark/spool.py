"""Encoded data in files, for a Spark whose tasks share a machine with its driver: no byte of it passes through the JVM.

A micro-batch has a folder of its own, an attempt of a task a file in it, and the driver maps the files that the
manifest names. Files are kept for the next micro-batch, for to write over old pages takes half of what new ones take.
Only those that are done: an attempt that nobody waits for any more may write on, and no other may have its file.
A process that was killed leaves its folder behind; the next one removes it.
"""

from __future__ import annotations

import atexit
import fcntl
import mmap
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

from semel.errors import SemelError

_PREFIX: Final = "semel-spool-"
_LOCK: Final = "in-use"
_KEPT: Final = "kept"
_KEPT_BYTES: Final = 256 * 1024 * 1024
_FREE: Final = ".free"
"""Ends the name of a file that a task may take."""
_UNDONE: Final = ".undone"
"""Ends the name of a file that a task has taken, until it is whole."""
_YOUNG_S: Final = 600
"""So long a folder without a lock may belong to a process that is about to take it."""

_folders: dict[tuple[int, str], _ProcessFolder] = {}


class SpoolFailed(SemelError):
    """Encoded data could not be kept on disk."""


@contextmanager
def batch_folder(parent: str | None) -> Iterator[str]:
    """A new folder for the files of one micro-batch, which is removed with whatever is in it."""
    folder = new_batch(parent)
    try:
        yield folder
    finally:
        drop_batch(folder)


def new_batch(parent: str | None = None) -> str:
    """A new folder for the files of one micro-batch, for `drop_batch` in this process or another."""
    where = parent or tempfile.gettempdir()
    key = (os.getpid(), where)
    try:
        if key not in _folders or not _folders[key].is_there():
            remove_leftovers(Path(where))
            _folders[key] = _ProcessFolder(where)
        home = _folders[key]
        folder = tempfile.mkdtemp(dir=home.path)
    except OSError as error:
        raise _failed(where, error) from error
    home.hand_out(folder)
    return folder


def drop_batch(folder: str) -> None:
    """Keep the files that are done for the next micro-batch, up to a limit, and remove the rest."""
    kept = os.path.join(os.path.dirname(folder), _KEPT)
    with suppress(OSError):  # what is not kept is made anew
        room = _KEPT_BYTES - sum(entry.stat().st_size for entry in os.scandir(kept))
        for entry in os.scandir(folder):
            size = entry.stat().st_size
            if not entry.name.endswith(_UNDONE) and size <= room:
                os.rename(entry.path, os.path.join(kept, entry.name.removesuffix(_FREE)))
                room -= size
    shutil.rmtree(folder, ignore_errors=True)


def is_visible(folder: str) -> bool:
    """Whether this process has the very folder that another one has made: its name was drawn at random."""
    found = _identity(folder)
    return found is not None and found[2] == os.geteuid() and os.access(folder, os.W_OK)


def remove_leftovers(parent: Path) -> None:
    """Remove the folders of this user's processes that are gone.

    The folder for temporary files may be everybody's. Whatever another user puts there under such a name (a link, a
    pipe in place of the lock, a folder) is left alone, and nothing is waited for.
    """
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another process is at the same work
            _remove_leftover(folder)


def _remove_leftover(folder: Path) -> None:
    with _opened(folder, os.O_RDONLY | os.O_DIRECTORY) as directory:
        status = os.fstat(directory)
        if status.st_uid != os.geteuid() or time.time() - status.st_mtime < _YOUNG_S:
            return
        with _opened(_LOCK, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, within=directory) as lock:
            status = os.fstat(lock)
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)


@contextmanager
def _opened(path: str | Path, flags: int, *, within: int | None = None) -> Iterator[int]:
    """A descriptor of what is really there: a link is not followed, but an error."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=within)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class _ProcessFolder:
    """Holds a lock for as long as the process lives, however it ends."""

    def __init__(self, parent: str) -> None:
        self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
        self._lock = os.open(os.path.join(self.path, _LOCK), flags, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        atexit.register(shutil.rmtree, self.path, ignore_errors=True)
        self._kept = os.path.join(self.path, _KEPT)
        os.mkdir(self._kept)
        self._identity = _identity(self.path)

    def is_there(self) -> bool:
        """Systems remove what nobody has touched for days from folders for temporary files.

        Another user may then make one of the same name, which is not to be trusted with data.
        """
        return _identity(self.path) == self._identity and os.path.isdir(self._kept)

    def hand_out(self, folder: str) -> None:
        """Let the tasks of this micro-batch have the files that are kept."""
        with suppress(OSError):  # another micro-batch was faster
            for entry in os.scandir(self._kept):
                os.rename(entry.path, os.path.join(folder, f"{entry.name}{_FREE}"))


def _identity(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_uid


class SpoolFile:
    """What one attempt of a task has encoded: blobs one behind the other."""

    def __init__(self, folder: str, name: str) -> None:
        self.path = os.path.join(folder, name)
        self._size = 0
        self._undone_path = self.path + _UNDONE
        with _told(folder):
            flags = os.O_WRONLY if self._take(folder) else os.O_WRONLY | os.O_CREAT | os.O_EXCL
            self._file = os.open(self._undone_path, flags | os.O_CLOEXEC, 0o600)

    def _take(self, folder: str) -> bool:
        """Make one of the free files this one's, if there is one."""
        for name in os.listdir(folder):
            if name.endswith(_FREE):
                with suppress(FileNotFoundError):  # another task was faster
                    os.rename(os.path.join(folder, name), self._undone_path)
                    return True
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)
        if kind is None:
            with _told(self.path):
                os.rename(self._undone_path, self.path)

    def append(self, data: memoryview) -> int:
        """Write all of `data`; returns where it begins."""
        at = self._size
        with _told(self.path):
            while data:
                written = os.write(self._file, data)
                self._size += written
                data = data[written:]
        return at


def open_spooled(path: str) -> BinaryIO:
    """A file that an attempt has written, or is writing."""
    try:
        return open(path + _UNDONE, "rb")
    except FileNotFoundError:
        return open(path, "rb")


@contextmanager
def _told(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _failed(path, error) from error


def _failed(path: str, error: OSError) -> SpoolFailed:
    return SpoolFailed(
        f"Encoded data could not be kept below {path}: {error.strerror}. No transaction was begun and nothing was "
        "written. Make room there, or let spark.local.dir name another folder."
    )


class SpoolReader:
    """The files of a micro-batch, mapped into memory. Stamping a blob there does not change the file."""

    def __init__(self) -> None:
        self._maps: dict[str, mmap.mmap] = {}

    def view(self, path: str, at: int, size: int) -> memoryview:
        if path not in self._maps:
            with _told(path), open(path, "rb") as file:
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return memoryview(self._maps[path])[at : at + size]
