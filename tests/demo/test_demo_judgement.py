"""What the demo counts, on outputs made by hand from real orders."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import pytest

from semel.demo.judgement import Tally, half_orders, judge, judge_table
from semel.demo.orders import INVOICES, PARCELS, REVENUE, Order, Sale, expected, expected_sales, make_orders

ORDERS = list(itertools.islice(make_orders(7), 5000))
EXPECTED = expected(ORDERS)


def written() -> dict[str, Counter[bytes]]:
    """What a faultless pipeline writes."""
    return {topic: Counter(values) for topic, values in EXPECTED.items()}


def judged(found: dict[str, Counter[bytes]]) -> Tally:
    return judge(len(ORDERS), EXPECTED, found, ())


def test_a_faultless_output_is_exactly_once() -> None:
    """All counts are zero, and everything was looked at."""
    tally = judged(written())
    assert tally.is_exactly_once
    assert tally.orders == 5000
    assert (tally.lost, tally.repeated, tally.wrong, tally.torn, tally.cents) == (0, 0, 0, 0, 0)
    assert len(EXPECTED[INVOICES]) == len(EXPECTED[PARCELS]) == 5000


@pytest.mark.parametrize("topic", [REVENUE, INVOICES, PARCELS])
def test_a_record_that_is_missing_counts_as_lost(topic: str) -> None:
    """In whichever topic."""
    found = written()
    del found[topic][min(EXPECTED[topic])]
    tally = judged(found)
    assert (tally.lost, tally.repeated, tally.wrong) == (1, 0, 0)
    assert not tally.is_exactly_once


def test_repeats_are_counted_beyond_the_first_and_their_money_is_added_up() -> None:
    """Three copies are two repeats; revenues are told apart from documents."""
    found = written()
    invoice = min(EXPECTED[INVOICES])
    found[INVOICES][invoice] += 2
    found[PARCELS][min(EXPECTED[PARCELS])] += 1
    found[REVENUE][min(EXPECTED[REVENUE])] += 1
    tally = judged(found)
    assert (tally.repeated_documents, tally.repeated_revenues, tally.repeated) == (3, 1, 4)
    assert tally.cents == 2 * json.loads(invoice)["cents"]
    assert (tally.lost, tally.wrong) == (0, 0)
    assert not tally.is_exactly_once


def test_a_revenue_with_another_sum_is_wrong_and_the_right_one_is_lost() -> None:
    """An aggregate that counted an order twice does not pass."""
    found = written()
    right = min(EXPECTED[REVENUE])
    del found[REVENUE][right]
    found[REVENUE][right.replace(b'"cents":', b'"cents":1')] = 1
    tally = judged(found)
    assert (tally.lost, tally.wrong, tally.repeated) == (1, 1, 0)
    assert not tally.is_exactly_once


def test_half_orders_are_torn() -> None:
    """Either half may be missing; repeats do not make an order whole."""
    torn = half_orders([b"1", b"1", b"2"], [b"2", b"3"])
    assert torn == {b"1", b"3"}
    tally = judge(3, EXPECTED, written(), torn)
    assert tally.torn == 2
    assert not tally.is_exactly_once


def test_a_faultless_table_is_exactly_once() -> None:
    """A row for each order, and the totals are the same."""
    sales = expected_sales(ORDERS)
    tally = judge_table(sales, Counter(sales))
    assert tally.is_exactly_once
    assert (tally.expected, tally.found) == (5000, 5000)
    assert tally.expected_cents == tally.found_cents == sum(order.cents for order in ORDERS)


def test_rows_that_are_missing_repeated_or_changed_are_told_apart() -> None:
    """Each shows in its own count and in the total, and none of them passes."""
    sales = expected_sales(ORDERS)
    one = min(sales)
    lost, repeated, wrong = Counter(sales), Counter(sales), Counter(sales)
    del lost[one]
    repeated[one] += 2
    del wrong[one]
    wrong[one._replace(cents=one.cents + 1)] = 1
    counts = [
        (tally.lost, tally.repeated, tally.wrong, tally.found_cents - tally.expected_cents, tally.is_exactly_once)
        for tally in (judge_table(sales, found) for found in (lost, repeated, wrong))
    ]
    assert counts == [(1, 0, 0, -one.cents, False), (0, 2, 0, 2 * one.cents, False), (1, 0, 1, 1, False)]
    assert judge_table(sales, Counter([*sales, Sale(-1, "teapot", "kitchen", 5)])).wrong == 1


def test_only_windows_behind_the_watermark_are_expected() -> None:
    """Ten seconds long, told twenty seconds after their end, with the sums of their own orders alone."""
    start = 1_767_225_600_000
    orders = [
        Order(0, "green tea", 2, start),
        Order(1, "black tea", 1, start + 9_999),
        Order(2, "teapot", 1, start + 10_000),
        Order(3, "teapot", 1, start + 39_999),
    ]
    window = b'{"window":%d,"category":"tea","orders":2,"cents":2570}' % start
    assert expected(orders[:3])[REVENUE] == set()
    assert expected(orders)[REVENUE] == {window}
    closing = Order(4, "teapot", 1, start + 40_000)
    second = b'{"window":%d,"category":"kitchen","orders":1,"cents":2400}' % (start + 10_000)
    assert expected([*orders, closing])[REVENUE] == {window, second}
