"""The Spark sink and source beside Spark's own Kafka connector: whole queries from the same input, on one Apache Kafka.

The sink is compared in one Spark session, of the version that the connector is there for. The source needs a newer
pyspark, so there each runs on its own. All take turns, and the best turn of each counts, because the machine's other
work only ever slows one down. Then the price of a micro-batch: what one with a single record takes beyond the same
query into `noop`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from semel.bench.client import kafka_to_measure, keep_best
from semel.bench.report import Bar, Row, Section
from semel.bench.spark_worlds import CONNECTOR_VERSION, JobFailed, SparkProcess, connector_spark, installed_spark
from semel.client.admin import Admin
from semel.client.fetcher import Fetcher
from semel.client.producer import Producer
from semel.errors import ConfigError

RECORDS: Final = 4_000_000
"""Enough that queries are measured, more than their start: Spark's own work for each query and micro-batch, which all
ways share, was a third of the time of 2,000,000."""
ROUNDS: Final = 16
"""The JVM still gets faster in the tenth of them, for all ways alike."""
SINGLES: Final = 50
SINGLES_TO_WARM_UP: Final = 10
MICRO_BATCHES: Final = 2
FILES_A_BATCH: Final = 4
TUNED: Final = {"batch.size": "1048576", "linger.ms": "50"}
COLUMNS: Final = ("Semel", "Spark's own", "Spark's, tuned", "times Spark's", "times tuned")
PAUSE_S: Final = 1.0
_ERROR_CHARACTERS: Final = 600
SINK_BAR: Final = 1.6
TUNED_BAR: Final = 1.1
SOURCE_BAR: Final = 1.5
OPEN_BAR: Final = 0.2


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of records into one kind of topic. `share` of the records, for what takes long."""

    name: str
    value_bytes: int = 100
    partitions: int = 4
    has_keys: bool = False
    compression: str | None = None
    share: float = 1.0


MAIN: Final = Case("sink, values of 100 B")
MORE: Final = (
    Case("sink, half as many records", share=0.5),
    Case("sink, values of 1 kB", value_bytes=1000, share=0.1),
    Case("sink, zstd", compression="zstd", share=0.5),
    Case("sink, keys, 1 partition", partitions=1, has_keys=True, share=0.5),
    Case("sink, keys, 4 partitions", partitions=4, has_keys=True, share=0.5),
    Case("sink, keys, 64 partitions", partitions=64, has_keys=True, share=0.25),
    Case("sink, keys, 256 partitions", partitions=256, has_keys=True, share=0.25),
)


def run(records: int = RECORDS, rounds: int = ROUNDS, singles: int = SINGLES, quick: bool = False) -> Section:
    """The section `spark` of `semel bench`; `quick` leaves out all but what has a bar."""
    if records < MICRO_BATCHES * FILES_A_BATCH or rounds < 1 or singles < 1:
        raise ConfigError(f"semel bench spark needs {MICRO_BATCHES * FILES_A_BATCH} records, and one of everything.")
    with _world() as world:
        sinks = {case.name: world.sink(case, records, rounds) for case in ((MAIN,) if quick else (MAIN, *MORE))}
        sources = world.source(records, rounds)
        price = world.price(singles)
        versions = world.versions()
    rows = [compared(name, turns.best, int(records * share(name))) for name, turns in sinks.items()]
    rows += [compared(name, best, records) for name, best in sources.items()]
    rows.append(price.row())
    return Section(
        name="spark",
        timed=(
            f"records a second of whole queries, {records:,} records (fewer with keys, zstd or long values) on 4 "
            f"partitions unless a row says otherwise, best of {rounds} turns; the last row in ms"
        ),
        columns=COLUMNS,
        rows=tuple(rows),
        bars=(
            Bar("sink, exactly-once, against Spark's at-least-once with its defaults", SINK_BAR, rows[0].figures[3]),
            Bar("sink, exactly-once, against Spark's at-least-once tuned", TUNED_BAR, rows[0].figures[4]),
            *(Bar(f"{row.case} against Spark's", SOURCE_BAR, row.figures[3]) for row in rows if row.case in sources),
            Bar(
                "transaction open, as a share of a batch with a second of the user's own",
                OPEN_BAR,
                price.open_share,
                at_most=True,
            ),
        ),
        notes=(
            f"{versions.broker}, same machine. Sink: both on pyspark {versions.connector}. Source: Semel's on pyspark "
            f"{versions.installed}, Spark's on {versions.connector}, the only one that its connector is there for.",
            f"Input of the sinks: Parquet, {MICRO_BATCHES} micro-batches. Tuned: {_named(TUNED)}.",
            *price.notes(),
            *(f"{name}: {failure}" for name, turns in sinks.items() for failure in turns.failures),
        ),
    )


def share(case_name: str) -> float:
    """Which part of the records a case takes."""
    return next(case.share for case in (MAIN, *MORE) if case.name == case_name)


def compared(case: str, best: Mapping[str, float], records: int) -> Row:
    """A row of rates and ratios from the best seconds of each way.

    >>> compared("sink", {"semel": 2.0, "spark": 4.0}, 100).figures
    (50.0, 25.0, None, 2.0, None)
    """
    rates = [records / best[way] if way in best else None for way in ("semel", "spark", "tuned")]
    ratios = [best[way] / best["semel"] if way in best else None for way in ("spark", "tuned")]
    return Row(case, (*rates, *ratios))


@dataclass(frozen=True, slots=True)
class Turns:
    """The best seconds of each way, and what is to be said about those that failed."""

    best: dict[str, float] = field(default_factory=dict[str, float])
    failures: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True)
class Price:
    """What micro-batches of one record took in ms: each into `noop`, Spark's sink and Semel's; and Semel's parts."""

    noop_ms: Sequence[float]
    spark_ms: Sequence[float]
    semel_ms: Sequence[float]
    parts: Sequence[Mapping[str, Any]]
    paused_ms: Sequence[float]
    paused_parts: Sequence[Mapping[str, Any]]

    def row(self) -> Row:
        semel = median(self.semel_ms) - median(self.noop_ms)
        spark = median(self.spark_ms) - median(self.noop_ms)
        # No ratio: Spark's own sink often takes no longer than `noop`, and a ratio to nothing says nothing.
        return Row("price of a micro-batch of one record, ms", (semel, spark, None, None, None))

    @property
    def open_share(self) -> float:
        """The largest part of a batch with slow user code during which a transaction was open."""
        return max(part["open_ms"] / took for part, took in zip(self.paused_parts, self.paused_ms, strict=True))

    def notes(self) -> tuple[str, ...]:
        parts = ", ".join(f"{name} {median(part[f'{name}_ms'] for part in self.parts):.0f}" for name in PARTS)
        return (
            f"Price: medians over {len(self.semel_ms)} of {median(self.semel_ms):.0f} ms with Semel, "
            f"{median(self.spark_ms):.0f} with Spark's sink, {median(self.noop_ms):.0f} into noop. "
            f"Semel's parts in ms: {parts}.",
        )


PARTS: Final = ("encode", "write", "commit", "open")


@dataclass(frozen=True, slots=True)
class Versions:
    """What was measured."""

    broker: str
    installed: str
    connector: str = CONNECTOR_VERSION


@dataclass(frozen=True, slots=True)
class World:
    """Kafka, both Sparks and a folder."""

    bootstrap: str
    broker: str
    installed: SparkProcess
    connector: SparkProcess
    folder: Path
    _numbers: Iterator[int]

    def versions(self) -> Versions:
        return Versions(self.broker, self.installed.run("version")["pyspark"])

    def sink(self, case: Case, records: int, rounds: int) -> Turns:
        """All ways in turn. Where Spark's own sink fails, the others go on without it; Semel's must not fail."""
        records = int(records * case.share)
        files = self._path("input")
        write_input(files, records, MICRO_BATCHES * FILES_A_BATCH, case.value_bytes, case.has_keys)
        compression = {} if case.compression is None else {"compression.type": case.compression}
        ways = {
            "semel": ("semel", compression),
            "spark": ("kafka", compression),
            "tuned": ("kafka", TUNED | compression),
        }
        turns = Turns()
        for number in range(1, rounds + 1):
            for name, (way, options) in list(ways.items()):
                topic = self._topic(case.partitions)
                try:
                    done = self._query(way, files, FILES_A_BATCH, topic=topic, options=options)
                except JobFailed as error:
                    if name == "semel":
                        raise
                    del ways[name]
                    turns.failures.append(f"Spark's own sink ({name}) failed in turn {number}. {first_words(error)}")
                else:
                    _check(done["records"], records, f"{way} read")
                    _check(self._written(topic, done["parts"], case.partitions), records, f"{way} wrote")
                    keep_best(turns.best, name, done["seconds"])
                self._delete(topic)
        return turns

    def source(self, records: int, rounds: int) -> dict[str, dict[str, float]]:
        """The best seconds of batch and stream, from one topic."""
        topic = self._topic(MAIN.partitions)
        fill_topic(self.bootstrap, topic, records)
        ways = (("semel", self.installed, "semel"), ("spark", self.connector, "kafka"))
        where = {"bootstrap": self.bootstrap, "topic": topic}
        best: dict[str, dict[str, float]] = {"source, batch": {}, "source, stream": {}}
        for _, spark, kind in ways:
            _check(spark.run("count", format=kind, **where)["records"], records, f"{kind} read")
        for _ in range(rounds):
            for name, spark, kind in ways:
                keep_best(best["source, batch"], name, spark.run("source", format=kind, **where)["seconds"])
            for name, spark, kind in ways:
                done = spark.run("source", format=kind, checkpoint=str(self._path("checkpoint")), **where)
                _check(done["records"], records, f"{kind} streamed")
                keep_best(best["source, stream"], name, done["seconds"])
        return best

    def price(self, singles: int) -> Price:
        """Micro-batches of one record each, the first few of which only warm up."""
        files = self._path("singles")
        write_input(files, singles + SINGLES_TO_WARM_UP, singles + SINGLES_TO_WARM_UP, MAIN.value_bytes, False)
        took: dict[str, dict[str, Any]] = {
            way: self._query(way, files, 1, topic=self._topic(MAIN.partitions)) for way in ("noop", "kafka", "semel")
        }
        slow = self._path("slow")
        write_input(slow, 3, 3, MAIN.value_bytes, False)
        paused = self._query("semel", slow, 1, topic=self._topic(MAIN.partitions), pause_s=PAUSE_S)
        noop, spark, semel = (took[way]["batch_ms"][SINGLES_TO_WARM_UP:] for way in ("noop", "kafka", "semel"))
        parts = took["semel"]["parts"][SINGLES_TO_WARM_UP:]
        return Price(noop, spark, semel, parts, paused["batch_ms"], paused["parts"])

    def _query(self, way: str, files: Path, files_a_batch: int, **more: Any) -> dict[str, Any]:
        return self.connector.run(
            "sink",
            way=way,
            input=str(files),
            files_a_batch=files_a_batch,
            checkpoint=str(self._path("checkpoint")),
            bootstrap=self.bootstrap,
            **more,
        )

    def _written(self, topic: str, parts: Sequence[Mapping[str, Any]], partitions: int) -> int:
        """How many records a sink has put into a topic: its length, less a marker for each partition of each batch."""
        with Fetcher({"bootstrap.servers": self.bootstrap}) as fetcher:
            fetcher.assign({(topic, partition): 0 for partition in range(partitions)})
            length = sum(fetcher.end_offsets().values())
        return length - sum(part["partitions"] for part in parts)

    def _topic(self, partitions: int) -> str:
        topic = f"bench-spark-{next(self._numbers)}-{os.urandom(4).hex()}"
        with Admin({"bootstrap.servers": self.bootstrap}) as admin:
            admin.create_topics(topic, partitions=partitions)
        return topic

    def _delete(self, topic: str) -> None:
        """A turn must not pay for the disk that the one before has left to be written."""
        with Admin({"bootstrap.servers": self.bootstrap}) as admin:
            admin.delete_topics(topic)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}-{next(self._numbers)}"


@contextmanager
def _world() -> Iterator[World]:
    with ExitStack() as stack:
        bootstrap, broker = stack.enter_context(kafka_to_measure())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="semel-bench-"))
        connector = stack.enter_context(connector_spark())
        yield World(bootstrap, broker, stack.enter_context(installed_spark()), connector, Path(folder), count())


def write_input(folder: Path, records: int, files: int, value_bytes: int, has_keys: bool) -> None:
    """Parquet files of about the same length, of values that do not repeat."""
    folder.mkdir()
    for number in range(files):
        rows = records * (number + 1) // files - records * number // files
        table = random_table(rows, value_bytes, has_keys)
        pq.write_table(table, folder / f"{number:05}.parquet", compression="none", use_dictionary=False)


def random_table(rows: int, value_bytes: int, has_keys: bool = False) -> pa.Table:
    """Hexadecimal digits, which compress to a half, and keys of eight bytes."""
    table = pa.table({"value": _pieces(rows, value_bytes)})
    return table.append_column("key", _pieces(rows, 8)) if has_keys else table


def _pieces(rows: int, size: int) -> pa.Array:
    data = os.urandom(rows * size // 2 + 1).hex().encode()
    edges = pa.array(range(0, rows * size + 1, size), pa.int32())
    return pa.Array.from_buffers(pa.binary(), rows, [None, edges.buffers()[1], pa.py_buffer(data)])


def fill_topic(bootstrap: str, topic: str, records: int) -> None:
    """Values of the usual size, as many in each partition."""
    with Producer(bootstrap_servers=bootstrap) as producer:
        for partition in range(MAIN.partitions):
            rows = records * (partition + 1) // MAIN.partitions - records * partition // MAIN.partitions
            producer.send_table(topic, random_table(rows, MAIN.value_bytes), partition=partition)
        producer.flush()


def first_words(error: JobFailed) -> str:
    """What a long error of Spark's begins with, on one line.

    >>> first_words(JobFailed("Job aborted.\\n\\tat org.apache.spark" + 300 * "."))[:35]
    'Job aborted. at org.apache.spark...'
    """
    return " ".join(str(error).split())[:_ERROR_CHARACTERS]


def _check(records: int, expected: int, what: str) -> None:
    if records != expected:
        raise AssertionError(f"{what} {records:,} records of {expected:,}")


def _named(options: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())
