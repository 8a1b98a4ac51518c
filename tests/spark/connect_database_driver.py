"""Queries and a job into databases through Spark Connect, in a process of its own, as `connect_driver.py` is for Kafka.

Arguments: the server, the brokers, the database's URI, a folder for checkpoints and a SQLite file. Each row has a
random number, so that data which Spark computes twice cannot pass for the same.
"""

from __future__ import annotations

import sys
from typing import Any

from pyspark.sql import SparkSession

import semel


def main(server: str, bootstrap: str, uri: str, folder: str) -> None:
    spark = SparkSession.builder.remote(server).getOrCreate()
    read = spark.readStream.format("semel").option("kafka.bootstrap.servers", bootstrap).option("subscribe", "in")
    topic = read.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", 40).load()
    rows = topic.selectExpr("nullif(cast(cast(value as string) as long), 7) id", "uuid() tail", "topic", "offset")
    targets: dict[str, Any] = {
        "in_postgres": semel.Postgres(uri, table="in_postgres", create=True, **upsert()),
        "in_sqlite": semel.SQLite(f"{folder}/out.db", table="in_sqlite", create=True, **upsert()),
    }
    for name, target in targets.items():
        checkpoint = f"{folder}/{name}"
        trigger = {"availableNow": True}
        semel.write_stream(rows, name=name, to=target, checkpoint=checkpoint, trigger=trigger).awaitTermination()
    by_hand(rows, uri, f"{folder}/by_hand")
    numbers = spark.range(0, 20_000, 1, 3).selectExpr("id", "uuid() tail")
    skipped = [
        semel.write_batch(numbers, name="job", job_id="1", to=semel.Postgres(uri, table="job", create=True)).skipped
        for _ in range(2)
    ]
    print("skipped", skipped)
    spark.stop()


def upsert() -> dict[str, Any]:
    return {"mode": "upsert", "key": ["id"], "dead_letter": "failed"}


def by_hand(rows: Any, uri: str, checkpoint: str) -> None:
    target = semel.Postgres(uri, table="by_hand", create=True)
    sink = semel.DatabaseSink(name="by_hand", to=target, checkpoint=checkpoint, group=None)
    query = rows.where("id is not null").writeStream.foreachBatch(sink).option("checkpointLocation", checkpoint)
    query.trigger(availableNow=True).start().awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
