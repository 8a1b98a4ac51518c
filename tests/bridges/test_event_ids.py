"""What mode "dedup" remembers: of which table and which id, for how long, and when it forgets."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from database_scene import Input, Place, broker, make_postgres, number, place, server
from session_scene import wait_until

import semel
from semel.bridges.database import Database
from semel.bridges.merge import Rule
from semel.bridges.table_writer import TableOptions, TableWriter, WriteCounts
from semel.testing.embedded import EmbeddedBroker
from semel.testing.postgres import Postgres

__all__ = ["broker", "place", "server"]

DAY_MS = 86_400_000


def with_options(place: Place, options: str) -> Place:
    return Place(place.kind, f"{place.address}&options={options}")


def write(place: Place, rule: Rule, **columns: Sequence[int]) -> WriteCounts:
    with place.target(table=rule.table).open() as database:
        database.ensure_tables()
        return write_to(database, rule, **columns)


def write_to(database: Database, rule: Rule, **columns: Sequence[int]) -> WriteCounts:
    table = pa.table({name: pa.array(values, pa.int64()) for name, values in columns.items()})
    writer = TableWriter(TableOptions(rule))
    writer.check(database, table.schema)
    with database.transaction():
        return writer.write(database, table)


def test_tables_of_one_name_in_two_schemas_remember_their_own_ids(server: Postgres) -> None:
    """A tenant for each schema, by search_path, and Semel's tables in a schema that all of them see."""
    place = make_postgres(server)
    with place.target(table="t").open() as database:
        database.ensure_tables()
    rule = Rule("orders", "dedup", ("id",))
    for tenant in ("one", "two"):
        place.do(f"CREATE SCHEMA {tenant}", f"CREATE TABLE {tenant}.orders (id bigint)")
        write(with_options(place, f"-csearch_path%3D{tenant},public"), rule, id=range(10))
    assert place.ask("SELECT (SELECT count(*) FROM one.orders), (SELECT count(*) FROM two.orders)") == [(10, 10)]
    counts = write(place, Rule("two.orders", "dedup", ("id",)), id=range(5, 15))
    assert (counts.written, counts.repeats) == (5, 5), "the name with its schema is the same table"


def test_ids_of_several_columns_with_nul_in_them_are_told_apart(broker: EmbeddedBroker, tmp_path: Path) -> None:
    """SQLite's length() stops at NUL, so that two ids of two columns looked alike and the second was dropped."""
    place = Place("sqlite", str(tmp_path / "shop.db"))
    place.do("CREATE TABLE events (x text, y text)")
    ids = [("a\0:5:b", "c"), ("a\0", "b:1:c"), ("é", "b"), ("a\0", "b:1:c")]
    source = Input(broker.bootstrap, 1)
    source.write(range(len(ids)))
    target = place.target(table="events", mode="dedup", key=["x", "y"])
    source.run(lambda row: dict(zip("xy", ids[row.offset], strict=True)), target, transaction_records_max=1)
    assert place.ask("SELECT x, y FROM events ORDER BY rowid") == ids[:3]
    assert ("1:é:1:b",) in place.ask("SELECT event_id FROM semel_seen"), "ids without NUL are kept as before"


def test_ids_of_two_kinds_in_one_table_are_told_apart(place: Place) -> None:
    """Orders and refunds have numbers of their own."""
    place.do("CREATE TABLE events (order_id bigint, refund_id bigint)")
    for _ in range(2):
        write(place, Rule("events", "dedup", ("order_id",)), order_id=range(5))
        write(place, Rule("events", "dedup", ("refund_id",)), refund_id=range(5))
    assert place.ask("SELECT count(order_id), count(refund_id) FROM events") == [(5, 5)]


def test_ids_that_an_earlier_release_has_remembered_still_count(place: Place) -> None:
    """It kept them under the table's name alone; they and their horizon hold until they expire."""
    place.do("CREATE TABLE events (id bigint, at bigint)")
    rule = Rule("events", "dedup", ("id",), event_time="at", keep=timedelta(milliseconds=10))
    write(place, rule, id=[0], at=[90])
    place.do("DELETE FROM semel_seen", "DELETE FROM semel_horizon")
    place.do("INSERT INTO semel_seen VALUES ('events', '1', 100)", "INSERT INTO semel_horizon VALUES ('events', 90)")
    assert write(place, rule, id=[1, 2], at=[100, 100]).repeats == 1
    with pytest.raises(semel.ValueDoesNotFit, match="older than keep"):
        write(place, rule, id=[3], at=[89])
    write(place, rule, id=[4], at=[150])
    assert place.ask("SELECT count(*) FROM semel_seen WHERE scope = 'events'") == [(0,)]


def restart(broker: EmbeddedBroker, place: Place, *between: str) -> list[tuple[Any, ...]]:
    """Write five events, lose the position, and begin again."""
    place.do("CREATE TABLE numbers (number bigint, place int, at bigint)")
    source, target = Input(broker.bootstrap, 1), place.target(table="numbers", mode="dedup", key=["number"])
    source.write(range(5))
    source.run(number, target)
    place.do("DELETE FROM semel_inbox", *between)
    source.run(number, target, resume="database")
    return place.ask("SELECT number FROM numbers ORDER BY number")


def test_an_emptied_table_is_filled_again(broker: EmbeddedBroker, place: Place) -> None:
    """resume="database" forgets the ids of rows that are no longer there, and of that table only."""
    place.do("CREATE TABLE others (id bigint)")
    other = Rule("others", "dedup", ("id",))
    write(place, other, id=[1])
    assert restart(broker, place, "DELETE FROM numbers") == [(one,) for one in range(5)]
    assert write(place, other, id=[1]).repeats == 1


def test_a_table_with_rows_gets_none_of_them_twice(broker: EmbeddedBroker, place: Place) -> None:
    """resume="database" keeps the ids of a table that has rows."""
    assert restart(broker, place) == [(one,) for one in range(5)]


def test_an_event_ahead_of_the_clock_moves_no_horizon(place: Place) -> None:
    """A backlog is still taken, and the ids of its events are still known."""
    place.do("CREATE TABLE events (id bigint, at bigint)")
    rule = Rule("events", "dedup", ("id",), event_time="at", keep=timedelta(days=1))
    now = int(time.time() * 1000)
    old, ahead = now - 30 * DAY_MS, now + 30 * DAY_MS
    write(place, rule, id=[1, 2], at=[old, ahead])
    write(place, rule, id=[3], at=[ahead])
    assert write(place, rule, id=[1, 4, 2], at=[old, old + 1000, ahead]).repeats == 2
    with pytest.raises(semel.ValueDoesNotFit, match="older than keep"):
        write(place, rule, id=[5], at=[old - 2 * DAY_MS])


def test_a_repeat_is_seen_whatever_the_servers_isolation_level(server: Postgres) -> None:
    """Two writers of one id: the second sees what the first has committed while it waited."""
    place = make_postgres(server)
    place.do("CREATE TABLE events (id bigint)")
    rule = Rule("events", "dedup", ("id",))
    strict = with_options(place, "-cdefault_transaction_isolation%3Drepeatable%5C%20read")
    write(strict, rule, id=[0])
    counts: list[WriteCounts] = []
    second = threading.Thread(target=lambda: counts.append(write(strict, rule, id=[7, 8])))
    with strict.target(table="events").open() as first:
        writer = TableWriter(TableOptions(rule))
        table = pa.table({"id": pa.array([7], pa.int64())})
        writer.check(first, table.schema)
        with first.transaction():
            writer.write(first, table)
            second.start()
            waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'advisory'"
            wait_until(lambda: place.ask(waiting) == [(1,)], "the second writer waits for its turn")
    second.join()
    assert [(one.written, one.repeats) for one in counts] == [(1, 1)]
    assert place.ask("SELECT id FROM events ORDER BY id") == [(0,), (7,), (8,)]


def test_a_version_for_upsert_is_refused_in_a_session(broker: EmbeddedBroker, place: Place) -> None:
    """Within a batch it would decide and from batch to batch it would not."""
    place.do("CREATE TABLE numbers (number bigint PRIMARY KEY, place int, at bigint)")
    source = Input(broker.bootstrap, 1)
    source.write([1])
    with pytest.raises(semel.ConfigError, match='mode="newest"'):
        source.run(number, place.target(table="numbers", mode="upsert", key=["number"], version="at"))
    assert place.ask("SELECT count(*) FROM numbers") == [(0,)]


@pytest.mark.parametrize("made_by", ["semel", "user"])
def test_a_new_pipeline_fills_a_table_that_was_made_again_or_is_told_why_not(
    broker: EmbeddedBroker, place: Place, made_by: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A table that Semel makes is empty, so its ids are forgotten. One of the user's may be emptied on purpose."""
    source = Input(broker.bootstrap)
    source.write(range(10))
    target = place.target(table="numbers", mode="dedup", key=["number"], create=True)
    source.run(number, target)
    place.do("DROP TABLE numbers")
    if made_by == "user":
        place.do("CREATE TABLE numbers (number bigint, place bigint, at bigint)")
    source.name += "-2"
    source.run(number, target)
    expected = 10 if made_by == "semel" else 0
    assert place.ask("SELECT count(*) FROM numbers") == [(expected,)]
    assert ("event ids that it had before are remembered" in caplog.text) == (made_by == "user")
