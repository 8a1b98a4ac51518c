"""Dead letters in real queries and jobs: written once, with the good rows, counted, and bounded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest
from crasher import Crash, Crasher
from dead_letter_driver import SIZE, with_bad_rows
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from spark_sessions import small_spark
from topic_contents import Seen, contents

import semel
from semel.broker.process import Broker
from semel.client.admin import Admin
from semel.errors import ConfigError, KafkaError, TooManyDeadLetters, UnknownTopic
from semel.spark.failpoints import GROUP_VARIABLE, VARIABLE
from semel.spark.progress import BatchProgress
from semel.spark.stream import OBSERVED

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

_numbers = count()


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    session = small_spark("local[2]")
    yield session
    session.stop()


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    with Broker() as broker:
        yield broker.bootstrap


@pytest.fixture
def topic(bootstrap: str) -> str:
    """An output topic that takes short records only, with a dead-letter topic beside it."""
    name = f"out-{next(_numbers)}"
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.create_topics(name, partitions=3, config={"max.message.bytes": str(SIZE)})
        admin.create_topics(f"{name}-bad", partitions=2)
    return name


def good(first: int, last: int) -> list[bytes]:
    return sorted(b"%d" % number for number in range(first, last) if number % 10 != 7)


def bad(first: int, last: int) -> list[bytes]:
    return sorted(b"%d" % number + b"x" * SIZE for number in range(first, last) if number % 10 == 7)


def seen_values(bootstrap: str, topic: str) -> list[bytes]:
    return sorted(seen.value or b"" for seen in contents(bootstrap, topic))


def told(seen: Seen, name: str) -> str:
    return (dict(seen.headers)[f"semel.dead-letter.{name}"] or b"").decode()


def fill(spark: SparkSession, folder: Path, files: int, *, rows: int = 40) -> None:
    for number in range(files):
        ids = spark.range(number * rows, (number + 1) * rows).coalesce(1)
        ids.write.mode("append").parquet(str(folder))


def stream(spark: SparkSession, folder: Path) -> DataFrame:
    ids = spark.readStream.schema("id long").option("maxFilesPerTrigger", 1).parquet(str(folder))
    return with_bad_rows(ids)


@pytest.mark.parametrize("writers", [None, 2], ids=["the driver writes", "tasks write"])
def test_a_job_sets_aside_what_its_topic_refuses(
    spark: SparkSession, bootstrap: str, topic: str, writers: int | None
) -> None:
    """D8: `write_batch`, run twice, leaves each good row and each dead letter once."""

    def run() -> BatchProgress:
        return semel.write_batch(
            with_bad_rows(spark.range(0, 100, 1, 2)),
            name=topic,
            job_id="today",
            bootstrap=bootstrap,
            topic=topic,
            dead_letter=f"{topic}-bad",
            writers=writers,
        )

    done, again = run(), run()
    assert (done.records, done.dead_letters, done.skipped) == (100, 10, False)
    assert again.skipped
    assert seen_values(bootstrap, topic) == good(0, 100)
    letters = contents(bootstrap, f"{topic}-bad")
    assert sorted(letter.value or b"" for letter in letters) == bad(0, 100)
    assert {letter.key for letter in letters} == {b"2"}
    for letter in letters:
        assert (told(letter, "pipeline"), told(letter, "job"), told(letter, "output-topic")) == (topic, "today", topic)
        assert f"max.message.bytes={SIZE} of topic '{topic}'" in told(letter, "error")


def test_a_stream_sets_aside_what_its_topic_refuses(
    spark: SparkSession, bootstrap: str, topic: str, tmp_path: Path
) -> None:
    """D8: `write_stream` goes on, counts dead letters in its own figures and in Spark's, and names the batch."""
    fill(spark, tmp_path / "in", 2)
    seen: list[BatchProgress] = []
    query = semel.write_stream(
        stream(spark, tmp_path / "in"),
        name=topic,
        bootstrap=bootstrap,
        topic=topic,
        checkpoint=str(tmp_path / "checkpoint"),
        trigger={"availableNow": True},
        dead_letter=f"{topic}-bad",
        dead_letter_max=4,
        on_progress=seen.append,
    )
    query.awaitTermination()
    assert [(batch.records, batch.dead_letters) for batch in seen] == [(40, 4), (40, 4)]
    observed = [cast(Any, progress)["observedMetrics"][OBSERVED] for progress in query.recentProgress]
    assert [row["dead_letters"] for row in observed if row["records"]] == [4, 4]
    assert seen_values(bootstrap, topic) == good(0, 80)
    letters = contents(bootstrap, f"{topic}-bad")
    assert sorted(letter.value or b"" for letter in letters) == bad(0, 80)
    assert Counter(told(letter, "batch") for letter in letters) == {"0": 4, "1": 4}


def test_too_many_dead_letters_stop_a_query_and_leave_nothing(
    spark: SparkSession, bootstrap: str, topic: str, tmp_path: Path
) -> None:
    """D8: with count, limit and an example; a restart with a higher limit writes the same batch."""
    fill(spark, tmp_path / "in", 1)

    def run(limit: int) -> None:
        sink = semel.KafkaSink(
            name=topic, bootstrap=bootstrap, topic=topic, dead_letter=f"{topic}-bad", dead_letter_max=limit
        )
        writer = stream(spark, tmp_path / "in").writeStream.foreachBatch(sink).trigger(availableNow=True)
        writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start().awaitTermination()

    with pytest.raises(StreamingQueryException) as caught:
        run(3)
    assert f"4 rows of batch 0 of pipeline '{topic}' cannot be written, more than dead_letter_max=3" in str(
        caught.value
    )
    assert "a row with key b'2' for topic" in str(caught.value)
    assert contents(bootstrap, topic, committed=False) == []
    run(4)
    assert seen_values(bootstrap, topic) == good(0, 40)
    assert seen_values(bootstrap, f"{topic}-bad") == bad(0, 40)


def test_mistakes_in_the_dead_letter_topic_are_found_before_the_query_starts(
    spark: SparkSession, bootstrap: str, topic: str, tmp_path: Path
) -> None:
    """D8: it must be there, and must not be the output itself."""
    fill(spark, tmp_path / "in", 1)

    def start(dead_letter: str) -> None:
        semel.write_stream(
            stream(spark, tmp_path / "in"),
            name=topic,
            bootstrap=bootstrap,
            topic=topic,
            checkpoint=str(tmp_path / "checkpoint"),
            dead_letter=dead_letter,
        )

    with pytest.raises(UnknownTopic, match="Dead letters cannot be written: The cluster has no topic 'nowhere'"):
        start("nowhere")
    with pytest.raises(ConfigError, match="is the output topic itself"):
        start(topic)
    assert not spark.streams.active
    with pytest.raises(TooManyDeadLetters, match="dead_letter_max=1"):
        semel.write_batch(
            with_bad_rows(spark.range(0, 40)),
            name=topic,
            job_id="1",
            bootstrap=bootstrap,
            topic=topic,
            dead_letter=f"{topic}-bad",
            dead_letter_max=1,
        )


def test_a_batch_that_a_broker_refuses_points_to_dead_letters(spark: SparkSession, bootstrap: str, topic: str) -> None:
    """D8: without `dead_letter` nothing asks for the limits of topics, and an oversized row is an error as ever."""
    rows = with_bad_rows(spark.range(0, 10))
    with pytest.raises(KafkaError, match=r"max\.message\.bytes.*nothing of it will be seen.*pass dead_letter="):
        semel.write_batch(rows, name=topic, job_id="1", bootstrap=bootstrap, topic=topic)
    assert contents(bootstrap, topic) == []


@pytest.mark.parametrize("point", ["after_produce", "after_end_answered", "before_return"])
def test_a_query_that_crashes_writes_each_dead_letter_once(
    spark: SparkSession, bootstrap: str, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """D8: before the commit, after it, and between it and Spark's own."""
    fill(spark, tmp_path / "in", 2)

    def run() -> None:
        query = semel.write_stream(
            stream(spark, tmp_path / "in"),
            name=topic,
            bootstrap=bootstrap,
            topic=topic,
            checkpoint=str(tmp_path / "checkpoint"),
            trigger={"availableNow": True},
            dead_letter=f"{topic}-bad",
        )
        query.awaitTermination()

    with monkeypatch.context() as patch:
        crasher = Crasher(patch, cast(Any, spark.sparkContext).environment)
        crasher.arm(point)
        with pytest.raises((Crash, StreamingQueryException), match=point):
            run()
        crasher.arm(None)
    run()
    assert seen_values(bootstrap, topic) == good(0, 80)
    assert seen_values(bootstrap, f"{topic}-bad") == bad(0, 80)


@pytest.mark.chaos
@pytest.mark.parametrize("writers", [None, 2], ids=["the driver writes", "tasks write"])
def test_a_driver_killed_between_both_commits_writes_each_dead_letter_once(
    spark: SparkSession, bootstrap: str, topic: str, tmp_path: Path, writers: int | None
) -> None:
    """D8: `kill -9` of the driver with its JVM and workers when Kafka has committed a batch and Spark has not."""
    fill(spark, tmp_path / "in", 3)
    sink = {
        "name": topic,
        "bootstrap": bootstrap,
        "topic": topic,
        "checkpoint": str(tmp_path / "checkpoint"),
        "dead_letter": f"{topic}-bad",
        "writers": writers,
    }
    told_to = json.dumps({"input": str(tmp_path / "in"), "sink": sink})
    assert run_driver(told_to, tmp_path, kill_at="before_return:2") == -signal.SIGKILL
    assert seen_values(bootstrap, f"{topic}-bad") == bad(0, 80), "two batches are committed"
    assert run_driver(told_to, tmp_path) == 0, (tmp_path / "driver.log").read_text()[-3000:]
    assert seen_values(bootstrap, topic) == good(0, 120)
    assert seen_values(bootstrap, f"{topic}-bad") == bad(0, 120)


def run_driver(told_to: str, folder: Path, kill_at: str | None = None) -> int:
    """Run it in its own process group, of which nothing is left at a kill; returns how it ended."""
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), *sys.path])}
    if kill_at is not None:
        environment[VARIABLE] = kill_at
    starter = (
        "import os, sys; os.environ[sys.argv[1]] = str(os.getpid()); "
        "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
    )
    with (folder / "driver.log").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", starter, GROUP_VARIABLE, str(here / "dead_letter_driver.py"), told_to],
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        return process.wait(200)
    finally:
        with suppress(ProcessLookupError):  # a driver that ended well has left nothing behind
            os.killpg(process.pid, signal.SIGKILL)
