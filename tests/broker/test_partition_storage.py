"""Appending to and reading from one partition on disk."""

from __future__ import annotations

import errno
import os
import tracemalloc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from kio.schema.errors import ErrorCode
from storage_samples import PATH, SMALL, Read, make_batch, open_on, put, read_all, values_of

from semel.broker.pacing import finish_now
from semel.broker.storage.disk import RealDisk
from semel.broker.storage.failures import StorageError
from semel.broker.storage.log_file import OpenFiles
from semel.broker.storage.log_settings import LogSettings
from semel.broker.storage.partition import Partition
from semel.core.refusal import Refused
from semel.records.layout import iter_batches, read_header, verify_crc
from semel.records.reference import decode_batch
from semel.testing.simulated_disk import SimulatedDisk

if TYPE_CHECKING:
    from typing_extensions import Buffer


def test_offsets_are_stamped_into_the_batch_and_its_other_bytes_stay() -> None:
    """What is stored is the producer's batch byte for byte, but for offset and leader epoch."""
    partition = open_on(SimulatedDisk())
    put(partition, [b"a", b"b"])
    batch = make_batch([b"c", b"d", b"e"])
    original = bytes(batch)
    appended = partition.append(batch, read_header(batch), now_ms=0)
    assert appended == (2, 4, -1, False)
    stored = bytes(partition.read(2, bytes_max=10_000))
    verify_crc(stored)
    assert read_header(stored).base_offset == 2
    assert read_header(stored).partition_leader_epoch == 0
    assert stored[16:] == original[16:]
    assert stored[8:12] == original[8:12]


def test_log_append_time_is_stamped_under_a_new_checksum() -> None:
    """With message.timestamp.type=LogAppendTime each record has the broker's time, and readers can verify the batch."""
    partition = open_on(SimulatedDisk(), LogSettings(message_timestamp_type="LogAppendTime"))
    batch = make_batch([b"a", b"b"], compression="gzip", timestamp_ms=5)
    assert partition.append(batch, read_header(batch), now_ms=777).log_append_time_ms == 777
    _, records = decode_batch(partition.read(0, bytes_max=10_000))
    assert [record.timestamp_ms for record in records] == [777, 777]


def test_a_timestamp_beyond_the_bounds_is_refused_and_nothing_is_stored() -> None:
    """message.timestamp.after.max.ms holds, and a refused batch leaves no trace."""
    disk = SimulatedDisk()
    partition = open_on(disk, LogSettings(message_timestamp_after_max_ms=10))
    with pytest.raises(Refused) as refused:
        put(partition, [b"a"], timestamp_ms=100, now_ms=50)
    assert refused.value.code == ErrorCode.invalid_timestamp
    assert partition.log_end_offset == 0
    assert disk.content(f"{PATH}/{0:020d}.log") == b""


def test_a_repeated_batch_gets_the_answer_of_the_first_time() -> None:
    """An idempotent producer's repeat is not stored again."""
    partition = open_on(SimulatedDisk())
    batch = make_batch([b"a", b"b"], producer_id=7, producer_epoch=0, base_sequence=0)
    header = read_header(batch)
    first = partition.append(batch, header, now_ms=5)
    size = partition.size_bytes
    again = partition.append(bytearray(batch), header, now_ms=6)
    assert (first.base_offset, first.is_duplicate) == (0, False)
    assert (again.base_offset, again.last_offset, again.is_duplicate) == (0, 1, True)
    assert partition.size_bytes == size


def test_reads_give_whole_batches_up_to_the_limit_and_at_least_one() -> None:
    """A read ends at a batch border; a batch larger than the limit comes whole, or not at all if so asked."""
    partition = open_on(SimulatedDisk(), LogSettings())
    for number in range(20):
        put(partition, [b"%03d" % number * 10])
    batch_bytes = partition.size_bytes // 20
    for limit in range(0, batch_bytes * 4, 7):
        data = partition.read(5, bytes_max=limit)
        headers = [header for header, _ in iter_batches(data)]
        assert [header.base_offset for header in headers] == list(range(5, 5 + max(limit // batch_bytes, 1)))
        assert sum(header.total_bytes for header in headers) == len(data)
    assert partition.read(5, bytes_max=batch_bytes - 1, at_least_one=False) == b""


def test_a_read_inside_of_a_batch_gets_that_batch() -> None:
    """Fetch positions need not be batch borders."""
    partition = open_on(SimulatedDisk())
    put(partition, [b"a", b"b", b"c"])
    put(partition, [b"d", b"e"])
    assert read_header(partition.read(2, bytes_max=1)).base_offset == 0
    assert read_header(partition.read(4, bytes_max=1)).base_offset == 3


def test_nothing_at_or_behind_the_end_offset_is_read() -> None:
    """A reader of committed records stops at the last stable offset, whatever lies behind it."""
    partition = open_on(SimulatedDisk())
    for number in range(30):
        put(partition, [b"%d" % number])
    for end in range(31):
        assert [read.offset for read in read_all(partition, end_offset=end)] == list(range(end))


def test_reading_outside_of_the_log_is_refused() -> None:
    """Below the log start and above the log end there is nothing; at the log end one may wait."""
    partition = open_on(SimulatedDisk())
    put(partition, [b"a", b"b"])
    partition.delete_records(1)
    assert partition.read(2, bytes_max=100) == b""
    for offset in (0, 3):
        with pytest.raises(Refused) as refused:
            partition.read(offset, bytes_max=100)
        assert refused.value.code == ErrorCode.offset_out_of_range


def test_the_log_rolls_by_size_and_reads_cross_the_segments() -> None:
    """Segments are cut at segment.bytes and no reader notices."""
    partition = open_on(SimulatedDisk())
    for number in range(50):
        put(partition, [b"%d" % number])
    assert len(partition.segments) > 5
    assert all(segment.size <= SMALL.segment_bytes for segment in partition.segments)
    assert read_all(partition) == [Read(number, b"%d" % number) for number in range(50)]


def test_the_log_rolls_by_the_time_of_its_records() -> None:
    """segment.ms counts from the first record of the segment, as in Kafka, so that replays of old data roll too."""
    partition = open_on(SimulatedDisk(), LogSettings(segment_ms=100))
    put(partition, [b"a"], timestamp_ms=1000)
    put(partition, [b"b"], timestamp_ms=1100)
    assert len(partition.segments) == 1
    put(partition, [b"c"], timestamp_ms=1101)
    assert [segment.base_offset for segment in partition.segments] == [0, 2]
    put(partition, [b"d"], timestamp_ms=900)
    assert len(partition.segments) == 2


def test_a_full_disk_stores_nothing_of_the_batch_and_the_next_one_goes_through() -> None:
    """ENOSPC in the middle of a write is taken back: offsets, bytes and producer state are as before."""
    disk = SimulatedDisk()
    partition = open_on(disk, LogSettings())
    put(partition, [b"a"])
    before = disk.content(partition.active.file.path)
    batch = make_batch([b"b" * 100], producer_id=7, producer_epoch=0, base_sequence=0)
    for room in range(0, len(batch), 13):
        disk.free_bytes = room
        with pytest.raises(StorageError, match=r"Nothing of the batch was stored.*disk is full"):
            partition.append(
                batch, read_header(make_batch([b"b" * 100], producer_id=7, producer_epoch=0, base_sequence=0)), now_ms=0
            )
        assert disk.content(partition.active.file.path) == before
        assert partition.log_end_offset == 1
    disk.free_bytes = -1
    batch = make_batch([b"b" * 100], producer_id=7, producer_epoch=0, base_sequence=0)
    assert partition.append(batch, read_header(batch), now_ms=0) == (1, 1, -1, False)
    assert values_of(partition) == [b"a", b"b" * 100]


def test_a_full_disk_at_a_roll_leaves_the_partition_as_it_was() -> None:
    """Whatever the roll could not write, records stay readable and appends go on once there is space."""
    disk = SimulatedDisk()
    partition = open_on(disk)
    written = [b"%d" % put(partition, [b"%d" % number]) for number in range(6)]
    disk.free_bytes = 0
    for _ in range(20):
        with pytest.raises(StorageError):
            put(partition, [b"lost"])
    disk.free_bytes = -1
    for number in range(6, 20):
        written.append(b"%d" % number)
        put(partition, [b"%d" % number])
    assert values_of(partition) == written
    partition.close()
    assert values_of(open_on(disk.reboot(power_cut=True))) == written


def test_a_failed_sync_is_not_forgotten() -> None:
    """After a failed fsync the pages may be gone while the next one succeeds, so the partition stops taking records."""
    disk = SimulatedDisk()
    partition = open_on(disk, hold_high_watermark=True)
    put(partition, [b"a"])
    unsynced = partition.dirty_files()
    assert unsynced is not None
    disk.fail_at = {disk.operations: errno.EIO}
    for _ in range(2):
        with pytest.raises(StorageError, match="could not be synced"):
            unsynced.sync()
    with pytest.raises(StorageError, match="until the broker starts anew"):
        put(partition, [b"b"])
    assert partition.high_watermark == 0


def test_the_high_watermark_can_be_held_until_the_sync() -> None:
    """Under fsync always nobody reads what a power cut could still take."""
    disk = SimulatedDisk()
    partition = open_on(disk, hold_high_watermark=True)
    called: list[int] = []
    partition.watchers[lambda: called.append(partition.high_watermark)] = None
    put(partition, [b"a", b"b"])
    assert (partition.high_watermark, partition.read(0, bytes_max=1000)) == (0, b"")
    unsynced = partition.dirty_files()
    assert unsynced is not None
    put(partition, [b"c"])
    unsynced.sync()
    partition.mark_synced(unsynced)
    partition.advance_high_watermark(unsynced.end_offset)
    assert [read.value for read in read_all(partition)] == [b"a", b"b"]
    assert called[-1] == 2
    rest = partition.dirty_files()
    assert rest is not None
    rest.sync()
    partition.mark_synced(rest)
    assert partition.dirty_files() is None


def test_watchers_are_called_after_records_are_visible() -> None:
    """A long-polling fetch wakes up when it can read, and may leave while it is called."""
    partition = open_on(SimulatedDisk())
    seen: list[int] = []

    def watch() -> None:
        seen.append(len(read_all(partition)))
        partition.watchers.pop(watch, None)

    partition.watchers[watch] = None
    put(partition, [b"a"])
    put(partition, [b"b"])
    assert seen == [1]


def test_transactions_markers_and_aborts_survive_a_restart() -> None:
    """The last stable offset, the aborted index and the open transaction come back from snapshot and txnindex."""
    disk = SimulatedDisk()
    partition = open_on(disk)
    for producer_id, kind in ((1, "abort"), (2, "commit"), (3, None)):
        for sequence in range(5):
            batch = make_batch(
                [b"%d" % producer_id],
                producer_id=producer_id,
                producer_epoch=0,
                base_sequence=sequence,
                transactional=True,
            )
            partition.append(batch, read_header(batch), now_ms=0)
        if kind == "abort" or kind == "commit":
            partition.append_marker(kind, producer_id=producer_id, producer_epoch=0, coordinator_epoch=0, now_ms=0)
    expected = (
        partition.last_stable_offset,
        partition.log.all_aborted(),
        partition.log.open_transactions()[0].batches[-1],
    )
    assert expected[0] == 12
    assert [entry.producer_id for entry in expected[1]] == [1]
    partition.close()
    again = open_on(disk.reboot(power_cut=True))
    assert (again.last_stable_offset, again.log.all_aborted(), again.log.open_transactions()[0].batches[-1]) == expected


def test_coordinator_records_become_one_batch() -> None:
    """Coordinators write keys and values; with a producer the batch belongs to its transaction."""
    partition = open_on(SimulatedDisk())
    assert partition.append_records([(b"k", b"v"), (b"gone", None)], now_ms=9) == 0
    assert partition.append_records([(b"k", b"v")], now_ms=9, producer_id=5, producer_epoch=0) == 2
    (first, batch), (second, _) = partition.batches()
    assert [(record.key, record.value) for record in decode_batch(batch)[1]] == [(b"k", b"v"), (b"gone", None)]
    assert (first.is_transactional, second.is_transactional, second.base_sequence) == (False, True, -1)
    assert partition.last_stable_offset == 2


def test_offsets_are_found_by_timestamp_even_when_clocks_jump_back() -> None:
    """ListOffsets gives the first record that is not older, in offset order, whatever order the times have."""
    partition = open_on(SimulatedDisk())
    times = [50, 10, 60, 20, 20, 90, 30, 90, 5, 70] * 6
    for timestamp_ms in times:
        put(partition, [b"x"], timestamp_ms=timestamp_ms)
    for wanted in range(95):
        first = next((n for n, t in enumerate(times) if t >= wanted), None)
        assert finish_now(partition.offset_for_timestamp(wanted)) == (None if first is None else (times[first], first))
    assert finish_now(partition.max_timestamp()) == (90, 5)
    partition.delete_records(6)
    assert finish_now(partition.max_timestamp()) == (90, 7)


def test_an_empty_partition_has_no_timestamps() -> None:
    """ListOffsets on an empty partition finds nothing."""
    partition = open_on(SimulatedDisk())
    assert (finish_now(partition.max_timestamp()), finish_now(partition.offset_for_timestamp(0))) == (None, None)


def test_retention_goes_by_the_times_of_records_and_never_early_after_a_clock_jump() -> None:
    """A clock that went back deletes nothing; when it has caught up, whole segments go, oldest first."""
    partition = open_on(SimulatedDisk(), LogSettings(segment_bytes=300, retention_ms=1000, segment_ms=2**60))
    for number in range(12):
        put(partition, [b"x"], timestamp_ms=10_000 + number * 100)
    assert partition.apply_retention(9_000) == 0
    assert partition.apply_retention(11_000) == 0
    removed = partition.apply_retention(11_500)
    assert removed > 0
    assert partition.log_start_offset == partition.segments[0].base_offset > 0
    assert partition.apply_retention(99_999) > 0
    assert (partition.log_start_offset, partition.log_end_offset, partition.size_bytes) == (12, 12, 0)
    put(partition, [b"next"])
    assert read_all(partition) == [Read(12, b"next")]


def test_retention_by_size_keeps_at_least_that_much() -> None:
    """retention.bytes removes only segments that are wholly surplus."""
    partition = open_on(SimulatedDisk(), LogSettings(segment_bytes=300, retention_bytes=700, retention_ms=-1))
    for _ in range(20):
        put(partition, [b"x"])
    partition.apply_retention(0)
    assert 700 <= partition.size_bytes < 700 + 300


def test_deleted_records_stay_deleted_and_offsets_go_on() -> None:
    """DeleteRecords is durable at once, and frees the segments below."""
    disk = SimulatedDisk()
    partition = open_on(disk)
    for number in range(20):
        put(partition, [b"%d" % number])
    segments = len(partition.segments)
    assert partition.delete_records(15) == 15
    assert partition.delete_records(3) == 15
    assert len(partition.segments) < segments
    for seed in range(20):
        again = open_on(disk.reboot(power_cut=True, seed=seed))
        assert again.log_start_offset == 15
    assert partition.delete_records(-1) == 20
    assert put(partition, [b"next"]) == 20
    with pytest.raises(Refused):
        partition.delete_records(22)


def test_a_deleted_partition_leaves_nothing() -> None:
    """The directory goes as a whole, and appends to the object are refused."""
    disk = SimulatedDisk()
    partition = open_on(disk)
    put(partition, [b"a"])
    partition.delete()
    assert disk.list("data") == []
    with pytest.raises(StorageError, match="was deleted"):
        put(partition, [b"b"])


def test_many_partitions_work_with_few_file_handles(tmp_path: Path) -> None:
    """A broker with more partitions than the process may open files still serves them all."""
    files = OpenFiles(RealDisk(), handles_max=4)
    partitions: list[Partition] = []
    for number in range(20):
        path = tmp_path / f"t-{number}"
        path.mkdir()
        partitions.append(Partition(files, str(path), "t", number, SMALL, now_ms=0))
    for value in (b"one", b"two"):
        for partition in partitions:
            put(partition, [value])
    assert len(files) <= 4
    assert all(values_of(partition) == [b"one", b"two"] for partition in partitions)
    for partition in partitions:
        partition.close()
    assert len(files) == 0


def test_a_large_batch_is_not_copied(tmp_path: Path) -> None:
    """The hot path hands the producer's buffer to the system: a 1 MB batch costs no memory of its size."""
    partition = Partition(OpenFiles(RealDisk()), str(tmp_path), "t", 0, LogSettings(), now_ms=0)
    batch = make_batch([os.urandom(1_000_000)])
    header = read_header(batch)
    partition.append(batch, header, now_ms=0)
    tracemalloc.start()
    partition.append(memoryview(batch), header, now_ms=0)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    partition.close()
    assert peak_bytes < 100_000


class ReluctantDisk(SimulatedDisk):
    """Takes at most seven bytes of a write, as a system may when it is interrupted."""

    def write(self, handle: int, buffers: Sequence[Buffer], position: int) -> int:
        return super().write(handle, [b"".join(buffers)[:7]], position)


def test_writes_that_the_system_takes_in_pieces_arrive_whole() -> None:
    """A short count from the system is not an error and loses nothing."""
    disk = ReluctantDisk()
    partition = open_on(disk)
    for number in range(12):
        put(partition, [b"%d" % number * 20])
    partition.close()
    assert values_of(open_on(disk.reboot(power_cut=True))) == [b"%d" % number * 20 for number in range(12)]


def test_a_sync_in_another_thread_does_not_disturb_appends(tmp_path: Path) -> None:
    """Under load, syncs, rolls, deletions and appends overlap; the recovery point and the log stay right."""
    files = OpenFiles(RealDisk(), handles_max=2)
    settings = LogSettings(segment_bytes=2000, retention_bytes=6000)
    partition = Partition(files, str(tmp_path), "t", 0, settings, now_ms=0, hold_high_watermark=True)
    with ThreadPoolExecutor(1) as pool:
        for number in range(60):
            unsynced = partition.dirty_files()
            waiting = None if unsynced is None else pool.submit(unsynced.sync)
            for _ in range(10):
                put(partition, [b"x" * 50], now_ms=1000)
            if number % 7 == 0:
                partition.apply_retention(1000)
            if unsynced is not None and waiting is not None:
                waiting.result(timeout=60)
                partition.mark_synced(unsynced)
                partition.advance_high_watermark(unsynced.end_offset)
    assert partition.high_watermark == 590
    assert partition.log_start_offset > 0
    partition.close()
    again = Partition(files, str(tmp_path), "t", 0, settings, now_ms=0)
    assert again.log_end_offset == 600
    assert len(read_all(again)) == 600 - again.log_start_offset
    again.close()
