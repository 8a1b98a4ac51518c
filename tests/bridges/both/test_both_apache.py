"""Both or neither on Apache Kafka: 4.x with transaction protocol 2, 3.9 with protocol 1, and 2.5, the oldest."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from both_processes import every_point, live, stopped
from both_scene import Shop
from session_scene import wait_until

import semel
from semel.testing.apache_kafka import LATEST, OLD, OLDEST, ApacheKafka
from semel.wire import Api

pytestmark = pytest.mark.conformance

CONFIG = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "500"}


@pytest.fixture(scope="module", params=[LATEST, OLD, OLDEST])
def kafka(request: pytest.FixtureRequest) -> Iterator[ApacheKafka]:
    with ApacheKafka(request.param, config=CONFIG) as kafka:
        yield kafka


@pytest.fixture
def shop(tmp_path: Path, kafka: ApacheKafka) -> Shop:
    made = Shop(str(tmp_path / "shop.db"), kafka.bootstrap)
    made.set_up()
    return made


def test_both_sides_agree_on_apache_kafka_though_the_program_is_killed_at_every_point(shop: Shop) -> None:
    """G5, on brokers that tell who owns an id and on one that cannot."""
    points = every_point()
    last = 3 * len(points)
    assert live(shop, last, *points, "") == [-signal.SIGKILL] * len(points) + [0]
    shop.check(list(range(1, last + 1)))


@pytest.mark.parametrize("point", ["both_records_written", "both_database_committed"])
def test_what_apache_kafka_aborts_by_its_timeout_is_sent_again(shop: Shop, tmp_path: Path, point: str) -> None:
    """The decision is in the database, so the records get into Kafka, once."""

    def is_open() -> bool:
        def ends(isolation: str) -> dict[semel.TopicPartition, int]:
            with semel.Fetcher({"bootstrap.servers": shop.bootstrap, "isolation.level": isolation}) as fetcher:
                fetcher.assign({(shop.topic, partition): "earliest" for partition in range(3)})
                return dict(fetcher.end_offsets())

        return ends("read_committed") != ends("read_uncommitted")

    with stopped(shop, 4, tmp_path, f"{point}:2", transaction_timeout_ms=1_000) as slow:
        assert is_open()
        wait_until(lambda: not is_open(), "the timeout")
        os.kill(slow.pid, signal.SIGCONT)
        _, said = slow.communicate(timeout=120)
    if slow.returncode != 0:  # before 3.0 a producer cannot tell a timeout from a successor, and ends
        assert "CommitPending" in said, said
        assert live(shop, 4, "") == [0]
    shop.check([1, 2, 3, 4])


def test_what_a_dead_program_decided_is_finished_by_hand_on_apache_kafka(shop: Shop) -> None:
    """While its transaction is still open: nobody is fenced, and it is committed as it is."""
    assert live(shop, 4, "both_database_committed:2") == [-signal.SIGKILL]
    with closing(shop.connect()) as connection:
        [done] = semel.recover_both(connection, bootstrap_servers=shop.bootstrap)
        assert (done.name, done.outcome) == (shop.name, "committed")
        assert semel.recover_both(connection, bootstrap_servers=shop.bootstrap) == []
    shop.check([1, 2])


def test_apache_kafka_does_not_offer_two_phase_commit_and_that_costs_nothing(kafka: ApacheKafka) -> None:
    """No release has it switched on: the client sees that in what the broker speaks, and keeps its timeout."""
    with semel.Producer(bootstrap_servers=kafka.bootstrap, transactional_id="t") as producer:
        before = producer.identity
        assert not producer.try_two_phase_commit()
        assert (producer.identity, producer.prepared) == (before, None)


def test_both_work_where_apache_kafka_is_told_to_offer_two_phase_commit_unfinished(tmp_path: Path) -> None:
    """With unstable versions it speaks the request and cannot keep a transaction (seen on 4.x): the old way then."""
    config = {
        **CONFIG,
        "unstable.api.versions.enable": "true",
        "transaction.two.phase.commit.enable": "true",
    }
    with ApacheKafka(LATEST, config=config) as kafka:
        shop = Shop(str(tmp_path / "shop.db"), kafka.bootstrap)
        shop.set_up()
        with semel.Producer(bootstrap_servers=kafka.bootstrap, transactional_id="t") as producer:
            assert producer.cluster.speaks(Api.INIT_PRODUCER_ID, 6)
            assert not producer.try_two_phase_commit()
        assert live(shop, 3, "both_records_written:2", "both_database_committed:2") == [-signal.SIGKILL] * 2
        assert live(shop, 4, "") == [0]
        shop.check([1, 2, 3, 4])
