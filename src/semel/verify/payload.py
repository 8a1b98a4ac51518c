"""What every record of a verification carries: who it is, who wrote it in which transaction, and a checksum.

A payload names the partition it was sent to, so that one that turns up elsewhere is known, as is one that was damaged.
The rest is filler up to the wanted size. One at a time or as Arrow arrays, well below a microsecond a record.
"""
# pyarrow comes without types, so what it returns is unknown to the checker.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from crc32c import crc32c

from semel.errors import ConfigError, CorruptRecords

Integers = npt.NDArray[Any]

MAGIC: Final = 0x314C4D53  # "SML1"
_LAYOUT: Final = np.dtype(
    [
        ("crc", "<u4"),  # of everything behind it
        ("magic", "<u4"),
        ("value", "<i8"),
        ("origin", "<i4"),
        ("sequence", "<i4"),
        ("writer", "<i4"),
        ("transaction", "<i4"),
        ("partition", "<i2"),
        ("unused", "<i2"),
    ]
)
HEAD_BYTES: Final = _LAYOUT.itemsize
"""The least that a payload can be."""
BYTES_MAX: Final = 1_000_000
"""A record above it would need other limits than a broker's defaults."""
_CRC_BYTES: Final = 4
# The same bytes in every payload and in every run. They look random, so that compression does not make the sizes a lie.
_FILLER: Final = random.Random("filler").randbytes(4096)
_NUMBERS: Final = ("origin", "sequence", "writer", "transaction", "value", "partition")


class Payload(NamedTuple):
    """What one record says of itself; `partition` is a number of `Manifest.partitions`."""

    origin: int
    sequence: int
    writer: int
    transaction: int
    value: int
    partition: int


@dataclass(frozen=True, slots=True)
class Payloads:
    """Many of them as columns. Where `is_sound` is False the bytes are no payload, and the numbers are -1."""

    origin: Integers
    sequence: Integers
    writer: Integers
    transaction: Integers
    value: Integers
    partition: Integers
    is_sound: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.is_sound)

    def chosen(self, rows: Integers) -> Payloads:
        """Some of them: `rows` is a mask or row numbers."""
        return Payloads(*(getattr(self, name)[rows] for name in (*_NUMBERS, "is_sound")))


def encode(payload: Payload, size: int = HEAD_BYTES) -> bytes:
    """A payload of `size` bytes.

    >>> decode(encode(Payload(origin=3, sequence=7, writer=3, transaction=-1, value=5, partition=0), size=100))
    Payload(origin=3, sequence=7, writer=3, transaction=-1, value=5, partition=0)
    """
    return encode_many(1, size=size, **payload._asdict())[0].as_py()


def decode(data: bytes | None) -> Payload:
    """What the bytes say; raises `CorruptRecords` if they are not what was sent."""
    decoded = decode_many(pa.array([data], pa.binary()))
    if not decoded.is_sound[0]:
        raise CorruptRecords("This is no payload of a verification, or it was damaged on its way.")
    return Payload(*(int(getattr(decoded, name)[0]) for name in Payload._fields))


def encode_many(count: int, *, size: int = HEAD_BYTES, **columns: npt.ArrayLike) -> pa.BinaryArray:
    """`count` payloads of `size` bytes; each of the six fields is an array, or one number for all.

    >>> encode_many(2, size=64, origin=1, sequence=[0, 1], writer=1, transaction=0, value=-1, partition=[4, 5])[0].type
    DataType(binary)
    """
    if not HEAD_BYTES <= size <= BYTES_MAX:
        raise ConfigError(f"A record of {size} bytes is out of range: write {HEAD_BYTES} to {BYTES_MAX}.")
    data = np.empty((count, size), np.uint8)
    heads = data[:, :HEAD_BYTES].view(_LAYOUT)[:, 0]
    heads["magic"], heads["unused"] = MAGIC, 0
    for name in _NUMBERS:
        heads[name] = columns[name]
    rest = size - HEAD_BYTES
    data[:, HEAD_BYTES:] = np.frombuffer(_FILLER * (rest // len(_FILLER) + 1), np.uint8, rest)
    offsets = np.arange(0, count * size + 1, size, dtype=np.int32)
    heads["crc"] = _checksums(data.reshape(-1), offsets[:-1].tolist(), offsets[1:].tolist())
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def decode_many(array: pa.BinaryArray) -> Payloads:
    """The payloads in an Arrow array, in its order; of damaged ones, and of null, only that they are not sound."""
    count = len(array)
    _, offsets_buffer, data_buffer = array.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int32)[array.offset : array.offset + count + 1]
    data = np.frombuffer(data_buffer or b"", np.uint8)
    starts, ends = offsets[:-1], offsets[1:]
    is_sound = ends - starts >= HEAD_BYTES
    if array.null_count:
        is_sound &= array.is_valid().to_numpy(zero_copy_only=False)
    heads = _heads(data, starts[is_sound])
    is_whole = (heads["magic"] == MAGIC) & (
        heads["crc"] == _checksums(data, starts[is_sound].tolist(), ends[is_sound].tolist())
    )
    is_sound[is_sound] = is_whole
    if is_sound.all():
        return Payloads(**{name: heads[name] for name in _NUMBERS}, is_sound=is_sound)
    columns: dict[str, Integers] = {}
    for name in _NUMBERS:
        columns[name] = np.full(count, -1, _LAYOUT[name])
        columns[name][is_sound] = heads[name][is_whole]
    return Payloads(**columns, is_sound=is_sound)


def number_keys(numbers: Integers) -> pa.BinaryArray:
    """Keys of records, made of numbers: eight bytes each, of which equal ones mean equal numbers."""
    data, offsets = numbers.astype(">i8"), np.arange(0, 8 * len(numbers) + 1, 8, dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), len(numbers), [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def _heads(data: npt.NDArray[np.uint8], starts: Integers) -> npt.NDArray[Any]:
    steps = np.diff(starts)
    if len(steps) and steps[0] >= HEAD_BYTES and (steps == steps[0]).all():  # of one size, as written: no byte is moved
        return np.ndarray((len(starts),), _LAYOUT, data, int(starts[0]), (int(steps[0]),))
    return data[starts[:, None] + np.arange(HEAD_BYTES)].view(_LAYOUT)[:, 0]


def _checksums(data: npt.NDArray[np.uint8], starts: Iterable[int], ends: Iterable[int]) -> npt.NDArray[np.uint32]:
    view = memoryview(data)  # pyright: ignore[reportArgumentType]
    sums = (crc32c(view[start + _CRC_BYTES : end]) for start, end in zip(starts, ends, strict=True))
    return np.fromiter(sums, np.uint32)
