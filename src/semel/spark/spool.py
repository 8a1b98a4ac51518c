"""Encoded data in files, for a Spark whose tasks share a machine with its driver: no byte of it passes through the JVM.

A micro-batch has a folder of its own, a task a file in it, and the driver maps the files that the manifest names. A
process that was killed leaves its folder behind; the next one removes it.
"""

from __future__ import annotations

import atexit
import fcntl
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from semel.errors import SemelError

_PREFIX: Final = "semel-spool-"
_LOCK: Final = "in-use"
_YOUNG_S: Final = 600
"""So long a folder without a lock may belong to a process that is about to take it."""

_folders: dict[tuple[int, str], _ProcessFolder] = {}


class SpoolFailed(SemelError):
    """Encoded data could not be kept on disk."""


@contextmanager
def batch_folder(parent: str | None) -> Iterator[str]:
    """A new folder for the files of one micro-batch, which is removed with whatever is in it."""
    where = parent or tempfile.gettempdir()
    key = (os.getpid(), where)
    try:
        if key not in _folders:
            remove_leftovers(Path(where))
            _folders[key] = _ProcessFolder(where)
        folder = tempfile.mkdtemp(dir=_folders[key].path)
    except OSError as error:
        raise _failed(where, error) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers(parent: Path) -> None:
    """Remove the folders of processes that are gone."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another process is at the same work, or it is another user's
            if time.time() - folder.stat().st_mtime < _YOUNG_S:
                continue
            with (folder / _LOCK).open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)


class _ProcessFolder:
    """Holds a lock for as long as the process lives, however it ends."""

    def __init__(self, parent: str) -> None:
        self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        self._lock = os.open(os.path.join(self.path, _LOCK), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        atexit.register(shutil.rmtree, self.path, ignore_errors=True)


class SpoolFile:
    """What one attempt of a task has encoded: blobs one behind the other."""

    def __init__(self, folder: str, name: str) -> None:
        self.path = os.path.join(folder, name)
        self._size = 0
        with _told(folder):
            self._file = open(self.path, "xb", buffering=0)  # noqa: SIM115 (closed by `__exit__`)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, data: memoryview) -> int:
        """Write all of `data`; returns where it begins."""
        at = self._size
        with _told(self.path):
            while data:
                written = self._file.write(data)
                self._size += written
                data = data[written:]
        return at


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
