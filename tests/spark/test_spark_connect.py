"""The sink through Spark Connect: it is pickled, runs beside the server, and keeps its promise there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from topic_contents import group_offsets, values

import semel

pytestmark = pytest.mark.chaos

RECORDS = 100
DRIVER = Path(__file__).parent / "connect_driver.py"


def run(bootstrap: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(DRIVER), bootstrap, str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_query_through_spark_connect_is_written_once(tmp_path: Path) -> None:
    """E1, E2: several micro-batches, every record once, offsets in the transaction, and a replay writes nothing."""
    with semel.Broker() as broker:
        with semel.Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            admin.create_topics("in", "out", partitions=2)
        with semel.Producer(bootstrap_servers=broker.bootstrap) as producer:
            for number in range(RECORDS):
                producer.send("in", b"%d" % number, partition=number % 2)
        run(broker.bootstrap, tmp_path)
        first = sorted(values(broker.bootstrap, "out"))
        assert sorted(int(value.split(b"/")[0]) for value in first) == list(range(RECORDS))
        half = RECORDS // 2
        assert group_offsets(broker.bootstrap, "through-connect", "in", 2) == {0: half, 1: half}
        commits = tmp_path / "checkpoint" / "commits"
        newest = max((int(path.name), path) for path in commits.iterdir() if path.name.isdecimal())[1]
        newest.unlink()
        (commits / f".{newest.name}.crc").unlink()
        run(broker.bootstrap, tmp_path)
        assert sorted(values(broker.bootstrap, "out")) == first
