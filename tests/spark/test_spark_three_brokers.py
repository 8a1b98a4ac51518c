"""The sink on three brokers of Apache Kafka, one of which is always about to die."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from spark_sessions import small_spark
from topic_contents import values

import semel
from semel.client.admin import Admin
from semel.spark.progress import BatchProgress
from semel.testing.apache_kafka import ApacheKafka

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]
KILLS = int(os.environ.get("SEMEL_SPARK_CLUSTER_KILLS", "3"))
BATCHES_A_KILL = 3
RECORDS_A_BATCH = 20_000


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    session = small_spark("local[2]")
    yield session
    session.stop()


@pytest.fixture(scope="module")
def kafka() -> Iterator[ApacheKafka]:
    with ApacheKafka(nodes=3, config={"default.replication.factor": "3", "min.insync.replicas": "2"}) as started:
        yield started


def test_brokers_that_die_one_after_the_other_lose_and_repeat_nothing(
    spark: SparkSession, kafka: ApacheKafka, tmp_path: Path, rng: random.Random
) -> None:
    """E6: leaders, coordinators and the ledger's partition move in the midst of transactions."""
    batches = KILLS * BATCHES_A_KILL
    spark.range(0, batches * RECORDS_A_BATCH, 1, batches).selectExpr("cast(id as string) value").write.parquet(
        str(tmp_path / "in")
    )
    with Admin({"bootstrap.servers": kafka.bootstrap}) as admin:
        admin.create_topics("out", partitions=6, replication=3)
    done: list[BatchProgress] = []
    killed: list[int] = []
    is_over, is_whole = threading.Event(), threading.Event()
    is_whole.set()

    def note(progress: BatchProgress) -> None:
        done.append(progress)
        if len(done) % BATCHES_A_KILL == 0:
            is_whole.wait(60)  # the next kill is to find a stream that still runs

    def kill_one_and_start_it_again() -> None:
        while len(killed) < KILLS and not is_over.wait(rng.uniform(0.05, 0.5)):
            if len(done) < len(killed) * BATCHES_A_KILL:
                continue
            node = rng.choice(kafka.nodes)
            is_whole.clear()
            node.kill()
            killed.append(len(done))
            is_over.wait(rng.uniform(0, 3))
            node.start()
            is_whole.set()

    killer = threading.Thread(target=kill_one_and_start_it_again)
    rows = spark.readStream.schema("value string").option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "in"))
    query = semel.write_stream(
        rows,
        name="three-brokers",
        bootstrap=kafka.bootstrap,
        topic="out",
        checkpoint=str(tmp_path / "checkpoint"),
        trigger={"availableNow": True},
        on_progress=note,
    )
    killer.start()
    try:
        query.awaitTermination()
    finally:
        is_over.set()
        killer.join()
    print(f"killed after {killed} batches; attempts at each: {[progress.attempts for progress in done]}")
    assert len(killed) == KILLS, "the stream was over too soon"
    assert values(kafka.bootstrap, "out") == sorted(b"%d" % number for number in range(batches * RECORDS_A_BATCH))
