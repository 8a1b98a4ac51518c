"""From rows in Postgres' log to change events: keys, values that did not change, types, routing."""

from __future__ import annotations

import json

import pytest

from semel.bridges.capture.changes import TableFormat, changes_of
from semel.bridges.capture.pgoutput import (
    UNCHANGED,
    Delete,
    Insert,
    Relation,
    RelationColumn,
    Truncate,
    Update,
    Values,
)
from semel.bridges.relay.routes import TopicTemplate

INT, TEXT, BOOL, FLOAT, NUMERIC = 23, 25, 16, 701, 1700


def table(identity: str = "d", key: list[str] | None = None) -> TableFormat:
    columns = (
        RelationColumn("id", INT, True),
        RelationColumn("note", TEXT, identity == "f"),
        RelationColumn("n", INT, identity == "f"),
    )
    return TableFormat(Relation(7, "public", "accounts", identity, columns), key)


def events(
    message: Insert | Update | Delete | Truncate, one: TableFormat
) -> list[tuple[str, object, object, list[str]]]:
    def read(data: bytes | None) -> object:
        return None if data is None else json.loads(data)

    return [
        (change.operation, read(change.key_json()), read(change.value_json()), change.unchanged)
        for change in changes_of(message, {7: one})
    ]


def test_insert_update_delete_and_truncate() -> None:
    """The key is the replica identity; a deleted row has nothing else; a truncation has neither key nor value."""
    row: Values = (b"1", b"a", None)
    one = {"id": 1, "note": "a", "n": None}
    assert events(Insert(7, row), table()) == [("insert", {"id": 1}, one, [])]
    assert events(Update(7, None, False, row), table()) == [("update", {"id": 1}, one, [])]
    assert events(Delete(7, (b"1", None, None), False), table()) == [("delete", {"id": 1}, {"id": 1}, [])]
    assert events(Truncate((7,)), table()) == [("truncate", None, None, [])]


def test_a_large_value_that_did_not_change_is_named_and_left_out() -> None:
    """It is not in the log, unless the whole old row is."""
    new: Values = (b"1", UNCHANGED, b"5")
    assert events(Update(7, None, False, new), table()) == [("update", {"id": 1}, {"id": 1, "n": 5}, ["note"])]
    whole = Update(7, (b"1", b"long", b"4"), True, new)
    assert events(whole, table("f", ["id"])) == [("update", {"id": 1}, {"id": 1, "note": "long", "n": 5}, [])]


def test_a_changed_key_is_a_delete_and_an_insert() -> None:
    """Consumers that find rows by key need no more. Without the large value of the row the insert cannot be made."""
    moved = Update(7, (b"1", None, None), False, (b"2", b"a", b"5"))
    assert events(moved, table()) == [
        ("delete", {"id": 1}, {"id": 1}, []),
        ("insert", {"id": 2}, {"id": 2, "note": "a", "n": 5}, []),
    ]
    delete, insert = changes_of(Update(7, (b"1", None, None), False, (b"2", UNCHANGED, b"5")), {7: table()})
    assert delete.problem is None
    assert insert.problem is not None
    assert "REPLICA IDENTITY FULL" in insert.problem
    large_key = Update(7, (b"1", None, None), False, (UNCHANGED, b"b", b"5"))
    assert events(large_key, table())[0][:2] == ("update", {"id": 1})


def test_whole_rows_in_the_log_have_the_primary_key_if_there_is_one() -> None:
    """Otherwise the row is its own key, and a changed row is another one."""
    gone = Delete(7, (b"1", b"a", b"5"), True)
    one = {"id": 1, "note": "a", "n": 5}
    assert events(gone, table("f", ["id"])) == [("delete", {"id": 1}, one, [])]
    assert events(gone, table("f", None)) == [("delete", one, one, [])]
    changed = Update(7, (b"1", b"a", b"5"), True, (b"1", b"b", b"5"))
    assert [operation for operation, *_ in events(changed, table("f", None))] == ["delete", "insert"]


@pytest.mark.parametrize(
    ("kind", "text", "read"),
    [
        (INT, b"-5", -5),
        (20, b"9007199254740993", 9_007_199_254_740_993),
        (BOOL, b"t", True),
        (BOOL, b"f", False),
        (FLOAT, b"1e-300", 1e-300),
        (FLOAT, b"NaN", "NaN"),
        (FLOAT, b"-Infinity", "-Infinity"),
        (NUMERIC, b"0.10", "0.10"),
        (TEXT, 'a"\\\n\u20ac\u0001'.encode(), 'a"\\\n\u20ac\u0001'),
        (99_999, b"(1,2)", "(1,2)"),
    ],
)
def test_values_are_json_where_no_digit_is_lost_and_text_otherwise(kind: int, text: bytes, read: object) -> None:
    """A type that nobody has heard of comes as Postgres prints it."""
    one = TableFormat(Relation(7, "s", "t", "d", (RelationColumn('a "b"', kind, False),)))
    [(_, key, value, _)] = events(Insert(7, (text,)), one)
    assert key is None
    assert value == {'a "b"': read}
    assert repr(value) == repr({'a "b"': read})


def test_topics_are_made_of_places_and_columns() -> None:
    """A column that is null names no topic."""
    [change] = changes_of(Insert(7, (b"1", b"orders", None)), {7: table()})
    assert TopicTemplate.parse("x.{note}").topic_for(change.text) == "x.orders"
    assert TopicTemplate.parse("{n}").topic_for(change.text) is None
    assert TopicTemplate.parse("all").topic_for(change.text) == "all"
