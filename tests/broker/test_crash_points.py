"""A crash at every single disk operation of random scenarios: what was promised is there, and nothing else."""

from __future__ import annotations

import errno
import os

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from storage_samples import PATH, open_on, put, values_of
from storage_scenario import SETTINGS, Scenario, check

from semel.testing.simulated_disk import SimulatedCrash, SimulatedDisk

SEED = int(os.environ["SEMEL_SEED"])
STEPS = 30


def operations_of(seed: int, *, stages: bool) -> int:
    disk = SimulatedDisk()
    Scenario(disk, seed, stages=stages).run(STEPS)
    return disk.operations


@pytest.mark.parametrize("power_cut", [False, True], ids=["killed", "power cut"])
@pytest.mark.parametrize("stages", [False, True], ids=["small batches", "large batches"])
@pytest.mark.parametrize("seed", [1, 2, SEED])
def test_a_crash_at_any_operation_keeps_what_was_promised(seed: int, stages: bool, power_cut: bool) -> None:
    """kill -9 loses nothing acknowledged, a power cut nothing synced; producers and transactions agree with the log."""
    for crash_at in range(3, operations_of(seed, stages=stages)):
        disk = SimulatedDisk(crash_at=crash_at, seed=crash_at)
        scenario = Scenario(disk, seed, stages=stages)
        with pytest.raises(SimulatedCrash):
            scenario.run(STEPS)
        for chance in range(2 if power_cut else 1):
            check(disk.reboot(power_cut=power_cut, seed=crash_at * 10 + chance), scenario.promises, power_cut=power_cut)


def test_a_crash_during_recovery_does_no_harm() -> None:
    """Recovery may itself be cut at any operation and starts again."""
    disk = SimulatedDisk()
    scenario = Scenario(disk, 7)
    scenario.run(STEPS)
    for seed in range(5):
        left = disk.reboot(power_cut=True, seed=seed)
        for crash_at in range(100):
            dying = left.reboot(power_cut=False)
            dying.crash_at = crash_at
            try:
                open_on(dying, SETTINGS)
            except SimulatedCrash:
                check(dying.reboot(power_cut=True, seed=crash_at), scenario.promises, power_cut=True)
            else:
                break


@settings(deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(0, 60),
    st.sampled_from([errno.EIO, errno.ENOSPC, errno.EACCES]),
    st.booleans(),
)
@example(85, 38, errno.EIO, False)
def test_an_operation_that_fails_at_any_time_loses_nothing_acknowledged(
    seed: int, fail_at: int, code: int, stages: bool
) -> None:
    """A disk error is told to whoever asked; after a restart everything acknowledged is there."""
    disk = SimulatedDisk(fail_at={fail_at + 5: code})  # the scenario's own operations and the first segment come before
    scenario = Scenario(disk, seed, stages=stages)
    scenario.run(20)
    check(disk.reboot(power_cut=False), scenario.promises, power_cut=False)


def test_a_crash_between_roll_and_first_append_keeps_the_log_end() -> None:
    """An empty new segment after a roll does not make the log forget where it ends."""
    disk = SimulatedDisk()
    partition = open_on(disk)
    put(partition, [b"a", b"b"])
    partition.roll(0)
    again = open_on(disk.reboot(power_cut=False))
    assert put(again, [b"c"]) == 2
    assert values_of(again) == [b"a", b"b", b"c"]


def test_the_first_sync_after_a_start_covers_names_that_were_never_synced() -> None:
    """An empty segment whose name only the page cache knew would take synced records with it in a power cut."""
    disk = SimulatedDisk()
    disk.make_directory(PATH)
    disk.sync_directory("")
    disk.sync_directory("data")
    open_on(disk).close()
    partition = open_on(disk)
    put(partition, [b"a"])
    unsynced = partition.dirty_files()
    assert unsynced is not None
    unsynced.sync()
    for seed in range(20):
        assert values_of(open_on(disk.reboot(power_cut=True, seed=seed))) == [b"a"]


def test_deleted_records_do_not_come_back_because_retention_had_removed_them_first() -> None:
    """Retention does not sync; a DeleteRecords that finds nothing left to do must."""
    disk = SimulatedDisk()
    partition = open_on(disk, SETTINGS)
    for number in range(30):
        put(partition, [b"%d" % number])
    partition.flush()
    disk.sync_directory("data")
    disk.sync_directory("")
    assert partition.apply_retention(0) > 0
    start = partition.log_start_offset
    assert partition.delete_records(start) == start
    for seed in range(20):
        assert open_on(disk.reboot(power_cut=True, seed=seed), SETTINGS).log_start_offset == start
