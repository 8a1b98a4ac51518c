"""`kill -9` at every named point, zombies and timeouts: an outsider finds no difference between both sides."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from both_processes import every_point, live, stopped
from both_scene import Shop
from session_scene import wait_until

from semel.testing.embedded import EmbeddedBroker


def test_both_sides_agree_though_the_program_is_killed_at_every_point(shop: Shop) -> None:
    """G5: each life dies at the next point. What was decided is sent again by a life that dies while it does so."""
    points = every_point()
    last = 3 * len(points)
    assert live(shop, last, *points, "") == [-signal.SIGKILL] * len(points) + [0]
    shop.check(list(range(1, last + 1)))


@pytest.mark.parametrize(
    "point", ["both_records_written", "both_decision_written", "both_database_committed", "both_end_sent"]
)
def test_a_zombie_that_wakes_after_its_successor_changes_nothing(shop: Shop, tmp_path: Path, point: str) -> None:
    """Stopped with SIGSTOP in its second order, and awake when the successor is through."""
    if not shop.is_postgres and point in ("both_records_written", "both_decision_written"):
        pytest.skip("it holds SQLite's write lock: no successor gets that far")
    with stopped(shop, 8, tmp_path, f"{point}:2") as zombie:
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
    assert zombie.returncode == 1, said
    assert "has taken over" in said or "has claimed the name" in said or "was lost in the commit" in said
    shop.check(expected)


@pytest.mark.parametrize("point", ["both_records_written", "both_database_committed"])
def test_a_transaction_that_kafka_aborts_by_its_timeout_is_sent_again(
    shop: Shop, broker: EmbeddedBroker, tmp_path: Path, point: str
) -> None:
    """Before the commit of the database and after it: decided is what is in the database, and one program goes on."""

    def is_aborted() -> bool:
        found = broker.broker.transactions.coordinator.get(shop.name)
        return found is not None and found.status.title == "CompleteAbort"

    with stopped(shop, 4, tmp_path, f"{point}:2", transaction_timeout_ms=1_000) as slow:
        wait_until(lambda: broker.call(is_aborted), "the timeout")
        os.kill(slow.pid, signal.SIGCONT)
        _, said = slow.communicate(timeout=60)
    assert slow.returncode == 0, said
    assert "were sent again" in said
    shop.check([1, 2, 3, 4])
