"""What a pipeline made of its orders: lost, repeated, wrong, torn. Values in, numbers out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from typing import TypeVar

from semel.demo.orders import INVOICES, PARCELS, REVENUE, Sale

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Tally:
    """Of one pipeline, over its three topics."""

    orders: int
    """Sent by the shop."""
    windows: int
    """Of a category each, that were over in the end."""
    lost: int
    """Invoices, parcels and revenues that must be there and are not."""
    repeated_documents: int
    """Invoices and parcels beyond the first of each."""
    repeated_revenues: int
    wrong: int
    """Records that nobody expects, such as a revenue with another sum."""
    torn: int
    """Orders that a reader saw half of (an invoice without a parcel, or the reverse) while the pipeline lay dead."""
    cents: int
    """What the invoices add up to, beyond what they should."""

    @property
    def repeated(self) -> int:
        return self.repeated_documents + self.repeated_revenues

    @property
    def is_exactly_once(self) -> bool:
        return not (self.lost or self.repeated or self.wrong or self.torn)


@dataclass(frozen=True, slots=True)
class TableTally:
    """Of one pipeline, over its table."""

    expected: int
    """Rows that must be there: one for each order."""
    found: int
    lost: int
    repeated: int
    """Rows beyond the first of each order."""
    wrong: int
    """Rows that nobody expects, such as another sum."""
    expected_cents: int
    found_cents: int
    """What the rows add up to."""

    @property
    def is_exactly_once(self) -> bool:
        return not (self.lost or self.repeated or self.wrong)


@dataclass(frozen=True, slots=True)
class RelayTally:
    """Of the relay: what it made of the orders in the shop's database."""

    expected: int
    lost: int
    repeated: int
    """Records beyond the first of each order."""
    wrong: int
    """Records of orders that the database does not have."""

    @property
    def is_exactly_once(self) -> bool:
        return not (self.lost or self.repeated or self.wrong)


def judge_relay(expected: Set[bytes], found: Counter[bytes]) -> RelayTally:
    """Compare the orders in the database with those in Kafka.

    >>> judge_relay({b"1", b"2"}, Counter([b"1", b"1", b"3"]))
    RelayTally(expected=2, lost=1, repeated=1, wrong=1)
    """
    return RelayTally(
        expected=len(expected),
        lost=len(expected - found.keys()),
        repeated=_repeats(expected, found),
        wrong=sum(count for order, count in found.items() if order not in expected),
    )


def judge_table(expected: Set[Sale], found: Counter[Sale]) -> TableTally:
    """Compare what must be in the table with what is in it.

    >>> tally = judge_table({Sale(1, "teapot", "kitchen", 5)}, Counter([Sale(1, "teapot", "kitchen", 5)] * 3))
    >>> (tally.repeated, tally.found_cents)
    (2, 15)
    """
    return TableTally(
        expected=len(expected),
        found=found.total(),
        lost=len(expected - found.keys()),
        repeated=_repeats(expected, found),
        wrong=sum(count for sale, count in found.items() if sale not in expected),
        expected_cents=sum(sale.cents for sale in expected),
        found_cents=sum(sale.cents * count for sale, count in found.items()),
    )


def judge(
    orders: int, expected: Mapping[str, Set[bytes]], found: Mapping[str, Counter[bytes]], torn: Collection[bytes]
) -> Tally:
    """Compare what must be in each topic with what is in it.

    >>> expected = {"revenue": set(), "invoices": {b'{"cents":5}'}, "parcels": {b"p"}}
    >>> found = {"revenue": Counter(), "invoices": Counter([b'{"cents":5}'] * 2), "parcels": Counter()}
    >>> tally = judge(1, expected, found, [])
    >>> (tally.lost, tally.repeated, tally.cents)
    (1, 1, 5)
    """
    return Tally(
        orders=orders,
        windows=len(expected[REVENUE]),
        lost=sum(len(values - found[topic].keys()) for topic, values in expected.items()),
        repeated_documents=sum(_repeats(expected[topic], found[topic]) for topic in (INVOICES, PARCELS)),
        repeated_revenues=_repeats(expected[REVENUE], found[REVENUE]),
        wrong=sum(
            count for topic, values in found.items() for value, count in values.items() if value not in expected[topic]
        ),
        torn=len(torn),
        cents=_cents(found[INVOICES]) - _cents(Counter(expected[INVOICES])),
    )


def half_orders(invoices: Collection[bytes], parcels: Collection[bytes]) -> set[bytes]:
    """The orders (their keys) that are in one topic and not in the other.

    >>> sorted(half_orders([b"1", b"2"], [b"2", b"2", b"3"]))
    [b'1', b'3']
    """
    return set(invoices) ^ set(parcels)


def _repeats(expected: Set[_Value], found: Counter[_Value]) -> int:
    return sum(count - 1 for value, count in found.items() if value in expected)


def _cents(invoices: Counter[bytes]) -> int:
    return sum(json.loads(value)["cents"] * count for value, count in invoices.items())
