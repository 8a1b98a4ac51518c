"""A driver that tests kill: `python database_spark_driver.py <JSON>` runs queries into databases to their ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kill_driver import source
from pyspark.sql import DataFrame, SparkSession
from spark_sessions import small_spark

import semel

PAD = "repeat('x', 4000) pad"
"""Makes the rows of a task too many to be handed over to the driver."""


def copied(spark: SparkSession, folder: Path) -> DataFrame:
    return source(spark, folder / "left").selectExpr("id", "word", PAD)


def summed(spark: SparkSession, folder: Path) -> DataFrame:
    counted = source(spark, folder / "left").groupBy("word").agg({"*": "count", "id": "sum"})
    return counted.selectExpr("word", "`count(1)` n", "`sum(id)` total", PAD)


def main() -> None:
    told = json.loads(sys.argv[1])
    folder, uri = Path(told["folder"]), told["uri"]
    spark = small_spark(
        **{
            # This process lives for seconds: what compiles, loads and imports would outweigh what is done.
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            "spark.sql.codegen.wholeStage": "false",
            "spark.sql.codegen.factoryMode": "NO_CODEGEN",
            "spark.python.daemon.module": "warm_workers",
        }
    )
    targets = {
        "appended": (copied, semel.Postgres(uri, table="appended", create=True), "append"),
        "summed": (summed, semel.Postgres(uri, table="summed", create=True, mode="upsert", key=["word"]), "update"),
        "in_sqlite": (copied, semel.SQLite(folder / "out.db", table="in_sqlite", create=True), "append"),
    }
    for kind in told["kinds"]:
        rows, target, output_mode = targets[kind]
        semel.write_stream(
            rows(spark, folder / kind),
            name=kind,
            to=target,
            checkpoint=str(folder / kind / "checkpoint"),
            trigger={"availableNow": True},
            output_mode=output_mode,
        ).awaitTermination()


if __name__ == "__main__":
    main()
