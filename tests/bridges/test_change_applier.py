"""Events of change capture applied to tables of another database: the tables come out equal, value by value."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import pytest
from database_scene import Place, make_postgres, place, server

import semel
from semel.session.transaction import Row

__all__ = ["place", "server"]


def event(
    operation: str,
    key: dict[str, Any] | None,
    value: dict[str, Any] | None,
    *,
    table: str = "accounts",
    unchanged: list[str] | None = None,
) -> Row:
    headers = {
        "semel.change.operation": operation,
        "semel.change.schema": "public",
        "semel.change.table": table,
        **({} if unchanged is None else {"semel.change.unchanged": json.dumps(unchanged)}),
    }
    encoded = tuple((name, text.encode()) for name, text in headers.items())
    dumped = [None if one is None else json.dumps(one).encode() for one in (key, value)]
    return Row("public.accounts", 0, 7, 0, dumped[0], dumped[1], encoded)


@contextmanager
def connected(place: Place) -> Iterator[Any]:
    if place.kind == "sqlite":
        with closing(sqlite3.connect(place.address, timeout=30)) as connection, connection:
            yield connection
    else:
        with psycopg.connect(place.address) as connection:
            yield connection


def apply(place: Place, *events: Row, **options: Any) -> int:
    with connected(place) as connection:
        return semel.apply_changes(connection, events, **options)


def test_rows_come_change_move_and_go(place: Place) -> None:
    """Snapshot, insert, update, a key that changes, delete with its tombstone; the same row several times."""
    place.do("CREATE TABLE accounts (id BIGINT PRIMARY KEY, owner TEXT, balance BIGINT)")
    count = apply(
        place,
        event("snapshot", {"id": 1}, {"id": 1, "owner": "a", "balance": 10}),
        event("snapshot", {"id": 2}, {"id": 2, "owner": "b", "balance": 20}),
        event("insert", {"id": 3}, {"id": 3, "owner": None, "balance": 30}),
        event("update", {"id": 1}, {"id": 1, "owner": "a", "balance": 11}),
        event("update", {"id": 1}, {"id": 1, "owner": "a", "balance": 12}),
        event("delete", {"id": 2}, {"id": 2}),
        event("delete", {"id": 2}, None),
        event("insert", {"id": 9}, {"id": 9, "owner": "b?%s", "balance": 20}),
    )
    assert count == 7
    assert sorted(place.ask("SELECT * FROM accounts")) == [(1, "a", 12), (3, None, 30), (9, "b?%s", 20)]
    apply(place, event("truncate", {}, None), event("insert", {"id": 4}, {"id": 4, "owner": "d", "balance": 1}))
    assert place.ask("SELECT * FROM accounts") == [(4, "d", 1)]


def test_columns_that_are_not_in_the_event_keep_their_value(place: Place) -> None:
    """Large values that did not change are not in the log; the row must be there, or the copy is not what it seems."""
    place.do("CREATE TABLE accounts (id BIGINT PRIMARY KEY, note TEXT NOT NULL, balance BIGINT)")
    apply(place, event("insert", {"id": 1}, {"id": 1, "note": "long", "balance": 1}))
    apply(
        place,
        event("update", {"id": 1}, {"id": 1, "balance": 2}, unchanged=["note"]),
        event("update", {"id": 1}, {"id": 1}, unchanged=["note", "balance"]),
    )
    assert place.ask("SELECT * FROM accounts") == [(1, "long", 2)]
    with pytest.raises(semel.ConfigError, match="An update found 0 of 1 rows"):
        apply(place, event("update", {"id": 5}, {"id": 5, "balance": 2}, unchanged=["note"]))


def test_names_of_every_kind_and_keys_of_several_columns(place: Place) -> None:
    """Names are quoted; `%` and `?` in them are no parameters. A table may go elsewhere, or nowhere."""
    place.do('CREATE TABLE "my %s?" ("a ""b" BIGINT, "c?" TEXT, "100%" BIGINT, PRIMARY KEY ("a ""b", "c?"))')
    names = {'a "b': 1, "c?": "x"}
    events = [
        event("insert", names, {**names, "100%": 5}, table="accounts"),
        event("update", names, {**names, "100%": 6}, table="accounts"),
        event("insert", {"id": 1}, {"id": 1}, table="secrets"),
    ]
    assert apply(place, *events, tables={"public.accounts": "my %s?"}) == 2
    assert place.ask('SELECT * FROM "my %s?"') == [(1, "x", 6)]
    assert apply(place, *events, tables=lambda schema, table: None) == 0


def test_values_keep_every_digit_and_type(server: Any) -> None:
    """Postgres reads each value from its text, as the column's own type does."""
    place = make_postgres(server)
    place.do(
        "CREATE TABLE accounts (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, n numeric, d double precision, "
        "b boolean, j jsonb, y bytea, t timestamptz, l int[], big bigint)"
    )
    value = {
        "id": 9_007_199_254_740_993, "n": "0.10000000000000000000000000001", "d": 1e-300, "b": True,
        "j": '{"a": [1, null]}', "y": "\\x00ff", "t": "2026-11-19 01:02:03.000004+00", "l": "{1,NULL,3}", "big": -5,
    }  # fmt: skip
    apply(place, event("insert", {"id": value["id"]}, value))
    apply(place, event("update", {"id": value["id"]}, {**value, "b": False, "d": None}))
    [row] = place.ask("SELECT id, n::text, d, b, j, y, t = '2026-11-19 01:02:03.000004Z', l, big FROM accounts")
    assert row == (
        value["id"], value["n"], None, False, {"a": [1, None]}, b"\x00\xff", True, [1, None, 3], -5,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (event("insert", {"id": 1}, {"id": 1})._replace(headers=()), "has no header"),
        (event("update", None, {"id": 1}), "has no key"),
        (event("delete", None, {"id": 1}), "has no key"),
        (event("merge", {"id": 1}, {"id": 1}), "'merge' is not known"),
    ],
)
def test_an_event_that_cannot_be_applied_is_named(place: Place, row: Row, text: str) -> None:
    """Topic, partition and offset, and what to do."""
    place.do("CREATE TABLE accounts (id BIGINT PRIMARY KEY)")
    with pytest.raises(semel.RecordFailed, match=text) as caught:
        apply(place, row)
    assert (caught.value.topic, caught.value.offset) == ("public.accounts", 7)


def test_rows_of_a_table_without_a_key_are_added(place: Place) -> None:
    """Each event is applied once, so an insert needs no key."""
    place.do("CREATE TABLE accounts (id BIGINT)")
    apply(place, event("insert", None, {"id": 1}), event("insert", None, {"id": 1}))
    assert place.ask("SELECT id FROM accounts") == [(1,), (1,)]
