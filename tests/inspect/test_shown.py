"""Nothing that somebody wrote into a record can act on a terminal, or fill it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from semel.inspect.shown import bytes_as_json, show_span, show_text, show_time


@given(st.one_of(st.binary(max_size=40), st.text(max_size=40)), st.integers(1, 40))
def test_shown_text_is_printable_and_bounded(value: bytes | str, longest: int) -> None:
    """Escapes of one character are at most ten long; what was cut is told in a few words."""
    shown = show_text(value, longest)
    assert shown.isprintable()
    assert len(shown) <= 10 * longest + 30


def test_what_turns_the_reading_direction_is_escaped() -> None:
    """A file name or topic could otherwise look like another one."""
    assert show_text("a\u202etxt") == "a\\u202etxt"
    assert show_text("\ud800") == "\\ud800"


def test_a_value_of_five_megabytes_is_cut_without_being_decoded() -> None:
    """Its size is told."""
    assert show_text(b"x" * 5_000_000, 3) == "xxx… (5000000 bytes)"


@given(st.integers(-(2**63), 2**63 - 1))
def test_any_time_and_span_can_be_shown(number: int) -> None:
    """Producers may write what they like as a timestamp."""
    assert show_time(number).isprintable()
    assert show_span(number)


@given(st.binary(max_size=60))
def test_json_loses_no_byte(value: bytes) -> None:
    """Text if it is some, base64 if not."""
    import base64

    shown = bytes_as_json("value", value)
    [(name, text)] = shown.items()
    assert value == (text.encode() if name == "value" else base64.b64decode(text))
