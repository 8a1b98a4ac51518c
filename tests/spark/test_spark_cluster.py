"""The sink on a Spark standalone cluster whose executors and Python workers die, sleep and come back, while they write.

One master, two workers and their executors are processes of their own. Whatever dies, what readers of committed
records see in the end is what was to be written, once.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from random_kills import stream_under_random_kills
from standalone import EAGER_SPECULATION, Standalone, cluster_session, command_of, kill, standalone
from stopped_worker import StoppedWorker
from topic_contents import values

import semel
from semel.client.admin import Admin
from semel.spark.encode import SMALL_BYTES
from semel.spark.progress import BatchProgress

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]
KILLS = int(os.environ.get("SEMEL_SPARK_CLUSTER_KILLS", "3"))
RECORDS = int(os.environ.get("SEMEL_SPARK_CLUSTER_RECORDS", "100000"))
POINT = "before_produce:4"
"""In the middle of what a task writes."""
_numbers = count()


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
def topic(bootstrap: str) -> str:
    name = f"out-{next(_numbers)}"
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.create_topics(name, partitions=4)
    return name


def numbers(spark: SparkSession, last: int) -> DataFrame:
    return spark.range(0, last, 1, 4).selectExpr("cast(id % 97 as string) key", "cast(id as string) value")


def expected(last: int) -> list[bytes]:
    return sorted(b"%d" % number for number in range(last))


def write(
    spark: SparkSession, bootstrap: str, topic: str, job_id: str = "1", *, shuffled: bool = False
) -> BatchProgress:
    rows = numbers(spark, 4_000)
    if shuffled:
        rows = rows.mapInArrow(in_another_order_each_time, rows.schema)
    return semel.write_batch(
        rows, name=topic, job_id=job_id, bootstrap=bootstrap, topic=topic, batch_size=800, writers=4
    )


def in_another_order_each_time(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield batch.take(random.SystemRandom().sample(range(batch.num_rows), batch.num_rows))


def test_a_python_worker_that_dies_while_it_writes_is_followed_by_another(
    spark: SparkSession, bootstrap: str, topic: str, tmp_path: Path
) -> None:
    """E2: its task is run again within the same transaction, and goes on where the first attempt stood."""
    with StoppedWorker(spark, tmp_path, POINT, kill):
        done = write(spark, bootstrap, topic)
    assert values(bootstrap, topic) == expected(4_000)
    assert done.attempts == 1


@pytest.mark.parametrize("records", [4_000, 100_000], ids=["little", "much"])
def test_the_driver_writes_little_itself_and_leaves_much_to_the_tasks(
    spark: SparkSession, bootstrap: str, topic: str, records: int
) -> None:
    """E2: on a cluster the driver gets little data with the manifest; either way each record is there once."""
    done = semel.write_batch(numbers(spark, records), name=topic, job_id="1", bootstrap=bootstrap, topic=topic)
    assert (done.bytes > 4 * SMALL_BYTES) == (records > 4_000), "the sizes do not tell the ways apart"
    assert values(bootstrap, topic) == expected(records)


@pytest.mark.parametrize("shuffled", [False, True], ids=["the same rows again", "rows in another order"])
def test_an_executor_that_dies_while_it_writes_takes_encoded_data_with_it(
    cluster: Standalone,
    spark: SparkSession,
    bootstrap: str,
    topic: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    shuffled: bool,
) -> None:
    """E2: Spark computes the lost blobs anew; if they differ, they are not mixed with what was written before."""
    with StoppedWorker(spark, tmp_path, POINT, lambda process: kill(cluster.executor_of(process))):
        done = write(spark, bootstrap, topic, shuffled=shuffled)
    if shuffled:
        assert done.attempts > 1, "nothing was computed anew"
    assert values(bootstrap, topic) == expected(4_000)
    for record in caplog.records:
        if record.name == "semel.spark":
            assert "anew" in record.message, "an attempt was spent on something else than on lost data"


def test_a_slow_task_is_overtaken_by_its_twin_and_can_do_no_harm_when_it_wakes(
    spark: SparkSession, bootstrap: str, topic: str, tmp_path: Path
) -> None:
    """E2: speculation starts a second attempt; the first, if Spark has let it live, wakes up after the commit."""
    with StoppedWorker(spark, tmp_path, POINT, lambda process: None) as slow:
        done = write(spark, bootstrap, topic)
    assert done.attempts == 1
    if command_of(slow.process):
        os.kill(slow.process, signal.SIGCONT)
    assert write(spark, bootstrap, topic, "1").skipped
    assert values(bootstrap, topic) == expected(4_000)
    assert values(bootstrap, topic, committed=False) == expected(4_000), "not even an aborted record"


def test_random_kills_of_executors_and_workers_lose_and_repeat_nothing(
    cluster: Standalone, spark: SparkSession, bootstrap: str, topic: str, tmp_path: Path, rng: random.Random
) -> None:
    """E2, E6: a stream on a cluster in which something dies all the time."""

    def start(numbers: DataFrame, on_progress: Callable[[BatchProgress], None]) -> StreamingQuery:
        return semel.write_stream(
            numbers.selectExpr("cast(id % 97 as string) key", "cast(id as string) value"),
            name=topic,
            bootstrap=bootstrap,
            topic=topic,
            checkpoint=str(tmp_path / "checkpoint"),
            trigger={"availableNow": True},
            batch_size=16_384,
            writers=4,
            on_progress=on_progress,
        )

    fed = stream_under_random_kills(spark, cluster, rng, tmp_path / "in", start, kills=KILLS, records=RECORDS)
    assert values(bootstrap, topic) == expected(fed)
