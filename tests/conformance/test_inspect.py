"""What `semel inspect` tells, on each broker: true lag, and a hanging transaction made on purpose."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import confluent_kafka
import pytest
from raw import RawClient, wait_until
from raw_producer import RawProducer
from targets import KafkaUnderTest, NewTopic
from typer.testing import CliRunner

from semel.cli.main import app
from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.settings import parse_config
from semel.inspect.groups import group_report
from semel.inspect.lag import TrueLag
from semel.inspect.transactions import NotHanging, end_hanging, held_partitions, open_transactions
from semel.wire import ErrorCode

pytestmark = pytest.mark.needs("has_transaction_admin")


@pytest.fixture
def cluster(kafka: KafkaUnderTest) -> Iterator[Cluster]:
    with Cluster(parse_config({"bootstrap.servers": kafka.bootstrap}).client) as cluster:
        yield cluster


def run(kafka: KafkaUnderTest, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*arguments, "--bootstrap", kafka.bootstrap])
    return result.exit_code, result.output


@contextmanager
def without_verification(admin: Admin) -> Iterator[None]:
    """As brokers before 3.6 are, which take a batch for a partition that its transaction does not have (KIP-890)."""
    setting = "transaction.partition.verification.enable"
    admin.alter_configs("broker", "0", {setting: "false"})
    wait_until(lambda: admin.describe_configs("broker", "0", [setting])[setting].value == "false", setting)
    try:
        yield
    finally:
        admin.alter_configs("broker", "0", {setting: None})


def hang(raw: RawClient, admin: Admin, topic: str, transactional_id: str) -> RawProducer:
    """A transaction that is committed, and a write of the same producer that comes after it."""
    producer = RawProducer(raw, transactional_id).begin()
    producer.write(topic, b"in time")
    producer.commit()
    with without_verification(admin):
        wait_until(lambda: producer.produce(topic, b"late").error_code is ErrorCode.none, "the late write is taken")
    return producer


def test_a_hanging_transaction_is_found_explained_and_ended(
    kafka: KafkaUnderTest, cluster: Cluster, raw: RawClient, new_topic: NewTopic
) -> None:
    """B8: by protocol 1. The last stable offset moves only when it is ended, and all of it by the commands alone."""
    topic = new_topic()
    admin = Admin(cluster)
    producer = hang(raw, admin, topic, f"{topic}-late")
    producer_id = producer.identity.producer_id
    [held] = held_partitions(cluster, [topic])
    assert (held.last_stable_offset, held.high_watermark) == (2, 3)

    status, shown = run(kafka, "inspect", "transactions", "--topic", topic, "--json")

    assert status == 0
    [told] = json.loads(shown)["held"]
    assert (told["holder"]["standing"], told["holder"]["transactional_id"]) == ("hanging", f"{topic}-late")
    assert "no timeout applies" in told["holder"]["explanation"]
    _, text = run(kafka, "inspect", "transactions", "--topic", topic)
    assert f"semel inspect transactions --end {topic}:0 --producer-id {producer_id}" in text

    status, _ = run(kafka, "inspect", "transactions", "--end", f"{topic}:0", "--producer-id", str(producer_id), "--yes")

    assert status == 0
    assert admin.list_offsets({(topic, 0): "latest"})[(topic, 0)].offset == 4  # type: ignore[index]
    assert held_partitions(cluster, [topic]) == []
    status, text = run(kafka, "tail", topic, "--json")
    assert [json.loads(line)["status"] for line in text.splitlines()] == ["committed", "marker", "aborted", "marker"]


def test_ending_a_transaction_that_does_not_hang_is_refused_without_force(
    kafka: KafkaUnderTest, cluster: Cluster, raw: RawClient, new_topic: NewTopic
) -> None:
    """Its other partitions could be committed. The refusal changes nothing; --force says that the user knows better."""
    topic = new_topic()
    producer = RawProducer(raw, f"{topic}-alive").begin()
    producer.write(topic, b"x")
    [found] = open_transactions(cluster, [(topic, 0)])
    assert (found.standing, found.state, found.start_offset) == ("alive", "Ongoing", 0)
    ending = ("inspect", "transactions", "--end", f"{topic}:0", "--producer-id", str(producer.identity.producer_id))

    status, text = run(kafka, *ending, "--yes")

    assert status == 1
    assert "does not hang" in text
    assert open_transactions(cluster, [(topic, 0)]) == [found]
    with pytest.raises(NotHanging, match="begins at offset 0"):
        end_hanging(cluster, topic, 0, producer.identity.producer_id, start_offset=7, force=True)
    status, _ = run(kafka, *ending, "--yes", "--force")
    assert status == 0
    assert open_transactions(cluster, [(topic, 0)]) == []


def test_true_lag_is_zero_where_the_naive_one_is_not(
    kafka: KafkaUnderTest, cluster: Cluster, raw: RawClient, new_topic: NewTopic
) -> None:
    """J1: a consumer of another library reads a topic with aborts to its end; then more comes, part of it open."""
    topic = new_topic()
    producer = RawProducer(raw, f"{topic}-writer").begin()
    for number in range(3):
        producer.write(topic, b"%d" % number, b"more")
        producer.commit() if number % 2 == 0 else producer.abort()
    settings = {"bootstrap.servers": kafka.bootstrap, "group.id": topic, "auto.offset.reset": "earliest"}
    consumer = confluent_kafka.Consumer({**settings, "enable.auto.commit": False})
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
    read = consumer.consume(4, 30)
    assert [message.value() for message in read] == [b"0", b"more", b"2", b"more"]
    consumer.commit(message=read[-1], asynchronous=False)
    consumer.close()

    lag = group_report(cluster, topic).total

    assert (lag.readable, lag.naive, lag.is_exact) == (0, 1, True)

    admin = Admin(cluster)
    admin.commit_offsets(topic, {(topic, 0): 3})
    producer.write(topic, b"open")
    plain = RawProducer(raw).begin()
    assert plain.produce(topic, b"behind it", b"too").error_code is ErrorCode.none

    status, shown = run(kafka, "inspect", "groups", topic, "--json")

    assert status == 0
    [told] = json.loads(shown)
    counted = ("readable", "naive", "aborted", "markers", "open", "waiting", "is_exact")
    assert [told["lag"][name] for name in counted] == [2, 9, 2, 2, 1, 2, True]
    producer.abort()
    assert group_report(cluster, topic).total.readable == 4


@pytest.mark.needs("has_consumer_groups")
def test_a_group_that_the_broker_assigns_is_told_with_its_members(
    kafka: KafkaUnderTest, cluster: Cluster, new_topic: NewTopic
) -> None:
    """KIP-848: to the classic request alone it would look dead."""
    topic = new_topic(partitions=2)
    settings = {"bootstrap.servers": kafka.bootstrap, "group.id": topic, "client.id": "reader"}
    consumer = confluent_kafka.Consumer({**settings, "group.protocol": "consumer"})
    consumer.subscribe([topic])

    def is_stable() -> bool:
        consumer.poll(0.1)
        return len(consumer.assignment()) == 2

    wait_until(is_stable, "the group has formed")
    consumer.commit(offsets=[confluent_kafka.TopicPartition(topic, 1, 0)], asynchronous=False)

    report = group_report(cluster, topic)

    assert (report.state, report.members) == ("Stable", 1)
    [partition] = report.partitions
    assert (partition.partition, partition.member, partition.lag) == (1, "reader", TrueLag(0))
    consumer.close()


def test_what_a_transactional_id_did_lately_is_read_from_the_coordinators_log(
    kafka: KafkaUnderTest, raw: RawClient, new_topic: NewTopic
) -> None:
    """J1: one commit and one abort, change by change."""
    topic = new_topic()
    producer = RawProducer(raw, f"{topic}-writer").begin()
    producer.write(topic, b"x")
    producer.commit()
    producer.write(topic, b"y")
    producer.abort()

    status, shown = run(kafka, "inspect", "transactions", f"{topic}-writer", "--json")

    assert status == 0
    [told] = json.loads(shown)["transactions"]
    states = [change["state"] for change in told["lately"]]
    assert states == [
        *("Empty", "Ongoing", "PrepareCommit", "CompleteCommit", "Ongoing", "PrepareAbort", "CompleteAbort")
    ]
    assert told["lately"][1]["partitions"] == [{"topic": topic, "partition": 0}]
    assert told["open_for_ms"] is None
