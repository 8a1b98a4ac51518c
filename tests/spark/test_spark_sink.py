"""The sink in a real Spark on a real broker: jobs, streams, replays, mistakes, and what Spark's progress shows.

On transaction protocol 2; `test_sink_stages.py` has the stages, and `test_spark_kills.py` whole queries, on both.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.listener import StreamingQueryListener
from sink_scene import expected, fill, numbers, stream
from spark_sessions import small_spark
from topic_contents import contents, group_offsets, values

import semel
from semel.broker.process import Broker
from semel.client.admin import Admin
from semel.errors import ConfigError, UnknownTopic
from semel.spark import failpoints
from semel.spark.feeding import feeding, feeding_few, settings
from semel.spark.options import make_options
from semel.spark.owner import PipelineOwner
from semel.spark.progress import IN_SPARKS_PROGRESS, BatchProgress
from semel.spark.rows import encode_in_plan
from semel.spark.spool import SpoolReader
from semel.spark.stream import OBSERVED

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

_numbers = count()


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    session = small_spark("local[2,4]")  # a task may fail three times
    yield session
    session.stop()


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    with Broker() as broker:
        yield broker.bootstrap


@pytest.fixture
def topic(bootstrap: str) -> str:
    name = f"out-{next(_numbers)}"
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.create_topics(name, partitions=3)
    return name


def write_whole_stream(
    spark: SparkSession, bootstrap: str, topic: str, folder: Path, *, rows: DataFrame | None = None, **more: Any
) -> None:
    """A query over all that `fill` has put below `in`, as it is or as `rows` that were made of it."""
    query = semel.write_stream(
        stream(spark, folder / "in") if rows is None else rows,
        name=topic,
        bootstrap=bootstrap,
        topic=topic,
        checkpoint=str(folder / "checkpoint"),
        trigger={"availableNow": True},
        **more,
    )
    query.awaitTermination()


def test_a_job_that_is_run_twice_writes_once(spark: SparkSession, bootstrap: str, topic: str) -> None:
    """E4: the ledger knows the job's id; another id is another job."""
    first = semel.write_batch(numbers(spark, 0, 300), name=topic, job_id="1", bootstrap=bootstrap, topic=topic)
    again = semel.write_batch(numbers(spark, 0, 300), name=topic, job_id="1", bootstrap=bootstrap, topic=topic)
    other = semel.write_batch(numbers(spark, 300, 400), name=topic, job_id="2", bootstrap=bootstrap, topic=topic)
    assert (first.records, first.skipped) == (300, False)
    assert (again.records, again.skipped) == (300, True)
    assert other.records == 100
    assert values(bootstrap, topic) == expected(0, 400)


def test_rows_choose_topic_partition_and_headers(spark: SparkSession, bootstrap: str, topic: str) -> None:
    """E4: columns mean what they mean in Spark's Kafka connector."""
    rows = spark.createDataFrame(
        [(topic, 2, "k", bytearray(b"v"), [("h", bytearray(b"1"))])],
        "topic string, partition int, key string, value binary, headers array<struct<key: string, value: binary>>",
    )
    semel.write_batch(rows, name=topic, job_id="1", bootstrap=bootstrap, compression_type="zstd")
    assert [tuple(seen) for seen in contents(bootstrap, topic)] == [(2, b"k", b"v", (("h", b"1"),))]


def test_much_data_on_one_machine_goes_through_files_that_are_used_again(
    spark: SparkSession, bootstrap: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E4: each record once, from the files of three tasks; the next job writes over them, and sends only its own."""
    files: dict[Path, int] = {}
    view = SpoolReader.view

    def noted(reader: SpoolReader, path: str, at: int, size: int) -> memoryview:
        files[Path(path)] = Path(path).stat().st_ino
        return view(reader, path, at, size)

    monkeypatch.setattr(SpoolReader, "view", noted)
    kept: set[int] = set()
    for job, first, last in (("1", 0, 60_000), ("2", 60_000, 105_000)):
        files.clear()
        semel.write_batch(numbers(spark, first, last), name=topic, job_id=job, bootstrap=bootstrap, topic=topic)
        assert values(bootstrap, topic) == expected(0, last)
        assert len(files) == 3
        assert not any(file.exists() or file.parent.exists() for file in files), "the folder is the batch's own"
        if job == "2":
            assert kept >= set(files.values()), "new files were made"
        kept = {path.stat().st_ino for path in next(iter(files)).parents[1].rglob("*") if path.is_file()}


def test_a_stream_is_written_once_and_a_replay_writes_nothing(
    spark: SparkSession, bootstrap: str, topic: str, tmp_path: Path
) -> None:
    """E2: without its last entry in the commit log Spark replays a batch; the ledger knows it, and goes on after it."""
    fill(spark, tmp_path / "in", 2)
    checkpoint = tmp_path / "checkpoint"

    def run() -> list[dict[str, Any]]:
        query = semel.write_stream(
            stream(spark, tmp_path / "in"),
            name=topic,
            bootstrap=bootstrap,
            topic=topic,
            checkpoint=str(checkpoint),
            trigger={"availableNow": True},
        )
        query.awaitTermination()
        return [progress["observedMetrics"] for progress in query.recentProgress]

    assert [metrics[OBSERVED]["records"] for metrics in run()] == [40, 40]
    assert values(bootstrap, topic) == expected(0, 80)
    for name in ("1", ".1.crc"):
        (checkpoint / "commits" / name).unlink()
    fill(spark, tmp_path / "in", 1, first=2)
    assert [metrics[OBSERVED]["records"] for metrics in run()] == [0, 40]
    assert (checkpoint / "commits" / "2").exists()
    assert values(bootstrap, topic) == expected(0, 120)


class _ListExporter:
    """Keeps the spans that have ended."""

    def __init__(self, spans: list[Any]) -> None:
        self._spans = spans

    def export(self, spans: Any) -> int:
        self._spans += spans
        return 0

    def shutdown(self) -> None:
        """There is nothing to close."""


class _Listener(StreamingQueryListener):
    """Spark's own, as a user writes it."""

    def __init__(self) -> None:
        self.times: list[dict[str, int]] = []
        self.observed: list[dict[str, int]] = []

    def onQueryStarted(self, event: Any) -> None:
        """Nothing of interest."""

    def onQueryProgress(self, event: Any) -> None:
        if event.progress.numInputRows:
            self.times.append(dict(event.progress.durationMs))
            self.observed.append(event.progress.observedMetrics[OBSERVED].asDict())

    def onQueryIdle(self, event: Any) -> None:
        """Nothing of interest."""

    def onQueryTerminated(self, event: Any) -> None:
        """Nothing of interest."""


def test_a_listener_of_sparks_sees_what_each_batch_was_and_took(
    spark: SparkSession, bootstrap: str, topic: str, tmp_path: Path
) -> None:
    """E5: the same figures in Spark's own progress as in Semel's, batch by batch."""
    fill(spark, tmp_path / "in", 2)
    listener, seen = _Listener(), list[BatchProgress]()
    spark.streams.addListener(listener)
    try:
        write_whole_stream(spark, bootstrap, topic, tmp_path, on_progress=seen.append)
        cast(Any, spark.sparkContext)._jsc.sc().listenerBus().waitUntilEmpty()
    finally:
        spark.streams.removeListener(listener)
    wanted = [{name: getattr(batch, field) for name, field in IN_SPARKS_PROGRESS.items()} for batch in seen]
    if spark.version.startswith("3."):
        wanted = [{}, {}]
    assert [{name: times[name] for name in IN_SPARKS_PROGRESS if name in times} for times in listener.times] == wanted
    names = ("records", "bytes", "dead_letters")
    assert listener.observed == [{name: getattr(batch, name) for name in names} for batch in seen]
    assert len(seen) == 2
    assert all(batch.encode_ms > 0 and batch.records == 40 and batch.bytes > 200 for batch in seen)


def test_a_query_moves_here_from_another_sink_with_its_checkpoint(
    spark: SparkSession, bootstrap: str, topic: str, tmp_path: Path
) -> None:
    """C5: as docs/moving.md says. Whether the old sink has completed its last batch, only the user can know."""
    fill(spark, tmp_path / "in", 1)
    before = stream(spark, tmp_path / "in").writeStream.foreachBatch(lambda df, _: df.foreach(lambda row: None))
    checkpoint = str(tmp_path / "checkpoint")
    before.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()
    fill(spark, tmp_path / "in", 1, first=1)
    with pytest.raises(StreamingQueryException, match="another sink or another ledger= was used"):
        write_whole_stream(spark, bootstrap, topic, tmp_path)
    assert values(bootstrap, topic) == []
    write_whole_stream(spark, bootstrap, topic, tmp_path, resume="checkpoint")
    assert sorted(values(bootstrap, topic)) == expected(40, 80)
    write_whole_stream(spark, bootstrap, topic, tmp_path)
    assert sorted(values(bootstrap, topic)) == expected(40, 80)


def test_batches_are_counted_logged_and_traced(spark: SparkSession, bootstrap: str, topic: str, tmp_path: Path) -> None:
    """J3: two micro-batches and a job that is skipped the second time, each with its ids in log and span."""
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    exported, lines = [], io.StringIO()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(_ListExporter(exported)))
    fill(spark, tmp_path / "in", 2)
    semel.traces.on(provider)
    semel.logs.json(stream=lines)
    try:
        write_whole_stream(spark, bootstrap, topic, tmp_path)
        for _ in range(2):
            semel.write_batch(numbers(spark, 0, 30), name=topic, job_id="1", bootstrap=bootstrap, topic=topic)
    finally:
        semel.logs.off()
        semel.traces.off()
    page = semel.metrics.text()
    for sample in (
        f'semel_sink_transactions_total{{outcome="committed",pipeline="{topic}"}} 3.0',
        f'semel_sink_transactions_total{{outcome="skipped",pipeline="{topic}"}} 1.0',
        f'semel_sink_records_total{{pipeline="{topic}"}} 110.0',
        f'semel_sink_batch_id{{pipeline="{topic}"}} 1.0',
        f'semel_sink_preparing_seconds_count{{pipeline="{topic}"}} 3.0',
    ):
        assert sample in page
    found = [line for line in map(json.loads, lines.getvalue().splitlines()) if line["message"] == "batch committed"]
    assert [(line["pipeline"], line["batch_id"], line["job_id"]) for line in found] == [
        (topic, 0, None),
        (topic, 1, None),
        (topic, None, "1"),
    ]
    spans = [dict(span.attributes) for span in exported]
    assert [span["semel.transactional_id"] for span in spans] == [topic, topic, f"{topic}/1"]
    assert [span["semel.outcome"] for span in spans] == ["committed"] * 3
    assert [line["producer_epoch"] for line in found] == [span["semel.producer_epoch"] for span in spans]


def test_rows_of_a_micro_batch_are_not_measured_one_by_one_and_those_of_other_functions_are(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark's limit for Arrow batches is lifted for rows that Spark has computed, and comes back; a function of the
    user's own keeps it, and so does a Spark that does not show its plan."""
    setting = "spark.sql.execution.arrow.maxBytesPerBatch"
    fill(spark, tmp_path / "in", 1)
    has_limit = spark.conf.isModifiable(setting)
    limits: list[str | None] = []

    def hidden(spark: SparkSession) -> None:
        raise RuntimeError("this Spark has no such method")

    def look(df: DataFrame, batch_id: int) -> None:
        for rows in (df, df.mapInArrow(lambda batches: batches, df.schema)):
            with feeding(rows, 100.0, 1_048_576):
                limits.append(df.sparkSession.conf.get(setting) if has_limit else None)
            limits.append(df.sparkSession.conf.get(setting) if has_limit else None)
        monkeypatch.setattr("semel.spark.feeding.running_query", hidden)
        with feeding(df, 100.0, 1_048_576):
            limits.append(df.sparkSession.conf.get(setting) if has_limit else None)

    writer = stream(spark, tmp_path / "in").writeStream.foreachBatch(look).trigger(availableNow=True)
    writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start().awaitTermination()
    usual = spark.conf.get(setting) if has_limit else None
    assert limits == ["2147483647b" if has_limit else None, usual, usual, usual, usual]
    assert usual != "2147483647b"


def test_a_function_of_the_users_own_gets_its_rows_as_ever(
    spark: SparkSession, bootstrap: str, topic: str, tmp_path: Path
) -> None:
    """What the sink sets for its own rows would hold for all functions in the same tasks: of long rows there would be
    no limit any more, and of others fewer at a time."""

    def rows_at_a_time(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield pa.RecordBatch.from_pydict({"value": [str(batch.num_rows)]})

    limits = {
        "spark.sql.execution.arrow.maxBytesPerBatch": str(2**27),
        "spark.sql.execution.arrow.maxRecordsPerBatch": "400",
    }
    usual = {name: limit for name, limit in limits.items() if spark.conf.isModifiable(name)}
    fill(spark, tmp_path / "in", 2, rows=400)
    with settings(spark, usual):
        rows = stream(spark, tmp_path / "in").mapInArrow(rows_at_a_time, "value string")
        write_whole_stream(spark, bootstrap, topic, tmp_path, rows=rows)
    assert values(bootstrap, topic) == [b"400", b"400"]


def test_blobs_are_handed_over_a_few_at_a_time_or_fewer_if_the_user_wants_fewer(spark: SparkSession) -> None:
    """Where Spark has lost data, the same job computes rows of the user's own anew."""
    setting = "spark.sql.execution.arrow.maxRecordsPerBatch"
    usual = spark.conf.get(setting)
    for wanted, rows, expected_rows in (("100", 16, "16"), ("5", 16, "5"), ("0", 16, "16")):
        with settings(spark, {setting: wanted}), feeding_few(spark, rows):
            assert spark.conf.get(setting) == expected_rows
    assert spark.conf.get(setting) == usual


def test_a_query_whose_threads_java_does_not_know_is_written_too(bootstrap: str, topic: str, tmp_path: Path) -> None:
    """Then what holds for a micro-batch cannot be told to the tasks of a plan, and the sink encodes in its own job."""
    environment = {**os.environ, "PYSPARK_PIN_THREAD": "false"}
    driver = [sys.executable, str(Path(__file__).with_name("unpinned_driver.py")), bootstrap, topic, str(tmp_path)]
    done = subprocess.run(driver, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert values(bootstrap, topic) == expected(0, 40)


def test_rows_of_a_plan_that_no_sink_has_asked_for_are_refused(spark: SparkSession) -> None:
    """To leave them out would lose them, should the sink ever fail to say what it wants."""
    blobs = encode_in_plan(numbers(spark, 0, 3), {"bootstrap.servers": "127.0.0.1:1"}, "out")
    with pytest.raises(Exception, match="asked for by another than its sink"):
        blobs.collect()


def test_the_sink_feeds_each_micro_batch_by_the_length_of_the_rows_before(
    spark: SparkSession, bootstrap: str, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one has none before it; what a record may be is the user's setting."""
    fed: list[tuple[bool, int]] = []

    def noted(df: DataFrame, row_bytes: float | None, record_bytes_max: int) -> AbstractContextManager[None]:
        fed.append((row_bytes is not None and row_bytes > 1, record_bytes_max))
        return feeding(df, row_bytes, record_bytes_max)

    monkeypatch.setattr("semel.spark.once.feeding", noted)
    fill(spark, tmp_path / "in", 2)
    write_whole_stream(spark, bootstrap, topic, tmp_path, max_request_size=2_000_000)
    assert fed == [(False, 2_000_000), (True, 2_000_000)]
    assert values(bootstrap, topic) == expected(0, 80)


def test_input_offsets_from_a_kafka_source_show_as_lag(
    spark: SparkSession, bootstrap: str, topic: str, tmp_path: Path
) -> None:
    """E5: a group of the pipeline's name has the offsets, found in Spark's own offset log."""
    fill(spark, tmp_path / "in", 1)
    sink = semel.KafkaSink(name=topic, bootstrap=bootstrap, topic=topic, group=topic)
    checkpoint = tmp_path / "checkpoint"

    def call(df: DataFrame, batch_id: int) -> None:
        # As if the input had come from Kafka; no Kafka source is at hand in every Spark.
        log = checkpoint / "offsets" / str(batch_id)
        log.write_text("\n".join([*log.read_text().split("\n")[:2], f'{{"{topic}":{{"0":5,"2":7}}}}']))
        (checkpoint / "offsets" / f".{batch_id}.crc").unlink(missing_ok=True)
        sink(df, batch_id)

    query = (
        stream(spark, tmp_path / "in")
        .writeStream.foreachBatch(call)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    sink.close()
    assert group_offsets(bootstrap, topic, topic, 3) == {0: 5, 2: 7}
    assert [(progress.batch_id, progress.records) for progress in sink.recent] == [(0, 40)]


def test_a_checkpoint_that_is_older_than_the_output_is_refused(
    spark: SparkSession, bootstrap: str, topic: str, tmp_path: Path
) -> None:
    """E2: after a restore from a copy Spark may cut its input otherwise and repeat some; a new checkpoint is fine."""
    fill(spark, tmp_path / "in", 3)

    def run(checkpoint: Path, resume: Any = None) -> None:
        semel.write_stream(
            stream(spark, tmp_path / "in"),
            name=topic,
            bootstrap=bootstrap,
            topic=topic,
            checkpoint=str(checkpoint),
            trigger={"availableNow": True},
            resume=resume,
        ).awaitTermination()

    run(tmp_path / "checkpoint")
    for name in ("2", ".2.crc", "1", ".1.crc"):
        (tmp_path / "checkpoint" / "commits" / name).unlink()
    for name in ("2", ".2.crc"):
        (tmp_path / "checkpoint" / "offsets" / name).unlink()
    with pytest.raises(StreamingQueryException, match="the checkpoint is older than the output"):
        run(tmp_path / "checkpoint")
    assert values(bootstrap, topic) == expected(0, 120)
    run(tmp_path / "another checkpoint", resume="checkpoint")
    assert values(bootstrap, topic) == sorted(2 * expected(0, 120))


def test_the_older_of_two_queries_stops_and_nothing_is_repeated(
    spark: SparkSession, bootstrap: str, topic: str, tmp_path: Path
) -> None:
    """E2: a zombie driver's next batch fails with one sentence."""
    fill(spark, tmp_path / "in", 2)

    def overtaken(progress: BatchProgress) -> None:
        options = make_options(name=topic, bootstrap=bootstrap, topic=None, settings=None, more_settings={})
        PipelineOwner(options, topic).close()

    with pytest.raises(StreamingQueryException, match=f"Another run of pipeline '{topic}' has taken over"):
        write_whole_stream(spark, bootstrap, topic, tmp_path, on_progress=overtaken)
    assert values(bootstrap, topic, committed=False) == expected(0, 40)


def test_mistakes_are_found_before_the_first_batch(
    spark: SparkSession, bootstrap: str, topic: str, tmp_path: Path
) -> None:
    """E4: missing columns, wrong types, unknown topics, time-outs that the broker refuses, triggers that cannot be."""
    fill(spark, tmp_path / "in", 1)
    good = stream(spark, tmp_path / "in")
    common: dict[str, Any] = {"name": topic, "bootstrap": bootstrap, "checkpoint": str(tmp_path / "checkpoint")}
    with pytest.raises(ConfigError, match="no column `value`, only key"):
        semel.write_stream(good.select("key"), topic=topic, **common)
    with pytest.raises(ConfigError, match="No topic was given"):
        semel.write_stream(good, **common)
    with pytest.raises(ConfigError, match="`value` has the type bigint"):
        semel.write_stream(good.select(F.lit(1).cast("long").alias("value")), topic=topic, **common)
    with pytest.raises(UnknownTopic, match="not-there"):
        semel.write_stream(good, topic="not-there", **common)
    with pytest.raises(ConfigError, match=r"transaction\.max\.timeout\.ms"):
        semel.write_stream(good, topic=topic, transaction_timeout_ms=2_000_000_000, **common)
    with pytest.raises(ConfigError, match=r'trigger=\{"processingTime": "10 seconds"\}'):
        semel.write_stream(good, topic=topic, trigger=cast(Any, "10 seconds"), **common)
    with pytest.raises(ConfigError, match="resume='again' is not understood"):
        semel.write_stream(good, topic=topic, resume="again", **common)
    with pytest.raises(ConfigError, match="Real-Time Mode"):
        semel.write_stream(good, topic=topic, trigger={"realTime": "5 minutes"}, **common)
    with pytest.raises(ConfigError, match=r"Use semel\.write_batch"):
        semel.write_stream(numbers(spark, 0, 1), topic=topic, **common)
    with pytest.raises(ConfigError, match=r"transactional\.id cannot be set here"):
        semel.write_stream(good, topic=topic, transactional_id="mine", **common)
    assert not (tmp_path / "checkpoint").exists()


def test_errors_of_the_users_own_code_open_no_transaction(spark: SparkSession, bootstrap: str, topic: str) -> None:
    """E2: all of it runs in the first stage; it is not repeated, and its own error is what is seen."""
    bad = numbers(spark, 0, 10).withColumn("value", F.expr("cast(raise_error('mine') as string)"))
    with pytest.raises((PySparkException, Py4JJavaError), match="mine"):  # the latter before pyspark 4
        semel.write_batch(bad, name=topic, job_id="1", bootstrap=bootstrap, topic=topic)
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        assert admin.describe_transactions(f"{topic}/1")[f"{topic}/1"].state == "Empty"


def test_a_worker_that_dies_while_it_writes_is_followed_by_another_that_goes_on(
    spark: SparkSession, bootstrap: str, topic: str
) -> None:
    """E2: within one transaction, and without a repeat of what the dead one has written."""
    environment = cast("dict[str, str]", spark.sparkContext.environment)
    environment[failpoints.VARIABLE] = f"before_produce:6:{topic}/1"
    try:
        done = semel.write_batch(
            numbers(spark, 0, 300), name=topic, job_id="1", bootstrap=bootstrap, topic=topic, batch_size=300, writers=2
        )
    finally:
        del environment[failpoints.VARIABLE]
    assert done.attempts == 1
    assert values(bootstrap, topic) == expected(0, 300)


def test_a_sink_can_be_pickled_with_what_it_was_told_and_without_connections(bootstrap: str, topic: str) -> None:
    """E4: Spark Connect runs it in another process."""
    sink = semel.KafkaSink(name=topic, bootstrap=bootstrap, topic=topic)
    sink.check()
    copy = pickle.loads(pickle.dumps(sink))
    assert copy.options == sink.options
    sink.close()
