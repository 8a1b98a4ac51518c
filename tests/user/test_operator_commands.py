"""An operator's shell script: topics, produce, inspect and tail in pipes, beside a consumer of another library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from busy_scene import PROGRAMS, Scene

pytestmark = pytest.mark.user

CONSUMER = """
import sys
from confluent_kafka import Consumer

settings = {"bootstrap.servers": sys.argv[1], "group.id": "billing", "auto.offset.reset": "earliest"}
consumer = Consumer({**settings, "enable.auto.commit": False})
consumer.subscribe(["orders"])
read = []
while len(read) < int(sys.argv[2]):
    read += consumer.consume(1, 30)
consumer.commit(message=read[-1], asynchronous=False)
consumer.close()
"""


def run(scene: Scene, count: int) -> subprocess.CompletedProcess[str]:
    orders = scene.folder / "orders.txt"
    orders.write_bytes(b"a:10\nb:20\nc:\xff\n")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["/bin/sh", PROGRAMS / "check_lag.sh", orders, sys.executable, "-c", CONSUMER, scene.bootstrap, str(count)],
        env={**os.environ, "PATH": path, "SEMEL_BOOTSTRAP": scene.bootstrap},
        cwd=scene.folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_script_sees_no_lag_after_all_was_read(scene: Scene) -> None:
    """J1: the topic ends with a marker that nobody reads, so end minus committed offset would alert forever."""
    done = run(scene, 3)

    assert done.returncode == 0, done.stderr
    assert "billing is up to date" in done.stdout
    numbers = done.stdout.splitlines()[2].split()
    assert numbers[:6] == ["billing", "Empty", "0", "1", "0", "1"], "the naive lag is 1"
    first = json.loads(done.stdout.splitlines()[-1])
    assert (first["key"], first["value"], first["status"]) == ("a", "10", "committed")
    assert done.stderr == "3 records to orders, in one transaction.\n"


def test_a_script_sees_the_records_that_are_left(scene: Scene) -> None:
    """Two of three."""
    done = run(scene, 1)

    assert (done.returncode, "billing is 2 records behind" in done.stdout) == (3, True), done.stdout + done.stderr
