"""A query through Spark Connect, in a process of its own: a process that has begun with Connect cannot go back.

Arguments: the brokers, and a folder for the checkpoint. Each row gets a random tail, so that data which Spark computes
twice cannot pass for the same.
"""

from __future__ import annotations

import os
import sys

import semel


def main(bootstrap: str, folder: str) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    from pyspark.sql import SparkSession, functions

    builder = SparkSession.builder.remote("local[2]").config("spark.sql.shuffle.partitions", "2")
    flags = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    spark = builder.config("spark.driver.extraJavaOptions", flags).config("spark.ui.enabled", "false").getOrCreate()
    tail = functions.udf(lambda value: bytes(value) + b"/" + os.urandom(4).hex().encode(), "binary")
    read = spark.readStream.format("semel").option("kafka.bootstrap.servers", bootstrap).option("subscribe", "in")
    rows = read.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", 40).load()
    query = semel.write_stream(
        rows.select("key", tail.asNondeterministic()("value").alias("value")),
        name="through-connect",
        bootstrap=bootstrap,
        topic="out",
        checkpoint=f"{folder}/checkpoint",
        trigger={"availableNow": True},
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
