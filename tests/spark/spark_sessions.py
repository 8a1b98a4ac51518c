"""A small Spark for tests: two threads, few partitions, no web page."""

from __future__ import annotations

import os
import sys
from typing import Any

from pyspark.sql import SparkSession


def small_spark(master: str = "local[2]", **settings: Any) -> SparkSession:
    """A session; one that is there already is taken as it is."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.master(master).appName("semel tests")
    # These processes live for seconds: the second compiler and parallel collectors would only cost.
    flags = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    builder = builder.config("spark.driver.extraJavaOptions", flags)
    builder = builder.config("spark.ui.enabled", "false").config("spark.sql.shuffle.partitions", "2")
    builder = builder.config("spark.log.level", "ERROR").config("spark.ui.showConsoleProgress", "false")
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()
