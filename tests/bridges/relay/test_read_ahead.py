"""Reading ahead changes nothing but the time: what was read for another position, or found nothing, is read again."""

from __future__ import annotations

from typing import Any, cast

import pyarrow as pa
import pytest

from semel.bridges.relay.read_ahead import ReadAhead
from semel.bridges.relay.row_source import Portion, Position, RowSource, nothing_due
from semel.errors import DatabaseUnreachable


class Numbers:
    """Rows 1 to `last`, two at a time. `asked` has the positions that were asked for."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.asked: list[int] = []
        self.is_down = False

    def next(self, position: Position | None, rows_max: int) -> Portion:
        after = 0 if position is None else position["after"]
        self.asked.append(after)
        if self.is_down:
            raise DatabaseUnreachable("gone")
        ids = list(range(after + 1, min(after + 2, self.last) + 1))
        if not ids:
            return nothing_due({"after": after})
        return Portion(pa.table({"id": ids}), lambda done: {"after": after + done}, has_more=True)


def made(last: int) -> tuple[Numbers, ReadAhead]:
    source = Numbers(last)
    return source, ReadAhead(cast(RowSource, source))


def ids(portion: Portion) -> list[Any]:
    return portion.rows.column("id").to_pylist() if portion.rows.num_rows else []


def test_what_was_read_ahead_is_not_read_again() -> None:
    """For the position that it was read for."""
    source, ahead = made(4)
    first = ahead.next(None, 2)
    ahead.begin(first.end, 2)
    assert ids(ahead.next(first.end, 2)) == [3, 4]
    assert source.asked == [0, 2]
    ahead.close()


def test_another_position_is_read_afresh() -> None:
    """A broker took half of the rows, or a transaction was lost: the relay stands elsewhere then."""
    source, ahead = made(4)
    ahead.begin({"after": 2}, 2)
    assert ids(ahead.next({"after": 1}, 2)) == [2, 3]
    assert source.asked == [2, 1]
    ahead.close()


def test_nothing_is_not_taken_for_an_answer() -> None:
    """Rows may have been committed while the last ones were written."""
    source, ahead = made(2)
    ahead.begin({"after": 2}, 2)
    ahead.forget()
    ahead.begin({"after": 2}, 2)
    source.last = 3
    assert ids(ahead.next({"after": 2}, 2)) == [3]
    ahead.close()


def test_an_error_is_raised_where_the_rows_are_asked_for_and_can_be_forgotten() -> None:
    """The relay deals with it as with any other, and then nothing of it is left."""
    source, ahead = made(4)
    source.is_down = True
    ahead.begin({"after": 2}, 2)
    with pytest.raises(DatabaseUnreachable):
        ahead.next({"after": 2}, 2)
    ahead.begin({"after": 2}, 2)
    ahead.forget()
    source.is_down = False
    assert ids(ahead.next({"after": 2}, 2)) == [3, 4]
    ahead.close()
