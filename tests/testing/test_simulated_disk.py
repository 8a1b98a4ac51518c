"""The simulated disk does what it says, so that the crash tests prove what they say."""

from __future__ import annotations

import errno

import pytest

from semel.testing.simulated_disk import SimulatedCrash, SimulatedDisk


def synced_file(content: bytes) -> tuple[SimulatedDisk, int]:
    disk = SimulatedDisk()
    disk.make_directory("d")
    handle = disk.open("d/f", create=True)
    disk.write(handle, [content], 0)
    disk.sync("d/f")
    disk.sync_directory("d")
    disk.sync_directory("")
    return disk, handle


def test_synced_content_survives_every_power_cut_and_unsynced_may_not() -> None:
    """All fates of an unsynced write occur: kept, lost, torn at some byte."""
    disk, handle = synced_file(b"safe")
    disk.write(handle, [b"-maybe"], 4)
    found = {disk.reboot(power_cut=True, seed=seed).content("d/f") for seed in range(100)}
    assert {b"safe", b"safe-maybe"} < found
    assert all(b"safe-maybe".startswith(content) and len(content) >= 4 for content in found)


def test_an_unsynced_write_may_survive_while_an_earlier_one_is_lost() -> None:
    """The page cache is written back in any order, which leaves holes of zeros."""
    disk, handle = synced_file(b"")
    disk.write(handle, [b"aa"], 0)
    disk.write(handle, [b"bb"], 2)
    found = {disk.reboot(power_cut=True, seed=seed).content("d/f") for seed in range(100)}
    assert {b"", b"aa", b"aabb", b"\0\0bb"} <= found


def test_names_are_lost_unless_their_directory_was_synced() -> None:
    """A renamed file may have either name after a power cut, but not both or none."""
    disk, _ = synced_file(b"x")
    disk.rename("d/f", "d/g")
    found = {tuple(disk.reboot(power_cut=True, seed=seed).paths()) for seed in range(50)}
    assert found == {("d/f",), ("d/g",)}
    disk.sync_directory("d")
    assert {tuple(disk.reboot(power_cut=True, seed=seed).paths()) for seed in range(50)} == {("d/g",)}


def test_a_killed_process_leaves_the_page_cache_and_part_of_its_last_write() -> None:
    """kill -9 loses no finished write; the one under way may be cut at any byte."""
    found: set[bytes] = set()
    for seed in range(100):
        disk = SimulatedDisk(crash_at=3, seed=seed)
        disk.make_directory("d")
        handle = disk.open("d/f", create=True)
        disk.write(handle, [b"first"], 0)
        with pytest.raises(SimulatedCrash):
            disk.write(handle, [b"sec", b"ond"], 5)
        with pytest.raises(SimulatedCrash):
            disk.sync("d/f")
        found.add(disk.reboot(power_cut=False).content("d/f"))
    assert found == {b"first" + b"second"[:size] for size in range(7)}


def test_what_a_killed_process_left_unsynced_is_still_lost_by_a_later_power_cut() -> None:
    """A kill syncs nothing."""
    disk, handle = synced_file(b"safe")
    disk.write(handle, [b"-maybe"], 4)
    after_kill = disk.reboot(power_cut=False)
    assert after_kill.content("d/f") == b"safe-maybe"
    assert b"safe" in {after_kill.reboot(power_cut=True, seed=seed).content("d/f") for seed in range(50)}


def test_a_full_disk_takes_what_fits_and_then_fails() -> None:
    """As write(2): first a short count, then ENOSPC; truncating gives the space back."""
    disk, handle = synced_file(b"")
    disk.free_bytes = 4
    assert disk.write(handle, [b"abcdef"], 0) == 4
    with pytest.raises(OSError, match="No space") as full:
        disk.write(handle, [b"ef"], 4)
    assert full.value.errno == errno.ENOSPC
    disk.truncate(handle, 1)
    assert disk.free_bytes == 3


def test_an_injected_error_hits_exactly_its_operation() -> None:
    """Failures are placed by number, and the next operation works."""
    disk, handle = synced_file(b"")
    disk.fail_at = {disk.operations: errno.EIO}
    with pytest.raises(OSError, match="Input/output"):
        disk.sync("d/f")
    disk.sync("d/f")
    assert disk.write(handle, [b"x"], 0) == 1
