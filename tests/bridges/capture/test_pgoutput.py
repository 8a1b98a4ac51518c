"""The decoder reads back whatever the protocol can say, and refuses everything else as a whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pgoutput_writer import write

from semel.bridges.capture.pgoutput import (
    UNCHANGED,
    Begin,
    Commit,
    Delete,
    Insert,
    Message,
    Relation,
    RelationColumn,
    Truncate,
    Update,
    decode,
)

OIDS = st.integers(0, 2**32 - 1)
LSNS = st.integers(0, 2**64 - 1)
NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=20)
VALUES = st.lists(st.one_of(st.none(), st.just(UNCHANGED), st.binary(max_size=30)), max_size=6).map(tuple)
COLUMNS = st.lists(st.builds(RelationColumn, NAMES, OIDS, st.booleans()), max_size=6).map(tuple)
UPDATES = st.one_of(
    st.builds(Update, OIDS, st.none(), st.just(False), VALUES), st.builds(Update, OIDS, VALUES, st.booleans(), VALUES)
)
MESSAGES = st.one_of(
    st.builds(Begin, LSNS, st.integers(-(2**62), 2**62), OIDS),
    st.builds(Commit, LSNS, LSNS),
    st.builds(Relation, OIDS, NAMES, NAMES, st.sampled_from("dnfi"), COLUMNS),
    st.builds(Insert, OIDS, VALUES),
    UPDATES,
    st.builds(Delete, OIDS, VALUES, st.booleans()),
    st.builds(Truncate, st.lists(OIDS, max_size=4).map(tuple)),
)


@given(MESSAGES)
def test_every_message_is_read_as_it_was_written(message: Message) -> None:
    """The writer of the test follows the protocol's description, and knows nothing of the decoder."""
    assert decode(write(message)) == message


@given(MESSAGES, st.data())
def test_a_message_that_ends_too_early_is_refused(message: Message, data: st.DataObject) -> None:
    """Never half a row, and never another error than ValueError."""
    whole = write(message)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with pytest.raises(ValueError, match="pgoutput"):
        decode(cut)


def test_a_truncate_of_nothing_that_ends_too_early_is_refused() -> None:
    """Found by the test above in one of many runs."""
    with pytest.raises(ValueError, match="pgoutput"):
        decode(write(Truncate(()))[:-1])


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    """A server of the future may send what nobody has heard of."""
    try:
        decode(data)
    except ValueError:
        return


@pytest.mark.parametrize("kind", [b"O", b"Y", b"M"])
def test_messages_that_say_nothing_about_rows_are_passed_over(kind: bytes) -> None:
    """Origins, names of types, and pg_logical_emit_message, whose place is another one than a commit's."""
    assert decode(kind + b"anything") is None
