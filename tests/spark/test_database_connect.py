"""The database sink through Spark Connect: it is pickled, runs beside the server, and keeps its promise there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from database_modes import target_at
from topic_contents import group_offsets

import semel
from semel.testing.postgres import Postgres

pytestmark = pytest.mark.chaos

RECORDS = 100
DRIVER = Path(__file__).parent / "connect_database_driver.py"
SERVER = Path(__file__).parent / "connect_server.py"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a Spark Connect server in another process."""
    with (tmp_path / "server.log").open("w+") as log:
        process = subprocess.Popen(
            [sys.executable, str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
        assert process.stdout is not None
        with process:  # which ends its input, and waits
            ready = next((line for line in process.stdout if line.startswith("ready ")), None)
            log.seek(0)
            assert ready is not None, log.read()[-3000:]
            yield f"sc://127.0.0.1:{ready.split()[1]}"


def test_streams_and_jobs_through_spark_connect_are_written_once(server: str, tmp_path: Path) -> None:
    """E1, F1, F2: several batches, dead letters, the group's offsets, a job run twice; and a replay writes nothing."""
    with Postgres() as postgres, semel.Broker() as broker:
        with semel.Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            admin.create_topics("in", partitions=2)
        with semel.Producer(bootstrap_servers=broker.bootstrap) as producer:
            for number in range(RECORDS):
                producer.send("in", b"%d" % number, partition=number % 2)
        places = {"in_postgres": postgres.uri, "by_hand": postgres.uri, "in_sqlite": str(tmp_path / "out.db")}

        def run() -> str:
            command = [sys.executable, str(DRIVER), server, broker.bootstrap, postgres.uri, str(tmp_path)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, f"{done.stderr[:3000]} ... {done.stderr[-1000:]}"
            return done.stdout

        assert "skipped [False, True]" in run()
        half = RECORDS // 2
        first = {name: ask(place, f"SELECT id, tail FROM {name} ORDER BY id") for name, place in places.items()}
        for name, found in first.items():
            assert [int(row[0]) for row in found] == [number for number in range(RECORDS) if number != 7], name
        for name in ("in_postgres", "in_sqlite"):
            assert group_offsets(broker.bootstrap, name, "in", 2) == {0: half, 1: half}
            letters = ask(places[name], 'SELECT pipeline, topic, "offset" FROM failed')
            assert letters == [(name, "in", 3)]
        assert group_offsets(broker.bootstrap, "by_hand", "in", 2) == {}
        assert ask(postgres.uri, "SELECT count(*), count(DISTINCT id) FROM job") == [(20_000, 20_000)]

        for name in places:
            forget_commit(tmp_path / name)
        assert "skipped [True, True]" in run()
        again = {name: ask(place, f"SELECT id, tail FROM {name} ORDER BY id") for name, place in places.items()}
        assert again == first
        assert ask(postgres.uri, "SELECT count(*) FROM failed") == [(1,)]


def ask(place: str, query: str) -> list[tuple[Any, ...]]:
    with target_at(place, table="any").open() as database:
        return [tuple(row) for row in database.execute(query).rows]


def forget_commit(checkpoint: Path) -> None:
    commits = checkpoint / "commits"
    newest = max(int(path.name) for path in commits.iterdir() if path.name.isdecimal())
    assert newest == 2, "there were several batches"
    for name in (str(newest), f".{newest}.crc"):
        (commits / name).unlink()
