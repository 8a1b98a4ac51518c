"""A head start for an append: the driver loads what tasks have in their files while their job is still running.

Nothing depends on it. What was loaded counts only if the job returns the very same parts. Otherwise, or if the job
takes long, the transaction is rolled back, and the files are loaded when the job has ended.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from semel.bridges.spark_parts import StagedRows

LIMIT_S: Final = 10.0
"""Others may wait for the locks of the transaction, so it does not last for as long as the user's code likes."""
_ENDED: Final = b"the job has ended"
_DATAGRAM_BYTES: Final = 65_536
_slow: set[str] = set()
"""Pipelines of which a job was not done in time: they get no head start any more."""


class HeadStartLost(Exception):
    """What was loaded is to be rolled back, and nothing else has happened."""


class Announcer:
    """A task's end: tells the driver of each part. What gets lost is loaded when the job has ended."""

    def __init__(self, address: str | None) -> None:
        self._socket: socket.socket | None = None
        if address is not None:
            with suppress(OSError):  # the driver listens no more
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._socket.setblocking(False)
                self._socket.connect(address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()

    def tell(self, part: dict[str, Any]) -> None:
        if self._socket is not None:
            with suppress(OSError):  # it is busy
                self._socket.send(json.dumps(part).encode())


class RunningJob:
    """The driver's end: the parts of a job, some of them before it has ended."""

    def __init__(self, listener: socket.socket, address: str, pipeline: str) -> None:
        self.address = address
        self._pipeline = pipeline
        self._socket = listener
        self._first = b""
        self._ends_at = 0.0
        self._is_over = threading.Event()
        self._staged: StagedRows | None = None

    @classmethod
    def listening(cls, folder: str, pipeline: str) -> Self | None:
        """None where there can be no such socket: the path is too long, or the system has none."""
        address = os.path.join(folder, "announced")
        try:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            listener.bind(address)
        except (OSError, AttributeError):
            return None
        return cls(listener, address, pipeline)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        os.unlink(self.address)

    @property
    def staged(self) -> StagedRows:
        """What the job has returned. Known when all of its parts were read."""
        assert self._staged is not None
        return self._staged

    def end(self, staged: StagedRows | None) -> None:
        """Called by the thread that has waited for the job, with what it has returned; None if it has failed."""
        self._staged = staged
        self._is_over.set()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, suppress(OSError):
            sender.setblocking(False)  # if there is no room, the other thread has messages, and looks after the next
            sender.sendto(_ENDED, self.address)

    def has_begun(self) -> bool:
        """Waits for the first part; false if the job ends without any."""
        self._first = self._socket.recv(_DATAGRAM_BYTES)
        self._ends_at = time.monotonic() + LIMIT_S
        return not self._is_over.is_set()

    def __iter__(self) -> Iterator[Any]:
        """All parts of the job, each once."""
        loaded: set[tuple[str, int]] = set()
        message = self._first
        while not self._is_over.is_set():
            part = SimpleNamespace(**json.loads(message))
            loaded.add((part.file, part.at))
            yield part
            message = self._next()
        if self._staged is None:
            raise HeadStartLost("the job has failed")
        parts = list(self._staged.few)
        if not loaded <= {(part.file, part.at) for part in parts}:
            raise HeadStartLost("an attempt was loaded that does not count")
        yield from (part for part in parts if part.file is None or (part.file, part.at) not in loaded)

    def _next(self) -> bytes:
        left = self._ends_at - time.monotonic()
        try:
            if left > 0:
                self._socket.settimeout(left)
                return self._socket.recv(_DATAGRAM_BYTES)
        except TimeoutError:
            pass
        note_slow(self._pipeline)
        raise HeadStartLost(f"the job takes longer than {LIMIT_S:.0f} s")


def note_slow(pipeline: str) -> None:
    """Let later jobs of this pipeline have no head start."""
    _slow.add(pipeline)


def has_been_slow(pipeline: str) -> bool:
    return pipeline in _slow
