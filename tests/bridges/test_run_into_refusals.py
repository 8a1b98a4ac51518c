"""Rows that do not fit: put aside as dead letters in the same transaction, or one error that names row and column."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from database_scene import Input, Place, broker, make_postgres, number, numbers, place, positions, server

import semel
from semel.testing.embedded import EmbeddedBroker
from semel.testing.postgres import Postgres

__all__ = ["broker", "place", "server"]


def letters(place: Place) -> dict[int, str]:
    """Dead letters: the value of each, and its error."""
    return {int(bytes(value)): error for value, error in place.ask("SELECT value, error FROM failed")}


def test_bad_rows_go_to_the_dead_letter_table_and_the_others_are_written(broker: EmbeddedBroker, place: Place) -> None:
    """A constraint, a null key, a type, and the function itself: each record once, with where it came from."""
    place.do("CREATE TABLE numbers (number BIGINT PRIMARY KEY, place BIGINT, at BIGINT CHECK (at <> 33))")
    source = Input(broker.bootstrap)
    target = place.target(table="numbers", mode="upsert", key=["number"], dead_letter="failed")
    source.write(range(200))

    def careless(row: Any) -> dict[str, Any]:
        made = number(row)
        if made["number"] == 10:
            raise KeyError("amount")
        if made["number"] == 11:
            made["number"] = None
        if made["number"] == 12:
            made["place"] = "nowhere"
        return made

    report = source.run(careless, target, transaction_records_max=90)
    bad = {10, 11, 12, 66, 67}
    assert numbers(place) == [n for n in range(200) if n not in bad]
    found = letters(place)
    assert set(found) == bad
    assert found[10] == "KeyError: 'amount'"
    assert "column 'number': the key is null" in found[11]
    assert "column 'place'" in found[12]
    assert "check" in found[66].lower()
    assert report.dead_letters == 5
    rows = place.ask('SELECT pipeline, topic, partition, "offset", key, at FROM failed ORDER BY "offset", partition')
    assert rows[0][:4] == (source.name, source.topic, 0, 5)
    assert bytes(rows[0][4]) == b"k3"
    assert rows[0][5] is not None
    assert source.run(careless, target).dead_letters == 0


def test_an_error_may_say_anything(broker: EmbeddedBroker, place: Place) -> None:
    """Postgres takes no U+0000 in text, and an error that has one must not stop the run."""
    source, target = Input(broker.bootstrap), place.target(table="numbers", create=True, dead_letter="failed")
    source.write(range(3))

    def complain(row: Any) -> dict[str, Any]:
        if int(row.value) == 1:
            raise ValueError("a\0b")
        return number(row)

    source.run(complain, target)
    assert letters(place) == {1: "ValueError: a\\0b"}


def test_a_record_with_several_rows_is_written_whole_or_put_aside_whole(broker: EmbeddedBroker, place: Place) -> None:
    """One of its rows is refused: none of them is written."""
    place.do("CREATE TABLE numbers (number BIGINT CHECK (number <> 7))")
    source, target = Input(broker.bootstrap), place.target(table="numbers", dead_letter="failed")
    source.write(range(10))
    source.run(lambda row: [{"number": int(row.value)}, {"number": int(row.value) + 100}], target)
    assert numbers(place) == sorted([n for n in range(10) if n != 7] + [n + 100 for n in range(10) if n != 7])
    assert set(letters(place)) == {7}


def test_a_function_of_tables_is_halved_down_to_the_record(broker: EmbeddedBroker, place: Place) -> None:
    """Which row belongs to which record is not known there, so the function runs again on smaller tables."""
    place.do("CREATE TABLE numbers (number BIGINT CHECK (number <> 7))")
    source, target = Input(broker.bootstrap), place.target(table="numbers", dead_letter="failed")
    source.write([*range(30), b"x"])

    def parse(table: pa.Table) -> pa.Table:
        return pa.table({"number": [int(value) for value in table["value"].to_pylist()]})

    with pytest.raises(semel.RecordFailed, match=r"in a table of \d+ records"):
        source.run(parse, place.target(table="numbers"), by="table")
    source.run(parse, target, by="table")
    assert numbers(place) == [n for n in range(30) if n != 7]
    assert sorted(bytes(value) for (value,) in place.ask("SELECT value FROM failed")) == [b"7", b"x"]


def test_too_many_dead_letters_stop_the_run_and_take_nothing_with_them(broker: EmbeddedBroker, place: Place) -> None:
    """A function that fails at everything must not move a whole topic aside. The count is of one run."""
    source = Input(broker.bootstrap, 1)
    target = place.target(table="numbers", create=True, dead_letter="failed", dead_letter_max=3)
    source.write([0, 1, b"-", 3, b"-", 5, b"-", 7, b"-"])
    with pytest.raises(semel.TooManyDeadLetters, match="More than dead_letter_max=3") as stopped:
        source.run(number, target, transaction_records_max=2)
    assert f"{source.topic}-0 at offset 8" in str(stopped.value)
    assert place.ask("SELECT count(*) FROM failed") == [(3,)]
    assert positions(place) == {0: 8}
    assert source.run(number, target).dead_letters == 1


def test_without_a_dead_letter_table_the_error_names_the_record_the_column_and_both_types(
    broker: EmbeddedBroker, server: Postgres
) -> None:
    """The value is too long, too large, would be rounded, or cannot be read as the column's type."""
    place = make_postgres(server)
    place.do("CREATE TABLE prices (id integer, name varchar(5), price numeric(10,2), whole bigint, day date, uid uuid)")
    good: dict[str, Any] = {"id": 1, "name": "tea", "price": 1.25, "whole": 3.0, "day": "2026-01-02", "uid": None}
    bad = {
        "id": (2**40, "integer"),
        "name": ("coffee", r"character varying\(5\)"),
        "price": (1.255, r"numeric\(10,2\)"),
        "whole": (2.5, "bigint"),
        "day": ("today and a half", "date"),
        "uid": ("not-a-uuid", "uuid"),
    }
    source = Input(broker.bootstrap, 1)
    source.write(range(5))
    target = place.target(table="prices")
    for column, (value, kind) in bad.items():
        wrong = {**good, column: value}
        with pytest.raises(semel.ValueDoesNotFit, match=kind) as refused:
            source.run(lambda row, wrong=wrong: wrong if row.offset == 3 else good, target)
        assert f"{source.topic}-0 at offset 3" in str(refused.value), column
        assert refused.value.column == column
    assert place.ask("SELECT count(*) FROM prices") == [(0,)]
    source.run(lambda row: {**good, "uid": "8c1f6d4e-1f5a-4c8e-9a57-3b0f8f1c2d3e"}, target)
    assert place.ask("SELECT DISTINCT price, whole FROM prices") == [(Decimal("1.25"), 3)]


def test_a_constraint_that_is_checked_at_the_commit_is_found_as_well(broker: EmbeddedBroker, server: Postgres) -> None:
    """DEFERRABLE INITIALLY DEFERRED: without care the whole batch would fail with no row to blame."""
    place = make_postgres(server)
    place.do(
        "CREATE TABLE customers (id bigint PRIMARY KEY)",
        "INSERT INTO customers SELECT generate_series(0, 9)",
        "CREATE TABLE numbers (number bigint REFERENCES customers DEFERRABLE INITIALLY DEFERRED)",
    )
    source, target = Input(broker.bootstrap), place.target(table="numbers", dead_letter="failed")
    source.write(range(12))
    source.run(lambda row: {"number": int(row.value)}, target)
    assert numbers(place) == list(range(10))
    assert set(letters(place)) == {10, 11}


@pytest.mark.parametrize("how", ["trigger", "view"])
def test_rows_that_a_trigger_or_a_view_refuses_are_put_aside(
    broker: EmbeddedBroker, server: Postgres, how: str
) -> None:
    """RAISE in a trigger and WITH CHECK OPTION refuse a row as a constraint does."""
    place = make_postgres(server)
    if how == "trigger":
        place.do(
            "CREATE TABLE numbers (number bigint)",
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
            "$$BEGIN IF new.number = 7 THEN RAISE EXCEPTION 'not seven'; END IF; RETURN new; END$$",
            "CREATE TRIGGER refuse BEFORE INSERT ON numbers FOR EACH ROW EXECUTE FUNCTION refuse()",
        )
    else:
        place.do(
            "CREATE TABLE all_numbers (number bigint)",
            "CREATE VIEW numbers AS SELECT number FROM all_numbers WHERE number <> 7 WITH CHECK OPTION",
        )
    source, target = Input(broker.bootstrap, 1), place.target(table="numbers", dead_letter="failed")
    source.write(range(12))
    assert source.run(lambda row: {"number": int(row.value)}, target).dead_letters == 1
    assert numbers(place) == [one for one in range(12) if one != 7]
    [(offset, error)] = letters(place).items()
    assert offset == 7
    assert ("not seven" if how == "trigger" else "check option") in error


def test_a_row_that_row_level_security_forbids_is_an_error(broker: EmbeddedBroker, server: Postgres) -> None:
    """It is a right that is missing, and not a fault of the record: nothing is put aside."""
    place = make_postgres(server)
    place.do(
        "CREATE TABLE numbers (number bigint)",
        "ALTER TABLE numbers ENABLE ROW LEVEL SECURITY",
        "ALTER TABLE numbers FORCE ROW LEVEL SECURITY",
        "CREATE POLICY few ON numbers USING (true) WITH CHECK (number < 7)",
        "CREATE ROLE filler_of_few LOGIN",
        "GRANT ALL ON SCHEMA public TO filler_of_few",
        "GRANT ALL ON numbers TO filler_of_few",
    )
    user = Place("postgres", re.sub("//([^@/]*@)?", "//filler_of_few@", place.address))
    source, target = Input(broker.bootstrap, 1), user.target(table="numbers", dead_letter="failed")
    source.write(range(12))
    with pytest.raises(semel.DatabaseError, match="row-level security"):
        source.run(lambda row: {"number": int(row.value)}, target)
    assert numbers(place) == []


def test_a_deferrable_key_is_refused_before_anything_is_read(server: Postgres) -> None:
    """ON CONFLICT cannot use it, which would show at the first row."""
    place = make_postgres(server)
    place.do("CREATE TABLE numbers (number bigint NOT NULL UNIQUE DEFERRABLE)")
    with pytest.raises(semel.ConfigError, match="and not DEFERRABLE"):
        semel.run(
            number,
            to=place.target(table="numbers", mode="upsert", key=["number"]),
            bootstrap="127.0.0.1:1",
            topics=["orders"],
            name="billing",
        )


@pytest.mark.parametrize("how", ["refuse", "ignore", "add"])
def test_new_columns_are_refused_ignored_or_added(broker: EmbeddedBroker, place: Place, how: str) -> None:
    """As the user says, and also when they come in the middle of a run."""
    place.do("CREATE TABLE numbers (number BIGINT)")
    source = Input(broker.bootstrap, 1)
    source.write(range(6))

    def growing(row: Any) -> dict[str, Any]:
        made: dict[str, Any] = {"number": int(row.value)}
        return made if made["number"] < 3 else {**made, "note": f"n{row.value.decode()}"}

    target = place.target(table="numbers", new_columns=how)
    if how == "refuse":
        with pytest.raises(semel.ConfigError, match="column 'note'"):
            source.run(growing, target, transaction_records_max=2)
        assert numbers(place) == [0, 1]
        return
    source.run(growing, target, transaction_records_max=2)
    assert numbers(place) == list(range(6))
    if how == "add":
        assert place.ask("SELECT note FROM numbers ORDER BY number") == [(None,)] * 3 + [("n3",), ("n4",), ("n5",)]


def test_a_batch_of_nulls_changes_no_type(broker: EmbeddedBroker, place: Place) -> None:
    """Rows are dictionaries: a column that is null throughout a batch keeps the type it has in the table."""
    place.do("CREATE TABLE numbers (number BIGINT, amount BIGINT, note TEXT)")
    source = Input(broker.bootstrap, 1)
    source.write(range(9))

    def ragged(row: Any) -> dict[str, Any]:
        value = int(row.value)
        made: dict[str, Any] = {"number": value}
        return {**made, "amount": None} if value < 3 else {**made, "amount": value} if value < 6 else made

    source.run(ragged, place.target(table="numbers"), transaction_records_max=3)
    expected = [(n, n if 3 <= n < 6 else None, None) for n in range(9)]
    assert place.ask("SELECT number, amount, note FROM numbers ORDER BY number") == expected


def test_a_table_is_made_with_the_types_of_the_rows(broker: EmbeddedBroker, place: Place) -> None:
    """create=True, with `types` for what Arrow cannot tell; a column without any value needs a name for its type."""
    source = Input(broker.bootstrap, 1)
    source.write([1])
    made: dict[str, Any] = {
        "id": 1,
        "price": Decimal("12.50"),
        "at": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        "tags": ["a", "b"],
        "address": {"city": "Ulm"},
        "note": None,
    }
    with pytest.raises(semel.ConfigError, match=r"Column 'note' is null .* types=\{\"note\": \"text\"\}"):
        source.run(lambda row: made, place.target(table="orders", create=True))
    types = {"note": "text", "address": "jsonb" if place.kind == "postgres" else "TEXT"}
    source.run(lambda row: made, place.target(table="orders", create=True, types=types))
    [row] = place.ask("SELECT price, tags, address, at, note FROM orders")
    if place.kind == "postgres":
        assert row == (Decimal("12.50"), ["a", "b"], {"city": "Ulm"}, made["at"], None)
    else:
        assert row == ("12.50", '["a", "b"]', '{"city": "Ulm"}', "2026-01-02 03:04:05+00:00", None)


REFUSED_AT_THE_START: list[tuple[str, dict[str, Any], str]] = [
    ("", {}, "has no table 'numbers'"),
    ("CREATE TABLE numbers (number BIGINT)", {"mode": "upsert", "key": ["number"]}, "no primary key or unique index"),
    ("CREATE TABLE numbers (number BIGINT)", {"mode": "upsert", "key": ["id"]}, "has no column 'id'"),
    ("CREATE TABLE numbers (id BIGINT); CREATE TABLE failed (x BIGINT)", {"dead_letter": "failed"}, "no column 'pipel"),
    ("CREATE TABLE numbers (id BIGINT)", {"dead_letter": "numbers"}, "name another one"),
]


@pytest.mark.parametrize(("prepare", "options", "words"), REFUSED_AT_THE_START)
def test_what_is_wrong_with_a_table_is_an_error_before_anything_is_read(
    place: Place, prepare: str, options: dict[str, Any], words: str
) -> None:
    """No broker is there to read from, and none is needed to find out."""
    if prepare:
        place.do(*prepare.split(";"))
    with pytest.raises(semel.ConfigError, match=words):
        semel.run(
            number,
            to=place.target(table="numbers", **options),
            bootstrap="127.0.0.1:1",
            topics=["orders"],
            name="billing",
        )


@pytest.mark.parametrize(
    "options",
    [{"table": "nowhere.orders"}, {"table": "nowhere.orders", "create": True}, {"dead_letter": "nowhere.orders"}],
    ids=["table", "create", "dead_letter"],
)
def test_a_schema_that_is_not_there_is_one_error_before_anything_is_read(place: Place, options: dict[str, Any]) -> None:
    """With the schema's name and what to do."""
    place.do("CREATE TABLE numbers (number BIGINT)")
    what_now = "CREATE SCHEMA" if place.kind == "postgres" else "leave the part before the dot out"
    with pytest.raises(semel.ConfigError, match=f"no schema 'nowhere' for table 'nowhere.orders'.*{what_now}"):
        semel.run(
            number,
            to=place.target(**{"table": "numbers", **options}),
            bootstrap="127.0.0.1:1",
            topics=["orders"],
            name="billing",
        )


@pytest.mark.parametrize("new_columns", ["refuse", "add", "ignore"])
@pytest.mark.parametrize("mode", ["append", "upsert"])
@pytest.mark.parametrize("made", ["AS IDENTITY", "AS (number * 2) STORED"])
def test_values_for_a_column_that_the_database_makes_are_one_error(
    broker: EmbeddedBroker, place: Place, made: str, mode: str, new_columns: str
) -> None:
    """In every mode alike: COPY would overwrite an identity, and an upsert could not."""
    if place.kind == "sqlite" and "IDENTITY" in made:
        pytest.skip("SQLite has none")
    place.do(
        f"CREATE TABLE numbers (number BIGINT NOT NULL PRIMARY KEY, twice BIGINT GENERATED ALWAYS {made}, at BIGINT)"
    )
    source = Input(broker.bootstrap, 1)
    source.write(range(3))
    key = {"key": ["number"]} if mode == "upsert" else {}
    target = place.target(table="numbers", mode=mode, new_columns=new_columns, **key)
    with pytest.raises(semel.ConfigError, match=r"column 'twice' .* GENERATED ALWAYS.*[Dd]rop it from the rows"):
        source.run(lambda row: {"number": int(row.value), "twice": 7}, target)
    assert numbers(place) == []
    source.run(lambda row: {"number": int(row.value), "at": 1}, target)
    assert numbers(place) == [0, 1, 2]


def test_a_list_of_several_types_is_one_clear_error(broker: EmbeddedBroker, server: Postgres) -> None:
    """As JSON has them. What the list holds, and how it gets into jsonb."""
    place = make_postgres(server)
    place.do("CREATE TABLE numbers (number bigint, list jsonb)")
    source, mixed = Input(broker.bootstrap, 1), [1, "a", None, 2.5]
    source.write([0])
    with pytest.raises(
        semel.RecordFailed, match=r"column 'list': a list of values of types int, str and float .*json\.dumps\(\)\. The"
    ):
        source.run(lambda row: {"number": 1, "list": mixed}, place.target(table="numbers"))
    with pytest.raises(semel.ConfigError, match=r"Column 'list' .* is list<item: int64> .* is jsonb.*json\.dumps\(\)"):
        source.run(lambda row: {"number": 1, "list": [1, 2]}, place.target(table="numbers"))
    source.run(lambda row: {"number": 1, "list": json.dumps(mixed)}, place.target(table="numbers"))
    assert place.ask("SELECT list FROM numbers") == [(mixed,)]


@pytest.mark.parametrize(
    ("rights", "mode", "words"),
    [
        ("SELECT", {}, "no right to INSERT on table 'numbers'"),
        ("INSERT, SELECT", {"mode": "upsert", "key": ["number"]}, "no right to UPDATE on table 'numbers'"),
        ("INSERT, SELECT, UPDATE", {"mode": "upsert", "key": ["number"], "delete": "gone"}, "no right to DELETE"),
    ],
)
def test_a_missing_right_is_an_error_before_anything_is_read(
    server: Postgres, rights: str, mode: dict[str, Any], words: str
) -> None:
    """It names the right and the table."""
    place = make_postgres(server)
    role = f"writer_{place.address.partition('shop_')[2][:8]}"
    place.do(
        "CREATE TABLE numbers (number bigint PRIMARY KEY)",
        f"CREATE ROLE {role} LOGIN",
        f"GRANT {rights} ON numbers TO {role}",
        f"GRANT CREATE ON SCHEMA public TO {role}",
    )
    target = semel.Postgres(place.address.replace("postgres@", f"{role}@"), table="numbers", **mode)
    with pytest.raises(semel.DatabaseError, match=words):
        semel.run(number, to=target, bootstrap="127.0.0.1:1", topics=["orders"], name="billing")


def test_a_login_or_database_that_is_refused_is_an_error_at_once() -> None:
    """Trying again would not help: a wrong password, an unknown user, an unknown database."""
    with Postgres(password="right") as server:
        for uri, kind, words in (
            (server.tcp_uri.replace("right", "wrong"), semel.AuthenticationFailed, "password authentication failed"),
            (server.uri.replace("postgres@", "nobody@"), semel.AuthenticationFailed, 'role "nobody" does not exist'),
            (server.uri.replace("/postgres?", "/nowhere?"), semel.DatabaseError, 'database "nowhere" does not exist'),
        ):
            with pytest.raises(kind, match=words) as refused:
                semel.run(
                    number,
                    to=semel.Postgres(uri, table="numbers"),
                    bootstrap="127.0.0.1:1",
                    topics=["orders"],
                    name="billing",
                )
            assert "wrong" not in str(refused.value)


def test_a_folder_that_is_not_there_is_an_error_at_once(tmp_path: Path) -> None:
    """SQLite makes files, not folders."""
    with pytest.raises(semel.DatabaseUnreachable, match="there is no folder"):
        semel.run(
            number,
            to=semel.SQLite(tmp_path / "nowhere" / "shop.db", table="numbers"),
            bootstrap="127.0.0.1:1",
            topics=["orders"],
            name="billing",
        )


def test_a_function_that_returns_something_else_is_told_what_to_return(broker: EmbeddedBroker, place: Place) -> None:
    """Bytes are right for a topic, not for a table."""
    source, target = Input(broker.bootstrap, 1), place.target(table="numbers", create=True)
    source.write([1])
    with pytest.raises(semel.RecordFailed, match="return a dictionary from column to value"):
        source.run(lambda row: row.value, target)
    with pytest.raises(semel.RecordFailed, match=r"return a pyarrow\.Table"):
        source.run(lambda table: {"out": table}, target, by="table")


def test_values_of_other_types_are_the_fault_of_their_rows(broker: EmbeddedBroker, place: Place) -> None:
    """The first batches decide what a column holds; whole numbers may get fractions, decimals may grow."""
    source = Input(broker.bootstrap, 1)
    target = place.target(table="amounts", create=True, types={"price": "numeric"}, dead_letter="failed")
    values: list[Any] = ["1.5", "20.25", "12345.125", "text", None]
    source.write(json.dumps(value).encode() for value in values)

    def price(row: Any) -> dict[str, Any]:
        value = json.loads(row.value)
        return {"id": row.offset, "price": value if value in ("text", None) else Decimal(value)}

    source.run(price, target, transaction_records_max=1)
    found = [None if one is None else Decimal(one) for (one,) in place.ask("SELECT price FROM amounts ORDER BY id")]
    assert found == [Decimal("1.5"), Decimal("20.25"), Decimal("12345.125"), None]
    [(error,)] = place.ask("SELECT error FROM failed")
    assert "a value of type str does not fit a column of type decimal128" in error


@pytest.mark.parametrize("new_columns", ["refuse", "add", "ignore"])
def test_columns_that_differ_by_case_are_named(broker: EmbeddedBroker, place: Place, new_columns: str) -> None:
    """At once, in one error: they were retried as a restarted database, or ended as a syntax error."""
    place.do("CREATE TABLE numbers (number BIGINT)")
    source = Input(broker.bootstrap)
    source.write(range(3))
    with pytest.raises(semel.ConfigError, match=r"'Number'|\(Number\)") as refused:
        source.run(lambda row: {"Number": 1}, place.target(table="numbers", new_columns=new_columns))
    assert "The table has 'number': names must agree in upper and lower case." in str(refused.value)


def test_a_misspelt_column_in_types_is_refused(broker: EmbeddedBroker, place: Place) -> None:
    """Otherwise the column silently gets the default type."""
    source = Input(broker.bootstrap)
    source.write(range(3))
    with pytest.raises(semel.ConfigError, match=r"'numbr' that the rows do not have.*did you mean 'number'"):
        source.run(number, place.target(table="numbers", create=True, types={"numbr": "integer"}))
    assert not place.has("numbers")


@pytest.mark.parametrize(
    ("value", "column"),
    [(1, "boolean"), (True, "bigint"), (1, "jsonb"), (pa.scalar(5, pa.int32()), "boolean"), (1.5, "date")],
)
@pytest.mark.parametrize("dead_letter", [None, "failed"])
def test_types_without_a_conversion_are_one_error_with_the_column(
    broker: EmbeddedBroker, server: Postgres, value: Any, column: str, dead_letter: str | None
) -> None:
    """Both types and what to do. It is a matter of all rows, so none is put aside."""
    place = make_postgres(server)
    place.do(f"CREATE TABLE numbers (id bigint, paid {column})")
    source = Input(broker.bootstrap)
    source.write(range(3))
    array = pa.array([value]) if not isinstance(value, pa.Scalar) else pa.array([value.as_py()], value.type)
    target = place.target(table="numbers", dead_letter=dead_letter)
    with pytest.raises(semel.ConfigError, match=f"Column 'paid' .* is {array.type} .* is {column}: .*Convert it"):
        source.run(lambda table: pa.table({"id": [1], "paid": array}), target, by="table")


def test_a_domain_that_refuses_null_is_a_type_like_others(broker: EmbeddedBroker, server: Postgres) -> None:
    """The look for a conversion must not try it on a null."""
    place = make_postgres(server)
    place.do("CREATE DOMAIN amount AS bigint NOT NULL CHECK (VALUE >= 0)", "CREATE TABLE numbers (number amount)")
    source = Input(broker.bootstrap)
    source.write(range(3))
    source.run(lambda row: {"number": int(row.value)}, place.target(table="numbers"))
    assert numbers(place) == [0, 1, 2]
