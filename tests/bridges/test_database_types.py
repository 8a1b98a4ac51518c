"""The table of types in docs/databases.md, compared with what the code makes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import semel
from semel.bridges.arrow_rows import normal_schema, normal_type, normalise
from semel.bridges.exact_casts import find_changed
from semel.bridges.merge import MODES
from semel.errors import ConfigError, ValueDoesNotFit

PAGE = Path(__file__).parents[2] / "docs" / "databases.md"
TYPES = {
    str(kind): kind
    for kind in (
        *(pa.bool_(), pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()),
        *(pa.float16(), pa.float32(), pa.float64(), pa.decimal128(12, 2)),
        *(pa.string(), pa.large_string(), pa.string_view(), pa.null()),
        *(pa.binary(), pa.large_binary(), pa.binary(16)),
        *(pa.date32(), pa.date64(), pa.time32("s"), pa.time64("us"), pa.duration("s")),
        *(pa.timestamp("s"), pa.timestamp("us"), pa.timestamp("ns")),
        *(pa.timestamp("us", "UTC"), pa.timestamp("ms", "Europe/Berlin")),
        *(pa.list_(pa.int32()), pa.list_(pa.string()), pa.list_(pa.list_(pa.int32()))),
        *(pa.struct([("a", pa.int32())]), pa.map_(pa.string(), pa.int32())),
        *(pa.uuid(), pa.dictionary(pa.int32(), pa.string())),
    )
}


def documented() -> dict[str, tuple[str, str]]:
    text = PAGE.read_text().partition("| Arrow | Postgres | SQLite |")[2].partition("\n\n")[0]
    found: dict[str, tuple[str, str]] = {}
    for line in text.splitlines()[2:]:
        kinds, postgres, sqlite = (part.strip() for part in line.strip("|").split("|"))
        for kind in re.findall(r"`([^`]+)`", kinds):
            found[kind] = (postgres.strip("`"), sqlite.strip("`"))
    return found


def test_the_table_of_types_is_what_the_code_makes() -> None:
    """Every type that is named there, and every type that is tried here."""
    postgres, sqlite = semel.Postgres("postgresql://nowhere", table="t").open(), semel.SQLite("x", table="t").open()
    made = {
        name: (postgres.sql_type(normal_type(kind)), sqlite.sql_type(normal_type(kind))) for name, kind in TYPES.items()
    }
    assert documented() == made


def test_the_modes_are_those_of_the_page() -> None:
    """Each with what it promises and what it costs."""
    named = re.findall(r"^\| `(\w+)`[^|]*\| [^|]+ \| [^|]+ \|$", PAGE.read_text(), re.MULTILINE)
    assert named[: len(MODES)] == list(MODES)


@pytest.mark.parametrize("kind", [pa.decimal256(50, 2), pa.month_day_nano_interval()])
def test_types_that_no_database_takes_are_refused(kind: pa.DataType) -> None:
    """With the words to put it right."""
    with pytest.raises(ConfigError, match=r"[Cc]ast the column"):
        normal_type(kind)


@pytest.mark.parametrize(
    "values",
    [
        pc.run_end_encode(pa.array([1, 1, 2])),  # pyright: ignore[reportAttributeAccessIssue]
        pa.array([[1]], pa.list_view(pa.int32())),
        pa.array([[1]], pa.large_list_view(pa.int32())),
        pa.array([[[1]]], pa.list_(pa.list_view(pa.int32()))),
        pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]),
        pa.nulls(1, pa.list_(pa.struct([("a", pa.int32()), ("a", pa.int32())]))),
    ],
    ids=lambda values: str(values.type),
)
def test_a_column_of_a_type_without_a_form_in_databases_is_one_error_with_its_name(values: pa.Array) -> None:
    """It was a bare KeyError of the type, or Arrow's own error about Python dictionaries."""
    with pytest.raises(ConfigError, match=rf"Column 'odd'.*{re.escape(str(values.type))}.*[Cc]ast"):
        normal_schema(pa.schema([("id", pa.int64()), ("odd", values.type)]))


SECONDS = 2**50
NESTED_MISFITS = {
    "NaN": pa.array([{"a": 1.0}, {"a": float("nan")}]),
    "infinity in a list": pa.array([[{"a": 1.0}], [{"a": float("inf")}]]),
    "NaN in a map": pa.array([[(1, 1.0)], [(1, float("nan"))]], pa.map_(pa.int32(), pa.float64())),
    "a duration that Python does not have": pa.array([{"a": 1}, {"a": SECONDS}], pa.struct([("a", pa.duration("s"))])),
    "a moment that Python does not have": pa.array([{"a": 1}, {"a": SECONDS}], pa.struct([("a", pa.timestamp("s"))])),
    "one key twice": pa.array([[("a", 1)], [("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int32())),
}


@pytest.mark.parametrize("case", NESTED_MISFITS)
def test_a_nested_value_without_a_form_in_json_is_the_fault_of_its_row(case: str) -> None:
    """JSON has no NaN, so that text with one is read by nobody; an error of Python's would end the run."""
    values = NESTED_MISFITS[case]
    with pytest.raises(ValueDoesNotFit, match=rf"Row 1, column 'v'.*{re.escape(str(values.type))}") as caught:
        normalise(pa.table({"v": values}))
    assert (caught.value.row, caught.value.column) == (1, "v")


@pytest.mark.parametrize("kind", [pa.duration("s"), pa.timestamp("s"), pa.timestamp("s", "UTC")])
@pytest.mark.parametrize("is_list", [False, True])
def test_a_moment_or_duration_too_large_for_microseconds_is_the_fault_of_its_row(
    kind: pa.DataType, is_list: bool
) -> None:
    """Python cannot show such a value, and failed while the error was written."""
    values = pa.array([[1], [SECONDS]], pa.list_(kind)) if is_list else pa.array([1, SECONDS], kind)
    table = pa.table({"v": values})
    with pytest.raises(ValueDoesNotFit, match=rf"Row 1, column 'v': .*{SECONDS}.* of type .*{re.escape(str(kind))}"):
        normalise(table)
    assert normalise(table.slice(0, 1)).num_rows == 1, "the row beside it is good"


def test_conversions_that_may_lose_something_are_looked_at() -> None:
    """And those that cannot are not."""
    lossy = [
        (pa.float64(), "bigint"),
        (pa.float32(), "numeric(10,2)"),
        (pa.decimal128(10, 4), "numeric(10,2)"),
        (pa.decimal128(10, 1), "integer"),
        (pa.timestamp("us"), "date"),
        (pa.timestamp("us"), "timestamp(0) without time zone"),
        (pa.string(), "numeric(10,2)"),
    ]
    exact = [
        (pa.int64(), "numeric"),
        (pa.int64(), "integer"),  # it is refused by Postgres itself
        (pa.decimal128(10, 2), "numeric(12,3)"),
        (pa.float64(), "real"),
        (pa.string(), "uuid"),
        (pa.date32(), "timestamp without time zone"),
    ]
    assert [find_changed("c", kind, "own", column) is not None for kind, column in lossy] == [True] * len(lossy)
    assert [find_changed("c", kind, "own", column) for kind, column in exact] == [None] * len(exact)


def test_maps_with_text_as_keys_become_json_objects() -> None:
    """So that m->>'a' finds something, at any depth. Maps with other keys stay lists of pairs, as JSON has none."""
    texts, numbers = pa.map_(pa.string(), pa.int32()), pa.map_(pa.int32(), pa.string())
    table = pa.table(
        {
            "m": pa.array([[("a", 1), ("b", None)], None, []], texts),
            "n": pa.array([[(1, "x")], None, []], numbers),
            "s": pa.array(
                [{"inner": [("a", 1)], "x": 1}, None, {"inner": None, "x": 2}],
                pa.struct([("inner", texts), ("x", pa.int32())]),
            ),
            "l": pa.array([[[("a", 1)], None], None, []], pa.list_(texts)),
        }
    )
    found = normalise(table).to_pydict()
    made = {name: [text and json.loads(text) for text in values] for name, values in found.items()}
    assert made == {
        "m": [{"a": 1, "b": None}, None, {}],
        "n": [[[1, "x"]], None, []],
        "s": [{"inner": {"a": 1}, "x": 1}, None, {"inner": None, "x": 2}],
        "l": [[{"a": 1}, None], None, []],
    }
    twice = pa.table({"m": pa.array([[("a", 1), ("a", 2)]], texts)})
    with pytest.raises(ValueDoesNotFit, match=r"'m'.*twice"):
        normalise(twice)
