"""The processes of a Spark driver: which there are, and `kill -9` for all of them or for its Python workers."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_WORKER: Final = "pyspark.daemon pyspark.worker"
_GONE_S: Final = 10.0
_STOPPED_S: Final = 1.0
_LOOK_S: Final = 0.005
_HAS_PROC: Final = Path("/proc/self/stat").exists()
_STILL: Final = "TtZX"
"""States of a process that starts no other: stopped, traced, a zombie, dead. "X" also where there is no /proc."""


@dataclass(frozen=True, slots=True)
class Process:
    """One that ran when it was looked for."""

    number: int
    parent: int
    command: str


def descendants(root: int) -> list[Process]:
    """All processes below `root`, parents first."""
    children: dict[int, list[Process]] = {}
    for process in _all_processes():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    layer = children.get(root, [])
    while layer:
        found += layer
        layer = [child for process in layer for child in children.get(process.number, [])]
    return found


def python_workers(driver: int) -> list[int]:
    """Those that run Spark's tasks: in local mode they are all that an executor has beside the driver's own JVM."""
    family = descendants(driver)
    daemons = {process.number for process in family if _WORKER in process.command}
    return [process.number for process in family if process.parent in daemons]


def kill_workers(driver: int) -> int:
    """Kill them all at once; returns how many there were."""
    return sum(_send(number, signal.SIGKILL) for number in python_workers(driver))


def kill_family(driver: int) -> int:
    """Kill a driver, its JVM and everything below them, and wait until none is left; returns how many there were."""
    family = _stop_family(driver)
    # Spark's daemon has left the group, hence one by one.
    count = sum(_send(number, signal.SIGKILL) for number in family)
    deadline = time.monotonic() + _GONE_S
    while any(is_alive(number) for number in family[1:]) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return count


def _stop_family(root: int) -> list[int]:
    """Stop them all (SIGSTOP), parents first, and return their numbers.

    A process that runs may start another between the look and the kill. Its parent gone, nobody could find that one
    again; it would hold the pipes of the family open. A process that is stopped starts nothing.
    """
    family: list[int] = []
    found = [root]
    while found:
        for number in found:
            _send(number, signal.SIGSTOP)
        family += found
        deadline = time.monotonic() + _STOPPED_S
        while any(_state(number) not in _STILL for number in found) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        found = [process.number for process in descendants(root) if process.number not in family]
    return family


def kill_rest(family: Iterable[Process]) -> int:
    """Kill those of a family that have outlived its head; returns how many there were.

    Their numbers may belong to others by now, so the commands must be the same too.
    """
    now = {process.number: process.command for process in _all_processes()}
    return sum(_send(one.number, signal.SIGKILL) for one in family if now.get(one.number) == one.command)


def is_alive(number: int) -> bool:
    """Whether there is such a process that is not just waiting to be buried."""
    try:
        os.kill(number, 0)
    except OSError:
        return False
    return _state(number) not in "ZX" or not _HAS_PROC


def _state(number: int) -> str:
    """Its letter in /proc; "X" if it is gone."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _send(number: int, what: signal.Signals) -> bool:
    try:
        os.kill(number, what)
    except ProcessLookupError:
        return False
    return True


def _all_processes() -> list[Process]:
    if _HAS_PROC:
        return [process for path in Path("/proc").glob("[0-9]*") if (process := _read_process(path)) is not None]
    listed = subprocess.run(["ps", "-axo", "pid=,ppid=,command="], capture_output=True, text=True, check=True).stdout
    rows = (line.split(None, 2) for line in listed.splitlines())
    return [Process(int(row[0]), int(row[1]), row[2]) for row in rows if len(row) == 3]


def _read_process(path: Path) -> Process | None:
    try:
        parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:  # it has ended meanwhile
        return None
    return Process(int(path.name), parent, command)
