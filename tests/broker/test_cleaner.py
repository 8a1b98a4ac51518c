"""Compaction on bytes: what stays, what goes, and that no crash can be seen in the result."""

from __future__ import annotations

import os
import random
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage_samples import PATH, SMALL, compact, make_batch, open_on, read_all

from semel.broker.storage import cleaner
from semel.broker.storage.cleaner import plan_cleaning
from semel.broker.storage.failures import DamagedLog
from semel.broker.storage.partition import Partition
from semel.broker.storage.segment import SNAPSHOT_SUFFIX
from semel.core.partition_log import AbortedTransaction
from semel.records.compression import compress
from semel.records.layout import HEADER_BYTES, LENGTH_FIELD_END, BatchHeader, read_header, write_header
from semel.records.reference import Record, decode_batch, encode_batch, varint_bytes
from semel.testing.simulated_disk import SimulatedCrash, SimulatedDisk

COMPACT = replace(
    SMALL,
    segment_bytes=800,
    cleanup_policy=frozenset({"compact"}),
    min_cleanable_dirty_ratio=0.0,
    delete_retention_ms=1000,
)
SEED = int(os.environ["SEMEL_SEED"])


def put_keys(
    partition: Partition,
    *pairs: tuple[bytes, bytes | None],
    now_ms: int = 0,
    compression: str = "none",
    stages: bool = False,
) -> int:
    """Append one batch; with `stages` as a large one is, whose file becomes a segment."""
    records = [Record(number, now_ms, key, value) for number, (key, value) in enumerate(pairs)]
    batch = bytearray(encode_batch(records, compression=compression))
    header, staged = read_header(batch), None
    if stages:
        staged = partition.stage(header, now_ms=now_ms)
        assert staged is not None
        staged.write(memoryview(batch)[HEADER_BYTES:], HEADER_BYTES)
    return partition.append(batch, header, now_ms=now_ms, staged=staged).base_offset


def put_transaction(partition: Partition, producer_id: int, sequence: int, kind: str, *keys: bytes) -> None:
    batch = make_batch(
        [kind.encode()] * len(keys),
        keys=list(keys),
        producer_id=producer_id,
        producer_epoch=0,
        base_sequence=sequence,
        transactional=True,
    )
    partition.append(batch, read_header(batch), now_ms=0)
    if kind == "commit" or kind == "abort":
        partition.append_marker(kind, producer_id=producer_id, producer_epoch=0, coordinator_epoch=0, now_ms=0)


def sync(partition: Partition) -> None:
    unsynced = partition.dirty_files()
    if unsynced is not None:
        unsynced.sync()
        partition.mark_synced(unsynced)


def table_of(partition: Partition) -> dict[bytes, tuple[int, bytes | None]]:
    """The latest record of each key, as a reader of committed records sees it."""
    aborted = partition.log.all_aborted()
    table: dict[bytes, tuple[int, bytes | None]] = {}
    for header, batch in partition.batches():
        if header.is_control or header.base_offset >= partition.last_stable_offset or belongs(header, aborted):
            continue
        for record in decode_batch(batch)[1]:
            if record.key is not None and record.offset >= partition.log_start_offset:
                table[record.key] = (record.offset, record.value)
    return table


def belongs(header: BatchHeader, aborted: tuple[AbortedTransaction, ...]) -> bool:
    return header.is_transactional and any(
        entry.producer_id == header.producer_id and entry.first_offset <= header.base_offset <= entry.last_offset
        for entry in aborted
    )


def test_only_the_latest_record_of_each_key_stays_at_its_offset() -> None:
    """Old values go, offsets and bytes of what stays do not change, and the log end neither."""
    disk = SimulatedDisk()
    partition = open_on(disk, COMPACT)
    for number in range(60):
        put_keys(partition, (b"key%d" % (number % 4), b"%d" % number))
    before, size = table_of(partition), partition.size_bytes
    assert compact(partition, 0)
    assert table_of(partition) == before
    assert partition.size_bytes < size / 3
    assert partition.log_end_offset == 60
    closed_end = partition.active.base_offset
    assert [read.offset for read in read_all(partition) if read.offset < closed_end] == list(
        range(closed_end - 4, closed_end)
    )
    assert not compact(partition, 0)
    partition.close()
    assert table_of(open_on(disk.reboot(power_cut=True), COMPACT)) == before


@pytest.mark.parametrize("stages_every", [1, 3])
def test_large_batches_are_compacted_as_others_are(stages_every: int) -> None:
    """Each of them is a segment. Compaction joins these, and a restart finds the same table in fewer files."""
    disk = SimulatedDisk()
    partition = open_on(disk, COMPACT)
    for number in range(60):
        is_large = number % stages_every == 0
        put_keys(
            partition,
            (b"key%d" % (number % 4), b"%d" % number),
            (b"once%d" % (number // 20), b"%d" % number),
            stages=is_large,
        )
    before, segments = table_of(partition), len(partition.segments)
    assert segments >= 60 // stages_every
    assert compact(partition, 0)
    assert table_of(partition) == before
    assert len(partition.segments) < segments / 2
    assert partition.log_end_offset == 120
    partition.close()
    assert table_of(open_on(disk.reboot(power_cut=True), COMPACT)) == before


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_a_batch_that_loses_some_records_keeps_the_others_byte_for_byte(compression: str) -> None:
    """Timestamps, headers that are no UTF-8 and null values survive the rewriting, under the same codec."""
    partition = open_on(SimulatedDisk(), COMPACT)
    records = [
        Record(0, 1000, b"a", b"old"),
        Record(1, 1005, b"b", b"kept", (("trace", b"\xff\x00"), ("empty", None))),
        Record(2, 990, b"c", b""),
    ]
    batch = bytearray(encode_batch(records, compression=compression))
    partition.append(batch, read_header(batch), now_ms=1000)
    put_keys(partition, (b"a", b"new"), now_ms=2000)
    partition.roll(0)
    assert compact(partition, 5000)
    header, kept = decode_batch(next(partition.batches())[1])
    assert kept == records[1:]
    assert (header.compression, header.base_offset, header.last_offset, header.max_timestamp) == (
        compression,
        0,
        2,
        1005,
    )


def test_tombstones_stay_until_their_delete_horizon_has_passed() -> None:
    """KIP-534: readers have delete.retention.ms from the first cleaning on to see that a key is gone."""
    partition = open_on(SimulatedDisk(), COMPACT)
    put_keys(partition, (b"a", b"1"), (b"b", b"1"), now_ms=500)
    put_keys(partition, (b"a", None), now_ms=500)
    partition.roll(0)
    assert compact(partition, 2000)
    assert table_of(partition) == {b"a": (2, None), b"b": (1, b"1")}
    tombstone = decode_batch(list(partition.batches())[1][1])
    assert (tombstone[0].has_delete_horizon, tombstone[0].base_timestamp) == (True, 3000)
    assert tombstone[1][0].timestamp_ms == 500
    for now_ms, expected in ((2999, {b"a": (2, None), b"b": (1, b"1")}), (3000, {b"b": (1, b"1")})):
        put_keys(partition, (b"other", b"x"))
        partition.roll(0)
        assert compact(partition, now_ms)
        assert {key: value for key, value in table_of(partition).items() if key != b"other"} == expected


def test_aborted_records_go_and_open_transactions_are_not_touched() -> None:
    """Compaction stops at the last stable offset; an aborted value never replaces a committed one."""
    disk = SimulatedDisk()
    partition = open_on(disk, COMPACT)
    put_keys(partition, (b"a", b"first"), (b"b", b"first"))
    put_transaction(partition, 1, 0, "abort", b"a", b"b")
    put_transaction(partition, 2, 0, "commit", b"b")
    put_transaction(partition, 3, 0, "open", b"a")
    put_keys(partition, (b"a", b"behind the open one"))
    partition.roll(0)
    before = table_of(partition)
    assert before == {b"a": (0, b"first"), b"b": (5, b"commit")}
    assert compact(partition, 0)
    assert table_of(partition) == before
    assert [read.value for read in read_all(partition)] == [b"first", b"commit", b"open", b"behind the open one"]
    partition.close()
    again = open_on(disk.reboot(power_cut=True), COMPACT)
    assert table_of(again) == before
    assert again.last_stable_offset == partition.last_stable_offset


def test_what_a_start_rebuilt_from_compacted_records_is_the_same_at_the_next_start() -> None:
    """The stored index knew an abort whose records are gone: it came back, and would have outlived its marker."""
    disk = SimulatedDisk()
    partition = open_on(disk, COMPACT)
    put_transaction(partition, 1, 0, "abort", b"a")
    put_transaction(partition, 1, 1, "commit", b"a")
    partition.roll(0)
    assert compact(partition, 0)
    assert len(partition.log.all_aborted()) == 1
    partition.close()
    for path in disk.paths():
        if path.endswith(SNAPSHOT_SUFFIX):
            disk.remove(path)
    rebooted = disk.reboot(power_cut=False)
    rebuilt = open_on(rebooted, COMPACT)
    assert table_of(rebuilt) == table_of(partition)
    put_keys(rebuilt, (b"b", b"x"))
    rebuilt.close()
    again = open_on(rebooted.reboot(power_cut=True), COMPACT)
    assert again.log.all_aborted() == rebuilt.log.all_aborted()
    assert table_of(again) == table_of(rebuilt)


def test_the_markers_of_vanished_transactions_go_with_their_index_entries() -> None:
    """An index entry without its marker would make readers drop a later committed transaction of the producer."""
    disk = SimulatedDisk()
    partition = open_on(disk, COMPACT)
    put_transaction(partition, 1, 0, "abort", b"a")
    put_transaction(partition, 1, 1, "commit", b"a")
    put_keys(partition, (b"b", b"x"))
    now_ms = 0
    for _ in range(6):
        now_ms += 5000
        put_keys(partition, (b"b", b"x"))
        partition.roll(0)
        assert compact(partition, now_ms)
        if not partition.log.all_aborted():
            break
    else:
        pytest.fail("the aborted transaction never went")
    assert table_of(partition)[b"a"] == (2, b"commit")
    partition.close()
    again = open_on(disk.reboot(power_cut=True), COMPACT)
    assert again.log.all_aborted() == ()
    assert table_of(again)[b"a"] == (2, b"commit")


def test_a_producer_is_still_known_after_its_records_were_compacted_away() -> None:
    """The last batch of a producer stays, empty if need be, so that a repeat is recognised even without snapshots."""
    disk = SimulatedDisk()
    partition = open_on(disk, COMPACT)
    batch = make_batch([b"v"], keys=[b"a"], producer_id=7, producer_epoch=2, base_sequence=0)
    header = read_header(batch)
    partition.append(batch, header, now_ms=0)
    put_keys(partition, (b"a", b"newer"))
    partition.roll(0)
    assert compact(partition, 0)
    assert next(partition.batches())[0].record_count == 0
    partition.close()
    after = disk.reboot(power_cut=True)
    for path in after.paths():
        if path.endswith(".snapshot"):
            after.remove(path)
    assert open_on(after, COMPACT).append(bytearray(batch), header, now_ms=0).is_duplicate


def test_compaction_waits_for_the_dirty_ratio_the_lag_and_never_longer_than_the_maximum() -> None:
    """min.cleanable.dirty.ratio, min.compaction.lag.ms and max.compaction.lag.ms decide as in Kafka."""
    partition = open_on(SimulatedDisk(), COMPACT)
    for number in range(4):
        put_keys(partition, (b"key%d" % number, b"x" * 100), now_ms=1000)
    partition.roll(0)
    assert compact(partition, 1000)
    put_keys(partition, (b"key0", b"y"), now_ms=1000)
    partition.roll(0)
    partition.settings = replace(COMPACT, min_cleanable_dirty_ratio=0.5)
    assert not compact(partition, 2000)
    partition.settings = replace(COMPACT, min_compaction_lag_ms=5000)
    assert not compact(partition, 2000)
    partition.settings = replace(COMPACT, min_cleanable_dirty_ratio=0.5, max_compaction_lag_ms=500)
    assert compact(partition, 2000)


def test_small_neighbours_become_one_segment() -> None:
    """A log of few keys does not become thousands of tiny files."""
    partition = open_on(SimulatedDisk(), COMPACT)
    for number in range(100):
        put_keys(partition, (b"key%d" % (number % 2), b"x" * 50))
    segments = len(partition.segments)
    assert compact(partition, 0)
    put_keys(partition, (b"key0", b"x"))
    partition.roll(0)
    assert compact(partition, 0)
    assert len(partition.segments) < segments / 2


def test_compaction_refuses_damaged_segments_and_leaves_them_alone() -> None:
    """Bit rot found by the cleaner is told, and what it had written is thrown away."""
    disk = SimulatedDisk()
    partition = open_on(disk, COMPACT)
    for number in range(30):
        put_keys(partition, (b"key%d" % (number % 4), b"%d" % number))
    content = bytearray(disk.content(f"{PATH}/{0:020d}.log"))
    content[70] ^= 1
    disk.set_content(f"{PATH}/{0:020d}.log", bytes(content))
    with pytest.raises(DamagedLog):
        compact(partition, 0)
    assert disk.content(f"{PATH}/{0:020d}.log") == content
    assert not [path for path in disk.paths() if "cleaned" in path or "swap" in path]


def test_a_compaction_whose_segments_were_deleted_meanwhile_is_thrown_away() -> None:
    """The cleaner runs beside the loop; deletions that overtake it win."""
    disk = SimulatedDisk()
    partition = open_on(disk, COMPACT)
    for number in range(40):
        put_keys(partition, (b"key%d" % (number % 4), b"%d" % number))
    partition.flush()
    cleaning = plan_cleaning(partition, 0)
    assert cleaning is not None
    cleaning.run()
    put_keys(partition, (b"late", b"x"))
    partition.delete_records(35)
    expected = table_of(partition)
    assert not cleaning.finish()
    assert table_of(partition) == expected
    assert not [path for path in disk.paths() if "cleaned" in path]


def run_random(disk: SimulatedDisk, seed: int) -> tuple[Partition, dict[bytes, bytes | None]]:
    """Random writes with a compaction at the end, which may crash; what must be found is in the returned table."""
    chance = random.Random(seed)
    partition = open_on(disk, COMPACT)
    for number in range(40):
        producer_id, kind = chance.randrange(3), chance.choice(("commit", "abort"))
        keys = [b"key%d" % chance.randrange(6) for _ in range(chance.randrange(1, 4))]
        if producer_id == 0:
            value = None if chance.random() < 0.2 else b"%d" % number
            put_keys(partition, *((key, value) for key in keys), compression=chance.choice(("none", "gzip")))
        else:
            entry = partition.log.producers.get(producer_id)
            put_transaction(partition, producer_id, entry.last_sequence + 1 if entry else 0, kind, *keys)
        if chance.random() < 0.1:
            compact(partition, number * 100)
    partition.flush()
    return partition, {key: value for key, (_, value) in table_of(partition).items() if value is not None}


def live_of(partition: Partition) -> dict[bytes, bytes | None]:
    return {key: value for key, (_, value) in table_of(partition).items() if value is not None}


@settings(deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 5000), min_size=1, max_size=4))
def test_the_table_of_latest_values_is_the_same_after_any_compactions(seed: int, times: list[int]) -> None:
    """Whatever goes, a reader that builds a table from the log builds the same one, also after a restart."""
    disk = SimulatedDisk()
    partition, expected = run_random(disk, seed)
    for now_ms in sorted(times):
        put_keys(partition, (b"filler", b"x"))
        partition.roll(0)
        compact(partition, now_ms)
        assert {key: value for key, value in live_of(partition).items() if key != b"filler"} == expected
    partition.close()
    again = open_on(disk.reboot(power_cut=True), COMPACT)
    assert live_of(again) == live_of(partition)
    assert again.log.all_aborted() == partition.log.all_aborted()
    assert again.last_stable_offset == partition.last_stable_offset


@pytest.mark.parametrize("power_cut", [False, True], ids=["killed", "power cut"])
@pytest.mark.parametrize("seed", [1, SEED])
def test_a_crash_at_any_operation_of_a_compaction_changes_no_latest_value(seed: int, power_cut: bool) -> None:
    """Old segments, new segment or a mix after a finished swap: the table is the same, and the next one works."""
    disk = SimulatedDisk()
    partition, expected = run_random(disk, seed)
    partition.close()
    start = disk.reboot(power_cut=True)
    for crash_at in range(1000):
        dying = start.reboot(power_cut=False)
        partition = open_on(dying, COMPACT)
        dying.crash_at = dying.operations + crash_at
        try:
            put_keys(partition, (b"filler", b"x"))
            partition.roll(0)
            compact(partition, 10_000)
        except SimulatedCrash:
            after = dying.reboot(power_cut=power_cut, seed=crash_at)
        else:
            break
        again = open_on(after, COMPACT)
        assert again.failure is None
        assert {key: value for key, value in live_of(again).items() if key != b"filler"} == expected
        put_keys(again, (b"filler", b"y"))
        again.roll(0)
        compact(again, 20_000)
        assert {key: value for key, value in live_of(again).items() if key != b"filler"} == expected
        assert not [path for path in after.paths() if path.endswith((".cleaned", ".swap", ".tmp"))]
    else:
        pytest.fail("the compaction never finished")


def test_a_batch_of_millions_of_records_is_compacted_in_little_memory() -> None:
    """A few kilobytes with millions of records took 900 MB, and everybody else waited for a second."""
    partition = open_on(SimulatedDisk(), COMPACT)
    count = 300_000
    body = bytearray()
    for offset in range(count):
        fields = b"\0\0" + varint_bytes(offset) + b"\2k\2v\0"
        body += varint_bytes(len(fields)) + fields
    packed = bytes(compress("zstd", body))
    header = read_header(encode_batch([Record(0, 0, b"k", b"v")], compression="zstd"))
    batch = bytearray(HEADER_BYTES) + packed
    ends = {"batch_length": len(batch) - LENGTH_FIELD_END, "last_offset_delta": count - 1, "record_count": count}
    write_header(batch, header._replace(**ends))
    del body
    partition.append(batch, read_header(batch), now_ms=0)
    put_keys(partition, (b"k", b"last"))
    partition.roll(0)
    sync(partition)
    cleaning = plan_cleaning(partition, 0, ignore_ratio=True)
    assert cleaning is not None
    tracemalloc.start()
    try:
        cleaning.run()
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert cleaning.finish()
    assert table_of(partition) == {b"k": (count, b"last")}


def test_more_keys_than_can_be_remembered_are_compacted_in_several_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client can send keys without end. Each cleaning takes as many as fit, and the next goes on from there."""
    monkeypatch.setattr(cleaner, "_KEYS_BYTES_MAX", 20 * 160)
    partition = open_on(SimulatedDisk(), COMPACT)
    for number in range(120):
        put_keys(partition, (b"key-%d" % (number % 50), b"%d" % number), (b"key-%d" % (number % 7), b"%d" % number))
    partition.roll(0)
    sync(partition)
    expected = table_of(partition)
    rounds = 0
    while (cleaning := plan_cleaning(partition, 0, ignore_ratio=True)) is not None:
        cleaning.run()
        assert cleaning.finish()
        assert table_of(partition) == expected
        sync(partition)
        rounds += 1
    assert rounds > 5
    assert sum(header.record_count for header, _ in partition.batches()) == len(expected)


def test_a_batch_with_more_keys_than_can_be_remembered_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is looked at once, with a warning, and not again with every round of the cleaner."""
    monkeypatch.setattr(cleaner, "_KEYS_BYTES_MAX", 20 * 160)
    partition = open_on(SimulatedDisk(), COMPACT)
    put_keys(partition, *((b"key-%d" % number, b"v") for number in range(100)))
    put_keys(partition, (b"key-1", b"w"))
    partition.roll(0)
    sync(partition)
    expected = table_of(partition)
    cleaning = plan_cleaning(partition, 0, ignore_ratio=True)
    assert cleaning is not None
    cleaning.run()
    assert not cleaning.finish()
    assert "is not compacted from offset 0 on" in caplog.text
    assert plan_cleaning(partition, 0, ignore_ratio=True) is None
    assert table_of(partition) == expected
