"""Services that write to a database, as users write them: killed in the middle of a busy topic, counted by psycopg and
sqlite3."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest
from busy_scene import PROGRAMS, Running, Scene

import semel
from semel.testing.postgres import Postgres

pytestmark = pytest.mark.user


@pytest.fixture
def server() -> Iterator[Postgres]:
    with Postgres() as server:
        yield server


def ask(server: Postgres, query: str) -> list[tuple[object, ...]]:
    """What is there; nothing while the program has not made its table yet, or while the server is away."""
    try:
        with psycopg.connect(server.uri) as connection:
            return connection.execute(query.encode()).fetchall()
    except (psycopg.errors.UndefinedTable, psycopg.OperationalError):
        return []


def start(scene: Scene, server: Postgres, program: str, *arguments: str) -> Running:
    address = f"DATABASE_URL={server.uri}"
    return scene.start_command(
        "/usr/bin/env", address, sys.executable, str(PROGRAMS / program), scene.bootstrap, *arguments
    )


def test_orders_arrive_once_in_postgres_though_the_program_is_killed(scene: Scene, server: Postgres) -> None:
    """Rows by a function of records, with the options of the docs; unreadable orders are in their own table, once."""
    scene.create("orders")

    def found() -> list[tuple[object, ...]]:
        good = ask(server, "SELECT id, customer, amount, partition FROM orders")
        bad = ask(server, 'SELECT value, partition, "offset" FROM unreadable')
        return good + [(bytes(value), partition, offset) for value, partition, offset in bad]  # pyright: ignore

    def placed() -> list[tuple[object, ...]]:
        return [
            (record.value, record.partition, record.offset)
            if record.value.startswith(b"broken")
            else (record.order["id"], record.order["customer"], record.order["amount"], record.partition)
            for record in scene.read("orders")
        ]

    scene.through_a_restart(
        scene.write("orders", broken_every=50),
        lambda: start(scene, server, "orders_into_postgres.py"),
        stop="kill",
        found=found,
        expected=placed,
    )
    with semel.Admin({"bootstrap.servers": scene.bootstrap}) as admin:
        shown = admin.committed_offsets("orders-to-postgres")
    assert {place.partition: at.offset for place, at in shown.items()} == scene.ends("orders")


def test_totals_in_sqlite_count_every_order_once_though_some_are_sent_twice(scene: Scene) -> None:
    """`count = count + 1` by event id, with Arrow tables; kill -9 in the middle."""
    scene.create("orders")

    def totals() -> list[tuple[str, int, int]]:
        """Each customer's numbers 1..count, so that progress shows; with the amount so far."""
        if not (scene.folder / "shop.db").exists():
            return []
        with closing(sqlite3.connect(scene.folder / "shop.db", timeout=30)) as database:
            try:
                rows = database.execute("SELECT customer, orders, amount FROM totals").fetchall()
            except sqlite3.OperationalError:  # the program has not made its table yet
                return []
        return spread({customer: (orders, amount) for customer, orders, amount in rows})

    def placed() -> list[tuple[str, int, int]]:
        by_id = {record.order["id"]: record.order for record in scene.read("orders")}
        found: dict[str, tuple[int, int]] = {}
        for order in by_id.values():
            orders, amount = found.get(order["customer"], (0, 0))
            found[order["customer"]] = (orders + 1, amount + order["amount"])
        return spread(found)

    scene.through_a_restart(
        scene.write("orders", twice_every=5),
        lambda: scene.start("totals_into_sqlite.py"),
        stop="kill",
        found=totals,
        expected=placed,
    )


def spread(totals: dict[str, tuple[int, int]]) -> list[tuple[str, int, int]]:
    counted = [(customer, number, 0) for customer, (orders, _) in totals.items() for number in range(orders)]
    return counted + [(customer, -1, amount) for customer, (_, amount) in totals.items()]


def test_the_last_orders_survive_a_crash_of_the_server(scene: Scene, server: Postgres) -> None:
    """Postgres is shut down at once under the running program; the program waits, goes on, and ends when it should."""
    scene.create("orders")
    writer = scene.write("orders")
    program = start(scene, server, "last_orders_into_postgres.py", "25")
    scene.wait(lambda: len(ask(server, "SELECT id FROM last_orders")) == 7, "the first rows", program)
    server.stop_at_once()
    scene.wait(lambda: "Next try in" in program.said or "cannot be reached" in program.said, "a warning", program)
    server.start()
    writer.finish()
    assert program.wait() == 0
    assert "done with" in program.said
    last = {
        record.order["customer"]: record.order for record in sorted(scene.read("orders"), key=lambda r: r.order["id"])
    }
    expected = sorted((customer, order["id"], order["product"]) for customer, order in last.items())
    assert sorted(ask(server, "SELECT customer, id, product FROM last_orders")) == expected  # pyright: ignore


@pytest.mark.user
def test_a_spark_query_fills_a_table_and_a_topic_once_though_it_is_killed(scene: Scene, server: Postgres) -> None:
    """Two targets in one foreachBatch; orders that cannot be read have no id, and are put aside once."""
    scene.create("orders", "copied")

    def found() -> list[tuple[object, ...]]:
        good = ask(server, "SELECT id, customer, amount, partition FROM orders")
        bad = ask(server, 'SELECT topic, partition, "offset" FROM unreadable')
        return good + bad + [("copied", record.value) for record in scene.read("copied")]

    def placed() -> list[tuple[object, ...]]:
        orders = scene.read("orders")
        in_tables: list[tuple[object, ...]] = [
            ("orders", record.partition, record.offset)
            if record.value.startswith(b"broken")
            else (record.order["id"], record.order["customer"], record.order["amount"], record.partition)
            for record in orders
        ]
        return [*in_tables, *(("copied", record.value) for record in orders)]

    scene.through_a_restart(
        scene.write("orders", broken_every=50),
        lambda: start(scene, server, "orders_into_postgres_and_kafka.py"),
        stop="kill",
        found=found,
        expected=placed,
    )
    with semel.Admin({"bootstrap.servers": scene.bootstrap}) as admin:
        shown = admin.committed_offsets("orders-to-table")
    assert {place.partition: at.offset for place, at in shown.items()} == scene.ends("orders")
