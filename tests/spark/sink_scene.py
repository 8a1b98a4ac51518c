"""Rows for tests of the sink: jobs, and streams over files of which each becomes a micro-batch."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import DataFrame, SparkSession


def numbers(spark: SparkSession, first: int, last: int) -> DataFrame:
    return spark.range(first, last, 1, 3).selectExpr("cast(id % 5 as string) key", "cast(id as string) value")


def expected(first: int, last: int) -> list[bytes]:
    return sorted(b"%d" % number for number in range(first, last))


def fill(spark: SparkSession, folder: Path, files: int, *, first: int = 0, rows: int = 40) -> None:
    """Input that can be read again: a file for each micro-batch."""
    for number in range(first, first + files):
        rows_of_file = spark.range(number * rows, (number + 1) * rows).coalesce(1)
        rows_of_file.selectExpr("id").write.mode("append").parquet(str(folder))


def stream(spark: SparkSession, folder: Path) -> DataFrame:
    source = spark.readStream.schema("id long").option("maxFilesPerTrigger", 1).parquet(str(folder))
    return source.selectExpr("cast(id % 5 as string) key", "cast(id as string) value")


def forget_commit(checkpoint: Path) -> None:
    """Take the newest entry out of Spark's commit log: a crash between the sink's commit and Spark's own."""
    newest = max(int(path.name) for path in (checkpoint / "commits").glob("[0-9]*"))
    for name in (str(newest), f".{newest}.crc"):
        (checkpoint / "commits" / name).unlink()
