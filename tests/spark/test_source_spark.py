"""The Spark source through Spark itself: found without registration, in batch and streaming queries."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from source_world import BROKERS, World, local_spark, started
from steady_feed import PARTITIONS, Seen, check_seen, feeding, summarize

import semel
from semel.spark.source_offsets import split_note, to_checkpoint


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
    ends, note = split_note(json.loads(last))
    assert to_checkpoint(ends) == {topic: {"0": 3, "1": 0}}
    assert note is not None
    assert to_checkpoint(note.start) == {topic: {"0": 0, "1": 0}}

    # As Spark's Kafka source would have left it, at another place.
    offsets.write_text(offsets.read_text().replace(last, f'{{"{topic}":{{"1":0,"0":2}}}}'))
    (tmp_path / "checkpoint" / "offsets" / ".1.crc").unlink()
    world.commit(topic, "d", partition=1)
    _, batches = run_available(stream.load(), tmp_path / "checkpoint")
    assert batches == {2: ["c", "d"], 3: []}, "the marker of the transaction is a batch of its own here"


def test_a_default_start_on_a_busy_topic_survives_a_first_batch_that_fails_and_restarts(
    world: World, spark: SparkSession, tmp_path: Path
) -> None:
    """Nothing before the start is read, and what came after it is read once, whichever commit Spark has lost."""
    topic = world.topic(partitions=PARTITIONS)
    checkpoint = tmp_path / "checkpoint"
    runs: list[tuple[int, Seen]] = []

    def run(batches: int, *, fail: bool = False) -> None:
        """Until so many micro-batches with records have run."""
        enough = threading.Event()
        filled = 0

        def take(batch: DataFrame, number: int) -> None:
            nonlocal filled
            seen = summarize(batch)
            runs.append((number, seen))
            if fail and seen:
                raise RuntimeError("this batch is meant to fail")
            filled += bool(seen)
            if filled >= batches:
                enough.set()

        orders = spark.readStream.format("semel").options(**options(world, topic)).load()
        query = orders.writeStream.foreachBatch(take).option("checkpointLocation", str(checkpoint)).start()
        if fail:
            with pytest.raises(StreamingQueryException, match="meant to fail"):
                query.awaitTermination(60)
            return
        try:
            assert enough.wait(60), query.exception()
        finally:
            query.stop()

    with feeding(world.bootstrap, topic, 2_000):
        run(1, fail=True)
        run(2)
        newest = max((path for path in (checkpoint / "commits").glob("[0-9]*")), key=lambda path: int(path.name))
        newest.unlink()
        newest.with_name(f".{newest.name}.crc").unlink(missing_ok=True)  # which Spark takes for the file itself
        run(2)
    _, note = split_note(json.loads((checkpoint / "offsets" / "0").read_text().splitlines()[-1]))
    assert note is not None
    start = {named.partition: offset for named, offset in note.start.items()}
    assert min(start.values()) > 0, "there was something before the start"
    assert check_seen(runs, world.bootstrap, topic, start) > 0


def test_a_mistake_is_told_in_plain_words_through_spark(world: World, spark: SparkSession) -> None:
    """Options fail when the table is loaded; what needs the broker, when the query is planned or run."""
    with pytest.raises(AnalysisException, match=r"subscibe is no option of format..semel..: did you mean subscribe\?"):
        spark.read.format("semel").option("subscibe", "t").load()
    missing = spark.read.format("semel").options(**options(world, "nowhere")).load()
    with pytest.raises(AnalysisException, match="The cluster has no topic 'nowhere'"):
        missing.collect()


def test_a_temporary_view_reads_and_a_table_is_refused_with_the_way_out(world: World, spark: SparkSession) -> None:
    """Spark keeps the options of a view only. A table with columns is made without asking us, so reading it says so."""
    topic = world.topic()
    world.write(topic, "a")
    given = f"USING semel OPTIONS (`kafka.bootstrap.servers` '{world.bootstrap}', subscribe '{topic}')"
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW orders {given}")
    assert values(spark.table("orders")) == ["a"]
    way_out = "Use CREATE TEMPORARY VIEW name USING semel OPTIONS"
    with pytest.raises(AnalysisException, match=way_out):
        spark.sql(f"CREATE TABLE kept_orders {given}")
    spark.sql(f"CREATE TABLE kept_values (value BINARY) {given}")
    try:
        with pytest.raises(AnalysisException, match=way_out):
            spark.read.table("kept_values").collect()
    finally:
        spark.sql("DROP TABLE kept_values")


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
