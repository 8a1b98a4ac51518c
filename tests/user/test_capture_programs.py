"""A bank in Postgres, `semel capture` beside it, and a program that keeps a copy: all of them are killed."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from busy_scene import Running, Scene

from semel.testing.postgres import Postgres

pytestmark = pytest.mark.user

SEMEL = str(Path(sys.executable).parent / "semel")
SUM = "SELECT (SELECT coalesce(sum(balance), 0) FROM cash) + (SELECT coalesce(sum(balance), 0) FROM savings)"
ALL = "SELECT 'cash', id, balance FROM cash UNION ALL SELECT 'savings', id, balance FROM savings ORDER BY 1, 2"
TOTAL = 2_000


@pytest.fixture
def server() -> Iterator[Postgres]:
    with Postgres(settings={"wal_level": "logical"}) as server:
        yield server


class Bank:
    def __init__(self, server: Postgres) -> None:
        self.bank, self.copy = (server.uri.replace("/postgres?", f"/{name}?") for name in ("bank", "copy"))
        with psycopg.connect(server.uri, autocommit=True) as connection:
            connection.execute("CREATE DATABASE bank")
            connection.execute("CREATE DATABASE copy")
        for address in (self.bank, self.copy):
            with psycopg.connect(address) as connection:
                for table in ("cash", "savings"):
                    connection.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, balance int)".encode())
        with psycopg.connect(self.bank) as connection:
            connection.execute("INSERT INTO cash SELECT n, 100 FROM generate_series(1, 10) n")
            connection.execute("INSERT INTO savings SELECT n, 100 FROM generate_series(1, 10) n")

    def transfer(self, count: int, chance: random.Random) -> None:
        with psycopg.connect(self.bank) as connection:
            for _ in range(count):
                amount, payer, payee = chance.randint(1, 50), chance.randint(1, 10), chance.randint(1, 10)
                connection.execute("UPDATE cash SET balance = balance - %s WHERE id = %s", [amount, payer])
                connection.execute("UPDATE savings SET balance = balance + %s WHERE id = %s", [amount, payee])
                connection.commit()

    def ask(self, address: str, query: str) -> list[tuple[object, ...]]:
        with psycopg.connect(address) as connection:
            return connection.execute(query.encode()).fetchall()

    def total(self) -> object:
        return self.ask(self.copy, SUM)[0][0]

    @property
    def is_copied(self) -> bool:
        return self.ask(self.copy, ALL) == self.ask(self.bank, ALL)


def test_a_copy_of_a_bank_in_another_database_is_never_torn_though_everything_is_killed(
    scene: Scene, server: Postgres
) -> None:
    """The command of the page and the program of the page, killed in turn while money moves; Postgres is killed too."""
    scene.create("public.cash", "public.savings")
    bank, chance, looks = Bank(server), random.Random(6), Counter[object]()

    def capture() -> Running:
        words = ["capture", bank.bank, "--name", "bank", "--table", "cash", "--table", "savings"]
        running = scene.start_command(SEMEL, *words, "--bootstrap", scene.bootstrap)
        scene.wait(lambda: "semel capture ready" in running.said, "the capture", running)
        return running

    def follow() -> Running:
        return scene.start("follow_bank.py", bank.copy)

    capturing, following = capture(), follow()
    scene.wait(lambda: bank.is_copied, "the rows that are there", capturing, following)
    for turn in range(4):
        for _ in range(10):
            bank.transfer(5, chance)
            looks[bank.total()] += 1
        if turn != 1:
            capturing.stop("kill")
        if turn != 0:
            following.stop("kill")
        if turn == 2:
            server.stop_at_once()
            server.start()
        capturing = capture() if turn != 1 else capturing
        following = follow() if turn != 0 else following
    scene.wait(lambda: bank.is_copied, "all transfers", capturing, following)
    looks[bank.total()] += 1
    assert set(looks) <= {0, TOTAL}
    capturing.stop("terminate")
    [(kept,)] = bank.ask(
        bank.bank, "SELECT pg_current_wal_lsn() - confirmed_flush_lsn < 100000 FROM pg_replication_slots"
    )
    assert kept
