"""What can go wrong between the log and the disk: full or failing disks, damaged files, a directory that is taken."""

from __future__ import annotations

import errno
from types import TracebackType

from semel.errors import CorruptRecords, SemelError

_ADVICE = {
    errno.ENOSPC: "The disk is full: free space or shorten retention, then send again.",
    errno.EDQUOT: "The quota of the disk is used up: raise it or shorten retention, then send again.",
    errno.EROFS: "The file system is read-only: make it writable and start the broker again.",
    errno.EACCES: "Give the broker's user the right to write there and start it again.",
    errno.EMFILE: "Too many files are open: raise the limit (ulimit -n) and start the broker again.",
    errno.EFBIG: "The file may not grow: raise the limit on file sizes (ulimit -f), then send again.",
    errno.EIO: "The disk fails: check it before the broker writes to it again.",
}


class StorageError(SemelError):
    """The disk refused an operation. What had been answered as stored before is not touched by it."""

    def __init__(self, message: str, *, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class DirectoryInUse(StorageError):
    """Another process serves the data directory."""


class UnknownLayout(StorageError):
    """The data directory was written by a newer version."""


class DamagedLog(CorruptRecords):
    """A log file holds bytes at `position` that are no sound batch.

    `is_cut_short` tells that the file ends within the batch, as after a crash in the middle of a write.
    """

    def __init__(
        self, message: str, *, path: str = "", position: int = 0, offset: int = 0, is_cut_short: bool = False
    ) -> None:
        super().__init__(message)
        self.path = path
        self.position = position
        self.offset = offset
        self.is_cut_short = is_cut_short


def storage_error(what: str, error: OSError) -> StorageError:
    """`error` in words: what happened to the data, what to do.

    >>> print(storage_error("Nothing was stored", OSError(errno.ENOSPC, "No space left")))
    Nothing was stored: No space left. The disk is full: free space or shorten retention, then send again.
    """
    advice = _ADVICE.get(error.errno or 0, "Look at the disk and the rights of the directory, then try again.")
    reason = error.strerror or str(error)
    return StorageError(f"{what}: {reason}. {advice}", errno=error.errno)


class told_as:
    """Turn an OSError of the disk into a StorageError that begins with `what`. A class, as it is entered for each read.

    >>> with told_as("Nothing was read"):  # doctest: +ELLIPSIS
    ...     raise OSError(errno.ENOSPC, "No space left")
    Traceback (most recent call last):
    semel.broker.storage.failures.StorageError: Nothing was read: No space left. The disk is full: free space or...
    """

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OSError):
            raise storage_error(self._what, error) from error
