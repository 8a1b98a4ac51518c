"""`kill -9` at every named point of a batch, for every mode and database: nothing lost, nothing repeated."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
import pytest
from database_scene import Input, Place, broker, make_postgres, numbers, place, positions, server
from run_worker import row_of, target
from session_scene import wait_until

import semel
from semel.bridges import postgres as postgres_module
from semel.bridges.failpoints import POINTS, STOP_VARIABLE, VARIABLE
from semel.testing.embedded import EmbeddedBroker
from semel.testing.postgres import Postgres

__all__ = ["broker", "place", "server"]

WORKER = Path(__file__).parent / "run_worker.py"
PORTION = 5
COUNT = 2 * PORTION * len(POINTS) + 30
MODES = ["append", "upsert", "dedup", "newest", "statement", "delete", "newest-delete"]


def command(place: Place, mode: str, source: Input, *points: str, **options: Any) -> list[str]:
    given = json.dumps({"idle_ms": 300, "transaction_records_max": PORTION, **options})
    told = [place.kind, place.address, mode, source.bootstrap, source.topic, source.name, given]
    return [sys.executable, str(WORKER), *told, *points]


def live(place: Place, mode: str, source: Input, *points: str, **options: Any) -> list[int]:
    """Lives that end at these points; their exit statuses."""
    done = subprocess.run(command(place, mode, source, *points, **options), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return [int(status) for status in done.stdout.split()]


def prepare(place: Place, mode: str) -> None:
    if mode == "statement":
        place.do("CREATE TABLE numbers (number BIGINT PRIMARY KEY, count BIGINT NOT NULL)")


@pytest.mark.parametrize("mode", MODES)
def test_every_record_counts_once_though_the_process_is_killed_at_every_point(
    broker: EmbeddedBroker, place: Place, mode: str
) -> None:
    """F1, F3: in its second batch each life dies at the next point; the last one finishes. The total is exact."""
    source = Input(broker.bootstrap)
    values = list(range(1, COUNT + 1))
    if "delete" in mode:
        values += [-value for value in values if value % 3 == 0]
    source.write(values)
    prepare(place, mode)
    ended = live(place, mode, source, *(f"{point}:2" for point in POINTS), "")
    assert ended == [-signal.SIGKILL] * len(POINTS) + [0]
    expected = [value for value in range(1, COUNT + 1) if "delete" not in mode or value % 3]
    assert numbers(place) == expected
    if mode == "statement":
        assert place.ask("SELECT DISTINCT count FROM numbers") == [(1,)]
    assert sum(positions(place).values()) == len(values)
    assert source.committed() == positions(place)


CRASH_TABLE = [
    # (point, rows in the database, offset of the group), after a crash in the first batch
    ("before_commit", 0, None),
    ("after_commit", PORTION, None),
    ("after_offsets", PORTION, PORTION),
]


@pytest.mark.parametrize(("point", "rows", "offset"), CRASH_TABLE, ids=[point for point, _, _ in CRASH_TABLE])
@pytest.mark.parametrize("mode", ["append", "dedup"])
def test_the_three_crashes_have_their_three_outcomes(
    broker: EmbeddedBroker, place: Place, mode: str, point: str, rows: int, offset: int | None
) -> None:
    """F3: before the database's commit all is read again; between the commits the database knows; after both, clean."""
    source = Input(broker.bootstrap, 1)
    source.write(range(3 * PORTION))
    assert live(place, mode, source, point) == [-signal.SIGKILL]
    assert numbers(place) == list(range(rows))
    assert source.committed() == ({} if offset is None else {0: offset})
    report = source.run(lambda row: row_of(mode, row), target(place.kind, place.address, mode))
    assert report.records == 3 * PORTION - rows
    assert numbers(place) == list(range(3 * PORTION))
    assert source.committed() == {0: 3 * PORTION}


def test_the_naive_mix_repeats(broker: EmbeddedBroker, place: Place) -> None:
    """F5: the same crash between the two commits, with the database's write inside of a Kafka transaction."""
    source = Input(broker.bootstrap, 1)
    source.write(range(3 * PORTION))
    place.do("CREATE TABLE numbers (number BIGINT)")
    assert live(place, "naive", source, "after_commit", "") == [-signal.SIGKILL, 0]
    found = Counter(numbers(place))
    assert set(found) == set(range(3 * PORTION))
    assert {value for value, count in found.items() if count > 1} == set(range(PORTION))


def test_a_zombie_that_wakes_after_its_successor_has_written_cannot_commit(
    broker: EmbeddedBroker, server: Postgres, tmp_path: Path
) -> None:
    """H3: stopped with SIGSTOP before its transaction, and awake when the successor is through."""
    place, source, note = make_postgres(server), Input(broker.bootstrap, 1), tmp_path / "stopped"
    source.write(range(20))
    # It stops between two batches: "after_commit" of the first one.
    environment = {**os.environ, VARIABLE: "after_commit:2", STOP_VARIABLE: str(note)}
    zombie = subprocess.Popen(
        command(place, "append", source, idle_ms=2_000), env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_until(lambda: note.exists() and note.read_text() != "", "the first run to stop")
        source.run(lambda row: row_of("append", row), target(place.kind, place.address, "append"))
        assert numbers(place) == list(range(20))
        os.kill(zombie.pid, signal.SIGCONT)
        _, said = zombie.communicate(timeout=30)
    finally:
        zombie.kill()
        zombie.wait()
    assert "InboxOvertaken" in said
    assert zombie.returncode == 1
    assert numbers(place) == list(range(20))


def test_a_zombie_that_sleeps_inside_of_its_transaction_does_not_keep_its_successor_waiting(
    broker: EmbeddedBroker, server: Postgres, tmp_path: Path
) -> None:
    """It holds the lock on the pipeline's row. Postgres ends its session after a while, and the successor goes on."""
    place, source, note = make_postgres(server), Input(broker.bootstrap, 1), tmp_path / "stopped"
    source.write(range(20))
    environment = {**os.environ, VARIABLE: "before_commit:2", STOP_VARIABLE: str(note)}
    zombie = subprocess.Popen(
        command(place, "append", source, idle_ms=2_000), env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_until(lambda: note.exists() and note.read_text() != "", "the first run to stop")
        limit = (
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE state = 'idle in transaction' AND datname = "
        )
        successor = subprocess.Popen(command(place, "append", source, ""), stdout=subprocess.PIPE, text=True)
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        wait_until(lambda: place.ask(waiting) == [(1,)], "the successor to wait")
        place.do(limit + "current_database()")  # what idle_in_transaction_session_timeout does later
        assert successor.communicate(timeout=60)[0].split() == ["0"]
        assert numbers(place) == list(range(20))
        os.kill(zombie.pid, signal.SIGCONT)
        _, said = zombie.communicate(timeout=30)
    finally:
        zombie.kill()
        zombie.wait()
    assert "InboxOvertaken" in said
    assert numbers(place) == list(range(20))


@pytest.mark.parametrize("where", ["copy", "function"])
def test_a_process_that_is_stopped_where_postgres_does_not_notice_is_ended_by_its_successor(
    broker: EmbeddedBroker,
    server: Postgres,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
) -> None:
    """H3: in a COPY, and while a function of tables runs again for a half. No limit of Postgres' own ends these."""
    place, source = make_postgres(server), Input(broker.bootstrap, 1)
    place.do(
        "CREATE TABLE numbers (number bigint CHECK (number <> 13), at bigint, pad text)",
        "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS "
        "$$BEGIN PERFORM pg_advisory_xact_lock(4711); RETURN NULL; END$$",
        "CREATE TRIGGER wait BEFORE INSERT ON numbers FOR EACH STATEMENT EXECUTE FUNCTION wait()",
    )
    source.write(range(10))
    monkeypatch.setattr(postgres_module, "_IDLE_S", 1)  # for the successor: the zombie has the real limit
    with psycopg.connect(place.address) as other:
        if where == "copy":
            other.execute("SELECT pg_advisory_xact_lock(4711)")
        else:
            source.write([13])
        mode = "pads" if where == "copy" else "stops-in-half"
        zombie = subprocess.Popen(
            command(place, mode, source, by="table", transaction_records_max=100),
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            if where == "copy":
                copies = (
                    "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = '{}' AND query LIKE 'COPY%' "
                    "AND datname = current_database()"
                )
                wait_until(lambda: place.ask(copies.format("Lock")) == [(1,)], "the first run to begin its COPY")
                os.kill(zombie.pid, signal.SIGSTOP)
                other.rollback()
                wait_until(lambda: place.ask(copies.format("Client")) == [(1,)], "the server to wait for rows")
            else:
                state = Path(f"/proc/{zombie.pid}/stat")
                wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", "the first run to stop")
            # The user's own limit is shorter than the wait.
            short = place.address + "&options=-c%20statement_timeout%3D500ms"
            to = semel.Postgres(short, table="numbers", dead_letter="failed")
            report = source.run(lambda row: row_of("append", row), to)
            assert report.records == 10 + (where == "function")
            assert "Its session" in caplog.text
            os.kill(zombie.pid, signal.SIGCONT)
            _, said = zombie.communicate(timeout=30)
        finally:
            zombie.kill()
            zombie.wait()
    assert "InboxOvertaken" in said
    assert numbers(place) == list(range(10))
    assert report.dead_letters == (where == "function")


def test_the_kill_points_are_those_that_the_documents_name() -> None:
    """The table of crash points in docs/databases.md is complete."""
    text = (Path(__file__).parents[2] / "docs" / "databases.md").read_text()
    for point in POINTS:
        assert f"`{point}`" in text
