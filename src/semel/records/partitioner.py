"""Which partition a record goes to, by the Java client's rules."""
# pyarrow comes without types, so what it returns is unknown to the checker.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from semel.errors import ConfigError
from semel.records.compiled import kernel, string_column
from semel.records.schema import as_binary

_SEED = 0x9747B28C
_MULTIPLIER = 0x5BD1E995
_LONG_RUN_ROWS = 64  # where so many neighbours share a partition on the average, slices cost less than copies
_RECORD_OVERHEAD_BYTES = 10  # what a typical record adds to its key, value and headers on the wire


def partitions_for_keys(keys: pa.Array | pa.ChunkedArray, partition_count: int) -> npt.NDArray[np.int32]:
    """The partition of each key as the Java client chooses it (murmur2), -1 where the key is null.

    >>> import pyarrow as pa
    >>> partitions_for_keys(pa.array([b"21", None, b"foobar"]), 10).tolist()
    [0, -1, 6]
    """
    if partition_count < 1:
        raise ConfigError(f"A topic has at least one partition, not {partition_count}.")
    chunks: list[pa.Array] = keys.chunks if isinstance(keys, pa.ChunkedArray) else [keys]
    parts: list[npt.NDArray[np.int32]] = []
    for chunk in chunks:
        if len(chunk) == 0:
            continue
        hashes = murmur2(chunk)
        partitions = ((hashes & np.uint32(0x7FFFFFFF)) % np.uint32(partition_count)).astype(np.int32)
        if chunk.null_count:
            partitions[chunk.is_null().to_numpy(zero_copy_only=False)] = -1
        parts.append(partitions)
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def murmur2(keys: pa.Array) -> npt.NDArray[np.uint32]:
    """Kafka's 32-bit murmur2 of each key; the hash of a null is meaningless."""
    column = as_binary("key", pa.chunked_array([keys])).chunk(0)
    if kernel is None:
        return np.array([_murmur2_of(key or b"") for key in column.to_pylist()], np.uint32)
    hashes = np.empty(len(column), np.uint32)
    kernel.murmur2(string_column(column), hashes)
    return hashes


def _murmur2_of(key: bytes) -> int:
    mixed = len(key) ^ _SEED
    whole = len(key) & ~3
    for start in range(0, whole, 4):
        word = int.from_bytes(key[start : start + 4], "little") * _MULTIPLIER & 0xFFFFFFFF
        word = (word ^ word >> 24) * _MULTIPLIER & 0xFFFFFFFF
        mixed = mixed * _MULTIPLIER & 0xFFFFFFFF ^ word
    if whole < len(key):
        mixed = (mixed ^ int.from_bytes(key[whole:], "little")) * _MULTIPLIER & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 13) * _MULTIPLIER & 0xFFFFFFFF
    return mixed ^ mixed >> 15


class StickyPartitioner:
    """Partitions for whole tables by the Java client's default rule (KIP-794).

    A record with a key goes where its key hashes to. Records without one stay on one partition until `batch_bytes` went
    there, then move to another at random, so that batches fill up instead of being scattered.

    >>> import pyarrow as pa, random
    >>> partitioner = StickyPartitioner(random.Random(7), batch_bytes=1000)
    >>> table = pa.table({"value": [b"x" * 490] * 6})
    >>> partitioner.assign(table, partition_count=3).tolist()
    [1, 1, 0, 0, 2, 2]
    """

    def __init__(self, random: Random, *, batch_bytes: int = 16_384) -> None:
        if batch_bytes < 1:
            raise ConfigError(f"batch.size must be at least 1 byte for the sticky partitioner, not {batch_bytes}.")
        self._random = random
        self._batch_bytes = batch_bytes
        self._partition = -1
        self._bytes_sent = 0

    def assign(self, table: pa.Table, partition_count: int) -> npt.NDArray[np.int32]:
        """The partition of each row; the place reached is remembered for the next table."""
        if partition_count < 1:
            raise ConfigError(f"A topic has at least one partition, not {partition_count}.")
        if "key" not in table.column_names:
            return self._assign_sticky(_row_bytes(table), partition_count)
        partitions = partitions_for_keys(table.column("key"), partition_count)
        keyless = partitions < 0
        if keyless.any():
            partitions[keyless] = self._assign_sticky(_row_bytes(table)[keyless], partition_count)
        return partitions

    def choose(self, key: bytes | None, value: bytes | None, partition_count: int) -> int:
        """The same for one record: where `assign` would have put it."""
        if key is not None:
            return (_murmur2_of(key) & 0x7FFFFFFF) % partition_count
        if self._bytes_sent >= self._batch_bytes or not 0 <= self._partition < partition_count:
            self._move(partition_count)
        self._bytes_sent += _RECORD_OVERHEAD_BYTES + len(value or b"")
        return self._partition

    def _assign_sticky(self, row_bytes: npt.NDArray[np.int64], partition_count: int) -> npt.NDArray[np.int32]:
        partitions = np.empty(len(row_bytes), np.int32)
        ends = np.cumsum(row_bytes)
        row = 0
        while row < len(row_bytes):
            if self._bytes_sent >= self._batch_bytes or not 0 <= self._partition < partition_count:
                self._move(partition_count)
            # The row that crosses the limit still belongs to this partition.
            before = int(ends[row - 1]) if row else 0
            target = before + self._batch_bytes - self._bytes_sent
            stop = min(int(np.searchsorted(ends, target, side="left")) + 1, len(row_bytes))
            partitions[row:stop] = self._partition
            self._bytes_sent += int(ends[stop - 1]) - before
            row = stop
        return partitions

    def _move(self, partition_count: int) -> None:
        self._bytes_sent = 0
        if not 0 <= self._partition < partition_count:
            self._partition = self._random.randrange(partition_count)
        elif partition_count > 1:
            other = self._random.randrange(partition_count - 1)
            self._partition = other + (other >= self._partition)


def _row_bytes(table: pa.Table) -> npt.NDArray[np.int64]:
    total = np.full(table.num_rows, _RECORD_OVERHEAD_BYTES, np.int64)
    for name in ("key", "value"):
        if name in table.column_names:
            lengths = pc.call_function("binary_length", [as_binary(name, table.column(name))])
            total += (pc.fill_null(lengths, 0) if lengths.null_count else lengths).to_numpy()
    return total


def split_by_partition(table: pa.Table, partitions: npt.NDArray[np.int32]) -> list[tuple[int, pa.Table]]:
    """The rows of each partition that has any, by partition number; the order of rows is kept within each.

    >>> import numpy as np, pyarrow as pa
    >>> parts = split_by_partition(pa.table({"value": [b"a", b"b", b"c"]}), np.array([1, 0, 1], np.int32))
    >>> [(partition, part["value"].to_pylist()) for partition, part in parts]
    [(0, [b'b']), (1, [b'a', b'c'])]
    """
    if len(partitions) != table.num_rows:
        raise ConfigError(f"There are {table.num_rows} rows and {len(partitions)} partitions; each row needs one.")
    if table.num_rows == 0:
        return []
    first, last = int(partitions.min()), int(partitions.max())
    if first < 0:
        raise ConfigError("Some rows have no partition (-1): give records without a key one before splitting.")
    if first == last:
        return [(first, table)]
    changes = np.flatnonzero(partitions[1:] != partitions[:-1]) + 1
    if len(changes) * _LONG_RUN_ROWS < len(partitions):
        return _split_runs(table, partitions, changes.tolist())
    # NumPy sorts 16-bit integers by radix, several times as fast.
    small = partitions.astype(np.uint16) if last < 2**16 else partitions
    order = np.argsort(small, kind="stable")
    present, counts = np.unique(partitions, return_counts=True)
    ordered = table.combine_chunks().take(pa.array(order))
    ends = np.cumsum(counts)
    return [
        (int(partition), ordered.slice(int(end - count), int(count)))
        for partition, count, end in zip(present, counts, ends, strict=True)
    ]


def _split_runs(table: pa.Table, partitions: npt.NDArray[np.int32], changes: list[int]) -> list[tuple[int, pa.Table]]:
    """The same where neighbours mostly share a partition, as records without a key do: nothing needs to be copied."""
    runs: dict[int, list[pa.Table]] = {}
    for start, end in pairwise([0, *changes, len(partitions)]):
        runs.setdefault(int(partitions[start]), []).append(table.slice(start, end - start))
    return [(partition, pa.concat_tables(runs[partition])) for partition in sorted(runs)]
