"""A disk that is full while a test says so: writes fail with ENOSPC as on a real one, and succeed again afterwards.

`SEMEL_BROKER_DISK_FULL_FILE=path` switches it on; the disk is full while that file is there. The number in it is how
many bytes still fit, so that a write can be cut short in the middle. Unset, the broker has the plain disk.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from semel.broker.control_file import ControlFile
from semel.broker.storage.disk import Disk, RealDisk

if TYPE_CHECKING:
    from typing_extensions import Buffer

VARIABLE: Final = "SEMEL_BROKER_DISK_FULL_FILE"


class LimitedDisk(RealDisk):
    """
    >>> import tempfile
    >>> from semel.broker.control_file import write_control
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     disk = LimitedDisk(f"{folder}/full")
    ...     handle = disk.open(f"{folder}/a.log", create=True)
    ...     write_control(f"{folder}/full", "2")
    ...     print(disk.write(handle, [b"one", b"two"], 0))
    ...     try:
    ...         disk.write(handle, [b"e", b"two"], 2)
    ...     except OSError as error:
    ...         print(error.strerror)
    ...     os.unlink(f"{folder}/full")
    ...     print(disk.write(handle, [b"e", b"two"], 2))
    ...     disk.close(handle)
    2
    No space left on device
    4
    """

    def __init__(self, control_path: str) -> None:
        self._control = ControlFile(control_path)
        self._version = 0
        self._free_bytes = 0

    def open(self, path: str, *, create: bool = False) -> int:
        if create and self._is_full() and not os.path.exists(path):
            raise _no_space()
        return super().open(path, create=create)

    def write(self, handle: int, buffers: Sequence[Buffer], position: int) -> int:
        if not self._is_full():
            return super().write(handle, buffers, position)
        if self._free_bytes == 0:
            raise _no_space()
        # As write(2) does: what fits, and the error at the next call.
        written = super().write(handle, [b"".join(buffers)[: self._free_bytes]], position)
        self._free_bytes -= written
        return written

    def truncate(self, handle: int, size: int) -> None:
        freed = max(os.fstat(handle).st_size - size, 0) if self._is_full() else 0
        super().truncate(handle, size)
        self._free_bytes += freed

    def make_directory(self, path: str) -> None:
        if self._is_full() and not os.path.isdir(path):
            raise _no_space()
        super().make_directory(path)

    def _is_full(self) -> bool:
        text = self._control.text()
        if text is not None and self._control.version != self._version:
            self._version = self._control.version
            self._free_bytes = int(text or 0)
        return text is not None


def limited_disk() -> Disk | None:
    """What the environment asks for; None for the plain disk.

    >>> limited_disk() is None
    True
    """
    path = os.environ.get(VARIABLE)
    return LimitedDisk(path) if path else None


def _no_space() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
