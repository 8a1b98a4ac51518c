"""Many applications that write events of shared aggregates, with pauses, rollbacks and savepoints in between."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter

import psycopg
from psycopg import sql

AGGREGATES = 40
WRITERS = 32


class Writers:
    """Threads that write until there were so many rows. `attempted` counts rows that were rolled back too."""

    def __init__(self, address: str, topic: str, count: int, rng: random.Random) -> None:
        self._address = address
        self._topic = topic
        self._left = count
        self._lock = threading.Lock()
        self._seeds = [rng.random() for _ in range(WRITERS)]
        self._threads: list[threading.Thread] = []
        self.outcomes: Counter[str] = Counter()
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute("CREATE TABLE aggregates (id int PRIMARY KEY, number int NOT NULL)")
            connection.execute(f"INSERT INTO aggregates SELECT i, 0 FROM generate_series(1, {AGGREGATES}) i".encode())
            connection.execute("CREATE TABLE notes (text text)")

    def start(self) -> None:
        self._threads = [threading.Thread(target=self._run, args=(seed,), daemon=True) for seed in self._seeds]
        for thread in self._threads:
            thread.start()

    @property
    def are_running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(600)
            assert not thread.is_alive()

    def _run(self, seed: float) -> None:
        rng = random.Random(seed)
        while self._left > 0:
            try:
                with psycopg.connect(self._address) as connection:
                    while self._left > 0:
                        self._transaction(connection, rng)
            except psycopg.OperationalError:  # Postgres was stopped: what was not committed is rolled back
                self.outcomes["lost"] += 1
                time.sleep(0.1)

    def _transaction(self, connection: psycopg.Connection, rng: random.Random) -> None:
        if rng.random() < 0.3:  # the transaction gets its id now, and writes its events later
            connection.execute("INSERT INTO notes VALUES ('early')")
            time.sleep(rng.random() * 0.01)
        written = 0
        for aggregate in sorted(rng.sample(range(1, AGGREGATES + 1), rng.choice([1, 1, 2]))):
            written += self._events(connection, aggregate, rng.choice([1, 2, 5]), rng)
            if rng.random() < 0.3:
                try:
                    with connection.transaction():
                        kept = self._events(connection, aggregate, rng.choice([1, 3]), rng)
                        if rng.random() < 0.5:
                            raise psycopg.Rollback
                        written += kept
                    self.outcomes["savepoints"] += 1
                except psycopg.Rollback:
                    pass
        if rng.random() < 0.2:
            time.sleep(rng.random() * 0.05)
        if rng.random() < 0.15:
            connection.rollback()
            self.outcomes["rollbacks"] += 1
            return
        connection.commit()
        with self._lock:
            self._left -= written
            self.outcomes["commits"] += 1

    def _events(self, connection: psycopg.Connection, aggregate: int, count: int, rng: random.Random) -> int:
        """The row of the aggregate is locked until the end of the transaction, so its events have an order."""
        update = "UPDATE aggregates SET number = number + %s WHERE id = %s RETURNING number"
        found = connection.execute(update, (count, aggregate)).fetchone()
        assert found is not None
        if rng.random() < 0.1:
            time.sleep(rng.random() * 0.01)
        insert = sql.SQL("INSERT INTO outbox (topic, key, value) VALUES {}").format(
            sql.SQL(", ").join(
                sql.SQL("({}, {}, {})").format(self._topic, str(aggregate), str(number))
                for number in range(found[0] - count + 1, found[0] + 1)
            )
        )
        connection.execute(insert)
        return count
