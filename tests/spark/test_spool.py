"""Encoded data in files: what is kept there, when it goes away, and what a full disk does."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest
from stages import Row
from topic_contents import values

from semel.client.admin import Admin
from semel.client.producer import Producer
from semel.spark import spool
from semel.spark.blobs import Slots, read_manifest, read_pieces
from semel.spark.encode import SMALL_BYTES, Encode
from semel.spark.spool import SpoolFailed, SpoolFile, SpoolReader, batch_folder, remove_leftovers

PARTITIONS = 2
HOUR_S = 3600


def encoded_rows(records: int, folder: Path | None) -> list[Row]:
    """One task's rows as the driver gets them: data only where the task had little of it."""
    settings = {"bootstrap.servers": "127.0.0.1:1", "batch.size": 10_000}
    spool_path = None if folder is None else str(folder)
    job = Encode(settings, "out", {"out": PARTITIONS}, Slots.make(1), 1_000, "seed", spool_path)
    table = pa.table({"value": [b"%07d" % number for number in range(records)]})
    rows = [Row(row) for batch in job.encode(iter(table.to_batches()), 3) for row in batch.to_pylist()]
    return [row if row["is_small"] else Row(row | {"data": None}) for row in rows]


@pytest.mark.parametrize("records", [100, 50_000], ids=["little", "much"])
def test_the_driver_writes_from_files_and_again_after_an_abort(bootstrap: str, tmp_path: Path, records: int) -> None:
    """E2: the same pieces can be stamped for one transaction after the other, and only what is committed is seen."""
    rows = encoded_rows(records, tmp_path)
    manifest, pieces = read_manifest(rows), read_pieces(rows)
    assert pieces is not None
    assert bool(list(tmp_path.iterdir())) == (manifest.bytes > SMALL_BYTES)
    topic = f"out-{records}"
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.create_topics(topic, partitions=PARTITIONS)
    with Producer(bootstrap_servers=bootstrap, transactional_id=topic) as owner:
        for is_last in (False, True):
            owner.begin()
            for piece in pieces:
                owner.send_encoded(topic, piece.partition.partition, piece.batch)
            stored = owner.flush()
            assert sum(batch.record_count for batch in stored) == manifest.records == records
            owner.commit() if is_last else owner.abort()
    assert values(bootstrap, topic) == [b"%07d" % number for number in range(records)]


def test_much_data_without_a_folder_stays_with_spark() -> None:
    """E2: on a cluster the driver takes only what is little; anything else it does not have."""
    assert read_pieces(encoded_rows(50_000, None)) is None
    assert read_pieces(encoded_rows(100, None)) is not None


def test_a_full_disk_is_told_by_name_and_before_any_transaction(tmp_path: Path) -> None:
    """E2: the error of the task reaches the driver as what it is, with the folder and what to do."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (SMALL_BYTES, limits[1])
    )  # Python ignores the signal, and the write fails
    try:
        rows = encoded_rows(50_000, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(SpoolFailed, match=r"could not be kept below .*: File too large\. No transaction was begun"):
        read_manifest(rows)


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    """E2: `spark.local.dir` may name what is not there."""
    with pytest.raises(SpoolFailed, match=r"not-there: No such file"), batch_folder(str(tmp_path / "not-there")):
        raise AssertionError("never entered")


def write_file(folder: str, name: str, data: bytes) -> Path:
    with SpoolFile(folder, name) as file:
        assert file.append(memoryview(data)) == 0
    return Path(file.path)


def files_below(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.name != "in-use")


def test_files_are_used_again_in_the_next_batch_and_its_data_is_what_counts(tmp_path: Path) -> None:
    """E2: what a file held before is written over, and what it held beyond that is never read."""
    with batch_folder(str(tmp_path)) as folder:
        first = write_file(folder, "first", b"old data, and much of it")
        file_id = first.stat().st_ino
    assert files_below(tmp_path) == ["first"]
    for name, data in (("second", b"new"), ("third", b"longer than anything before it")):
        with batch_folder(str(tmp_path)) as folder:
            path = write_file(folder, name, data)
            other = write_file(folder, f"beside {name}", data)
            assert path.stat().st_ino == file_id, "a new file was made"
            assert bytes(SpoolReader().view(str(path), 0, len(data))) == data
            assert bytes(SpoolReader().view(str(other), 0, len(data))) == data
            other.unlink()


def test_a_file_that_was_not_needed_is_kept_for_another_batch(tmp_path: Path) -> None:
    """E2: a micro-batch with little data in it takes no file."""
    with batch_folder(str(tmp_path)) as folder:
        write_file(folder, "first", b"x")
    with batch_folder(str(tmp_path)):
        pass
    assert files_below(tmp_path) == ["first"]


def test_a_late_attempt_cannot_write_into_a_file_of_the_next_batch(tmp_path: Path) -> None:
    """E2: a task that nobody waits for any more still has its file open, and writes on."""
    with batch_folder(str(tmp_path)) as folder:
        write_file(folder, "kept", b"x" * 10)
        late = SpoolFile(folder, "late")
        late.append(memoryview(b"late"))
    assert files_below(tmp_path) == ["kept"]
    with batch_folder(str(tmp_path)) as folder:
        paths = [write_file(folder, name, b"of this batch") for name in ("one", "other")]
        late.append(memoryview(b" and more"))
        with pytest.raises(SpoolFailed), late:
            late.append(memoryview(b" to the end"))
        assert [path.read_bytes() for path in paths] == [b"of this batch"] * 2


def test_two_batches_at_the_same_time_share_no_file(tmp_path: Path) -> None:
    """E2: two queries of one driver; the first one gets what is kept."""
    with batch_folder(str(tmp_path)) as folder:
        write_file(folder, "kept", b"x")
    with batch_folder(str(tmp_path)) as one, batch_folder(str(tmp_path)) as other:
        of_one, of_other = write_file(one, "a", b"one"), write_file(other, "a", b"other")
        assert (of_one.read_bytes(), of_other.read_bytes()) == (b"one", b"other")


def test_a_folder_that_was_cleaned_away_is_made_again(tmp_path: Path) -> None:
    """E2: a query that has had nothing to do for days goes on, though the system has emptied its temporary files."""
    for _ in range(2):
        with batch_folder(str(tmp_path)) as folder:
            assert write_file(folder, "a", b"data").read_bytes() == b"data"
        for left in tmp_path.iterdir():
            shutil.rmtree(left)


def test_only_so_much_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E2: a large micro-batch must not hold the disk for ever."""
    monkeypatch.setattr(spool, "_KEPT_BYTES", 100)
    for _ in range(3):
        with batch_folder(str(tmp_path)) as folder:
            for name in ("a", "b", "c"):
                write_file(folder, name, b"x" * 60)
        assert len(files_below(tmp_path)) == 1
    with batch_folder(str(tmp_path)) as folder:
        write_file(folder, "too long", b"x" * 101)
    assert files_below(tmp_path) == []


def test_what_a_killed_process_left_is_removed_and_what_is_in_use_is_not(tmp_path: Path) -> None:
    """E2: a driver that dies by kill -9 cannot clean up; the next one does, once nobody holds the lock."""
    holder = (
        "import sys, time; from semel.spark.spool import batch_folder\n"
        "with batch_folder(sys.argv[1]): print('ready', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", holder, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        (folder,) = tmp_path.iterdir()
        remove_leftovers(tmp_path)
        assert folder.exists(), "too young"
        long_ago = time.time() - HOUR_S
        os.utime(folder, (long_ago, long_ago))
        remove_leftovers(tmp_path)
        assert folder.exists(), "in use"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    os.utime(folder, (long_ago, long_ago))
    remove_leftovers(tmp_path)
    assert not folder.exists()


def old_folder(parent: Path, name: str = "semel-spool-other") -> Path:
    folder = parent / name
    folder.mkdir()
    return folder


def age(folder: Path) -> None:
    long_ago = time.time() - HOUR_S
    os.utime(folder, (long_ago, long_ago), follow_symlinks=False)


def test_a_pipe_in_place_of_the_lock_does_not_hold_up_a_driver(tmp_path: Path) -> None:
    """Anybody can put one into the folder for temporary files; opening it would wait for ever."""
    folder = old_folder(tmp_path)
    os.mkfifo(folder / "in-use")
    age(folder)
    cleaner = (
        f"from semel.spark.spool import remove_leftovers as r; from pathlib import Path; r(Path({str(tmp_path)!r}))"
    )
    subprocess.run([sys.executable, "-c", cleaner], check=True, timeout=60)
    assert folder.exists()


def test_links_are_not_followed_when_leftovers_are_removed(tmp_path: Path) -> None:
    """Neither a link as the folder nor one as the lock leads to a file elsewhere being made or removed."""
    victim, target = tmp_path / "victim", tmp_path / "made-by-a-link"
    victim.mkdir()
    (victim / "precious").write_text("kept")
    age(victim)
    (tmp_path / "semel-spool-link").symlink_to(victim)
    age(tmp_path / "semel-spool-link")
    with_link = old_folder(tmp_path)
    (with_link / "in-use").symlink_to(target)
    (with_link / "inside").symlink_to(victim)
    age(with_link)
    remove_leftovers(tmp_path)
    assert [path.name for path in victim.iterdir()] == ["precious"]
    assert not target.exists()
    (with_link / "in-use").unlink()
    age(with_link)
    remove_leftovers(tmp_path)
    assert not with_link.exists(), "an old folder without a lock is one that a process died with"
    assert (victim / "precious").exists()


def test_the_folders_of_another_user_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a driver that could remove them: whose they are is not known from their name."""
    folder = old_folder(tmp_path)
    age(folder)
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    remove_leftovers(tmp_path)
    assert folder.exists()
    assert not list(folder.iterdir()), "not even a lock is put there"
    monkeypatch.undo()
    remove_leftovers(tmp_path)
    assert not folder.exists()


def test_a_folder_that_somebody_else_has_put_in_the_place_of_ours_gets_no_data(tmp_path: Path) -> None:
    """A system that cleans up after days gives the name free, and the data is for nobody else."""
    with batch_folder(str(tmp_path)) as first:
        home = Path(first).parent
    shutil.rmtree(home)
    (home / "kept").mkdir(parents=True)
    with batch_folder(str(tmp_path)) as second:
        assert Path(second).parent != home
