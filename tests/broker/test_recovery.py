"""What a start finds after torn writes, lost index files and bit rot, and what it does about it."""

from __future__ import annotations

import logging
import random

import pytest
from storage_samples import PATH, SMALL, Read, make_batch, open_on, put, read_all, values_of

from semel.broker.pacing import finish_now
from semel.broker.storage.failures import DamagedLog, UnknownLayout
from semel.broker.storage.log_settings import LogSettings
from semel.broker.storage.partition import Partition
from semel.broker.storage.segment import ABORTED_SUFFIX, INDEX_SUFFIX, SNAPSHOT_SUFFIX, TIME_INDEX_SUFFIX
from semel.errors import CorruptRecords
from semel.records.layout import read_header
from semel.testing.simulated_disk import SimulatedDisk

LARGE = LogSettings(index_interval_bytes=200)


def killed(partition: Partition, disk: SimulatedDisk) -> SimulatedDisk:
    """The disk after kill -9 of the process that had the partition open."""
    assert partition.segments
    return disk.reboot(power_cut=False)


def log_path(base_offset: int = 0) -> str:
    return f"{PATH}/{base_offset:020d}.log"


def test_a_tail_torn_at_any_byte_is_cut_off_and_told(caplog: pytest.LogCaptureFixture) -> None:
    """kill -9 in the middle of a write costs the unfinished batch only, wherever it was cut."""
    disk = SimulatedDisk()
    partition = open_on(disk, LARGE)
    for number in range(5):
        put(partition, [b"%d" % number])
    whole = disk.content(log_path())
    put(partition, [b"last"])
    torn = disk.content(log_path())
    for size in range(len(whole), len(torn)):
        after = killed(partition, disk)
        after.set_content(log_path(), torn[:size])
        caplog.clear()
        again = open_on(after, LARGE)
        assert values_of(again) == [b"0", b"1", b"2", b"3", b"4"]
        assert after.content(log_path()) == whole
        assert ("cut off" in caplog.text) == (size > len(whole))
        assert put(again, [b"next"]) == 5


def test_damage_before_the_sync_with_sound_batches_behind_it_is_kept_aside(caplog: pytest.LogCaptureFixture) -> None:
    """A power cut may tear the middle of what was not synced: the log ends there, but no sound batch is thrown away."""
    disk = SimulatedDisk()
    partition = open_on(disk, LARGE)
    for number in range(5):
        put(partition, [b"%d" % number])
    content = bytearray(disk.content(log_path()))
    batch_bytes = len(content) // 5
    for damaged_at in (batch_bytes * 2 + 65, batch_bytes * 2 + 8):  # a record, and the length that leads to the next
        after = killed(partition, disk)
        rotten = bytearray(content)
        rotten[damaged_at] ^= 0x40
        after.set_content(log_path(), bytes(rotten))
        caplog.clear()
        again = open_on(after, LARGE)
        assert values_of(again) == [b"0", b"1"]
        assert after.content(f"{log_path()}.{batch_bytes * 2}.damaged") == bytes(rotten[batch_bytes * 2 :])
        assert "moved aside" in caplog.text
        assert put(again, [b"next"]) == 2


def test_a_clean_close_needs_no_scan_and_no_batch_is_read_twice() -> None:
    """After a clean close the start reads a few headers, not the log."""
    disk = SimulatedDisk()
    partition = open_on(disk, LARGE)
    for number in range(500):
        put(partition, [b"%d" % number * 20])
    partition.close()
    after = disk.reboot(power_cut=True)
    read_bytes = 0
    read = after.read

    def counted(handle: int, count: int, position: int) -> bytes:
        nonlocal read_bytes
        data = read(handle, count, position)
        read_bytes += len(data)
        return data

    after.read = counted
    again = open_on(after, LARGE)
    assert again.log_end_offset == 500
    assert read_bytes < 20_000 < again.size_bytes
    assert len(values_of(again)) == 500


def fill(disk: SimulatedDisk) -> Partition:
    """Several segments with an aborted transaction in each, and one that is open."""
    partition = open_on(disk)
    for number in range(24):
        batch = make_batch(
            [b"%d" % number], producer_id=number // 2, producer_epoch=0, base_sequence=number % 2, transactional=True
        )
        partition.append(batch, read_header(batch), now_ms=0)
        if number % 2:
            partition.append_marker(
                "abort" if number % 4 == 1 else "commit",
                producer_id=number // 2,
                producer_epoch=0,
                coordinator_epoch=0,
                now_ms=0,
            )
    batch = make_batch([b"open"], producer_id=99, producer_epoch=0, base_sequence=0, transactional=True)
    partition.append(batch, read_header(batch), now_ms=0)
    return partition


def state_of(partition: Partition) -> object:
    return (
        partition.log.all_aborted(),
        partition.last_stable_offset,
        partition.log_end_offset,
        {entry.producer_id: (entry.last_sequence, entry.last_data_offset) for entry in partition.log.producers},
        read_all(partition),
        [finish_now(partition.offset_for_timestamp(time_ms)) for time_ms in (0, 1000, 1001)],
    )


DERIVED = [INDEX_SUFFIX, TIME_INDEX_SUFFIX, ABORTED_SUFFIX, SNAPSHOT_SUFFIX]


@pytest.mark.parametrize(
    ("suffix", "harm"),
    [(suffix, harm) for suffix in DERIVED for harm in ("missing", "torn", "random")]
    # Kafka's format has no checksum in the other two: a plausible wrong number in them cannot be told.
    + [(INDEX_SUFFIX, "shifted"), (SNAPSHOT_SUFFIX, "shifted")],
)
def test_derived_files_that_are_missing_torn_or_wrong_are_rebuilt_and_told(
    suffix: str, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Indexes and snapshots are derived: whatever happens to them, reads and transactions are as before."""
    disk = SimulatedDisk()
    partition = fill(disk)
    expected = state_of(partition)
    partition.close()
    chance = random.Random(5)
    paths = [path for path in disk.paths() if path.endswith(suffix)]
    assert len(paths) > 1
    for path in [*paths, None]:
        after = disk.reboot(power_cut=True)
        caplog.clear()
        changed = False
        for target in paths if path is None else [path]:
            content = after.content(target)
            if harm == "missing":
                after.remove(target)
                changed = True
                continue
            if harm == "torn":
                new = content[: len(content) - 1]
            elif harm == "random":
                new = chance.randbytes(len(content))
            else:
                new = bytes(byte if number % 8 != 7 else byte ^ 1 for number, byte in enumerate(content))
            after.set_content(target, new)
            changed = changed or new != content
        again = open_on(after)
        assert state_of(again) == expected
        if changed and path is None:
            assert "ebuil" in caplog.text
        again.close()


def test_a_lost_checkpoint_means_a_full_scan_and_no_lost_record(caplog: pytest.LogCaptureFixture) -> None:
    """The recovery point is an optimisation: without it, everything is read and checked."""
    for harm in ("missing", "torn"):
        disk = SimulatedDisk()
        partition = fill(disk)
        expected = state_of(partition)
        partition.close()
        after = disk.reboot(power_cut=True)
        if harm == "missing":
            after.remove(f"{PATH}/semel-checkpoint")
        else:
            after.set_content(f"{PATH}/semel-checkpoint", b"version 1\nlog_st")
        assert state_of(open_on(after)) == expected
    assert "whole log is scanned" in caplog.text


def test_a_checkpoint_of_a_newer_layout_is_refused() -> None:
    """A downgrade does not guess what a newer version wrote."""
    from crc32c import crc32c

    disk = SimulatedDisk()
    partition = fill(disk)
    partition.close()
    body = b"version 2\nlog_start_offset 0\nrecovery_point 0\nfirst_dirty_offset 0\n"
    disk.set_content(f"{PATH}/semel-checkpoint", body + b"crc32c %08x\n" % crc32c(body))
    with pytest.raises(UnknownLayout, match="newer version"):
        open_on(disk.reboot(power_cut=True))


def rot(disk: SimulatedDisk, path: str, position: int) -> None:
    content = bytearray(disk.content(path))
    content[position] ^= 0x10
    disk.set_content(path, bytes(content))


def test_bit_rot_in_a_closed_segment_drops_nothing_behind_it(caplog: pytest.LogCaptureFixture) -> None:
    """Found by a scan, it is told with file and position; what lies before and in later segments is still served."""
    disk = SimulatedDisk()
    partition = open_on(disk)
    for number in range(20):
        put(partition, [b"%d" % number])
    partition.close()
    second = partition.segments[1]
    batch_bytes = partition.segments[0].size // second.base_offset
    after = disk.reboot(power_cut=True)
    rot(after, second.file.path, batch_bytes + 65)
    after.remove(second.stem + INDEX_SUFFIX)
    damaged = after.content(second.file.path)
    again = open_on(after)
    assert read_header(again.read(second.base_offset, bytes_max=1)).base_offset == second.base_offset
    with pytest.raises(CorruptRecords, match=rf"{second.file.path} is damaged at byte {batch_bytes}"):
        again.read(second.base_offset + 1, bytes_max=1000)
    third = partition.segments[2].base_offset
    assert read_header(again.read(third, bytes_max=1)).base_offset == third
    assert put(again, [b"next"]) == 20
    assert after.content(second.file.path) == damaged
    assert f"damaged at byte {batch_bytes}" in caplog.text
    again.delete_records(third)
    assert len(read_all(again)) == 21 - third


def test_a_broken_chain_of_batches_is_never_served_as_data() -> None:
    """A rotten length would make a reader take the middle of a record for a batch: the read is refused instead."""
    disk = SimulatedDisk()
    partition = open_on(disk, LARGE)
    for number in range(4):
        put(partition, [b"%d" % number])
    partition.roll(0)
    partition.close()
    after = disk.reboot(power_cut=True)
    rot(after, log_path(), partition.segments[0].size // 4 + 16)
    again = open_on(after, LARGE)
    with pytest.raises(DamagedLog):
        again.read(1, bytes_max=10)
    with pytest.raises(DamagedLog):
        list(again.batches())
    assert len(read_all(again, end_offset=1)) == 1


def test_bit_rot_in_the_active_segment_stops_appends_but_not_reads_before_it(caplog: pytest.LogCaptureFixture) -> None:
    """Synced records are never cut off; as the end of the log is not known, no record is put behind them."""
    disk = SimulatedDisk()
    partition = open_on(disk, LARGE)
    for number in range(4):
        put(partition, [b"%d" % number])
    partition.close()
    batch_bytes = partition.size_bytes // 4
    after = disk.reboot(power_cut=True)
    rot(after, log_path(), batch_bytes * 2 + 65)
    after.remove(f"{PATH}/{0:020d}{INDEX_SUFFIX}")
    again = open_on(after, LARGE)
    assert [read.value for read in read_all(again, end_offset=2)] == [b"0", b"1"]
    with pytest.raises(CorruptRecords):
        again.read(2, bytes_max=1000)
    with pytest.raises(CorruptRecords):
        put(again, [b"next"])
    again.close()
    assert len(after.content(log_path())) == batch_bytes * 4
    assert "left as they are" in caplog.text


def test_records_that_someone_removed_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """A log that is shorter than what was synced has lost records, and the log says so."""
    disk = SimulatedDisk()
    partition = open_on(disk, LARGE)
    for number in range(4):
        put(partition, [b"%d" % number])
    partition.close()
    after = disk.reboot(power_cut=True)
    content = after.content(log_path())
    after.set_content(log_path(), content[: len(content) // 2])
    again = open_on(after, LARGE)
    assert values_of(again) == [b"0", b"1"]
    assert "someone removed them" in caplog.text


def test_producers_known_at_a_clean_close_are_known_at_the_next_start() -> None:
    """Requirement A4: a repeat of the last batch is still recognised, also after its records were deleted."""
    disk = SimulatedDisk()
    partition = open_on(disk)
    batch = make_batch([b"a"], producer_id=7, producer_epoch=3, base_sequence=0)
    header = read_header(batch)
    partition.append(batch, header, now_ms=0)
    for restart in ("crash", "close", "delete"):
        if restart == "delete":
            partition.delete_records(-1)
        if restart == "close":
            partition.close()
        disk = disk.reboot(power_cut=False)
        partition = open_on(disk)
        assert partition.append(bytearray(batch), header, now_ms=0).is_duplicate, restart


def test_idle_producers_are_forgotten_but_not_because_a_clock_jumped() -> None:
    """producer.id.expiration.ms counts on the broker's clock; after a restart with an earlier clock nobody expires."""
    disk = SimulatedDisk()
    partition = open_on(disk, LogSettings(producer_id_expiration_ms=100), now_ms=1000)
    batch = make_batch([b"a"], producer_id=7, producer_epoch=3, base_sequence=0, timestamp_ms=1000)
    partition.append(batch, read_header(batch), now_ms=1000)
    partition.close()
    again = open_on(disk.reboot(power_cut=True), LogSettings(producer_id_expiration_ms=100), now_ms=50)
    assert again.expire_producers(60) == 0
    assert again.expire_producers(1099) == 0
    assert again.expire_producers(1100) == 1


def test_the_recovery_point_moves_when_a_closed_segment_was_synced(caplog: pytest.LogCaptureFixture) -> None:
    """After a crash only what came after the last synced roll is scanned."""
    caplog.set_level(logging.INFO)
    disk = SimulatedDisk()
    partition = open_on(disk)
    for number in range(20):
        put(partition, [b"%d" % number])
    assert partition.has_unsynced_segments
    unsynced = partition.dirty_files()
    assert unsynced is not None
    unsynced.sync()
    partition.mark_synced(unsynced)
    assert not partition.has_unsynced_segments
    assert partition.checkpoint.recovery_point == partition.segments[-1].base_offset
    after = disk.reboot(power_cut=True)
    first = partition.segments[0]
    rot(after, first.file.path, 65)  # would be met if the first segment were read
    again = open_on(after)
    assert again.log_end_offset == 20
    assert again.failure is None


def test_settings_can_be_replaced_while_the_partition_is_open() -> None:
    """AlterConfigs takes effect with the next append."""
    partition = open_on(SimulatedDisk(), LogSettings())
    for number in range(5):
        put(partition, [b"%d" % number])
    assert len(partition.segments) == 1
    partition.settings = SMALL
    for number in range(5, 20):
        put(partition, [b"%d" % number])
    assert len(partition.segments) > 2
    assert read_all(partition) == [Read(number, b"%d" % number) for number in range(20)]
