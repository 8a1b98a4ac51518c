"""A stream of numbers on a standalone cluster in which something dies all the time."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from standalone import Standalone, kill

from semel.spark.progress import BatchProgress

Start = Callable[[DataFrame, Callable[[BatchProgress], None]], StreamingQuery]
"""Starts the query that reads these numbers, column `id`, and tells of its batches. It must end with what is there."""
_FAILURES_MAX = 10
_FED_MAX = 20
"""Times the records that were asked for."""


def stream_under_random_kills(
    spark: SparkSession,
    cluster: Standalone,
    rng: random.Random,
    folder: Path,
    start: Start,
    *,
    kills: int,
    records: int,
) -> int:
    """Run until so many have died and all is written. Returns how many numbers there were, at least `records`."""
    step = records // (2 * kills)
    fed = 0

    def feed(files: int) -> int:
        for first in range(fed, fed + files * step, step):
            spark.range(first, first + step, 1, 2).write.mode("append").parquet(str(folder))
        return fed + files * step

    fed = feed(2 * kills)
    numbers = spark.readStream.schema("id long").option("maxFilesPerTrigger", 2).parquet(str(folder))
    done: list[BatchProgress] = []
    killed: list[str] = []
    is_over = threading.Event()

    def kill_now_and_then() -> None:
        kinds = rng.choices(["executor", "worker"], k=kills)
        while len(killed) < kills and not is_over.wait(rng.uniform(0.2, 2)):
            kind = kinds[len(killed)]
            found = cluster.executors() if kind == "executor" else cluster.python_workers()
            # One for each batch, so that they do not all fall into the first.
            if found and len(done) >= len(killed) and kill(rng.choice(found)):
                killed.append(kind)

    killer = threading.Thread(target=kill_now_and_then, daemon=True)
    killer.start()
    failures = 0
    try:
        while True:
            query = start(numbers, done.append)
            try:
                query.awaitTermination()
            except StreamingQueryException:
                failures += 1
                assert failures < _FAILURES_MAX
                continue
            if len(killed) == kills:
                break
            assert fed < _FED_MAX * records, f"only {killed} were killed"
            fed = feed(2)  # a fast machine is through before the last kill
    finally:
        is_over.set()
        killer.join()
    print(f"killed {killed}; the query failed {failures} times")
    return fed
