"""A web shop with its own database and events in Kafka: killed again and again, counted by confluent-kafka."""

from __future__ import annotations

import json
import sqlite3
import time
from contextlib import closing

import pytest
from busy_scene import Running, Scene

import semel

pytestmark = pytest.mark.user


def test_every_order_of_a_shop_that_is_killed_is_in_both_or_in_neither(scene: Scene) -> None:
    """Killed with kill -9 six times, started again each time; then rows and events are the same, amounts too."""
    scene.create("orders")

    def shop() -> Running:
        return scene.start("shop_with_both.py", scene.bootstrap)

    def rows() -> dict[int, int]:
        path = scene.folder / "shop.db"
        if not path.exists():
            return {}
        with closing(sqlite3.connect(path, timeout=60)) as connection:
            try:
                return dict(connection.execute("SELECT id, amount FROM orders").fetchall())
            except sqlite3.OperationalError:  # the shop has not made its tables yet
                return {}

    running = shop()
    for kill in range(6):
        before = len(rows())
        scene.wait(lambda before=before: len(rows()) > before + 20, "orders", running)
        time.sleep(kill * 0.003)  # into another moment of a block
        running.stop("kill")
        events = [json.loads(record.value) for record in scene.read("orders")]
        assert {event["order"] for event in events} <= set(rows()), "a record whose row is not there"
        running = shop()
    before = len(rows())
    scene.wait(lambda: len(rows()) > before, "the last orders", running)
    running.stop("kill")
    with closing(sqlite3.connect(scene.folder / "shop.db")) as connection:
        semel.recover_both(connection, bootstrap_servers=scene.bootstrap)
    events = [json.loads(record.value) for record in scene.read("orders")]
    assert len(events) == len({event["order"] for event in events}), "an event is there twice"
    assert {event["order"]: event["amount"] for event in events} == rows()
