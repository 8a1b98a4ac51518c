"""The data directory: one process at a time, clear errors, metadata that survives, cheap partitions."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from storage_samples import put, values_of

from semel.broker.storage.data_directory import CLEAN_SHUTDOWN_NAME, LAYOUT_NAME, DataDirectory
from semel.broker.storage.failures import DirectoryInUse, StorageError, UnknownLayout
from semel.broker.storage.log_settings import LogSettings
from semel.testing.simulated_disk import SimulatedCrash, SimulatedDisk

SETTINGS = LogSettings()

HOLDER = """
import sys
from semel.broker.storage.data_directory import DataDirectory
from semel.broker.storage.failures import StorageError
try:
    directory = DataDirectory(sys.argv[1])
except StorageError as error:
    print(type(error).__name__, error)
else:
    print("taken", flush=True)
    sys.stdin.read()
"""


def start_holder(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_a_second_process_is_refused_and_told_who_has_the_directory(tmp_path: Path) -> None:
    """Two brokers on one directory would destroy each other's records; the lock goes with the process, even killed."""
    path = tmp_path / "data"
    with start_holder(path) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "taken\n"
        with pytest.raises(DirectoryInUse, match=rf"{path} is in use by process {holder.pid},.*stop that one"):
            DataDirectory(str(path))
        holder.kill()
    DataDirectory(str(path)).close()


def test_a_directory_is_free_again_after_close(tmp_path: Path) -> None:
    """Close gives the lock back, also within one process, and closing twice does no harm."""
    first = DataDirectory(str(tmp_path))
    with pytest.raises(DirectoryInUse):
        DataDirectory(str(tmp_path))
    first.close()
    first.close()
    DataDirectory(str(tmp_path)).close()


def test_a_directory_without_the_right_to_write_is_refused_clearly(tmp_path: Path) -> None:
    """The user learns which directory it is and what to do, not a stack trace from somewhere inside."""
    if os.getuid() != 0:
        tmp_path.chmod(0o500)
        with pytest.raises(StorageError, match=rf"{tmp_path} cannot be written to.*right to write"):
            DataDirectory(str(tmp_path))
        return
    disk = SimulatedDisk()
    disk.make_directory("data")
    for code, advice in ((errno.EACCES, "right to write"), (errno.EROFS, "read-only")):
        disk.fail_at = {disk.operations: code}
        with pytest.raises(StorageError, match=rf"data cannot be written to.*{advice}"):
            DataDirectory("data", disk)


def test_a_file_in_place_of_the_directory_is_refused_clearly(tmp_path: Path) -> None:
    """A typing mistake in --data gives a clear error."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="cannot be written to"):
        DataDirectory(str(tmp_path / "file"))


def test_a_newer_layout_is_refused_and_left_alone(tmp_path: Path) -> None:
    """A downgrade does not touch what it does not understand."""
    DataDirectory(str(tmp_path)).close()
    (tmp_path / LAYOUT_NAME).write_text("2\n")
    with pytest.raises(UnknownLayout, match="newer version of Semel"):
        DataDirectory(str(tmp_path))
    (tmp_path / LAYOUT_NAME).write_text("something else")
    with pytest.raises(StorageError, match="may not be a broker's"):
        DataDirectory(str(tmp_path))
    (tmp_path / LAYOUT_NAME).write_text("1\n")
    DataDirectory(str(tmp_path)).close()


def test_the_clean_shutdown_marker_is_there_only_between_brokers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A start after a crash knows that it is one."""
    directory = DataDirectory(str(tmp_path))
    directory.open_partition("t", 0, SETTINGS, now_ms=0).close()
    directory.close()
    assert (tmp_path / CLEAN_SHUTDOWN_NAME).exists()
    again = DataDirectory(str(tmp_path))
    assert again.was_clean
    assert not (tmp_path / CLEAN_SHUTDOWN_NAME).exists()
    again.close(clean=False)
    third = DataDirectory(str(tmp_path))
    assert not third.was_clean
    assert "was not closed by the last broker" in caplog.text
    third.close()


def test_partitions_are_listed_by_topic_and_index(tmp_path: Path) -> None:
    """Topic names may hold dashes and dots; what is no partition is not listed."""
    directory = DataDirectory(str(tmp_path))
    wanted = [("__consumer_offsets", 7), ("a-1", 0), ("a-1", 12), ("b.c_d-", 3)]
    partitions = [directory.open_partition(topic, index, SETTINGS, now_ms=0) for topic, index in wanted]
    (tmp_path / "notes").mkdir()
    assert directory.partitions() == wanted
    partitions[1].delete()
    assert directory.partitions() == [wanted[0], *wanted[2:]]
    directory.close()


def test_a_partition_whose_deletion_was_cut_short_is_gone_at_the_next_start() -> None:
    """Deleting renames first: at any crash point the partition is whole or gone."""
    for crash_at in range(100):
        disk = SimulatedDisk()
        directory = DataDirectory("data", disk)
        partition = directory.open_partition("t", 0, SETTINGS, now_ms=0)
        put(partition, [b"a"])
        partition.flush()
        disk.crash_at = disk.operations + crash_at
        try:
            partition.delete()
        except SimulatedCrash:
            after = disk.reboot(power_cut=crash_at % 2 == 0, seed=crash_at)
        else:
            break
        again = DataDirectory("data", after)
        if again.partitions():
            assert values_of(again.open_partition("t", 0, SETTINGS, now_ms=0)) == [b"a"]
        assert not [name for name, _ in after.list("data") if name.endswith("-delete")]
    else:
        pytest.fail("the deletion never finished")


def test_metadata_files_have_their_old_or_new_content_after_any_crash() -> None:
    """A torn topic list would lose every topic: writes are atomic and durable."""
    disk = SimulatedDisk()
    for crash_at in range(100):
        disk = SimulatedDisk()
        directory = DataDirectory("data", disk)
        disk.sync_directory("")
        directory.write_meta("topics", b"old")
        disk.crash_at = disk.operations + crash_at
        try:
            directory.write_meta("topics", b"new and longer")
        except SimulatedCrash:
            found = DataDirectory("data", disk.reboot(power_cut=True, seed=crash_at)).read_meta("topics")
            assert found in (b"old", b"new and longer")
        else:
            break
    else:
        pytest.fail("the write never finished")
    after = DataDirectory("data", disk.reboot(power_cut=True))
    assert after.read_meta("topics") == b"new and longer"
    assert after.read_meta("other") is None
    with pytest.raises(ValueError, match="no name"):
        after.write_meta("../escape", b"")


def test_a_broker_starts_on_a_full_disk_so_that_records_can_be_read() -> None:
    """A full disk may have killed the last broker: the next one must be able to serve and to delete."""
    disk = SimulatedDisk()
    directory = DataDirectory("data", disk)
    partition = directory.open_partition("t", 0, SETTINGS, now_ms=0)
    put(partition, [b"a"])
    after = disk.reboot(power_cut=False)
    after.free_bytes = 0
    again = DataDirectory("data", after).open_partition("t", 0, SETTINGS, now_ms=0)
    assert values_of(again) == [b"a"]
    with pytest.raises(StorageError, match="disk is full"):
        put(again, [b"b"])


def test_fifty_new_partitions_cost_milliseconds(tmp_path: Path) -> None:
    """The first consumer makes __consumer_offsets with 50 partitions while it waits."""
    directory = DataDirectory(str(tmp_path))
    started = time.process_time()
    partitions = [directory.open_partition("t", index, SETTINGS, now_ms=0) for index in range(50)]
    assert time.process_time() - started < 0.5
    for partition in partitions:
        partition.close()
        assert sorted(os.listdir(partition.path)) == [f"{0:020d}.log"]
    directory.close()


def test_damage_in_one_partition_leaves_the_others_at_work(tmp_path: Path) -> None:
    """Bit rot is one partition's problem."""
    directory = DataDirectory(str(tmp_path))
    for index in range(2):
        partition = directory.open_partition("t", index, SETTINGS, now_ms=0)
        for number in range(3):
            put(partition, [b"%d" % number])
        partition.close()
    log = tmp_path / "t-0" / f"{0:020d}.log"
    content = bytearray(log.read_bytes())
    content[65] ^= 1
    log.write_bytes(content)
    (tmp_path / "t-0" / f"{0:020d}.index").unlink()
    damaged, sound = (directory.open_partition("t", index, SETTINGS, now_ms=0) for index in range(2))
    assert damaged.failure is not None
    assert values_of(sound) == [b"0", b"1", b"2"]
    put(sound, [b"3"])
    damaged.close()
    sound.close()
    directory.close()
    assert log.read_bytes() == content


def test_a_new_data_directory_and_its_parents_survive_a_power_cut() -> None:
    """What is synced below a name that is not would be gone with it."""
    for seed in range(20):
        disk = SimulatedDisk()
        DataDirectory("deep/down/data", disk).write_meta("topics", b"orders")
        after = disk.reboot(power_cut=True, seed=seed)
        assert DataDirectory("deep/down/data", after).read_meta("topics") == b"orders"
