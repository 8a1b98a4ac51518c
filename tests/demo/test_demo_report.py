"""The demo's page and the lines before it, made from a result that is written by hand."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from demo_results import CLEAN, CLEAN_RELAY, CLEAN_TABLE, DIRTY, DIRTY_TABLE, make_result

from semel.demo.pipeline_names import PLAIN, SEMEL
from semel.demo.report import conclusion, per_second, render, repeated_so_far, waiting
from semel.demo.run import Result


def test_the_page_shows_both_columns_the_kills_and_needs_nothing_from_elsewhere() -> None:
    """Inline SVG, no script, no link; what a kill is called is escaped."""
    page = render(make_result())
    for row in (
        "orders taken",
        "lost",
        "repeated",
        "torn",
        "rows found",
        "rows lost",
        "rows repeated",
        "total found",
    ):
        assert f"<td>{row}</td>" in page
    assert '<span class="bad">141</span>' in page
    assert "123.45 EUR too much" in page
    assert "Postgres, one row per order" in page
    assert '<td class="number">1,093</td><td class="number">1,000</td>' in page
    assert '<span class="bad">93</span>' in page
    assert '<span class="bad">54,567.89 EUR</span>' in page
    assert '<span class="good">50,000.00 EUR</span>' in page
    assert page.count('<span class="good">0</span>') >= 9
    assert "semel demo --seconds 20 --seed 7 --database postgres" in page
    assert "&lt;something&gt;" in page
    assert "<something>" not in page
    charts = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(charts) == 3
    for chart in charts:
        ElementTree.fromstring(chart)
    assert not re.search(r"<script|<link|src=|url\(|https?://(?!www\.w3\.org/2000/svg)", page)


def test_the_lines_of_the_charts_are_what_the_reader_got() -> None:
    """Throughput with repeats, steps where repeats came, and what waits is sent less done."""
    result = make_result()
    assert dict(per_second(result.samples[PLAIN], result.seconds))[10.0] == 337
    assert sum(count for _, count in per_second(result.samples[SEMEL], result.seconds)) == 1000
    assert repeated_so_far(result.samples[PLAIN], 20.0) == [(0, 0), (10.1, 0), (10.1, 137), (20.0, 137)]
    assert repeated_so_far(result.samples[SEMEL], 20.0) == [(0, 0), (20.0, 0)]
    lag = dict(waiting(result, SEMEL))
    assert (lag[0.0], lag[3.0], lag[9.0], lag[20.0]) == (0, 0, 300, 0)


@pytest.mark.parametrize(
    ("result", "code", "says"),
    [
        (make_result(), 0, "repeated 141 records in Kafka and 93 rows in Postgres"),
        (make_result(semel=replace(CLEAN, repeated_revenues=1)), 1, "not all zeros"),
        (make_result(semel=replace(CLEAN, torn=1)), 1, "not all zeros"),
        (make_result(semel=replace(CLEAN, lost=1), plain=CLEAN), 1, "not all zeros"),
        (make_result(plain=replace(DIRTY, repeated_documents=0, repeated_revenues=0)), 2, "nothing to compare"),
        (make_result(semel_table=replace(CLEAN_TABLE, lost=1)), 1, "not all zeros"),
        (make_result(semel_table=replace(CLEAN_TABLE, repeated=1)), 1, "not all zeros"),
        (make_result(semel_table=replace(CLEAN_TABLE, wrong=1)), 1, "not all zeros"),
        (make_result(plain_table=replace(DIRTY_TABLE, repeated=0)), 2, "nothing to compare"),
        (make_result(relay=replace(CLEAN_RELAY, lost=1)), 1, "the relay has lost 1"),
        (make_result(relay=replace(CLEAN_RELAY, repeated=1)), 1, "repeated 1"),
        (make_result(relay=replace(CLEAN_RELAY, wrong=1)), 1, "1 records are of no order"),
    ],
    ids=[
        *("shown", "repeated", "torn", "lost", "nothing"),
        *("row lost", "row repeated", "row wrong", "nothing in the table"),
        *("order lost", "order repeated", "order unknown"),
    ],
)
def test_the_exit_code_and_the_sentence_follow_from_the_table(result: Result, code: int, says: str) -> None:
    """Anything but zeros in Semel's column is a failure."""
    assert result.exit_code == code
    assert says in conclusion(result)
    assert says in render(result)
