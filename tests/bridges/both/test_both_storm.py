"""Programs of one name, killed and stopped at random while an outsider compares both sides all the time."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading

import pytest
from both_processes import command, live
from both_scene import Shop
from session_scene import wait_until

from semel.testing.embedded import EmbeddedBroker

pytestmark = pytest.mark.chaos

RUNS = int(os.environ.get("SEMEL_BOTH_RUNS", "200"))
ORDERS = 40


class Outsider(threading.Thread):
    """Reads Kafka first and the database then, so that every record it has seen must have its row."""

    def __init__(self, shop: Shop) -> None:
        super().__init__(daemon=True)
        self.shop = shop
        self.stopping = threading.Event()
        self.looks = 0
        self.torn: set[int] = set()

    def run(self) -> None:
        while not self.stopping.is_set():
            events = set(self.shop.events())
            self.torn |= events - set(self.shop.rows())
            self.looks += 1


def test_programs_that_are_killed_and_stopped_at_random_leave_no_difference(
    shop: Shop, broker: EmbeddedBroker, rng: random.Random
) -> None:
    """G5: in `SEMEL_BOTH_RUNS` runs over all kinds, each ends by kill -9, or stops and wakes as a zombie."""
    outsider = Outsider(shop)
    outsider.start()
    zombies: list[subprocess.Popen[bytes]] = []
    woken: list[subprocess.Popen[bytes]] = []
    runs, placed = max(1, RUNS // 4), 0
    try:
        for run in range(runs):
            before = len(shop.rows())
            # A short timeout, so that Kafka aborts what a program left open while it was down.
            program = subprocess.Popen(
                command(shop, (run + 1) * ORDERS, first=run * ORDERS + 1, transaction_timeout_ms=1_000),
                stderr=subprocess.DEVNULL,
            )
            goal = before + rng.randint(1, ORDERS // 2)
            wait_until(lambda goal=goal, p=program: len(shop.rows()) >= goal or p.poll() is not None, "orders", 120)
            wait_s = rng.random() * 0.05
            threading.Event().wait(wait_s)  # into the middle of a block, wherever that is
            if shop.is_postgres and rng.random() < 0.3:
                os.kill(program.pid, signal.SIGSTOP)
                zombies.append(program)
                # It may hold a lock that its successor needs, as a program that hangs: the operator ends its session.
                shop.ask(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%' "
                    "AND datname = current_database()"
                )
            else:
                program.kill()
                program.wait()
            if zombies and rng.random() < 0.5:
                woken.append(zombies.pop(0))
                os.kill(woken[-1].pid, signal.SIGCONT)
        placed = runs * ORDERS
        for zombie in zombies:
            os.kill(zombie.pid, signal.SIGCONT)
        assert live(shop, placed + 1, "", first=placed + 1) == [0]
    finally:
        for zombie in zombies + woken:
            zombie.kill()
            zombie.wait()
        outsider.stopping.set()
        outsider.join(60)
    assert outsider.looks > 0
    assert outsider.torn == set()
    rows = shop.rows()
    assert len(rows) > runs
    assert sorted(shop.events()) == sorted(rows + rows)
    assert shop.leftovers() == (0, 0)
