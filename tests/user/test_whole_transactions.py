"""Copies of a bank that show no transfer in part, and a shop that reads its own writes; the programs are killed."""

from __future__ import annotations

import json
import random
import sqlite3
from collections import Counter
from contextlib import closing

import pytest
from busy_scene import Scene
from confluent_kafka import Producer

from semel.client.source_transactions import TransactionEnd

pytestmark = pytest.mark.user

ACCOUNTS = [(table, number) for table in ("cash", "savings") for number in range(5)]
START = 100
SUM = "SELECT (SELECT sum(balance) FROM cash) + (SELECT sum(balance) FROM savings)"


class Bank:
    """Writes transfers in the relay's format, with another client than Semel's."""

    def __init__(self, bootstrap: str) -> None:
        self._producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": "bank"})
        self._producer.init_transactions(30)
        self._number = -1
        self.balances = dict.fromkeys(ACCOUNTS, START)

    def write(self, transfers: int, chance: random.Random) -> None:
        for _ in range(transfers):
            self._number += 1
            if self._number:
                payer, payee = chance.sample(ACCOUNTS, 2)
                amount = chance.randint(1, 50)
                self.balances[payer] -= amount
                self.balances[payee] += amount
                self._commit([payer, payee])
            else:
                self._commit(ACCOUNTS)

    def _commit(self, accounts: list[tuple[str, int]]) -> None:
        """The events in one transaction of Kafka, and the end in the next: readers see a time between them."""
        self._producer.begin_transaction()
        for index, (table, account) in enumerate(accounts):
            headers = {"semel.source": "bank", "semel.source.transaction": self._number, "semel.source.index": index}
            self._producer.produce(
                table,
                json.dumps({"id": account, "balance": self.balances[table, account]}),
                str(account),
                headers=[(name, str(value).encode()) for name, value in headers.items()],
            )
        self._producer.commit_transaction(30)
        self._producer.begin_transaction()
        end = TransactionEnd("bank", self._number, dict(Counter(table for table, _ in accounts)))
        self._producer.produce("bank.transactions", end.encode(), partition=0)
        self._producer.commit_transaction(30)


def test_a_copy_of_a_bank_never_shows_a_transfer_in_part_though_it_is_killed(scene: Scene) -> None:
    """The program of the page, killed twice while transfers come in; the total is right at every look."""
    scene.create("cash", "savings")
    scene.create("bank.transactions", partitions=1)
    bank, chance = Bank(scene.bootstrap), random.Random(5)

    def total() -> int | None:
        with closing(sqlite3.connect(scene.folder / "copy.db", timeout=60)) as reader:
            try:
                return reader.execute(SUM).fetchone()[0]
            except sqlite3.OperationalError:
                return None

    def copied() -> dict[tuple[str, int], int]:
        query = "SELECT 'cash', id, balance FROM cash UNION ALL SELECT 'savings', id, balance FROM savings"
        with closing(sqlite3.connect(scene.folder / "copy.db", timeout=60)) as reader:
            return {(table, account): balance for table, account, balance in reader.execute(query)}

    for life in range(3):
        program = scene.start("copy_accounts.py")
        for _ in range(10):
            bank.write(3, chance)
            assert total() in (None, len(ACCOUNTS) * START)
        if life < 2:
            program.stop("kill")
        else:
            scene.wait(lambda: copied() == bank.balances, "all transfers", program)
    assert total() == len(ACCOUNTS) * START


def test_every_order_is_seen_by_the_customer_who_placed_it_though_the_writer_is_killed(scene: Scene) -> None:
    """Kafka first: four customers order and look at once, while the program that writes the table is killed."""
    scene.create("orders")
    writer = scene.start("orders_table.py")
    shop = scene.start("kafka_first_shop.py", "20")

    def count() -> int:
        with closing(sqlite3.connect(scene.folder / "orders.db", timeout=60)) as reader:
            try:
                return reader.execute("SELECT count(*) FROM orders").fetchone()[0]
            except sqlite3.OperationalError:
                return 0

    for at in (10, 40):
        scene.wait(lambda at=at: count() >= at, "orders in the table", writer)
        writer.stop("kill")
        writer = scene.start("orders_table.py")
    assert shop.wait() == 0, shop.said
    assert "saw 80 of 80" in shop.said
    assert count() == 80
