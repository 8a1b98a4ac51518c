"""Postgres, capture, Kafka, `SourceInbox` with `apply_changes`, another Postgres: the copy shows whole transactions."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter

import psycopg
from capture_scene import Source, broker, server, source
from database_scene import Place, make_postgres
from session_scene import wait_until
from source_scene import ACCOUNTS, CREATE, START, SUM, TABLES, TOTAL

from semel.testing.postgres import Postgres

__all__ = ["broker", "server", "source"]


def transfer(source: Source, count: int, seed: int) -> None:
    """Money between accounts of three tables, in two to five rows; some transactions are rolled back."""
    chance = random.Random(seed)
    places = [(table, account) for table in TABLES for account in range(ACCOUNTS)]
    with psycopg.connect(source.address) as connection:
        for _ in range(count):
            touched = sorted(chance.sample(places, chance.randint(2, 5)))
            amounts = [chance.randint(-50, 50) for _ in touched[1:]]
            for (table, account), amount in zip(touched, [-sum(amounts), *amounts], strict=True):
                statement = f"UPDATE {table} SET balance = balance + %s WHERE account = %s"
                connection.execute(statement.encode(), [amount, account])
            if chance.random() < 0.1:
                connection.rollback()
            else:
                connection.commit()


def look(target: Place, seen: Counter[int], is_over: threading.Event) -> None:
    with psycopg.connect(target.address, autocommit=True) as connection:
        while not is_over.is_set():
            [(total,)] = connection.execute(SUM.encode()).fetchall()
            seen[int(total)] += 1
            time.sleep(0.001)


def test_the_total_of_a_copy_is_constant_at_every_look(source: Source, server: Postgres) -> None:
    """G2, H1: three writers, three topics, Kafka transactions smaller than those of the source, two readers."""
    source.make(
        *CREATE,
        *(f"INSERT INTO {table} SELECT n, {START} FROM generate_series(0, {ACCOUNTS - 1}) n" for table in TABLES),
        tables=tuple(TABLES),
    )
    target = make_postgres(server)
    target.do(*CREATE)
    stop, is_over, seen = threading.Event(), threading.Event(), Counter[int]()
    capture = threading.Thread(
        target=lambda: source.capture(idle_ms=None, stop=stop, transaction_rows_max=20), daemon=True
    )
    copier = threading.Thread(target=lambda: source.copy_into(target, None, is_over=is_over))
    readers = [threading.Thread(target=look, args=[target, seen, is_over]) for _ in range(2)]
    writers = [threading.Thread(target=transfer, args=[source, 60, seed]) for seed in range(3)]
    for thread in (capture, copier, *readers):
        thread.start()
    try:
        wait_until(lambda: source.same_in(target, TABLES), "the snapshot in the copy", 120)
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        wait_until(lambda: source.same_in(target, TABLES), "the copy to be equal", 120)
    finally:
        is_over.set()
        stop.set()
        for thread in (*readers, capture, copier):
            thread.join()
    print(f"totals that were seen: {dict(seen)}")
    assert set(seen) <= {0, TOTAL}
    assert seen[TOTAL] > 10
