"""Signals for a program and everything that it has started.

On Linux its processes are found by their session, and by a mark in the environment that every child inherits: a JVM
or a pool of workers that moved to a process group or session of its own is not forgotten. Elsewhere only the process
group is signalled.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

MARK: Final = "SEMEL_VERIFY_MARK"
_DEATH_S: Final = 5.0
_POLL_S: Final = 0.005


def members(leader: int, mark: str) -> list[int]:
    """The processes that live in the session of `leader` or carry the mark, without those that only wait to be reaped.

    >>> members(os.getsid(0), "no such mark") != [] or sys.platform != "linux"
    True
    """
    if sys.platform != "linux":
        return []
    wanted = f"{MARK}={mark}".encode()
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            # It may end while it is looked at, or be somebody else's.
            with suppress(OSError):
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if state in "ZX":
                    continue
                if int(session) == leader or wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def signal_tree(leader: int, mark: str, number: signal.Signals) -> None:
    """Raises ProcessLookupError if the leader is gone. After SIGKILL it returns when nobody is left."""
    os.killpg(leader, number)
    if number is not signal.SIGKILL:
        for one in members(leader, mark):
            _send(one, number)
        return
    end_tree(leader, mark)


def end_tree(leader: int, mark: str) -> None:
    """Kill what is left of a tree, also of one whose leader has ended by itself."""
    deadline = time.monotonic() + _DEATH_S
    while (alive := members(leader, mark)) and time.monotonic() < deadline:
        for one in alive:  # one of them may have started another since
            _send(one, signal.SIGKILL)
        time.sleep(_POLL_S)


def _send(process_id: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(process_id, number)
