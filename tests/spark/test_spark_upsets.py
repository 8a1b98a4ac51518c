"""What may happen to a pipeline's checkpoint, topics and transactional id between two batches, and what comes of it.

Each test ends as it must: what readers of committed records see is what the input says.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest
from crasher import Crash, Crasher
from kill_driver import KINDS, piped
from kill_feed import ROWS, Feed, KafkaFeed, expected
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from spark_sessions import small_spark
from topic_contents import contents, group_offsets, values

import semel
from semel.broker import shifted_clock
from semel.broker.process import Broker
from semel.client.admin import Admin
from semel.client.partitions import TopicPartition
from semel.client.progress_topic import PARTITIONS
from semel.spark import owner
from semel.spark.ledger import Entry
from semel.spark.options import make_options
from semel.spark.owner import PipelineOwner
from semel.spark.progress import BatchProgress
from semel.testing.apache_kafka import ApacheKafka
from semel.testing.proxy import Cut, Direction
from semel.verify.faults.proxy import FaultProxy, Match
from semel.wire import Api

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]
WEEK_MS = 7 * 24 * 3600 * 1000
_numbers = count()

BROKERS: dict[str, Callable[[], AbstractContextManager[Broker | ApacheKafka]]] = {
    "embedded, protocol 2": lambda: Broker(config={"log.cleaner.backoff.ms": 100}),
    "embedded, protocol 1": lambda: Broker(config={"log.cleaner.backoff.ms": 100, "transaction.version": 0}),
    "Apache Kafka": lambda: ApacheKafka(config={"log.cleaner.backoff.ms": "100"}),
}


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    session = small_spark("local[2]")
    yield session
    session.stop()


@pytest.fixture(scope="module", params=BROKERS)
def bootstrap(request: pytest.FixtureRequest) -> Iterator[str]:
    with BROKERS[request.param]() as broker:
        yield broker.bootstrap


@dataclass
class Pipeline:
    """A query from a topic to a topic, or of another kind from files, that is run until all of its input is read."""

    spark: SparkSession
    bootstrap: str
    folder: Path
    kind: str = "stateless"
    name: str = field(default_factory=lambda: f"pipeline-{next(_numbers)}")

    def __post_init__(self) -> None:
        self.out, self.checkpoint = f"out-{self.name}", self.folder / "checkpoint"
        with Admin({"bootstrap.servers": self.bootstrap}) as admin:
            admin.create_topics(self.out, partitions=3)
        self.feed = Feed(self.folder / "files")
        if self.kind == "stateless":
            self.feed = KafkaFeed(self.folder / "files", bootstrap=self.bootstrap, topic=f"in-{self.name}")
            self.feed.create()

    def rows(self, **options: str) -> DataFrame:
        if self.kind == "stateless":
            return piped(self.spark, self.bootstrap, f"in-{self.name}", ROWS, **options)
        return KINDS[self.kind](self.spark, self.folder / "files")

    def run(self, *, source: dict[str, str] | None = None, **sink: Any) -> None:
        query = semel.write_stream(
            self.rows(**source or {}),
            name=self.name,
            bootstrap=self.bootstrap,
            topic=self.out,
            checkpoint=str(self.checkpoint),
            trigger={"availableNow": True},
            batch_size=200,
            **sink,
        )
        query.awaitTermination()

    def crash_at(self, patch: pytest.MonkeyPatch, point: str) -> None:
        """Run until the sink's half of the driver dies there."""
        with patch.context() as own:
            Crasher(own, cast("dict[str, str]", self.spark.sparkContext.environment)).arm(point)
            with pytest.raises((Crash, StreamingQueryException), match=point):
                self.run()

    def forget_commit(self) -> None:
        """Take the newest entry out of Spark's commit log, so that the batch is run again."""
        commits = self.checkpoint / "commits"
        newest = max(int(path.name) for path in commits.glob("[0-9]*"))
        for name in (str(newest), f".{newest}.crc"):
            (commits / name).unlink()

    def log_ends(self, *topics: str) -> dict[TopicPartition, int]:
        """Where the logs end, with everything that is in them."""
        with Admin({"bootstrap.servers": self.bootstrap}) as admin:
            shapes = admin.describe_topics(self.out, *topics)
            counts = {name: len(shape.partitions) for name, shape in shapes.items()}
            named = [TopicPartition(name, number) for name, count in counts.items() for number in range(count)]
            found = admin.list_offsets(dict.fromkeys(named, "latest"), "read_uncommitted")
            return {partition: at.offset for partition, at in found.items()}

    def check(self) -> None:
        assert values(self.bootstrap, self.out) == expected(self.kind, self.feed)
        if isinstance(self.feed, KafkaFeed):
            assert group_offsets(self.bootstrap, self.name, self.feed.topic, 2) == self.feed.ends()


@pytest.fixture
def pipeline(spark: SparkSession, bootstrap: str, tmp_path: Path) -> Pipeline:
    return Pipeline(spark, bootstrap, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_writes_nothing_at_all(spark: SparkSession, bootstrap: str, tmp_path: Path, kind: str) -> None:
    """E2, E3: not even something that is aborted; and state and watermark go on as if nothing had happened."""
    pipeline = Pipeline(spark, bootstrap, tmp_path, kind)
    pipeline.feed.add(5)
    pipeline.run()
    pipeline.check()
    before = pipeline.log_ends("semel-ledger")
    pipeline.forget_commit()
    pipeline.run()
    assert pipeline.log_ends("semel-ledger") == before
    pipeline.forget_commit()
    pipeline.feed.add(2)
    pipeline.run()
    pipeline.check()


@pytest.mark.parametrize("point", ["after_offsets", "after_end_answered"])
def test_a_lost_checkpoint_is_made_up_for_by_the_offsets_in_the_last_transaction(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """E2: whether the crash that took it away came before the last commit or after it."""
    pipeline.feed.add(2)
    pipeline.run()
    pipeline.feed.add(2)
    pipeline.crash_at(monkeypatch, point)
    shutil.rmtree(pipeline.checkpoint)
    pipeline.feed.add(1)
    start = semel.committed_offsets(name=pipeline.name, bootstrap=pipeline.bootstrap)
    pipeline.run(source={"startingOffsets": start}, resume="committed")
    pipeline.check()


def test_a_topic_may_get_more_partitions_while_a_query_writes_to_it(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E2: between two batches of a run, between an attempt and its repeat, and between a commit and its replay."""

    def grow(partitions: int) -> None:
        with Admin({"bootstrap.servers": pipeline.bootstrap}) as admin:
            admin.create_partitions(pipeline.out, partitions)

    def grow_after_first(progress: BatchProgress) -> None:
        if progress.batch_id == 0:
            grow(5)

    pipeline.feed.add(3)
    pipeline.run(on_progress=grow_after_first, metadata_max_age_ms=1)
    assert {record.partition for record in contents(pipeline.bootstrap, pipeline.out)} == set(range(5))
    pipeline.feed.add(2)
    pipeline.crash_at(monkeypatch, "after_last_produce")
    grow(7)
    pipeline.run()
    pipeline.check()
    grow(8)
    pipeline.forget_commit()
    pipeline.feed.add(1)
    pipeline.run()
    pipeline.check()
    assert {record.partition for record in contents(pipeline.bootstrap, pipeline.out)} == set(range(8))


def test_a_compacted_ledger_still_knows_the_last_batch(pipeline: Pipeline) -> None:
    """E2: compaction takes older records and the ends of their transactions away, and leaves the newest."""
    ledger = f"ledger-of-{pipeline.name}"
    quick = {"cleanup.policy": "compact", "segment.ms": "100", "min.cleanable.dirty.ratio": "0.01"}
    with Admin({"bootstrap.servers": pipeline.bootstrap}) as admin:
        admin.create_topics(ledger, partitions=PARTITIONS, config=quick | {"delete.retention.ms": "0"})
    pipeline.feed.add(6)
    pipeline.run(ledger=ledger)
    deadline = time.monotonic() + 60
    while len(kept := contents(pipeline.bootstrap, ledger)) > 6:  # of twelve: each batch has two
        assert time.monotonic() < deadline, f"not compacted: {kept}"
        time.sleep(0.2)
    before = pipeline.log_ends(ledger)
    pipeline.forget_commit()
    pipeline.run(ledger=ledger)
    assert pipeline.log_ends(ledger) == before
    pipeline.forget_commit()
    pipeline.feed.add(1)
    pipeline.run(ledger=ledger)
    pipeline.check()


@dataclass
class Weeks:
    """A broker whose clock jumps."""

    bootstrap: str
    file: Path
    passed: int = 0

    def pass_one(self, transactional_id: str) -> None:
        """Until the coordinator has forgotten the id."""
        self.passed += 1
        beside = self.file.with_suffix(".new")
        beside.write_text(str(self.passed * (WEEK_MS + 60_000)))
        beside.rename(self.file)
        with Admin({"bootstrap.servers": self.bootstrap}) as admin:
            deadline = time.monotonic() + 30
            while transactional_id in {found.transactional_id for found in admin.list_transactions()}:
                assert time.monotonic() < deadline, "the id was not forgotten"
                time.sleep(0.05)


@pytest.fixture(params=[2, 0], ids=["protocol 2", "protocol 1"])
def weeks(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Weeks]:
    file = tmp_path / "clock"
    file.write_text("0")
    monkeypatch.setenv(shifted_clock.VARIABLE, str(file))
    config: dict[str, object] = {
        "transaction.version": request.param,
        "transaction.remove.expired.transaction.cleanup.interval.ms": 100,
        "producer.id.expiration.check.interval.ms": 100,
        "log.retention.ms": -1,
    }
    with Broker(config=config) as broker:
        yield Weeks(broker.bootstrap, file)


def test_an_id_that_was_forgotten_during_a_pause_costs_nothing(
    spark: SparkSession, weeks: Weeks, tmp_path: Path
) -> None:
    """E2: after a week of silence the ledger still knows what was committed, though coordinator and group may not."""
    pipeline = Pipeline(spark, weeks.bootstrap, tmp_path)
    pipeline.feed.add(2)
    pipeline.run()
    weeks.pass_one(pipeline.name)
    before = pipeline.log_ends("semel-ledger")
    pipeline.forget_commit()
    pipeline.run()
    assert pipeline.log_ends("semel-ledger") == before
    pipeline.feed.add(1)
    pipeline.run()
    assert values(pipeline.bootstrap, pipeline.out) == expected("stateless", pipeline.feed)


def test_a_query_goes_on_though_its_id_was_forgotten_between_two_batches(
    spark: SparkSession, weeks: Weeks, tmp_path: Path
) -> None:
    """E2: a query that had nothing to do for a week owns its pipeline anew, since nobody else did meanwhile."""
    pipeline = Pipeline(spark, weeks.bootstrap, tmp_path)
    pipeline.feed.add(3)

    def wait_a_week(progress: BatchProgress) -> None:
        if progress.batch_id == 1:
            weeks.pass_one(pipeline.name)

    pipeline.run(on_progress=wait_a_week)
    assert values(pipeline.bootstrap, pipeline.out) == expected("stateless", pipeline.feed)


def test_a_query_that_slept_while_another_worked_stops_though_the_id_was_forgotten(
    spark: SparkSession, weeks: Weeks, tmp_path: Path
) -> None:
    """E2: the ledger shows that somebody else has committed since, so this one must not own the pipeline again."""
    pipeline = Pipeline(spark, weeks.bootstrap, tmp_path)
    pipeline.feed.add(2)

    def sleep(progress: BatchProgress) -> None:
        if progress.batch_id == 0:
            options = make_options(
                name=pipeline.name, bootstrap=weeks.bootstrap, topic=None, settings=None, more_settings={}
            )
            other = PipelineOwner(options, pipeline.name)
            other.begin()
            other.settle([], Entry(query="another checkpoint", batch=0), {})
            other.close()
            weeks.pass_one(pipeline.name)

    with pytest.raises(StreamingQueryException, match=f"Another run of pipeline '{pipeline.name}' has taken over"):
        pipeline.run(on_progress=sleep)
    assert values(pipeline.bootstrap, pipeline.out) == expected("stateless", pipeline.feed, ROWS)


CUTS = [
    (api, direction, cut)
    for api in (Api.PRODUCE, Api.TXN_OFFSET_COMMIT, Api.END_TXN)
    for direction, cut in (
        (Direction.REQUEST, Cut.BEFORE),
        (Direction.REQUEST, Cut.AFTER),
        (Direction.RESPONSE, Cut.BEFORE),
    )
]
"""A request that never arrives, one that is carried out without its client, and one whose answer is lost."""


@pytest.mark.parametrize(
    ("writers", "much_bytes"),
    [(None, owner.MUCH_BYTES), (None, 1), (2, owner.MUCH_BYTES)],
    ids=["the driver writes", "the driver writes over two connections", "tasks write"],
)
def test_a_query_goes_on_through_a_network_that_is_cut_at_each_of_its_requests(
    spark: SparkSession,
    bootstrap: str,
    tmp_path: Path,
    writers: int | None,
    much_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """E2: in each micro-batch another connection is cut, and the query neither stops nor repeats anything."""
    monkeypatch.setattr(owner, "MUCH_BYTES", much_bytes)
    with FaultProxy(bootstrap) as proxy:
        pipeline = Pipeline(spark, proxy.bootstrap, tmp_path)
        pipeline.feed.add(len(CUTS) + 1)
        left = list(CUTS)

        def set_next_trap(progress: BatchProgress) -> None:
            if left:
                api, direction, cut = left.pop()
                proxy.set_trap(Match(api, direction), cut)

        pipeline.run(on_progress=set_next_trap, writers=writers)
        assert not left
        assert proxy.waiting_traps == 0, "a cut found nothing to strike"
        pipeline.check()
