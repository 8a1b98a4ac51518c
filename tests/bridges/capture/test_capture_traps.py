"""What has bitten other tools that read Postgres' log: each as a test of its own."""

from __future__ import annotations

import threading
import time
from collections import Counter

import psycopg
import pytest
from capture_scene import SETTINGS, Source, broker, server, source
from session_scene import wait_until

import semel
from semel.bridges.capture.lsn import parse_lsn
from semel.testing.embedded import EmbeddedBroker
from semel.testing.postgres import Postgres

__all__ = ["broker", "server", "source"]

NUMBERS = "CREATE TABLE accounts (id int PRIMARY KEY, note text)"


def ids(source: Source) -> list[int]:
    return [one.value["id"] for one in source.changes()]


def test_rows_of_one_copy_share_a_place_in_the_log(source: Source) -> None:
    """dbz#1554: COPY logs many rows as one record. Written in small portions, each row is there once, in order."""
    source.make(NUMBERS)
    source.capture()
    with psycopg.connect(source.address) as connection:
        with connection.cursor().copy("COPY accounts FROM STDIN") as copy:
            for number in range(1_000):
                copy.write_row((number, "x"))
        connection.commit()
    for _ in range(3):  # the slot is told a place between the rows each time, and must send them again
        source.capture_some(2, transaction_rows_max=70)
    assert ids(source) == list(range(420))
    assert source.ends()[1:] == []
    source.capture(transaction_rows_max=70)
    assert ids(source) == list(range(1_000))
    assert [one.index for one in source.changes()] == list(range(1_000))
    assert [end.events for end in source.ends()] == [0, 1_000]


def test_transactions_that_overlap_come_in_the_order_of_their_commits(source: Source) -> None:
    """Places of changes go up and down then. The capture is stopped between the two commits, and goes on after it."""
    source.make(NUMBERS)
    source.capture()
    with psycopg.connect(source.address) as early, psycopg.connect(source.address) as late:
        early.execute("INSERT INTO accounts VALUES (1, 'early')")
        late.execute("INSERT INTO accounts VALUES (2, 'late')")
        late.execute("INSERT INTO accounts VALUES (3, 'late')")
        late.commit()
        assert source.capture().rows == 2
        source.do("INSERT INTO accounts VALUES (4, 'between')")
        assert source.capture().rows == 1
        early.execute("INSERT INTO accounts VALUES (5, 'early')")
        early.commit()
    assert source.capture().rows == 2
    assert [(one.number, one.value["id"]) for one in source.changes()] == [(1, 2), (1, 3), (2, 4), (3, 1), (3, 5)]


def test_messages_in_the_log_move_no_position_astray(source: Source) -> None:
    """dbz#2004, #2058: a transactional message tells another kind of place than the changes around it."""
    source.make(NUMBERS)
    source.capture()
    for number in range(1, 30, 3):
        with psycopg.connect(source.address) as connection:
            connection.execute(f"INSERT INTO accounts VALUES ({number}, 'a')".encode())
            connection.execute("SELECT pg_logical_emit_message(true, 'outbox', repeat('m', 9000))")
            connection.execute(f"INSERT INTO accounts VALUES ({number + 1}, 'b')".encode())
        source.do(
            "SELECT pg_logical_emit_message(true, 'outbox', 'alone')",
            "SELECT pg_logical_emit_message(false, 'outbox', 'outside')",
            f"INSERT INTO accounts VALUES ({number + 2}, 'c')",
        )
        if number % 2:
            source.capture(transaction_rows_max=2)
    source.capture()
    assert ids(source) == list(range(1, 31))
    assert [end.events for end in source.ends()] == [0] + [2, 1] * 10


def test_a_slot_that_was_made_again_is_a_loss_that_is_told(source: Source) -> None:
    """DBZ-5739: with the same name it would go on as if nothing had been. Nothing is written then."""
    source.make(NUMBERS)
    source.do("INSERT INTO accounts VALUES (1, 'a')")
    source.capture()
    slot = source.slot_name
    source.drop_slot()
    source.do(
        "INSERT INTO accounts VALUES (2, 'lost')",
        f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')",
        "INSERT INTO accounts VALUES (3, 'seen')",
    )
    for _ in range(2):
        with pytest.raises(semel.ConfigError, match=f"slot '{slot}' was made again") as told:
            source.capture()
        assert "cannot be had any more" in str(told.value)
        assert "another name=" in str(told.value)
    source.do(f"SELECT pg_replication_slot_advance('{slot}', pg_current_wal_lsn())")
    with pytest.raises(semel.ConfigError, match="moved on by something else"):
        source.capture()
    assert ids(source) == [1]
    source.name += "-new"  # what the message says: another name, which takes a snapshot
    source.make()
    source.capture()
    assert sorted(ids(source)) == [1, 2, 3]


def test_a_slot_that_is_made_again_under_a_running_capture_is_told(source: Source) -> None:
    """The connection is lost, and before the capture is back the slot is another one: it looks again."""
    source.make(NUMBERS)
    stop, errors = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            source.capture(idle_ms=None, stop=stop)
        except semel.SemelError as error:
            errors.append(error)

    running = threading.Thread(target=run)
    running.start()
    source.do("INSERT INTO accounts VALUES (1, 'a')")
    wait_until(lambda: bool(source.changes()), "the stream")
    slot = source.slot_name
    with psycopg.connect(source.address, autocommit=True) as connection:
        connection.execute(
            f"DO $$ BEGIN PERFORM pg_terminate_backend(active_pid, 9000) FROM pg_replication_slots "
            f"WHERE slot_name = '{slot}'; PERFORM pg_drop_replication_slot('{slot}'); END $$".encode()
        )
        connection.execute("INSERT INTO accounts VALUES (2, 'lost')")
        connection.execute(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')".encode())
    running.join(60)
    stop.set()
    assert not running.is_alive()
    assert "cannot be had any more" in str(errors[0])
    assert ids(source) == [1]


def test_a_slot_that_moved_on_while_idle_is_told_from_one_that_was_made_again(source: Source) -> None:
    """An idle capture moves its slot too, so it writes to Kafka first how far."""
    source.make(NUMBERS)
    source.capture()
    stop = threading.Event()
    running = threading.Thread(target=lambda: source.capture(idle_ms=None, stop=stop, heartbeat_s=0.1))
    running.start()
    before = parse_lsn(source.slot()["confirmed_flush_lsn"])
    source.do("CREATE TABLE other (id int)", "INSERT INTO other VALUES (1)")
    wait_until(lambda: parse_lsn(source.slot()["confirmed_flush_lsn"]) > before, "the slot to move")
    stop.set()
    running.join()
    source.do("INSERT INTO accounts VALUES (1, 'a')")
    assert source.capture().rows == 1


@pytest.mark.parametrize("heartbeat_s", [0.2, 3600.0])
def test_an_idle_table_beside_a_busy_one_does_not_keep_its_log(broker: EmbeddedBroker, heartbeat_s: float) -> None:
    """The slot moves with the heartbeat, and what Postgres keeps for it stays small. Without one it only grows."""
    with Postgres(settings=SETTINGS) as server:
        source = Source("postgres", server.uri, broker.bootstrap)
        source.make(NUMBERS, "CREATE TABLE busy (id bigint GENERATED ALWAYS AS IDENTITY, filler text)")
        source.capture()
        stop = threading.Event()
        running = threading.Thread(target=lambda: source.capture(idle_ms=None, stop=stop, heartbeat_s=heartbeat_s))
        running.start()
        try:
            kept: list[int] = []
            for _ in range(12):
                source.do(
                    "INSERT INTO busy (filler) SELECT repeat('x', 1000) FROM generate_series(1, 1500)", "CHECKPOINT"
                )
                time.sleep(0.25)
                [(bytes_kept,)] = source.ask("SELECT pg_current_wal_lsn() - restart_lsn FROM pg_replication_slots")
                kept.append(int(bytes_kept))
        finally:
            stop.set()
            running.join()
    print(f"kept after each 1.7 MB: {kept}")
    if heartbeat_s < 1:
        assert max(kept[4:]) < 8_000_000
    else:
        assert kept[-1] > 16_000_000


def test_a_failover_slot_is_made_when_it_is_asked_for(broker: EmbeddedBroker) -> None:
    """Postgres 17 and later; the slot says so. On 16 the wish is refused in one sentence."""
    with Postgres(18, settings=SETTINGS) as server:
        source = Source("postgres", server.uri, broker.bootstrap)
        source.make(NUMBERS)
        source.do("INSERT INTO accounts VALUES (1, 'a')")
        source.capture(failover=True)
        assert source.slot()["failover"] is True
        source.do("INSERT INTO accounts VALUES (2, 'b')", "DELETE FROM accounts WHERE id = 1")
        assert source.capture(failover=True).rows == 2
        assert Counter(ids(source)) == Counter([1, 2, 1])


def test_a_promoted_server_goes_on_where_histories_are_the_same(broker: EmbeddedBroker) -> None:
    """Its timeline is another one; the history file says that everything that was written is in both."""
    with Postgres(settings=SETTINGS) as server:
        source = Source("postgres", server.uri, broker.bootstrap)
        source.make(NUMBERS)
        source.do("INSERT INTO accounts VALUES (1, 'a')")
        source.capture()
        promote(server, source)
        source.do("INSERT INTO accounts VALUES (2, 'b')")
        assert source.capture().rows == 1
        assert source.capture().rows == 0
        assert ids(source) == [1, 2]


def promote(server: Postgres, source: Source) -> None:
    """The server becomes a standby of nobody and is promoted: the next timeline."""
    source.do("CHECKPOINT")
    server.stop_at_once()
    (server.folder / "data" / "standby.signal").touch()
    server.start()
    wait_until(lambda: can_connect(source), "the standby")
    assert source.ask("SELECT pg_promote(true, 30)") == [(True,)]


def can_connect(source: Source) -> bool:
    try:
        return source.ask("SELECT 1") == [(1,)]
    except psycopg.OperationalError:
        return False
