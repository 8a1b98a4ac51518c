"""Expressions from strangers: they match what Python's own would match, in a time that cannot explode."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core.linear_regex import LinearRegex, UnusableRegex

PIECES = [
    "a",
    "b",
    "c",
    ".",
    "(",
    "|",
    ")",
    "*",
    "+",
    "?",
    "[ab]",
    "[^a]",
    "[a-b]",
    "a{1,2}",
    "b{2}",
    "^",
    "$",
    r"\w",
    r"\d",
]


@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), st.lists(st.text("abc1", max_size=6), max_size=5))
def test_what_it_takes_it_matches_as_python_does(pattern: str, texts: list[str]) -> None:
    """Python's `re` is the oracle for patterns that both take; what `re` does not take is not taken here either."""
    try:
        oracle = re.compile(pattern)
    except re.error:
        with pytest.raises(UnusableRegex):
            LinearRegex(pattern)
        return
    if "++" in pattern or "*+" in pattern or "?+" in pattern or "}+" in pattern:
        with pytest.raises(UnusableRegex, match="is not taken"):  # possessive, which RE2 does not have
            LinearRegex(pattern)
        return
    regex = LinearRegex(pattern)
    assert regex.select(texts) == [text for text in texts if oracle.fullmatch(text)]


@pytest.mark.parametrize(
    ("pattern", "text", "is_match"),
    [
        (r"orders-[0-9]{1,3}", "orders-12", True),
        (r"events\.v\d", "events.v2", True),
        ("(?i)ORDERS", "orders", True),
        ("(?i)[A-C]+", "abc", True),
        ("(?s).", "\n", True),
        (".", "\n", False),
        (r"[^\w]", "é", True),
        ("(?:){1000000}a", "a", True),
        ("^a$", "a", True),
        ("", "", True),
    ],
)
def test_the_usual_means_are_there(pattern: str, text: str, is_match: bool) -> None:
    """Classes, counts, flags and anchors; `\\w` and `\\d` are ASCII, as in RE2."""
    assert LinearRegex(pattern).matches(text) is is_match


@pytest.mark.parametrize("pattern", [r"(a)\1", "(?=a)a", "(?<!a)b", "(?>a)", "a++", "(?i:a)b", "[", "a**"])
def test_what_re2_does_not_have_is_refused(pattern: str) -> None:
    """References and looking around are what cannot be done in linear time."""
    with pytest.raises(UnusableRegex):
        LinearRegex(pattern)


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*" * 99 + "b", "(.*)*(.*)*x", "a{0,900}b"])
def test_no_expression_takes_long(pattern: str) -> None:
    """Each of these has more ways to fail than a backtracking matcher could try in years."""
    began = time.monotonic()
    assert not LinearRegex(pattern).matches("a" * 249)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("pattern", ["((a{99}){99}){99}", "x{2147483647}", "a" * 10_001, "(" * 5000 + ")" * 5000])
def test_expressions_that_grow_too_large_are_refused(pattern: str) -> None:
    """Written out, their repetitions would fill the memory."""
    with pytest.raises(UnusableRegex):
        LinearRegex(pattern)


def test_many_names_under_a_costly_expression_are_given_up() -> None:
    """Linear in each name is still too long for ten thousand of them: there is a bound for all together."""
    with pytest.raises(UnusableRegex, match="too long"):
        LinearRegex("(a|a)*" * 150 + "b").select("a" * 240 + str(number) for number in range(10_000))
