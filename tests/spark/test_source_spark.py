"""The Spark source through Spark itself: found without registration, in batch and streaming queries."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from source_world import BROKERS, World, local_spark, started

import semel


@pytest.fixture(scope="module", params=BROKERS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with started(request.param) as world:
        yield world


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with local_spark() as session:
        yield session


def options(world: World, topic: str, **more: str) -> dict[str, str]:
    return {"kafka.bootstrap.servers": world.bootstrap, "subscribe": topic} | more


def values(frame: DataFrame) -> list[str]:
    return sorted(row[0] for row in frame.selectExpr("CAST(value AS STRING)").collect())


def run_available(frame: DataFrame, checkpoint: Path) -> tuple[StreamingQuery, dict[int, list[str]]]:
    """All that is there, in as many micro-batches as it takes; the values of each of them."""
    batches: dict[int, list[str]] = {}

    def take(batch: DataFrame, number: int) -> None:
        batches[number] = values(batch)

    writer = frame.writeStream.foreachBatch(take).trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(checkpoint)).start()
    query.awaitTermination()
    return query, batches


def test_a_batch_query_has_the_columns_and_rows_of_sparks_kafka_source(world: World, spark: SparkSession) -> None:
    """Nothing is registered: Spark finds the format by the module's name."""
    topic = world.topic(partitions=2)
    world.commit(topic, "a", "b")
    world.abort(topic, "x")
    world.write(topic, "c", partition=1, key=b"k", headers=[("h", b"1")])
    frame = spark.read.format("semel").options(**options(world, topic, includeHeaders="true")).load()
    assert frame.columns == ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers"]
    rows = frame.orderBy("partition", "offset").collect()
    assert [(row.topic, row.partition, row.offset, bytes(row.value)) for row in rows] == [
        (topic, 0, 0, b"a"),
        (topic, 0, 1, b"b"),
        (topic, 1, 0, b"c"),
    ]
    assert rows[0].headers is None
    assert rows[2].headers[0].key == "h"
    listed = world.admin.list_offsets({(topic, 1): 0})[semel.TopicPartition(topic, 1)]
    assert rows[2].timestamp.timestamp() * 1000 == listed.timestamp_ms
    empty = spark.read.format("semel").schema("offset LONG").options(**options(world, world.topic())).load()
    assert empty.collect() == []


def test_a_stream_goes_on_from_its_checkpoint_and_from_one_of_sparks_kafka_source(
    world: World, spark: SparkSession, tmp_path: Path
) -> None:
    """The offsets in the checkpoint are those of Spark's Kafka source, so a query can change its format."""
    topic = world.topic(partitions=2)
    world.write(topic, "a", "b", "c")
    stream = spark.readStream.format("semel").options(
        **options(world, topic, startingOffsets="earliest", maxOffsetsPerTrigger="2")
    )
    query, batches = run_available(stream.load(), tmp_path / "checkpoint")
    assert batches == {0: ["a", "b"], 1: ["c"]}
    assert json.loads(query.recentProgress[1].sources[0].latestOffset) == {topic: {"0": 3, "1": 0}}
    offsets = tmp_path / "checkpoint" / "offsets" / "1"
    *_, last = offsets.read_text().splitlines()
    assert json.loads(last) == {topic: {"0": 3, "1": 0}}

    # As Spark's Kafka source would have left it, at another place.
    offsets.write_text(offsets.read_text().replace(last, f'{{"{topic}":{{"1":0,"0":2}}}}'))
    (tmp_path / "checkpoint" / "offsets" / ".1.crc").unlink()
    world.commit(topic, "d", partition=1)
    _, batches = run_available(stream.load(), tmp_path / "checkpoint")
    assert batches == {2: ["c", "d"], 3: []}, "the marker of the transaction is a batch of its own here"


def test_a_mistake_is_told_in_plain_words_through_spark(world: World, spark: SparkSession) -> None:
    """Options fail when the table is loaded; what needs the broker, when the query is planned or run."""
    with pytest.raises(AnalysisException, match=r"subscibe is no option of format..semel..: did you mean subscribe\?"):
        spark.read.format("semel").option("subscibe", "t").load()
    missing = spark.read.format("semel").options(**options(world, "nowhere")).load()
    with pytest.raises(AnalysisException, match="The cluster has no topic 'nowhere'"):
        missing.collect()


def test_the_examples_of_the_guide_run(spark: SparkSession) -> None:
    """What a newcomer copies from docs/spark-source.md works."""
    guide = (Path(__file__).parents[2] / "docs" / "spark-source.md").read_text()
    names: dict[str, Any] = {}
    try:
        for example in re.findall(r"```python\n(.*?)```", guide, re.DOTALL):
            exec(example, names)
        assert [(row["key"], row["value"]) for row in names["amounts"]] == [("ada", "10"), ("ada", "20"), ("ada", "30")]
        assert names["count"] == 3
    finally:
        names["broker"].stop()
