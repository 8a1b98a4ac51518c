"""Three brokers, one of them killed while a producer writes."""

from __future__ import annotations

import time

from observer import records_of, wait_until_settled
from targets import NewTopic, Target

from semel.client.admin import Admin
from semel.client.cluster import CoordinatorKind
from semel.client.producer import Producer
from semel.errors import CommitUnknown, SemelError
from semel.testing.apache_kafka import ApacheKafka

PARTITIONS = 3
TRANSACTIONS = 60


def write_one(producer: Producer, topic: str, number: int) -> bool:
    """One transaction over all partitions; True if it is committed, False if it left no trace."""
    producer.begin()
    try:
        for partition in range(PARTITIONS):
            producer.send(topic, b"%d" % number, partition=partition)
        producer.commit()
        return True
    except CommitUnknown:
        return producer.resolve().value == "committed"
    except SemelError:
        producer.abort()
        return False


def kill_and_count(kafka_cluster: ApacheKafka, topic: str, victim: int) -> list[int]:
    """Write transactions, kill -9 the victim in the middle, start it again; returns the committed ones."""
    committed: list[int] = []
    node = kafka_cluster.node(victim)
    with Producer(bootstrap_servers=kafka_cluster.bootstrap, transactional_id=topic, retry_backoff_ms=50) as producer:
        for number in range(TRANSACTIONS):
            if number == TRANSACTIONS // 3:
                node.kill()
            if number == 2 * TRANSACTIONS // 3:
                node.start()
            if write_one(producer, topic, number):
                committed.append(number)
    return committed


def check(kafka_cluster: ApacheKafka, topic: str, committed: list[int]) -> None:
    wait_until_settled(kafka_cluster.bootstrap, topic, PARTITIONS)
    expected = [b"%d" % number for number in committed]
    assert records_of(kafka_cluster.bootstrap, topic, PARTITIONS) == dict.fromkeys(range(PARTITIONS), expected)
    assert len(committed) > TRANSACTIONS // 2, "hardly anything was committed: moves are not survived"


def test_killing_a_leader_loses_repeats_and_reorders_nothing(kafka_cluster: ApacheKafka, new_topic: NewTopic) -> None:
    """A2, B1: leaders move to other brokers in the middle of transactions; each is there whole and once, in order."""
    topic = new_topic(partitions=PARTITIONS, replication=3, config={"min.insync.replicas": "2"})
    with Producer(bootstrap_servers=kafka_cluster.bootstrap) as looker:
        victim = looker.cluster.leader(topic, 0).node
    started = time.monotonic()
    committed = kill_and_count(kafka_cluster, topic, victim)
    print(f"{len(committed)} of {TRANSACTIONS} committed in {time.monotonic() - started:.1f} s")
    check(kafka_cluster, topic, committed)


def test_killing_the_transaction_coordinator_leaves_no_transaction_undecided(
    kafka_cluster: ApacheKafka, target: Target, new_topic: NewTopic
) -> None:
    """B2, B9: the coordinator's log moves with its leader, and every decision in it is carried out."""
    topic = new_topic(partitions=PARTITIONS, replication=3, config={"min.insync.replicas": "2"})
    with Producer(bootstrap_servers=kafka_cluster.bootstrap, transactional_id=topic) as looker:
        victim = looker.cluster.coordinator(CoordinatorKind.TRANSACTION, topic)
        admin = Admin(looker.cluster)
        if not target.is_refused(lambda: admin.describe_transactions(topic)):
            assert admin.describe_transactions(topic)[topic].state == "Empty"
    committed = kill_and_count(kafka_cluster, topic, victim)
    check(kafka_cluster, topic, committed)
