"""A database in trouble: tried again with a warning in the log, up to retry_s, and nothing is lost or repeated."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest
from database_scene import Input, Place, broker, make_postgres, number, numbers, server
from session_scene import once_logged, wait_until
from small_disk import move_log, small_disk

import semel
from semel.bridges.postgres import PostgresDatabase
from semel.bridges.retries import Retries
from semel.errors import DatabaseError, DatabaseUnreachable
from semel.testing.embedded import EmbeddedBroker
from semel.testing.postgres import Postgres

__all__ = ["broker", "server"]

END_CONNECTIONS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE pid <> pg_backend_pid() AND datname = current_database()"
)


@pytest.fixture
def place(server: Postgres) -> Place:
    place = make_postgres(server)
    place.do("CREATE TABLE numbers (number bigint, place bigint, at bigint)")
    return place


def test_a_lost_connection_is_opened_again(
    broker: EmbeddedBroker, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """The server ends it several times between batches; the position in the database decides each time."""
    source = Input(broker.bootstrap)
    source.write(range(60))

    def cut(row: Any) -> dict[str, Any]:
        if int(row.value) % 20 == 3 and row.offset not in seen:
            seen.add(row.offset)
            place.do(END_CONNECTIONS)
        return number(row)

    seen: set[int] = set()
    with caplog.at_level(logging.WARNING, "semel.bridges"):
        report = source.run(cut, place.target(table="numbers", retry_s=30), transaction_records_max=7)
    assert numbers(place) == list(range(60))
    assert report.records == 60
    assert report.aborted >= 3
    assert "the connection was lost" in caplog.text
    assert "Next try in" in caplog.text
    assert "The database is back" in caplog.text


def test_a_commit_whose_answer_was_lost_is_found_in_the_database(
    broker: EmbeddedBroker, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was committed, and the connection broke before the answer: the batch is not written again."""
    lost: list[str] = []
    execute = PostgresDatabase._execute

    def lose_the_answer(self: PostgresDatabase, statement: str, *values: object) -> Any:
        result = execute(self, statement, *values)
        if statement == "COMMIT" and self._is_in_transaction and numbers(place) and len(lost) < 2:
            lost.append(statement)
            self.close()
            raise DatabaseUnreachable("no answer", is_transient=True)
        return result

    monkeypatch.setattr(PostgresDatabase, "_execute", lose_the_answer)
    source = Input(broker.bootstrap)
    source.write(range(30))
    report = source.run(number, place.target(table="numbers"), transaction_records_max=5)
    assert len(lost) == 2
    assert report.aborted == 2
    assert numbers(place) == list(range(30))


def test_a_server_that_is_gone_for_a_while_is_waited_for(
    broker: EmbeddedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """Stopped with immediate shutdown under a running pipeline, and not there at its start either."""
    with Postgres() as server:
        place = make_postgres(server)
        place.do("CREATE TABLE numbers (number bigint, place bigint, at bigint)")
        source, stop = Input(broker.bootstrap), threading.Event()
        source.write(range(50))
        server.stop_at_once()
        reports: list[Any] = []
        target = place.target(table="numbers", retry_s=60)

        def run() -> None:
            reports.append(source.run(number, target, stop=stop, idle_ms=None, transaction_records_max=10))

        running = threading.Thread(target=run)
        running.start()
        try:
            for end in (50, 100):
                wait_until(lambda: caplog.text.count("Next try in") >= 3, "three tries")
                server.start()
                wait_until(lambda end=end: len(numbers(place)) == end, f"{end} rows")
                if end == 50:
                    server.stop_at_once()
                    caplog.clear()
                    source.write(range(50, 100))
        finally:
            stop.set()
            running.join(30)
        assert numbers(place) == list(range(100))
        assert reports[0].records == 100
        assert reports[0].aborted >= 1


def test_a_server_that_stays_away_is_one_clear_error(broker: EmbeddedBroker) -> None:
    """After retry_s, with what it means for the data. SIGTERM or stop would end the waiting at once."""
    source = Input(broker.bootstrap)
    target = semel.Postgres("postgresql://postgres@127.0.0.1:1/postgres", table="numbers", retry_s=0.5)
    with pytest.raises(semel.DatabaseUnreachable, match=r"Tried for retry_s=0\.5 s without success") as refused:
        source.run(number, target)
    assert "repeats nothing" in str(refused.value)
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    patient = semel.Postgres("postgresql://postgres@127.0.0.1:1/postgres", table="numbers", retry_s=600)
    began = time.monotonic()
    source.run(number, patient, stop=stop)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("setting", "words"),
    [("lock_timeout", "held a lock for longer than lock_timeout"), ("statement_timeout", "longer than statement_time")],
)
def test_a_lock_that_is_held_too_long_is_tried_again(
    broker: EmbeddedBroker, place: Place, caplog: pytest.LogCaptureFixture, setting: str, words: str
) -> None:
    """The user's own timeout, in the connection string, passes while somebody alters the table."""
    source = Input(broker.bootstrap)
    source.write(range(20))
    target = semel.Postgres(place.address + f"&options=-c%20{setting}%3D200ms", table="numbers")
    with psycopg.connect(place.address) as other, caplog.at_level(logging.WARNING, "semel.bridges"):
        other.execute("LOCK TABLE numbers IN ACCESS EXCLUSIVE MODE")
        with once_logged(caplog, words, other.rollback):
            source.run(number, target)
    assert numbers(place) == list(range(20))
    assert words in caplog.text


def test_a_deadlock_with_the_users_own_writer_is_tried_again(broker: EmbeddedBroker, place: Place) -> None:
    """Postgres picks a victim; whichever it is, every row is there once."""
    place.do("CREATE TABLE keyed (number bigint PRIMARY KEY, place bigint, at bigint)")
    place.do("INSERT INTO keyed SELECT n, 0, -1 FROM generate_series(0, 1) AS n")
    source = Input(broker.bootstrap, 1)
    source.write([0, 1])
    target = place.target(table="keyed", mode="upsert", key=["number"])
    failures: list[Exception] = []
    place.do("ALTER SYSTEM SET deadlock_timeout = '100ms'", "SELECT pg_reload_conf()")
    with psycopg.connect(place.address) as other:
        other.execute("UPDATE keyed SET place = 9 WHERE number = 1")

        def cross() -> None:
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = "
            wait_until(lambda: place.ask(waiting + "current_database()") == [(1,)], "the run to wait")
            try:
                other.execute("UPDATE keyed SET place = 9 WHERE number = 0")
                other.commit()
            except psycopg.errors.DeadlockDetected as error:
                failures.append(error)
                other.rollback()

        crossing = threading.Thread(target=cross)
        crossing.start()
        report = source.run(number, target)
        crossing.join()
    assert report.aborted + len(failures) == 1
    assert place.ask("SELECT number, at FROM keyed ORDER BY number") == [(0, 0), (1, 1)]


def test_a_serialization_failure_is_tried_again_without_calling_the_function_again(
    broker: EmbeddedBroker, place: Place
) -> None:
    """The rows that were made are written by the next try."""
    place.do(
        "CREATE TABLE keyed (number bigint PRIMARY KEY, at bigint)",
        "CREATE SEQUENCE tries",
        "CREATE FUNCTION fail_once() RETURNS trigger LANGUAGE plpgsql AS "
        "$$BEGIN IF nextval('tries') = 1 THEN RAISE serialization_failure; END IF; RETURN NEW; END$$",
        "CREATE TRIGGER fail_once BEFORE INSERT ON keyed FOR EACH ROW EXECUTE FUNCTION fail_once()",
    )
    source = Input(broker.bootstrap, 1)
    source.write([0])
    calls: list[int] = []

    def note(row: Any) -> dict[str, Any]:
        calls.append(row.offset)
        return {"number": 0, "at": row.offset}

    report = source.run(note, place.target(table="keyed", mode="upsert", key=["number"]))
    assert (report.aborted, calls) == (1, [0])
    assert place.ask("SELECT at FROM keyed") == [(0,)]


def test_a_server_without_a_free_connection_is_waited_for(
    broker: EmbeddedBroker, place: Place, server: Postgres, caplog: pytest.LogCaptureFixture
) -> None:
    """Too many clients at the start."""
    source = Input(broker.bootstrap)
    source.write(range(10))
    place.do("CREATE ROLE crowd LOGIN CONNECTION LIMIT 1", "GRANT ALL ON numbers TO crowd")
    place.do("GRANT CREATE ON SCHEMA public TO crowd")
    uri = place.address.replace("postgres@", "crowd@")
    other, words = psycopg.connect(uri), "too many connections"
    with caplog.at_level(logging.WARNING, "semel.bridges"), once_logged(caplog, words, other.close):
        source.run(number, semel.Postgres(uri, table="numbers"))
    assert words in caplog.text
    assert numbers(place) == list(range(10))


def test_a_full_disk_is_waited_for(
    broker: EmbeddedBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite's limit on pages stands for the disk. When there is room again, the batch is written."""
    place = Place("sqlite", str(tmp_path / "shop.db"))
    source, target = Input(broker.bootstrap), place.target(table="numbers", create=True)
    source.write(range(10))
    source.run(number, target)
    pages = [place.ask("PRAGMA page_count")[0][0]]
    connect = sqlite3.connect

    def small(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*arguments, **options)
        connection.execute(f"PRAGMA max_page_count = {pages[0]}")
        return connection

    monkeypatch.setattr(sqlite3, "connect", small)
    source.write(b"%d" % n for n in range(10, 3_000))

    def make_room() -> None:
        wait_until(lambda: "is full" in caplog.text, "the disk to be full")
        pages[0] = 10_000

    room = threading.Thread(target=make_room)
    room.start()
    with caplog.at_level(logging.WARNING, "semel.bridges"):
        source.run(number, target)
    room.join()
    monkeypatch.undo()
    assert numbers(place) == list(range(3_000))


def test_a_full_disk_of_a_server_is_waited_for(broker: EmbeddedBroker, caplog: pytest.LogCaptureFixture) -> None:
    """The table is on a real disk without room for its next page; when there is room, the batch is written."""
    with small_disk(8) as disk, Postgres() as server:
        place = make_postgres(server)
        place.do(f"CREATE TABLESPACE small LOCATION '{disk.folder}'")
        place.do("CREATE TABLE numbers (number bigint, place bigint, at bigint) TABLESPACE small")
        source, target = Input(broker.bootstrap), place.target(table="numbers", retry_s=120)
        source.write(range(10))
        source.run(number, target)
        disk.fill()
        source.write(range(10, 3_000))

        def make_room() -> None:
            wait_until(lambda: caplog.text.count("its disk is full") >= 3, "three tries")
            disk.make_room()

        room = threading.Thread(target=make_room)
        room.start()
        with caplog.at_level(logging.WARNING, "semel.bridges"):
            source.run(number, target)
        room.join()
        assert numbers(place) == list(range(3_000))


def test_a_full_disk_for_the_servers_log_loses_and_repeats_nothing(
    broker: EmbeddedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """pg_wal is on a real disk of its own. The server panics, and starts again when somebody has made room."""
    with small_disk(64) as disk, Postgres() as server:
        move_log(server, disk.folder / "pg_wal")
        place = make_postgres(server)
        place.do("CREATE TABLE numbers (number bigint, text text)")
        source, target = Input(broker.bootstrap), place.target(table="numbers", retry_s=120)
        source.write(range(10))
        source.run(large, target)
        disk.fill()
        source.write(range(10, 20_000))

        def make_room() -> None:
            server.wait_ended()
            wait_until(lambda: caplog.text.count("cannot be reached") >= 2, "two tries without a server")
            disk.make_room()
            server.start()

        room = threading.Thread(target=make_room)
        room.start()
        with caplog.at_level(logging.WARNING, "semel.bridges"):
            source.run(large, target)
        room.join()
        assert "PANIC" in (server.folder / "postgres.log").read_text()
        assert numbers(place) == list(range(20_000))


def large(row: Any) -> dict[str, Any]:
    """20,000 of these are more than two files of the log. Longer text would be compressed."""
    return {"number": int(row.value), "text": "x" * 1_900}


@pytest.mark.chaos
def test_a_server_that_is_away_for_a_minute_is_waited_for(
    broker: EmbeddedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """A whole minute, by the clock, with the default of retry_s."""
    with Postgres() as server:
        place = make_postgres(server)
        place.do("CREATE TABLE numbers (number bigint, place bigint, at bigint)")
        source, target = Input(broker.bootstrap), place.target(table="numbers")
        source.write(range(50))
        source.run(number, target)
        source.write(range(50, 100))
        server.stop_at_once()
        back = threading.Timer(60, server.start)
        back.start()
        source.run(number, target)
        back.join()
        assert numbers(place) == list(range(100))
    assert caplog.text.count("Next try in") >= 6
    assert "The database is back after 6" in caplog.text


def test_a_table_that_is_dropped_in_the_middle_stops_the_run_with_nothing_lost(
    broker: EmbeddedBroker, place: Place
) -> None:
    """One clear error; when the table is there again, the next run goes on."""
    source, target = Input(broker.bootstrap, 1), place.target(table="numbers")
    source.write(range(10))

    def drop(row: Any) -> dict[str, Any]:
        if int(row.value) == 6:
            place.do("ALTER TABLE numbers RENAME TO away")
        return number(row)

    with pytest.raises(semel.DatabaseError, match='relation "numbers" does not exist'):
        source.run(drop, target, transaction_records_max=2)
    place.do("ALTER TABLE away RENAME TO numbers")
    source.run(number, target)
    assert numbers(place) == list(range(10))


def test_pauses_grow_with_jitter_and_end_with_the_time() -> None:
    """On a clock that only the pauses move: the first within 0.1 s, none above 10 s, all of them 60 s at most."""
    now = [0.0]
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        now[0] += seconds

    retries = Retries(60, lambda: False, clock=lambda: now[0], pause=pause)
    gone = DatabaseError("gone", is_transient=True)

    def fail_for_ever() -> None:
        while True:
            before = now[0]
            retries.failed(gone)
            pauses.append(now[0] - before)

    with pytest.raises(DatabaseError, match="Tried for retry_s=60 s"):
        fail_for_ever()
    assert 0.05 <= pauses[0] <= 0.1
    assert max(pauses) <= 10
    assert 59.9 <= now[0] <= 61
    assert len(set(pauses)) == len(pauses)
    with pytest.raises(DatabaseError, match="broken"):
        retries.failed(DatabaseError("broken"))
