"""A query that crashes at every named step and is started again, for every kind of query, on both protocols.

The real thing, `kill -9` of the whole driver, is in `test_spark_kills.py` and takes a new Spark for each kill. Here the
sink's half of the driver dies: from the named step on it says nothing more to anybody, its connections are cut, and a
new one takes over. To brokers and checkpoint both look the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crasher import Crash, Crasher
from kill_driver import KINDS, WRITTEN_BY_TASKS, ways_to_write
from kill_feed import Feed, expected
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from spark_sessions import small_spark
from topic_contents import values

import semel
from semel.client.admin import Admin
from semel.spark import failpoints, owner

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    session = small_spark("local[2]")  # a task that fails is not tried again
    yield session
    session.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_a_query_that_crashes_at_every_step_loses_and_repeats_nothing(
    spark: SparkSession, bootstrap: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E2, E3: a crash at each step in turn, a restart after each, and the output is what the input says."""
    topic = f"out-{kind}"
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.create_topics(topic, partitions=3)
    feed = Feed(tmp_path)
    feed.add(4)
    environment: Any = spark.sparkContext.environment

    def run() -> None:
        query = semel.write_stream(
            KINDS[kind](spark, tmp_path),
            name=kind,
            bootstrap=bootstrap,
            topic=topic,
            checkpoint=str(tmp_path / "checkpoint"),
            trigger={"availableNow": True},
            **ways_to_write(kind),
        )
        query.awaitTermination()

    monkeypatch.setattr(owner, "MUCH_BYTES", 1)  # what the driver writes goes over two connections
    with monkeypatch.context() as patch:
        crasher = Crasher(patch, environment, do_tasks_write=kind in WRITTEN_BY_TASKS)
        for point in failpoints.POINTS:
            feed.add(2)
            crasher.arm(point)
            with pytest.raises((Crash, StreamingQueryException), match=point):
                run()
        crasher.arm(None)
    feed.add(1)
    run()
    assert values(bootstrap, topic) == expected(kind, feed)
    newest = max(int(path.name) for path in (tmp_path / "checkpoint" / "commits").glob("[0-9]*"))
    for name in (str(newest), f".{newest}.crc"):
        (tmp_path / "checkpoint" / "commits" / name).unlink()
    run()
    assert values(bootstrap, topic) == expected(kind, feed), "a replay of the last batch writes nothing"
    assert os.environ.get(failpoints.VARIABLE) is None
