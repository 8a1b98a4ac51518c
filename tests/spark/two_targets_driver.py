"""A driver that tests kill: `python two_targets_driver.py <JSON>` writes each micro-batch to Postgres and to Kafka.

`first` says which of the two is called first.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kill_driver import source
from pyspark.sql import DataFrame
from spark_sessions import small_spark

import semel


def main() -> None:
    told = json.loads(sys.argv[1])
    folder, first = Path(told["folder"]), told["first"]
    spark = small_spark(
        **{
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            "spark.sql.codegen.wholeStage": "false",
            "spark.sql.codegen.factoryMode": "NO_CODEGEN",
            "spark.python.daemon.module": "warm_workers",
        }
    )
    to = semel.Postgres(told["uri"], table=f"after_{first}", create=True)
    table = semel.DatabaseSink(name=f"table-{first}", to=to)
    topic = semel.KafkaSink(name=f"topic-{first}", bootstrap=told["bootstrap"], topic=f"after-{first}")

    def into_table(df: DataFrame, batch_id: int) -> None:
        table(df.selectExpr("id", "word"), batch_id)

    def into_topic(df: DataFrame, batch_id: int) -> None:
        topic(df.selectExpr("word key", "cast(id as string) value"), batch_id)

    def each(df: DataFrame, batch_id: int) -> None:
        for write in (into_table, into_topic) if first == "table" else (into_topic, into_table):
            write(df, batch_id)

    query = source(spark, folder / "left").writeStream.foreachBatch(each).trigger(availableNow=True)
    query.option("checkpointLocation", str(folder / "checkpoint")).start().awaitTermination()


if __name__ == "__main__":
    main()
