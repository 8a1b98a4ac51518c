"""`kill -9` at every named point, zombies and timeouts: an outsider finds no difference between both sides."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from both_scene import Shop
from session_scene import wait_until

from semel.bridges.failpoints import BOTH_POINTS, STOP_VARIABLE, VARIABLE
from semel.testing.embedded import EmbeddedBroker

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


def test_both_sides_agree_though_the_program_is_killed_at_every_point(shop: Shop) -> None:
    """G5: each life dies at the next point. What was decided is sent again by a life that dies while it does so."""
    points: list[str] = []
    for point in BOTH_POINTS:
        if point in RESENDING:
            points += ["both_database_committed", point, point]
        elif point == "both_outcome_known":
            points += ["both_database_committed", point, "both_end_sent", point]
        else:
            points += [point if point == "both_claimed" else f"{point}:2"]
    last = 3 * len(points)
    ended = live(shop, last, *points, "")
    assert ended == [-signal.SIGKILL] * len(points) + [0]
    shop.check(list(range(1, last + 1)))


@pytest.mark.parametrize(
    "point", ["both_records_written", "both_decision_written", "both_database_committed", "both_end_sent"]
)
def test_a_zombie_that_wakes_after_its_successor_changes_nothing(shop: Shop, tmp_path: Path, point: str) -> None:
    """Stopped with SIGSTOP in its second order, and awake when the successor is through."""
    if not shop.is_postgres and point in ("both_records_written", "both_decision_written"):
        pytest.skip("it holds SQLite's write lock: no successor gets that far")
    note = tmp_path / "stopped"
    environment = {**os.environ, VARIABLE: f"{point}:2", STOP_VARIABLE: str(note)}
    zombie = subprocess.Popen(command(shop, 8), env=environment, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: note.exists() and note.read_text() != "", "the first program to stop")
        if point == "both_decision_written":
            # It holds the row's lock, so a successor would wait, and then say why. The operator ends the session.
            shop.ask(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE state = 'idle in transaction' "
                "AND datname = current_database()"
            )
        assert live(shop, 16, "", first=11) == [0]
        # What it had decided is carried out, and what it had not is not.
        expected = [1, *([2] if point in ("both_database_committed", "both_end_sent") else []), *range(11, 17)]
        shop.check(expected)
        os.kill(zombie.pid, signal.SIGCONT)
        _, said = zombie.communicate(timeout=60)
    finally:
        zombie.kill()
        zombie.wait()
    assert zombie.returncode == 1, said
    assert "has taken over" in said or "has claimed the name" in said or "was lost in the commit" in said
    shop.check(expected)


@pytest.mark.parametrize("point", ["both_records_written", "both_database_committed"])
def test_a_transaction_that_kafka_aborts_by_its_timeout_is_sent_again(
    shop: Shop, broker: EmbeddedBroker, tmp_path: Path, point: str
) -> None:
    """Before the commit of the database and after it: decided is what is in the database, and one program goes on."""
    note = tmp_path / "stopped"
    environment = {**os.environ, VARIABLE: f"{point}:2", STOP_VARIABLE: str(note)}
    slow = subprocess.Popen(
        command(shop, 4, transaction_timeout_ms=1_000), env=environment, stderr=subprocess.PIPE, text=True
    )

    def is_aborted() -> bool:
        found = broker.broker.transactions.coordinator.get(shop.name)
        return found is not None and found.status.title == "CompleteAbort"

    try:
        wait_until(lambda: note.exists() and note.read_text() != "", "the program to stop")
        wait_until(lambda: broker.call(is_aborted), "the timeout")
        os.kill(slow.pid, signal.SIGCONT)
        _, said = slow.communicate(timeout=60)
    finally:
        slow.kill()
        slow.wait()
    assert slow.returncode == 0, said
    assert "were sent again" in said
    shop.check([1, 2, 3, 4])
