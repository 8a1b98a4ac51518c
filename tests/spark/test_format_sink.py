"""`writeStream.format("semel")` and `write.format("semel")`: the same ledger as `write_stream`, one word away."""
# confluent-kafka hands its names on without saying so to type checkers.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from sink_scene import expected, fill, forget_commit, numbers, stream
from spark_sessions import small_spark
from topic_contents import group_offsets, values

import semel

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

_numbers = count()


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    session = small_spark()
    yield session
    session.stop()


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    """Both protocols are in test_spark_kills.py."""
    with semel.Broker() as broker:
        yield broker.bootstrap


@pytest.fixture
def name(bootstrap: str) -> str:
    """A pipeline's name, with a topic of that name."""
    name = f"format-{next(_numbers)}"
    create(bootstrap, name)
    return name


def create(bootstrap: str, *topics: str, partitions: int = 2, config: dict[str, str] | None = None) -> None:
    with semel.Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.create_topics(*topics, partitions=partitions, config=config)


def start(rows: DataFrame, name: str, bootstrap: str, checkpoint: Path, **options: Any) -> StreamingQuery:
    given = {"name": name, "topic": name, "kafka.bootstrap.servers": bootstrap, "checkpointLocation": str(checkpoint)}
    writer = rows.writeStream.format("semel").options(**{**given, **options}).trigger(availableNow=True)
    return writer.start()


def run(rows: DataFrame, name: str, bootstrap: str, checkpoint: Path, **options: Any) -> None:
    start(rows, name, bootstrap, checkpoint, **options).awaitTermination()


def write_job(rows: DataFrame, name: str, bootstrap: str, job_id: str, **options: Any) -> None:
    given = {"name": name, "topic": name, "kafka.bootstrap.servers": bootstrap, "job.id": job_id}
    rows.write.format("semel").options(**{**given, **options}).mode("append").save()


def test_each_micro_batch_is_written_once(spark: SparkSession, bootstrap: str, name: str, tmp_path: Path) -> None:
    fill(spark, tmp_path / "input", 3)
    run(stream(spark, tmp_path / "input"), name, bootstrap, tmp_path / "checkpoint")
    assert sorted(values(bootstrap, name)) == expected(0, 120)
    fill(spark, tmp_path / "input", 2, first=3)
    run(stream(spark, tmp_path / "input"), name, bootstrap, tmp_path / "checkpoint")
    assert sorted(values(bootstrap, name)) == expected(0, 200)


def test_a_batch_whose_commit_spark_has_forgotten_is_not_written_again(
    spark: SparkSession, bootstrap: str, name: str, tmp_path: Path
) -> None:
    fill(spark, tmp_path / "input", 2)
    run(stream(spark, tmp_path / "input"), name, bootstrap, tmp_path / "checkpoint")
    forget_commit(tmp_path / "checkpoint")
    fill(spark, tmp_path / "input", 1, first=2)
    run(stream(spark, tmp_path / "input"), name, bootstrap, tmp_path / "checkpoint")
    assert sorted(values(bootstrap, name)) == expected(0, 120)


def test_two_queries_at_once_do_not_fence_each_other_whichever_process_commits(
    spark: SparkSession, bootstrap: str, tmp_path: Path
) -> None:
    """Spark hands the batches of both to whichever of its processes is free."""
    names = [f"format-{next(_numbers)}" for _ in range(2)]
    create(bootstrap, *names)
    for index in range(2):
        fill(spark, tmp_path / f"input-{index}", 4)
    queries = [
        start(stream(spark, tmp_path / f"input-{index}"), name, bootstrap, tmp_path / f"checkpoint-{index}")
        for index, name in enumerate(names)
    ]
    for query in queries:
        query.awaitTermination()
    for name in names:
        assert sorted(values(bootstrap, name)) == expected(0, 160)


def test_the_checkpoint_goes_from_here_to_write_stream_and_back(
    spark: SparkSession, bootstrap: str, name: str, tmp_path: Path
) -> None:
    for turn in range(4):
        fill(spark, tmp_path / "input", 1, first=turn)
        rows = stream(spark, tmp_path / "input")
        if turn % 2:
            run(rows, name, bootstrap, tmp_path / "checkpoint")
        else:
            semel.write_stream(
                rows,
                name=name,
                bootstrap=bootstrap,
                topic=name,
                checkpoint=str(tmp_path / "checkpoint"),
                trigger={"availableNow": True},
            ).awaitTermination()
        forget_commit(tmp_path / "checkpoint")  # as if killed between the two commits
    assert sorted(values(bootstrap, name)) == expected(0, 160)


def test_a_second_run_of_the_name_stops_the_first(
    spark: SparkSession, bootstrap: str, name: str, tmp_path: Path
) -> None:
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 5).load()
    rows = rows.selectExpr("cast(value as string) value")
    given = {"name": name, "topic": name, "kafka.bootstrap.servers": bootstrap}
    writer = rows.writeStream.format("semel").options(**given)
    first = writer.option("checkpointLocation", str(tmp_path / "first")).start()
    try:
        while not first.lastProgress:
            assert first.exception() is None
        again = writer.option("checkpointLocation", str(tmp_path / "second")).option("resume", "checkpoint").start()
        try:
            with pytest.raises(StreamingQueryException, match="has taken over"):
                first.awaitTermination(60)
        finally:
            again.stop()
    finally:
        first.stop()


def test_much_data_goes_through_files_or_through_messages(
    spark: SparkSession, bootstrap: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = spools()
    wide = spark.range(0, 20_000, 1, 2).selectExpr("concat(cast(id as string), repeat(uuid(), 20)) value")
    write_job(wide, name, bootstrap, "files")
    assert len(values(bootstrap, name)) == 20_000
    assert not [folder for folder in spools() - before if any(Path(folder).glob("*/*-*"))], "files are left behind"


def spools() -> set[str]:
    return {entry.path for entry in os.scandir(tempfile.gettempdir()) if entry.name.startswith("semel-spool-")}


def test_a_job_is_written_once(spark: SparkSession, bootstrap: str, name: str) -> None:
    for _ in range(2):
        write_job(numbers(spark, 0, 50), name, bootstrap, "2026-11-15")
    write_job(numbers(spark, 50, 60), name, bootstrap, "2026-11-16")
    assert sorted(values(bootstrap, name)) == expected(0, 60)


def test_rows_that_cannot_be_written_become_dead_letters(spark: SparkSession, bootstrap: str, tmp_path: Path) -> None:
    name = f"format-{next(_numbers)}"
    create(bootstrap, name, config={"max.message.bytes": "2000"})
    create(bootstrap, f"{name}-dead")
    spark.range(20).coalesce(1).write.parquet(str(tmp_path / "input"))
    rows = spark.readStream.schema("id long").parquet(str(tmp_path / "input"))
    rows = rows.selectExpr("if(id = 7, repeat(uuid(), 1000), cast(id as string)) value")
    with pytest.raises(StreamingQueryException, match=r"over the topic.s max\.message\.bytes"):
        run(rows, name, bootstrap, tmp_path / "refused")
    run(rows, name, bootstrap, tmp_path / "refused", deadLetter=f"{name}-dead")
    assert len(values(bootstrap, name)) == 19
    assert len(values(bootstrap, f"{name}-dead")) == 1


def test_the_input_offsets_show_as_lag(spark: SparkSession, bootstrap: str, name: str, tmp_path: Path) -> None:
    create(bootstrap, f"{name}-in")
    with semel.Producer(bootstrap_servers=bootstrap) as producer:
        for number in range(30):
            producer.send(f"{name}-in", b"%d" % number)
    rows = spark.readStream.format("semel").option("kafka.bootstrap.servers", bootstrap)
    rows = rows.option("subscribe", f"{name}-in").option("startingOffsets", "earliest").load()
    run(rows.select("key", "value"), name, bootstrap, tmp_path / "checkpoint")
    assert sorted(values(bootstrap, name)) == expected(0, 30)
    assert sum(group_offsets(bootstrap, name, f"{name}-in", 2).values()) == 30


def test_a_lost_checkpoint_is_refused(spark: SparkSession, bootstrap: str, name: str, tmp_path: Path) -> None:
    fill(spark, tmp_path / "input", 1)
    run(stream(spark, tmp_path / "input"), name, bootstrap, tmp_path / "checkpoint")
    shutil.rmtree(tmp_path / "checkpoint")
    with pytest.raises(StreamingQueryException, match="resume"):
        run(stream(spark, tmp_path / "input"), name, bootstrap, tmp_path / "checkpoint")
    assert sorted(values(bootstrap, name)) == expected(0, 40)


def test_a_mistaken_option_is_one_sentence(spark: SparkSession, bootstrap: str, name: str, tmp_path: Path) -> None:
    """The others are in test_format_options.py."""
    fill(spark, tmp_path / "input", 1)
    with pytest.raises(StreamingQueryException, match="did you mean topic"):
        run(stream(spark, tmp_path / "input"), name, bootstrap, tmp_path / "checkpoint", topicc="x")
    assert values(bootstrap, name) == []


def test_what_a_topic_cannot_do_is_refused(spark: SparkSession, bootstrap: str, name: str, tmp_path: Path) -> None:
    fill(spark, tmp_path / "input", 1)
    counted = stream(spark, tmp_path / "input").groupBy("key").count().selectExpr("key", "cast(count as string) value")
    given = {"name": name, "topic": name, "kafka.bootstrap.servers": bootstrap}
    complete = counted.writeStream.format("semel").options(**given).outputMode("complete")
    with pytest.raises(StreamingQueryException, match="mode complete"):
        complete.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True).start().awaitTermination()
    with pytest.raises(AnalysisException, match=r"checkpointLocation"):
        stream(spark, tmp_path / "input").writeStream.format("semel").options(**given).start()
    with pytest.raises(Exception, match="cannot be overwritten"):
        numbers(spark, 0, 1).write.format("semel").options(**given, **{"job.id": "1"}).mode("overwrite").save()
    with pytest.raises(Exception, match=r"job\.id is missing"):
        numbers(spark, 0, 1).write.format("semel").options(**given).mode("append").save()
    assert values(bootstrap, name) == []
