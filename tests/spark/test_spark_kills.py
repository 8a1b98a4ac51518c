"""Spark's driver killed at every named step, with every kind of query, on both transaction protocols.

Each kill ends the driver of one query on its way through its input; then all run to their ends. What readers of
committed records see must be what the input says: nothing lost, nothing twice, and all aggregates exact.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from kill_driver import KINDS
from kill_feed import Feed, expected
from topic_contents import values

from semel.broker.process import Broker
from semel.client.admin import Admin
from semel.spark.failpoints import GROUP_VARIABLE, POINTS, VARIABLE

pytestmark = pytest.mark.chaos

KILLS = int(os.environ.get("SEMEL_SPARK_KILLS", str(len(POINTS))))
"""Ten get to every step once, with one kind of query; forty make the whole matrix."""


def run_driver(folder: Path, bootstrap: str, kinds: Sequence[str], *, kill_at: str | None = None) -> int:
    """Run the driver in a process group of its own, all of which dies at `kill_at`; returns how its process ended."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    environment.pop(VARIABLE, None)
    told = {"folder": str(folder), "bootstrap": bootstrap, "kinds": kinds}
    with (folder / "driver.log").open("ab") as output:
        starter = (
            "import os, sys; os.environ[sys.argv[1]] = str(os.getpid()); "
            "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
        )
        if kill_at is not None:
            environment[VARIABLE] = kill_at
        driver = str(Path(__file__).parent / "kill_driver.py")
        process = subprocess.Popen(
            [sys.executable, "-c", starter, GROUP_VARIABLE, driver, json.dumps(told)],
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            return process.wait(600)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.mark.parametrize("protocol", [2, 1])
def test_a_driver_that_dies_at_any_step_loses_and_repeats_nothing(
    protocol: int, tmp_path: Path, rng: random.Random
) -> None:
    """E2, E3: whichever query is killed at whichever step, its output is in the end what its input says."""
    feeds = {kind: Feed(tmp_path / kind) for kind in KINDS}
    with Broker(config={"transaction.version": 2 if protocol == 2 else 0}) as broker:
        with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            admin.create_topics(*(f"out-{kind}" for kind in KINDS), partitions=3)
        for feed in feeds.values():
            feed.add(4)
        kinds = list(KINDS)
        first = rng.randrange(len(kinds))
        order = rng.sample(POINTS, len(POINTS))
        for number in range(KILLS):
            turn, place = divmod(number, len(order))
            point, victim = order[place], kinds[(first + turn + place) % len(kinds)]
            feeds[victim].add(2)
            print(f"{point} of {victim}")
            ended = run_driver(tmp_path, broker.bootstrap, [victim], kill_at=f"{point}:1")
            assert ended == -signal.SIGKILL, (point, victim, log_of(tmp_path))
        ended = run_driver(tmp_path, broker.bootstrap, kinds)
        assert ended == 0, log_of(tmp_path)
        for kind, feed in feeds.items():
            assert values(broker.bootstrap, f"out-{kind}") == expected(kind, feed), kind


def log_of(folder: Path) -> str:
    return (folder / "driver.log").read_text()[-3000:]
