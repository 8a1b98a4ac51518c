"""The sink as users use it: several outputs, shared objects, names and checkpoints that change, missing rights."""
# confluent-kafka hands its names on without saying so to type checkers.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from acl_rules import allow
from confluent_kafka import Consumer
from confluent_kafka.admin import AclOperation
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from sink_scene import expected, fill, forget_commit, numbers, stream
from spark_sessions import small_spark
from topic_contents import group_offsets, values

import semel
from semel.spark.input_offsets import read_input
from semel.spark.ledger import Entry, Ledger
from semel.spark.options import make_options
from semel.spark.owner import JOBS_KEPT_DAYS, PipelineOwner
from semel.spark.replays import Question

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

_numbers = count()
EVEN = sorted(b"%d" % number for number in range(0, 80, 2))
ODD = sorted(b"%d" % number for number in range(1, 80, 2))


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    session = small_spark()
    yield session
    session.stop()


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    with semel.Broker() as broker:
        yield broker.bootstrap


@pytest.fixture
def name(bootstrap: str) -> str:
    """A pipeline's name, with topics NAME, NAME-even and NAME-odd."""
    name = f"pipeline-{next(_numbers)}"
    create(bootstrap, name, f"{name}-even", f"{name}-odd")
    return name


def create(bootstrap: str, *topics: str, partitions: int = 2) -> None:
    with semel.Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.create_topics(*topics, partitions=partitions)


def evens(df: DataFrame) -> DataFrame:
    return df.where("cast(cast(value as string) as long) % 2 = 0")


def odds(df: DataFrame) -> DataFrame:
    return df.where("cast(cast(value as string) as long) % 2 = 1")


def run(rows: DataFrame, each: Callable[[DataFrame, int], None], checkpoint: Path) -> None:
    query = rows.writeStream.foreachBatch(each).option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    query.start().awaitTermination()


def copy(rows: DataFrame, name: str, bootstrap: str, checkpoint: Path, **more: Any) -> None:
    """A query into the topic of the pipeline's name, unless another is given."""
    settings = {"name": name, "topic": name, **more}
    query = semel.write_stream(
        rows, bootstrap=bootstrap, checkpoint=str(checkpoint), trigger={"availableNow": True}, **settings
    )
    query.awaitTermination()


# -- several outputs ---------------------------------------------------------------------------------------------------


def test_two_outputs_of_one_batch_are_one_transaction(
    spark: SparkSession, bootstrap: str, name: str, tmp_path: Path
) -> None:
    """E7: both topics have their records once, also when the last batch is replayed with one more output."""
    fill(spark, tmp_path / "in", 2)
    outputs = {f"{name}-even": evens, f"{name}-odd": odds}

    def start() -> semel.KafkaSink:
        sink = semel.KafkaSink(name=name, bootstrap=bootstrap)

        def each(df: DataFrame, batch_id: int) -> None:
            with sink.batch(batch_id) as batch:
                for topic, part in outputs.items():
                    batch.write(part(df), topic=topic)

        run(stream(spark, tmp_path / "in"), each, tmp_path / "checkpoint")
        return sink

    assert [(done.records, done.attempts) for done in start().recent] == [(40, 1), (40, 1)]
    assert (values(bootstrap, f"{name}-even"), values(bootstrap, f"{name}-odd")) == (EVEN, ODD)
    forget_commit(tmp_path / "checkpoint")
    assert [done.skipped for done in start().recent] == [True]
    forget_commit(tmp_path / "checkpoint")
    outputs[name] = lambda df: df
    assert [done.records for done in start().recent] == [40], "the entry does not name this output, so it is written"
    assert (values(bootstrap, f"{name}-even"), values(bootstrap, f"{name}-odd")) == (EVEN, ODD)
    assert values(bootstrap, name) == expected(40, 80)


@pytest.mark.parametrize("sinks", [1, 2])
def test_a_second_call_for_the_same_batch_is_refused_in_every_run(
    spark: SparkSession, bootstrap: str, name: str, tmp_path: Path, sinks: int
) -> None:
    """E7, K3: with one sink, or with two of one name, the second write was silently dropped."""
    fill(spark, tmp_path / "in", 1)
    for _ in range(2):
        made = [semel.KafkaSink(name=name, bootstrap=bootstrap, topic=name) for _ in range(sinks)]

        def each(df: DataFrame, batch_id: int, made: list[semel.KafkaSink] = made) -> None:
            made[0](evens(df), batch_id)
            made[-1](odds(df), batch_id)

        with pytest.raises(StreamingQueryException, match=r"has written batch 0 already.*with sink\.batch"):
            run(stream(spark, tmp_path / "in"), each, tmp_path / "checkpoint")
        assert values(bootstrap, name) == [value for value in EVEN if int(value) < 40]


def test_several_outputs_of_a_job_are_one_transaction_and_another_dataframe_is_not_dropped(
    spark: SparkSession, bootstrap: str, name: str
) -> None:
    """E7, K3: a mapping writes all of a job. A second DataFrame for a topic that was written is refused."""
    rows = numbers(spark, 0, 80)
    job: dict[str, Any] = {"name": name, "job_id": "1", "bootstrap": bootstrap}
    done = semel.write_batch({f"{name}-even": evens(rows), f"{name}-odd": odds(rows)}, **job)
    assert (done.records, done.skipped) == (80, False)
    with pytest.raises(semel.InvalidState, match="from another DataFrame in this program"):
        semel.write_batch(odds(rows), topic=f"{name}-even", **job)
    assert semel.write_batch(evens(rows), topic=f"{name}-even", **job).skipped
    assert semel.write_batch(rows, topic=name, **job).records == 80
    assert (values(bootstrap, f"{name}-even"), values(bootstrap, f"{name}-odd")) == (EVEN, ODD)
    assert values(bootstrap, name) == expected(0, 80)


# -- shared objects ----------------------------------------------------------------------------------------------------


def test_one_sink_in_two_queries_is_refused_and_the_first_goes_on(
    spark: SparkSession, bootstrap: str, name: str, tmp_path: Path
) -> None:
    """K3: it lost and repeated records."""
    fill(spark, tmp_path / "in", 2)
    sink = semel.KafkaSink(name=name, bootstrap=bootstrap, topic=name)
    run(stream(spark, tmp_path / "in"), sink, tmp_path / "first")
    with pytest.raises(StreamingQueryException, match="serves another query already"):
        run(stream(spark, tmp_path / "in"), sink, tmp_path / "second")
    fill(spark, tmp_path / "in", 1, first=2)
    run(stream(spark, tmp_path / "in"), sink, tmp_path / "first")
    assert values(bootstrap, name) == expected(0, 120)


def test_threads_that_share_a_sink_are_refused(spark: SparkSession, bootstrap: str, name: str, tmp_path: Path) -> None:
    """K3: two calls at once, as from a thread pool inside foreachBatch; outputs of one block may come from threads."""
    fill(spark, tmp_path / "in", 2)
    sink = semel.KafkaSink(name=name, bootstrap=bootstrap, topic=name)
    refused: list[str] = []

    def each(df: DataFrame, batch_id: int) -> None:
        with sink.batch(batch_id) as batch, ThreadPoolExecutor(2) as pool:
            with pytest.raises(semel.InvalidState) as caught:
                pool.submit(sink, df, batch_id).result()
            refused.append(str(caught.value))
            for done in [pool.submit(batch.write, evens(df)), pool.submit(batch.write, odds(df))]:
                done.result()

    run(stream(spark, tmp_path / "in"), each, tmp_path / "checkpoint")
    assert len(refused) == 2
    assert all("is writing a batch already" in text for text in refused)
    assert values(bootstrap, name) == expected(0, 80)


# -- names, ledgers and checkpoints ------------------------------------------------------------------------------------


def test_another_checkpoint_under_the_same_name_does_not_make_the_first_one_repeat(
    spark: SparkSession, bootstrap: str, name: str, tmp_path: Path
) -> None:
    """E8: checkpoint A, one run with B, A again. B is refused unless the user asks for it, and A repeats nothing."""
    fill(spark, tmp_path / "in", 2)
    rows = stream(spark, tmp_path / "in")
    copy(rows, name, bootstrap, tmp_path / "a")
    with pytest.raises(StreamingQueryException, match=r"has run before with another checkpoint.*committed_offsets"):
        copy(rows, name, bootstrap, tmp_path / "b")
    assert values(bootstrap, name) == expected(0, 80)
    copy(rows, name, bootstrap, tmp_path / "b", topic=f"{name}-odd", resume="checkpoint")
    forget_commit(tmp_path / "a")
    copy(rows, name, bootstrap, tmp_path / "a")
    assert values(bootstrap, name) == expected(0, 80)
    assert values(bootstrap, f"{name}-odd") == expected(0, 80)


def test_a_renamed_pipeline_repeats_nothing_and_another_ledger_is_refused(
    spark: SparkSession, bootstrap: str, name: str, tmp_path: Path
) -> None:
    """E8: both between the commit in Kafka and Spark's own, where the batch was written twice."""
    fill(spark, tmp_path / "in", 2)
    rows = stream(spark, tmp_path / "in")
    copy(rows, name, bootstrap, tmp_path / "checkpoint")
    forget_commit(tmp_path / "checkpoint")
    copy(rows, f"{name}-renamed", bootstrap, tmp_path / "checkpoint", topic=name)
    assert values(bootstrap, name) == expected(0, 80)
    forget_commit(tmp_path / "checkpoint")
    with pytest.raises(StreamingQueryException, match="This checkpoint belongs to another ledger"):
        copy(rows, f"{name}-renamed", bootstrap, tmp_path / "checkpoint", topic=name, ledger=f"ledger-of-{name}")
    assert values(bootstrap, name) == expected(0, 80)


def test_a_pipeline_that_moves_from_another_sink_is_asked_about_its_last_batch(
    spark: SparkSession, bootstrap: str, name: str, tmp_path: Path
) -> None:
    """E8, C5: the ledger knows nothing of batch 1, which the other sink may have written."""
    fill(spark, tmp_path / "in", 1)
    run(stream(spark, tmp_path / "in"), lambda df, batch_id: None, tmp_path / "checkpoint")
    fill(spark, tmp_path / "in", 1, first=1)
    with pytest.raises(StreamingQueryException, match="the ledger knows this query up to batch -1 only"):
        copy(stream(spark, tmp_path / "in"), name, bootstrap, tmp_path / "checkpoint")
    copy(stream(spark, tmp_path / "in"), name, bootstrap, tmp_path / "checkpoint", resume="checkpoint")
    assert values(bootstrap, name) == expected(40, 80)


def test_a_lost_checkpoint_is_refused_and_the_pipeline_can_go_on_where_it_was(
    spark: SparkSession, bootstrap: str, name: str, tmp_path: Path
) -> None:
    """E8: default options would repeat or skip. The ledger has the ends of the input, and checks the new start."""
    pytest.importorskip("pyspark.sql.streaming.datasource", reason="the source needs pyspark 4.2")
    produce(bootstrap, f"{name}-even", range(50))

    def source(start: str) -> DataFrame:
        read = spark.readStream.format("semel").option("kafka.bootstrap.servers", bootstrap)
        return read.option("subscribe", f"{name}-even").option("startingOffsets", start).load()

    def committed() -> str:
        return semel.committed_offsets(name=name, bootstrap=bootstrap)

    copy(source("earliest"), name, bootstrap, tmp_path / "checkpoint")
    produce(bootstrap, f"{name}-even", range(50, 80))
    shutil.rmtree(tmp_path / "checkpoint")
    for start in ("earliest", "latest"):
        with pytest.raises(StreamingQueryException, match="has run before with another checkpoint"):
            copy(source(start), name, bootstrap, tmp_path / start)
    with pytest.raises(StreamingQueryException, match="records would be lost or repeated"):
        copy(source("earliest"), name, bootstrap, tmp_path / "wrong", resume="committed")
    counts = source(committed()).groupBy("key").count().selectExpr("cast(count as string) value")
    with pytest.raises(StreamingQueryException, match="is for queries without state"):
        copy(counts, name, bootstrap, tmp_path / "stateful", resume="committed", output_mode="update")
    copy(source(committed()), name, bootstrap, tmp_path / "new", resume="committed")
    assert values(bootstrap, name) == expected(0, 80)
    produce(bootstrap, f"{name}-even", range(80, 90))
    forget_commit(tmp_path / "new")
    copy(source(committed()), name, bootstrap, tmp_path / "new", resume="committed")
    assert values(bootstrap, name) == expected(0, 90)
    assert sum(sum(by.values()) for by in json.loads(committed()).values()) == 90


def produce(bootstrap: str, topic: str, numbers: range) -> None:
    with semel.Producer(bootstrap_servers=bootstrap) as producer:
        for number in numbers:
            producer.send(topic, b"%d" % number, partition=number % 2)


# -- starting ----------------------------------------------------------------------------------------------------------


def test_a_start_that_spark_refuses_does_not_stop_the_running_query(
    spark: SparkSession, bootstrap: str, name: str, tmp_path: Path
) -> None:
    """K3: a query that analysis rejects, a cell that is run twice, and a query with another checkpoint."""
    fill(spark, tmp_path / "in", 1)
    rows = stream(spark, tmp_path / "in")
    common: dict[str, Any] = {"name": name, "topic": name, "bootstrap": bootstrap}
    running = semel.write_stream(rows, checkpoint=str(tmp_path / "checkpoint"), **common)
    try:
        running.processAllAvailable()
        counts = rows.groupBy("key").count().selectExpr("key", "cast(count as string) value")
        with pytest.raises(AnalysisException):  # an aggregation needs a watermark to append
            semel.write_stream(counts, checkpoint=str(tmp_path / "other"), **common)
        with pytest.raises(Exception, match=r"(?i)already active|same name|concurrent"):
            semel.write_stream(rows, checkpoint=str(tmp_path / "checkpoint"), **common)
        with pytest.raises(StreamingQueryException, match="has run before with another checkpoint"):
            run(rows, semel.KafkaSink(**common), tmp_path / "another")
        fill(spark, tmp_path / "in", 1, first=1)
        running.processAllAvailable()
        assert running.isActive
    finally:
        running.stop()
    assert values(bootstrap, name) == expected(0, 80)


def test_a_query_without_a_checkpoint_is_warned_of(
    spark: SparkSession, bootstrap: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """K3: Spark makes a temporary one, which no restart finds."""
    fill(spark, tmp_path / "in", 1)
    sink = semel.KafkaSink(name=name, bootstrap=bootstrap, topic=name)
    with caplog.at_level(logging.WARNING, "semel.spark"):
        rows = stream(spark, tmp_path / "in")
        rows.writeStream.foreachBatch(sink).trigger(availableNow=True).start().awaitTermination()
    assert "no checkpointLocation" in caplog.text
    assert values(bootstrap, name) == expected(0, 40)


# -- lag is only a convenience -----------------------------------------------------------------------------------------


def kafka_like(spark: SparkSession, folder: Path, ends: dict[str, dict[str, int]], sink: Any) -> None:
    """A batch whose offset log says that its input came from Kafka, on any version of Spark."""
    fill(spark, folder / "in", 1)

    def each(df: DataFrame, batch_id: int) -> None:
        log = folder / "checkpoint" / "offsets" / str(batch_id)
        log.write_text("\n".join([*log.read_text().split("\n")[:2], json.dumps(ends)]))
        (folder / "checkpoint" / "offsets" / f".{batch_id}.crc").unlink(missing_ok=True)
        sink(df, batch_id)

    run(stream(spark, folder / "in"), each, folder / "checkpoint")


def note(cluster: str) -> str:
    return "semel:" + json.dumps({"cluster": cluster, "start": {}, "topic_ids": {}})


def test_offsets_of_another_cluster_are_not_committed_for_a_topic_of_the_same_name(
    spark: SparkSession, bootstrap: str, name: str, tmp_path: Path
) -> None:
    """E8: cluster ids are compared, and a partition that this cluster does not have is left out."""
    with semel.Admin({"bootstrap.servers": bootstrap}) as admin:
        here = admin.describe_cluster().cluster_id
    sink = semel.KafkaSink(name=name, bootstrap=bootstrap, topic=name)
    kafka_like(spark, tmp_path / "far", {f"{name}-even": {"0": 5, "99": 5}, note("elsewhere"): {}}, sink)
    assert group_offsets(bootstrap, name, f"{name}-even", 2) == {}
    near = semel.KafkaSink(name=f"{name}-near", bootstrap=bootstrap, topic=name)
    started = time.monotonic()
    kafka_like(spark, tmp_path / "near", {f"{name}-even": {"0": 5, "99": 5}, note(here): {}}, near)
    assert group_offsets(bootstrap, f"{name}-near", f"{name}-even", 2) == {0: 5}
    assert time.monotonic() - started < 60, "a missing partition held the transaction open until the API's timeout"
    assert values(bootstrap, name) == sorted(2 * expected(0, 40))


def test_missing_rights_on_the_input_do_not_stop_the_pipeline(
    spark: SparkSession, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """E5: lag is a convenience. A group that was asked for is an error that names the right; group=None needs none."""
    config = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
    }
    with semel.Broker(config=config) as broker:
        create(broker.bootstrap, name, "closed")
        allow(broker.bootstrap, "User:somebody", AclOperation.READ)
        allow(broker.bootstrap, "User:ANONYMOUS", AclOperation.DESCRIBE)
        with semel.Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            ends = {"closed": {"0": 5}, note(admin.describe_cluster().cluster_id): {}}
        common: dict[str, Any] = {"bootstrap": broker.bootstrap, "topic": name}
        with caplog.at_level(logging.WARNING, "semel.spark"):
            kafka_like(spark, tmp_path / "default", ends, semel.KafkaSink(name=name, **common))
        assert caplog.text.count("lag is not visible") == 1
        asked = semel.KafkaSink(name=f"{name}-asked", group="shown", **common)
        with pytest.raises(StreamingQueryException, match=r"no READ right on the input topics.*group=None"):
            kafka_like(spark, tmp_path / "asked", ends, asked)
        kafka_like(spark, tmp_path / "silent", ends, semel.KafkaSink(name=f"{name}-silent", group=None, **common))
        assert caplog.text.count("lag is not visible") == 1
        assert values(broker.bootstrap, name) == sorted(2 * expected(0, 40))


def test_a_group_of_consumers_with_the_pipelines_name_does_not_stop_it(
    spark: SparkSession, bootstrap: str, name: str, tmp_path: Path
) -> None:
    """E5: a KIP-848 group with a member."""
    with semel.Admin({"bootstrap.servers": bootstrap}) as admin:
        here = admin.describe_cluster().cluster_id
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": name, "group.protocol": "consumer"})
    consumer.subscribe([f"{name}-odd"])
    deadline = time.monotonic() + 60
    while not consumer.assignment():
        assert time.monotonic() < deadline
        consumer.poll(0.1)
    try:
        sink = semel.KafkaSink(name=name, bootstrap=bootstrap, topic=name)
        kafka_like(spark, tmp_path, {f"{name}-even": {"0": 5}, note(here): {}}, sink)
    finally:
        consumer.close()
    assert values(bootstrap, name) == expected(0, 40)


# -- the ledger --------------------------------------------------------------------------------------------------------


def test_the_ledger_forgets_jobs_after_the_stated_age(bootstrap: str, name: str) -> None:
    """Job ids would grow for ever; those of this pipeline go, with the next job beside them."""
    options = make_options(name=name, bootstrap=bootstrap, topic=None, settings=None, more_settings={}, group=None)
    oldest_ms = int(time.time() * 1000) - JOBS_KEPT_DAYS * 24 * 3600 * 1000
    last = PipelineOwner(options, f"{name}/last")
    ledger = Ledger(last.cluster, options.ledger)
    beside = [key for job in range(1_000) if ledger.place(key := f"{name}/{job}") == ledger.place(f"{name}/last")]
    old, young = beside[:2]
    for key, at_ms in ((old, oldest_ms - 1), (young, oldest_ms + 60_000)):
        owner = PipelineOwner(options, key)
        owner.begin()
        owner.settle([], Entry(pipeline=name, at_ms=at_ms), {})
        owner.close()
    last.begin()
    last.settle([], Entry(pipeline=name, at_ms=int(time.time() * 1000)), {})
    assert [ledger.read(key) is None for key in (old, young, f"{name}/last")] == [True, False, False]
    last.close()


def test_two_sinks_of_different_names_in_one_query_are_refused(
    spark: SparkSession, bootstrap: str, name: str, tmp_path: Path
) -> None:
    """The second one's rows were taken for a replay of the first one's, and dropped in every batch."""
    fill(spark, tmp_path / "input", 1, rows=80)
    sinks = [semel.KafkaSink(name=f"{name}-{kind}", bootstrap=bootstrap, topic=name) for kind in ("even", "odd")]

    def each(df: DataFrame, batch_id: int) -> None:
        sinks[0](evens(df), batch_id)
        sinks[1](odds(df), batch_id)

    with pytest.raises(StreamingQueryException, match="writes for this query already"):
        run(stream(spark, tmp_path / "input"), each, tmp_path / "checkpoint")

    def both(df: DataFrame, batch_id: int) -> None:
        with sinks[0].batch(batch_id) as batch:
            batch.write(evens(df))
            batch.write(odds(df))

    run(stream(spark, tmp_path / "input"), both, tmp_path / "checkpoint")
    assert sorted(values(bootstrap, name)) == sorted([*EVEN, *ODD])


def test_a_pipeline_that_gets_its_old_name_back_repeats_nothing(
    spark: SparkSession, bootstrap: str, name: str, tmp_path: Path
) -> None:
    """The record of the old name is older than that of the query, and must not decide."""
    source, checkpoint = tmp_path / "input", tmp_path / "checkpoint"
    for number, chosen in enumerate([name, f"{name}-renamed"]):
        fill(spark, source, 1, first=number)
        copy(stream(spark, source), chosen, bootstrap, checkpoint, topic=name)
    forget_commit(checkpoint)
    copy(stream(spark, source), name, bootstrap, checkpoint)
    assert sorted(values(bootstrap, name)) == expected(0, 80)


def test_a_renamed_pipeline_stops_the_run_under_its_old_name(
    spark: SparkSession, bootstrap: str, name: str, tmp_path: Path
) -> None:
    """Two names have two transactional ids, which do not fence each other by themselves."""
    fill(spark, tmp_path / "input", 2)
    sink = semel.KafkaSink(name=name, bootstrap=bootstrap, topic=name)
    renamed = semel.KafkaSink(name=f"{name}-renamed", bootstrap=bootstrap, topic=name)

    def each(df: DataFrame, batch_id: int) -> None:
        if batch_id == 1:
            renamed._pipeline.take_over(Question(renamed.options.name, batch_id, read_input(df, batch_id, None)))
        sink(df, batch_id)

    with pytest.raises(StreamingQueryException, match="has taken over"):
        run(stream(spark, tmp_path / "input"), each, tmp_path / "checkpoint")
    renamed.close()
    assert sorted(values(bootstrap, name)) == expected(0, 40)
    copy(stream(spark, tmp_path / "input"), f"{name}-renamed", bootstrap, tmp_path / "checkpoint", topic=name)
    assert sorted(values(bootstrap, name)) == expected(0, 80)


def test_a_renamed_pipeline_that_dies_before_it_fences_the_old_name_does_so_at_its_next_start(
    spark: SparkSession, bootstrap: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the first commit only the note in the checkpoint knows the old name, so it must not be replaced earlier."""
    fill(spark, tmp_path / "input", 1)
    sink = semel.KafkaSink(name=name, bootstrap=bootstrap, topic=name)
    renamed = semel.KafkaSink(name=f"{name}-renamed", bootstrap=bootstrap, topic=name)

    def die(*_: object, **__: object) -> None:
        raise RuntimeError("killed here")

    def each(df: DataFrame, batch_id: int) -> None:
        batch_input = read_input(df, batch_id, None)
        sink._pipeline.take_over(Question(name, batch_id, batch_input))
        with monkeypatch.context() as patched:
            patched.setattr("semel.spark.pipeline.PipelineOwner", die)
            with pytest.raises(RuntimeError, match="killed here"):
                renamed._pipeline.take_over(Question(renamed.options.name, batch_id, batch_input))
        renamed._pipeline.take_over(Question(renamed.options.name, batch_id, batch_input))
        sink(df, batch_id)

    with pytest.raises(StreamingQueryException, match="has taken over"):
        run(stream(spark, tmp_path / "input"), each, tmp_path / "checkpoint")
    renamed.close()
    copy(stream(spark, tmp_path / "input"), f"{name}-renamed", bootstrap, tmp_path / "checkpoint", topic=name)
    assert sorted(values(bootstrap, name)) == expected(0, 40)


def test_rows_with_the_columns_of_kafkas_source_need_a_topic(
    spark: SparkSession, bootstrap: str, name: str, tmp_path: Path
) -> None:
    """Their own topic is where they came from: they went back there, and were read again for ever."""
    rows = spark.readStream.format("semel").option("kafka.bootstrap.servers", bootstrap).option("subscribe", name)
    with pytest.raises(semel.ConfigError, match=r"would go back there; nothing was written\. Pass topic="):
        semel.write_stream(rows.load(), name=name, bootstrap=bootstrap, checkpoint=str(tmp_path))


def test_a_batch_whose_topics_were_in_a_column_is_not_repeated_under_their_names(
    spark: SparkSession, bootstrap: str, name: str, tmp_path: Path
) -> None:
    """Users come here by following the advice of the error for two calls in one batch."""
    source, checkpoint = tmp_path / "input", tmp_path / "checkpoint"
    fill(spark, source, 1)
    sink = semel.KafkaSink(name=name, bootstrap=bootstrap)
    to_even, to_odd = (f"'{name}-{kind}' as topic" for kind in ("even", "odd"))

    def twice(df: DataFrame, batch_id: int) -> None:
        sink(df.selectExpr("*", to_even), batch_id)
        sink(df.selectExpr("*", to_odd), batch_id)

    def by_name(df: DataFrame, batch_id: int) -> None:
        with sink.batch(batch_id) as batch:
            batch.write(df, topic=f"{name}-even")
            batch.write(df, topic=f"{name}-odd")

    def by_column(df: DataFrame, batch_id: int) -> None:
        with sink.batch(batch_id) as batch:
            batch.write(df.selectExpr("*", to_even))
            batch.write(df.selectExpr("*", to_odd))

    with pytest.raises(StreamingQueryException, match="has written batch 0 already"):
        run(stream(spark, source), twice, checkpoint)
    with pytest.raises(StreamingQueryException, match="whether its rows are among those cannot be told"):
        run(stream(spark, source), by_name, checkpoint)
    run(stream(spark, source), by_column, checkpoint)
    assert sorted(values(bootstrap, f"{name}-even")) == expected(0, 40)
    assert sorted(values(bootstrap, f"{name}-odd")) == expected(0, 40)
    fill(spark, source, 1, first=1)
    run(stream(spark, source), by_name, checkpoint)
    assert sorted(values(bootstrap, f"{name}-odd")) == expected(0, 80)
