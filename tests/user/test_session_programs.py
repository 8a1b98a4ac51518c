"""Services without Spark, as users write them: restarted in the middle of a busy topic, counted by another client."""

from __future__ import annotations

import json
import sqlite3
import sys
from pathlib import Path

import pytest
from busy_scene import PROGRAMS, Scene, Stop, assert_exactly

pytestmark = pytest.mark.user

WHERE = ("topic", "partition", "offset")
"""Headers of a dead letter that say where it came from."""


def test_a_session_that_copies_is_stopped_with_sigterm_and_goes_on(scene: Scene) -> None:
    """The loop of docs/session.md, with nothing but defaults, as a container runs it."""
    scene.create("orders", "warehouse")
    scene.through_a_restart(
        scene.write("orders"),
        lambda: scene.start("session_copy.py"),
        stop="terminate",
        found=lambda: scene.values("warehouse"),
        expected=lambda: scene.values("orders"),
    )


def test_run_with_a_row_function_survives_kill_9(scene: Scene) -> None:
    """`semel.run` by row; the address comes from the environment."""
    scene.create("orders", "taxed")

    def taxed(order: dict[str, object]) -> str:
        return json.dumps(order | {"tax": round(int(str(order["amount"])) * 0.19, 2)})

    scene.through_a_restart(
        scene.write("orders"),
        lambda: scene.start_command(
            "/usr/bin/env", f"KAFKA_BOOTSTRAP_SERVERS={scene.bootstrap}", sys.executable, str(PROGRAMS / "run_rows.py")
        ),
        stop="kill",
        found=lambda: [record.value.decode() for record in scene.read("taxed")],
        expected=lambda: [taxed(record.order) for record in scene.read("orders")],
    )


def test_run_with_an_arrow_function_splits_into_two_topics(scene: Scene) -> None:
    """`semel.run` by table, two topics, Ctrl-C."""
    scene.create("orders", "large-orders", "small-orders")
    scene.through_a_restart(
        scene.write("orders"),
        lambda: scene.start("run_arrow.py"),
        stop="interrupt",
        found=lambda: [
            (topic, record.value) for topic in ("large-orders", "small-orders") for record in scene.read(topic)
        ],
        expected=lambda: [
            ("large-orders" if record.order["amount"] >= 25 else "small-orders", record.value)
            for record in scene.read("orders")
        ],
    )


def test_an_asyncio_service_is_cancelled_by_sigterm_and_goes_on(scene: Scene) -> None:
    """`async with` and `async for`; SIGTERM cancels the task, wherever it is."""
    scene.create("orders", "priced")
    scene.through_a_restart(
        scene.write("orders"),
        lambda: scene.start("asyncio_service.py"),
        stop="terminate",
        found=lambda: [(record.order["id"], record.order["price"] > 0) for record in scene.read("priced")],
        expected=lambda: [(number, True) for number in scene.ids("orders")],
    )


def test_an_inbox_counts_every_order_once_in_sqlite(scene: Scene) -> None:
    """`count = count + 1` shows every repeat. Killed with kill -9."""
    scene.create("orders")

    def counted() -> list[tuple[str, int, int]]:
        """Each customer's numbers 1..count, so that progress and completeness show; with its amount so far."""
        if not (scene.folder / "shop.db").exists():
            return []
        database = sqlite3.connect(scene.folder / "shop.db", timeout=30)
        try:
            rows = database.execute("SELECT customer, count, amount FROM counts").fetchall()
        except sqlite3.OperationalError:  # the program has not made its table yet
            rows = []
        finally:
            database.close()
        return [(customer, number, 0) for customer, count, _ in rows for number in range(count)] + [
            (customer, -1, amount) for customer, _, amount in rows
        ]

    def placed() -> list[tuple[str, int, int]]:
        counts: dict[str, int] = {}
        amounts: dict[str, int] = {}
        for record in scene.read("orders"):
            customer = record.order["customer"]
            counts[customer] = counts.get(customer, 0) + 1
            amounts[customer] = amounts.get(customer, 0) + record.order["amount"]
        return [(customer, number, 0) for customer, count in counts.items() for number in range(count)] + [
            (customer, -1, amount) for customer, amount in amounts.items()
        ]

    scene.through_a_restart(
        scene.write("orders"), lambda: scene.start("inbox_counter.py"), stop="kill", found=counted, expected=placed
    )


def test_a_transactional_producer_loop_shows_whole_bookings_only(scene: Scene) -> None:
    """`semel.Producer` in a loop, killed in the middle: ten lines of each booking, in order, each once."""
    scene.create("bookings", partitions=1)
    for _ in range(3):
        seen = len(scene.values("bookings"))
        program = scene.start("producer_loop.py")
        scene.wait(lambda seen=seen: len(scene.values("bookings")) >= seen + 2_000, "bookings", program)
        program.stop("kill")
    values = scene.values("bookings")
    assert len(values) % 10 == 0, "half a booking can be seen"
    assert values == [f"{booking}/{line}".encode() for booking in range(len(values) // 10) for line in range(10)]


def test_a_confluent_kafka_consumer_reads_what_a_session_writes(scene: Scene) -> None:
    """Two programs in a row, ours and librdkafka's with read_committed; both are restarted."""
    scene.create("orders", "warehouse")

    def bills() -> list[int]:
        file = scene.folder / "bills.txt"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    billing = scene.start("confluent_reader.py")
    writer = scene.write("orders")
    copy = scene.start("session_copy.py")
    scene.wait(lambda: len(bills()) >= 100, "bills", billing, copy)
    billing.stop("interrupt")  # it commits after each bill, so that in order nothing is billed twice
    copy.stop("terminate")
    billing, copy = scene.start("confluent_reader.py"), scene.start("session_copy.py")
    there = len(bills())
    scene.wait(lambda: len(bills()) >= there + 100, "bills after the restart", billing, copy)
    writer.finish()
    scene.finish(billing, stop="interrupt", found=bills, expected=lambda: scene.ids("orders"))
    copy.stop("interrupt")
    assert_exactly(scene.values("warehouse"), scene.values("orders"))


def test_two_instances_share_the_work_through_a_rolling_restart(scene: Scene) -> None:
    """As a deployment does it: one after the other is stopped with SIGTERM and started again, then one is killed."""
    scene.create("orders", "checked", partitions=4)
    writer = scene.write("orders")
    pods = {name: scene.start("session_instance.py", name) for name in ("pod-0", "pod-1")}

    def checked_by() -> set[str]:
        return {record.order["checked_by"] for record in scene.read("checked")[-400:]}

    scene.wait(lambda: checked_by() == {"pod-0", "pod-1"}, "both pods to work", *pods.values())
    restarts: list[tuple[Stop, str]] = [("terminate", "pod-0"), ("terminate", "pod-1"), ("kill", "pod-0")]
    for how, name in restarts:
        pods[name].stop(how)
        pods[name] = scene.start("session_instance.py", name)
        there = len(scene.ids("checked"))
        scene.wait(lambda there=there: len(scene.ids("checked")) >= there + 300, "work to go on", *pods.values())
    writer.finish()
    scene.finish(
        pods["pod-0"],
        stop="terminate",
        found=lambda: scene.ids("checked"),
        expected=lambda: scene.ids("orders"),
    )


def test_a_users_own_test_file_has_a_broker_from_the_fixture(scene: Scene, tmp_path: Path) -> None:
    """`semel_broker` in a folder that knows nothing of this repository, with confluent-kafka and a restart."""
    file = scene.folder / "test_my_pipeline.py"
    file.write_text((PROGRAMS / "test_my_pipeline.py").read_text())
    run = scene.start_command(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file))
    assert run.wait() == 0, run.said
    assert "1 passed" in run.said


def test_orders_that_cannot_be_read_go_to_the_dead_letters(scene: Scene) -> None:
    """Every tenth order is not JSON: it is set aside once, with its origin and the error; killed with kill -9."""
    scene.create("orders", "priced", "unreadable")

    def found() -> list[tuple[object, ...]]:
        letters = [
            ("unreadable", record.value, *(dict(record.headers)[f"semel.dead-letter.{name}"] for name in WHERE))
            for record in scene.read("unreadable")
            if dict(record.headers)["semel.dead-letter.error"]
        ]
        return [*letters, *(("priced", number) for number in scene.ids("priced"))]

    def expected() -> list[tuple[object, ...]]:
        return [
            ("unreadable", record.value, b"orders", str(record.partition).encode(), str(record.offset).encode())
            if record.value.startswith(b"broken")
            else ("priced", record.order["id"])
            for record in scene.read("orders")
        ]

    scene.through_a_restart(
        scene.write("orders", broken_every=10),
        lambda: scene.start("dead_letters.py"),
        stop="kill",
        found=found,
        expected=expected,
    )
