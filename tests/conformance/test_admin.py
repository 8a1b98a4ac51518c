"""Each administrative call once against real brokers, its effect looked at."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import confluent_kafka
import pytest
from raw import wait_until
from targets import KafkaUnderTest, NewTopic, Target

from semel.client.admin import Admin, CommittedOffset
from semel.client.partitions import TopicPartition
from semel.errors import KafkaError, UnknownTopic
from semel.testing.apache_kafka import ApacheKafka
from semel.wire import ErrorCode


@pytest.fixture
def admin(kafka: KafkaUnderTest) -> Iterator[Admin]:
    with Admin({"bootstrap.servers": kafka.bootstrap}) as admin:
        yield admin


@pytest.fixture
def name() -> str:
    """A name that no other test uses."""
    return f"admin-{uuid.uuid4().hex[:12]}"


def write(kafka: KafkaUnderTest, topic: str, count: int) -> None:
    writer = confluent_kafka.Producer({"bootstrap.servers": kafka.bootstrap})
    for number in range(count):
        writer.produce(topic, b"%d" % number, partition=0)
    assert writer.flush(30) == 0


def open_transaction(kafka: KafkaUnderTest, topic: str, transactional_id: str) -> confluent_kafka.Producer:
    writer = confluent_kafka.Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": transactional_id})
    writer.init_transactions(30)
    writer.begin_transaction()
    writer.produce(topic, b"open", partition=0)
    assert writer.flush(30) == 0
    return writer


def test_topics_are_created_described_and_deleted(admin: Admin, target: Target, name: str) -> None:
    """Two topics of one shape, with their partitions, replicas and settings; gone after the deletion."""
    names = (f"{name}-a", f"{name}-b")

    admin.create_topics(*names, partitions=3, replication=1, config={"retention.ms": "12345"})

    # A broker learns from the controller what was created or deleted, some milliseconds after the answer.
    wait_until(lambda: set(names) <= set(admin.list_topics()), "the topics are listed")
    described = admin.describe_topics(*names)
    assert [partition.partition for partition in described[names[0]].partitions] == [0, 1, 2]
    assert described[names[0]].partitions[0].replicas == described[names[0]].partitions[0].in_sync == (0,)
    topic_ids = {described[name].topic_id for name in names}
    assert len(topic_ids - {None}) == (2 if target.has_topic_ids else 0)
    assert admin.describe_configs("topic", names[0], ["retention.ms"])["retention.ms"].value == "12345"

    admin.delete_topics(*names)

    wait_until(lambda: not set(names) & set(admin.list_topics()), "the topics are gone")
    with pytest.raises(UnknownTopic, match=names[0]):
        admin.describe_topics(names[0])


def test_a_topic_that_is_there_cannot_be_created_again(admin: Admin, new_topic: NewTopic) -> None:
    """The code says why."""
    topic = new_topic()

    with pytest.raises(KafkaError, match=topic) as caught:
        admin.create_topics(topic)

    assert caught.value.code == ErrorCode.topic_already_exists


def test_a_topic_that_is_not_there_cannot_be_deleted(admin: Admin, name: str) -> None:
    """UnknownTopic, after a moment for topics that are only just being created."""
    with pytest.raises(UnknownTopic, match=name):
        admin.delete_topics(name)


def test_a_topic_gets_more_partitions(admin: Admin, new_topic: NewTopic) -> None:
    """Five in all, where there was one; fewer is refused."""
    topic = new_topic()

    admin.create_partitions(topic, 5)

    wait_until(lambda: len(admin.describe_topics(topic)[topic].partitions) == 5, "there are five partitions")
    with pytest.raises(KafkaError) as caught:
        admin.create_partitions(topic, 2)
    assert caught.value.code == ErrorCode.invalid_partitions


def test_settings_are_changed_one_by_one(admin: Admin, new_topic: NewTopic) -> None:
    """What is not named stays; None goes back to the default."""
    topic = new_topic(config={"retention.ms": "1000", "max.message.bytes": "2000"})

    admin.alter_configs("topic", topic, {"retention.ms": None, "cleanup.policy": "compact"})

    def is_compacted() -> bool:
        return admin.describe_configs("topic", topic)["cleanup.policy"].value == "compact"

    wait_until(is_compacted, "the broker has heard of it from the controller")
    settings = admin.describe_configs("topic", topic)
    assert settings["cleanup.policy"].source == "topic"
    assert settings["max.message.bytes"].value == "2000"
    assert settings["retention.ms"].is_default


def test_a_brokers_settings_are_described(admin: Admin) -> None:
    """Asked of that very broker."""
    settings = admin.describe_configs("broker", "0")

    assert settings["auto.create.topics.enable"].value == "false"
    assert settings["log.dirs"].is_read_only


def test_records_are_deleted_up_to_an_offset(admin: Admin, kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
    """The log begins there then, and nothing else moves."""
    topic = new_topic()
    write(kafka, topic, 10)

    assert admin.delete_records({(topic, 0): 4}) == {(topic, 0): 4}

    assert admin.list_offsets({(topic, 0): "earliest"})[TopicPartition(topic, 0)].offset == 4
    assert admin.list_offsets({(topic, 0): "latest"})[TopicPartition(topic, 0)].offset == 10


def test_offsets_of_a_group_are_set_read_and_deleted(admin: Admin, new_topic: NewTopic, name: str) -> None:
    """A group without members, from its first commit to its end."""
    topic = new_topic(partitions=3)

    admin.commit_offsets(name, {(topic, 0): 5, (topic, 2): CommittedOffset(7, "note", 3)})

    everything = {
        TopicPartition(topic, 0): CommittedOffset(5),
        TopicPartition(topic, 2): CommittedOffset(7, "note", 3),
    }
    assert admin.committed_offsets(name) == everything
    assert admin.committed_offsets(name, [(topic, 1), (topic, 2)]) == {(topic, 2): everything[TopicPartition(topic, 2)]}
    assert name in [listed.group for listed in admin.list_groups()]
    assert admin.describe_groups(name)[name].state == "Empty"

    admin.delete_offsets(name, [(topic, 0)])
    assert list(admin.committed_offsets(name)) == [(topic, 2)]

    admin.delete_groups(name)
    assert admin.committed_offsets(name) == {}
    assert name not in [listed.group for listed in admin.list_groups()]


def test_a_group_with_members_is_described_and_protected(
    admin: Admin, kafka: KafkaUnderTest, new_topic: NewTopic, name: str
) -> None:
    """Its members with their partitions; offsets from outside and deletion are refused while they are there."""
    topic = new_topic(partitions=2)
    consumer = confluent_kafka.Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": name, "client.id": "reader"})
    consumer.subscribe([topic])
    deadline = time.monotonic() + 30
    while not consumer.assignment():
        assert time.monotonic() < deadline, "the group did not form"
        consumer.poll(0.1)

    described = admin.describe_groups(name)[name]

    assert (described.state, described.protocol_type) == ("Stable", "consumer")
    [member] = described.members
    assert member.client_id == "reader"
    assert sorted(member.assignment) == [(topic, 0), (topic, 1)]
    with pytest.raises(KafkaError) as caught:
        admin.delete_groups(name)
    assert caught.value.code == ErrorCode.non_empty_group
    with pytest.raises(KafkaError) as caught:
        admin.commit_offsets(name, {(topic, 0): 1})
    assert caught.value.code == ErrorCode.unknown_member_id
    consumer.close()


def test_a_group_that_is_not_there_is_dead(admin: Admin, name: str) -> None:
    """As Kafka has it: no error, and no members."""
    described = admin.describe_groups(name)[name]

    assert (described.state, described.members) == ("Dead", ())


def test_stable_offsets_wait_for_the_transaction_that_holds_them(
    admin: Admin, kafka: KafkaUnderTest, new_topic: NewTopic, name: str
) -> None:
    """While a transaction holds new offsets of the group, only an unstable read answers, with the old ones."""
    topic = new_topic()
    admin.commit_offsets(name, {(topic, 0): 1})
    writer = open_transaction(kafka, topic, name)
    consumer = confluent_kafka.Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": name})
    offsets = [confluent_kafka.TopicPartition(topic, 0, 2)]
    writer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), 30)
    with Admin({"bootstrap.servers": kafka.bootstrap, "default.api.timeout.ms": 500}) as hasty:
        with pytest.raises(KafkaError) as caught:
            hasty.committed_offsets(name, [(topic, 0)])
        assert caught.value.code == ErrorCode.unstable_offset_commit
        assert hasty.committed_offsets(name, [(topic, 0)], require_stable=False) == {(topic, 0): CommittedOffset(1)}

    writer.commit_transaction(30)

    assert admin.committed_offsets(name, [(topic, 0)])[TopicPartition(topic, 0)].offset == 2
    consumer.close()


def test_transactions_are_listed_and_described(
    admin: Admin, kafka: KafkaUnderTest, target: Target, new_topic: NewTopic, name: str
) -> None:
    """While one is open its partitions and start are told; afterwards there is no start time."""
    if target.is_refused(admin.list_transactions):
        return
    topic = new_topic()
    started_ms = time.time() * 1000
    writer = open_transaction(kafka, topic, name)

    described = admin.describe_transactions(name)[name]
    assert (described.state, described.partitions, described.timeout_ms) == ("Ongoing", ((topic, 0),), 60_000)
    assert described.start_time_ms is not None
    assert abs(described.start_time_ms - started_ms) < 60_000
    [listed] = [listed for listed in admin.list_transactions(states=["Ongoing"]) if listed.transactional_id == name]
    assert listed.producer_id == described.producer_id

    writer.commit_transaction(30)
    deadline = time.monotonic() + 30
    while admin.describe_transactions(name)[name].state != "CompleteCommit":
        assert time.monotonic() < deadline, "the transaction did not complete"
    assert admin.describe_transactions(name)[name].partitions == ()
    assert name not in [listed.transactional_id for listed in admin.list_transactions(states=["Ongoing"])]


def test_a_transactional_id_before_its_first_transaction_is_described(
    admin: Admin, kafka: KafkaUnderTest, target: Target, name: str
) -> None:
    """The state is Empty and the start time is None, which brokers send as -1."""
    writer = confluent_kafka.Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": name})
    writer.init_transactions(30)
    if target.is_refused(lambda: admin.describe_transactions(name)):
        return

    described = admin.describe_transactions(name)[name]

    assert (described.state, described.start_time_ms, described.partitions) == ("Empty", None, ())


def test_a_transactional_id_that_nobody_used_is_an_error(admin: Admin, target: Target, name: str) -> None:
    """The coordinator knows it not."""
    if target.is_refused(lambda: admin.describe_transactions(name)):
        return
    with pytest.raises(KafkaError, match=name) as caught:
        admin.describe_transactions(name)

    assert caught.value.code == ErrorCode.transactional_id_not_found


def test_producers_are_described_with_their_sequence_and_open_transaction(
    admin: Admin, kafka: KafkaUnderTest, target: Target, new_topic: NewTopic, name: str
) -> None:
    """What a writer needs that takes over: id, epoch, last sequence, start of the transaction."""
    topic = new_topic()
    if target.is_refused(lambda: admin.describe_producers(topic, 0)):
        return
    write(kafka, topic, 3)
    writer = open_transaction(kafka, topic, name)
    writer.produce(topic, b"second", partition=0)
    assert writer.flush(30) == 0

    [state] = admin.describe_producers(topic, 0)

    assert (state.last_sequence, state.transaction_start_offset) == (1, 3)
    assert state.producer_id == admin.describe_transactions(name)[name].producer_id
    assert state.producer_epoch == admin.describe_transactions(name)[name].producer_epoch
    writer.commit_transaction(30)
    deadline = time.monotonic() + 30
    while admin.describe_producers(topic, 0)[0].transaction_start_offset is not None:
        assert time.monotonic() < deadline, "the transaction did not end in the partition"


def test_a_hanging_transaction_is_ended_in_its_partition(
    admin: Admin, kafka: KafkaUnderTest, target: Target, new_topic: NewTopic, name: str
) -> None:
    """After the abort marker the last stable offset moves on."""
    topic = new_topic()
    if target.is_refused(lambda: admin.describe_producers(topic, 0)):
        return
    writer = open_transaction(kafka, topic, name)
    [state] = admin.describe_producers(topic, 0)
    partition = TopicPartition(topic, 0)
    assert admin.list_offsets({partition: "latest"})[partition].offset == 0

    admin.abort_transaction(
        topic,
        0,
        producer_id=state.producer_id,
        producer_epoch=state.producer_epoch,
        coordinator_epoch=max(state.coordinator_epoch, 0),
    )

    assert admin.list_offsets({partition: "latest"})[partition].offset == 2
    assert admin.describe_producers(topic, 0)[0].transaction_start_offset is None
    writer.abort_transaction(30)


def test_the_cluster_is_described(admin: Admin, kafka: KafkaUnderTest, target: Target) -> None:
    """Its brokers, its id, and the transaction protocol it has agreed on."""
    described = admin.describe_cluster()

    assert [f"{broker.host}:{broker.port}" for broker in described.brokers] == [kafka.bootstrap]
    assert described.cluster_id
    assert admin.features().transaction_protocol == target.transaction_protocol
    assert (admin.features().epoch >= 0) == target.has_features


def test_groups_and_transactions_are_gathered_from_all_brokers(
    kafka_cluster: ApacheKafka, target: Target, new_topic: NewTopic, name: str
) -> None:
    """With three brokers, each group and id is found though only one of them coordinates it."""
    topic = new_topic(partitions=3, replication=3)
    with Admin({"bootstrap.servers": kafka_cluster.bootstrap}) as admin:
        groups = {f"{name}-{number}" for number in range(6)}
        for group in groups:
            admin.commit_offsets(group, {(topic, 0): 1})
        assert groups <= {listed.group for listed in admin.list_groups()}
        assert len(admin.describe_cluster().brokers) == 3
        if target.is_refused(admin.list_transactions):
            return
        writers = [open_transaction(kafka_cluster, topic, f"{name}-{number}") for number in range(6)]

        assert groups <= {listed.transactional_id for listed in admin.list_transactions(states=["Ongoing"])}
        assert len(admin.describe_producers(topic, 0)) == 6
        for writer in writers:
            writer.abort_transaction(30)
