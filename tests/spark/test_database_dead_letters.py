"""Rows of Spark that a table does not take: in the dead-letter table of the same database, each once, with its reason.

Spark's part is played by `small_stream.py`; `test_database_spark.py` has the real one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from database_modes import KEYS, MODES, Row, parts_of, prepare, rows_of, sqlite_place, target_at, target_for
from small_stream import Frame, Stream, use

import semel
from semel.bridges.spark_job import write_batch_into
from semel.bridges.spark_sink import DatabaseSink
from semel.bridges.targets import DatabaseTarget
from semel.errors import ConfigError, TooManyDeadLetters, ValueDoesNotFit
from semel.testing.postgres import Postgres

NAME = "pipeline"
ROWS = 2_000
BAD = {5, 700, 1_300, 1_301, 1_990, 2_950}
"""Ids of the first two batches that a constraint refuses, in both tasks; the last one is the last of its key."""


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with Postgres() as started:
        yield started


@pytest.fixture
def postgres(server: Postgres) -> Postgres:
    """With an empty database."""
    with psycopg.connect(server.uri, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    return server


@pytest.fixture(params=["Postgres", "SQLite"])
def place(request: pytest.FixtureRequest, postgres: Postgres, tmp_path: Path) -> str:
    """An empty database."""
    return sqlite_place(tmp_path) if request.param == "SQLite" else postgres.uri


@pytest.fixture
def stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stream:
    made = Stream(tmp_path / "checkpoint")
    use(made, monkeypatch)
    return made


def sink_for(target: DatabaseTarget) -> DatabaseSink:
    return DatabaseSink(name=NAME, to=target)


def ask(target: DatabaseTarget, query: str) -> list[tuple[Any, ...]]:
    with target.open() as database:
        return [tuple(row) for row in database.execute(query).rows]


def do(place: str, *statements: str) -> None:
    with target_at(place, table="any").open() as database:
        for statement in statements:
            database.execute(statement)


def letters(target: DatabaseTarget) -> dict[int, str]:
    """The id of each refused row, and its error; fails if one is there twice."""
    found = [(json.loads(bytes(value))["id"], error) for value, error in ask(target, "SELECT value, error FROM failed")]
    assert len(dict(found)) == len(found), "a dead letter is there twice"
    return dict(found)


@pytest.mark.parametrize("pad", ["", "x" * 1_000], ids=["few", "many"])
def test_rows_that_do_not_fit_are_put_aside_and_the_others_are_written(place: str, stream: Stream, pad: str) -> None:
    """A null key, a constraint and a missing value: found in tasks or by the database, with pipeline, batch and row."""
    do(place, "CREATE TABLE t (id BIGINT PRIMARY KEY, n BIGINT CHECK (n <> 33), must TEXT NOT NULL, pad TEXT)")
    target = target_at(place, table="t", mode="upsert", key=["id"], dead_letter="failed")
    count = 400
    table = pa.table(
        {
            "id": pa.array([None if n == 7 else n for n in range(count)], pa.int64()),
            "n": pa.array(range(count), pa.int64()),
            "must": pa.array([None if n == 399 else "x" for n in range(count)]),
            "pad": [pad] * count,
        }
    )
    sink = sink_for(target)
    stream.run(sink, [Frame([table.slice(0, 300), table.slice(300)])])
    good = [n for n in range(count) if n not in (7, 33, 399)]
    assert [int(n) for (n,) in ask(target, "SELECT n FROM t ORDER BY n")] == good
    found = ask(target, "SELECT pipeline, topic, partition, key, value, error, at FROM failed")
    by_number = {json.loads(bytes(value))["n"]: (rest, error, at) for *rest, value, error, at in found}
    assert sorted(by_number) == [7, 33, 399]
    assert len(found) == 3
    for rest, error, at in by_number.values():
        assert rest == [NAME, None, None, None]
        assert error.startswith("batch 0: ValueDoesNotFit: ")
        assert at is not None
    assert "column 'id': the key is null" in by_number[7][1]
    assert "check" in by_number[33][1].lower()
    assert "must" in by_number[399][1]
    assert (sink.recent[-1].records, sink.recent[-1].dead_letters) == (count - 3, 3)


def test_rows_with_the_columns_of_a_record_say_where_it_came_from(place: str, stream: Stream) -> None:
    """Topic, partition and offset are known if the query has kept them."""
    target = target_at(place, table="t", mode="upsert", key=["id"], create=True, dead_letter="failed")
    rows = pa.table(
        {
            "id": pa.array([1, None], pa.int64()),
            "topic": ["orders", "orders"],
            "partition": pa.array([3, 4], pa.int32()),
            "offset": pa.array([17, 18], pa.int64()),
        }
    )
    stream.run(sink_for(target), [Frame([rows])])
    assert ask(target, 'SELECT topic, partition, "offset" FROM failed') == [("orders", 4, 18)]


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_comes_out_as_if_the_bad_rows_had_not_been_there(place: str, stream: Stream, mode: str) -> None:
    """Rows are written in halves around the bad ones, and that must not change which row of a key counts."""
    target = target_for(place, mode, dead_letter="failed")
    prepare(target, mode)
    nothing = Frame([parts_of(0, ROWS)[0].slice(0, 0)])
    stream.run(sink_for(target), [nothing])  # which creates the table
    offered = [row for batch in range(2) for row in rows_of(batch, ROWS)]
    best = max((row for row in offered if row[0] % KEYS == 3), key=lambda row: row[1])
    bad = BAD | {best[0]} if mode != "statement" else {row[0] for row in offered if row[0] % KEYS == 5}
    refuse(place, "out" if mode != "statement" else "counts", "id" if mode != "statement" else "key", bad)
    stream.run(sink_for(target), [nothing, *(Frame(parts_of(batch, ROWS)) for batch in range(2))])
    kept: list[Row] = [row for row in offered if row[0] not in bad]
    assert [tuple(map(int, row)) for row in ask(target, MODES[mode].query)] == MODES[mode].expected(kept)
    found = sorted(json.loads(bytes(value))["id"] for (value,) in ask(target, "SELECT value FROM failed"))
    assert found
    assert set(found) <= bad
    if mode not in ("upsert", "newest"):  # where a row that does not count anyway is not looked at
        assert found == sorted(row[0] for row in offered if row[0] in bad)


def refuse(place: str, table: str, column: str, bad: set[int]) -> None:
    """SQLite cannot add a constraint to a table, but a trigger refuses as one would."""
    values = ", ".join(str(number % KEYS if column == "key" else number) for number in sorted(bad))
    if place.startswith("postgresql:"):
        do(place, f"ALTER TABLE {table} ADD CHECK ({column} NOT IN ({values}))")
        return
    do(
        place,
        f"CREATE TRIGGER refuse BEFORE INSERT ON {table} WHEN NEW.{column} IN ({values}) "
        "BEGIN SELECT RAISE(ABORT, 'this id is refused'); END",
    )


def test_two_rows_of_one_key_are_refused_though_a_bad_row_parts_them(place: str, stream: Stream) -> None:
    """By halves each of them would be alone, and chance would decide which one stays."""
    do(place, "CREATE TABLE t (id BIGINT PRIMARY KEY, n BIGINT CHECK (n <> 33))")
    target = target_at(place, table="t", mode="upsert", key=["id"], dead_letter="failed")
    rows = pa.table({"id": [999, *range(100, 150), 999], "n": [1, 33, *range(101, 150), 2]})
    with pytest.raises(ConfigError, match="Two rows of one batch have the key"):
        stream.run(sink_for(target), [Frame([rows])])
    assert ask(target, "SELECT * FROM t") == []


def test_values_that_the_columns_type_refuses_are_named_with_column_and_both_types(
    postgres: Postgres, stream: Stream
) -> None:
    """Too long, too large, rounded, unreadable; and text that Postgres does not take at all."""
    do(postgres.uri, "CREATE TABLE t (id bigint, name varchar(3), small smallint, cents numeric(9,2), day date)")
    target = semel.Postgres(postgres.uri, table="t", dead_letter="failed")
    good = {"id": 0, "name": "tea", "small": 7, "cents": 1.25, "day": "2026-01-02"}
    wrong: dict[int, dict[str, Any]] = {
        1: {"name": "coffee"},
        2: {"small": 70_000},
        3: {"cents": 1.255},
        4: {"day": "someday"},
        5: {"name": "a\0"},
    }
    rows = [{**good, "id": number, **wrong.get(number, {})} for number in range(8)]
    stream.run(sink_for(target), [Frame([pa.Table.from_pylist(rows)])])
    assert ask(target, "SELECT id FROM t ORDER BY id") == [(0,), (6,), (7,)]
    found = letters(target)
    assert set(found) == set(wrong)
    assert "column 'name': coffee of type string cannot be kept exactly as character varying(3)" in found[1]
    assert "Column 'small', int64 in the rows and smallint in the table" in found[2]
    assert "column 'cents': 1.255 of type double cannot be kept exactly as numeric(9,2)" in found[3]
    assert "column 'day': someday of type string cannot be kept exactly as date" in found[4]
    assert "column 'name': text with the character U+0000" in found[5]


@pytest.mark.parametrize("pad", ["", "x" * 200_000], ids=["few", "many"])
def test_bytes_that_are_no_text_are_a_row_that_does_not_fit(place: str, stream: Stream, pad: str) -> None:
    """Spark's cast of bytes to a string keeps whatever they are."""
    data = pa.array([b"good", b"\xff\xfe", b"fine"])
    text = pa.Array.from_buffers(pa.string(), 3, data.buffers())
    rows = pa.table({"id": [0, 1, 2], "word": text, "pad": [pad] * 3})
    target = target_at(place, table="t", create=True, dead_letter="failed")
    stream.run(sink_for(target), [Frame([rows])])
    assert ask(target, "SELECT word FROM t ORDER BY id") == [("good",), ("fine",)]
    assert "Row 1, column 'word': its bytes are not UTF-8" in letters(target)[1]
    [(value,)] = ask(target, "SELECT value FROM failed")
    assert json.loads(bytes(value))["word"] == "\\xff\\xfe"


def test_a_constraint_that_is_checked_at_the_commit_is_found_too(postgres: Postgres, stream: Stream) -> None:
    """DEFERRABLE INITIALLY DEFERRED: without care the whole batch would fail with no row to blame."""
    do(
        postgres.uri,
        "CREATE TABLE parents (id bigint PRIMARY KEY)",
        "INSERT INTO parents SELECT generate_series(0, 9)",
        "CREATE TABLE t (id bigint REFERENCES parents DEFERRABLE INITIALLY DEFERRED)",
    )
    target = semel.Postgres(postgres.uri, table="t", dead_letter="failed")
    stream.run(sink_for(target), [Frame([pa.table({"id": [3, 12, 4, 13]})])])
    assert ask(target, "SELECT id FROM t ORDER BY id") == [(3,), (4,)]
    assert set(letters(target)) == {12, 13}


def test_an_event_too_late_for_its_id_is_put_aside(place: str, stream: Stream) -> None:
    """Its id may have expired, so nobody can tell whether it is a repeat."""
    target = target_at(
        place,
        table="t",
        mode="dedup",
        key=["id"],
        event_time="at",
        keep=timedelta(hours=1),
        create=True,
        dead_letter="failed",
    )
    now = datetime.now(UTC).replace(microsecond=0)

    def frame(ids: list[int], hours: int | None) -> Frame:
        at = None if hours is None else now - timedelta(hours=hours)
        return Frame([pa.table({"id": ids, "at": pa.array([at] * len(ids), pa.timestamp("us", "UTC"))})])

    stream.run(sink_for(target), [frame([1], 0), frame([2], 5), frame([3, 1], 0), frame([4], None)])
    assert [int(n) for (n,) in ask(target, "SELECT id FROM t ORDER BY id")] == [1, 3]
    found = letters(target)
    assert set(found) == {2, 4}
    assert "older than keep=" in found[2]
    assert "the event time is null" in found[4]


@pytest.mark.parametrize("where", ["in a task", "in the database"])
def test_too_many_dead_letters_of_a_batch_stop_the_query_and_nothing_is_written(
    place: str, stream: Stream, where: str
) -> None:
    """A query that is wrong in every row must not move a whole topic aside; earlier batches stay as they are."""
    do(place, "CREATE TABLE t (id BIGINT PRIMARY KEY, n BIGINT CHECK (n < 50))")
    target = target_at(place, table="t", mode="upsert", key=["id"], dead_letter="failed", dead_letter_max=3)
    key = pa.array([None if where == "in a task" and n >= 50 else n for n in range(100)], pa.int64())
    bad = pa.table({"id": key, "n": range(100)})
    few = pa.table({"id": [200, 201], "n": [1, 99]})
    with pytest.raises(TooManyDeadLetters, match="More than dead_letter_max=3 rows"):
        stream.run(sink_for(target), [Frame([few]), Frame([bad])])
    assert [int(n) for (n,) in ask(target, "SELECT id FROM t")] == [200]
    assert set(letters(target)) == {201}
    stream.run(sink_for(target), [Frame([few]), Frame([bad.slice(48, 5)])])
    assert len(ask(target, "SELECT * FROM failed")) == 4


def test_a_replayed_batch_and_a_repeated_job_put_nothing_aside_again(place: str, stream: Stream) -> None:
    """The dead letters are in the transaction of the rows, so the ledger speaks for both."""
    do(place, "CREATE TABLE t (id BIGINT CHECK (id <> 3))")
    target = target_at(place, table="t", dead_letter="failed")
    frame: Any = Frame([pa.table({"id": [1, 2, 3]})])
    stream.run(sink_for(target), [frame])
    stream.forget_commit()
    stream.run(sink_for(target), [frame])
    assert set(letters(target)) == {3}
    write: Any = write_batch_into
    assert write(target, frame, name="job", job_id="monday").dead_letters == 1
    assert write(target, frame, name="job", job_id="monday").skipped
    errors = [error for (error,) in ask(target, "SELECT error FROM failed WHERE pipeline = 'job'")]
    assert len(errors) == 1
    assert errors[0].startswith("job monday: ValueDoesNotFit")


def test_dead_letters_of_several_tables_are_written_with_all_of_them(place: str, stream: Stream) -> None:
    """Each output has its own dead letters; if the transaction fails, none of them is there."""
    do(place, "CREATE TABLE a (id BIGINT CHECK (id <> 1))", "CREATE TABLE b (id BIGINT CHECK (id <> 2))")
    target = target_at(place, table="a", dead_letter="failed")
    other = target_at(place, table="b", dead_letter="failed")
    strict = target_at(place, table="b")
    sink = sink_for(target)

    def each(to: DatabaseTarget) -> Any:
        def write(df: Any, batch_id: int) -> None:
            with sink.batch(batch_id) as batch:
                batch.write(df)
                batch.write(df, to=to)

        return write

    frame = Frame([pa.table({"id": [0, 1, 2, 3]})])
    with pytest.raises(ValueDoesNotFit):
        stream.run(each(strict), [frame])
    assert ask(target, "SELECT * FROM a") == []
    assert ask(target, "SELECT * FROM failed") == []
    stream.run(each(other), [frame])
    assert [int(n) for (n,) in ask(target, "SELECT id FROM a ORDER BY id")] == [0, 2, 3]
    assert [int(n) for (n,) in ask(target, "SELECT id FROM b ORDER BY id")] == [0, 1, 3]
    assert set(letters(target)) == {1, 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dead_letter": "t"}, "is the table that rows go to"),
        ({"dead_letter": "narrow"}, "it has no column 'pipeline'"),
        ({"dead_letter": "failed", "dead_letter_max": -1}, "must not be negative"),
    ],
)
def test_a_dead_letter_table_that_cannot_work_is_refused_before_the_query_starts(
    place: str, options: dict[str, Any], message: str
) -> None:
    """K3: `check` is what write_stream calls first."""
    do(place, "CREATE TABLE t (id BIGINT)", "CREATE TABLE narrow (id BIGINT)")
    frame: Any = Frame([pa.table({"id": [1]})])
    with pytest.raises(ConfigError, match=message):
        sink_for(target_at(place, table="t", **options)).check(frame)


@pytest.mark.parametrize("pad", ["", "x" * 200_000], ids=["few", "many"])
def test_without_a_dead_letter_table_the_error_shows_the_row(place: str, stream: Stream, pad: str) -> None:
    """Nothing of the batch is written, and the values tell which row to look for."""
    do(place, "CREATE TABLE t (id BIGINT, n BIGINT CHECK (n <> 33), pad TEXT)")
    target = target_at(place, table="t")
    rows = pa.table({"id": range(5), "n": [1, 33, 2, 33, 3], "pad": [pad] * 5})
    with pytest.raises(ValueDoesNotFit, match=r'The row: \{"id": 1, "n": 33, ') as refused:
        stream.run(sink_for(target), [Frame([rows])])
    assert len(str(refused.value)) < 2_000, "it does not show all of a long row"
    assert ask(target, "SELECT * FROM t") == []
