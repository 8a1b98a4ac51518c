"""Partitions are those of the Java client, and splitting keeps the order of rows."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest
from kafka_python_peer import murmur2 as kafka_python_murmur2
from record_samples import seed_of_run

from semel.errors import ConfigError
from semel.records import StickyPartitioner, partitions_for_keys, split_by_partition
from semel.records.partitioner import murmur2

JAVA_VECTORS = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


def slow_murmur2(key: bytes) -> int:
    """The hash one byte at a time, written from its description."""
    multiplier, mask = 0x5BD1E995, 0xFFFFFFFF
    mixed = 0x9747B28C ^ len(key)
    whole = len(key) // 4 * 4
    for start in range(0, whole, 4):
        word = int.from_bytes(key[start : start + 4], "little") * multiplier & mask
        word = (word ^ word >> 24) * multiplier & mask
        mixed = mixed * multiplier & mask ^ word
    if key[whole:]:
        mixed = (mixed ^ int.from_bytes(key[whole:], "little")) * multiplier & mask
    mixed = (mixed ^ mixed >> 13) * multiplier & mask
    return mixed ^ mixed >> 15


def test_murmur2_gives_the_values_of_kafkas_own_tests() -> None:
    """The vectors of the Java client's unit test, alone and in one array, and as kafka-python computes them."""
    keys = list(JAVA_VECTORS)
    expected = [value & 0xFFFFFFFF for value in JAVA_VECTORS.values()]
    assert murmur2(pa.array(keys)).tolist() == expected
    assert [int(murmur2(pa.array([key]))[0]) for key in keys] == expected
    assert [kafka_python_murmur2(key) & 0xFFFFFFFF for key in keys] == expected


def test_murmur2_of_random_keys_is_that_of_a_slow_model() -> None:
    """Random keys of 0 to 40 bytes, ragged and of one length, with nulls between, and a very long one."""
    rng = random.Random(seed_of_run(21))
    for length in (*range(41), None):
        keys = [rng.randbytes(rng.randrange(41) if length is None else length) for _ in range(100)]
        assert murmur2(pa.array(keys)).tolist() == [slow_murmur2(key) for key in keys]
    keys = [b"short", rng.randbytes(10_001), b""]
    assert murmur2(pa.array(keys)).tolist() == [slow_murmur2(key) for key in keys]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.string()], ids=str)
def test_partitions_follow_the_hash_and_null_keys_have_none(kind: pa.DataType) -> None:
    """toPositive(murmur2) modulo the number of partitions, -1 for null, over chunks and slices."""
    keys = ["21", None, "foobar", "abc", "", None, "x"]
    column = pa.chunked_array(
        [pa.array(keys[:3], kind), pa.array([], kind), pa.array(["skip", *keys[3:]], kind).slice(1)]
    )
    expected = [-1 if key is None else (slow_murmur2(key.encode()) & 0x7FFFFFFF) % 7 for key in keys]
    partitions = partitions_for_keys(column, 7)
    assert partitions.dtype == np.int32
    assert partitions.tolist() == expected


def test_no_partitions_are_refused() -> None:
    """A partition count below one is a mistake of the caller."""
    for call in (
        lambda: partitions_for_keys(pa.array([b"a"]), 0),
        lambda: StickyPartitioner(random.Random(1)).assign(pa.table({"value": [b"a"]}), 0),
        lambda: StickyPartitioner(random.Random(1), batch_bytes=0),
    ):
        with pytest.raises(ConfigError):
            call()


def test_sticky_partitioner_stays_until_a_batch_is_full_and_then_moves() -> None:
    """Rows without a key stay together until batch_bytes went there; the next stretch is on another partition."""
    seed = seed_of_run(31)
    partitioner = StickyPartitioner(random.Random(seed), batch_bytes=1_000)
    rows = [b"x" * random.Random(seed).randrange(5, 90)] * 3_000
    stretches: list[list[int]] = []
    for start in range(0, 3_000, 37):
        for partition in partitioner.assign(pa.table({"value": rows[start : start + 37]}), 5).tolist():
            if not stretches or stretches[-1][0] != partition:
                stretches.append([partition, 0])
            stretches[-1][1] += len(rows[0]) + 10
    assert {partition for partition, _ in stretches} == set(range(5))
    assert all(1_000 <= size < 1_000 + len(rows[0]) + 10 for _, size in stretches[:-1])


def test_sticky_partitioner_leaves_keys_to_the_hash() -> None:
    """Rows with a key go where it hashes to, also between rows without one, which stay on one partition."""
    table = pa.table({"key": [b"21", None, b"abc", None], "value": [b"v"] * 4})
    partitions = StickyPartitioner(random.Random(seed_of_run(1))).assign(table, 4)
    hashed = partitions_for_keys(table["key"], 4)
    assert partitions[[0, 2]].tolist() == hashed[[0, 2]].tolist()
    assert partitions[1] == partitions[3] >= 0


def test_sticky_partitioner_with_one_partition_or_fewer_than_before_stays_within() -> None:
    """A topic of one partition always gets it, and a smaller topic is never given a partition it does not have."""
    partitioner = StickyPartitioner(random.Random(seed_of_run(2)), batch_bytes=10)
    table = pa.table({"value": [b"0123456789"] * 50})
    assert set(partitioner.assign(table, 1).tolist()) == {0}
    assert max(partitioner.assign(table, 100).tolist()) > 3
    assert set(partitioner.assign(table, 3).tolist()) <= {0, 1, 2}


def test_split_keeps_the_order_of_rows_within_a_partition() -> None:
    """Each row lands in its partition once, after the rows that came before it."""
    rng = random.Random(seed_of_run(41))
    for count, partition_count, run in ((1, 1, 1), (50, 3, 1), (2_000, 16, 1), (300, 70_000, 1), (5_000, 7, 500)):
        numbers = list(range(count))
        chosen = [rng.randrange(partition_count) for _ in numbers]
        partitions = np.array([chosen[number // run] for number in numbers], np.int32)
        half = count // 2
        table = pa.table({"value": pa.chunked_array([numbers[:half], numbers[half:]], pa.int64())})
        parts = split_by_partition(table, partitions)
        assert [partition for partition, _ in parts] == sorted(set(partitions.tolist()))
        for partition, part in parts:
            assert part["value"].to_pylist() == [number for number in numbers if partitions[number] == partition]


def test_split_refuses_rows_without_a_partition() -> None:
    """A -1 left over from null keys, or a wrong number of partitions, is refused; no rows give no parts."""
    table = pa.table({"value": [b"a", b"b"]})
    with pytest.raises(ConfigError, match="no partition"):
        split_by_partition(table, np.array([0, -1], np.int32))
    with pytest.raises(ConfigError, match="2 rows and 1"):
        split_by_partition(table, np.array([0], np.int32))
    assert split_by_partition(table.slice(0, 0), np.array([], np.int32)) == []
