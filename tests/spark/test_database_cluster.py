"""A database written from a Spark standalone cluster whose executors and Python workers die and sleep while they load.

The rows are counted by `n = n + 1`, so anything that was merged twice would show.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from database_modes import MODES
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from random_kills import stream_under_random_kills
from standalone import EAGER_SPECULATION, Standalone, cluster_session, command_of, kill, standalone
from stopped_worker import StoppedWorker

import semel
from semel.spark.progress import BatchProgress
from semel.testing.postgres import Postgres

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]
KILLS = int(os.environ.get("SEMEL_SPARK_CLUSTER_KILLS", "3"))
RECORDS = int(os.environ.get("SEMEL_SPARK_CLUSTER_RECORDS", "100000"))
KEYS = 97


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("standalone")) as started:
        yield started


@pytest.fixture(scope="module")
def spark(cluster: Standalone) -> Iterator[SparkSession]:
    session = cluster_session(cluster.url, **EAGER_SPECULATION)
    yield session
    session.stop()


@pytest.fixture
def target() -> Iterator[semel.Postgres]:
    with Postgres() as server:
        made = semel.Postgres(server.uri, table="out", statement=MODES["statement"].options["statement"])
        with made.open() as database:
            database.execute(MODES["statement"].prepare[0])
        yield made


def numbers(spark: SparkSession, last: int) -> DataFrame:
    return spark.range(0, last, 1, 4).selectExpr(f"id % {KEYS} key", "repeat('x', 200) pad")


def counts(target: semel.Postgres) -> dict[int, int]:
    with target.open() as database:
        return {int(key): int(n) for key, n in database.execute("SELECT key, n FROM counts").rows}


def expected(last: int) -> dict[int, int]:
    return {key: len(range(key, last, KEYS)) for key in range(KEYS)}


def left_over(target: semel.Postgres) -> int:
    with target.open() as database:
        return int(database.scalar("SELECT count(*) FROM semel_staging"))


def assert_later_jobs_drop_the_rest(spark: SparkSession, target: semel.Postgres) -> None:
    """Of an attempt that nobody waits for, the server may hold the table for a moment after the job's end."""
    for number in range(2, 12):
        if left_over(target) == 0:
            return
        semel.write_batch(numbers(spark, 0), name="job", job_id=str(number), to=target)
    assert left_over(target) == 0


@pytest.mark.parametrize("point", ["before_load", "after_load"])
@pytest.mark.parametrize("victim", ["worker", "executor"])
def test_a_task_that_dies_before_or_after_it_has_loaded_is_merged_once(
    cluster: Standalone, spark: SparkSession, target: semel.Postgres, tmp_path: Path, point: str, victim: str
) -> None:
    """E2, F1: Spark runs it again; what the first attempt has left is not read, and dropped with the rest or later."""

    def end(process: int) -> None:
        kill(process if victim == "worker" else cluster.executor_of(process))

    with StoppedWorker(spark, tmp_path, f"{point}:1", end):
        done = semel.write_batch(numbers(spark, 8_000), name="job", job_id="1", to=target)
    assert done.attempts == 1
    assert counts(target) == expected(8_000)
    assert_later_jobs_drop_the_rest(spark, target)


def test_a_slow_task_is_overtaken_and_what_it_loads_later_is_never_merged(
    spark: SparkSession, target: semel.Postgres, tmp_path: Path
) -> None:
    """E2: speculation starts a second attempt; the first, if Spark has let it live, wakes up after the commit."""
    with StoppedWorker(spark, tmp_path, "before_load:1", lambda process: None) as slow:
        semel.write_batch(numbers(spark, 8_000), name="job", job_id="1", to=target)
    if command_of(slow.process):
        os.kill(slow.process, signal.SIGCONT)
    assert semel.write_batch(numbers(spark, 8_000), name="job", job_id="1", to=target).skipped
    assert counts(target) == expected(8_000)


def test_random_kills_of_executors_and_workers_lose_and_repeat_nothing(
    cluster: Standalone, spark: SparkSession, target: semel.Postgres, tmp_path: Path, rng: random.Random
) -> None:
    """E2, E6, F1: a stream on a cluster in which something dies all the time."""

    def start(numbers: DataFrame, on_progress: Callable[[BatchProgress], None]) -> StreamingQuery:
        return semel.write_stream(
            numbers.selectExpr(f"id % {KEYS} key", "repeat('x', 50) pad"),
            name="stream",
            to=target,
            checkpoint=str(tmp_path / "checkpoint"),
            trigger={"availableNow": True},
            on_progress=on_progress,
        )

    fed = stream_under_random_kills(spark, cluster, rng, tmp_path / "in", start, kills=KILLS, records=RECORDS)
    assert counts(target) == expected(fed)
