"""Encoded data in files: what is kept there, when it goes away, and what a full disk does."""

from __future__ import annotations

import os
import resource
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
from semel.spark.blobs import Slots, read_manifest, read_pieces
from semel.spark.encode import SMALL_BYTES, Encode
from semel.spark.spool import SpoolFailed, batch_folder, remove_leftovers

PARTITIONS = 2
HOUR_S = 3600


def encoded_rows(records: int, spool: Path | None) -> list[Row]:
    """One task's rows as the driver gets them: data only where the task had little of it."""
    settings = {"bootstrap.servers": "127.0.0.1:1", "batch.size": 10_000}
    spool_path = None if spool is None else str(spool)
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


def test_a_batch_leaves_nothing_behind(tmp_path: Path) -> None:
    """E2: also what attempts wrote whose output did not count."""
    with batch_folder(str(tmp_path)) as folder:
        (Path(folder) / "of-an-attempt-that-failed").write_bytes(b"x")
        (process_folder,) = tmp_path.iterdir()
    assert [path.name for path in process_folder.iterdir()] == ["in-use"]


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
