"""`semel doctor` on real brokers: what it sees there, and what it leaves alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import confluent_kafka
import pytest
from targets import KafkaUnderTest, NewTopic, Target

import semel
from semel.advise import cluster_check
from semel.advise.cluster_check import check_cluster
from semel.advise.cluster_facts import collect_facts
from semel.advise.examine import examine_cluster, examine_files
from semel.advise.pipeline_check import check_pipeline
from semel.client.cluster import Cluster
from semel.client.settings import parse_config
from semel.inspect.pipelines import find_pipeline
from semel.testing.apache_kafka import ApacheKafka


def rules_of(bootstrap: str, topic: str) -> list[str]:
    findings, _ = examine_cluster({"bootstrap.servers": bootstrap}, topics=[topic], watch_s=0.0)
    return [one.rule.id for one in findings if topic in one.where]


def test_what_a_broker_is_too_old_for_is_noted_and_the_rest_is_seen(
    kafka: KafkaUnderTest, target: Target, new_topic: NewTopic
) -> None:
    """Protocol 1 is a note; before 2.8 and 3.0 nobody can be asked for transactions and producers."""
    findings, facts = examine_cluster({"bootstrap.servers": kafka.bootstrap}, topics=[new_topic()], watch_s=0.0)
    assert ("transaction-protocol-1" in [one.rule.id for one in findings]) == (target.transaction_protocol == 1)
    assert facts.transaction_timeout_ms_max == 900_000
    assert facts.broker_settings["offsets.retention.minutes"] == "10080"
    seen = [line.partition(":")[0] for line in facts.not_seen]
    assert seen == ([] if target.has_transaction_admin else ["transactional ids", "producers of partitions"])


def test_a_topic_that_refuses_every_transaction_is_seen(kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
    """min.insync.replicas above the replication factor; with its default there is nothing to say."""
    assert rules_of(kafka.bootstrap, new_topic(config={"min.insync.replicas": "2"})) == ["min-insync-replicas-too-high"]
    assert rules_of(kafka.bootstrap, new_topic()) == []


@pytest.mark.parametrize("isolation", ["read_uncommitted", "read_committed"])
def test_a_group_that_reads_open_transactions_is_seen(
    kafka: KafkaUnderTest, new_topic: NewTopic, isolation: str
) -> None:
    """By its committed offset beyond the last stable one, while the transaction is open."""
    topic = new_topic()
    bootstrap = {"bootstrap.servers": kafka.bootstrap}
    producer = confluent_kafka.Producer({**bootstrap, "transactional.id": topic})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, b"committed")
    producer.commit_transaction(30)
    producer.begin_transaction()
    producer.produce(topic, b"open")
    assert producer.flush(30) == 0
    reader = confluent_kafka.Consumer(
        {**bootstrap, "group.id": topic, "isolation.level": isolation, "enable.auto.commit": False}
    )
    reader.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
    for _ in range(1 if isolation == "read_committed" else 2):
        message = reader.poll(30)
        assert message is not None
        assert message.error() is None
    reader.commit(asynchronous=False)
    reader.close()

    assert rules_of(kafka.bootstrap, topic) == (["group-reads-uncommitted"] if isolation == "read_uncommitted" else [])

    producer.abort_transaction(30)


@pytest.mark.needs("has_transaction_admin")
def test_instances_that_fence_each_other_are_seen(kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
    """One id, initialised again between two looks."""
    topic = new_topic()

    def start_another(_: float) -> None:
        semel.Producer(bootstrap_servers=kafka.bootstrap, transactional_id=topic).close()

    start_another(0)
    facts = collect_facts({"bootstrap.servers": kafka.bootstrap}, topics=[topic], wait=start_another)
    assert [one.rule.id for one in check_cluster(facts) if topic in one.where] == ["transactional-id-fought-over"]
    assert rules_of(kafka.bootstrap, topic) == [], "nobody starts another between these looks"


@pytest.mark.needs("has_transaction_admin")
def test_an_id_whose_epochs_come_to_their_end_is_seen(
    kafka: KafkaUnderTest, new_topic: NewTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an end of 3 in place of 32,000, which would take a minute to get to."""
    monkeypatch.setattr(cluster_check, "_EPOCH_NEAR_END", 3)
    names = new_topic(), new_topic()
    for name, starts in zip(names, (4, 1), strict=True):
        for _ in range(starts):
            semel.Producer(bootstrap_servers=kafka.bootstrap, transactional_id=name).close()
    facts = collect_facts({"bootstrap.servers": kafka.bootstrap}, topics=[], watch_s=0.0)
    found = [one.where for one in check_cluster(facts) if one.rule.id == "producer-epoch-near-its-end"]
    assert [any(name in where for where in found) for name in names] == [True, False]


@pytest.mark.needs("has_transaction_admin")
def test_a_partition_with_many_producers_is_seen(
    kafka: KafkaUnderTest, new_topic: NewTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many are 3 here: each that wrote counts once."""
    monkeypatch.setattr(cluster_check, "_PRODUCERS_MANY", 3)
    many, few = new_topic(), new_topic()
    for topic, producers in ((many, 3), (few, 2)):
        for _ in range(producers):
            with semel.Producer(bootstrap_servers=kafka.bootstrap) as producer:
                producer.send(topic, b"row")
    assert (rules_of(kafka.bootstrap, many), rules_of(kafka.bootstrap, few)) == (["many-producers"], [])


def test_offsets_that_expire_within_a_pause_are_seen(kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
    """Brokers keep them for seven days, if nothing else was set."""
    topics, day_s = [new_topic()], 86_400
    for days, is_seen in ((8, True), (6, False)):
        findings, _ = examine_cluster(
            {"bootstrap.servers": kafka.bootstrap}, topics=topics, longest_pause_s=days * day_s, watch_s=0.0
        )
        assert ("offsets-expire" in [one.rule.id for one in findings]) == is_seen


def test_a_timeout_that_the_brokers_refuse_is_seen(kafka: KafkaUnderTest, new_topic: NewTopic, tmp_path: Path) -> None:
    """In a file, by the maximum that this cluster says."""
    facts = collect_facts({"bootstrap.servers": kafka.bootstrap}, topics=[new_topic()], watch_s=0.0)
    file = tmp_path / "app.properties"
    for timeout_ms, rules in ((900_001, ["transaction-timeout-above-broker-maximum"]), (900_000, [])):
        file.write_text(f"transactional.id=a\ntransaction.timeout.ms={timeout_ms}\n")
        found = examine_files([file], transaction_timeout_ms_max=facts.transaction_timeout_ms_max)
        assert [one.rule.id for one in found] == rules


@pytest.mark.needs("has_transaction_admin")
def test_a_timeout_that_transactions_come_near_is_seen(kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
    """By how long the last ones were open, as their coordinator has written down."""
    topic, near, far = new_topic(), f"near-{new_topic()}", f"far-{new_topic()}"
    bootstrap = {"bootstrap.servers": kafka.bootstrap}
    for name, timeout_ms in ((near, 1_500), (far, 60_000)):
        own = {**bootstrap, "transactional.id": name, "transaction.timeout.ms": timeout_ms}
        with semel.Producer(own) as producer, producer.transaction():
            producer.send(topic, b"row")
            producer.flush()
            time.sleep(1.1)  # how long it is open is what is measured
    with Cluster(parse_config(bootstrap).client) as cluster:
        found = [[one.rule.id for one in check_pipeline(find_pipeline(cluster, name))] for name in (near, far)]
    assert found == [["transaction-timeout-too-short"], []]


def test_replication_is_judged_in_a_cluster_of_three(kafka_cluster: ApacheKafka, new_topic: NewTopic) -> None:
    """Each mistake of a topic's settings, and the settings that production should have."""
    bootstrap = kafka_cluster.bootstrap
    good = new_topic(replication=3, config={"min.insync.replicas": "2"})
    assert rules_of(bootstrap, good) == []
    for replication, insync, unclean, rule in [
        (1, "1", "false", "topic-not-replicated"),
        (3, "3", "false", "min-insync-replicas-equal-replication"),
        (3, "1", "false", "min-insync-replicas-too-low"),
        (3, "2", "true", "unclean-leader-election"),
    ]:
        config = {"min.insync.replicas": insync, "unclean.leader.election.enable": unclean}
        assert rules_of(bootstrap, new_topic(replication=replication, config=config)) == [rule]


def test_a_ledger_without_a_replica_is_seen(kafka_cluster: ApacheKafka) -> None:
    """Without it exactly-once is lost with one machine. Made again with three, there is nothing to say."""
    bootstrap, ledger = kafka_cluster.bootstrap, "semel-ledger"
    with semel.Admin({"bootstrap.servers": bootstrap}) as admin:
        for replication, rules in ((1, ["internal-topic-not-replicated"]), (3, [])):
            config = {"min.insync.replicas": str(min(2, replication))}
            until_done(lambda n=replication, c=config: admin.create_topics(ledger, replication=n, config=c))
            try:
                until_done(lambda expected=rules: check_rules(bootstrap, ledger, expected))
            finally:
                until_done(lambda: admin.delete_topics(ledger))


def check_rules(bootstrap: str, topic: str, expected: list[str]) -> None:
    assert rules_of(bootstrap, topic) == expected


def until_done(step: Callable[[], object]) -> None:
    """Each broker hears of a topic that was deleted and made again in its own time."""
    deadline = time.monotonic() + 60
    while True:
        try:
            step()
            return
        except (semel.SemelError, AssertionError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def test_a_running_pipeline_is_found_by_its_name(kafka: KafkaUnderTest, target: Target, new_topic: NewTopic) -> None:
    """A session's group, topics and id, with how long its transaction was open; what a broker cannot tell is noted."""
    topic, name = new_topic(), f"pipeline-{new_topic()}"
    bootstrap = {"bootstrap.servers": kafka.bootstrap}
    with semel.Producer({**bootstrap, "transactional.id": f"{name}-0"}) as producer, producer.transaction():
        producer.send(topic, b"row")
        producer.send_offsets({semel.TopicPartition(topic, 0): 0}, name)
    with Cluster(parse_config(bootstrap).client) as cluster:
        deadline = time.monotonic() + 30
        while not (found := find_pipeline(cluster, name)).topics and time.monotonic() < deadline:
            time.sleep(0.1)  # before Kafka 4.0 the markers of positions come after the answer to the commit
    assert (found.group, found.topics) == (name, [topic])
    if target.has_transaction_admin:
        assert found.not_seen == []
        (one,) = found.ids
        assert (one.transactional_id, len(one.open_ms)) == (f"{name}-0", 1)
        assert one.open_ms[0] < 30_000
    else:
        assert [line.partition(":")[0] for line in found.not_seen] == ["transactional ids"]
