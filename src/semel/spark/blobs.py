"""Blobs: encoded record batches as rows that Spark shuffles, and the manifest of all blobs of a micro-batch.

The driver fixes the manifest before the transaction begins. Every attempt of a write task holds the blobs that it reads
against it, so that two attempts can never write different bytes under the same sequences, even if Spark made blobs
twice, because they were lost or a task was slow.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, NamedTuple
from zlib import crc32

import pyarrow as pa

from semel.client.partitions import TopicPartition
from semel.client.send_queue import SEQUENCES
from semel.errors import ConfigError, SemelError
from semel.records import EncodedBatch
from semel.spark.spool import SpoolReader

BLOB_SCHEMA: Final = pa.schema(
    [
        ("slot", pa.int32()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("map", pa.int32()),  # which encoding task
        ("number", pa.int32()),  # counts the blobs of that task
        ("digest", pa.int64()),  # of the data, if Spark keeps it: what was made anew may be other data
        ("records", pa.int32()),
        ("bytes", pa.int32()),
        ("data", pa.binary()),
        ("is_small", pa.bool_()),  # the task has so little data that the driver may take it with the manifest
        ("file", pa.string()),  # where the data is instead, if driver and tasks share a machine
        ("at", pa.int64()),
        ("input_bytes", pa.int64()),  # of the rows that were encoded together, with the first blob of them
        ("dead_letters", pa.int32()),  # how many of the records are dead letters: all, or none
        ("example", pa.string()),  # what is wrong with one of them
        ("error", pa.binary()),
    ]
)
BLOB_DDL: Final = (
    "slot int, topic string, partition int, map int, number int, digest long, records int, bytes int, data binary, "
    "is_small boolean, file string, at long, input_bytes long, dead_letters int, example string, error binary"
)


@dataclass(slots=True)
class PartitionManifest:
    """The blobs of one output partition in the order in which they are written."""

    digests: list[int] = field(default_factory=list[int])
    sequences: list[int] = field(default_factory=list[int])
    """The first sequence of each."""
    records: int = 0

    def add(self, digest: int, records: int) -> None:
        self.digests.append(digest)
        self.sequences.append(self.records)
        self.records += records


@dataclass(slots=True)
class Manifest:
    """All blobs of a micro-batch."""

    partitions: dict[TopicPartition, PartitionManifest] = field(default_factory=dict[TopicPartition, PartitionManifest])
    records: int = 0
    bytes: int = 0
    input_bytes: int = 0
    """As rows in Arrow's form."""
    blob_bytes_max: int = 0
    dead_letters: int = 0
    """So many of the records go to the dead-letter topic."""
    example: str | None = None
    """What is wrong with the first of them."""

    @property
    def blobs(self) -> int:
        return sum(len(partition.digests) for partition in self.partitions.values())


def read_manifest(rows: Iterable[Any]) -> Manifest:
    """The manifest from rows of blobs, of which `data` is not needed; raises a task's error."""
    manifest = Manifest()
    for row in sorted(rows, key=lambda row: (row.map, row.number)):
        if row.error is not None:
            raise unpack_error(row.error)
        named = TopicPartition(row.topic, row.partition)
        manifest.partitions.setdefault(named, PartitionManifest()).add(row.digest, row.records)
        manifest.records += row.records
        manifest.bytes += row.bytes
        manifest.input_bytes += row.input_bytes
        manifest.dead_letters += row.dead_letters or 0
        manifest.example = manifest.example or row.example
        manifest.blob_bytes_max = max(manifest.blob_bytes_max, row.bytes)
    for named, partition in manifest.partitions.items():
        if partition.records >= SEQUENCES:
            raise ConfigError(
                f"{partition.records} records for {named.topic}-{named.partition} are too many for one transaction; "
                "nothing was written. Make the micro-batch smaller, for instance by maxOffsetsPerTrigger."
            )
    return manifest


class Piece(NamedTuple):
    """A blob that the driver itself can write."""

    partition: TopicPartition
    batch: EncodedBatch


def read_pieces(rows: Iterable[Any]) -> list[Piece] | None:
    """The blobs in the order of the manifest, or None if some of them are with Spark alone."""
    ordered = sorted(rows, key=lambda row: (row.map, row.number))
    if any(row.data is None and row.file is None for row in ordered):
        return None
    spool = SpoolReader()
    pieces: list[Piece] = []
    for row in ordered:
        data = memoryview(bytearray(row.data)) if row.file is None else spool.view(row.file, row.at, row.bytes)
        pieces.append(Piece(TopicPartition(row.topic, row.partition), EncodedBatch(data, row.records)))
    return pieces


def pack_error(error: SemelError) -> bytes:
    """An error as a value in a row: Spark would hand on only its text, and repeat the task for nothing."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return pickle.dumps(error)


def unpack_error(packed: bytes | bytearray) -> SemelError:
    return pickle.loads(bytes(packed))


# -- which write task takes which partition --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Slots:
    """Spreads output partitions over write tasks: Spark hashes a blob's `slot`, and no two of these values collide.

    >>> Slots.make(4).values
    (12, 6, 2, 0)
    """

    values: tuple[int, ...]

    @classmethod
    def make(cls, tasks: int) -> Slots:
        found: dict[int, int] = {}
        for value in count():
            found.setdefault(_spark_hash(value) % tasks, value)
            if len(found) == tasks:
                return cls(tuple(found[task] for task in range(tasks)))
        raise AssertionError("a hash leaves no task without a value")

    def slot(self, topic: str, partition: int) -> int:
        return self.values[(crc32(topic.encode()) + partition) % len(self.values)]


ANY_SLOT: Final = Slots((0,))
"""For blobs that no write task is to take."""

_MASK: Final = 0xFFFFFFFF


def _spark_hash(value: int) -> int:
    """Spark's hash of one integer column (Murmur3 x86 32 with seed 42), as a signed number."""
    mixed = value * 0xCC9E2D51 & _MASK
    mixed = _rotate(mixed, 15) * 0x1B873593 & _MASK
    mixed = (_rotate(42 ^ mixed, 13) * 5 + 0xE6546B64 & _MASK) ^ 4
    mixed = (mixed ^ mixed >> 16) * 0x85EBCA6B & _MASK
    mixed = (mixed ^ mixed >> 13) * 0xC2B2AE35 & _MASK
    mixed ^= mixed >> 16
    return mixed - 2**32 if mixed >= 2**31 else mixed


def _rotate(value: int, bits: int) -> int:
    return (value << bits | value >> 32 - bits) & _MASK


def blob_batch(rows: list[Mapping[str, Any]]) -> pa.RecordBatch:
    """Rows as one Arrow batch; the data of a single row is not copied."""
    columns = {name: [row.get(name) for row in rows] for name in BLOB_SCHEMA.names if name != "data"}
    arrays = {name: pa.array(values, BLOB_SCHEMA.field(name).type) for name, values in columns.items()}
    arrays["data"] = _binary_array([row.get("data") for row in rows])
    return pa.RecordBatch.from_arrays([arrays[name] for name in BLOB_SCHEMA.names], schema=BLOB_SCHEMA)


def _binary_array(pieces: list[bytes | memoryview | None]) -> pa.Array:
    given = [piece for piece in pieces if piece is not None]
    if not given:
        return pa.nulls(len(pieces), pa.binary())
    if len(given) < len(pieces):
        # Only an error has no data beside blobs that have: nothing of them will be written.
        return pa.array([None if piece is None else bytes(piece) for piece in pieces], pa.binary())
    ends = [0]
    for piece in given:
        ends.append(ends[-1] + len(piece))
    data = given[0] if len(given) == 1 else b"".join(given)
    return pa.Array.from_buffers(
        pa.binary(), len(given), [None, pa.array(ends, pa.int32()).buffers()[1], pa.py_buffer(data)]
    )
