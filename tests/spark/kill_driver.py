"""A driver that tests kill: `python kill_driver.py <JSON>` runs queries over all of their input, and ends.

Each query writes every record to two topics, so that a batch that is torn apart shows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from spark_sessions import small_spark

import semel
from semel.spark import owner

SCHEMA = "id long, word string, at timestamp"


def source(spark: SparkSession, folder: Path) -> DataFrame:
    return spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(folder))


def stateless(spark: SparkSession, folder: Path) -> DataFrame:
    return source(spark, folder / "left").selectExpr("word key", "concat_ws(',', id, word) value")


def windowed(spark: SparkSession, folder: Path) -> DataFrame:
    """Counts and sums of each word in windows of ten seconds, told once a window is over."""
    rows = source(spark, folder / "left").withWatermark("at", "20 seconds")
    rows = rows.selectExpr("*", "window(at, '10 seconds') w")
    counted = rows.groupBy("w", "word").agg({"*": "count", "id": "sum"})
    return counted.selectExpr("word key", "concat_ws(',', unix_timestamp(w.start), word, `count(1)`, `sum(id)`) value")


def joined(spark: SparkSession, folder: Path) -> DataFrame:
    """Each row of one stream with that of the other, whichever comes first."""
    left = source(spark, folder / "left").selectExpr("id", "word")
    right = source(spark, folder / "right").selectExpr("id other", "word other_word")
    pairs = left.join(right, left["id"] == right["other"])
    return pairs.selectExpr("word key", "concat_ws(',', id, word, other_word) value")


def deduplicated(spark: SparkSession, folder: Path) -> DataFrame:
    """Half of the rows of each file come again in the next one."""
    return source(spark, folder / "left").dropDuplicates(["id"]).selectExpr("word key", "cast(id as string) value")


WRITTEN_BY_TASKS = ("windowed", "deduplicated")
"""All others are written by the driver, as everything is by default where Spark is on one machine."""

KINDS = {"stateless": stateless, "windowed": windowed, "joined": joined, "deduplicated": deduplicated}


def piped(spark: SparkSession, bootstrap: str, topic: str, rows: int, **options: str) -> DataFrame:
    """The stateless query once more, from Kafka: its offsets are in the transaction."""
    told = {"kafka.bootstrap.servers": bootstrap, "subscribe": topic, "maxOffsetsPerTrigger": str(rows)}
    stream = spark.readStream.format("semel").options(**{"startingOffsets": "earliest"} | told | options).load()
    return stream.selectExpr("key", "cast(value as string) value")


def doubled(rows: DataFrame, kind: str) -> DataFrame:
    return rows.selectExpr("key", "value", f"explode(array('out-{kind}', 'copy-{kind}')) topic")


def ways_to_write(kind: str) -> dict[str, Any]:
    """Options of the sink: several batches for each partition, and requests, so that a kill can come between them."""
    return {"batch_size": 200, **({"writers": 2} if kind in WRITTEN_BY_TASKS else {"max_request_size": 1_000})}


def start_by_call(rows: DataFrame, kind: str, bootstrap: str, checkpoint: str) -> StreamingQuery:
    return semel.write_stream(
        rows,
        name=kind,
        bootstrap=bootstrap,
        checkpoint=checkpoint,
        trigger={"availableNow": True},
        **ways_to_write(kind),
    )


def start_by_format(rows: DataFrame, kind: str, bootstrap: str, checkpoint: str) -> StreamingQuery:
    small = {f"kafka.{name.replace('_', '.')}": str(value) for name, value in ways_to_write("stateless").items()}
    writer = rows.writeStream.format("semel").option("name", kind).option("checkpointLocation", checkpoint)
    return writer.option("kafka.bootstrap.servers", bootstrap).options(**small).trigger(availableNow=True).start()


def main() -> None:
    told = json.loads(sys.argv[1])
    owner.MUCH_BYTES = 1  # what the driver writes goes over two connections, as much data does
    folder, bootstrap = Path(told["folder"]), told["bootstrap"]
    spark = small_spark(
        **{
            # This process lives for seconds: what compiles, loads and imports would outweigh what is done.
            "spark.driver.extraJavaOptions": " ".join(["-XX:TieredStopAtLevel=1 -XX:+UseSerialGC", *told["java"]]),
            "spark.sql.codegen.wholeStage": "false",
            "spark.sql.codegen.factoryMode": "NO_CODEGEN",
            "spark.python.daemon.module": "warm_workers",
        }
    )
    queries: list[StreamingQuery] = []
    for kind in told["kinds"]:
        if kind == "stateless":
            rows = piped(spark, bootstrap, f"in-{kind}", told["rows"])
        else:
            rows = KINDS[kind](spark, folder / kind)
        start = start_by_format if told["by_format"] else start_by_call
        queries.append(start(doubled(rows, kind), kind, bootstrap, str(folder / kind / "checkpoint")))
    for query in queries:
        query.awaitTermination()


if __name__ == "__main__":
    main()
