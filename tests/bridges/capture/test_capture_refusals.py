"""What a capture refuses: one clear sentence each, before it reads or fences anything, and nothing is lost."""

from __future__ import annotations

import resource
import threading
from typing import Any

import psycopg
import pytest
from capture_scene import SETTINGS, Source, broker, server, source
from psycopg.conninfo import make_conninfo
from relay_scene import read_topic
from session_scene import wait_until

import semel
from semel.bridges.capture.checks import SlotState
from semel.bridges.capture.decide import decide_capture
from semel.bridges.capture.lsn import end_of_timeline
from semel.bridges.capture.options import CaptureOptions, make_capture_options
from semel.bridges.capture.positions import CapturePosition
from semel.bridges.relay.progress import RelayProgress
from semel.testing.embedded import EmbeddedBroker
from semel.testing.postgres import Postgres

__all__ = ["broker", "server", "source"]

NUMBERS = "CREATE TABLE accounts (id int PRIMARY KEY, note text)"


def refused(source: Source, **options: Any) -> str:
    with pytest.raises(semel.SemelError) as told:
        source.capture(**options)
    text = str(told.value)
    assert "\n" not in text
    return text


TABLES = [
    ("CREATE TABLE other (id int PRIMARY KEY)", "There is no table 'accounts'"),
    ("CREATE TABLE accounts (id int)", "REPLICA IDENTITY FULL"),
    (f"{NUMBERS}; ALTER TABLE accounts REPLICA IDENTITY NOTHING", "REPLICA IDENTITY FULL"),
    (NUMBERS.replace("TABLE", "UNLOGGED TABLE"), "SET LOGGED"),
    ("CREATE VIEW accounts AS SELECT 1 AS id", "not an ordinary or partitioned table"),
    (f"{NUMBERS}; CREATE PUBLICATION p FOR TABLE accounts WITH (publish = 'insert')", "leaves out some kinds"),
    ("CREATE TABLE other (id int PRIMARY KEY); " + NUMBERS + "; CREATE PUBLICATION p FOR TABLE other", "SET TABLE"),
]


@pytest.mark.parametrize(("statements", "said"), TABLES, ids=[str(number) for number in range(len(TABLES))])
def test_tables_and_publications_that_would_lose_something_are_refused(
    source: Source, statements: str, said: str
) -> None:
    """Each message says what to run. Neither slot nor publication is left behind."""
    source.make(*statements.split("; "))
    text = refused(source, publication="p")
    assert said in text
    assert "Nothing was captured" in text
    assert source.ask(f"SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{source.slot_name}'") == [(0,)]


def test_a_server_without_logical_log_is_refused(broker: EmbeddedBroker) -> None:
    """wal_level is replica unless somebody has set it."""
    with Postgres() as server:
        source = Source("postgres", server.uri, broker.bootstrap)
        source.make(NUMBERS)
        text = refused(source)
        assert "wal_level" in text
        assert "ALTER SYSTEM SET wal_level = 'logical'" in text


def test_missing_rights_are_named(source: Source) -> None:
    """To read the log, to read the table, to make a publication."""
    source.make(NUMBERS)
    role = source.slot_name
    source.do(f"CREATE ROLE {role} LOGIN")
    source.address = source.address.replace("postgres@", f"{role}@")
    assert 'GRANT SELECT ON "public"."accounts"' in refused(source)
    as_owner(source, f"GRANT SELECT ON accounts TO {role}")
    assert "REPLICATION" in refused(source)
    as_owner(source, f"ALTER ROLE {role} REPLICATION")
    text = refused(source)
    assert "Let the owner of the tables run: CREATE PUBLICATION" in text
    as_owner(source, text.partition("run: ")[2])
    assert source.capture().rows == 0


def as_owner(source: Source, statement: str) -> None:
    with psycopg.connect(source.address.replace(f"{source.slot_name}@", "postgres@"), autocommit=True) as connection:
        connection.execute(statement.encode())


def test_a_slot_that_another_client_reads_is_taken(source: Source) -> None:
    """Who has it is named; nothing is fenced. Free again, the capture goes on."""
    source.make(NUMBERS)
    source.capture()
    uri = make_conninfo(source.address, replication="database", application_name="debezium")
    other = psycopg.pq.PGconn.connect(uri.encode())
    begin = (
        f"START_REPLICATION SLOT {source.slot_name} LOGICAL 0/0 (proto_version '1', "
        f"publication_names '{source.slot_name}')"
    )
    assert other.exec_(begin.encode()).status == psycopg.pq.ExecStatus.COPY_BOTH
    source.do("INSERT INTO accounts VALUES (1, 'a')")
    text = refused(source)
    assert "is taken" in text
    assert "debezium" in text
    other.finish()
    wait_until(lambda: not source.slot()["active"], "the slot to be free")
    assert source.capture().rows == 1


def test_a_slot_of_that_name_that_no_progress_speaks_of_is_not_touched(source: Source) -> None:
    """It may be somebody else's, or the progress topic was deleted."""
    source.make(NUMBERS)
    source.do(f"SELECT pg_create_logical_replication_slot('{source.slot_name}', 'pgoutput')")
    assert "no progress of" in refused(source)
    other_plugin = SlotState("wal2json", "d", None, None, 100, None)
    with pytest.raises(semel.ConfigError, match="belongs to something else"):
        decide_capture(some_options(), None, {"name": "d"}, other_plugin, 200, lambda _: None)


def test_a_slot_or_publication_that_is_gone_is_a_loss_that_is_told(source: Source) -> None:
    """Also if somebody has made the publication again, since what was logged meanwhile is not sent."""
    source.make(NUMBERS)
    source.capture()
    source.do(f"DROP PUBLICATION {source.slot_name}")
    assert f"publication '{source.slot_name}' is gone" in refused(source)
    source.do(f"CREATE PUBLICATION {source.slot_name} FOR TABLE accounts")
    assert "was made again" in refused(source)
    source.drop_slot()
    text = refused(source)
    assert "is gone" in text
    assert "DROP PUBLICATION" in text


def test_a_slot_that_postgres_has_invalidated_is_told(broker: EmbeddedBroker) -> None:
    """max_slot_wal_keep_size: the server has removed what the slot needs."""
    settings = {**SETTINGS, "max_slot_wal_keep_size": "1MB", "wal_keep_size": "0", "max_wal_size": "32MB"}
    with Postgres(settings=settings) as server:
        source = Source("postgres", server.uri, broker.bootstrap)
        source.make(NUMBERS, "CREATE TABLE busy (filler text)")
        source.capture()
        for _ in range(4):
            source.do(
                "INSERT INTO busy SELECT repeat('x', 1000) FROM generate_series(1, 17000)",
                "SELECT pg_switch_wal()",
                "CHECKPOINT",
            )
        text = refused(source)
    assert "invalidated" in text
    assert "max_slot_wal_keep_size" in text


def test_other_tables_need_another_name(source: Source) -> None:
    """A table that is added would lack the rows that are there; one that was made again is another one."""
    source.make(NUMBERS, "CREATE TABLE entries (id int PRIMARY KEY)", tables=("accounts", "entries"))
    source.capture(tables=["accounts"])
    assert "SET TABLE" in refused(source)
    source.do(f"ALTER PUBLICATION {source.slot_name} ADD TABLE entries")
    text = refused(source)
    assert "other tables" in text
    assert "another name=" in text


def test_a_missing_topic_is_refused_before_a_slot_is_made(source: Source) -> None:
    """Else the first row would stop the capture, with a slot that keeps the log."""
    source.make(NUMBERS)
    assert "topic=" in refused(source, topic="nowhere.{table}")
    assert source.ask(f"SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{source.slot_name}'") == [(0,)]


def test_a_topic_for_ends_with_several_partitions_is_refused(source: Source) -> None:
    """Ends must have one order."""
    source.make(NUMBERS)
    source.create_topic(f"{source.name}.transactions")
    assert "need a topic with one" in refused(source)


@pytest.mark.parametrize("phase", ["snapshot", "stream"])
def test_a_row_that_is_too_large_stops_the_capture_or_goes_aside(source: Source, phase: str) -> None:
    """Nothing overtakes it; with a dead-letter topic it goes there, and its transaction is whole without it."""
    source.make(NUMBERS)
    rows = [
        "INSERT INTO accounts VALUES (1, 'before')",
        "INSERT INTO accounts VALUES (2, 'same'), (3, repeat('x', 2000000)), (4, 'same')",
        "INSERT INTO accounts VALUES (5, 'after')",
    ]
    if phase == "stream":
        source.capture()
    source.do(*rows)
    text = refused(source)
    assert "cannot be relayed" in text
    assert "dead_letter=" in text
    written = [one.value["id"] for one in source.changes()]
    assert written == ([1, 2] if phase == "stream" else [])
    letters = source.create_topic(f"{source.name}-letters")
    report = source.capture(dead_letter=letters)
    assert report.dead_letters == 1
    assert sorted(one.value["id"] for one in source.changes()) == [1, 2, 4, 5]
    [letter] = read_topic(source.bootstrap, letters)
    assert letter.key == b'{"id": 3}'
    assert b"accounts" in dict(letter.headers)["semel.change.table"]  # type: ignore[operator]
    assert sum(end.events for end in source.ends()) == 4


def test_a_key_that_changes_beside_a_large_value_is_refused_and_may_go_aside(source: Source) -> None:
    """The value is not in Postgres' log, so the row under its new key could not be written whole."""
    source.make(NUMBERS, "ALTER TABLE accounts ALTER COLUMN note SET STORAGE EXTERNAL")
    source.do("INSERT INTO accounts VALUES (1, repeat('x', 9000))")
    source.capture()
    source.do("UPDATE accounts SET id = 2")
    assert "REPLICA IDENTITY FULL" in refused(source)
    letters = source.create_topic(f"{source.name}-letters")
    assert source.capture(dead_letter=letters).dead_letters == 1
    source.do("ALTER TABLE accounts REPLICA IDENTITY FULL", "UPDATE accounts SET id = 3")
    source.capture(dead_letter=letters)
    assert source.changes()[-1].value == {"id": 3, "note": "x" * 9000}


def test_the_topic_of_the_ends_that_is_deleted_stops_the_capture(source: Source) -> None:
    """An end is no dead letter: readers would wait for it for ever."""
    source.make(NUMBERS)
    source.capture()
    stop, errors = threading.Event(), list[BaseException]()
    letters = source.create_topic(f"{source.name}-letters")

    def run() -> None:
        try:
            source.capture(idle_ms=None, stop=stop, dead_letter=letters)
        except semel.SemelError as error:
            errors.append(error)

    ready = threading.Thread(target=run)
    ready.start()
    wait_until(lambda: source.slot()["active"], "the stream")
    with semel.Admin({"bootstrap.servers": source.bootstrap}) as admin:
        admin.delete_topics(f"{source.name}.transactions")
    source.do("INSERT INTO accounts VALUES (1, 'a')")
    ready.join(60)
    assert not ready.is_alive()
    assert "The end of transaction 1 cannot be written" in str(errors[0])
    assert read_topic(source.bootstrap, letters) == []


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"tables": None}, "tables="),
    ({"outbox": "outbox"}, "tables="),
    ({"tables": "accounts"}, "no list of names"),
    ({"slot": "My-Slot"}, "slot="),
    ({"heartbeat_s": 0}, "heartbeat_s"),
    ({"topic": "shop.transactions"}, "ends of transactions"),
    ({"failover": True}, "Postgres 17"),
]


@pytest.mark.parametrize(("options", "said"), OPTIONS, ids=[said for _, said in OPTIONS])
def test_mistaken_options_are_refused(source: Source, options: dict[str, Any], said: str) -> None:
    """In one sentence, before anything is read."""
    source.make(NUMBERS)
    if "topic" in options:
        options = {"topic": f"{source.name}.transactions"}
    assert said in refused(source, **options)


def some_options() -> CaptureOptions:
    return make_capture_options(
        "shop",
        {"bootstrap.servers": "b:1"},
        tables=["accounts"],
        outbox=None,
        topic=None,
        slot=None,
        publication=None,
        failover=False,
        snapshot=True,
        heartbeat_s=10,
    )


@pytest.mark.parametrize(
    ("changed", "now_lsn", "left_at", "said"),
    [
        ({}, 200, None, None),
        ({}, 99, None, "put back to an earlier state"),
        ({"timeline": 2}, 200, 100, None),
        ({"timeline": 2}, 200, 99, "promoted without its last commits"),
        ({"timeline": 2}, 200, None, "promoted without its last commits"),
        ({"system": "other"}, 200, None, "another server"),
        ({"database": 6}, 200, None, "another database"),
    ],
)
def test_another_history_of_the_server_is_told(
    changed: dict[str, Any], now_lsn: int, left_at: int | None, said: str | None
) -> None:
    """After a failover the log may have gone on from a place before what was written."""
    before = {
        "kind": "postgres capture",
        "system": "s",
        "timeline": 1,
        "database": 5,
        "slot": "semel_shop",
        "name": "d",
    }
    progress = RelayProgress({**before, "tables": {}, "publication": 1}, CapturePosition(100, 3).encode())
    now = {**before, "tables": {}, "publication": 1, **changed}
    slot = SlotState("pgoutput", "d", None, None, 100, None)

    def decide() -> CapturePosition | None:
        return decide_capture(some_options(), progress, now, slot, now_lsn, lambda _: left_at)

    if said is None:
        assert decide() == CapturePosition(100, 3)
        return
    with pytest.raises(semel.ConfigError, match=said):
        decide()


def test_a_history_file_says_where_timelines_were_left() -> None:
    """As the server sends it, with several ancestors."""
    history = "1\t0/3000158\tno recovery target specified\n\n2\t0/5000000\tbefore 2026-11-19\n"
    assert end_of_timeline(history, 1) == 0x3000158
    assert end_of_timeline(history, 2) == 0x5000000
    assert end_of_timeline(history, 3) is None


@pytest.mark.large
def test_a_row_of_100_mb_and_a_transaction_of_a_million_rows(broker: EmbeddedBroker) -> None:
    """The row stops the capture with a sentence, or goes aside; the transaction takes no more memory than a portion."""
    with Postgres(settings={**SETTINGS, "shared_buffers": "128MB"}) as server:
        source = Source("postgres", server.uri, broker.bootstrap)
        source.make(NUMBERS)
        source.capture()
        source.do("INSERT INTO accounts SELECT n, 'row ' || n FROM generate_series(1, 100000) n")
        source.capture()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        source.do("INSERT INTO accounts SELECT n, 'row ' || n FROM generate_series(100001, 1100000) n")
        assert source.capture().rows == 1_000_000
        print(f"memory grew by {(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000:.0f} MB")
        assert [end.events for end in source.ends()] == [0, 100_000, 1_000_000]
        source.do("INSERT INTO accounts VALUES (0, repeat('x', 100000000))")
        assert "cannot be relayed" in refused(source)
        letters = source.create_topic("letters")
        assert source.capture(dead_letter=letters).dead_letters == 1
