"""Drivers of Spark as processes, each in a process group of its own that a kill ends as a whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from semel.spark.failpoints import GROUP_VARIABLE, VARIABLE

_STARTER = "import os, sys; os.environ[sys.argv[1]] = str(os.getpid()); os.execvp(sys.argv[2], sys.argv[2:])"


def run_driver(driver: Path, told: dict[str, Any], log: Path, *, kill_at: str | None = None) -> int:
    """Run it until all of its group dies at `kill_at`, or to its end; returns how it ended."""
    python_path = {"PYTHONPATH": os.pathsep.join([str(driver.parent), *sys.path])}
    return run_group([sys.executable, str(driver), json.dumps(told)], python_path, log, kill_at=kill_at)


def run_group(command: list[str], settings: dict[str, str], log: Path, *, kill_at: str | None = None) -> int:
    """Run any command likewise, with these variables of the environment besides."""
    environment = {**os.environ, **settings}
    environment.pop(VARIABLE, None)
    if kill_at is not None:
        environment[VARIABLE] = kill_at
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _STARTER, GROUP_VARIABLE, *command],
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        ended = process.wait(300)
        _wait_gone(process.pid, 60)
        return ended
    finally:
        if _is_there(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _wait_gone(group: int, seconds: float) -> None:
    """The JVM outlives its driver for a moment."""
    deadline = time.monotonic() + seconds
    while _is_there(group) and time.monotonic() < deadline:
        time.sleep(0.02)
