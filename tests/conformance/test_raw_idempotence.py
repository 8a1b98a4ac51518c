"""Idempotent producing, request by request: what a partition remembers of a producer and what it refuses."""

from __future__ import annotations

from urllib.request import urlopen

import pytest
from embedded_kafka import EmbeddedKafka
from raw import AGES, RawClient, connect, wait_until
from raw_producer import NOBODY, Identity, RawProducer, init_producer_id
from raw_reading import end_offset, everything_in
from targets import KafkaUnderTest, NewTopic, Target

from semel.testing.exchange import create_topic
from semel.wire import Api, ErrorCode

SEQUENCE_MAX = 2**31 - 1

ages = pytest.mark.parametrize("age", AGES)


def values_in(raw: RawClient, topic: str, partition: int = 0) -> list[bytes | None]:
    return [record.value for record in everything_in(raw, topic, partition)]


@ages
def test_each_of_the_last_five_batches_is_answered_with_its_first_offset(
    raw: RawClient, new_topic: NewTopic, age: str
) -> None:
    """A1, A2: repeats of the last and of the fifth last batch, in any order, and the log does not grow."""
    topic = new_topic()
    producer = RawProducer(raw, age=age).begin()
    offsets = [producer.produce(topic, b"%d" % n, b"again").base_offset for n in range(7)]
    assert offsets == [0, 2, 4, 6, 8, 10, 12]
    for number in (6, 2, 5, 3, 4):
        again = producer.produce(topic, b"%d" % number, b"again", sequence=2 * number)
        assert (again.error_code, again.base_offset) == (ErrorCode.none, 2 * number)
    assert end_offset(raw, topic) == 14


@ages
def test_the_sixth_last_batch_is_out_of_order(raw: RawClient, new_topic: NewTopic, age: str) -> None:
    """A2: outside of the window of five a repeat cannot be told from a gap, and is not stored."""
    topic = new_topic()
    producer = RawProducer(raw, age=age).begin()
    for number in range(6):
        producer.produce(topic, b"%d" % number)
    assert producer.produce(topic, b"0", sequence=0).error_code is ErrorCode.out_of_order_sequence_number
    assert end_offset(raw, topic) == 6


def test_a_batch_that_overlaps_a_stored_one_is_no_repeat(raw: RawClient, new_topic: NewTopic) -> None:
    """A1: the same first sequence with another count is another batch, and out of order."""
    topic = new_topic()
    producer = RawProducer(raw).begin()
    producer.produce(topic, b"0", b"1")
    assert producer.produce(topic, b"0", sequence=0).error_code is ErrorCode.out_of_order_sequence_number
    assert producer.produce(topic, b"0", b"1", b"2", sequence=0).error_code is ErrorCode.out_of_order_sequence_number
    assert producer.produce(topic, b"1", b"2", sequence=1).error_code is ErrorCode.out_of_order_sequence_number
    assert end_offset(raw, topic) == 2


def test_five_batches_in_flight_keep_their_order(raw: RawClient, new_topic: NewTopic) -> None:
    """A2: sent without waiting and then all repeated, they are stored once and in the order of their sequences."""
    topic = new_topic()
    producer = RawProducer(raw).begin()
    for number in (0, 1, 2, 3, 4, 0, 1, 2, 3, 4):
        batch = producer.batch([b"%d" % number], sequence=number, identity=producer.identity)
        raw.send(
            Api.PRODUCE,
            producer.version(Api.PRODUCE),
            transactional_id=None,
            acks=-1,
            timeout=10_000,
            topic_data=[{"name": topic, "partition_data": [{"index": 0, "records": batch}]}],
        )
    answers = [raw.receive().responses[0].partition_responses[0] for _ in range(10)]
    assert [(one.error_code, one.base_offset) for one in answers] == [(ErrorCode.none, n) for n in [*range(5)] * 2]
    assert values_in(raw, topic) == [b"%d" % number for number in range(5)]


@ages
def test_a_gap_stores_nothing_and_the_missing_batch_still_fits(raw: RawClient, new_topic: NewTopic, age: str) -> None:
    """A3: sequence 2 after sequence 0."""
    topic = new_topic()
    producer = RawProducer(raw, age=age).begin()
    producer.produce(topic, b"0")
    refused = producer.produce(topic, b"2", sequence=2)
    assert (refused.error_code, refused.base_offset) == (ErrorCode.out_of_order_sequence_number, -1)
    assert end_offset(raw, topic) == 1
    assert producer.produce(topic, b"1", sequence=1).base_offset == 1
    assert producer.produce(topic, b"2", sequence=2).base_offset == 2
    assert values_in(raw, topic) == [b"0", b"1", b"2"]


def test_a_gap_in_one_partition_does_not_hold_up_the_other(raw: RawClient, new_topic: NewTopic) -> None:
    """A3: one request with two partitions, each judged by itself."""
    topic = new_topic(partitions=2)
    producer = RawProducer(raw).begin()
    producer.produce(topic, b"0", partition=0)
    batches = {0: 5, 1: 0}
    answer = raw.call(
        Api.PRODUCE,
        producer.version(Api.PRODUCE),
        transactional_id=None,
        acks=-1,
        timeout=10_000,
        topic_data=[
            {
                "name": topic,
                "partition_data": [
                    {"index": index, "records": producer.batch([b"x"], sequence=first, identity=producer.identity)}
                    for index, first in batches.items()
                ],
            }
        ],
    )
    codes = {one.index: one.error_code for one in answer.responses[0].partition_responses}
    assert codes == {0: ErrorCode.out_of_order_sequence_number, 1: ErrorCode.none}
    assert [end_offset(raw, topic, index) for index in (0, 1)] == [1, 1]


def test_a_producer_that_the_partition_does_not_know_may_begin_anywhere(raw: RawClient, new_topic: NewTopic) -> None:
    """A3: what it sent before may have been deleted with its records; from then on its sequence counts."""
    topic = new_topic()
    producer = RawProducer(raw).begin()
    assert producer.produce(topic, b"7", sequence=7).error_code is ErrorCode.none
    assert producer.produce(topic, b"9", sequence=9).error_code is ErrorCode.out_of_order_sequence_number
    assert producer.produce(topic, b"8", sequence=8).error_code is ErrorCode.none
    assert values_in(raw, topic) == [b"7", b"8"]


@ages
def test_without_a_transactional_id_every_producer_is_a_new_one(raw: RawClient, age: str) -> None:
    """A5: each answer has an id that was never given before, with epoch 0."""
    answers = [init_producer_id(raw, None, age=age) for _ in range(3)]
    assert len({answer.producer_id for answer in answers}) == 3
    assert {answer.producer_epoch for answer in answers} == {0}


@ages
def test_a_transactional_id_keeps_its_producer_id_and_raises_the_epoch(
    raw: RawClient, new_topic: NewTopic, age: str
) -> None:
    """A5: the next incarnation has the same id and the next epoch; another name has another id."""
    name = new_topic()
    answers = [init_producer_id(raw, name, age=age) for _ in range(3)]
    assert {answer.producer_id for answer in answers} == {answers[0].producer_id}
    assert [answer.producer_epoch for answer in answers] == [0, 1, 2]
    assert init_producer_id(raw, f"{name}-other", age=age).producer_id != answers[0].producer_id


def test_an_empty_transactional_id_is_an_invalid_request(raw: RawClient) -> None:
    """A5: an empty name is no name."""
    version = raw.version(Api.INIT_PRODUCER_ID)
    answer = raw.call(
        Api.INIT_PRODUCER_ID, version, transactional_id="", transaction_timeout=1000, producer_id=-1, producer_epoch=-1
    )
    assert answer.error_code is ErrorCode.invalid_request


@pytest.mark.parametrize("identity", [Identity(1, -1), Identity(-1, 1)], ids=["no epoch", "no id"])
def test_an_id_without_its_epoch_is_an_invalid_request(raw: RawClient, new_topic: NewTopic, identity: Identity) -> None:
    """A6 (KIP-360): both or neither."""
    name = new_topic()
    init_producer_id(raw, name)
    answer = init_producer_id(raw, name, version=raw.version(Api.INIT_PRODUCER_ID, lowest=3), identity=identity)
    assert answer.error_code is ErrorCode.invalid_request


def test_a_bump_without_a_transactional_id_gives_a_new_id(raw: RawClient) -> None:
    """A6 (KIP-360): the broker keeps no state of a nameless producer that it could raise."""
    first = init_producer_id(raw, None)
    version = raw.version(Api.INIT_PRODUCER_ID, lowest=3)
    bumped = init_producer_id(raw, None, version=version, identity=Identity(first.producer_id, first.producer_epoch))
    assert (bumped.error_code, bumped.producer_epoch) == (ErrorCode.none, 0)
    assert bumped.producer_id != first.producer_id


@pytest.mark.parametrize("age", ["oldest", "newest"])
def test_a_bumped_epoch_starts_at_zero_and_shuts_the_old_one_out(raw: RawClient, new_topic: NewTopic, age: str) -> None:
    """A6 (KIP-360): a repeated bump gives the same epoch, so that a lost answer costs nothing."""
    topic = new_topic()
    version = raw.version(Api.INIT_PRODUCER_ID, age, lowest=3)
    producer = RawProducer(raw, topic).begin()
    producer.write(topic, b"old")
    producer.abort()
    old = producer.identity
    for bumped in [init_producer_id(raw, topic, version=version, identity=old) for _ in range(2)]:
        assert (bumped.error_code, bumped.producer_id, bumped.producer_epoch) == (
            ErrorCode.none,
            old.producer_id,
            old.producer_epoch + 1,
        )
    producer.become(Identity(old.producer_id, old.producer_epoch + 1))
    assert producer.add_partitions((topic, 0)) is ErrorCode.none
    assert producer.produce(topic, b"gap", sequence=1).error_code is ErrorCode.out_of_order_sequence_number
    assert producer.produce(topic, b"new").error_code is ErrorCode.none
    assert producer.produce(topic, b"z", sequence=1, identity=old).error_code is ErrorCode.invalid_producer_epoch
    producer.commit()
    assert [one.value for one in everything_in(raw, topic) if not one.is_control] == [b"old", b"new"]


@ages
def test_a_nameless_producers_higher_epoch_starts_at_zero(raw: RawClient, new_topic: NewTopic, age: str) -> None:
    """A6: the client raises it by itself; the partition takes it, and refuses the lower one from then on."""
    topic = new_topic()
    producer = RawProducer(raw, age=age).begin()
    old = producer.identity
    new = Identity(old.producer_id, old.producer_epoch + 1)
    producer.produce(topic, b"old")
    assert producer.produce(topic, b"x", sequence=1, identity=new).error_code is ErrorCode.out_of_order_sequence_number
    assert producer.produce(topic, b"new", sequence=0, identity=new).error_code is ErrorCode.none
    assert producer.produce(topic, b"x", sequence=1, identity=old).error_code is ErrorCode.invalid_producer_epoch
    # A repeat of what the old epoch has stored is no repeat any more: its batches are forgotten with it.
    assert producer.produce(topic, b"old", sequence=0, identity=old).error_code is ErrorCode.invalid_producer_epoch
    assert values_in(raw, topic) == [b"old", b"new"]


def test_sequences_wrap_after_the_largest_number(raw: RawClient, new_topic: NewTopic) -> None:
    """A6: after 2**31-1 comes 0, within a batch and between two, and repeats over the edge are known."""
    topic = new_topic()
    producer = RawProducer(raw).begin()
    assert producer.produce(topic, b"a", b"b", sequence=SEQUENCE_MAX - 2).error_code is ErrorCode.none
    assert producer.produce(topic, b"c", b"d", b"e", sequence=SEQUENCE_MAX).error_code is ErrorCode.none
    assert producer.produce(topic, b"x", sequence=3).error_code is ErrorCode.out_of_order_sequence_number
    assert producer.produce(topic, b"f", sequence=2).error_code is ErrorCode.none
    again = producer.produce(topic, b"c", b"d", b"e", sequence=SEQUENCE_MAX)
    assert (again.error_code, again.base_offset) == (ErrorCode.none, 2)
    assert values_in(raw, topic) == [b"a", b"b", b"c", b"d", b"e", b"f"]


def test_a_batch_that_ends_at_the_largest_number_is_followed_by_zero(raw: RawClient, new_topic: NewTopic) -> None:
    """A6: the edge falls between two batches."""
    topic = new_topic()
    producer = RawProducer(raw).begin()
    assert producer.produce(topic, b"a", sequence=SEQUENCE_MAX).error_code is ErrorCode.none
    assert producer.produce(topic, b"x", sequence=1).error_code is ErrorCode.out_of_order_sequence_number
    assert producer.produce(topic, b"b", sequence=0).error_code is ErrorCode.none
    assert values_in(raw, topic) == [b"a", b"b"]


def test_a_producer_id_without_a_sequence_is_refused(raw: RawClient, new_topic: NewTopic) -> None:
    """A1: without it no repeat could be told."""
    topic = new_topic()
    answer = RawProducer(raw).produce(topic, b"x", identity=Identity(7, 0), sequence=-1)
    assert answer.error_code is ErrorCode.invalid_record
    assert end_offset(raw, topic) == 0


@pytest.mark.needs("has_metrics_page")
def test_repeats_and_gaps_are_counted(target: Target) -> None:
    """A8: duplicates, out-of-order batches and fences are each a number on the page for Prometheus."""
    with target.start_own({}) as kafka, connect(kafka.bootstrap) as raw:
        assert isinstance(kafka, EmbeddedKafka)
        create_topic(kafka.bootstrap, "counted")
        producer = RawProducer(raw).begin()
        new = Identity(producer.identity.producer_id, producer.identity.producer_epoch + 1)
        producer.produce("counted", b"0")
        for _ in range(3):
            producer.produce("counted", b"0", sequence=0)
        for _ in range(2):
            producer.produce("counted", b"5", sequence=5)
        producer.produce("counted", b"new", sequence=0, identity=new)
        producer.produce("counted", b"old", sequence=1)
        with urlopen(f"http://127.0.0.1:{kafka.metrics_port}/metrics") as page:
            lines = page.read().decode().splitlines()
    numbers = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(numbers["semel_broker_duplicates_refused_total"]) == 3
    assert float(numbers["semel_broker_out_of_order_sequences_total"]) == 2
    assert float(numbers["semel_broker_fences_total"]) == 1


def test_what_a_client_sent_before_it_hung_up_is_stored(
    raw: RawClient, kafka: KafkaUnderTest, new_topic: NewTopic
) -> None:
    """A2: acks=0 and an immediate close. The broker stores every request that it received, in order (KAFKA-3703)."""
    topic = new_topic()
    values = [b"%d" % number for number in range(200)]
    with connect(kafka.bootstrap) as leaving:
        producer = RawProducer(leaving)
        for value in values:
            batch = producer.batch([value], sequence=-1, identity=NOBODY, transactional=False)
            leaving.send(
                Api.PRODUCE,
                producer.version(Api.PRODUCE),
                transactional_id=None,
                acks=0,
                timeout=10_000,
                topic_data=[{"name": topic, "partition_data": [{"index": 0, "records": batch}]}],
            )
    wait_until(lambda: end_offset(raw, topic) == len(values), "every record is stored")
    assert values_in(raw, topic) == values
