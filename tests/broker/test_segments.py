"""Index files byte for byte as Kafka's, and lookups in them."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from storage_samples import PATH, make_batch, open_on, put

from semel.broker.storage.index import OffsetIndex, TimeIndex, decode_aborted, encode_aborted
from semel.broker.storage.log_settings import LogSettings
from semel.core.partition_log import AbortedTransaction
from semel.core.producer_snapshot import decode_snapshot
from semel.errors import CorruptRecords
from semel.records.layout import read_header
from semel.testing.simulated_disk import SimulatedDisk


def test_index_files_have_kafkas_format() -> None:
    """Other tools can read them: 8, 12 and 34 bytes an entry, big endian, entries after at least 4096 bytes."""
    disk = SimulatedDisk()
    partition = open_on(disk, LogSettings())
    for number in range(100):
        put(partition, [b"x" * 100], timestamp_ms=1000 + number)
    batch = make_batch([b"x"], producer_id=7, producer_epoch=0, base_sequence=0, transactional=True)
    partition.append(batch, read_header(batch), now_ms=0)
    partition.append_marker("abort", producer_id=7, producer_epoch=0, coordinator_epoch=0, now_ms=0)
    partition.close()
    stem = f"{PATH}/{0:020d}"
    entries = list(struct.iter_unpack(">ii", disk.content(stem + ".index")))
    times = list(struct.iter_unpack(">qi", disk.content(stem + ".timeindex")))
    log = disk.content(stem + ".log")
    assert len(entries) == len(log) // 4096
    for offset, position in entries:
        assert read_header(log, position).last_offset == offset
    assert [position // 4096 for _, position in entries] == [1, 2, 3, 4][: len(entries)]
    assert times[-1] == (1099, 99)
    assert times[:-1] == [(1000 + offset, offset) for offset, _ in entries if offset < 100]
    assert disk.content(stem + ".txnindex") == struct.pack(">hqqqq", 0, 7, 100, 101, 102)
    assert decode_snapshot(disk.content(f"{PATH}/{102:020d}.snapshot"))[0].producer_id == 7


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(62, 5000)), max_size=30), st.integers(0, 2000))
def test_the_offset_index_finds_the_last_entry_at_or_below(steps: list[tuple[int, int]], wanted: int) -> None:
    """Lookups agree with a plain search, and the file reads back the same."""
    entries: list[tuple[int, int]] = []
    offset = position = 0
    for offset_step, position_step in steps:
        offset, position = offset + offset_step, position + position_step
        entries.append((offset, position))
    index = OffsetIndex()
    for entry in entries:
        index.add(*entry)
    for one in (index, OffsetIndex.decode(index.encode(), log_bytes=position + 1)):
        assert one.floor(wanted) == max((e for e in entries if e[0] <= wanted), default=None)
        assert one.floor_position(wanted * 50) == max((e for e in entries if e[1] <= wanted * 50), default=None)
        assert one.last() == (entries[-1] if entries else None)


@pytest.mark.parametrize(
    "data",
    [b"\0" * 7, b"\0" * 16, struct.pack(">iiii", 5, 100, 4, 200), struct.pack(">iiii", 4, 100, 5, 90), b"\xff" * 8],
    ids=["torn", "zeros", "offsets fall", "positions fall", "negative"],
)
def test_an_offset_index_that_contradicts_itself_is_refused(data: bytes) -> None:
    """A torn or zeroed file is told from an index."""
    with pytest.raises(CorruptRecords):
        OffsetIndex.decode(data, log_bytes=1000)


def test_an_offset_index_that_points_behind_the_log_is_refused() -> None:
    """As after a log that lost its tail."""
    with pytest.raises(CorruptRecords, match="outside"):
        OffsetIndex.decode(struct.pack(">ii", 5, 1000), log_bytes=1000)


@pytest.mark.parametrize("data", [b"\0" * 11, b"\0" * 24, struct.pack(">qi", -5, 1)], ids=["torn", "zeros", "negative"])
def test_a_time_index_that_contradicts_itself_is_refused(data: bytes) -> None:
    """Times and offsets both rise."""
    with pytest.raises(CorruptRecords):
        TimeIndex.decode(data)


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * 33,
        encode_aborted([AbortedTransaction(1, 0, 5, 6), AbortedTransaction(2, 0, 4, 6)]),
        encode_aborted([AbortedTransaction(1, 7, 5, 6)]),
        b"\0\1" + encode_aborted([AbortedTransaction(1, 0, 5, 6)])[2:],
    ],
    ids=["torn", "out of order", "ends before it begins", "newer version"],
)
def test_an_aborted_index_that_contradicts_itself_is_refused(data: bytes) -> None:
    """A wrong one would show aborted records as committed, so it is rebuilt from the log."""
    with pytest.raises(CorruptRecords):
        decode_aborted(data)
