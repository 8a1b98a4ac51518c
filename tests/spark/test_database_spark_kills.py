"""Spark's driver killed at every named step while its queries write to Postgres and SQLite.

Each kill ends the driver with its JVM and all workers. In the end the tables must be what the input says.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from database_modes import target_at
from driver_groups import run_driver
from kill_feed import Feed

from semel.spark.failpoints import DATABASE_POINTS
from semel.testing.postgres import Postgres

pytestmark = pytest.mark.chaos

KINDS = ("appended", "summed", "in_sqlite")
OF_POSTGRES = ("before_load", "after_load")
PAIRS = [
    (point, KINDS[(place + number) % (2 if point in OF_POSTGRES else 3)])
    for number in range(len(KINDS))
    for place, point in enumerate(DATABASE_POINTS)
]
"""Every step with every kind of query that gets to it; the first nine have every step once."""
KILLS = int(os.environ.get("SEMEL_SPARK_KILLS", str(len(DATABASE_POINTS))))


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with Postgres() as started:
        yield started


def test_a_driver_of_spark_that_dies_at_any_step_loses_and_repeats_nothing(server: Postgres, tmp_path: Path) -> None:
    """F1, F3, E3: rows are appended once, and aggregates are exact."""
    feeds = {kind: Feed(tmp_path / kind) for kind in KINDS}
    for feed in feeds.values():
        feed.add(2)

    def run(kinds: list[str], kill_at: str | None = None) -> int:
        told = {"folder": str(tmp_path), "uri": server.uri, "kinds": kinds}
        driver = Path(__file__).parent / "database_spark_driver.py"
        return run_driver(driver, told, tmp_path / "driver.log", kill_at=kill_at)

    for point, kind in PAIRS[:KILLS]:
        feeds[kind].add(1)
        started = time.monotonic()
        ended = run([kind], f"{point}:1")
        print(f"{kind} killed at {point} after {time.monotonic() - started:.1f} s", flush=True)
        assert ended == -signal.SIGKILL, f"{kind} never got to {point}: {log(tmp_path)}"
    assert run(list(KINDS)) == 0, log(tmp_path)
    for kind in ("appended", "in_sqlite"):
        place = server.uri if kind == "appended" else str(tmp_path / "out.db")
        assert rows_in(place, f"SELECT id, word FROM {kind}") == sorted((row[0], row[1]) for row in feeds[kind].left)
    counts = Counter(word for _, word, _ in feeds["summed"].left)
    totals: Counter[str] = Counter()
    for number, word, _ in feeds["summed"].left:
        totals[word] += number
    found = {word: (n, total) for word, n, total in rows_in(server.uri, "SELECT word, n, total FROM summed")}
    assert found == {word: (count, totals[word]) for word, count in counts.items()}


def rows_in(place: str, statement: str) -> list[tuple[Any, ...]]:
    with target_at(place, table="any").open() as database:
        return sorted(tuple(row) for row in database.execute(statement).rows)


def log(folder: Path) -> str:
    return (folder / "driver.log").read_text()[-3000:]
