"""Idempotent producing, at the level of raw requests and through Semel's producer."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from observer import records_of, values_of
from targets import KafkaUnderTest, NewTopic

from semel.client.cluster import Cluster
from semel.client.producer import Producer
from semel.client.settings import parse_config
from semel.errors import KafkaError
from semel.records import encode_table, stamp
from semel.testing.proxy import Cut, Direction, KafkaProxy, Passage
from semel.wire import Api, ErrorCode


class RawProducer:
    """Sends single stamped batches, so that a test can repeat, skip and reorder them."""

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self.cluster = cluster
        self.topic = topic
        bootstrap = ",".join(f"{host}:{port}" for host, port in cluster.config.bootstrap)
        with Producer(bootstrap_servers=bootstrap) as producer:
            self.producer_id, self.producer_epoch = producer.identity

    def produce(self, value: bytes, sequence: int, *, epoch: int | None = None) -> Any:
        (batch,) = encode_table(pa.table({"value": [value]}), default_timestamp_ms=1)
        data = bytearray(batch.data)
        stamp(
            data,
            producer_id=self.producer_id,
            producer_epoch=self.producer_epoch if epoch is None else epoch,
            base_sequence=sequence,
            transactional=False,
        )
        response = self.cluster.call(
            self.cluster.leader(self.topic, 0).node,
            Api.PRODUCE,
            highest=11,
            transactional_id=None,
            acks=-1,
            timeout=10_000,
            topic_data=[{"name": self.topic, "partition_data": [{"index": 0, "records": memoryview(data)}]}],
        )
        return response.responses[0].partition_responses[0]


@pytest.fixture
def cluster(kafka: KafkaUnderTest):
    with Cluster(parse_config({"bootstrap.servers": kafka.bootstrap}).client) as cluster:
        yield cluster


def test_a_repeat_is_stored_once_and_answered_with_its_first_offset(
    kafka: KafkaUnderTest, cluster: Cluster, new_topic: NewTopic
) -> None:
    """A1, A2: each of the last five batches may be repeated, in any order; an older one is refused like a gap."""
    topic = new_topic()
    raw = RawProducer(cluster, topic)
    offsets = [raw.produce(b"%d" % number, number).base_offset for number in range(7)]
    assert offsets == list(range(7))
    for number in (6, 2, 4, 3, 5):
        again = raw.produce(b"%d" % number, number)
        assert (again.error_code, again.base_offset) == (ErrorCode.none, number)
    assert raw.produce(b"1", 1).error_code in (
        ErrorCode.out_of_order_sequence_number,
        ErrorCode.duplicate_sequence_number,
    )
    assert values_of(kafka.bootstrap, topic) == [b"%d" % number for number in range(7)]


def test_a_gap_is_refused_and_nothing_is_stored(kafka: KafkaUnderTest, cluster: Cluster, new_topic: NewTopic) -> None:
    """A3: sequence 2 after sequence 0."""
    topic = new_topic()
    raw = RawProducer(cluster, topic)
    raw.produce(b"0", 0)
    assert raw.produce(b"2", 2).error_code == ErrorCode.out_of_order_sequence_number
    assert raw.produce(b"1", 1).error_code == ErrorCode.none
    assert values_of(kafka.bootstrap, topic) == [b"0", b"1"]


def test_a_higher_epoch_starts_at_zero_and_shuts_the_lower_one_out(
    kafka: KafkaUnderTest, cluster: Cluster, new_topic: NewTopic
) -> None:
    """A6: the epoch bump of KIP-360, seen by the leader."""
    topic = new_topic()
    raw = RawProducer(cluster, topic)
    raw.produce(b"old", 0)
    assert raw.produce(b"wrong start", 5, epoch=1).error_code == ErrorCode.out_of_order_sequence_number
    assert raw.produce(b"new", 0, epoch=1).error_code == ErrorCode.none
    assert raw.produce(b"zombie", 1, epoch=0).error_code == ErrorCode.invalid_producer_epoch
    assert values_of(kafka.bootstrap, topic) == [b"new", b"old"]


def test_a_new_producer_without_a_transactional_id_gets_a_new_producer_id(kafka: KafkaUnderTest) -> None:
    """A5: and with one it gets the same id and a higher epoch."""
    with Producer(bootstrap_servers=kafka.bootstrap) as one, Producer(bootstrap_servers=kafka.bootstrap) as other:
        assert one.identity.producer_id != other.identity.producer_id
    settings = {"bootstrap.servers": kafka.bootstrap, "transactional.id": f"id-{one.identity.producer_id}"}
    with Producer(settings) as first, Producer(settings) as second:
        assert second.identity.producer_id == first.identity.producer_id
        assert second.identity.producer_epoch > first.identity.producer_epoch


@pytest.mark.parametrize("cut", list(Cut), ids=lambda cut: f"cut {cut.value} the answer")
def test_lost_answers_lead_to_repeats_and_no_record_is_stored_twice(
    kafka: KafkaUnderTest, new_topic: NewTopic, cut: Cut
) -> None:
    """A1, A2: every third answer to a Produce is lost with five requests in flight; order and count hold."""
    topic = new_topic(partitions=2)
    answers = iter(range(1_000_000))

    def decide(passage: Passage) -> Cut | None:
        if passage.api_key == Api.PRODUCE and passage.direction is Direction.RESPONSE and next(answers) % 3 == 2:
            return cut
        return None

    values = [b"%06d" % number for number in range(20_000)]
    with KafkaProxy(kafka.bootstrap) as proxy:
        proxy.decide = decide
        with Producer(bootstrap_servers=proxy.bootstrap, batch_size=10_000, retry_backoff_ms=1) as producer:
            for partition in range(2):
                producer.send_table(topic, pa.table({"value": values}), partition=partition)
            producer.flush()
        assert sum(passage.api_key == Api.PRODUCE for passage in proxy.passages) > 40
    assert records_of(kafka.bootstrap, topic, 2) == {0: values, 1: values}


def test_after_a_refused_batch_the_producer_bumps_its_epoch_and_goes_on(
    kafka: KafkaUnderTest, new_topic: NewTopic
) -> None:
    """A6 (KIP-360): the refused batch is told and left out; what was in flight behind it is never reordered."""
    topic = new_topic(config={"max.message.bytes": "20000"})
    with Producer(bootstrap_servers=kafka.bootstrap, max_request_size=1_000_000) as producer:
        epoch = producer.identity.producer_epoch
        producer.send_table(topic, pa.table({"value": [b"before"]}))
        producer.flush()
        producer.send_table(topic, pa.table({"value": [b"x" * 50_000]}))
        with pytest.raises(KafkaError, match=r"max\.message\.bytes"):
            producer.flush()
        producer.send_table(topic, pa.table({"value": [b"after"]}))
        producer.flush()
        assert producer.identity.producer_epoch == epoch + 1
    assert records_of(kafka.bootstrap, topic, 1) == {0: [b"before", b"after"]}
