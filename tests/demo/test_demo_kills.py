"""The plan of kills, and the processes that they reach."""

from __future__ import annotations

import itertools
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from semel.demo.kills import VICTIMS, Kill, plan_kills
from semel.demo.victims import Process, descendants, is_alive, kill_family, kill_rest, python_workers

FAMILY = """
import subprocess, sys, time
depth = int(sys.argv[1])
if depth:
    subprocess.Popen([sys.executable, "-c", sys.argv[2], str(depth - 1), sys.argv[2]], start_new_session=True)
else:
    print("all here", flush=True)
time.sleep(60)
"""

FORKS = """
import os, time
print("begins", flush=True)
for _ in range(400):
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    time.sleep(0.002)
time.sleep(60)
"""


@pytest.mark.parametrize("has_server", [True, False], ids=["postgres", "sqlite"])
def test_a_seed_brings_its_kills_again_and_each_round_has_every_victim(has_server: bool) -> None:
    """And the first driver dies while the plain sink writes, without which there might be nothing to see.

    The database is killed only where it has processes; then at a moment of its own.
    """
    victims = [victim for victim in VICTIMS if has_server or victim != "database"]
    size = len(victims)

    def plan(seed: int) -> list[Kill]:
        return list(itertools.islice(plan_kills(seed, has_server=has_server), 3 * size))

    for seed in range(20):
        kills = plan(seed)
        assert kills == plan(seed)
        for first in (0, size, 2 * size):
            assert sorted(kill.victim for kill in kills[first : first + size]) == sorted(victims)
        drivers = [kill.moment for kill in kills if kill.victim == "driver"]
        assert drivers == ["plain-writes", "transaction-open", "plain-writes"]
        databases = [kill.moment for kill in kills if kill.victim == "database"]
        assert databases == (["plain-inserts", "rows-open", "plain-inserts"] if has_server else [])
    assert len({tuple(plan(seed)) for seed in range(20)}) > 1


def test_a_whole_family_is_killed_also_where_somebody_has_left_the_group(tmp_path: Path) -> None:
    """As Spark's daemon does."""
    command = [sys.executable, "-c", FAMILY, "2", FAMILY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"all here\n"
        below = [one.number for one in descendants(process.pid)]
        assert len(below) == 2
        assert all(map(is_alive, below))
        assert python_workers(process.pid) == []
        assert kill_family(process.pid) == 3
        assert not any(map(is_alive, below))
        assert process.wait(10) == -9


def test_a_family_that_grows_while_it_is_killed_leaves_nobody(tmp_path: Path) -> None:
    """One that was started between the look and the kill would hold the pipe open: its end shows that none is left."""
    with subprocess.Popen([sys.executable, "-c", FORKS], stdout=subprocess.PIPE, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begins\n"
        while len(descendants(process.pid)) < 5:
            assert process.poll() is None
        assert kill_family(process.pid) > 5
        readable, _, _ = select.select([process.stdout], [], [], 5)
        assert readable, "somebody still holds the pipe"
        assert process.stdout.read() == b""


def test_who_outlives_the_head_of_a_family_is_killed_and_nobody_else() -> None:
    """A number that belongs to another command by now is left alone."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        (seen,) = [one for one in descendants(os.getpid()) if one.number == process.pid]
        assert kill_rest([Process(seen.number, seen.parent, "another command")]) == 0
        assert process.poll() is None
        assert kill_rest([seen]) == 1
        assert process.wait(10) == -9
        assert kill_rest([seen]) == 0
