"""Rows that lack columns which others have: what is written does not depend on which rows share a transaction."""

from __future__ import annotations

import json
from collections.abc import Hashable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from database_scene import Input, Place, broker, make_postgres, place, server
from hypothesis import given
from hypothesis import strategies as st

import semel
from semel.bridges.ragged_rows import part_rows
from semel.testing.embedded import EmbeddedBroker
from semel.testing.postgres import Postgres

__all__ = ["broker", "place", "server"]

EVENTS: list[dict[str, Any]] = [
    {"id": "a", "name": "Ann", "city": "Ulm", "v": 3},
    {"id": "b", "name": "Ben", "v": 1},
    {"id": "a", "city": "Bonn", "v": 1},
    {"id": "c", "v": 5},
    {"id": "A", "name": "Anna", "v": 4},
    {"id": "b", "city": None, "v": 2},
    {"id": "c", "name": "Cem", "city": "Kiel", "v": 4},
    {"id": "a", "name": "Anne", "v": 5},
    {"id": "b", "name": "Bea", "city": "Hof", "v": 3},
]
IN_ONE, BY_TWO, ONE_BY_ONE = 100, 2, 1


def model(mode: str, *, has_case: bool = True) -> list[tuple[Any, ...]]:
    """One row after the other into a dictionary; new rows get the defaults of the columns that they lack."""
    found: dict[Any, dict[str, Any]] = {}
    for number, event in enumerate(EVENTS):
        own = event if has_case else {**event, "id": event["id"].lower()}
        key = number if mode == "append" else own["id"]
        old = found.get(key)
        if old is None:
            found[key] = {"name": "nobody", "city": "nowhere", **own}
        elif mode == "upsert" or (mode == "newest" and own["v"] > old["v"]):
            old.update(own)
    return sorted(((row["id"], row["name"], row["city"], row["v"]) for row in found.values()), key=repr)


BATCHES = pytest.mark.parametrize("records", [IN_ONE, BY_TWO, ONE_BY_ONE])


@BATCHES
@pytest.mark.parametrize("mode", ["upsert", "newest", "dedup", "append"])
def test_the_table_is_the_same_however_rows_share_transactions(
    broker: EmbeddedBroker, place: Place, mode: Any, records: int
) -> None:
    """A column that a row lacks keeps its old value, or gets its default; null is written as null."""
    write_events(broker, place, mode, records, id_type="text")
    found = place.ask("SELECT id, name, city, v FROM users")
    assert sorted(found, key=repr) == model(mode)


@BATCHES
@pytest.mark.parametrize("mode", ["upsert", "newest"])
def test_keys_that_are_equal_in_the_table_alone_keep_their_order(
    broker: EmbeddedBroker, tmp_path: Path, mode: Any, records: int
) -> None:
    place = Place("sqlite", str(tmp_path / "shop.db"))
    write_events(broker, place, mode, records, id_type="TEXT COLLATE NOCASE")
    found = place.ask("SELECT lower(id), name, city, v FROM users")
    assert sorted(found, key=repr) == model(mode, has_case=False)


def write_events(broker: EmbeddedBroker, place: Place, mode: Any, records: int, *, id_type: str) -> None:
    key = " PRIMARY KEY" if mode in ("upsert", "newest") else ""
    place.do(
        f"CREATE TABLE users (id {id_type}{key}, name text DEFAULT 'nobody', city text DEFAULT 'nowhere', v bigint)"
    )
    options: dict[str, Any] = {} if mode == "append" else {"key": ["id"]}
    if mode == "newest":
        options["version"] = "v"
    source = Input(broker.bootstrap, 1)
    source.write([json.dumps(event).encode() for event in EVENTS])
    target = place.target(table="users", mode=mode, **options)
    report = source.run(lambda row: json.loads(row.value), target, transaction_records_max=records)
    assert (report.records, report.aborted) == (len(EVENTS), 0)


def test_text_keys_that_are_one_number_in_the_table_keep_their_order(broker: EmbeddedBroker, server: Postgres) -> None:
    place = make_postgres(server)
    place.do("CREATE TABLE users (id bigint PRIMARY KEY, name text, city text)")
    source = Input(broker.bootstrap, 1)
    events = [{"id": "7", "name": "first"}, {"id": "8", "city": "Ulm"}, {"id": "007", "city": "Bonn", "name": "later"}]
    source.write([json.dumps(event).encode() for event in [*events, {"id": "07", "name": "last"}]])
    source.run(lambda row: json.loads(row.value), place.target(table="users", mode="upsert", key=["id"]))
    assert place.ask("SELECT id, name, city FROM users ORDER BY id") == [(7, "last", "Bonn"), (8, None, "Ulm")]


def test_a_row_without_a_column_that_must_be_there_is_put_aside_alone(broker: EmbeddedBroker, place: Place) -> None:
    place.do("CREATE TABLE users (id bigint PRIMARY KEY, name text NOT NULL)")
    source = Input(broker.bootstrap, 1)
    source.write(range(6))
    target = place.target(table="users", mode="upsert", key=["id"], dead_letter="failed")

    def lacks_its_name(row: Any) -> dict[str, Any]:
        value = int(row.value)
        return {"id": value} if value == 3 else {"name": "nobody"} if value == 5 else {"id": value, "name": f"n{value}"}

    assert source.run(lacks_its_name, target).dead_letters == 2
    assert place.ask("SELECT id FROM users ORDER BY id") == [(0,), (1,), (2,), (4,)]
    reasons = dict(place.ask('SELECT "offset", error FROM failed'))
    assert set(reasons) == {3, 5}
    assert "name" in reasons[3]
    assert "'id'" in reasons[5]


def test_a_row_with_none_of_the_tables_columns_is_not_lost(broker: EmbeddedBroker, place: Place) -> None:
    place.do("CREATE TABLE users (name text)")
    source = Input(broker.bootstrap, 1)
    source.write(range(2))

    def foreign(row: Any) -> dict[str, Any]:
        return {"name": "Ann"} if int(row.value) == 0 else {"nickname": "Ben"}

    with pytest.raises(semel.ValueDoesNotFit, match=r"offset 1.*none of the columns of table 'users'"):
        source.run(foreign, place.target(table="users", new_columns="ignore"))
    assert place.ask("SELECT name FROM users") == []


def test_a_dictionary_without_columns_is_refused(broker: EmbeddedBroker, place: Place) -> None:
    """It was dropped in silence if all rows of a transaction were so."""
    place.do("CREATE TABLE users (name text)")
    source = Input(broker.bootstrap, 1)
    source.write(range(1))
    with pytest.raises(semel.RecordFailed, match="without columns: return None to write nothing"):
        source.run(lambda row: {}, place.target(table="users"))


def test_a_created_column_takes_decimals_with_more_digits_than_the_first(broker: EmbeddedBroker, place: Place) -> None:
    """The first batch had 1.50 alone, and its column took no 12.34."""
    source, target = Input(broker.bootstrap, 1), place.target(table="prices", create=True)
    prices = ["1.50", "12.34", "0.125", "123456789.1"]
    source.write([price.encode() for price in prices])
    source.run(lambda row: {"price": Decimal(row.value.decode())}, target, transaction_records_max=1)
    assert sorted(Decimal(price) for (price,) in place.ask("SELECT price FROM prices")) == sorted(map(Decimal, prices))


COLUMNS = st.sampled_from(["ab", "a", "b", ""])


@given(st.lists(st.tuples(COLUMNS, st.integers(0, 3)), max_size=30), st.booleans())
def test_parts_have_every_row_once_and_those_of_a_key_in_order(rows: list[tuple[str, int]], has_keys: bool) -> None:
    keys: list[Hashable] | None = [key for _, key in rows] if has_keys else None
    parts = part_rows([columns for columns, _ in rows], keys)
    written = [number for part in parts for number in part]
    assert sorted(written) == list(range(len(rows)))
    assert all(len({rows[number][0] for number in part}) == 1 for part in parts)
    for key in range(4) if has_keys else ():
        assert [number for number in written if rows[number][1] == key] == [
            number for number, row in enumerate(rows) if row[1] == key
        ]
    if not has_keys:
        assert len(parts) == len({columns for columns, _ in rows})
