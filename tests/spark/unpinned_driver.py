"""A driver whose Python threads have none of their own in Java (`PYSPARK_PIN_THREAD=false`), as a process.

`python unpinned_driver.py <bootstrap> <topic> <folder>` writes the numbers from 0 to 39 in one stream, and ends.
"""

from __future__ import annotations

import sys

from spark_sessions import small_spark

import semel
from semel.spark.rows import can_encode_in_plan


def main(bootstrap: str, topic: str, folder: str) -> None:
    spark = small_spark()
    spark.range(40).write.parquet(f"{folder}/in")
    rows = spark.readStream.schema("id long").parquet(f"{folder}/in").selectExpr("cast(id as string) value")
    assert not can_encode_in_plan(rows)
    query = semel.write_stream(
        rows,
        name=topic,
        bootstrap=bootstrap,
        topic=topic,
        checkpoint=f"{folder}/checkpoint",
        trigger={"availableNow": True},
    )
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
