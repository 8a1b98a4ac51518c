"""The lag of a query from Kafka into a database: its input offsets in a group, only for tools to see."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from sink_scene import fill, forget_commit, stream
from spark_sessions import small_spark
from topic_contents import group_offsets

import semel
from semel.spark.progress import BatchProgress

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
_numbers = count()


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    session = small_spark()
    yield session
    session.stop()


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    with semel.Broker() as broker:
        yield broker.bootstrap


@pytest.fixture
def name() -> str:
    return f"orders-{next(_numbers)}"


def add(bootstrap: str, topic: str, records: int) -> None:
    with semel.Producer(bootstrap_servers=bootstrap) as producer:
        for number in range(records):
            producer.send(topic, b"%d" % number, partition=number % 2)


@pytest.fixture
def topic(bootstrap: str, name: str) -> str:
    """With ten records in each of two partitions."""
    with semel.Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.create_topics(name, partitions=2)
    add(bootstrap, name, 20)
    return name


def read(spark: SparkSession, bootstrap: str, topic: str) -> DataFrame:
    options = {"kafka.bootstrap.servers": bootstrap, "subscribe": topic, "startingOffsets": "earliest"}
    rows = spark.readStream.format("semel").options(**options).load()
    return rows.selectExpr("cast(value as string) id")


def run(df: DataFrame, name: str, folder: Path, **more: Any) -> None:
    target = semel.SQLite(folder / "out.db", table="out", create=True)
    query = semel.write_stream(
        df, name=name, to=target, checkpoint=str(folder / "checkpoint"), trigger={"availableNow": True}, **more
    )
    query.awaitTermination()


def test_the_group_of_the_pipelines_name_shows_where_it_is(
    spark: SparkSession, bootstrap: str, topic: str, name: str, tmp_path: Path
) -> None:
    """F2: after every batch, also after one that was committed before and is only skipped now."""
    run(read(spark, bootstrap, topic), name, tmp_path)
    assert group_offsets(bootstrap, name, topic, 2) == {0: 10, 1: 10}
    add(bootstrap, topic, 6)
    run(read(spark, bootstrap, topic), name, tmp_path)
    assert group_offsets(bootstrap, name, topic, 2) == {0: 13, 1: 13}
    forget_commit(tmp_path / "checkpoint")
    seen: list[BatchProgress] = []
    run(read(spark, bootstrap, topic), name, tmp_path, group="another", on_progress=seen.append)
    assert [done.skipped for done in seen] == [True]
    assert group_offsets(bootstrap, "another", topic, 2) == {0: 13, 1: 13}


def test_group_none_commits_nothing(spark: SparkSession, bootstrap: str, topic: str, name: str, tmp_path: Path) -> None:
    """F2: nor is anything said about it."""
    run(read(spark, bootstrap, topic), name, tmp_path, group=None)
    assert group_offsets(bootstrap, name, topic, 2) == {}


def test_an_input_that_is_not_kafka_has_no_lag_and_no_warning(
    spark: SparkSession, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """F2: there are no offsets that a group could have."""
    fill(spark, tmp_path / "in", 1)
    with caplog.at_level(logging.WARNING, "semel"):
        run(stream(spark, tmp_path / "in").selectExpr("value id"), name, tmp_path)
    assert caplog.text == ""


def test_two_clusters_each_get_their_own_offsets(
    spark: SparkSession, bootstrap: str, topic: str, name: str, tmp_path: Path
) -> None:
    """F2: a union of topics of one name in two clusters; the source notes which cluster it is."""
    with semel.Broker() as other:
        with semel.Admin({"bootstrap.servers": other.bootstrap}) as admin:
            admin.create_topics(topic, partitions=2)
        add(other.bootstrap, topic, 4)
        both = read(spark, bootstrap, topic).union(read(spark, other.bootstrap, topic))
        run(both, name, tmp_path)
        assert group_offsets(bootstrap, name, topic, 2) == {0: 10, 1: 10}
        assert group_offsets(other.bootstrap, name, topic, 2) == {0: 2, 1: 2}


def test_offsets_that_cannot_be_committed_are_a_warning_and_stop_nothing(
    spark: SparkSession, bootstrap: str, topic: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """F2: the group has a member, so that the broker refuses offsets of others."""
    settings = {"bootstrap.servers": bootstrap}
    with (
        semel.Session(settings, topics=[topic], group=name, name=f"{name}-member") as member,
        caplog.at_level(logging.WARNING, "semel.bridges"),
    ):
        next(iter(member))
        run(read(spark, bootstrap, topic), name, tmp_path)
    assert f"The offsets of group '{name}' could not be committed" in caplog.text
    target = semel.SQLite(tmp_path / "out.db", table="out")
    with target.open() as database:
        assert database.scalar("SELECT count(*) FROM out") == 20
