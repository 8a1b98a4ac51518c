"""The shop of the demo: its orders, and what must become of them, said in plain Python.

Spark says the same in `pipelines.py`. Every value is compared as a whole, so an amount that is wrong by a cent counts.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

INPUT: Final = "orders"
INVOICES: Final = "invoices"
PARCELS: Final = "parcels"
REVENUE: Final = "revenue"
TOPICS: Final = (REVENUE, INVOICES, PARCELS)
"""What a pipeline writes: of each order an invoice and a parcel, and of each window the revenue of a category."""

SALES: Final = "sales"
"""The table that a pipeline fills: a row for each order."""

WINDOW_MS: Final = 10_000
LATENESS_MS: Final = 20_000
_START_MS: Final = 1_767_225_600_000
_STEP_MS: Final = 10


class Product(NamedTuple):
    """What the enrichment knows."""

    name: str
    category: str
    cents: int


class Sale(NamedTuple):
    """A row of the table, by the names of its columns."""

    order_number: int
    product: str
    category: str
    cents: int


PRODUCTS: Final = (
    Product("espresso beans", "coffee", 1490),
    Product("filter coffee", "coffee", 1190),
    Product("moka pot", "kitchen", 3250),
    Product("green tea", "tea", 890),
    Product("black tea", "tea", 790),
    Product("teapot", "kitchen", 2400),
    Product("oat biscuits", "food", 350),
    Product("dark chocolate", "food", 420),
)
_BY_NAME: Final = {product.name: product for product in PRODUCTS}


@dataclass(frozen=True, slots=True)
class Order:
    """One order; `at_ms` is the shop's own clock, which the windows go by."""

    number: int
    product: str
    quantity: int
    at_ms: int

    @property
    def key(self) -> bytes:
        return b"%d" % self.number

    @property
    def value(self) -> bytes:
        return _text(order=self.number, product=self.product, quantity=self.quantity, at_ms=self.at_ms)

    @property
    def cents(self) -> int:
        return self.quantity * _BY_NAME[self.product].cents

    @property
    def category(self) -> str:
        return _BY_NAME[self.product].category


def make_orders(seed: int) -> Iterator[Order]:
    """Orders without end, the same for the same seed.

    >>> first = next(make_orders(7))
    >>> (first.number, first.value == next(make_orders(7)).value)
    (0, True)
    """
    chance = random.Random(seed)
    number = 0
    while True:
        product = chance.choice(PRODUCTS)
        yield Order(number, product.name, chance.randint(1, 5), _START_MS + number * _STEP_MS)
        number += 1


def expected(orders: Iterable[Order]) -> dict[str, set[bytes]]:
    """What must be in each topic once, by topic: the values."""
    orders = list(orders)
    return {
        REVENUE: _revenue(orders),
        INVOICES: {
            _text(order=one.number, product=one.product, category=one.category, cents=one.cents) for one in orders
        },
        PARCELS: {_text(order=one.number, product=one.product, quantity=one.quantity) for one in orders},
    }


def expected_sales(orders: Iterable[Order]) -> set[Sale]:
    """What must be in the table once."""
    return {Sale(one.number, one.product, one.category, one.cents) for one in orders}


def _revenue(orders: list[Order]) -> set[bytes]:
    """Of the windows that are over: the watermark stays behind the newest order by the lateness."""
    counts: Counter[tuple[int, str]] = Counter()
    cents: Counter[tuple[int, str]] = Counter()
    for one in orders:
        window = one.at_ms // WINDOW_MS * WINDOW_MS, one.category
        counts[window] += 1
        cents[window] += one.cents
    watermark_ms = max((one.at_ms for one in orders), default=0) - LATENESS_MS
    return {
        _text(window=start_ms, category=category, orders=count, cents=cents[start_ms, category])
        for (start_ms, category), count in counts.items()
        if start_ms + WINDOW_MS <= watermark_ms
    }


def _text(**fields: int | str) -> bytes:
    """As Spark's `to_json` writes it."""
    return json.dumps(fields, separators=(",", ":")).encode()
