"""What a task finds and leaves behind in Spark's Python worker."""

from __future__ import annotations

import os
import pickle
import platform
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from pyspark import TaskContext

from semel.spark.blobs import Slots
from semel.spark.encode import Encode
from semel.spark.source_task import ReadTask
from semel.spark.workers import read_promptly
from semel.spark.write import Write

_TASK = """
import gc, importlib, sys
sys.path.insert(0, sys.argv[1])
import early.module
from semel.spark.workers import ease_worker

def cached():
    return [path for path in sys.path_importer_cache if path.startswith(sys.argv[1])]

assert len(cached()) == 2, cached()  # the archive, and the package in it
ease_worker()
assert cached() == []
assert gc.get_freeze_count() > 1000
importlib.invalidate_caches()
import early.later, late
frozen = gc.get_freeze_count()
ease_worker()
assert cached() == []
assert gc.get_freeze_count() <= frozen, "only the first task freezes"
"""


@pytest.mark.parametrize("name", ["pyspark.zip", "py4j-0.10.9.9-src.zip", "spark-core_2.13-4.0.0.jar"])
def test_a_worker_reads_no_archive_of_sparks_again_and_still_imports_from_it(name: str, tmp_path: Path) -> None:
    """Importers of Spark's archives are gone after a task and come back when asked for; garbage is looked for once."""
    archive = tmp_path / name
    with zipfile.ZipFile(archive, "w") as packed:
        for module in ("early/__init__.py", "early/module.py", "early/later.py", "late.py"):
            packed.writestr(module, "")
    done = subprocess.run([sys.executable, "-c", _TASK, str(archive)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importers_of_other_archives_stay(tmp_path: Path) -> None:
    """A user's own archive may change, so Spark must be able to have it read anew."""
    archive = tmp_path / "jobs-pyspark.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("job.py", "")
    code = "import sys; sys.path.insert(0, sys.argv[1]); import job; from semel.spark.workers import ease_worker\n"
    code += "ease_worker(); assert sys.argv[1] in sys.path_importer_cache"
    done = subprocess.run([sys.executable, "-c", code, str(archive)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


_BUFFERS = """
import resource, sys
from semel.spark.workers import ease_worker

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def pages_taken_for(buffers):
    before = faults()
    for _ in range(buffers):
        rows = [b"x" * 2_000_000 for _ in range(4)]
        encoded = b"".join(rows)
    return faults() - before

if sys.argv[1] == "eased":
    ease_worker()
pages_taken_for(1)
print(pages_taken_for(50))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries cannot be told")
def test_a_worker_uses_the_memory_of_rows_again() -> None:
    """800 MB of rows take the kernel's pages once, and not one after the other again and again."""
    pages = {}
    for state in ("eased", "as it was"):
        command = [sys.executable, "-c", _BUFFERS, state]
        pages[state] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert pages["eased"] < 16_000_000 / 4_096 < pages["as it was"]


@pytest.fixture
def here() -> Iterator[socket.socket]:
    """One end of a connection on this machine, as Spark's workers have one; it does not acknowledge at once."""
    if not hasattr(socket, "TCP_QUICKACK"):
        pytest.skip("only Linux knows TCP_QUICKACK")
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as there,
        server.accept()[0] as end,
    ):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
        yield end
        there.sendall(b"still open")
        assert end.recv(100) == b"still open"


def is_prompt(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK))


def test_connections_on_this_machine_acknowledge_at_once_before_each_batch(here: socket.socket, tmp_path: Path) -> None:
    """Rows of Spark's are not held back; what is no such connection is left alone, and nothing is closed."""
    first, second = socket.socketpair()
    with first, second, (tmp_path / "file").open("w") as file:
        before = set(os.listdir("/proc/self/fd"))
        seen: list[bool] = []
        for _ in read_promptly(iter(range(3))):
            seen.append(is_prompt(here))
            here.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
        assert seen == [True, True, True]
        assert before == set(os.listdir("/proc/self/fd"))
        file.write("still open")
        second.sendall(b"still open")


@pytest.mark.parametrize("kind", ["BatchReader", "StreamReader"])
def test_a_reader_of_the_source_has_what_comes_after_it_acknowledged(here: socket.socket, kind: str) -> None:
    """Spark sends it to a task, and then the range to read."""
    pytest.importorskip("pyspark.sql.streaming.datasource", reason="no source before pyspark 4.2")
    module = import_module("semel.spark.source" if kind == "BatchReader" else "semel.spark.source_stream")
    reader = pickle.dumps(getattr(module, kind)(None, ReadTask({}, ("value",))))
    assert not is_prompt(here)
    assert pickle.loads(reader)._task.columns == ("value",)
    assert is_prompt(here)


@pytest.mark.parametrize(
    "function",
    [
        Encode({"bootstrap.servers": "127.0.0.1:1"}, "out", {"out": 1}, Slots.make(1), 0, "seed"),
        Write({"bootstrap.servers": "127.0.0.1:1"}, cast(Any, None), cast(Any, None)),
    ],
    ids=["encode", "write"],
)
def test_both_stages_of_the_sink_read_promptly(
    here: socket.socket, function: Encode | Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the first rows are asked for, what was sent before them is acknowledged."""
    seen: list[bool] = []

    def batches() -> Iterator[pa.RecordBatch]:
        seen.append(is_prompt(here))
        yield from ()

    task = SimpleNamespace(partitionId=lambda: 0, attemptNumber=lambda: 0)
    monkeypatch.setattr(TaskContext, "get", lambda: task)
    monkeypatch.setattr("semel.spark.encode.ease_worker", lambda: None)
    monkeypatch.setattr("semel.spark.write.ease_worker", lambda: None)
    for _ in function(batches()):
        pass
    assert seen == [True]


def test_batches_come_as_they_are_where_nothing_is_connected() -> None:
    """And what reading them raises comes through."""

    def failing() -> Iterator[int]:
        yield 1
        raise ValueError("the task was stopped")

    batches = read_promptly(failing())
    assert next(batches) == 1
    with pytest.raises(ValueError, match="the task was stopped"):
        next(batches)
