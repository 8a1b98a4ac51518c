"""A Spark Connect server on a free port of its own, until its input ends. It prints `ready` and the port."""

from __future__ import annotations

import sys
from typing import Any

from spark_sessions import small_spark


def main() -> None:
    spark: Any = small_spark(
        **{
            "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
            "spark.connect.grpc.binding.port": "0",
        }
    )
    service = getattr(spark.sparkContext._jvm, "org.apache.spark.sql.connect.service.SparkConnectService$")
    print("ready", getattr(service, "MODULE$").localPort(), flush=True)
    sys.stdin.read()
    spark.stop()


if __name__ == "__main__":
    main()
