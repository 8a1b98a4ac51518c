"""A real broker killed with SIGKILL while real clients write, copy and read: at random moments, and at named points.

CI kills 20 times; SEMEL_CHAOS_KILLS=200 is the whole.
"""

from __future__ import annotations

import os

import pytest

from semel.broker.failpoints import POINTS
from semel.verify.chaos import kill_at_points, kill_at_random

pytestmark = pytest.mark.chaos

SEED = int(os.environ["SEMEL_SEED"])
KILLS = int(os.environ.get("SEMEL_CHAOS_KILLS", "20"))


def test_nothing_acknowledged_is_lost_and_nothing_appears_twice_however_often_the_broker_is_killed() -> None:
    """Random moments, also just after a start and while it recovers; in several modes of syncing and both protocols."""
    report = kill_at_random(SEED, KILLS)
    assert report.kills >= KILLS
    assert report.transactions > KILLS


def test_a_broker_that_dies_at_any_named_point_keeps_its_promises() -> None:
    """Between every two steps of a commit, of a roll, of a compaction, of making a topic and of recovery."""
    assert kill_at_points(SEED, sorted(POINTS)).points == POINTS
