"""Two drivers with one name on a Spark standalone cluster, each a process of its own with an executor of its own.

The cluster is not that of `test_spark_cluster.py`, whose session has all of its cores.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from standalone import Standalone, kill, standalone
from topic_contents import values

from semel.client.admin import Admin
from semel.spark import failpoints

pytestmark = pytest.mark.chaos

EXPECTED = sorted(b"%d" % number for number in range(2_000))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("standalone")) as started:
        yield started


@dataclass
class Twins:
    """Drivers with one name and one checkpoint, each a process."""

    master: str
    bootstrap: str
    topic: str
    folder: Path
    writers: int | None

    def start(self, log: str, **environment: str) -> subprocess.Popen[bytes]:
        told = {
            "master": self.master,
            "bootstrap": self.bootstrap,
            "topic": self.topic,
            "input": str(self.folder / "in"),
            "checkpoint": str(self.folder / "checkpoint"),
            "writers": self.writers,
        }
        driver = str(Path(__file__).parent / "twin_driver.py")
        path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        with (self.folder / log).open("wb") as output:
            return subprocess.Popen(
                [sys.executable, driver, json.dumps(told)],
                env={**os.environ, "PYTHONPATH": path, **environment},
                stdout=output,
                stderr=output,
            )

    def log(self, name: str) -> str:
        return (self.folder / name).read_text()


def stopped_process(file: Path, driver: subprocess.Popen[bytes]) -> int:
    """The process that got to its point and stopped there."""
    deadline = time.monotonic() + 120
    while not (file.exists() and file.read_text()):
        assert driver.poll() is None, "the driver ended"
        assert time.monotonic() < deadline, "the driver never got there"
        time.sleep(0.05)
    return int(file.read_text())


@pytest.mark.parametrize("writers", [None, 2], ids=["the driver writes", "tasks write"])
def test_of_two_drivers_with_one_name_the_older_stops_and_nothing_is_repeated(
    cluster: Standalone, bootstrap: str, tmp_path: Path, writers: int | None
) -> None:
    """E2: an older driver that was asleep in the midst of writing wakes up when a newer one has done all the work."""
    topic = f"out-{writers}"
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.create_topics(topic, partitions=4)
    (tmp_path / "in").mkdir()
    for number in range(4):
        table = pa.table({"id": range(number * 500, (number + 1) * 500)})
        pq.write_table(table, tmp_path / "in" / f"{number}.parquet")
    twins = Twins(cluster.url, bootstrap, topic, tmp_path, writers)
    file = tmp_path / "stopped"
    older = twins.start("older.log", **{failpoints.VARIABLE: "before_produce:30", failpoints.STOP_VARIABLE: str(file)})
    try:
        asleep = stopped_process(file, older)
        newer = twins.start("newer.log")
        assert newer.wait(120) == 0, twins.log("newer.log")[-3000:]
        assert values(bootstrap, topic) == EXPECTED
        os.kill(asleep, signal.SIGCONT)
        assert older.wait(120) != 0
    finally:
        kill(older.pid)
        older.wait()
    assert f"Another run of pipeline '{topic}' has taken over" in twins.log("older.log")
    assert values(bootstrap, topic) == EXPECTED
