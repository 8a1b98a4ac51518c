"""`semel.run` into a database: the modes, the position beside the rows, and the offsets that are for show."""

from __future__ import annotations

import json
import logging
import signal
import sqlite3
import subprocess
import sys
import threading
import uuid
from collections import Counter
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from database_scene import Input, Place, broker, make_postgres, number, numbers, place, positions, server
from session_scene import wait_until

import semel
from semel.bridges import inbox as inbox_module
from semel.bridges.spark_ledger import DatabaseLedger
from semel.client.admin_groups import CommittedOffset
from semel.client.position_notes import PositionNote
from semel.spark.ledger import Entry
from semel.testing.embedded import EmbeddedBroker

__all__ = ["broker", "place", "server"]

WORKER = Path(__file__).parent / "run_worker.py"


def test_rows_and_position_are_written_together_and_the_offsets_are_shown(broker: EmbeddedBroker, place: Place) -> None:
    """F2: every record once, over several runs; the group's offsets follow the database's."""
    source, target = Input(broker.bootstrap), place.target(table="numbers", create=True)
    for begin in (0, 50):
        source.write(range(begin, begin + 50))
        report = source.run(number, target, transaction_records_max=7)
        assert (report.records, report.aborted, report.dead_letters) == (50, 0, 0)
        assert report.committed >= 8
        assert numbers(place) == list(range(begin + 50))
        assert source.committed() == positions(place) == {0: (begin + 50) // 2, 1: (begin + 50) // 2}
    assert source.run(number, target).records == 0


def test_a_function_of_tables_writes_tables(broker: EmbeddedBroker, place: Place) -> None:
    """F6: Arrow in, Arrow out; None writes nothing, and the records are done with."""
    source, target = Input(broker.bootstrap), place.target(table="numbers", create=True)
    source.write(range(30))

    def even(table: pa.Table) -> pa.Table | None:
        values = [int(value) for value in table["value"].to_pylist() if int(value) % 2 == 0]
        return pa.table({"number": pa.array(values, pa.int64())}) if values else None

    assert source.run(even, target, by="table").records == 30
    assert numbers(place) == list(range(0, 30, 2))
    assert source.run(lambda table: None, target, by="table").records == 0


def test_a_function_of_rows_writes_one_row_several_or_none(broker: EmbeddedBroker, place: Place) -> None:
    """F6: a dictionary, a list or a generator of them, or None; columns that a row has not are null."""
    source, target = Input(broker.bootstrap, 1), place.target(table="numbers", create=True)
    source.write([0, 1, 2, 3])

    def several(row: Any) -> Any:
        value = int(row.value)
        rows = ({"number": value * 10 + one, "note": f"n{one}"} if one else {"number": value} for one in range(value))
        return None if value == 0 else {"number": -1, "note": "one"} if value == 1 else rows

    source.run(several, target)
    assert place.ask("SELECT number, note FROM numbers ORDER BY number") == [
        (-1, "one"),
        (2, None),
        (3, None),
        (21, "n1"),
        (31, "n1"),
        (32, "n2"),
    ]


def test_append_obeys_row_level_security_triggers_and_defaults(broker: EmbeddedBroker, server: Any) -> None:
    """Rows go straight into the table where that is the same as an insert, and by insert where it is not."""
    place = make_postgres(server)
    role = f"clerk_{place.address.partition('shop_')[2][:8]}"
    place.do(
        "CREATE SCHEMA inner_shop",
        "CREATE TABLE inner_shop.numbers (number bigint CHECK (number >= 0), note text DEFAULT 'new', doubled bigint)",
        "CREATE FUNCTION double() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN NEW.doubled := NEW.number * 2; RETURN NEW; END'",
        "CREATE TRIGGER double BEFORE INSERT ON inner_shop.numbers FOR EACH ROW EXECUTE FUNCTION double()",
        f"CREATE ROLE {role} LOGIN",
        f"GRANT ALL ON SCHEMA public, inner_shop TO {role}",
        f"GRANT ALL ON inner_shop.numbers TO {role}",
    )
    source, target = Input(broker.bootstrap), place.target(table="inner_shop.numbers")
    source.write(range(10))
    source.run(lambda row: {"number": int(row.value)}, target)
    place.do(
        f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}",
        "ALTER TABLE inner_shop.numbers ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY even ON inner_shop.numbers USING (true) WITH CHECK (number % 2 = 0)",
    )
    restricted = semel.Postgres(
        place.address.replace("postgres@", f"{role}@"), table="inner_shop.numbers", dead_letter="failed"
    )
    with pytest.raises(semel.DatabaseError, match="row-level security"):
        source.run(lambda row: {"number": int(row.value)}, restricted, name=f"{source.name}-clerk", resume="database")
    source.run(lambda row: {"number": int(row.value) * 2}, restricted, name=f"{source.name}-even", resume="database")
    found = place.ask("SELECT number, note, doubled FROM inner_shop.numbers")
    assert sorted(found) == sorted([(n, "new", 2 * n) for n in [*range(10), *range(0, 20, 2)]])


def upserts(row: Any) -> dict[str, Any]:
    order = json.loads(row.value)
    return {"id": order["id"], "state": order.get("state"), "gone": order.get("gone", False)}


def test_upsert_keeps_the_last_row_of_a_key_and_deletes(broker: EmbeddedBroker, place: Place) -> None:
    """F1: within a batch and from batch to batch; a deleted key can come back."""
    source = Input(broker.bootstrap, 1)
    target = place.target(table="orders", mode="upsert", key=["id"], delete="gone", create=True)
    orders: list[dict[str, Any]] = [
        {"id": 1, "state": "new"},
        {"id": 1, "state": "paid"},
        {"id": 2, "state": "new"},
        {"id": 2, "gone": True},
        {"id": 3, "state": "new"},
        {"id": 3, "gone": True},
        {"id": 3, "state": "again"},
    ]
    source.write(json.dumps(order).encode() for order in orders)
    source.run(upserts, target, transaction_records_max=3)
    assert sorted(place.ask("SELECT id, state FROM orders")) == [(1, "paid"), (3, "again")]


def test_newest_never_goes_back(broker: EmbeddedBroker, place: Place) -> None:
    """F1: by version, in whatever order; a deleted row is not brought back by an older one."""
    source = Input(broker.bootstrap, 1)
    target = place.target(table="orders", mode="newest", key=["id"], version="version", delete="gone", create=True)
    steps = [(1, 5, False), (1, 3, False), (2, 1, False), (2, 4, True), (2, 2, False), (3, 1, False), (3, 1, False)]
    source.write(json.dumps(step).encode() for step in steps)

    def versions(row: Any) -> dict[str, Any]:
        key, version, gone = json.loads(row.value)
        return {"id": key, "version": version, "offset": row.offset, "gone": gone}

    source.run(versions, target, transaction_records_max=2)
    assert sorted(place.ask('SELECT id, version, "offset" FROM orders')) == [(1, 5, 0), (3, 1, 5)]


def test_dedup_writes_each_event_once_and_refuses_what_it_cannot_know(broker: EmbeddedBroker, place: Place) -> None:
    """F1: repeats of the producer are dropped while their ids are kept; an event that is too late is never guessed."""
    source = Input(broker.bootstrap, 1)
    target = place.target(
        table="events",
        mode="dedup",
        key=["id"],
        event_time="at",
        keep=timedelta(minutes=1),
        create=True,
        dead_letter="late",
    )
    events = [("a", 0), ("a", 0), ("b", 10), ("a", 0), ("c", 200), ("b", 10), ("d", 190), ("c", 200)]
    source.write(json.dumps(event).encode() for event in events)

    def event(row: Any) -> dict[str, Any]:
        name, second = json.loads(row.value)
        return {"id": name, "at": 1_000_000 + second * 1000}

    report = source.run(event, target, transaction_records_max=5)
    assert sorted(place.ask("SELECT id FROM events")) == [("a",), ("b",), ("c",), ("d",)]
    [(value, error)] = place.ask("SELECT value, error FROM late")
    assert json.loads(bytes(value)) == ["b", 10]
    assert "is older than keep=0:01:00 allows" in error
    assert report.dead_letters == 1


COUNT = (
    "INSERT INTO counts AS c (customer, count) SELECT customer, count(*) FROM rows WHERE true GROUP BY customer "
    "ON CONFLICT (customer) DO UPDATE SET count = c.count + excluded.count"
)


@pytest.mark.parametrize("mode", ["append", "dedup"])
def test_count_plus_one_comes_out_exact(broker: EmbeddedBroker, place: Place, mode: str) -> None:
    """F1: your own statement in the same transaction as the position; with dedup, repeated events do not count."""
    source = Input(broker.bootstrap)
    place.do("CREATE TABLE counts (customer TEXT PRIMARY KEY, count BIGINT)")
    key = {"key": ["event"]} if mode == "dedup" else {}
    target = place.target(table="counts", mode=mode, statement=COUNT, **key)
    events = [n // 2 if mode == "dedup" else n for n in range(200)]
    source.write(events)

    def counted(row: Any) -> dict[str, Any]:
        return {"event": int(row.value), "customer": f"c{int(row.value) % 3}"}

    for _ in range(2):
        source.run(counted, target, transaction_records_max=9)
    expected = Counter(f"c{event % 3}" for event in (set(events) if mode == "dedup" else events))
    assert dict(place.ask("SELECT customer, count FROM counts")) == expected  # pyright: ignore[reportArgumentType]


def test_the_database_decides_where_to_go_on(
    broker: EmbeddedBroker, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """F2: a database that was restored to an earlier state is filled again from there, and the log says so."""
    source, target = Input(broker.bootstrap, 1), place.target(table="numbers", create=True)
    source.write(range(20))
    source.run(number, target)
    place.do("DELETE FROM numbers WHERE at >= 12", "UPDATE semel_inbox SET next_offset = 12")
    with caplog.at_level(logging.WARNING, "semel.bridges"):
        assert source.run(number, target).records == 8
    assert numbers(place) == list(range(20))
    assert f"goes back to it: {source.topic}-0 from 20 back to 12" in caplog.text
    # Behind is what a crash between the two commits leaves: nothing to say.
    caplog.clear()
    with semel.Admin({"bootstrap.servers": broker.bootstrap}) as admin:
        admin.commit_offsets(source.name, {(source.topic, 0): 3})
    assert source.run(number, target).records == 0
    assert caplog.text == ""
    assert source.committed() == {0: 20}


def test_group_none_commits_no_offsets(broker: EmbeddedBroker, place: Place) -> None:
    """F2: Kafka need not know."""
    source, target = Input(broker.bootstrap), place.target(table="numbers", create=True)
    source.write(range(10))
    source.run(number, target, group=None)
    assert numbers(place) == list(range(10))
    assert source.committed() == {}
    source.run(number, target, group="seen-by-lag-tools")
    assert source.committed("seen-by-lag-tools") == {0: 5, 1: 5}


def test_offsets_that_cannot_be_committed_stop_nothing(
    broker: EmbeddedBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """F2: a consumer is in the group, so Kafka refuses offsets from outside. It is logged once, not at each batch."""
    place = Place("sqlite", str(tmp_path / "shop.db"))
    source, target = Input(broker.bootstrap), place.target(table="numbers", create=True)
    source.write(range(40))
    member = semel.Session(bootstrap=broker.bootstrap, group=source.name, topics=[source.topic], name="member")
    with member as session, caplog.at_level(logging.WARNING, "semel.bridges"):
        with session.transaction(5_000) as transaction:
            assert not transaction.is_empty
        source.run(number, target, transaction_records_max=5, resume="database")
    assert numbers(place) == list(range(40))
    assert caplog.text.count("could not be committed") == 1


def test_a_database_without_the_pipelines_positions_is_refused(broker: EmbeddedBroker, place: Place) -> None:
    """A failover to a server without the ledger: neither everything again nor a gap, unless the user says so."""
    source, target = Input(broker.bootstrap, 1), place.target(table="numbers", create=True)
    source.write(range(20))
    source.run(number, target)
    place.do("DELETE FROM semel_inbox")
    with pytest.raises(semel.ConfigError, match='resume="database"') as refused:
        source.run(number, target)
    assert f"group {source.name!r} has committed offset 20" in str(refused.value)
    assert numbers(place) == list(range(20))
    source.write([20, 21])
    assert source.run(number, target, resume="group").records == 2
    place.do("DELETE FROM semel_inbox", "DELETE FROM numbers")
    assert source.run(number, target, resume="database").records == 22
    assert source.run(number, target).records == 0
    assert numbers(place) == list(range(22))


@pytest.mark.parametrize("loss", ["positions", "tables", "other tables"])
def test_a_failover_in_the_middle_of_a_run_is_noticed(broker: EmbeddedBroker, server: Any, loss: str) -> None:
    """The connection is lost, and behind the same address is a server that has not Semel's tables or rows."""
    place = make_postgres(server)
    source, target = Input(broker.bootstrap, 1), place.target(table="numbers", create=True)
    source.write(range(5))

    def fail_over(row: Any) -> dict[str, Any]:
        if int(row.value) == 4:
            drop = "DELETE FROM semel_inbox"
            if loss != "positions":
                drop = (
                    "DROP TABLE semel_inbox, semel_home, semel_ledger" if loss == "tables" else "DELETE FROM semel_home"
                )
            more = ["INSERT INTO semel_home VALUES (1, 'another')"] if loss == "other tables" else []
            end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = "
            place.do(drop, *more, end + "current_database()")
        return number(row)

    with pytest.raises(semel.DatabaseError, match="not the one that pipeline"):
        source.run(fail_over, target, transaction_records_max=2)
    assert numbers(place) == [0, 1, 2, 3]


def test_a_newer_run_takes_over_and_the_older_one_stops(broker: EmbeddedBroker, place: Place) -> None:
    """H3: a second start under one name, while the first is in the middle of a batch. Nothing is written twice."""
    source, target = Input(broker.bootstrap, 1), place.target(table="numbers", create=True)
    source.write(range(20))
    began, may_go_on = threading.Event(), threading.Event()
    raised: list[BaseException] = []

    def slow(row: Any) -> dict[str, Any]:
        began.set()
        assert may_go_on.wait(30)
        return number(row)

    def old_run() -> None:
        try:
            source.run(slow, target)
        except BaseException as error:
            raised.append(error)

    older = threading.Thread(target=old_run)
    older.start()
    assert began.wait(30)
    assert source.run(number, target).records == 20
    may_go_on.set()
    older.join(30)
    assert [type(error) for error in raised] == [semel.InboxOvertaken]
    assert "has taken over" in str(raised[0])
    assert numbers(place) == list(range(20))


def test_a_run_whose_successor_has_committed_nothing_yet_is_stopped_as_well(
    broker: EmbeddedBroker, place: Place
) -> None:
    """The positions alone would let it go on; the epoch does not."""
    source, target = Input(broker.bootstrap, 1), place.target(table="numbers", create=True)
    source.write(range(6))

    def superseded(row: Any) -> dict[str, Any]:
        if int(row.value) == 4:
            place.do("UPDATE semel_ledger SET epoch = epoch + 1")
        return number(row)

    with pytest.raises(semel.InboxOvertaken, match="has taken over"):
        source.run(superseded, target, transaction_records_max=2)
    assert numbers(place) == [0, 1, 2, 3]


def test_a_pipeline_of_sparks_has_no_key_of_a_session(broker: EmbeddedBroker, place: Place) -> None:
    """Spark's pipeline "run x" is another one than the session x: neither stops the other."""
    source, target = Input(broker.bootstrap, 1), place.target(table="numbers", create=True)
    source.write(range(5))
    with target.open() as database:
        database.ensure_tables()
        ledger = DatabaseLedger(database, f"run {source.name}", f"run {source.name}")
        epoch = ledger.take_over()
        source.run(number, target)
        with database.transaction():
            assert ledger.lock(epoch).epoch == epoch
            ledger.write(Entry(pipeline=f"run {source.name}"))
    source.write(range(5, 9))
    assert source.run(number, target).records == 4


def test_a_session_goes_on_from_the_key_of_an_earlier_release(broker: EmbeddedBroker, place: Place) -> None:
    """Its table is remembered, and a process of that release can write no more."""
    source, target = Input(broker.bootstrap, 1), place.target(table="numbers", create=True)
    source.write(range(5))
    source.run(number, target)
    place.do(f"UPDATE semel_ledger SET key = 'run {source.name}', epoch = 7 WHERE key = '/run/{source.name}'")
    with pytest.raises(semel.ConfigError, match="has written into table 'numbers'"):
        source.run(number, place.target(table="others", create=True))
    source.write(range(5, 9))
    assert source.run(number, target).records == 4
    assert place.ask("SELECT key, entry FROM semel_ledger") == [
        (f"/run/{source.name}", '{"table": "numbers", "was_there": true}')
    ]


def test_stop_ends_it_after_the_commit(broker: EmbeddedBroker, place: Place) -> None:
    """From another thread, while records keep coming."""
    source, target, stop = Input(broker.bootstrap), place.target(table="numbers", create=True), threading.Event()
    source.write(range(30))

    def stopping(row: Any) -> dict[str, Any]:
        if int(row.value) == 10:
            stop.set()
        return number(row)

    report = source.run(stopping, target, stop=stop, idle_ms=None, transaction_records_max=4)
    assert 0 < report.records < 30
    assert len(numbers(place)) == report.records == sum(positions(place).values())


def test_idle_is_the_end_of_the_topic_and_not_a_slow_broker(broker: EmbeddedBroker, place: Place) -> None:
    """Even with no patience at all everything is read; what an aborted transaction left is not waited for."""
    source, target = Input(broker.bootstrap), place.target(table="numbers", create=True)
    source.write(range(30))
    with semel.Producer(bootstrap_servers=broker.bootstrap, transactional_id=source.name) as producer:
        producer.begin()
        producer.send(source.topic, b"31", partition=0)
        producer.flush()
        producer.abort()
    assert source.run(number, target, idle_ms=0).records == 30
    assert source.run(number, target, idle_ms=0).records == 0


def test_sigterm_ends_it_after_the_commit(broker: EmbeddedBroker, place: Place) -> None:
    """With the status of a process that SIGTERM has ended; what is there is whole."""
    source = Input(broker.bootstrap)
    source.write(range(20))
    told = [place.kind, place.address, "append", broker.bootstrap, source.topic, source.name, "{}"]
    worker = subprocess.Popen(
        [sys.executable, str(WORKER), *told], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_until(lambda: place.has("numbers") and len(numbers(place)) == 20, "all records")
    worker.send_signal(signal.SIGTERM)
    output, _ = worker.communicate(timeout=30)
    assert worker.returncode == 128 + signal.SIGTERM, output
    assert "Traceback" not in output
    assert source.committed() == positions(place) == {0: 10, 1: 10}


def test_a_run_that_begins_at_the_end_does_so_once(broker: EmbeddedBroker, place: Place) -> None:
    """What comes while it is away is not skipped, nor are new partitions."""
    source, target = Input(broker.bootstrap, 1), place.target(table="numbers", create=True)
    source.write(range(5))
    assert source.run(number, target, start="latest").records == 0
    source.write(range(5, 9))
    with semel.Admin({"bootstrap.servers": broker.bootstrap}) as admin:
        admin.create_partitions(source.topic, 2)
    source.partitions = 2
    source.write([9, 10])
    assert source.run(number, target, start="latest").records == 6
    assert numbers(place) == list(range(5, 11))


def test_a_topic_that_was_created_again_is_read_from_its_beginning(
    broker: EmbeddedBroker, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its offsets begin at 0 again, and the stored position is one of the topic that is gone."""
    monkeypatch.setattr(inbox_module, "_LOOK_AT_TOPICS_S", 0.1)
    source, target = Input(broker.bootstrap, 1), place.target(table="numbers", create=True)
    source.write(range(5))
    source.run(number, target)
    with semel.Admin({"bootstrap.servers": broker.bootstrap}) as admin:
        admin.delete_topics(source.topic)
        admin.create_topics(source.topic, partitions=1)
    source.write(range(5, 12))
    assert source.run(number, target).records == 7
    assert numbers(place) == list(range(12))


def test_a_position_that_was_taken_from_the_group_belongs_to_the_topic_of_that_time(
    broker: EmbeddedBroker, place: Place
) -> None:
    """resume="group" with nothing left to read, then the topic is created again: none of its records is skipped."""
    source, target = Input(broker.bootstrap, 1), place.target(table="numbers", create=True)
    source.write(range(5))
    source.run(number, target)
    place.do("DELETE FROM semel_inbox")
    assert source.run(number, target, resume="group").records == 0
    recreate(source)
    source.write(range(5, 15))
    assert source.run(number, target).records == 10
    assert numbers(place) == list(range(15))


def test_an_offset_of_the_group_whose_note_names_another_topic_is_not_gone_on_from(
    broker: EmbeddedBroker, place: Place
) -> None:
    """resume="group" with the offset of a session in a topic of this name that is gone."""
    source, target = Input(broker.bootstrap, 1), place.target(table="numbers", create=True)
    source.write(range(5))
    with semel.Admin({"bootstrap.servers": broker.bootstrap}) as admin:
        note = PositionNote(uuid.uuid4(), 0).text
        admin.commit_offsets(source.name, {(source.topic, 0): CommittedOffset(3, note)})
    assert source.run(number, target, resume="group").records == 5
    assert numbers(place) == list(range(5))


def test_positions_without_a_topic_get_its_id_with_the_first_commit(broker: EmbeddedBroker, place: Place) -> None:
    """Those of an earlier release, also in partitions that no record comes from until the topic is created again."""
    source, target = Input(broker.bootstrap, 2), place.target(table="numbers", create=True)
    source.write(range(6))
    source.run(number, target)
    place.do("UPDATE semel_inbox SET topic_id = NULL")
    source.write([6])  # into partition 0
    source.run(number, target)
    recreate(source)
    source.write(range(7, 17))
    assert source.run(number, target).records == 10
    assert numbers(place) == list(range(17))


def recreate(source: Input) -> None:
    with semel.Admin({"bootstrap.servers": source.bootstrap}) as admin:
        admin.delete_topics(source.topic)
        admin.create_topics(source.topic, partitions=source.partitions)


def test_positions_of_an_earlier_release_are_gone_on_from(broker: EmbeddedBroker, place: Place) -> None:
    """Its table had no ids of topics; an inbox of the same name has read there."""
    source, target = Input(broker.bootstrap, 1), place.target(table="numbers", create=True)
    source.write(range(10))
    place.do(
        "CREATE TABLE semel_inbox (inbox TEXT NOT NULL, topic TEXT NOT NULL, partition INTEGER NOT NULL, "
        "next_offset BIGINT NOT NULL, PRIMARY KEY (inbox, topic, partition))",
        f"INSERT INTO semel_inbox VALUES ('{source.name}', '{source.topic}', 0, 6)",
    )
    for _ in range(2):
        source.run(number, target, resume="database")  # it takes over from the inbox
    assert numbers(place) == [6, 7, 8, 9]


def test_records_deleted_before_they_were_read_can_be_gone_past(
    broker: EmbeddedBroker, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Retention was quicker than the pipeline. It stops, names the option, and with it says what is lost."""
    source, target = Input(broker.bootstrap, 1), place.target(table="numbers", create=True)
    source.write(range(10))
    source.run(number, target)
    source.write(range(10, 30))
    with semel.Admin({"bootstrap.servers": broker.bootstrap}) as admin:
        admin.delete_records({(source.topic, 0): 20})
    with pytest.raises(semel.OffsetOutOfRange) as stopped:
        source.run(number, target)
    assert 'pass auto_offset_reset="earliest"' in "".join(stopped.value.__notes__)
    source.run(number, target, auto_offset_reset="earliest")
    assert "10 offsets were skipped" in caplog.text
    assert numbers(place) == [*range(10), *range(20, 30)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dead_letter": "failed"}, "an option of the target"),
        ({"instance": "0"}, "one process reads all partitions"),
        ({"auto_offset_reset": "latest"}, 'start="earliest" or "latest" counts'),
        ({"resume": "guess"}, "is not supported"),
        ({"by": "column"}, "is not supported"),
        ({"topics": "orders"}, "must be a list"),
        ({"fetch_max_weight": 3}, "is not a setting"),
    ],
)
def test_options_that_mean_something_else_are_explained(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    """Before anything is opened."""
    given = {"bootstrap": "127.0.0.1:1", "topics": ["orders"], "name": "billing", **options}
    with pytest.raises(semel.ConfigError, match=words):
        semel.run(number, to=semel.SQLite(tmp_path / "shop.db", table="numbers"), **given)
    assert not (tmp_path / "shop.db").exists()


def test_kafka_is_a_target_of_the_same_kind(broker: EmbeddedBroker) -> None:
    """F6: the call stays the same."""
    source, output = Input(broker.bootstrap), Input(broker.bootstrap)
    source.write(range(10))
    report = source.run(
        lambda row: row.value * 2, semel.Kafka(broker.bootstrap, topic=output.topic), group=source.name, idle_ms=1_000
    )
    assert report.records == 10


def test_a_file_that_sqlite_has_open_elsewhere_is_waited_for(broker: EmbeddedBroker, tmp_path: Path) -> None:
    """Another writer's transaction holds the file; the run goes on when it ends."""
    place = Place("sqlite", str(tmp_path / "shop.db"))
    source, target = Input(broker.bootstrap), place.target(table="numbers", create=True)
    source.write(range(10))
    with closing(sqlite3.connect(place.address, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        release = threading.Timer(0.5, lambda: other.execute("COMMIT"))
        release.start()
        assert source.run(number, target).records == 10
        release.join()
    assert numbers(place) == list(range(10))


def test_another_table_under_the_same_name_is_refused(broker: EmbeddedBroker, place: Place) -> None:
    """A copied pipeline that kept its name would find nothing to read, and its table would stay empty in silence."""
    source = Input(broker.bootstrap)
    source.write(range(10))
    source.run(number, place.target(table="numbers", create=True))
    copied = place.target(table="others", create=True)
    with pytest.raises(semel.ConfigError, match=r"has written into table 'numbers'.*another name") as refused:
        source.run(number, copied)
    assert f"{source.topic}-0 at 5, {source.topic}-1 at 5" in str(refused.value)
    source.write(range(10, 14))
    assert source.run(number, copied, resume="database").records == 4
    assert numbers(place, "others") == [10, 11, 12, 13]
    assert source.run(number, copied).records == 0
    with pytest.raises(semel.ConfigError, match="has written into table 'others'"):
        source.run(number, place.target(table="numbers"))
