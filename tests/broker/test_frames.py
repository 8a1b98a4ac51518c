"""Frames out of a stream of bytes: however it is cut up, the same frames, and not much more memory than came in."""

from __future__ import annotations

import random
import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.broker.frames import SHARED_BUFFER_BYTES, FrameReader
from semel.errors import WireError

CAP = 1 << 20


def stream_of(bodies: list[bytes]) -> bytes:
    return b"".join(struct.pack(">i", len(body)) + body for body in bodies)


def feed(reader: FrameReader, data: bytes, sizes: list[int]) -> list[bytes]:
    """Receive `data` in pieces of these sizes, over and over, or of what the reader has room for."""
    frames: list[bytes] = []
    position = turn = 0
    while position < len(data):
        buffer = reader.buffer()
        count = min(len(buffer), sizes[turn % len(sizes)], len(data) - position)
        buffer[:count] = data[position : position + count]
        frames += map(bytes, reader.received(count))
        position += count
        turn += 1
    return frames


@given(
    st.lists(st.binary(max_size=300), max_size=12), st.lists(st.integers(1, 400), min_size=1, max_size=8), st.booleans()
)
def test_any_split_of_a_stream_gives_the_same_frames(bodies: list[bytes], sizes: list[int], is_tiny: bool) -> None:
    """Where the bytes of one receive end says nothing about where a frame does; nor does the size of the buffer."""
    reader = FrameReader(bytearray(7 if is_tiny else SHARED_BUFFER_BYTES), CAP)
    assert feed(reader, stream_of(bodies), sizes) == bodies


def test_large_frames_between_small_ones_come_out_whole(rng: random.Random) -> None:
    """Frames larger than every buffer, which grow several times on the way."""
    bodies = [rng.randbytes(size) for size in (0, 1, SHARED_BUFFER_BYTES, 700_000, 4, 131_072, CAP, 3)]
    for sizes in ([1 << 30], [65_536, 1, 4096], [131_072]):
        reader = FrameReader(bytearray(SHARED_BUFFER_BYTES), CAP)
        assert feed(reader, stream_of(bodies), sizes) == bodies
        assert reader.held_bytes == 0


@pytest.mark.parametrize("size", [-1, -(2**31), 2**31 - 1, CAP + 1])
def test_a_size_out_of_bounds_is_refused_as_soon_as_it_is_read(size: int) -> None:
    """Negative and over the cap; nothing is allocated for it, and the frames before it are still given."""
    reader = FrameReader(bytearray(SHARED_BUFFER_BYTES), CAP)
    stream = stream_of([b"before"]) + struct.pack(">i", size)
    buffer = reader.buffer()
    buffer[: len(stream)] = stream
    received = reader.received(len(stream))
    assert bytes(next(received)) == b"before"
    with pytest.raises(WireError, match=f"{size:,} bytes"):
        next(received)
    assert reader.held_bytes == 0


def test_the_cap_itself_is_taken() -> None:
    """The bound is the largest frame that is allowed, not the first that is not."""
    reader = FrameReader(bytearray(SHARED_BUFFER_BYTES), 10)
    assert feed(reader, stream_of([bytes(10)]), [3]) == [bytes(10)]


def test_a_frame_that_is_only_announced_costs_next_to_nothing() -> None:
    """100 MB are announced and a few bytes sent: what is held follows what has come, by a factor of four at most."""
    reader = FrameReader(bytearray(SHARED_BUFFER_BYTES), 104_857_600)
    tracemalloc.start()
    try:
        feed(reader, struct.pack(">i", 104_857_600) + b"few", [7])
        assert tracemalloc.get_traced_memory()[0] < 200_000
        feed(reader, bytes(3 << 20), [65_536])
        assert reader.held_bytes <= 4 * (3 << 20) + 131_072
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_view_that_is_still_held_does_not_keep_a_frame_from_growing() -> None:
    """A binding may keep the view of the last receive: BufferError would have ended its connection."""
    reader = FrameReader(bytearray(SHARED_BUFFER_BYTES), CAP)
    body = bytes(range(256)) * 2048
    views = []
    frames: list[bytes] = []
    data = memoryview(stream_of([body]))
    while data:
        views.append(reader.buffer())
        count = min(len(views[-1]), len(data))
        views[-1][:count] = data[:count]
        frames += map(bytes, reader.received(count))
        data = data[count:]
    assert frames == [body]
