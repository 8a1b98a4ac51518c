"""A capture in processes that die at named points, life after life."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import relay_worker
from capture_scene import Source

from semel.bridges.failpoints import CAPTURE_POINTS, RELAY_POINTS

NUMBERS = "CREATE TABLE accounts (id int PRIMARY KEY, key int)"
PORTION = 5
AT_THE_BEGINNING = [
    "relay_taken_over",
    "relay_events_written",
    "relay_progress_written",
    "relay_end_sent",
    "capture_slot_made",
    "capture_snapshot_part",
    "capture_snapshot_part:2",
    "relay_events_written",
    "relay_progress_written",
]
"""The first four die in the record that the name belongs to these tables; the rest in the snapshot."""


def command(source: Source, *points: str, **options: Any) -> list[str]:
    given = {**source.options, "run": "capture", "idle_ms": 0, "transaction_rows_max": PORTION, **options}
    return [sys.executable, relay_worker.__file__, source.address, json.dumps(given), *points]


def live(source: Source, *points: str, **options: Any) -> list[int]:
    """Lives that end at these points; their exit statuses."""
    done = subprocess.run(command(source, *points, **options), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return [int(status) for status in done.stdout.split()]


def insert(source: Source, first: int, last: int) -> None:
    source.do(f"INSERT INTO accounts SELECT n, n % 7 FROM generate_series({first}, {last}) n")


def ids(source: Source) -> list[int]:
    """Of all events, in the order of the source; those of each key must be in order in their partition too."""
    return [one.value["id"] for one in source.changes()]


def points_of_a_stream() -> list[str]:
    """Each in a life of its own, in its second portion."""
    return [
        point if point == "relay_taken_over" else f"{point}:2"
        for point in (*RELAY_POINTS, *CAPTURE_POINTS)
        if point not in ("relay_deleted", "capture_slot_made", "capture_snapshot_part")
    ]
