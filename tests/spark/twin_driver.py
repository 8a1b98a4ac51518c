"""A driver on a cluster, as a process: `python twin_driver.py <JSON>` runs one query over all of its input, and ends.

Two of them with one name are what a user has who starts a pipeline again while the old one still lives somewhere.
"""

from __future__ import annotations

import json
import os
import sys
from typing import cast

from standalone import cluster_session

import semel
from semel.spark import owner
from semel.spark.failpoints import STOP_VARIABLE, VARIABLE


def main() -> None:
    told = json.loads(sys.argv[1])
    owner.MUCH_BYTES = 1  # what the driver writes goes over two connections, as much data does
    spark = cluster_session(told["master"], **{"spark.cores.max": "1"})  # the other twin needs a core too
    in_tasks = cast("dict[str, str]", spark.sparkContext.environment)
    in_tasks.update({name: os.environ[name] for name in (VARIABLE, STOP_VARIABLE) if name in os.environ})
    rows = spark.readStream.schema("id long").option("maxFilesPerTrigger", 1).parquet(told["input"])
    query = semel.write_stream(
        rows.selectExpr("cast(id % 97 as string) key", "cast(id as string) value"),
        name=told["topic"],
        bootstrap=told["bootstrap"],
        topic=told["topic"],
        checkpoint=told["checkpoint"],
        trigger={"availableNow": True},
        batch_size=500,
        writers=told["writers"],
    )
    query.awaitTermination()


if __name__ == "__main__":
    main()
