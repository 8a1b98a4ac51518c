"""`semel.relay` in ordinary use: routing, restarts, clean-up, dead letters, for both databases."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest
from relay_scene import Outbox, broker, in_postgres, in_sqlite, outbox, server
from session_scene import wait_until

import semel
from semel.bridges.relay import postgres_source
from semel.testing.embedded import EmbeddedBroker
from semel.testing.postgres import Postgres

__all__ = ["broker", "outbox", "server"]


def test_each_row_is_relayed_once_and_a_new_run_goes_on(outbox: Outbox) -> None:
    """G1: progress is in Kafka; no row is marked."""
    outbox.write(1, 50)
    report = outbox.relay()
    assert (report.rows, report.dead_letters, report.deleted) == (50, 0, 0)
    outbox.write(51, 80)
    assert outbox.relay().rows == 30
    assert outbox.relay().rows == 0
    assert outbox.has_each_once(80)
    assert outbox.ask("SELECT count(*) FROM outbox") == [(80,)]


def test_many_rows_go_in_portions_and_a_portion_may_end_anywhere(outbox: Outbox) -> None:
    """A transaction has at most so many rows; a run that stops in the middle of an interval is continued."""
    outbox.write(1, 95)
    report = outbox.relay(transaction_rows_max=10)
    assert (report.rows, report.transactions) == (95, 11)  # the first one says whose progress it is
    assert outbox.has_each_once(95)


@pytest.mark.parametrize(("ids_max", "rows_max"), [(7, 3), (7, 7), (10, 100), (95, 10), (94, 10)])
def test_an_interval_with_more_rows_than_ids_are_looked_up_at_once_is_relayed_whole(
    server: Postgres, broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch, ids_max: int, rows_max: int
) -> None:
    """The end of the ids in memory is not the end of the interval."""
    monkeypatch.setattr(postgres_source, "_IDS_MAX", ids_max)
    outbox = in_postgres(server, broker)
    outbox.make_table()
    outbox.write(1, 95)
    assert outbox.relay(transaction_rows_max=rows_max, delete=True).rows == 95
    outbox.write(96, 120)
    assert outbox.relay(transaction_rows_max=rows_max, delete=True).rows == 25
    assert outbox.has_each_once(120)
    assert outbox.ask("SELECT count(*) FROM outbox") == [(0,)]


def test_transaction_ids_that_get_another_digit_are_compared_as_numbers(broker: EmbeddedBroker) -> None:
    """From 999 to 1000: as text, 999 would stay the highest, and later rows would never be looked for."""
    with Postgres() as server:
        outbox = Outbox("postgres", server.uri, broker.bootstrap)
        outbox.make_table()
        with psycopg.connect(server.uri, autocommit=True) as connection:
            while int(connection.execute("SELECT pg_current_xact_id()::text").fetchone()[0]) < 997:  # type: ignore[index]
                pass
        for number in range(1, 7):
            outbox.write(number, number)
            assert outbox.relay().rows == 1
        [(lowest,), (highest,)] = outbox.ask(
            "SELECT min(semel_xid::text::int) FROM outbox UNION ALL SELECT max(semel_xid::text::int) FROM outbox"
        )
        assert lowest < 1000 <= highest
        assert outbox.has_each_once(6)


def test_the_id_may_have_a_name_that_the_relay_uses_itself(server: Postgres, broker: EmbeddedBroker) -> None:
    """Rows are ordered by the column, and not by another expression of the same name."""
    outbox = in_postgres(server, broker)
    outbox.do(
        "CREATE TABLE outbox (size bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, key text, value text, "
        "semel_xid xid8 NOT NULL DEFAULT pg_current_xact_id())",
        "INSERT INTO outbox (key, value) SELECT 'k', repeat('0', 50 - i) || i FROM generate_series(1, 50) i",
    )
    assert outbox.relay(id="size", topic=outbox.topic, transaction_rows_max=7).rows == 50
    assert outbox.numbers() == list(range(1, 51))


def test_key_headers_time_and_value_arrive_as_they_are(outbox: Outbox) -> None:
    """Text and JSON as UTF-8, headers from JSON, the row's own time."""
    outbox.do(
        "INSERT INTO outbox (topic, key, value, headers, created_at) VALUES "
        f'(\'{outbox.topic}\', \'k\', \'{{"name": "Zoë"}}\', \'{{"trace": "7", "n": 2, "none": null}}\', '
        "'2026-03-01 12:00:00+00:00')",
        f"INSERT INTO outbox (topic, key, value) VALUES ('{outbox.topic}', 'k', NULL)",
    )
    outbox.relay()
    first, second = outbox.read()
    assert (first.key, first.value) == (b"k", '{"name": "Zoë"}'.encode())
    assert sorted(first.headers) == [("n", b"2"), ("none", None), ("trace", b"7")]
    assert first.timestamp_ms == 1_772_366_400_000
    assert second.value is None
    assert abs(second.timestamp_ms - time.time() * 1000) < 60_000


def test_the_topic_can_be_fixed_or_made_of_columns(outbox: Outbox) -> None:
    """One option for all three ways."""
    outbox.do("ALTER TABLE outbox ADD COLUMN aggregate_type TEXT", "ALTER TABLE outbox ADD COLUMN part TEXT")
    made = outbox.create_topic(f"events.{outbox.name}.eu")
    outbox.do(f"INSERT INTO outbox (topic, value, aggregate_type, part) VALUES ('unused', '1', '{outbox.name}', 'eu')")
    outbox.relay(topic="events.{aggregate_type}.{part}")
    outbox.relay(topic=outbox.topic, name=f"{outbox.name}-fixed")
    assert [record.value for record in outbox.read(made)] == [b"1"]
    assert [record.value for record in outbox.read()] == [b"1"]


def test_columns_can_have_other_names_and_types(server: Postgres, broker: EmbeddedBroker) -> None:
    """A table of the user's own: uuid keys, jsonb and bytea values, time in milliseconds, an id of another name."""
    outbox = in_postgres(server, broker)
    outbox.do(
        "CREATE SCHEMA sales",
        'CREATE TABLE sales."Events" (seq serial PRIMARY KEY, "aggregateId" uuid, payload jsonb, at bigint, '
        "tx xid8 NOT NULL DEFAULT pg_current_xact_id())",
        'CREATE INDEX ON sales."Events" (tx)',
        'INSERT INTO sales."Events" ("aggregateId", payload, at) '
        "VALUES ('c0ffee00-0000-4000-8000-000000000000', '{\"a\":  1}', 5000)",
    )
    named: dict[str, Any] = {"id": "seq", "key": "aggregateId", "value": "payload", "timestamp": "at", "xid": "tx"}
    outbox.relay(table="sales.Events", topic=outbox.topic, **named)
    [record] = outbox.read()
    assert record[:2] == (b"c0ffee00-0000-4000-8000-000000000000", b'{"a": 1}')
    assert record.timestamp_ms == 5000
    outbox.do("ALTER TABLE sales.\"Events\" ALTER COLUMN payload TYPE bytea USING '\\x00ff'::bytea")
    outbox.do("INSERT INTO sales.\"Events\" (payload) VALUES ('\\x00ff')")
    outbox.relay(table="sales.Events", topic=outbox.topic, **named)
    assert b"\x00\xff" in [record.value for record in outbox.read()]


def test_relayed_rows_are_deleted_and_no_others(outbox: Outbox) -> None:
    """Rows of an open transaction, and rows of another relay that has not come so far, stay."""
    outbox.write(1, 30)
    outbox.relay(transaction_rows_max=7)
    outbox.write(31, 40)
    report = outbox.relay(delete=True, transaction_rows_max=4)
    assert (report.rows, report.deleted) == (10, 40)
    assert outbox.ask("SELECT count(*) FROM outbox") == [(0,)]
    outbox.write(41, 45)
    assert outbox.relay(delete=True).deleted == 5
    assert outbox.has_each_once(45)


def test_rows_of_an_open_transaction_hold_nobody_up_and_are_not_deleted(
    server: Postgres, broker: EmbeddedBroker
) -> None:
    """The horizon is an interval: rows that commit meanwhile go out, and the late one goes out when it commits."""
    outbox = in_postgres(server, broker)
    outbox.make_table()
    with psycopg.connect(outbox.address) as slow:
        slow.execute(f"INSERT INTO outbox (topic, key, value) VALUES ('{outbox.topic}', 'slow', '1')".encode())
        with slow.transaction():  # a savepoint: xmin of this row is another id than the transaction's
            slow.execute(f"INSERT INTO outbox (topic, key, value) VALUES ('{outbox.topic}', 'slow', '2')".encode())
        outbox.write(3, 20)
        assert outbox.relay(delete=True).rows == 18
        slow.commit()
    report = outbox.relay(delete=True)
    assert (report.rows, report.deleted) == (2, 2)
    assert sorted(outbox.numbers()) == list(range(1, 21))


def test_rows_of_copy_and_rows_that_are_updated_are_relayed_once(server: Postgres, broker: EmbeddedBroker) -> None:
    """COPY fills the transaction's id in as INSERT does; an UPDATE, and VACUUM FREEZE, leave it as it was."""
    outbox = in_postgres(server, broker)
    outbox.make_table()
    with psycopg.connect(outbox.address) as connection:
        with connection.cursor().copy("COPY outbox (topic, key, value) FROM STDIN") as copy:
            for number in range(1, 101):
                copy.write_row((outbox.topic, f"k{number % 7}", str(number)))
        connection.commit()
    assert outbox.relay().rows == 100
    outbox.do("UPDATE outbox SET value = 'changed'", "VACUUM FREEZE outbox")
    assert outbox.relay().rows == 0
    assert outbox.has_each_once(100)


def test_bad_rows_stop_the_relay_with_the_row_named(outbox: Outbox) -> None:
    """Rows before it are committed, and nothing overtakes it."""
    outbox.write(1, 5)
    outbox.do("INSERT INTO outbox (topic, key, value) VALUES ('no-such-topic', 'k', '6')")
    outbox.write(7, 9)
    with pytest.raises(semel.RecordFailed, match="Row 6 of 'outbox' cannot be relayed: The cluster has no topic"):
        outbox.relay()
    assert sorted(outbox.numbers()) == [1, 2, 3, 4, 5]
    outbox.do(f"UPDATE outbox SET topic = '{outbox.topic}' WHERE id = 6")
    assert outbox.relay().rows == 4
    assert sorted(outbox.numbers()) == list(range(1, 10))


def test_a_row_cannot_write_the_progress_of_a_relay(outbox: Outbox) -> None:
    """Such a row could make another relay begin again, skip rows, or not start at all."""
    outbox.write(1, 5)
    own = outbox.create_topic(f"own-progress-{outbox.name}", 16, cleanup_policy="compact")
    assert outbox.relay().rows == 5
    assert outbox.relay(name=f"{outbox.name}-2", progress_topic=own, topic=outbox.topic).rows == 5
    for topic in ("semel-relay-progress", "semel-ledger", "semel-source-progress", own):
        outbox.do(f"INSERT INTO outbox (topic, key, value) VALUES ('{topic}', '/relay/{outbox.name}', 'no progress')")
        with pytest.raises(semel.RecordFailed, match="keeps the progress of pipelines"):
            outbox.relay(name=f"{outbox.name}-2", progress_topic=own)
        with pytest.raises(semel.ConfigError, match="progress"):
            outbox.relay(topic=topic, progress_topic=topic)
        outbox.do(f"DELETE FROM outbox WHERE topic = '{topic}'")
    assert outbox.relay().rows == 0


def test_bad_rows_go_to_the_dead_letter_topic_inside_the_same_transaction(outbox: Outbox) -> None:
    """An unknown topic, a row too large for its topic, headers that are no JSON object: each once, with its reason."""
    letters = outbox.create_topic(f"letters-{outbox.name}", 1)
    small = outbox.create_topic(f"small-{outbox.name}", 1, max_message_bytes="1000")
    outbox.do(
        f"INSERT INTO outbox (topic, key, value) VALUES ('no-such-topic', 'k', '1'), ('{outbox.topic}', 'k', '2'), "
        f"('{small}', 'k', '{'x' * 5_000}'), ('bad name!', 'k', '4')",
        f"INSERT INTO outbox (topic, key, value, headers) VALUES ('{outbox.topic}', 'k', '5', '[1]')",
    )
    report = outbox.relay(dead_letter=letters)
    assert (report.rows, report.dead_letters) == (5, 4)
    assert outbox.numbers() == [2]
    found = {dict(record.headers)["semel.dead-letter.row"]: record for record in outbox.read(letters)}
    reasons = {row: (dict(record.headers)["semel.dead-letter.error"] or b"").decode() for row, record in found.items()}
    assert "no topic 'no-such-topic'" in reasons[b"1"]
    assert "max.message.bytes=1000" in reasons[b"3"]
    assert "not a legal name" in reasons[b"4"]
    assert "not an object of JSON" in reasons[b"5"]
    assert found[b"5"].value == b"5"
    assert dict(found[b"5"].headers)["semel.dead-letter.table"] == b"outbox"
    assert outbox.relay(dead_letter=letters).rows == 0
    outbox.do("INSERT INTO outbox (topic, value) VALUES ('no-such-topic', '6'), ('no-such-topic', '7')")
    with pytest.raises(semel.TooManyDeadLetters):
        outbox.relay(dead_letter=letters, dead_letter_max=1)
    assert len(outbox.read(letters)) == 4


def test_a_row_that_only_the_broker_refuses_is_found_by_halves(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the topic's settings cannot be read, as with a missing right, the limit is not known before."""
    monkeypatch.setattr("semel.client.topic_rules._describe", lambda cluster, topic: {})
    small = outbox.create_topic(f"small-{outbox.name}", 1, max_message_bytes="1000")
    outbox.do(f"INSERT INTO outbox (topic, value) VALUES ('{small}', '1'), ('{small}', '2'), ('{small}', '3')")
    outbox.do(f"INSERT INTO outbox (topic, value) VALUES ('{small}', '{'x' * 5_000}')")
    with pytest.raises(semel.RecordFailed, match=r"Row 4 of 'outbox' cannot be relayed: .*max.message.bytes"):
        outbox.relay(compression_type="none", batch_size=100)
    assert [record.value for record in outbox.read(small)] == [b"1", b"2", b"3"]


def test_a_new_row_is_there_within_a_second(outbox: Outbox) -> None:
    """At the default pace, from an idle relay."""
    stop, ready = threading.Event(), threading.Event()
    outbox.write(1, 1)
    running = threading.Thread(
        target=lambda: outbox.relay(idle_ms=None, stop=stop, on_ready=ready.set), name="relay", daemon=True
    )
    running.start()
    try:
        assert ready.wait(30)
        wait_until(lambda: outbox.numbers() == [1], "the first row")
        with semel.Fetcher({"bootstrap.servers": outbox.bootstrap}) as fetcher:
            fetcher.assign({(outbox.topic, partition): "latest" for partition in range(3)})
            fetcher.fetch(0)
            times: list[float] = []
            for number in range(2, 7):
                outbox.write(number, number)
                began = time.monotonic()
                wait_until(lambda: any(part.table.num_rows for part in fetcher.fetch(100)), "the row")
                times.append(time.monotonic() - began)
    finally:
        stop.set()
        running.join(30)
    assert sorted(times)[2] < 1.0
    assert outbox.has_each_once(6)


def test_a_restart_by_the_command_in_a_new_process_goes_on(outbox: Outbox) -> None:
    """`semel relay` prints when it is ready and what it did, and exits with status 0."""

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        told = ["relay", outbox.address, "--name", outbox.name, "--bootstrap", outbox.bootstrap, "--idle-ms", "0"]
        command = [str(Path(sys.executable).parent / "semel"), *told, *more]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    outbox.write(1, 20)
    first = run()
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("semel relay ready: outbox of ")
    assert first.stdout.endswith("20 rows in 2 transactions.\n")
    outbox.write(21, 30)
    second = run("--delete", "--setting", "compression.type=zstd")
    assert second.stdout.endswith("10 rows in 1 transactions, 30 rows deleted.\n"), second.stderr
    assert outbox.has_each_once(30)
    refused = run("--table", "orders")
    assert refused.returncode == 2
    assert refused.stderr.startswith("There is no table 'orders'")


def test_memory_is_bounded_by_bytes_and_not_only_by_rows(tmp_path: Path, broker: EmbeddedBroker) -> None:
    """Large rows go few at a time."""
    outbox = in_sqlite(tmp_path, broker)
    outbox.make_table()
    rows = ", ".join(f"('{outbox.topic}', hex(zeroblob(200000)))" for _ in range(100))
    outbox.do(f"INSERT INTO outbox (topic, value) VALUES {rows}")
    report = outbox.relay()
    assert report.rows == 100
    assert report.transactions >= 100 * 400_000 / 8_388_608
