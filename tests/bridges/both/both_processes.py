"""Programs of a shop in processes of their own, which are killed or stopped at named points."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from both_scene import Shop
from session_scene import wait_until

from semel.bridges.failpoints import BOTH_POINTS, STOP_VARIABLE, VARIABLE

WORKER = Path(__file__).parent / "both_worker.py"
RESENDING = ("both_records_resent", "both_resend_decided")


def command(shop: Shop, last: int, *points: str, first: int = 1, **settings: Any) -> list[str]:
    return [
        *(sys.executable, str(WORKER), shop.address, shop.bootstrap, shop.name, shop.topic),
        *(str(first), str(last), json.dumps(settings), *points),
    ]


def live(shop: Shop, last: int, *points: str, **settings: Any) -> list[int]:
    """Lives that end at these points; their exit statuses."""
    done = subprocess.run(
        command(shop, last, *points, **settings), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return [int(status) for status in done.stdout.split()]


def every_point() -> list[str]:
    """For one life each. To get to the points of a resend, a life dies before it whose records Kafka then aborts."""
    points: list[str] = []
    for point in BOTH_POINTS:
        if point in RESENDING:
            points += ["both_database_committed", point, point]
        elif point == "both_outcome_known":
            points += ["both_database_committed", point, "both_end_sent", point]
        else:
            points += [point if point == "both_claimed" else f"{point}:2"]
    return points


@contextmanager
def stopped(shop: Shop, last: int, folder: Path, point: str, **settings: Any) -> Iterator[subprocess.Popen[str]]:
    """A program that has stopped at this point."""
    note = folder / "stopped"
    environment = {**os.environ, VARIABLE: point, STOP_VARIABLE: str(note)}
    program = subprocess.Popen(command(shop, last, **settings), env=environment, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: note.exists() and note.read_text() != "", "the program to stop")
        yield program
    finally:
        program.kill()
        program.wait()
