"""From a real Spark into a real Postgres and SQLite: streams, jobs, state, replays, and Kafka beside a database."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pytest
from database_modes import target_at
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from sink_scene import expected, fill, forget_commit, stream
from spark_sessions import small_spark
from topic_contents import values

import semel
from semel.errors import ConfigError
from semel.spark.progress import BatchProgress
from semel.testing.postgres import Postgres

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
_numbers = count()


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    session = small_spark()
    yield session
    session.stop()


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with Postgres() as started:
        yield started


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    with semel.Broker() as broker:
        yield broker.bootstrap


@pytest.fixture(params=["Postgres", "SQLite"])
def place(request: pytest.FixtureRequest, server: Postgres, tmp_path: Path) -> str:
    return server.uri if request.param == "Postgres" else str(tmp_path / "out.db")


@pytest.fixture
def name() -> str:
    """A pipeline's name, and that of its table."""
    return f"pipeline_{next(_numbers)}"


def rows_in(place: str, statement: str) -> list[tuple[Any, ...]]:
    with target_at(place, table="any").open() as database:
        return [tuple(row) for row in database.execute(statement).rows]


def ids(place: str, table: str) -> list[int]:
    return [int(found) for (found,) in rows_in(place, f"SELECT id FROM {table} ORDER BY id")]


def plain(spark: SparkSession, folder: Path) -> DataFrame:
    return stream(spark, folder).selectExpr("cast(value as long) id", "key")


def run_stream(df: DataFrame, name: str, to: Any, checkpoint: Path, **more: Any) -> None:
    query = semel.write_stream(df, name=name, to=to, checkpoint=str(checkpoint), trigger={"availableNow": True}, **more)
    query.awaitTermination()


def test_a_stream_is_written_once_and_spark_shows_its_figures(
    spark: SparkSession, place: str, name: str, tmp_path: Path
) -> None:
    """E1, E5, F6: one call; a replayed batch is skipped; rows and times are in Spark's own progress."""
    fill(spark, tmp_path / "in", 2)
    target = target_at(place, table=name, create=True)
    query = semel.write_stream(
        plain(spark, tmp_path / "in"),
        name=name,
        to=target,
        checkpoint=str(tmp_path / "checkpoint"),
        trigger={"availableNow": True},
    )
    query.awaitTermination()
    assert ids(place, name) == list(range(80))
    shown = query.recentProgress[-1]
    assert shown["observedMetrics"]["semel"]["records"] == 40
    if not spark.version.startswith("3."):  # which takes no times from others
        assert {"semelEncode", "semelWrite", "semelCommit"} <= set(shown["durationMs"])

    forget_commit(tmp_path / "checkpoint")
    fill(spark, tmp_path / "in", 1, first=2)
    seen: list[BatchProgress] = []
    run_stream(plain(spark, tmp_path / "in"), name, target, tmp_path / "checkpoint", on_progress=seen.append)
    assert [done.skipped for done in seen] == [True, False]
    assert ids(place, name) == list(range(120))


def test_aggregates_of_a_stream_are_exact_after_a_replay(
    spark: SparkSession, place: str, name: str, tmp_path: Path
) -> None:
    """E3, F1: a stateful query in update mode, of which each batch changes rows that are there."""
    fill(spark, tmp_path / "in", 3)
    counted = plain(spark, tmp_path / "in").groupBy("key").agg({"id": "sum", "*": "count"})
    counted = counted.selectExpr("key", "`sum(id)` total", "`count(1)` n")
    target = target_at(place, table=name, create=True, mode="upsert", key=["key"])
    run_stream(counted, name, target, tmp_path / "checkpoint", output_mode="update")
    forget_commit(tmp_path / "checkpoint")
    fill(spark, tmp_path / "in", 1, first=3)
    run_stream(counted, name, target, tmp_path / "checkpoint", output_mode="update")
    found = {key: (int(total), int(n)) for key, total, n in rows_in(place, f"SELECT key, total, n FROM {name}")}
    assert found == {str(key): (sum(range(key, 160, 5)), 32) for key in range(5)}


@pytest.mark.parametrize("output_mode", ["complete", "update"])
@pytest.mark.parametrize("mode", ["append", "dedup"])
def test_results_that_come_again_need_a_mode_that_replaces_them(
    spark: SparkSession, name: str, tmp_path: Path, mode: str, output_mode: str
) -> None:
    """F1: appended they would count several times, so the start is refused and says which mode is right."""
    fill(spark, tmp_path / "in", 2)
    counted = plain(spark, tmp_path / "in").groupBy("key").count()
    place = str(tmp_path / "out.db")
    target = target_at(place, table=name, create=True, mode=mode, key=["key"] if mode == "dedup" else [])
    with pytest.raises(ConfigError, match=r'mode="upsert" with the grouping columns as key'):
        run_stream(counted, name, target, tmp_path / "checkpoint", output_mode=output_mode)
    target = target_at(place, table=name, create=True, mode="upsert", key=["key"])
    run_stream(counted, name, target, tmp_path / "checkpoint", output_mode=output_mode)
    assert rows_in(place, f"SELECT sum(count), count(*) FROM {name}") == [(80, 5)]


def test_update_mode_without_an_aggregation_may_append(spark: SparkSession, name: str, tmp_path: Path) -> None:
    """F1: there each row comes once, as in append mode."""
    fill(spark, tmp_path / "in", 2)
    place = str(tmp_path / "out.db")
    target = target_at(place, table=name, create=True)
    run_stream(plain(spark, tmp_path / "in"), name, target, tmp_path / "checkpoint", output_mode="update")
    assert ids(place, name) == list(range(80))


def test_a_job_with_much_data_is_written_once(spark: SparkSession, place: str, name: str) -> None:
    """E4, F1: its tasks load what is too much to be handed over to the driver."""
    rows = spark.range(0, 20_000, 1, 3).selectExpr("id", "repeat('x', 40) pad")
    target = target_at(place, table=name, create=True)
    done = semel.write_batch(rows, name=name, job_id="1", to=target)
    assert (done.records, done.skipped) == (20_000, False)
    assert semel.write_batch(rows, name=name, job_id="1", to=target).skipped
    assert ids(place, name) == list(range(20_000))


def test_sparks_types_arrive_as_the_databases(spark: SparkSession, server: Postgres, name: str) -> None:
    """F1: numbers, decimals, times with and without a zone, lists, structs as JSON, and nulls."""
    row = spark.sql(
        "SELECT 1Y tiny, 2S small, 3 whole, 4L big, 1.5D real, 12.34 exact, true flag, 'text' t, X'00FF' raw, "
        "DATE '2026-01-02' day, TIMESTAMP '2026-01-02 03:04:05.678Z' at, TIMESTAMP_NTZ '2026-01-02 03:04:05' plain, "
        "array(1, 2) list, named_struct('a', 1) nested, cast(null AS string) nothing"
    )
    target = semel.Postgres(server.uri, table=name, create=True, types={"nested": "jsonb"})
    semel.write_batch(row, name=name, job_id="1", to=target)
    with psycopg.connect(server.uri) as connection:
        connection.execute("SET timezone = 'UTC'")
        found = connection.execute(f"SELECT * FROM {name}".encode()).fetchall()
    assert found == [
        (
            *(1, 2, 3, 4, 1.5, Decimal("12.34"), True, "text", b"\x00\xff", date(2026, 1, 2)),
            datetime(2026, 1, 2, 3, 4, 5, 678_000, UTC),
            datetime(2026, 1, 2, 3, 4, 5),
            [1, 2],
            {"a": 1},
            None,
        )
    ]


def test_one_batch_goes_to_kafka_and_to_a_database_each_exactly_once(
    spark: SparkSession, bootstrap: str, place: str, name: str, tmp_path: Path
) -> None:
    """F6, E7: two ledgers. A crash between the two commits, and one after both, repeat neither."""
    with semel.Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.create_topics(topic := f"{name}-{Path(place).suffix}", partitions=2)
    fill(spark, tmp_path / "in", 2)
    crashes = iter([False, True])

    def each(df: DataFrame, batch_id: int) -> None:
        database(df.selectExpr("cast(value as long) id", "key"), batch_id)
        if next(crashes, False):
            raise RuntimeError("between the two")
        kafka(df, batch_id)

    def sinks() -> tuple[semel.DatabaseSink, semel.KafkaSink]:
        to = target_at(place, table=name, create=True)
        return semel.DatabaseSink(name=name, to=to), semel.KafkaSink(name=name, bootstrap=bootstrap, topic=topic)

    def run() -> None:
        query = stream(spark, tmp_path / "in").writeStream.foreachBatch(each).trigger(availableNow=True)
        query.option("checkpointLocation", str(tmp_path / "checkpoint")).start().awaitTermination()

    database, kafka = sinks()
    with pytest.raises(StreamingQueryException, match="between the two"):
        run()
    assert len(ids(place, name)) == 80
    assert len(values(bootstrap, topic)) == 40
    database, kafka = sinks()
    run()
    forget_commit(tmp_path / "checkpoint")
    database, kafka = sinks()
    run()
    assert ids(place, name) == list(range(80))
    assert values(bootstrap, topic) == expected(0, 80)


def test_a_query_that_waits_for_its_database_can_be_stopped(
    spark: SparkSession, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """F3: stop() does not have to wait until retry_s is over, and a later start goes on."""
    fill(spark, tmp_path / "in", 1)
    with Postgres() as server:
        target = semel.Postgres(server.uri, table=name, create=True)
        rows, checkpoint = plain(spark, tmp_path / "in"), tmp_path / "checkpoint"
        query = semel.write_stream(rows, name=name, to=target, checkpoint=str(checkpoint))
        query.processAllAvailable()
        server.stop_at_once()
        fill(spark, tmp_path / "in", 1, first=1)
        deadline = time.monotonic() + 60
        while "Next try in" not in caplog.text:
            assert time.monotonic() < deadline, "the query did not notice"
            time.sleep(0.05)
        started = time.monotonic()
        query.stop()
        assert time.monotonic() - started < 60, "retry_s is 300"
        server.start()
        run_stream(rows, name, target, checkpoint)
        assert ids(server.uri, name) == list(range(80))


def test_mistakes_are_refused_before_a_query_starts(
    spark: SparkSession, bootstrap: str, server: Postgres, name: str, tmp_path: Path
) -> None:
    """K3: two targets, none, a missing table, and an option of Kafka's sink."""
    fill(spark, tmp_path / "in", 1)
    rows = plain(spark, tmp_path / "in")
    there = semel.Postgres(server.uri, table=name, create=True)
    missing = semel.Postgres(server.uri, table="missing")
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"to": there, "bootstrap": bootstrap}, "name two targets"),
        ({}, "nowhere to write to"),
        ({"to": missing}, "has no table 'missing'"),
        ({"to": there, "ledger": "l"}, "ledger= is not an option for a database"),
        ({"to": there, "group": ""}, "group is empty"),
        ({"to": there, "input_settings": {}}, "no bootstrap.servers"),
    ]
    for options, message in mistakes:
        with pytest.raises(ConfigError, match=message):
            semel.write_stream(rows, name=name, checkpoint=str(tmp_path / "checkpoint"), **options)
    assert not (tmp_path / "checkpoint").exists()


def test_a_value_that_does_not_fit_ends_the_query_with_its_column(
    spark: SparkSession, server: Postgres, name: str, tmp_path: Path
) -> None:
    """F1: the task does not fail, so Spark does not repeat it; the query fails with the reason."""
    fill(spark, tmp_path / "in", 1)
    rows = plain(spark, tmp_path / "in").selectExpr("nullif(id, 7) id")
    target = semel.Postgres(server.uri, table=name, create=True, mode="upsert", key=["id"])
    with pytest.raises(StreamingQueryException, match="column 'id': the key is null"):
        run_stream(rows, name, target, tmp_path / "checkpoint")
    assert ids(server.uri, name) == []


def test_rows_of_spark_that_do_not_fit_are_put_aside(
    spark: SparkSession, place: str, name: str, tmp_path: Path
) -> None:
    """F1: a null key and bytes that are no text, found in tasks; a constraint, found by the database."""
    fill(spark, tmp_path / "in", 1)
    with target_at(place, table="any").open() as database:
        database.execute(f"CREATE TABLE {name} (id BIGINT PRIMARY KEY, word TEXT, CHECK (id <> 9))")
    word = "cast(if(id = 8, X'FF00', X'6162') as string) word"
    rows = plain(spark, tmp_path / "in").selectExpr("nullif(id, 7) id", word)
    target = target_at(place, table=name, mode="upsert", key=["id"], dead_letter=f"{name}_failed")
    seen: list[BatchProgress] = []
    run_stream(rows, name, target, tmp_path / "checkpoint", on_progress=seen.append)
    assert ids(place, name) == [number for number in range(40) if number not in (7, 8, 9)]
    found = rows_in(place, f"SELECT value, error FROM {name}_failed")
    by_id = {json.loads(bytes(value))["id"]: error for value, error in found}
    assert len(found) == 3
    assert "the key is null" in by_id[None]
    assert "not UTF-8" in by_id[8]
    assert "check" in by_id[9].lower()
    assert sum(done.dead_letters for done in seen) == 3
