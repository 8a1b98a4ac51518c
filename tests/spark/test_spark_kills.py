"""Spark's driver killed at every named step, with every kind of query, on every kind of broker.

Each kill ends the driver of one query, with its JVM and all workers, on its way through its input; the next life of
that query is killed at another step, and in the end all run to their ends. What readers of committed records see must
be what the input says: nothing lost, nothing twice, no batch in one topic alone, and all aggregates exact.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest
from driver_groups import run_driver
from kill_driver import KINDS, WRITTEN_BY_TASKS
from kill_feed import ROWS, Feed, KafkaFeed, expected
from topic_contents import group_offsets, values

from semel.broker.process import Broker
from semel.client.admin import Admin
from semel.spark.failpoints import POINTS
from semel.testing.apache_kafka import ApacheKafka

pytestmark = pytest.mark.chaos

STEPS = (*(f"{point}:1" for point in POINTS), "before_produce:midst")
"""The last is in the midst of writing: some blobs have left, others have not."""

MIDST = {True: "3", False: "12"}
"""Which blob that is, of one task or of the driver."""

PAIRS = [(STEPS[number % len(STEPS)], list(KINDS)[number % len(KINDS)]) for number in range(len(STEPS) * len(KINDS))]
"""Every step with every kind of query (their numbers have no common factor); the first eleven have every step once."""

KILLS = int(os.environ.get("SEMEL_SPARK_KILLS", str(len(STEPS))))
"""As many pairs are dealt out over the brokers; all of them (44) are for each broker."""

BROKERS: dict[str, Callable[[], AbstractContextManager[Broker | ApacheKafka]]] = {
    "embedded, protocol 2": Broker,
    "embedded, protocol 1": lambda: Broker(config={"transaction.version": 0}),
    "Apache Kafka": ApacheKafka,
}


@dataclass
class Drivers:
    """Starts drivers, each in a process group of its own."""

    folder: Path
    bootstrap: str
    archive: Path
    """What the JVM has loaded and linked before: with it a start takes half of the time."""

    def run(self, kinds: Sequence[str], *, kill_at: str | None = None, by_format: bool = False) -> int:
        """Run these queries until all of that group dies at `kill_at`, or to their ends; returns how it ended.

        They write through `semel.write_stream`, or `by_format`, with the same checkpoint and the same ledger.
        """
        use = "SharedArchiveFile" if self.archive.exists() else "ArchiveClassesAtExit"
        told = {
            "folder": str(self.folder),
            "bootstrap": self.bootstrap,
            "kinds": kinds,
            "rows": ROWS,
            "by_format": by_format,
            "java": [] if kill_at and not self.archive.exists() else [f"-XX:{use}={self.archive}", "-Xlog:cds=off"],
        }
        driver = Path(__file__).parent / "kill_driver.py"
        return run_driver(driver, told, self.folder / "driver.log", kill_at=kill_at)

    def log(self) -> str:
        return (self.folder / "driver.log").read_text()[-3000:]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jvm") / "spark.jsa"


@pytest.fixture(params=BROKERS)
def drivers(request: pytest.FixtureRequest, tmp_path: Path, archive: Path) -> Iterator[Drivers]:
    with BROKERS[request.param]() as broker:
        yield Drivers(tmp_path, broker.bootstrap, archive)


@pytest.fixture
def feeds(drivers: Drivers) -> dict[str, Feed]:
    """The input of each kind of query, and topics for its output."""
    made: dict[str, Feed] = {kind: Feed(drivers.folder / kind) for kind in KINDS}
    of_kafka = KafkaFeed(drivers.folder / "stateless", bootstrap=drivers.bootstrap, topic="in-stateless")
    of_kafka.create()
    with Admin({"bootstrap.servers": drivers.bootstrap}) as admin:
        admin.create_topics(*(f"{role}-{kind}" for kind in KINDS for role in ("out", "copy")), partitions=3)
    return made | {"stateless": of_kafka}


def test_a_driver_that_dies_at_any_step_loses_and_repeats_nothing(
    request: pytest.FixtureRequest, drivers: Drivers, feeds: dict[str, Feed]
) -> None:
    """E2, E3: whichever query is killed at whichever step, its output is in the end what its input says."""
    place = list(BROKERS).index(request.node.callspec.params["drivers"])
    kills = PAIRS if len(PAIRS) <= KILLS else PAIRS[:KILLS][place :: len(BROKERS)]
    for feed in feeds.values():
        feed.add(4)
    if not drivers.archive.exists():
        assert drivers.run(list(KINDS)) == 0, drivers.log()
    for number, (step, kind) in enumerate(kills):
        feeds[kind].add(2)
        by_format = (number + place) % 2 == 0
        step = step.replace("midst", MIDST[kind in WRITTEN_BY_TASKS and not by_format])
        started = time.monotonic()
        ended = drivers.run([kind], kill_at=step, by_format=by_format)
        way = "the format" if by_format else "write_stream"
        print(f"{kind} through {way} killed at {step} after {time.monotonic() - started:.1f} s", flush=True)
        assert ended == -signal.SIGKILL, f"{kind} never got to {step}: {drivers.log()}"
        check_so_far(drivers.bootstrap, kind, feeds[kind])
    assert drivers.run(list(KINDS), by_format=place == 0) == 0, drivers.log()
    for kind, feed in feeds.items():
        for role in ("out", "copy"):
            assert values(drivers.bootstrap, f"{role}-{kind}") == expected(kind, feed), (role, kind)
    of_kafka = feeds["stateless"]
    assert isinstance(of_kafka, KafkaFeed)
    assert group_offsets(drivers.bootstrap, "stateless", "in-stateless", 2) == of_kafka.ends()


def check_so_far(bootstrap: str, kind: str, feed: Feed) -> None:
    """What can be seen after a kill is whole batches: in both topics, and nothing of it twice."""
    deadline = time.monotonic() + 20
    while True:
        seen, copy = (values(bootstrap, f"{role}-{kind}") for role in ("out", "copy"))
        if seen == copy:
            break
        # The markers of a commit come to one partition after the other.
        assert time.monotonic() < deadline, f"{kind} is torn: {Counter(seen) - Counter(copy)}"
        time.sleep(0.1)
    if kind == "stateless":
        assert len(seen) % ROWS == 0
        assert seen == expected(kind, feed, len(seen)), "not whole batches from the beginning"
    else:
        assert not Counter(seen) - Counter(expected(kind, feed))
