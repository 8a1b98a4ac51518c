"""Random kills of the process and immediate shutdowns of Postgres, over many records: the totals stay exact.

`SEMEL_STORM_RECORDS=500000 SEMEL_STORM_KILLS=20` is the full size. The seed is printed.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest
from database_scene import Input, Place, broker, make_postgres
from session_scene import wait_until

import semel
from semel.testing.embedded import EmbeddedBroker
from semel.testing.postgres import Postgres

pytestmark = pytest.mark.chaos
__all__ = ["broker"]

WORKER = Path(__file__).parent / "run_worker.py"
RECORDS = int(os.environ.get("SEMEL_STORM_RECORDS", "20000"))
KILLS = int(os.environ.get("SEMEL_STORM_KILLS", "4"))
PATIENCE_S = 300.0
MODES = ["append", "upsert", "dedup", "newest", "statement", "newest-delete"]


class Storm:
    """One pipeline, started again and again."""

    def __init__(self, place: Place, mode: str, source: Input, server: Postgres | None, chance: random.Random) -> None:
        self.place, self.server = place, server
        self._chance = chance
        options = {"by": "table", "transaction_records_max": max(200, RECORDS // 200)}
        told = [place.kind, place.address, mode, source.bootstrap, source.topic, source.name, json.dumps(options)]
        self._command = [sys.executable, str(WORKER), *told]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def progress(self) -> int:
        """How many records the database has behind it."""
        assert self._process is not None
        assert self._process.poll() is None, f"the run has ended by itself: {self._process.returncode}"
        try:
            if not self.place.has("semel_inbox"):
                return 0
            return int(self.place.ask("SELECT coalesce(sum(next_offset), 0) FROM semel_inbox")[0][0])
        except psycopg.OperationalError:
            return 0  # the server is about to start

    def strike(self, number: int) -> None:
        """Every second time at the server, where there is one."""
        if self.server is not None and number % 2:
            self.server.stop_at_once()
            if self._chance.random() < 0.5:
                self.kill()
                self.start()
            self.server.start()
        else:
            self.kill()
            self.start()


@pytest.fixture(params=["sqlite", "postgres"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Place, Postgres | None]]:
    if request.param == "sqlite":
        yield Place("sqlite", str(tmp_path / "shop.db")), None
        return
    with Postgres(settings={"fsync": "on"}) as server:
        yield make_postgres(server), server


def values_for(mode: str) -> list[int]:
    """With deletes, every fourth record deletes an earlier number."""
    if "delete" not in mode:
        return list(range(1, RECORDS + 1))
    return [-(n // 2) if n % 4 == 0 else n for n in range(1, RECORDS + 1)]


def fill(source: Input, values: list[int]) -> None:
    with semel.Producer(bootstrap_servers=source.bootstrap) as producer:
        for begin in range(0, len(values), 50_000):
            data = [str(value).encode() for value in values[begin : begin + 50_000]]
            producer.send_table(source.topic, pa.table({"value": data}), partition=(begin // 50_000) % 2)
        producer.flush()


@pytest.mark.parametrize("mode", MODES)
def test_totals_are_exact_whatever_is_killed(
    broker: EmbeddedBroker, site: tuple[Place, Postgres | None], mode: str
) -> None:
    """F1, F3: 0 lost, 0 repeated, and the sum over all rows is what it must be."""
    place, server = site
    seed = int(os.environ.get("SEMEL_SEED", "0")) or random.randrange(2**32)
    print(f"SEMEL_SEED={seed}")
    chance = random.Random(seed)
    source, values = Input(broker.bootstrap, 1 if "delete" in mode else 2), values_for(mode)
    if "delete" in mode:
        source.write(values)
    else:
        fill(source, values)
    if mode == "statement":
        place.do("CREATE TABLE numbers (number BIGINT PRIMARY KEY, count BIGINT NOT NULL)")
    storm = Storm(place, mode, source, server, chance)
    storm.start()
    try:
        for number, at in enumerate(sorted(chance.randrange(RECORDS) for _ in range(KILLS))):
            wait_until(lambda at=at: storm.progress() >= at, f"{at} records", PATIENCE_S)
            storm.strike(number)
        wait_until(lambda: storm.progress() == RECORDS, "the last record", PATIENCE_S)
    finally:
        storm.kill()
    assert_exact(place, mode, values)


def assert_exact(place: Place, mode: str, values: list[int]) -> None:
    expected = set(values) if "delete" not in mode else _alive(values)
    rows = place.ask("SELECT count(*), count(DISTINCT number), sum(number) FROM numbers")
    assert [tuple(int(one) for one in row) for row in rows] == [(len(expected), len(expected), sum(expected))]
    if mode == "statement":
        assert place.ask("SELECT min(count), max(count) FROM numbers") == [(1, 1)]


def _alive(values: list[int]) -> set[int]:
    alive: set[int] = set()
    for value in values:
        (alive.discard if value < 0 else alive.add)(abs(value))
    return alive


def test_a_run_under_a_reader_of_the_same_file_goes_on(broker: EmbeddedBroker, tmp_path: Path) -> None:
    """SQLite: another connection that reads all the time does not stop the writer."""
    import sqlite3

    place, source = Place("sqlite", str(tmp_path / "shop.db")), Input(broker.bootstrap)
    fill(source, list(range(1, RECORDS + 1)))
    storm = Storm(place, "append", source, None, random.Random(1))
    storm.start()
    try:
        with closing(sqlite3.connect(place.address, timeout=30)) as reader:
            wait_until(lambda: place.has("numbers"), "the table")
            wait_until(
                lambda: reader.execute("SELECT count(*) FROM numbers").fetchone() == (RECORDS,), "all rows", PATIENCE_S
            )
    finally:
        storm.kill()
