"""Streams orders into the input topic at a steady rate, in a thread, whatever becomes of the broker meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from semel.client import left_open
from semel.client.producer import Producer
from semel.demo.orders import INPUT, Order, make_orders

_CHUNK: Final = 50
_UNDER_WAY_MAX: Final = 6_000
_DELIVERY_MS: Final = 120_000


class Feeder(threading.Thread):
    """The shop's customers. `sent` has the orders that the broker has acknowledged, each once: it is idempotent.

    `done` tells how many orders are through: with too many on the way they wait, or a slow machine would never finish.
    """

    def __init__(self, bootstrap: str, *, seed: int, per_second: int, done: Callable[[], int]) -> None:
        super().__init__(name="demo-feeder", daemon=True)
        self._servers, self._seed, self._per_second, self._done = bootstrap, seed, per_second, done
        self._is_over = threading.Event()
        self._producer: Producer | None = None
        self.sent: list[Order] = []
        self.history: list[tuple[float, int]] = []
        """How many were sent, and when, on the monotonic clock."""
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._feed()
        except Exception as error:  # told in the thread that waits for this one
            self.error = error

    def finish(self) -> list[Order]:
        """Stop, and return what was sent."""
        self._is_over.set()
        self.join()
        if self.error is not None:
            raise self.error
        return self.sent

    def abandon(self) -> None:
        """Stop without waiting. What is on its way is given up: the interpreter must not flush it when it exits."""
        self._is_over.set()
        if self._producer is not None:
            left_open.forget(self._producer)

    def _feed(self) -> None:
        orders = make_orders(self._seed)
        settings = {"bootstrap.servers": self._servers, "delivery.timeout.ms": _DELIVERY_MS}
        next_at = time.monotonic()
        with Producer(settings) as producer:
            self._producer = producer
            while not self._is_over.wait(max(0.0, next_at - time.monotonic())):
                next_at = max(next_at + _CHUNK / self._per_second, time.monotonic())
                if len(self.sent) - self._done() >= _UNDER_WAY_MAX:
                    continue
                chunk = [next(orders) for _ in range(_CHUNK)]
                for order in chunk:
                    producer.send(INPUT, order.value, key=order.key)
                # The shop's clock must not run ahead of what is stored by more than this, or windows would close early.
                producer.flush()
                self.sent += chunk
                self.history.append((time.monotonic(), len(self.sent)))
