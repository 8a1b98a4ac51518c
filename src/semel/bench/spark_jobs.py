"""The queries that `semel bench spark` measures, in a process of their own that keeps one Spark session.

It is started with the Python of either pyspark, reads one job a line (JSON) and answers each with one line. The clock
runs from the start of a query to its end, so that all of its micro-batches, its planning and its commits count.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

ANSWER: Final = "answer "
ERROR: Final = "error"
"""The only name in the answer of a job that has failed."""
_CORES: Final = 2
_JDBC_DRIVER: Final = "org.postgresql.Driver"
_JDBC_PARTS: Final = re.compile(r"//([^:]+):([^@]+)@(.+)")


class Jobs:
    """What the process can be asked for: each public method is a job, and returns what was measured."""

    def __init__(self, spark: Any) -> None:
        self._spark = spark

    def version(self) -> dict[str, Any]:
        return {"pyspark": self._spark.version}

    def sink(
        self,
        *,
        way: str,
        input: str,
        files_a_batch: int,
        checkpoint: str,
        bootstrap: str = "",
        topic: str = "",
        options: dict[str, str] | None = None,
        pause_s: float = 0.0,
    ) -> dict[str, Any]:
        """A whole query from Parquet files to a sink: `semel`, `kafka` (Spark's own), or `noop`."""
        parts: list[dict[str, Any]] = []
        rows = self._input(input, files_a_batch)
        if pause_s:
            rows = rows.mapInArrow(_Pause(pause_s), rows.schema)
        started = time.perf_counter()
        if way == "semel":
            import semel

            query: Any = semel.write_stream(
                rows,
                name=topic,
                bootstrap=bootstrap,
                topic=topic,
                checkpoint=checkpoint,
                trigger={"availableNow": True},
                settings=options or {},
                on_progress=lambda progress: parts.append(asdict(progress)),
            )
        else:
            writer = rows.writeStream.format(way).option("checkpointLocation", checkpoint).trigger(availableNow=True)
            if way == "kafka":
                writer = writer.option("kafka.bootstrap.servers", bootstrap).option("topic", topic)
                writer = writer.options(**{f"kafka.{name}": value for name, value in (options or {}).items()})
            query = writer.start()
        return {**_wait(query, started), "parts": parts}

    def source(self, *, format: str, bootstrap: str, topic: str, checkpoint: str | None = None) -> dict[str, Any]:
        """A whole topic into `noop`: a batch query, or with a checkpoint a stream up to what is there."""
        reader = self._spark.read if checkpoint is None else self._spark.readStream
        started = time.perf_counter()
        rows = self._topic(reader, format, bootstrap, topic)
        if checkpoint is None:
            rows.write.format("noop").mode("overwrite").save()
            return {"seconds": time.perf_counter() - started}
        writer = rows.writeStream.format("noop").option("checkpointLocation", checkpoint)
        return _wait(writer.trigger(availableNow=True).start(), started)

    def count(self, *, format: str, bootstrap: str, topic: str) -> dict[str, Any]:
        """How many records a source sees."""
        return {"records": self._topic(self._spark.read, format, bootstrap, topic).count()}

    def to_database(
        self, *, way: str, input: str, url: str, table: str, mode: Any = "append", key: list[str] | None = None
    ) -> dict[str, Any]:
        """All rows of Parquet files into a table: by `semel`, or by Spark's `jdbc`."""
        rows = self._spark.read.parquet(input)
        started = time.perf_counter()
        if way == "semel":
            import semel
            from semel.bridges.targets import Postgres

            target = Postgres(url, table=table, mode=mode, key=key or [])
            semel.write_batch(rows, name=f"bench-{time.time_ns()}", job_id="one", to=target)
        else:
            user, password, place = _JDBC_PARTS.findall(url)[0]
            options = {
                "user": user,
                "password": password,
                "dbtable": table,
                "batchsize": "10000",
                "driver": _JDBC_DRIVER,
            }
            address = f"jdbc:postgresql://{place}?reWriteBatchedInserts=true"
            rows.write.format("jdbc").options(url=address, **options).mode("append").save()
        return {"seconds": time.perf_counter() - started}

    def _topic(self, reader: Any, format: str, bootstrap: str, topic: str) -> Any:
        reader = reader.format(format).option("kafka.bootstrap.servers", bootstrap).option("subscribe", topic)
        return reader.option("startingOffsets", "earliest").load()

    def _input(self, folder: str, files_a_batch: int) -> Any:
        schema = self._spark.read.parquet(folder).schema
        return self._spark.readStream.schema(schema).option("maxFilesPerTrigger", files_a_batch).parquet(folder)


class _Pause:
    """A function of a user's that takes its time, once for each task that has rows."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            time.sleep(self._seconds)
            yield batch


def _wait(query: Any, started: float) -> dict[str, Any]:
    query.awaitTermination()
    seconds = time.perf_counter() - started
    reports = [json.loads(report.json) for report in query.recentProgress]
    batches = [report for report in reports if report["numInputRows"]]
    return {
        "seconds": seconds,
        "records": sum(report["numInputRows"] for report in batches),
        "batch_ms": [report["durationMs"]["triggerExecution"] for report in batches],
    }


def _session(jars: str) -> Any:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(f"local[{_CORES}]").appName("semel bench")
    builder = builder.config("spark.ui.enabled", "false").config("spark.ui.showConsoleProgress", "false")
    builder = builder.config("spark.log.level", "ERROR").config("spark.driver.host", "127.0.0.1")
    if jars:
        builder = builder.config("spark.jars", ",".join(str(path) for path in sorted(Path(jars).iterdir())))
    return builder.getOrCreate()


def main() -> None:
    """Serve jobs until the input ends."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    spark = _session(sys.argv[1] if len(sys.argv) > 1 else "")
    jobs = Jobs(spark)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = getattr(jobs, job.pop("job"))(**job)
        except Exception as error:  # the session is whole, and other jobs may fare better
            answer = {ERROR: f"{type(error).__name__}: {error}"}
        print(f"{ANSWER}{json.dumps(answer)}", flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
