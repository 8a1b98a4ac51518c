"""The sink through Spark Connect: it is pickled, runs beside the server, and keeps its promise there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from topic_contents import group_offsets, values

import semel

pytestmark = pytest.mark.chaos

RECORDS = 100
DRIVER = Path(__file__).parent / "connect_driver.py"
SERVER = Path(__file__).parent / "connect_server.py"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server in another process, as a client is told it."""
    with (tmp_path_factory.mktemp("server") / "log").open("w+") as log:
        process = subprocess.Popen(
            [sys.executable, str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
        assert process.stdout is not None
        with process:  # which ends its input, and waits
            ready = next((line for line in process.stdout if line.startswith("ready ")), None)
            log.seek(0)
            assert ready is not None, log.read()[-3000:]
            yield f"sc://127.0.0.1:{ready.split()[1]}"


@pytest.fixture
def bootstrap() -> Iterator[str]:
    with semel.Broker() as broker:
        with semel.Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            admin.create_topics("in", "out", "jobs", partitions=2)
        yield broker.bootstrap


@dataclass(frozen=True)
class Query:
    """The query of `connect_driver.py`, to be run to its end as often as one likes."""

    server: str
    bootstrap: str
    folder: Path
    origin: str

    def start(self, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(DRIVER), self.server, self.bootstrap, str(self.folder), self.origin, *more],
            capture_output=True,
            text=True,
            timeout=300,
        )

    def run(self) -> None:
        done = self.start()
        assert done.returncode == 0, f"{done.stderr[:3000]} ... {done.stderr[-1000:]}"

    def check_replay(self, batches: int) -> None:
        """Every record is there once, and still is when the last micro-batch was run again."""
        first = values(self.bootstrap, "out")
        assert sorted(int(value.split(b"/")[0]) for value in first) == list(range(RECORDS))
        commits = self.folder / "checkpoint" / "commits"
        newest = max(int(path.name) for path in commits.iterdir() if path.name.isdecimal())
        assert newest == batches - 1
        for name in (str(newest), f".{newest}.crc"):
            (commits / name).unlink()
        self.run()
        assert (commits / str(newest)).exists()
        assert values(self.bootstrap, "out") == first


def test_a_query_through_spark_connect_is_written_once(server: str, bootstrap: str, tmp_path: Path) -> None:
    """E1, E2: several micro-batches, every record once, offsets in the transaction, and a replay writes nothing."""
    with semel.Producer(bootstrap_servers=bootstrap) as producer:
        for number in range(RECORDS):
            producer.send("in", b"%d" % number, partition=number % 2)
    query = Query(server, bootstrap, tmp_path, "topic")
    query.run()
    half = RECORDS // 2
    assert group_offsets(bootstrap, "through-connect", "in", 2) == {0: half, 1: half}
    query.check_replay(batches=3)


def test_a_query_from_files_through_spark_connect_is_written_once(server: str, bootstrap: str, tmp_path: Path) -> None:
    """E1, E2: the same without Semel's source, as it is for a pyspark that has none; and E4, a job of the same rows."""
    (tmp_path / "in").mkdir()
    for file in range(2):
        numbers = range(file * RECORDS // 2, (file + 1) * RECORDS // 2)
        rows = {"key": [b"%d" % (number % 7) for number in numbers], "value": [b"%d" % number for number in numbers]}
        pq.write_table(pa.table(rows), tmp_path / "in" / f"{file}.parquet")
    query = Query(server, bootstrap, tmp_path, "files")
    query.run()
    query.check_replay(batches=2)
    assert values(bootstrap, "jobs") == sorted(b"%d" % number for number in range(RECORDS))
    written = values(bootstrap, "out")
    mistaken = query.start(str(tmp_path / "checkpoint"))
    assert mistaken.returncode != 0
    assert "has completed batch 0 already" in mistaken.stderr, "the checkpoint of another query is refused"
    assert values(bootstrap, "out") == written
