"""A driver that writes to a database, killed by kill -9 at every named step, in every mode.

The Spark here is that of `small_stream.py`; everything from the rows on is real. After each kill the driver is started
again and killed at the next step. In the end the table must be what the input says, and no staging table may be left.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from database_modes import MODES, contents, expected, is_nameless, prepare, rows_of, sqlite_place, target_for

from semel.bridges.targets import DatabaseTarget
from semel.spark.failpoints import DATABASE_POINTS, STOP_VARIABLE, VARIABLE
from semel.testing.postgres import Postgres

ROWS = 2_000
IN_TASKS = ("before_load", "after_load")
KILLS = int(os.environ.get("SEMEL_DATABASE_KILLS", "20"))
RECORDS = int(os.environ.get("SEMEL_DATABASE_RECORDS", "500000"))


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with Postgres() as server:
        yield server


@dataclass
class Drivers:
    """Starts drivers of one query."""

    folder: Path
    target: DatabaseTarget
    place: str
    mode: str
    rows: int = ROWS
    dead_letter: str | None = None

    def start(self, batches: int, log: str = "driver.log", **environment: str) -> subprocess.Popen[bytes]:
        told = {
            "folder": str(self.folder / "checkpoint"),
            "name": "pipeline",
            "place": self.place,
            "mode": self.mode,
            "rows": self.rows,
            "batches": batches,
            "dead_letter": self.dead_letter,
        }
        driver = Path(__file__).parent / "database_driver.py"
        path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        with (self.folder / log).open("ab") as output:
            return subprocess.Popen(
                [sys.executable, str(driver), json.dumps(told)],
                env={**os.environ, "PYTHONPATH": path, **environment},
                stdout=output,
                stderr=output,
            )

    def run(self, batches: int, **environment: str) -> int:
        return self.start(batches, **environment).wait(120)

    def log(self, name: str = "driver.log") -> str:
        return (self.folder / name).read_text()[-3000:]

    def check(self, batches: int) -> None:
        """The table is what these batches make of it, and nothing is left behind."""
        self.check_rows(batches)
        assert left_over(self.target) == []

    def check_rows(self, batches: int) -> None:
        assert contents(self.target, self.mode) == expected(self.mode, batches, self.rows)


def left_over(target: DatabaseTarget) -> list[str]:
    with target.open() as database:
        names = [name for (name,) in database.execute("SELECT name FROM semel_staging").rows]
        if target.is_staged_by_tasks:
            tables = database.execute("SELECT relname FROM pg_class WHERE relname LIKE 'semel_staged_%'").rows
            names += [name for (name,) in tables]
        return names


def fresh_drivers(place: str, mode: str, folder: Path) -> Drivers:
    """On an empty database."""
    target = target_for(place, mode)
    if target.is_staged_by_tasks:
        with target.open() as database:
            database.execute("DROP SCHEMA public CASCADE")
            database.execute("CREATE SCHEMA public")
    prepare(target, mode)
    return Drivers(folder, target, place, mode)


def kill_at_each(drivers: Drivers, points: list[str]) -> int:
    """One more batch for each kill; returns how many batches there are in the end."""
    for batches, point in enumerate(points, 1):
        ended = drivers.run(batches, **{VARIABLE: f"{point}:1"})
        assert ended == -signal.SIGKILL, f"never got to {point}: {drivers.log()}"
    assert drivers.run(len(points) + 1) == 0, drivers.log()
    return len(points) + 1


@pytest.mark.parametrize(("kind", "mode"), [("Postgres", "append"), ("SQLite", "statement")])
def test_a_driver_killed_inside_and_after_its_transaction_loses_and_repeats_nothing(
    postgres: Postgres, tmp_path: Path, kind: str, mode: str
) -> None:
    """F1, F3: rows are merged and not committed, committed and not known to be; the next run finds out which."""
    drivers = fresh_drivers(postgres.uri if kind == "Postgres" else sqlite_place(tmp_path), mode, tmp_path)
    drivers.check(kill_at_each(drivers, ["after_stage", "after_merge", "after_commit"]))


@pytest.mark.chaos
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["Postgres", "SQLite"])
def test_a_driver_killed_at_any_step_in_any_mode_loses_and_repeats_nothing(
    postgres: Postgres, tmp_path: Path, kind: str, mode: str
) -> None:
    """F1, F3: every step once, each in a batch of its own."""
    drivers = fresh_drivers(postgres.uri if kind == "Postgres" else sqlite_place(tmp_path), mode, tmp_path)
    points = [point for point in DATABASE_POINTS if kind == "Postgres" or point not in IN_TASKS]
    drivers.check(kill_at_each(drivers, points))


def check_dead_letters(drivers: Drivers, points: list[str]) -> None:
    """Kill at each point, then compare rows and dead letters with the input: both are there once."""
    drivers.dead_letter = "failed"
    with drivers.target.open() as database:
        database.execute(
            "CREATE TABLE out (id BIGINT NOT NULL, key BIGINT, version BIGINT, amount BIGINT, pad TEXT, "
            "CHECK (id % 701 <> 5))"
        )
    batches = kill_at_each(drivers, points)
    offered = [(batch, row) for batch in range(batches) for row in rows_of(batch, drivers.rows)]
    bad = [(batch, row) for batch, row in offered if is_nameless(row[0]) or row[0] % 701 == 5]
    kept = [row for batch, row in offered if (batch, row) not in bad]
    assert contents(drivers.target, drivers.mode) == MODES[drivers.mode].expected(kept)
    with drivers.target.open() as database:
        found = database.execute("SELECT error, value FROM failed").rows
    letters = sorted((error.partition(": ")[0], json.loads(bytes(value))["version"]) for error, value in found)
    assert letters == sorted((f"batch {batch}", row[1]) for batch, row in bad)
    assert left_over(drivers.target) == []


@pytest.mark.chaos
@pytest.mark.parametrize("mode", ["append", "dedup"])
@pytest.mark.parametrize("kind", ["Postgres", "SQLite"])
def test_dead_letters_are_there_once_though_the_driver_is_killed_at_any_step(
    postgres: Postgres, tmp_path: Path, kind: str, mode: str
) -> None:
    """F1, F3: every step once, each in a batch of its own; bad rows are found in tasks and by the database."""
    drivers = fresh_drivers(postgres.uri if kind == "Postgres" else sqlite_place(tmp_path), mode, tmp_path)
    check_dead_letters(drivers, [point for point in DATABASE_POINTS if kind == "Postgres" or point not in IN_TASKS])


@pytest.mark.chaos
@pytest.mark.parametrize("point", ["after_load", "after_merge"])
def test_a_driver_that_wakes_after_its_successor_has_merged_writes_nothing(
    postgres: Postgres, tmp_path: Path, point: str
) -> None:
    """F1, E2: the older driver slept before its transaction, or inside of it with the ledger's row locked."""
    drivers = fresh_drivers(postgres.uri, "append", tmp_path)
    stopped = tmp_path / "stopped"
    older = drivers.start(3, "older.log", **{VARIABLE: f"{point}:2", STOP_VARIABLE: str(stopped)})
    try:
        wait_until(lambda: stopped.exists() and stopped.read_text() != "", "the older driver never got there")
        assert drivers.run(3) == 0, drivers.log()
        drivers.check_rows(3)
        os.kill(older.pid, signal.SIGCONT)
        assert older.wait(60) != 0
    finally:
        older.kill()
        older.wait()
    assert "Another run of pipeline 'pipeline' has taken over" in drivers.log("older.log")
    drivers.check_rows(3)
    assert drivers.run(4) == 0, drivers.log()
    drivers.check(4)


def wait_until(condition: object, otherwise: str) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)


@pytest.mark.chaos
@pytest.mark.parametrize("mode", ["append", "upsert", "dedup", "newest", "statement"])
def test_random_kills_and_crashes_of_the_server_lose_and_repeat_nothing(
    tmp_path: Path, rng: random.Random, mode: str
) -> None:
    """F1, F3: the driver is killed at any time, and after every fourth kill the server is stopped at once as well."""
    batches = max(40, 2 * KILLS)
    with Postgres() as server:
        drivers = fresh_drivers(server.uri, mode, tmp_path)
        drivers.rows = RECORDS // batches
        for number in range(KILLS):
            driver = drivers.start(min(batches, 2 * number + 4))
            killer = threading.Timer(rng.uniform(0.8, 3), driver.kill)
            killer.start()
            driver.wait(120)
            killer.cancel()
            assert driver.returncode in (0, -signal.SIGKILL), drivers.log()
            if number % 4 == 3:
                server.stop_at_once()
                server.start()
        assert drivers.run(batches) == 0, drivers.log()
        drivers.check(batches)
