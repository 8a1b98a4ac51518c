"""The process that commits for `format("semel")`, without Spark: `python commit_process.py <JSON>` commits one batch.

It prints whether the batch had been committed before.
"""

from __future__ import annotations

import json
import sys

import pyarrow as pa
from stages import Row, encode

from semel.spark.format_commit import commit_batch
from semel.spark.format_options import parse_stream_options

NAME = "orders"
TOPIC = "out"
ROWS = 30
PARTITIONS = 2


def values_of(batch: int) -> list[bytes]:
    return [b"%d" % number for number in range(batch * ROWS, (batch + 1) * ROWS)]


def commit(bootstrap: str, checkpoint: str, run: str, batch: int) -> bool:
    """Whether it had been committed before."""
    options = parse_stream_options(
        {"name": NAME, "topic": TOPIC, "kafka.bootstrap.servers": bootstrap, "checkpointLocation": checkpoint}
    )
    blobs = encode(bootstrap, TOPIC, [pa.table({"value": values_of(batch)})], PARTITIONS)
    return commit_batch(options, [Row(row) for row in blobs.table.to_pylist()], run, batch).skipped


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    print("skipped" if commit(**told) else "written", flush=True)
