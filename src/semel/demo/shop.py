"""The shop of the demo as a service: it writes orders into its database, each with its event, and needs no Kafka."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, Final

from semel.bridges.relay.table_sql import outbox_table_sql
from semel.demo.orders import INPUT, Order, make_orders
from semel.demo.tables import Tables
from semel.errors import RequestTimedOut

SHOP: Final = "shop"
_CHUNK: Final = 50
_UNDER_WAY_MAX: Final = 6_000
_PATIENCE_S: Final = 120.0
_PAUSE_S: Final = 0.2
_ORDERS: Final = "CREATE TABLE orders (number bigint PRIMARY KEY, product text NOT NULL, quantity bigint NOT NULL)"


class Shop(threading.Thread):
    """Its customers order at a steady rate, also while the database is killed. `sent` has the committed orders.

    `done` tells how many orders are through: with too many on the way they wait, or a slow machine would never finish.
    """

    def __init__(self, tables: Tables, *, seed: int, per_second: int, done: Callable[[], int]) -> None:
        super().__init__(name="demo-shop", daemon=True)
        self._tables, self._seed, self._per_second, self._done = tables, seed, per_second, done
        self._is_over = threading.Event()
        self._connection: Any = None
        self.sent: list[Order] = []
        self.history: list[tuple[float, int]] = []
        """How many were committed, and when, on the monotonic clock."""
        self.error: Exception | None = None

    def create_tables(self) -> None:
        with closing(self._tables.connect(SHOP)) as connection:
            cursor = connection.cursor()
            for statement in (_ORDERS, *filter(str.strip, outbox_table_sql(self._tables.kind).split(";"))):
                cursor.execute(statement)
            connection.commit()

    def run(self) -> None:
        try:
            self._sell()
        except Exception as error:  # told in the thread that waits for this one
            self.error = error
        finally:
            self._disconnect()

    def finish(self) -> list[Order]:
        """Stop, and return what was committed."""
        self._is_over.set()
        self.join()
        if self.error is not None:
            raise self.error
        return self.sent

    def abandon(self) -> None:
        """Stop without waiting."""
        self._is_over.set()

    def _sell(self) -> None:
        orders = make_orders(self._seed)
        next_at = time.monotonic()
        while not self._is_over.wait(max(0.0, next_at - time.monotonic())):
            next_at = max(next_at + _CHUNK / self._per_second, time.monotonic())
            if len(self.sent) - self._done() >= _UNDER_WAY_MAX:
                continue
            chunk = [next(orders) for _ in range(_CHUNK)]
            if not self._commit(chunk):
                return
            self.sent += chunk
            self.history.append((time.monotonic(), len(self.sent)))

    def _commit(self, chunk: Sequence[Order]) -> bool:
        """Orders and events in one transaction. False if the demo ended while the database was away.

        A commit whose answer was lost has happened or not: the orders themselves say which.
        """
        deadline = time.monotonic() + _PATIENCE_S
        is_uncertain = False
        while True:
            try:
                if self._connection is None:
                    self._connection = self._tables.connect(SHOP)
                if not (is_uncertain and self._has(chunk[0])):
                    is_uncertain = True
                    self._insert(chunk)
                return True
            except _lost_connections() as error:
                self._disconnect()
                if time.monotonic() > deadline:
                    raise RequestTimedOut(
                        f"The shop's database did not answer for {_PATIENCE_S:.0f} s, so nothing was shown: {error}"
                    ) from error
            if self._is_over.wait(_PAUSE_S):
                return False

    def _has(self, order: Order) -> bool:
        cursor = self._connection.cursor()
        cursor.execute(f"SELECT count(*) FROM orders WHERE number = {order.number:d}")
        (count,) = cursor.fetchone()
        self._connection.commit()
        return count > 0

    def _insert(self, chunk: Sequence[Order]) -> None:
        self._execute("orders (number, product, quantity)", [(one.number, one.product, one.quantity) for one in chunk])
        events = [(INPUT, one.key.decode(), one.value.decode()) for one in chunk]
        self._execute("outbox (topic, key, value)", events)
        self._connection.commit()

    def _execute(self, into: str, rows: Sequence[tuple[Any, ...]]) -> None:
        # One statement: psycopg's executemany logs an error of its own when the server is killed under it.
        row = f"({', '.join([self._tables.mark] * len(rows[0]))})"
        statement = f"INSERT INTO {into} VALUES {', '.join([row] * len(rows))}"
        self._connection.cursor().execute(statement, [value for values in rows for value in values])

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _lost_connections() -> tuple[type[Exception], ...]:
    """What the drivers raise when a server is gone or a file is locked. psycopg may not be installed."""
    try:
        import psycopg
    except ImportError:
        return (sqlite3.OperationalError,)
    return (sqlite3.OperationalError, psycopg.OperationalError, psycopg.InterfaceError)
