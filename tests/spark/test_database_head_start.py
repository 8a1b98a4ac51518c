"""An append on one machine: tasks leave rows in files, and the driver loads them while the job is still running.

Spark's part is played by `small_stream.py`; `test_database_spark.py` has the real one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from database_modes import contents, expected, parts_of, target_for
from session_scene import wait_until
from small_stream import Frame, Stream, use

import semel
from semel.bridges import spark_head_start, spark_staging
from semel.bridges.spark_sink import DatabaseSink
from semel.bridges.targets import DatabaseTarget
from semel.errors import ConfigError, ValueDoesNotFit
from semel.testing.postgres import Postgres

ROWS = 4_000
LOADING = "SELECT count(*) FROM pg_stat_progress_copy WHERE bytes_processed > 0"


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with Postgres() as started:
        yield started


@pytest.fixture
def target(server: Postgres) -> DatabaseTarget:
    ask(server, "DROP SCHEMA public CASCADE")
    ask(server, "CREATE SCHEMA public")
    return target_for(server.uri, "append")


@pytest.fixture
def stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stream:
    monkeypatch.setattr(spark_head_start, "_slow", set())
    made = Stream(tmp_path / "checkpoint")
    use(made, monkeypatch)
    return made


def ask(server: Postgres, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(server.uri, autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


class Slow(Frame):
    """A job that does something after the first rows of its first task."""

    def __init__(self, meanwhile: Callable[[], None], rows: int = ROWS) -> None:
        super().__init__(parts_of(0, rows))
        self._meanwhile = meanwhile

    def results(self, function: Any) -> Iterator[SimpleNamespace]:
        self.runs += 1
        for number, part in enumerate(self.parts):
            for made in function(self._batches(part, is_first=number == 0)):
                yield from (SimpleNamespace(**row) for row in made.to_pylist())

    def _batches(self, part: Any, *, is_first: bool) -> Iterator[Any]:
        for number, batch in enumerate(part.to_batches(max_chunksize=1_000)):
            if is_first and number == 2:
                self._meanwhile()
            yield batch


def sink_for(target: DatabaseTarget) -> DatabaseSink:
    return DatabaseSink(name="pipeline", to=target)


def test_rows_are_loaded_while_the_job_is_running_and_seen_when_it_has_ended(
    server: Postgres, target: DatabaseTarget, stream: Stream
) -> None:
    """F1: the job waits here until the server has rows of it; nobody else sees any."""
    seen: list[Any] = []

    def meanwhile() -> None:
        wait_until(lambda: ask(server, LOADING) == [(1,)], "no row was loaded")
        seen.extend(ask(server, "SELECT count(*) FROM out"))

    stream.run(sink_for(target), [Slow(meanwhile)])
    assert seen == [(0,)]
    assert contents(target, "append") == expected("append", 1, ROWS)
    assert ask(server, "SELECT count(*) FROM semel_staging") == [(0,)]


def test_an_attempt_that_was_loaded_and_does_not_count_is_rolled_back(
    server: Postgres, target: DatabaseTarget, stream: Stream
) -> None:
    """E2: rows of an attempt are with the server already, and then the job returns those of another one."""

    def meanwhile() -> None:
        wait_until(lambda: ask(server, LOADING) == [(1,)], "no row was loaded")

    class Retried(Slow):
        def results(self, function: Any) -> Iterator[SimpleNamespace]:
            list(super().results(function))
            self._meanwhile = lambda: None
            yield from super().results(function)

    stream.run(sink_for(target), [Retried(meanwhile)])
    assert contents(target, "append") == expected("append", 1, ROWS)


def test_a_job_that_takes_long_keeps_no_lock_and_has_a_head_start_once_only(
    server: Postgres, target: DatabaseTarget, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F1: others wait for the locks for a limited time, however slow the user's code is."""
    monkeypatch.setattr(spark_head_start, "LIMIT_S", 0.3)
    locked: list[int] = []

    def meanwhile() -> None:
        wait_until(lambda: ask(server, LOADING) == [(0,)], "the transaction went on")
        ask(server, "BEGIN; LOCK TABLE out IN ACCESS EXCLUSIVE MODE; COMMIT")
        locked.append(1)

    sink = sink_for(target)
    stream.run(sink, [Slow(meanwhile)])
    assert locked == [1]
    assert contents(target, "append") == expected("append", 1, ROWS)

    def look() -> None:
        assert ask(server, LOADING) == [(0,)]

    stream.run(sink, [Slow(meanwhile), Slow(look)])
    assert ask(server, "SELECT count(*) FROM out") == [(2 * ROWS,)]


def test_a_job_that_fails_after_rows_were_loaded_leaves_none(
    server: Postgres, target: DatabaseTarget, stream: Stream
) -> None:
    """F1: the next run writes all of them."""

    def meanwhile() -> None:
        wait_until(lambda: ask(server, LOADING) == [(1,)], "no row was loaded")
        raise RuntimeError("the user's code failed")

    with pytest.raises(RuntimeError, match="the user's code failed"):
        stream.run(sink_for(target), [Slow(meanwhile)])
    assert ask(server, "SELECT count(*) FROM out") == [(0,)]
    stream.run(sink_for(target), [Frame(parts_of(0, ROWS))])
    assert contents(target, "append") == expected("append", 1, ROWS)


def test_a_server_that_crashes_while_rows_are_loaded_costs_no_second_run(
    server: Postgres, target: DatabaseTarget, stream: Stream, caplog: pytest.LogCaptureFixture
) -> None:
    """F3: the transaction is gone, the files are not."""

    def meanwhile() -> None:
        wait_until(lambda: ask(server, LOADING) == [(1,)], "no row was loaded")
        server.stop_at_once()
        server.start()

    frame = Slow(meanwhile)
    with caplog.at_level(logging.WARNING):
        stream.run(sink_for(target), [frame])
    assert contents(target, "append") == expected("append", 1, ROWS)
    assert frame.runs == 1
    assert "Next try in" in caplog.text


def test_a_value_that_the_table_refuses_is_named_though_rows_were_loaded(
    server: Postgres, target: DatabaseTarget, stream: Stream
) -> None:
    """F1: COPY does not tell which row it was, so they are staged and looked through."""
    ask(server, f"CREATE TABLE out (id bigint CHECK (id <> {ROWS - 1}), key bigint, version bigint, amount bigint)")
    ask(server, "ALTER TABLE out ADD COLUMN pad varchar(200)")
    with pytest.raises(ValueDoesNotFit, match=rf'The row: \{{"id": {ROWS - 1}, '):
        stream.run(sink_for(target), [Frame(parts_of(0, ROWS))])
    assert ask(server, "SELECT count(*) FROM out") == [(0,)]


def test_text_that_the_column_would_cut_off_is_refused(
    server: Postgres, target: DatabaseTarget, stream: Stream
) -> None:
    """F1: COPY cuts off blanks beyond varchar(n) without a word, so the length is looked at before."""
    ask(server, "CREATE TABLE out (id bigint, key bigint, version bigint, amount bigint, pad varchar(121))")
    parts = [part.set_column(4, "pad", [["x" * 120 + "  "] * part.num_rows]) for part in parts_of(0, ROWS)]
    with pytest.raises(ValueDoesNotFit, match="column 'pad'"):
        stream.run(sink_for(target), [Frame(parts)])
    assert ask(server, "SELECT count(*) FROM out") == [(0,)]


def test_what_is_too_much_for_a_file_is_staged_in_the_database(
    server: Postgres, target: DatabaseTarget, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F1, F4: a disk for temporary files may be small; rows of both ways are in one transaction."""
    monkeypatch.setattr(spark_staging, "SPOOL_BYTES", 200_000)
    seen: list[int] = []
    load = spark_staging.StageRows._load

    def watched(self: Any, batches: Any) -> Any:
        made = load(self, batches)
        seen.append(made["rows"])
        return made

    monkeypatch.setattr(spark_staging.StageRows, "_load", watched)
    stream.run(sink_for(target), [Frame(parts_of(0, ROWS))])
    assert 0 < sum(seen) < ROWS
    assert contents(target, "append") == expected("append", 1, ROWS)
    assert ask(server, "SELECT count(*) FROM semel_staging") == [(0,)]


# -- the first load of an upsert -------------------------------------------------------------------------------------


def upsert_into(server: Postgres) -> DatabaseTarget:
    ask(server, "CREATE TABLE kept (id bigint PRIMARY KEY, key bigint, version bigint, amount bigint, pad text)")
    return semel.Postgres(server.uri, table="kept", mode="upsert", key=["id"])


def test_an_upsert_into_an_empty_table_is_loaded_and_later_ones_are_merged(
    server: Postgres, target: DatabaseTarget, stream: Stream
) -> None:
    """F1: half of the ids of the second batch are there already."""
    upsert = upsert_into(server)

    def meanwhile() -> None:
        wait_until(lambda: ask(server, LOADING) == [(1,)], "no row was loaded")

    stream.run(sink_for(upsert), [Slow(meanwhile), Frame(parts_of(1, ROWS))])
    assert ask(server, "SELECT count(*), min(id), max(id) FROM kept") == [(ROWS * 3 // 2, 0, ROWS * 3 // 2 - 1)]


def test_a_row_that_somebody_inserts_during_the_first_load_is_updated(
    server: Postgres, target: DatabaseTarget, stream: Stream
) -> None:
    """F1: the unique index sees it, and the rows are merged instead."""
    upsert = upsert_into(server)

    def meanwhile() -> None:
        wait_until(lambda: ask(server, LOADING) == [(1,)], "no row was loaded")
        ask(server, f"INSERT INTO kept VALUES ({ROWS - 1}, 0, 0, -1, 'theirs')")

    stream.run(sink_for(upsert), [Slow(meanwhile)])
    assert ask(server, "SELECT count(*), count(*) FILTER (WHERE pad = 'theirs') FROM kept") == [(ROWS, 0)]


@pytest.mark.parametrize("file_bytes", [spark_staging.SPOOL_BYTES, 200_000])
def test_two_rows_of_one_key_are_refused_in_the_first_load_too(
    server: Postgres, target: DatabaseTarget, stream: Stream, monkeypatch: pytest.MonkeyPatch, file_bytes: int
) -> None:
    """F1: also if one of them is in a file and the other in a staging table."""
    monkeypatch.setattr(spark_staging, "SPOOL_BYTES", file_bytes)
    [many, few] = parts_of(0, ROWS)
    with pytest.raises(ConfigError, match="Two rows of one batch have the key"):
        stream.run(sink_for(upsert_into(server)), [Frame([pa.concat_tables([many, many.slice(0, 1)]), few])])
    assert ask(server, "SELECT count(*) FROM kept") == [(0,)]
