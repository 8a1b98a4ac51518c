"""A shop on one cluster, `semel mirror` to another, and a consumer that moves: as docs/mirror.md says it is done."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
from busy_scene import PROGRAMS, Running, Scene

import semel

pytestmark = pytest.mark.user

SEMEL = str(Path(sys.executable).parent / "semel")


def test_a_consumer_moves_to_the_other_cluster_and_bills_each_order_once(scene: Scene, tmp_path: Path) -> None:
    """The mirror is killed twice; no order is at the target without its invoice; each order is billed once."""
    scene.create("orders")
    scene.create("invoices")
    (tmp_path / "there").mkdir()
    with semel.Broker() as there:
        other = Scene(there.bootstrap, tmp_path / "there")
        route = ["--from", scene.bootstrap, "--to", there.bootstrap, "--topics", "orders|invoices", "--name", "west"]

        def run(program: str, bootstrap: str) -> Running:
            return scene.start_command(sys.executable, str(PROGRAMS / program), bootstrap)

        def bills() -> list[str]:
            file = scene.folder / "bills.txt"
            return file.read_text().split() if file.exists() else []

        shop = run("shop_with_invoices.py", scene.bootstrap)
        mirror = scene.start_command(SEMEL, "mirror", *route)
        billing = run("bill_orders.py", scene.bootstrap)
        for _ in range(2):
            before = len(bills())
            scene.wait(lambda before=before: len(bills()) > before + 50, "bills", billing)
            mirror.stop("kill")
            mirror = scene.start_command(SEMEL, "mirror", *route)
        billing.stop("terminate")
        carried = ("mirror", *route, "--carried", "billing")
        scene.wait(lambda: scene.start_command(SEMEL, *carried).wait() == 0, "the move", mirror)
        billing = run("bill_orders.py", there.bootstrap)
        before = len(bills())
        scene.wait(lambda: len(bills()) > before + 50, "bills at the target", billing)
        shop.stop("terminate")
        orders = [record.order["order"] for record in scene.read("orders")]
        scene.wait(lambda: len(bills()) >= len(orders), "the last bill", billing)
        billing.stop("terminate")
        mirror.stop("terminate")
        assert Counter(bills()) == Counter(orders)
        copied = [[record.order["order"] for record in other.read(topic)] for topic in ("orders", "invoices")]
        assert Counter(copied[0]) == Counter(orders)
        assert Counter(copied[1]) == Counter(orders)
