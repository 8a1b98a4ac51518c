"""Frames out of a stream of bytes, with bounded memory. No socket."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from semel.errors import WireError

SHARED_BUFFER_BYTES: Final = 64 * 1024
_FIRST_ALLOTMENT_BYTES: Final = 128 * 1024
_GROWTH: Final = 4
_SIZE: Final = struct.Struct(">i")


class FrameReader:
    """Says where the next bytes are to be put, and gives the frames that are complete.

    Small frames arrive in a buffer that all connections share, since it is emptied at once. What is left of a larger
    one is received straight into a buffer of its own, which grows as the bytes come: a peer that announces 100 MB and
    then goes silent has cost 128 kB.
    """

    __slots__ = ("_filled", "_frame", "_frame_bytes", "_prefix", "_shared", "frame_bytes_max")

    def __init__(self, shared: bytearray, frame_bytes_max: int) -> None:
        self.frame_bytes_max = frame_bytes_max
        self._shared = shared
        self._prefix = b""
        self._frame: bytearray | None = None
        self._frame_bytes = 0
        self._filled = 0

    @property
    def held_bytes(self) -> int:
        """What a frame that is not complete takes."""
        return 0 if self._frame is None else len(self._frame)

    def buffer(self) -> memoryview:
        """Where to receive into. To be asked for anew before each receive."""
        if self._frame is None:
            return memoryview(self._shared)
        if self._filled == len(self._frame):
            # A new one: the old one cannot change its size while somebody still has the view of it given here before.
            grown = bytearray(min(self._frame_bytes, len(self._frame) * _GROWTH))
            grown[: self._filled] = self._frame
            self._frame = grown
        return memoryview(self._frame)[self._filled :]

    def received(self, count: int) -> Iterator[bytearray]:
        """The frames that `count` more bytes in `buffer()` have completed, without their sizes.

        Raises WireError for a size that is refused; the stream cannot be followed any further then.
        """
        if self._frame is None:
            yield from self._split(memoryview(self._shared)[:count])
            return
        self._filled += count
        if self._filled == self._frame_bytes:
            frame, self._frame = self._frame, None
            yield frame

    def _split(self, received: memoryview) -> Iterator[bytearray]:
        data = memoryview(self._prefix + bytes(received)) if self._prefix else received
        self._prefix = b""
        position = 0
        while len(data) - position >= _SIZE.size:
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
