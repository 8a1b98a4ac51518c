"""A Spark job: Semel's source and sink, with the checkpoint in the folder that stays over restarts."""

from __future__ import annotations

import os
import sys


def main() -> None:
    from pyspark.sql import SparkSession

    import semel

    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.master("local[2]").appName("copier")
    builder = builder.config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    builder = builder.config("spark.ui.enabled", "false").config("spark.ui.showConsoleProgress", "false")
    spark = builder.getOrCreate()
    bootstrap = os.environ["SEMEL_BOOTSTRAP"]
    orders = (
        spark.readStream.format("semel")
        .option("kafka.bootstrap.servers", bootstrap)
        .option("subscribe", os.environ["SEMEL_INPUT"])
        .option("startingOffsets", "earliest")
        .load()
    )
    query = semel.write_stream(
        orders.select("key", "value"),
        name="copier",
        bootstrap=bootstrap,
        topic=os.environ["SEMEL_OUTPUT"],
        checkpoint=f"{os.environ['SEMEL_FOLDER']}/checkpoint",
    )
    query.awaitTermination()


if __name__ == "__main__":
    main()
