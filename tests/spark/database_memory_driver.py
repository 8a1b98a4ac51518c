"""`python database_memory_driver.py <JSON>` writes so many rows in one job, and prints what memory Python has taken.

The driver's own, and that of Spark's largest Python worker. The JVM has a heap of a fixed size.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

from database_modes import target_at
from spark_sessions import small_spark
from standalone import WORKER, command_of, descendants

import semel


def peak_mb(process: int) -> int:
    """The most memory that a process had at one time; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM")), 0)


def main() -> None:
    told = json.loads(sys.argv[1])
    spark = small_spark()
    is_over = threading.Event()
    workers = [0]

    def watch() -> None:
        while not is_over.wait(0.1):
            found = [one for one in descendants(os.getpid()) if WORKER in command_of(one)]
            workers.extend(peak_mb(one) for one in found)

    watcher = threading.Thread(target=watch)
    watcher.start()
    rows = spark.range(0, told["rows"], 1, 4).selectExpr(
        "id", "concat('customer ', id % 5000) customer", "id * 2 amount"
    )
    try:
        done = semel.write_batch(
            rows, name="memory", job_id=str(told["rows"]), to=target_at(told["place"], table=told["table"], create=True)
        )
    finally:
        is_over.set()
        watcher.join()
    print(json.dumps({"rows": done.records, "driver": peak_mb(os.getpid()), "worker": max(workers)}))


if __name__ == "__main__":
    main()
