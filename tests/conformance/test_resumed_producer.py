"""A producer that goes on under the identity another one has left: the next process of the same run."""

from __future__ import annotations

import pytest
from observer import values_of
from targets import KafkaUnderTest, NewTopic

from semel.client.ownership import ProducerIdentity
from semel.client.producer import Producer
from semel.errors import Fenced, TransactionAborted


def write(kafka: KafkaUnderTest, topic: str, value: bytes, resumed: ProducerIdentity | None = None) -> Producer:
    producer = Producer(bootstrap_servers=kafka.bootstrap, transactional_id=topic, resumed=resumed)
    try:
        again(producer, topic, value)
    except BaseException:
        producer.cluster.close()
        raise
    return producer


def again(producer: Producer, topic: str, value: bytes) -> None:
    with producer.transaction():
        producer.send(topic, value)


def test_processes_that_take_turns_go_on_for_each_other(kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
    topic = new_topic(1)
    left = None
    for turn in range(4):
        producer = write(kafka, topic, b"%d" % turn, resumed=left)
        left = producer.identity
        producer.close()
    assert sorted(values_of(kafka.bootstrap, topic)) == [b"0", b"1", b"2", b"3"]


def test_who_was_left_behind_is_fenced(kafka: KafkaUnderTest, new_topic: NewTopic) -> None:
    topic = new_topic(1)
    first = write(kafka, topic, b"first")
    second = write(kafka, topic, b"second", resumed=first.identity)
    with pytest.raises((Fenced, TransactionAborted)):
        again(first, topic, b"too late")
    first.cluster.close()
    second.close()
    assert sorted(values_of(kafka.bootstrap, topic)) == [b"first", b"second"]


@pytest.mark.parametrize("is_open", [False, True], ids=["idle", "in a transaction"])
def test_a_new_owner_is_not_disturbed(kafka: KafkaUnderTest, new_topic: NewTopic, is_open: bool) -> None:
    """Whoever was started for itself in between has the id, also while it is in the midst of a transaction."""
    topic = new_topic(1)
    old = write(kafka, topic, b"old")
    new = Producer(bootstrap_servers=kafka.bootstrap, transactional_id=topic)
    new.begin()
    new.send(topic, b"new")
    new.flush()
    if not is_open:
        new.commit()
    with pytest.raises(Fenced):
        write(kafka, topic, b"zombie", resumed=old.identity)
    if is_open:
        new.commit()
    new.close()
    old.cluster.close()
    assert sorted(values_of(kafka.bootstrap, topic)) == [b"new", b"old"]
