"""Nothing is rounded, cut off or shifted in silence: a value that would be changed is a row that does not fit."""

from __future__ import annotations

import json
import re
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from database_scene import Input, Place, broker, make_postgres, place, server

import semel
from semel.bridges.merge import Rule
from semel.bridges.spark_row_checks import find_misfits
from semel.bridges.value_ranges import check_ranges
from semel.testing.embedded import EmbeddedBroker
from semel.testing.postgres import Postgres

__all__ = ["broker", "place", "server"]

KEPT_OR_REFUSED: list[tuple[str, list[Any], list[Any]]] = [
    # The column's type, values that it keeps, and values that it would change.
    ("timestamp", ["2026-01-01T10:00:00.123456", "2026-01-01"], ["2026-01-01T10:00:00+05:00", "1/2/2026"]),
    ("timestamptz", ["2026-01-01T10:00:00Z", "2026-01-01 10:00+05:30"], ["2026-01-01 10:00:00", "2026-01-01"]),
    ("date", ["2026-01-01"], ["2026-01-01 23:59:59", "yesterday"]),
    ("time", ["10:00", "23:59:59.5"], ["2026-01-01 10:00", "10:00+02", "10:00:00.1234567"]),
    ("timestamp(0)", ["2026-01-01 10:00:00"], ["2026-01-01 10:00:00.9"]),
    ("timestamptz(3)", ["2026-01-01 10:00:00.123Z"], ["2026-01-01 10:00:00.1239Z"]),
    ("interval second(0)", ["2 s"], ["1.9 s"]),
    ("interval", ["1 day 2:03", "0.123456 s"], ["0.1234567 s"]),
    ("bit(3)", ["101"], ["10101", "1"]),
    ("bit varying(3)", ["1"], ["10101"]),
    ("name", ["x"], ["x" * 70]),
    ('"char"', ["a"], ["abc"]),
    ("varchar(5)", ["abcde"], ["abcdefgh"]),
    ("numeric(12,2)", ["1.23"], ["1.239"]),
    ("money", ["1.24"], ["1.239"]),
    ("uuid", ["0f0e3c1c-9d3c-4c1e-8f5b-0a7e3e6f5a11"], ["none"]),
    ("jsonb", ['{"a": 1}'], ["{"]),
    ("varchar(5)[]", [["abcde"], [], None], [["abcdefgh"], ["a", "abcdefgh"]]),
    ("varchar(5)[]", ["{abcde}"], ["{a,abcdefgh}"]),
    ("integer[]", [[1.0, 2.0]], [[1.5, 2.5]]),
    ("numeric(12,2)[]", [[1.25, None]], [[1.239]]),
    ("date[]", [["2026-01-01"]], [["2026-01-01", "2026-01-01 10:00"]]),
    ("numeric(5,-2)", [1200], [1234]),
    ("varchar(5)", ["abcd ", None], ["abcde ", "     ."]),
    ("varchar(5)[]", [["abcd "]], [["a", "abcde "]]),
    ("char(5)", ["abc", "abc  "], ["abcdefgh", "abcde "]),
    ("varchar(3)", [12, 123], [1234]),
    ("varchar(4)", [True], [False]),
    ("char(3)", [1.5], [1.25]),
    ("tsrange", ["[2026-01-01 10:00,)", "empty"], ["[2026-01-01 10:00+05,)", "[yesterday,)"]),
    ("tstzrange", ['["2026-01-01 10:00Z",2026-01-02T10:00+01)', "(,)"], ["[2026-01-01 10:00,)", "[,2026-01-01 10:00)"]),
    ("daterange", ["[2026-01-01,2026-01-31]"], ["[2026-01-01 23:59:59,)"]),
    ("numrange", ["[1.239,2)"], ["[2,1)"]),
    ("tstzrange[]", [["[2026-01-01 10:00Z,)"]], [["[2026-01-01 10:00Z,)", "[2026-01-01 10:00,)"]]),
    (
        "tstzmultirange",
        ["{[2026-01-01 10:00Z,2026-01-02 10:00Z), (2027-01-01 10:00Z,)}", "{}"],
        ["{[2026-01-01 10:00,)}"],
    ),
    ("shop_hours", ["[08:00,12:00:00.5]"], ["[08:00:00.1234567,)", "[08:00+02,)"]),
    ("name_of_five", ["abcde"], ["abcdefgh", "abcde "]),
    ("name_of_five[]", [["abcde"]], [["abcde "]]),
    ("names_of_five", [["abcde"]], [["abcde "]]),
    ("price", [1.25, 1], [1.239]),
    ("price", ["1.25"], ["1.239", "-1"]),
    ("low_price", [1.25], [1.239, 1000]),
    ("prices", [[1.25]], [[1.239]]),
    ("price[]", [[1.25]], [[1.239]]),
    ("whole", [1.0], [1.5]),
    ("moment", ["2026-01-01 10:00Z"], ["2026-01-01 10:00"]),
    ("open_hours", ["[2026-01-01 10:00Z,)"], ["[2026-01-01 10:00,)"]),
    ("pair", ["(1,abc)"], ["(x,abc)"]),
    ("jsonb", ['{"a": {"b": 1}, "c": 2}'], ['{"a": {"b": 1, "b": 2}}']),
    ("json", ['{"a": 1, "a": 2}'], ['{"a"}']),
]

MAKE_TYPES = """
CREATE DOMAIN name_of_five AS varchar(5);
CREATE DOMAIN names_of_five AS varchar(5)[];
CREATE DOMAIN price AS numeric(12,2) CHECK (VALUE >= 0);
CREATE DOMAIN low_price AS price CHECK (VALUE < 100);
CREATE DOMAIN prices AS numeric(12,2)[];
CREATE DOMAIN whole AS bigint;
CREATE DOMAIN moment AS timestamptz;
CREATE DOMAIN wall_clock AS timestamp;
CREATE DOMAIN open_hours AS tstzrange;
CREATE DOMAIN flag AS boolean;
CREATE TYPE shop_hours AS RANGE (subtype = time);
CREATE TYPE pair AS (number bigint, word text);
CREATE TYPE item AS (word text, price numeric(12,2))
"""


@pytest.mark.parametrize(("column_type", "kept", "changed"), KEPT_OR_REFUSED)
def test_postgres_keeps_a_value_or_its_row_is_refused(
    broker: EmbeddedBroker, server: Postgres, column_type: str, kept: list[Any], changed: list[Any]
) -> None:
    """What is refused is in the dead letters with its column, and the other rows are written."""
    place = make_postgres(server)
    place.do(*MAKE_TYPES.split(";"), f"CREATE TABLE kept (id bigint, v {column_type})")
    source = Input(broker.bootstrap, 1)
    source.write(json.dumps(value).encode() for value in [*kept, *changed])
    target = place.target(table="kept", dead_letter="failed")
    source.run(lambda row: {"id": row.offset, "v": json.loads(row.value)}, target)
    assert place.ask("SELECT id FROM kept ORDER BY id") == [(number,) for number in range(len(kept))]
    refused = place.ask('SELECT value, error FROM failed ORDER BY "offset"')
    assert [json.loads(bytes(value)) for value, _ in refused] == changed
    assert all("'v'" in error for _, error in refused), refused


@pytest.mark.parametrize(
    ("column_type", "value", "words"),
    [
        ("moment", pa.scalar(datetime(2026, 1, 1), pa.timestamp("us")), "depends on a time zone"),
        ("wall_clock", pa.scalar(datetime(2026, 1, 1), pa.timestamp("us", "UTC")), "depends on a time zone"),
        ("date", pa.scalar(datetime(2026, 1, 1), pa.timestamp("us", "UTC")), "depends on a time zone"),
        ("flag", pa.scalar(5, pa.int32()), "no conversion"),
        ("text", pa.scalar(b"hello"), "no conversion.*decode"),
        ("varchar(20)", pa.scalar(b"hello"), "no conversion.*decode"),
        ("text[]", pa.scalar([b"hello"]), "no conversion.*decode"),
        ("name_of_five", pa.scalar(b"a"), "no conversion.*decode"),
        ("item", pa.scalar("(a,1.239)"), "Postgres would round or cut off"),
        ("item[]", pa.scalar(["(a,1.239)"]), "Postgres would round or cut off"),
    ],
)
def test_a_type_that_would_change_values_in_silence_is_one_error_with_the_column(
    broker: EmbeddedBroker, server: Postgres, column_type: str, value: pa.Scalar, words: str
) -> None:
    """Domains as their base types; a composite type has fields of which nobody can tell what was given."""
    place = make_postgres(server)
    place.do(*MAKE_TYPES.split(";"), f"CREATE TABLE kept (id bigint, v {column_type})")
    source = Input(broker.bootstrap, 1)
    source.write([0])
    rows = pa.table({"id": [1], "v": pa.array([value.as_py()], value.type)})
    with pytest.raises(semel.ConfigError, match=rf"Column 'v' .* is {_full_name(column_type)}: .*{words}"):
        source.run(lambda table: rows, place.target(table="kept"), by="table")
    assert place.ask("SELECT * FROM kept") == []


def _full_name(column_type: str) -> str:
    return re.escape(column_type.replace("varchar", "character varying"))


_EAST = timezone(timedelta(hours=2))
_NOON = datetime(2026, 1, 1, 12)


@pytest.mark.parametrize(
    ("column_type", "first", "second"),
    [
        ("timestamp", _NOON, _NOON.replace(tzinfo=_EAST)),
        ("timestamptz", _NOON.replace(tzinfo=_EAST), _NOON),
        ("date", date(2026, 1, 1), _NOON),
        ("timestamp", _NOON, 5),
        ("timestamp[]", [_NOON], [_NOON.replace(tzinfo=UTC)]),
        ("time", time(10), time(10, tzinfo=_EAST)),
    ],
)
@pytest.mark.parametrize("batch", [1, 100], ids=["two batches", "one batch"])
def test_moments_of_two_kinds_in_one_column_are_not_shifted(
    broker: EmbeddedBroker, server: Postgres, column_type: str, first: Any, second: Any, batch: int
) -> None:
    """Arrow would drop the zone or the time of day; the row with the second kind is refused instead."""
    place = make_postgres(server)
    place.do(f"CREATE TABLE moments (id bigint, at {column_type})")
    source = Input(broker.bootstrap, 1)
    source.write([0, 1])
    target = place.target(table="moments", dead_letter="failed")
    source.run(lambda row: {"id": row.offset, "at": [first, second][row.offset]}, target, transaction_records_max=batch)
    assert place.ask("SELECT id FROM moments") == [(0,)]
    [(error,)] = place.ask("SELECT error FROM failed")
    assert "column 'at'" in error


@pytest.mark.parametrize("fraction", [1.5, Decimal("1.55")])
def test_a_fraction_after_batches_of_whole_numbers_is_kept(
    broker: EmbeddedBroker, place: Place, fraction: float | Decimal
) -> None:
    """Arrow would cut the fraction off, as the column has held whole numbers before."""
    place.do("CREATE TABLE prices (id bigint, price numeric(30, 2))")
    source = Input(broker.bootstrap, 1)
    source.write([0, 1])
    prices = [7, fraction]
    source.run(
        lambda row: {"id": row.offset, "price": prices[row.offset]},
        place.target(table="prices"),
        transaction_records_max=1,
    )
    found = place.ask("SELECT price FROM prices ORDER BY id")
    assert [Decimal(str(price)) for (price,) in found] == [7, Decimal(str(fraction))]


POISON: dict[str, tuple[str, list[bytes], dict[str, Any]]] = {
    "an integer beyond 2**53 beside a fraction": (
        "id numeric, x numeric",
        [b'{"id": 1, "x": 1}', b'{"id": 3, "x": 1.5}', b'{"id": 2, "x": 9007199254740993}'],
        {},
    ),
    "a decimal of 46 digits": (
        "id numeric, x numeric",
        [b'{"id": 1, "x": 1.5}', b'{"id": 2, "x": 1' + b"0" * 45 + b".5}"],
        {},
    ),
    "an event id with a fraction": ("id numeric", [b'{"id": 1}', b'{"id": 2.5}'], {"mode": "dedup", "key": ["id"]}),
    "the first event id with a fraction": (
        "id numeric",
        [b'{"id": 2.5}', b'{"id": 1}'],
        {"mode": "dedup", "key": ["id"]},
    ),
    "JSON of 5000 levels": ("id numeric, x text", [b'{"id": 1, "x": "a"}', b'{"id": 2, "x": "deep"}'], {}),
    "a value without a form in JSON": ("id numeric, x text", [b'{"id": 1, "x": "a"}', b'{"id": 2, "x": "delta"}'], {}),
    "a name with a lone surrogate": (
        "id numeric",
        [b'{"id": 1}', b'{"id": 2, "x\\ud800": 1}'],
        {"new_columns": "ignore"},
    ),
    "a name of Semel's own": ("id numeric", [b'{"id": 1}', b'{"id": 2, "semel_row": 1}'], {"new_columns": "ignore"}),
}


@pytest.mark.parametrize("keeps", [True, False], ids=["dead_letter", "no dead_letter"])
@pytest.mark.parametrize("case", POISON)
def test_one_poisonous_record_is_the_fault_of_that_record(
    broker: EmbeddedBroker, place: Place, case: str, keeps: bool
) -> None:
    """With dead_letter= it is put aside and the others are written; without, the error says where it is."""
    columns, values, options = POISON[case]
    deep: list[Any] = []
    for _ in range(5_000):
        deep = [deep]
    built = {"delta": {"a": timedelta(1)}, "deep": deep}

    def parse(row: Any) -> dict[str, Any]:
        made = json.loads(row.value, parse_float=Decimal if "decimal" in case else float)
        return {**made, "x": built[made["x"]]} if made.get("x") in built else made

    place.do(f"CREATE TABLE things ({columns})")
    source = Input(broker.bootstrap, 1)
    source.write(values)
    if not keeps:
        with pytest.raises(
            semel.RecordFailed, match=rf"{source.topic}.*ValueDoesNotFit|ValueDoesNotFit.*{source.topic}"
        ):
            source.run(parse, place.target(table="things", **options))
        return
    source.run(parse, place.target(table="things", dead_letter="failed", **options))
    assert [int(id) for (id,) in place.ask("SELECT id FROM things ORDER BY id")] in ([1], [1, 3])
    [(value, error)] = place.ask("SELECT value, error FROM failed")
    assert b'"id": 2' in bytes(value)
    assert error.startswith("ValueDoesNotFit")


def test_sqlite_keeps_a_value_or_its_row_is_refused(broker: EmbeddedBroker, tmp_path: Path) -> None:
    """Columns of numbers turn text into numbers, and NaN becomes null: what would not be the same is put aside."""
    place = Place("sqlite", str(tmp_path / "shop.db"))
    place.do("CREATE TABLE things (id integer, amount decimal(20,2), code integer, f real, t text)")
    rows: list[dict[str, Any]] = [
        {"amount": Decimal("1234567.50"), "code": "123", "f": 1.5, "t": 0.25},
        {"amount": Decimal("12345678901234567.89")},
        {"code": "0123"},
        {"f": float("nan")},
        {"t": 0.1 + 0.2},
        {"code": "A12"},
        {"code": "1" * 5_000},
    ]
    source = Input(broker.bootstrap, 1)
    source.write(range(len(rows)))
    source.run(lambda row: {"id": row.offset, **rows[row.offset]}, place.target(table="things", dead_letter="failed"))
    found = place.ask("SELECT * FROM things ORDER BY id")
    refused = place.ask('SELECT "offset", error FROM failed ORDER BY "offset"')
    assert found[0] == (0, 1234567.5, 123, 1.5, "0.25")
    assert refused.pop()[0] == 6, "more digits than Python reads as a number"
    assert found[-1] == (5, None, "A12", None, None)
    kept = {row[0]: row[4] for row in found}
    assert [at for at, _ in refused] == [number for number in range(1, 5) if number not in kept]
    assert {1, 2, 3} <= {at for at, _ in refused}
    assert 4 not in kept or float(kept[4]) == 0.1 + 0.2  # some releases of SQLite write 15 digits, others 17
    assert all(f"'{name}'" in error for (_, error), name in zip(refused, ("amount", "code", "f"), strict=False))


@pytest.mark.parametrize("keeps", [True, False], ids=["dead_letter", "no dead_letter"])
def test_a_moment_outside_of_the_calendar_is_the_fault_of_its_record(
    broker: EmbeddedBroker, place: Place, keeps: bool
) -> None:
    """It was taken for a lost connection by Postgres' driver, and ended the run with SQLite."""
    place.do("CREATE TABLE moments (id bigint, at timestamp)")
    source = Input(broker.bootstrap, 1)
    moments = [0, -(2**63) + 1, 253_402_300_799_999_999]
    source.write(range(3))

    def convert(records: pa.Table) -> pa.Table:
        ids = [int(value.as_py()) for value in records["value"]]
        at = pa.array([moments[number] for number in ids], pa.int64()).cast(pa.timestamp("us"))
        return pa.table({"id": ids, "at": at})

    target = place.target(table="moments", retry_s=0, **({"dead_letter": "failed"} if keeps else {}))
    if not keeps:
        with pytest.raises(semel.ValueDoesNotFit, match=rf"{source.topic}.*column 'at': a moment outside"):
            source.run(convert, target, by="table")
        return
    source.run(convert, target, by="table")
    assert place.ask("SELECT id FROM moments ORDER BY id") == [(0,), (2,)]
    assert place.ask('SELECT "offset" FROM failed') == [(1,)]


@pytest.mark.parametrize("database", ["Postgres", "SQLite"])
def test_rows_of_spark_are_checked_for_the_calendar_before_they_are_staged(database: str) -> None:
    """A task that fails over one value would be repeated for ever."""
    rows = pa.table({"at": pa.array([0, -(2**63) + 1], pa.timestamp("us", "UTC")), "f": [1.0, float("nan")]})
    found = find_misfits(rows.slice(0), Rule("t"), takes_nul=database == "SQLite")
    assert list(found) == [1]
    assert found[1][0] == "at"
    lists = pa.table({"at": pa.array([[0], [0, -(2**63) + 1], None], pa.list_(pa.timestamp("us")))})
    assert list(find_misfits(lists, Rule("t"), takes_nul=database == "SQLite")) == [1]
    with pytest.raises(semel.ValueDoesNotFit, match="column 'at': a moment outside"):
        check_ranges(lists, database)
    only = find_misfits(rows.select(["f"]), Rule("t"), takes_nul=database == "SQLite")
    assert list(only) == ([1] if database == "SQLite" else [])
