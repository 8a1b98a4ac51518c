"""A web shop with an outbox table and the relay beside it: both killed, counted by confluent-kafka."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from busy_scene import PROGRAMS, Running, Scene

from semel.testing.postgres import Postgres

pytestmark = pytest.mark.user

SEMEL = str(Path(sys.executable).parent / "semel")


@pytest.fixture
def server() -> Iterator[Postgres]:
    with Postgres() as server:
        yield server


def test_every_order_of_a_shop_is_in_kafka_once_though_relay_and_shop_are_killed(
    scene: Scene, server: Postgres
) -> None:
    """The page's own command, restarted as a supervisor would; each order's versions come in their order."""
    scene.create("orders")

    def shop() -> Running:
        address = f"DATABASE_URL={server.uri}"
        return scene.start_command("/usr/bin/env", address, sys.executable, str(PROGRAMS / "shop_with_outbox.py"))

    def relay() -> Running:
        return scene.start_command(SEMEL, "relay", server.uri, "--name", "shop", "--bootstrap", scene.bootstrap)

    def placed() -> list[tuple[int, int]]:
        try:
            with psycopg.connect(server.uri) as connection:
                rows = connection.execute("SELECT id, version FROM orders").fetchall()
        except psycopg.errors.UndefinedTable:
            return []
        return [(order, version) for order, latest in rows for version in range(1, latest + 1)]

    def relayed() -> list[tuple[int, int]]:
        events = [json.loads(record.value) for record in scene.read("orders")]
        return [(event["order"], event["version"]) for event in events]

    selling = shop()
    scene.wait(lambda: len(placed()) > 50, "the shop to sell", selling)
    running = relay()
    for number in range(2):
        before = len(relayed())
        scene.wait(lambda before=before: len(relayed()) > before + 100, "orders in Kafka", running)
        running.stop("kill")
        if number == 0:
            selling.stop("kill")
            selling = shop()
        running = relay()
    selling.stop("kill")
    scene.wait(lambda: len(relayed()) >= len(placed()), "the last orders", running)
    running.stop("terminate")
    found = relayed()
    assert Counter(found) == Counter(placed())
    highest: Counter[int] = Counter()
    for order, version in found:
        assert version == highest[order] + 1
        highest[order] = version


def test_two_instances_of_a_shop_relay_their_own_orders_though_they_are_killed(scene: Scene, server: Postgres) -> None:
    """G3: no relay of its own runs. Whoever relays is killed, the other one goes on; every order is there once."""
    scene.create("orders")

    def shop() -> Running:
        addresses = [f"DATABASE_URL={server.uri}", f"BOOTSTRAP={scene.bootstrap}"]
        return scene.start_command("/usr/bin/env", *addresses, sys.executable, str(PROGRAMS / "shop_with_own_relay.py"))

    def placed() -> list[int]:
        try:
            with psycopg.connect(server.uri) as connection:
                return [order for (order,) in connection.execute("SELECT id FROM orders").fetchall()]
        except psycopg.errors.UndefinedTable:
            return []

    def relayed() -> list[int]:
        return [json.loads(record.value)["order"] for record in scene.read("orders")]

    instances = [shop()]
    scene.wait(lambda: len(relayed()) > 20, "orders in Kafka", instances[0])
    instances.append(shop())
    for _ in range(3):
        instances.pop(0).stop("kill")  # the one that relays
        before = len(relayed())
        scene.wait(lambda before=before: len(relayed()) > before + 50, "the other one to relay", instances[0])
        instances.append(shop())
    instances.pop().stop("kill")
    instances[0].stop("kill")
    ended = placed()
    last = shop()
    scene.wait(lambda: set(ended) <= set(relayed()), "what the dead had left", last)
    last.stop("kill")
    found = Counter(relayed())
    assert max(found.values()) == 1
    assert set(found) <= set(placed())
