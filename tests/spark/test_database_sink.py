"""The sink for databases on a real Postgres and SQLite: replays, checkpoints, lost answers, conflicts, mistakes.

Spark's part is played by `small_stream.py`; `test_database_spark.py` has the real one.
"""

from __future__ import annotations

import json
import logging
import pickle
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from database_modes import contents, expected, parts_of, prepare, sqlite_place, target_at, target_for
from session_scene import once_logged
from small_stream import Frame, Stream, use

import semel
from semel.bridges import spark_staging, table_writer
from semel.bridges.database import Database
from semel.bridges.positions import Result
from semel.bridges.postgres import PostgresDatabase
from semel.bridges.spark_job import write_batch_into
from semel.bridges.spark_leftovers import mark_running
from semel.bridges.spark_once import OneMerge
from semel.bridges.spark_parts import StagedRows
from semel.bridges.spark_sink import DatabaseSink
from semel.bridges.targets import DatabaseTarget
from semel.errors import (
    AuthenticationFailed,
    ConfigError,
    DatabaseError,
    DatabaseUnreachable,
    InvalidState,
    ValueDoesNotFit,
)
from semel.spark.owner import PipelineFenced
from semel.testing.postgres import Postgres

ROWS = 2_000
NAME = "pipeline"


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with Postgres(settings={"deadlock_timeout": "100ms"}) as started:
        yield started


@pytest.fixture(params=["Postgres", "SQLite"])
def place(request: pytest.FixtureRequest, server: Postgres, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "SQLite":
        return sqlite_place(tmp_path)
    empty(server)
    return server.uri


@pytest.fixture
def postgres(server: Postgres) -> Postgres:
    """With an empty database."""
    empty(server)
    return server


def empty(server: Postgres) -> None:
    with psycopg.connect(server.uri, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")


@pytest.fixture
def stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stream:
    made = Stream(tmp_path / "checkpoint")
    use(made, monkeypatch)
    return made


def frames(count: int, rows: int = ROWS) -> list[Frame]:
    return [Frame(parts_of(batch, rows)) for batch in range(count)]


def sink_for(target: DatabaseTarget, **options: Any) -> DatabaseSink:
    return DatabaseSink(name=NAME, to=target, **options)


def test_each_batch_is_written_once_and_a_replay_only_computed(place: str, stream: Stream) -> None:
    """F1, E3: Spark replays a batch that is committed; nothing is written, and its plan runs for the sake of state."""
    target, batches = target_for(place, "append"), frames(2)
    assert stream.run(sink_for(target), batches) == 2
    assert contents(target, "append") == expected("append", 2, ROWS)
    stream.forget_commit()
    sink = sink_for(target)
    assert stream.run(sink, batches) == 1
    assert sink.recent[-1].skipped
    assert batches[1].runs == 2
    assert contents(target, "append") == expected("append", 2, ROWS)


@pytest.mark.parametrize("mode", ["upsert", "newest", "dedup", "statement"])
def test_every_mode_comes_out_as_its_model_says(place: str, stream: Stream, mode: str) -> None:
    """F1: one batch has a key several times, and half of the ids come again in the next one."""
    target = target_for(place, mode)
    prepare(target, mode)
    assert stream.run(sink_for(target), frames(3)) == 3
    assert contents(target, mode) == expected(mode, 3, ROWS)


def test_attempts_that_nobody_waits_for_are_not_merged_and_leave_nothing(postgres: Postgres, stream: Stream) -> None:
    """E2: each task ran three times to its end, as with speculation; the driver takes what the job has returned."""
    target = target_for(postgres.uri, "statement")
    prepare(target, "statement")
    stream.run(sink_for(target), [Frame(parts_of(0, ROWS), attempts=3)])
    assert contents(target, "statement") == expected("statement", 1, ROWS)
    assert query(postgres, "SELECT count(*) FROM semel_staging") == [(0,)]
    assert query(postgres, "SELECT count(*) FROM pg_class WHERE relname LIKE 'semel_staged_%'") == [(0,)]


def test_a_batch_without_rows_is_recorded_too(place: str, stream: Stream) -> None:
    """F2: so that a gap in the ledger always means something."""
    target = target_for(place, "append")
    nothing = Frame([parts_of(0, ROWS)[0].slice(0, 0)])
    stream.run(sink_for(target), [nothing, *frames(2)[1:]])
    assert ledger_entry(target, NAME)["batch"] == 1


def test_several_tables_of_one_database_change_together(place: str, stream: Stream) -> None:
    """E7, F1: if the second table refuses its rows, the first one is not changed either."""
    target = target_for(place, "append")
    with target.open() as database:
        database.execute("CREATE TABLE other (id BIGINT PRIMARY KEY, amount BIGINT)")
    sink = sink_for(target)
    other = target_at(place, table="other")

    def each(df: Frame, batch_id: int) -> None:
        with sink.batch(batch_id) as batch:
            batch.write(df)  # pyright: ignore[reportArgumentType]
            some = [part.select(["id", "amount"]) for part in df.parts]
            batch.write(Frame(some), to=other)  # pyright: ignore[reportArgumentType]

    batches = frames(2)
    stream.run(each, batches[:1])
    assert contents(target, "append") == expected("append", 1, ROWS)
    with pytest.raises(ValueDoesNotFit):  # half of the ids come again
        stream.run(each, batches)
    assert contents(target, "append") == expected("append", 1, ROWS)
    with target.open() as database:
        database.execute("DELETE FROM other")
        assert stream.run(each, batches) == 1
        assert int(database.scalar("SELECT count(*) FROM other")) == ROWS
    assert contents(target, "append") == expected("append", 2, ROWS)


def test_two_sinks_of_one_query_for_one_database_are_refused(place: str, stream: Stream) -> None:
    """E7: a replay could not tell their outputs apart; one sink takes several tables."""
    target = target_for(place, "append")
    first, second = (DatabaseSink(name=name, to=target) for name in ("first", "second"))

    def each(df: Any, batch_id: int) -> None:
        first(df, batch_id)
        second(df, batch_id)

    with pytest.raises(InvalidState, match="Pipeline 'first' writes for this query already"):
        stream.run(each, frames(1))
    assert contents(target, "append") == expected("append", 1, ROWS)


def test_a_sink_that_cannot_write_does_not_stop_the_one_that_can(postgres: Postgres, stream: Stream) -> None:
    """E2: the table is looked at before the pipeline is taken over."""
    target, batches = target_for(postgres.uri, "append"), frames(2)
    sink = sink_for(target)

    def each(df: Any, batch_id: int) -> None:
        if batch_id == 1:
            with pytest.raises(ConfigError, match="has no table 'missing'"):
                sink_for(semel.Postgres(postgres.uri, table="missing"), resume="checkpoint")(df, batch_id)
        sink(df, batch_id)

    stream.run(each, batches)
    assert contents(target, "append") == expected("append", 2, ROWS)


# -- checkpoints and databases that are lost, older or others --------------------------------------------------------


def test_a_lost_checkpoint_is_refused_and_goes_on_from_the_databases_position(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E8, F2: an empty checkpoint could repeat everything. The database knows where the input stood."""
    target = target_for(place, "append")
    first = Stream(tmp_path / "first", ends=lambda batch: json.dumps({"in": {"0": (batch + 1) * ROWS}}))
    use(first, monkeypatch)
    first.run(sink_for(target), frames(2))
    assert semel.committed_offsets(name=NAME, to=target) == json.dumps({"in": {"0": 2 * ROWS}})

    def note(start: int) -> Callable[[int], str]:
        told = json.dumps({"cluster": "c", "start": {"in": {"0": start}}, "topic_ids": {}})
        return lambda batch: json.dumps({"in": {"0": (batch + 3) * ROWS}, f"semel:{told}": {}})

    with pytest.raises(ConfigError, match="has run before with another checkpoint"):
        run_new(tmp_path / "second", monkeypatch, sink_for(target), note(0))
    with pytest.raises(ConfigError, match=f"was committed up to offset {2 * ROWS}, and this query begins at 0"):
        run_new(tmp_path / "third", monkeypatch, sink_for(target, resume="committed"), note(0))
    run_new(tmp_path / "fourth", monkeypatch, sink_for(target, resume="committed"), note(2 * ROWS))
    assert len(contents(target, "append")) == 3 * ROWS


def run_new(folder: Path, patch: pytest.MonkeyPatch, sink: DatabaseSink, ends: Callable[[int], str]) -> None:
    stream = Stream(folder, ends=ends)
    use(stream, patch)
    stream.run(sink, frames(1))


def test_a_checkpoint_that_is_older_than_the_database_is_refused(place: str, stream: Stream, tmp_path: Path) -> None:
    """E8: it was restored from a copy, and its next batch was written already, with other input."""
    target, batches = target_for(place, "append"), frames(3)
    stream.run(sink_for(target), batches[:1])
    shutil.copytree(stream.folder, tmp_path / "copy")
    stream.run(sink_for(target), batches)
    shutil.rmtree(stream.folder)
    shutil.copytree(tmp_path / "copy", stream.folder)
    stream.ends = lambda batch: f'{{"logOffset":{batch + 100}}}'
    with pytest.raises(ConfigError, match="the checkpoint is older than the output"):
        stream.run(sink_for(target), batches)
    assert contents(target, "append") == expected("append", 3, ROWS)


@pytest.mark.parametrize("is_running", [False, True], ids=["before a start", "while it runs"])
def test_a_database_that_was_restored_from_an_older_copy_is_noticed(
    tmp_path: Path, stream: Stream, is_running: bool
) -> None:
    """E8, F2: rows and ledger are those of yesterday, and Spark would go on as if nothing were missing."""
    target, batches = target_for(sqlite_place(tmp_path), "append"), frames(5)
    sink = sink_for(target)
    stream.run(sink, batches[:2])
    shutil.copy(sqlite_place(tmp_path), tmp_path / "backup.db")

    def restore_in_between(df: Any, batch_id: int) -> None:
        if batch_id == 4:
            restore(tmp_path)
        sink(df, batch_id)

    call: Callable[[Any, int], None] = restore_in_between
    if not is_running:
        stream.run(sink, batches[:4])
        restore(tmp_path)
        call = sink_for(target)
    with pytest.raises(ConfigError, match="Spark asks for batch 4, and the database knows this query up to batch 1"):
        stream.run(call, batches)
    stream.run(sink_for(target, resume="checkpoint"), batches)
    assert len(contents(target, "append")) == 3 * ROWS, "batches 2 and 3 are missing, as the user has accepted"


def restore(folder: Path) -> None:
    """Through SQLite, as a copy of the file under an open connection would not be seen."""
    with sqlite3.connect(folder / "backup.db") as old, sqlite3.connect(sqlite_place(folder)) as new:
        old.backup(new)
    old.close()
    new.close()


def test_another_database_and_a_ledger_that_was_made_again_are_refused(
    place: str, tmp_path: Path, stream: Stream
) -> None:
    """E8: the checkpoint notes which ledger has its batches."""
    target, batches = target_for(place, "append"), frames(3)
    stream.run(sink_for(target), batches[:1])
    other = target_for(str(tmp_path / "other.db"), "append")
    with pytest.raises(ConfigError, match="belongs to another database"):
        stream.run(sink_for(other), batches)
    with target.open() as database:
        database.execute("DROP TABLE semel_home")
        database.execute("DROP TABLE semel_ledger")
    with pytest.raises(ConfigError, match="belongs to another database"):
        stream.run(sink_for(target), batches)
    stream.run(sink_for(target, resume="checkpoint"), batches)
    assert contents(target, "append") == expected("append", 3, ROWS)


def test_a_renamed_pipeline_goes_on_and_repeats_nothing(place: str, stream: Stream) -> None:
    """E8: the query is known by its id."""
    target, batches = target_for(place, "append"), frames(3)
    stream.run(sink_for(target), batches[:2])
    stream.forget_commit()
    assert stream.run(DatabaseSink(name="another name", to=target), batches) == 2
    assert contents(target, "append") == expected("append", 3, ROWS)


# -- lost connections, conflicts and other owners --------------------------------------------------------------------


def test_another_table_under_the_same_name_is_refused(place: str, stream: Stream) -> None:
    """The query would go on where its checkpoint is, and the new table lack all that was read before it."""
    target, other = target_for(place, "append"), target_at(place, table="others", create=True)
    running = sink_for(target)
    stream.run(running, frames(2))
    words = f"has written into table '{target.options.rule.table}' up to batch 1, .* 'others' .*resume=\"checkpoint\""
    for resume in (None, "committed"):
        with pytest.raises(ConfigError, match=words):
            stream.run(sink_for(other, resume=resume), frames(3))
    stream.run(running, frames(3))
    assert contents(target, "append") == expected("append", 3, ROWS), "the running query was not stopped"
    stream.run(sink_for(other, resume="checkpoint"), frames(4))
    stream.run(sink_for(other), frames(5))
    with other.open() as database:
        assert int(database.scalar("SELECT count(*) FROM others")) == 2 * ROWS


def test_a_query_that_writes_to_its_tables_by_turns_is_not_refused(place: str, stream: Stream) -> None:
    """What counts is the sink's own table. Which tables its last batch had is the program's matter."""
    target, other = target_for(place, "append"), target_at(place, table="others", create=True)

    def write(df: Any, batch_id: int) -> None:
        with sink.batch(batch_id) as batch:
            batch.write(df, to=other if batch_id % 2 else target)

    for number in range(1, 5):
        sink = sink_for(target)
        stream.run(write, frames(number))
    with other.open() as database:
        assert int(database.scalar("SELECT count(*) FROM others")) == 2 * ROWS


def test_a_commit_whose_answer_is_lost_is_found_in_the_ledger(
    postgres: Postgres, stream: Stream, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """F3: the connection breaks once after the server has committed, and once before. Neither is guessed."""
    target = target_for(postgres.uri, "statement")
    prepare(target, "statement")
    execute, losses = PostgresDatabase._execute, iter(["", "after", "", "before", *[""] * 20])
    changed: list[str] = []

    def lossy(self: PostgresDatabase, statement: str, *values: object) -> Result:
        if statement.startswith("WITH rows"):
            changed.append(statement)
        loss = next(losses) if statement == "COMMIT" and changed else ""
        if loss == "before":
            self.close()
        result = execute(self, statement, *values) if loss != "before" else Result([], 0)
        if loss:
            self.close()
            raise DatabaseUnreachable(f"the connection was lost {loss} the commit", is_transient=True)
        return result

    monkeypatch.setattr(PostgresDatabase, "_execute", lossy)
    stream.run(sink_for(target), frames(4))
    assert contents(target, "statement") == expected("statement", 4, ROWS)
    assert "the connection was lost after the commit" in caplog.text
    assert "the connection was lost before the commit" in caplog.text


def test_a_server_that_crashes_between_staging_and_merging_only_costs_a_second_staging(
    postgres: Postgres, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F3: an immediate shutdown empties staging tables, which is seen before anything is merged."""
    target, frame = target_for(postgres.uri, "statement"), frames(1)[0]
    prepare(target, "statement")
    crash_before_merge(postgres, monkeypatch, has_tables=True)
    sink = sink_for(target)
    stream.run(sink, [frame])
    assert contents(target, "statement") == expected("statement", 1, ROWS)
    assert frame.runs == 2
    assert sink.recent[-1].attempts > 1


def test_a_server_that_crashes_before_rows_are_loaded_from_files_costs_no_second_run(
    postgres: Postgres, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F3: files of an append are still there, so the user's plan need not run again."""
    target, frame = target_for(postgres.uri, "append"), frames(1)[0]
    crash_before_merge(postgres, monkeypatch, has_tables=False)
    sink = sink_for(target)
    stream.run(sink, [frame])
    assert contents(target, "append") == expected("append", 1, ROWS)
    assert frame.runs == 1
    assert sink.recent[-1].attempts > 1


def crash_before_merge(postgres: Postgres, monkeypatch: pytest.MonkeyPatch, *, has_tables: bool) -> None:
    """Let the server crash once, when rows are staged and not merged."""
    merge, crashes = OneMerge._merge, iter([True])

    def crash_first(self: OneMerge, staged: list[StagedRows], **options: Any) -> Any:
        if next(crashes, False):
            assert any(one.tables for one in staged) == has_tables
            postgres.stop_at_once()
            postgres.start()
        return merge(self, staged, **options)

    monkeypatch.setattr(OneMerge, "_merge", crash_first)


def test_a_server_that_crashes_after_a_load_has_failed_can_start_again(
    postgres: Postgres, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F3: Postgres cannot recover if a transaction that made an unlogged table was rolled back just before."""
    target, calls = target_for(postgres.uri, "statement"), iter(range(100))
    prepare(target, "statement")
    original = table_writer.prepare

    def fail_in_the_middle(*args: Any, **options: Any) -> pa.Table:
        if next(calls) == 2:
            query(postgres, "CREATE TABLE other ()")  # its commit writes the server's log up to here
            raise RuntimeError("the task fails")
        return original(*args, **options)

    monkeypatch.setattr(spark_staging, "prepare", fail_in_the_middle)
    sink = sink_for(target)
    with pytest.raises(RuntimeError, match="the task fails"):
        stream.run(sink, [Frame([pa.concat_tables(parts_of(0, ROWS))])])
    postgres.stop_at_once()
    postgres.start()
    stream.run(sink_for(target), frames(1))
    assert contents(target, "statement") == expected("statement", 1, ROWS)
    assert query(postgres, "SELECT count(*) FROM semel_staging") == [(0,)]


def test_a_server_that_is_away_for_a_while_is_waited_for(
    postgres: Postgres, stream: Stream, caplog: pytest.LogCaptureFixture
) -> None:
    """F3: each try is logged, and nothing is lost."""
    target, batches = target_for(postgres.uri, "append"), frames(3)
    sink = sink_for(target)
    stream.run(sink, batches[:1])
    postgres.stop_at_once()
    back = threading.Timer(2, postgres.start)
    back.start()
    try:
        stream.run(sink, batches)
    finally:
        back.join()
    assert contents(target, "append") == expected("append", 3, ROWS)
    assert "Next try in" in caplog.text
    assert "The database is back" in caplog.text


def test_a_server_that_stays_away_is_one_clear_error(postgres: Postgres, stream: Stream) -> None:
    """F3: after retry_s the query stops, and a later start goes on."""
    target, batches = target_for(postgres.uri, "append", retry_s=0.5), frames(2)
    stream.run(sink_for(target), batches[:1])
    postgres.stop_at_once()
    try:
        with pytest.raises(DatabaseUnreachable, match=r"Tried for retry_s=0.5 s without success"):
            stream.run(sink_for(target), batches)
    finally:
        postgres.start()
    stream.run(sink_for(target), batches)
    assert contents(target, "append") == expected("append", 2, ROWS)


def test_a_deadlock_with_a_users_own_writer_is_tried_again(
    postgres: Postgres, stream: Stream, caplog: pytest.LogCaptureFixture
) -> None:
    """F3: Postgres ends one of the two; if it is the sink's transaction, all of it is done again."""
    target = target_for(postgres.uri, "upsert")
    stream.run(sink_for(target), frames(1))
    query(postgres, "ALTER ROLE postgres SET deadlock_timeout = '1s'")
    with psycopg.connect(postgres.uri) as users:
        users.execute("SET deadlock_timeout = '60s'")  # so that it is the sink that Postgres ends
        users.execute("UPDATE out SET pad = '' WHERE key = 90")
        thread = threading.Thread(target=lambda: stream.run(sink_for(target), frames(2)))
        thread.start()
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        while query(postgres, waiting) == [(0,)]:
            assert thread.is_alive(), "the merge did not wait for the user's row"
        users.execute("UPDATE out SET pad = '' WHERE key = 0")
        users.commit()
        thread.join()
    query(postgres, "ALTER ROLE postgres RESET deadlock_timeout")
    assert "it was in a deadlock with another transaction" in caplog.text
    assert contents(target, "upsert") == expected("upsert", 2, ROWS)


def test_a_lock_timeout_is_tried_again(postgres: Postgres, stream: Stream, caplog: pytest.LogCaptureFixture) -> None:
    """F3: a user's own writer holds the table for longer than lock_timeout allows."""
    target, words = target_for(postgres.uri, "upsert"), "held a lock for longer than lock_timeout"
    stream.run(sink_for(target), frames(1))
    query(postgres, "ALTER ROLE postgres SET lock_timeout = '300ms'")
    with psycopg.connect(postgres.uri) as users:
        users.execute("SET lock_timeout = 0")
        users.execute("LOCK TABLE out IN EXCLUSIVE MODE")
        with once_logged(caplog, words, users.rollback):
            stream.run(sink_for(target), frames(2))
    query(postgres, "ALTER ROLE postgres RESET lock_timeout")
    assert words in caplog.text
    assert contents(target, "upsert") == expected("upsert", 2, ROWS)


def test_of_two_sinks_with_one_name_the_older_is_fenced(postgres: Postgres, stream: Stream) -> None:
    """B4, E2: the newer run has raised the epoch, so the older one stops before it writes."""
    target, batches = target_for(postgres.uri, "append"), frames(3)
    older = sink_for(target)
    stream.run(older, batches[:1])

    def overtaken(df: Frame, batch_id: int) -> None:
        if batch_id == 1:
            take_over(target)
        older(df, batch_id)  # pyright: ignore[reportArgumentType]

    with pytest.raises(PipelineFenced, match="Another run of pipeline 'pipeline' has taken over"):
        stream.run(overtaken, batches)
    assert contents(target, "append") == expected("append", 1, ROWS)


def take_over(target: DatabaseTarget) -> None:
    with target.open() as database:
        database.execute("UPDATE semel_ledger SET epoch = epoch + 1 WHERE key = $1", NAME)


def test_staging_of_runs_that_are_over_is_dropped_and_a_lock_on_it_is_not_waited_for(
    postgres: Postgres, stream: Stream, caplog: pytest.LogCaptureFixture
) -> None:
    """F1: a table of an earlier run, one of a job that nobody repeats, and one that somebody is reading."""
    target = target_for(postgres.uri, "append")
    stream.run(sink_for(target), frames(1))
    make_leftover(postgres, "semel_staged_a", NAME, age_days=0)
    make_leftover(postgres, "semel_staged_b", "other/job", age_days=4)
    make_leftover(postgres, "semel_staged_c", "other/job", age_days=1)
    with psycopg.connect(postgres.uri) as reader:
        reader.execute("SELECT * FROM semel_staged_b")
        stream.run(sink_for(target), frames(2))
    assert "staging tables are in use and dropped later" in caplog.text
    left = query(postgres, "SELECT name FROM semel_staging ORDER BY name")
    assert left == [("semel_staged_b",), ("semel_staged_c",)]
    stream.run(sink_for(target), frames(3))
    left = query(postgres, "SELECT name FROM semel_staging")
    assert left == [("semel_staged_c",)], "a younger one may belong to a job that is running"


def test_a_job_drops_the_staging_of_other_jobs_of_its_pipeline_unless_they_are_running(postgres: Postgres) -> None:
    """F1: a job that failed for good is never run again, so the next one of its pipeline cleans up after it."""
    query(postgres, "CREATE TABLE out (id bigint, key bigint, version bigint, amount bigint, pad text)")
    query(postgres, "ALTER TABLE out ADD CONSTRAINT none CHECK (id < 0)")
    target = semel.Postgres(postgres.uri, table="out")
    frame: Any = Frame(parts_of(0, 20_000), master="spark://of-a-cluster:7077")
    with pytest.raises(ValueDoesNotFit):
        write_batch_into(target, frame, name=NAME, job_id="failed")
    assert query(postgres, "SELECT DISTINCT owner FROM semel_staging") == [(f"{NAME}/failed",)]
    make_leftover(postgres, "semel_staged_a", f"{NAME}/running", age_days=0)
    make_leftover(postgres, "semel_staged_b", f"{NAME}s/of-another", age_days=0)
    with target.open() as running:
        mark_running(running, f"{NAME}/running")
        query(postgres, "ALTER TABLE out DROP CONSTRAINT none")
        write_batch_into(target, frame, name=NAME, job_id="next")
        left = "SELECT name FROM semel_staging ORDER BY name"
        tables = "SELECT relname FROM pg_class WHERE relname LIKE 'semel_staged_%' ORDER BY relname"
        assert query(postgres, left) == query(postgres, tables) == [("semel_staged_a",), ("semel_staged_b",)]
    write_batch_into(target, frame, name=NAME, job_id="last")
    assert query(postgres, left) == [("semel_staged_b",)]
    assert query(postgres, "SELECT count(*) FROM out") == [(40_000,)]


def make_leftover(postgres: Postgres, name: str, owner: str, age_days: int) -> None:
    query(postgres, f"CREATE UNLOGGED TABLE {name} (id bigint)")
    query(
        postgres,
        f"INSERT INTO semel_staging VALUES ('{name}', '{owner}', 0, 0, "
        f"(extract(epoch FROM now()) - {age_days} * 86400) * 1000)",
    )


# -- mistakes --------------------------------------------------------------------------------------------------------


def test_a_table_that_is_dropped_while_the_query_runs_is_one_clear_error(postgres: Postgres, stream: Stream) -> None:
    """F3: nothing is lost; when the table is back, the batch is written."""
    target, batches = semel.Postgres(postgres.uri, table="out"), frames(3)
    table = "CREATE TABLE out (id bigint, key bigint, version bigint, amount bigint, pad text)"
    query(postgres, table)
    sink = sink_for(target)

    def dropping(df: Frame, batch_id: int) -> None:
        if batch_id == 1:
            query(postgres, "DROP TABLE out")
        sink(df, batch_id)  # pyright: ignore[reportArgumentType]

    with pytest.raises(DatabaseError, match='relation "out" does not exist'):
        stream.run(dropping, batches)
    query(postgres, table)
    stream.run(sink_for(target), batches)
    assert len(contents(target, "append")) == 2 * ROWS


@pytest.mark.parametrize(
    ("options", "columns", "message"),
    [
        ({"table": "missing"}, {"id": [1]}, "has no table 'missing'"),
        ({"table": "out"}, {"id": [1], "more": ["a"]}, "a column 'more' .* and table 'out' has none"),
        ({"table": "out", "mode": "upsert", "key": ["id"]}, {"id": [1]}, "no primary key or unique index"),
        ({"table": "out", "mode": "upsert", "key": ["no"]}, {"id": [1]}, "no column 'no'"),
    ],
)
def test_mistakes_are_found_before_the_query_starts(
    postgres: Postgres, options: dict[str, Any], columns: dict[str, list[Any]], message: str
) -> None:
    """K3: `check` is what write_stream calls first."""
    query(postgres, "CREATE TABLE out (id bigint)")
    with pytest.raises(ConfigError, match=message):
        sink_for(semel.Postgres(postgres.uri, **options)).check(Frame([pa.table(columns)]))  # pyright: ignore


def test_a_wrong_password_is_an_error_at_once() -> None:
    """K3: it is not tried again, and the message does not show the password."""
    with Postgres(password="right") as server:
        target = semel.Postgres(server.tcp_uri.replace("right", "wrong"), table="out", create=True)
        with pytest.raises(AuthenticationFailed, match="Check user and password") as caught:
            sink_for(target).check(Frame([pa.table({"id": [1]})]))  # pyright: ignore[reportArgumentType]
        assert "wrong" not in f"{caught.value} {target!r}"


def test_a_value_that_does_not_fit_stops_the_query_and_names_row_and_column(place: str, stream: Stream) -> None:
    """F1: found in a task; nothing of the batch is written, and it can be repeated when the cause is gone."""
    target = target_at(place, table="t", mode="upsert", key=["id"], create=True)
    good, bad = pa.table({"id": [1, 2]}), pa.table({"id": [3, None]})
    with pytest.raises(ValueDoesNotFit, match="Row 1, column 'id': the key is null"):
        stream.run(sink_for(target), [Frame([good, bad])])
    stream.run(sink_for(target), [Frame([good])])
    with target.open() as database:
        assert int(database.scalar("SELECT count(*) FROM t")) == 2


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("integer", ["1", "abc"], "Column 'v', string in the rows and integer in the table.*\"abc\""),
        (
            "varchar(3)",
            ["abc", "abcd"],
            "column 'v': abcd of type string cannot be kept exactly as character varying\\(3\\)",
        ),
        ("smallint", [1, 70_000], "Column 'v', int64 in the rows and smallint in the table"),
    ],
)
@pytest.mark.parametrize("pad", ["", "x" * 200_000], ids=["few", "many"])
def test_a_value_that_the_table_refuses_is_named_with_its_column_and_both_types(
    postgres: Postgres, stream: Stream, kind: str, values: list[Any], message: str, pad: str
) -> None:
    """F1: it was staged, and the merge found out."""
    query(postgres, f"CREATE TABLE t (id bigint, v {kind}, pad text)")
    rows = pa.table({"id": [1, 2], "v": values, "pad": [pad, pad]})
    with pytest.raises(ValueDoesNotFit, match=message):
        stream.run(sink_for(semel.Postgres(postgres.uri, table="t")), [Frame([rows])])
    assert query(postgres, "SELECT count(*) FROM t") == [(0,)]


def test_two_rows_of_one_key_need_a_column_that_says_which_counts(place: str, stream: Stream) -> None:
    """F1: the rows of a DataFrame have no order."""
    target = target_at(place, table="t", mode="upsert", key=["id"], create=True)
    with pytest.raises(ConfigError, match="Two rows of one batch have the key"):
        stream.run(sink_for(target), [Frame([pa.table({"id": [1, 2]}), pa.table({"id": [1, 3]})])])


def test_misuse_of_a_sink_is_refused(postgres: Postgres, stream: Stream, tmp_path: Path) -> None:
    """K3: a second write of a batch, another database in one batch, and names that are none."""
    target, frame = target_for(postgres.uri, "append"), frames(1)[0]
    sink = sink_for(target)

    def twice(df: Any, batch_id: int) -> None:
        sink(df, batch_id)
        sink(df, batch_id)

    with pytest.raises(InvalidState, match="has written batch 0 already"):
        stream.run(twice, [frame])
    other = target_for(sqlite_place(tmp_path), "append")
    with pytest.raises(ConfigError, match="in another database"), sink.batch(1) as batch:
        batch.write(frame, to=other)  # pyright: ignore[reportArgumentType]
    for wrong in ({"name": "a/b"}, {"name": ""}, {"resume": "now"}):
        with pytest.raises(ConfigError):
            DatabaseSink(**({"name": NAME, "to": target} | wrong))  # pyright: ignore[reportArgumentType]


def test_a_sink_goes_to_another_process_with_what_the_user_has_said(postgres: Postgres, stream: Stream) -> None:
    """E1: Spark Connect runs it elsewhere; a connection cannot go there."""
    target = target_for(postgres.uri, "append")
    sink = sink_for(target, resume="checkpoint")
    stream.run(sink, frames(1))
    copy: DatabaseSink = pickle.loads(pickle.dumps(sink))
    stream.run(copy, frames(2))
    assert (copy.name, repr(copy)) == (sink.name, repr(sink))
    assert contents(target, "append") == expected("append", 2, ROWS)


# -- jobs ------------------------------------------------------------------------------------------------------------


def test_a_job_is_written_once_however_often_it_runs(place: str) -> None:
    """E4, F1: the second run of a job id writes nothing; another id writes."""
    target = target_for(place, "append")
    write: Any = write_batch_into
    frame = frames(1)[0]
    assert write(target, frame, name=NAME, job_id="1").records == ROWS
    again = write(target, frame, name=NAME, job_id="1")
    assert again.skipped
    assert again.records == ROWS
    assert not write(target, frame, name=NAME, job_id="2").skipped
    assert contents(target, "append") == sorted(2 * expected("append", 1, ROWS))
    other = target_at(place, table="others", create=True)
    assert not write(other, frame, name=NAME, job_id="1").skipped  # each table has its own entry
    assert write(other, frame, name=NAME, job_id="1").skipped
    with pytest.raises(ConfigError, match="writers= is not an option for a database"):
        write(target, frame, name=NAME, job_id="3", writers=2)


def test_a_driver_that_stages_rows_of_a_cluster_gets_them_task_by_task(tmp_path: Path) -> None:
    """F1: SQLite is a file of the driver, and its tasks are elsewhere."""
    target = target_for(sqlite_place(tmp_path), "append")
    frame: Any = Frame(parts_of(0, ROWS), master="spark://elsewhere:7077")
    write_batch_into(target, frame, name=NAME, job_id="1")
    assert contents(target, "append") == expected("append", 1, ROWS)


def test_a_large_batch_is_logged_with_numbers(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """F1: and with the options that make batches smaller."""
    monkeypatch.setattr("semel.bridges.spark_once._MANY_ROWS", ROWS - 1)
    caplog.set_level(logging.WARNING)
    frame: Any = frames(1)[0]
    write_batch_into(target_for(postgres.uri, "append"), frame, name=NAME, job_id="1")
    assert f'"records": {ROWS}' in caplog.text
    assert "maxOffsetsPerTrigger" in caplog.text


def query(postgres: Postgres, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(postgres.uri, autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def ledger_entry(target: DatabaseTarget, key: str) -> dict[str, Any]:
    with target.open() as database:
        return json.loads(entry_text(database, key))


def entry_text(database: Database, key: str) -> str:
    return str(database.scalar("SELECT entry FROM semel_ledger WHERE key = $1", key))
