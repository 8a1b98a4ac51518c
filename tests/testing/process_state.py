"""What tests of processes ask of the system."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def is_gone(pid: int) -> bool:
    """Whether no such process runs; one that has ended and was not collected by its new parent counts as gone."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state in "ZX"


def processes_in(folder: Path) -> set[int]:
    """The processes that run in this folder or below it."""
    found: set[int] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            where = (entry / "cwd").readlink()
        except OSError:  # it has ended, or is not ours
            continue
        if where == folder or folder in where.parents:
            found.add(int(entry.name))
    return found


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)
