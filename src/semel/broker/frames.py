"""Frames out of a stream of bytes, with bounded memory. No socket."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from semel.errors import WireError

SHARED_BUFFER_BYTES: Final = 64 * 1024
_FIRST_ALLOTMENT_BYTES: Final = 128 * 1024
_SECOND_ALLOTMENT_BYTES: Final = 2 << 20
"""Once the first is full. Most batches are smaller than this, and to make their buffers larger step by step costs more
than to receive them.
"""
_GROWTH: Final = 4
_GROWN_BYTES_MAX: Final = 4 << 20
"""At once. The operating system moves a large buffer without copying it, but new bytes have to be written to."""
_SIZE: Final = struct.Struct(">i")
FRAMES_AT_ONCE: Final = 64
"""The shared buffer has room for five thousand of the smallest. The rest stays in one piece until it is asked for."""


class FrameReader:
    """Says where the next bytes are to be put, and gives the frames that are complete.

    Small frames arrive in a buffer that all connections share, since it is emptied at once. What is left of a larger
    one is received straight into a buffer of its own, which grows as the bytes come: a peer that announces 100 MB and
    then goes silent has cost 128 kB.
    """

    __slots__ = ("_filled", "_frame", "_frame_bytes", "_prefix", "_shared", "frame_bytes_max", "has_more")

    def __init__(self, shared: bytearray, frame_bytes_max: int) -> None:
        self.frame_bytes_max = frame_bytes_max
        self.has_more = False
        """Whether frames may be left that came with the last ones: call `more` before anything is received again."""
        self._shared = shared
        self._prefix = b""
        self._frame: bytearray | None = None
        self._frame_bytes = 0
        self._filled = 0

    @property
    def held_bytes(self) -> int:
        """What has been received and not been given yet."""
        return len(self._prefix) if self._frame is None else len(self._frame)

    def buffer(self) -> memoryview:
        """Where to receive into. To be asked for anew before each receive."""
        if self._frame is None:
            return memoryview(self._shared)
        if self._filled == len(self._frame):
            grown_bytes = min(self._frame_bytes, max(len(self._frame) * _GROWTH, _SECOND_ALLOTMENT_BYTES))
            if grown_bytes <= _SECOND_ALLOTMENT_BYTES:
                grown = bytearray(grown_bytes)
                grown[: self._filled] = self._frame
                self._frame = grown
            else:
                self._grow(min(grown_bytes - len(self._frame), _GROWN_BYTES_MAX))
        return memoryview(self._frame)[self._filled :]

    def _grow(self, more_bytes: int) -> None:
        assert self._frame is not None
        more = bytes(more_bytes)
        try:
            self._frame += more
        except BufferError:  # somebody still has the view of it given here before
            self._frame = self._frame + more

    def received(self, count: int) -> Iterator[bytearray]:
        """The frames that `count` more bytes in `buffer()` have completed, without their sizes; some of them if many.

        Raises WireError for a size that is refused; the stream cannot be followed any further then.
        """
        if self._frame is None:
            yield from self._split(memoryview(self._shared)[:count])
            return
        self._filled += count
        if self._filled == self._frame_bytes:
            frame, self._frame = self._frame, None
            yield frame

    def more(self) -> Iterator[bytearray]:
        """The next of the frames that came together with others."""
        yield from self._split(memoryview(b""))

    def _split(self, received: memoryview) -> Iterator[bytearray]:
        data = memoryview(self._prefix + bytes(received)) if self._prefix else received
        self._prefix = b""
        self.has_more = False
        position = count = 0
        while len(data) - position >= _SIZE.size:
            if count == FRAMES_AT_ONCE:
                self.has_more = True
                break
            count += 1
            size = self._check(_SIZE.unpack_from(data, position)[0])
            start = position + _SIZE.size
            position = start + size
            if position > len(data):
                self._begin(size, data[start:])
                return
            yield bytearray(data[start:position])
        self._prefix = bytes(data[position:])

    def _begin(self, size: int, first: memoryview) -> None:
        self._frame = bytearray(min(size, max(_FIRST_ALLOTMENT_BYTES, len(first))))
        self._frame[: len(first)] = first
        self._frame_bytes = size
        self._filled = len(first)

    def _check(self, size: int) -> int:
        if not 0 <= size <= self.frame_bytes_max:
            raise WireError(
                f"A client announced a frame of {size:,} bytes; at most {self.frame_bytes_max:,} are taken."
            )
        return size
