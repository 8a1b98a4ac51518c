"""A query through Spark Connect, in a process of its own: a process that has begun with Connect cannot go back.

Arguments: the server, the brokers, a folder for the checkpoint, where the input is: `files` there, or the topic `in`.
Each row gets a random tail, so that data which Spark computes twice cannot pass for the same. A job, run twice, writes
the rows of the files to the topic `jobs` as well. A fifth argument is the checkpoint that the sink gets, where it is
not the query's own.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from pyspark.sql import SparkSession, functions

import semel


def main(server: str, bootstrap: str, folder: str, origin: str, told: str | None = None) -> None:
    spark = SparkSession.builder.remote(server).getOrCreate()
    if told is not None:
        write_with_another_checkpoint(from_files(spark, folder), bootstrap, folder, told)
        return
    tail = functions.udf(lambda value: bytes(value) + b"/" + os.urandom(4).hex().encode(), "binary")
    rows = from_files(spark, folder) if origin == "files" else from_topic(spark, bootstrap)
    query = semel.write_stream(
        rows.select("key", tail.asNondeterministic()("value").alias("value")),
        name="through-connect",
        bootstrap=bootstrap,
        topic="out",
        checkpoint=f"{folder}/checkpoint",
        trigger={"availableNow": True},
    )
    query.awaitTermination()
    if origin == "files":
        for _ in range(2):
            job = spark.read.parquet(f"{folder}/in")
            semel.write_batch(job, name="job-through-connect", job_id="1", bootstrap=bootstrap, topic="jobs")
    spark.stop()


def write_with_another_checkpoint(rows: Any, bootstrap: str, folder: str, told: str) -> None:
    sink = semel.KafkaSink(name="mistaken", bootstrap=bootstrap, topic="out", checkpoint=told)
    query = rows.writeStream.foreachBatch(sink).option("checkpointLocation", f"{folder}/own")
    query.trigger(availableNow=True).start().awaitTermination()


def from_topic(spark: Any, bootstrap: str) -> Any:
    read = spark.readStream.format("semel").option("kafka.bootstrap.servers", bootstrap).option("subscribe", "in")
    return read.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", 40).load()


def from_files(spark: Any, folder: str) -> Any:
    read = spark.readStream.schema("key binary, value binary").option("maxFilesPerTrigger", 1)
    return read.parquet(f"{folder}/in")


if __name__ == "__main__":
    main(*sys.argv[1:])
