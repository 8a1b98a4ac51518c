"""A query with default options that notes what is in each micro-batch, as a process.

`python restart_driver.py <bootstrap> <topic> <folder>` runs until its input is closed, or until somebody kills it.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from pyspark.sql import DataFrame
from spark_sessions import small_spark
from steady_feed import summarize


def main(bootstrap: str, topic: str, folder: str) -> None:
    spark = small_spark()
    orders = spark.readStream.format("semel").option("kafka.bootstrap.servers", bootstrap).option("subscribe", topic)

    def note(batch: DataFrame, number: int) -> None:
        line = json.dumps([number, summarize(batch)])
        with Path(folder, "seen").open("a") as file:
            file.write(f"{line}\n")

    query = orders.load().writeStream.foreachBatch(note).option("checkpointLocation", f"{folder}/checkpoint").start()

    def stop_on_request() -> None:
        sys.stdin.read()
        query.stop()

    threading.Thread(target=stop_on_request, daemon=True).start()
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
