"""For tests of the Spark source: topics with known contents, and queries as Spark runs them, with or without Spark."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

import semel
from semel.spark.source import SemelSource
from semel.spark.source_offsets import split_note, to_checkpoint
from semel.spark.source_stream import StreamReader
from semel.testing.apache_kafka import ApacheKafka

_NUMBERS = itertools.count()
ALL = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers")

Row = dict[str, Any]


@contextmanager
def local_spark() -> Iterator[SparkSession]:
    """A small session of this interpreter's packages, without the page."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    warehouse = TemporaryDirectory(prefix="semel-warehouse-")
    builder = SparkSession.builder.master("local[2]").appName("semel-source")  # type: ignore[attr-defined]
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # Short queries pay more for compiling and for collecting in parallel than these give back.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto",
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": warehouse.name,
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    try:
        yield session
    finally:
        session.stop()
        warehouse.cleanup()


BROKERS = ["embedded", pytest.param("apache", marks=pytest.mark.conformance)]


@contextmanager
def started(kind: str) -> Iterator[World]:
    """One of `BROKERS`."""
    with semel.Broker() if kind == "embedded" else ApacheKafka() as broker:
        world = World(broker.bootstrap)
        try:
            yield world
        finally:
            world.close()


class World:
    """A broker and what a test does to it."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self.settings = {"bootstrap.servers": bootstrap}
        self.admin = semel.Admin(self.settings)

    def close(self) -> None:
        self.admin.close()

    def topic(self, partitions: int = 1, name: str | None = None, config: Mapping[str, str] | None = None) -> str:
        name = name or f"topic-{next(_NUMBERS)}"
        self.admin.create_topics(name, partitions=partitions, config=config)
        return name

    def write(self, topic: str, *values: str, partition: int = 0, **record: Any) -> None:
        """Each in a batch of its own."""
        with semel.Producer(self.settings) as producer:
            for value in values:
                producer.send(topic, value.encode(), partition=partition, **record)
                producer.flush()

    @contextmanager
    def transaction(self, topic: str, *values: str, partition: int = 0) -> Iterator[semel.Producer]:
        """An open transaction with these records; the block ends it, or it is aborted."""
        with semel.Producer(self.settings | {"transactional.id": f"id-{next(_NUMBERS)}"}) as producer:
            producer.begin()
            for value in values:
                producer.send(topic, value.encode(), partition=partition)
            producer.flush()
            yield producer

    def commit(self, topic: str, *values: str, partition: int = 0) -> None:
        with self.transaction(topic, *values, partition=partition) as producer:
            producer.commit()
        self.wait_stable(topic, partition)

    def abort(self, topic: str, *values: str, partition: int = 0) -> None:
        with self.transaction(topic, *values, partition=partition) as producer:
            producer.abort()
        self.wait_stable(topic, partition)

    def wait_stable(self, topic: str, partition: int = 0, offset: int | None = None) -> None:
        """Until markers have moved the last stable offset to the end, or to `offset`: Kafka answers before that."""
        named = semel.TopicPartition(topic, partition)
        if offset is None:
            offset = self.admin.list_offsets({named: "latest"}, "read_uncommitted")[named].offset
        deadline = time.monotonic() + 20
        while self.admin.list_offsets({named: "latest"})[named].offset < offset:
            assert time.monotonic() < deadline, f"{named} is not stable up to {offset}"
            time.sleep(0.01)

    # Queries without Spark: the same objects, called and pickled as Spark does it.

    def source(self, topic: str | None, **options: str) -> SemelSource:
        named = {name.replace("_", "."): value for name, value in options.items()}
        chosen = {} if topic is None else {"subscribe": topic}
        return SemelSource({"kafka.bootstrap.servers": self.bootstrap} | chosen | named)

    def read(self, topic: str | None, **options: str) -> list[Row]:
        """A batch query."""
        source = self.source(topic, **options)
        reader = source.reader(schema_of(source))
        tasks = reader.partitions()
        return [row for task in tasks for row in rows_of(copy_of(reader).read(copy_of(task)))]

    def stream(self, topic: str | None, **options: str) -> Query:
        """A streaming query from the earliest offset on, unless said otherwise."""
        source = self.source(topic, **{"startingOffsets": "earliest"} | options)
        reader = source.streamReader(schema_of(source))
        assert isinstance(reader, StreamReader)
        return Query(reader, copy_of(reader))


def schema_of(source: SemelSource) -> StructType:
    return source.schema()


class Query:
    """Plans and runs micro-batches one by one."""

    def __init__(self, reader: StreamReader, in_tasks: StreamReader) -> None:
        self.reader = reader
        self._in_tasks = in_tasks
        self.at: dict[str, Any] | None = None
        self.task_count = 0

    def __enter__(self) -> Query:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.stop()

    @property
    def offsets(self) -> dict[str, dict[str, int]]:
        """Where the query stands, without the source's note."""
        return to_checkpoint(split_note(self.at or {})[0])

    def start(self, at: Mapping[str, Any] | None = None) -> Query:
        """At the offsets of a checkpoint, or where a new query begins."""
        self.at = through_json(self.reader.initialOffset() if at is None else at)
        return self

    def step(self, limit: ReadLimit | None = None) -> list[Row]:
        """One micro-batch; no rows if there is nothing to do."""
        if self.at is None:
            self.start()
        before = self.at
        assert before is not None
        end = through_json(self.reader.latestOffset(before, limit or self.reader.getDefaultReadLimit()))
        self.at = end
        return self.replay(before, end)

    def replay(self, start: dict[str, Any], end: dict[str, Any]) -> list[Row]:
        """A micro-batch of a checkpoint once more."""
        tasks = self.reader.partitions(start, end)
        self.task_count = len(tasks)
        return [row for task in tasks for row in rows_of(self._in_tasks.read(copy_of(task)))]

    def values(self, limit: ReadLimit | None = None) -> list[str]:
        return values_of(self.step(limit))


def rows_of(batches: Iterator[pa.RecordBatch]) -> list[Row]:
    return [row for batch in batches for row in batch.to_pylist()]


def values_of(rows: list[Row]) -> list[str]:
    return [row["value"].decode() for row in rows]


def copy_of(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def through_json(offsets: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(offsets))
