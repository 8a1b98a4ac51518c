"""The rows of a run on disk: nothing that was flushed is lost, a torn end is left out, and numbers keep their names."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
from hand_written import story

from semel.verify.checker import check
from semel.verify.history import (
    ROW,
    Act,
    Aggregate,
    History,
    HistoryWriter,
    Manifest,
    Phase,
    Process,
    make_rows,
    read_rows,
)

MANIFEST = Manifest(
    partitions=[("orders", 0), ("orders", 1), ("copies", 0)],
    processes=[Process(0, "writer-0", "writer"), Process(1, "peeker", "reader", "read_uncommitted")],
    copies=[("orders", "copies")],
    aggregates=[Aggregate("orders", "totals", "sum")],
    zero_sum_topics=["transfers"],
    keyed_topics=["orders"],
)


def test_a_row_is_48_bytes() -> None:
    """Files of a run are read by later versions: the shape is fixed."""
    assert ROW.itemsize == 48


def test_a_manifest_is_the_same_after_a_trip_to_disk(tmp_path: Path) -> None:
    """Pairs stay pairs, processes and aggregates come back as what they are."""
    MANIFEST.save(tmp_path / "manifest.json")
    assert Manifest.load(tmp_path / "manifest.json") == MANIFEST


def test_rows_come_back_in_the_order_in_which_they_were_noted(tmp_path: Path) -> None:
    """Singly and in bulk, and what is in bulk does not overtake what waits."""
    with HistoryWriter(tmp_path / "3.rows", process=3) as history:
        history.note(Act.ASSIGN, Phase.OK, time_ns=1, partition=2, offset=10)
        history.note_rows(make_rows(2, Act.READ, Phase.OK, time_ns=2, partition=2, offset=[10, 11]))
        history.note(Act.ENDS, Phase.OK, time_ns=3, partition=2, offset=12, value=12)
    [rows] = read_rows(tmp_path / "3.rows")
    assert rows["act"].tolist() == [Act.ASSIGN, Act.READ, Act.READ, Act.ENDS]
    assert rows["offset"].tolist() == [10, 10, 11, 12]
    assert rows["process"].tolist() == [3] * 4
    assert rows["writer"].tolist() == [-1] * 4


def test_a_process_that_comes_back_to_its_file_appends(tmp_path: Path) -> None:
    """Opening a file again must not throw away what is in it."""
    for time_ns in (1, 2):
        with HistoryWriter(tmp_path / "0.rows", process=0) as history:
            history.note(Act.BEGIN, Phase.OK, time_ns=time_ns)
    assert np.concatenate(list(read_rows(tmp_path / "0.rows")))["time_ns"].tolist() == [1, 2]


def test_a_torn_last_row_is_left_out(tmp_path: Path) -> None:
    """A kill may come in the middle of a write."""
    path = tmp_path / "0.rows"
    path.write_bytes(make_rows(3, Act.READ, Phase.OK, offset=[1, 2, 3]).tobytes()[:-1])
    assert [rows["offset"].tolist() for rows in read_rows(path)] == [[1, 2]]
    path.write_bytes(b"\0" * 47)
    assert list(read_rows(path)) == []


def test_rows_come_in_parts(tmp_path: Path) -> None:
    """A file may be larger than memory."""
    path = tmp_path / "0.rows"
    path.write_bytes(make_rows(7, Act.READ, Phase.OK, offset=range(7)).tobytes())
    assert [rows["offset"].tolist() for rows in read_rows(path, rows_at_once=3)] == [[0, 1, 2], [3, 4, 5], [6]]


def test_what_was_flushed_survives_a_kill(tmp_path: Path) -> None:
    """SIGKILL between the flush and the next row: the first is there, what only waited is not."""
    code = """
import os, signal, sys
from pathlib import Path
from semel.verify.history import Act, HistoryWriter, Phase
history = HistoryWriter(Path(sys.argv[1]), process=0)
history.note(Act.COMMIT, Phase.INVOKE, time_ns=1, transaction=5)
history.flush()
history.note(Act.COMMIT, Phase.OK, time_ns=2, transaction=5)
os.kill(os.getpid(), signal.SIGKILL)
"""
    process = subprocess.run([sys.executable, "-c", code, str(tmp_path / "0.rows")], check=False)
    assert process.returncode == -signal.SIGKILL
    [rows] = read_rows(tmp_path / "0.rows")
    assert rows[["phase", "transaction"]].tolist() == [(Phase.INVOKE, 5)]


def test_a_folder_is_a_history(tmp_path: Path) -> None:
    """A process that never came to write a row has no file, and that is no error; nor does it matter to the verdict."""
    told = story(
        """
        w wrote orders-0@0 a1
        r assign orders-0@0
        judge read orders-0@0 a1 by w
        w2 begin t0
        """
    )
    told.manifest.save(tmp_path / "manifest.json")
    for process, rows in zip(told.manifest.processes[:3], told.sources, strict=False):
        with HistoryWriter(tmp_path / f"{process.number}.rows", process=process.number) as history:
            history.note_rows(np.array(rows))
    assert not os.path.exists(tmp_path / "3.rows")
    history = History.in_folder(tmp_path)
    assert history.manifest == told.manifest
    assert len(history.sources) == 3
    verdict = check(history)
    assert verdict.is_clean
    assert verdict.checked["records"] == verdict.checked["visible"] == 1
    # Once more: the parts can be gone through again.
    assert sum(len(rows) for rows in history.parts()) == sum(len(rows) for rows in history.parts()) == 4
