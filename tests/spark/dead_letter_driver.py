"""A driver that tests kill: `python dead_letter_driver.py <JSON>` writes a stream with bad rows, and ends."""

from __future__ import annotations

import json
import sys
from typing import Any

from pyspark.sql import DataFrame
from spark_sessions import small_spark

import semel

SIZE = 3_000
"""A record of so many bytes is more than the output topic takes."""


def with_bad_rows(ids: DataFrame) -> DataFrame:
    """Every tenth value is longer than the output topic takes."""
    value = f"concat(id, if(id % 10 = 7, repeat('x', {SIZE}), ''))"
    return ids.selectExpr("cast(id % 5 as string) key", f"{value} value")


def main() -> None:
    told: dict[str, Any] = json.loads(sys.argv[1])
    spark = small_spark("local[2]")
    ids = spark.readStream.schema("id long").option("maxFilesPerTrigger", 1).parquet(told["input"])
    semel.write_stream(with_bad_rows(ids), trigger={"availableNow": True}, **told["sink"]).awaitTermination()


if __name__ == "__main__":
    main()
