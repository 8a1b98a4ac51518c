"""The headers of a dead letter, as another client reads them."""

from __future__ import annotations

from semel.client.dead_letters import dead_letter_headers


def test_headers_are_text_and_leave_out_what_is_not_known() -> None:
    """D8: a row of a query need not come from Kafka, and then has no origin."""
    assert dict(dead_letter_headers(None, None, None, "no value", 5)) == {
        "semel.dead-letter.error": b"no value",
        "semel.dead-letter.time": b"5",
    }
    assert dict(dead_letter_headers("orders", 0, 0, KeyError("amount"), 5)) == {
        "semel.dead-letter.topic": b"orders",
        "semel.dead-letter.partition": b"0",
        "semel.dead-letter.offset": b"0",
        "semel.dead-letter.error": b"KeyError: 'amount'",
        "semel.dead-letter.time": b"5",
    }


def test_a_long_error_is_cut_and_one_that_is_no_unicode_is_written_all_the_same() -> None:
    """D8: an error that quotes the record must not make the dead letter too large as well."""
    written = dict(dead_letter_headers("t", 0, 0, ValueError("x" * 10_000_000)))
    assert len(written["semel.dead-letter.error"]) < 10_000
    assert dict(dead_letter_headers("t", 0, 0, "\udc80"))["semel.dead-letter.error"] == b"?"
