"""The Java peer itself: what it writes it reads back, so that other tests may rely on it."""

from __future__ import annotations

import uuid

import pytest
from aiokafka.partitioner import DefaultPartitioner
from java_peer import Compression, End, JavaPeer, PeerFailed, PeerRecord
from targets import KafkaUnderTest, NewTopic

from semel.testing.apache_kafka import ApacheKafka

RECORDS = [
    PeerRecord(
        key=b"key", value=b"value" * 100, headers=(("a", b"1"), ("a", None), ("\u00e9", b"")), timestamp_ms=1_000
    ),
    PeerRecord(key=None, value=None, timestamp_ms=0),
    PeerRecord(key=b"", value=b"", timestamp_ms=2_000),
]
CODECS: tuple[Compression, ...] = ("none", "gzip", "snappy", "lz4", "zstd")


def contents(records: list[PeerRecord]) -> list[tuple[object, ...]]:
    return [(record.key, record.value, record.headers, record.timestamp_ms) for record in records]


@pytest.mark.parametrize("compression", CODECS)
def test_peer_consumes_what_it_produced(
    compression: Compression, kafka: KafkaUnderTest, new_topic: NewTopic, java_peer: JavaPeer
) -> None:
    """Keys, values, headers, timestamps and offsets come back as sent, with each compression."""
    topic = new_topic()
    positions = java_peer.produce(kafka.bootstrap, topic, RECORDS, compression=compression)
    consumed = java_peer.consume(kafka.bootstrap, topic)
    assert contents(consumed) == contents(RECORDS)
    assert [(record.partition, record.offset) for record in consumed] == positions == [(0, 0), (0, 1), (0, 2)]


def test_peer_honours_isolation(kafka: KafkaUnderTest, new_topic: NewTopic, java_peer: JavaPeer) -> None:
    """Committed records are read; aborted ones and those of an open transaction only by read_uncommitted."""
    topic = new_topic(partitions=2)
    transactions: list[tuple[bytes, End]] = [(b"committed", "commit"), (b"aborted", "abort"), (b"open", "leave open")]
    for value, end in transactions:
        records = [PeerRecord(value=value, partition=partition) for partition in (0, 1)]
        java_peer.produce(kafka.bootstrap, topic, records, transactional_id=f"peer-{uuid.uuid4().hex}", end=end)
    committed = java_peer.consume(kafka.bootstrap, topic)
    everything = java_peer.consume(kafka.bootstrap, topic, isolation="read_uncommitted")
    assert sorted((record.partition, record.value) for record in committed) == [(0, b"committed"), (1, b"committed")]
    assert [record.value for record in everything if record.partition == 1] == [b"committed", b"aborted", b"open"]


def test_topic_can_be_created_on_the_cluster(
    kafka_cluster: ApacheKafka, new_topic: NewTopic, java_peer: JavaPeer
) -> None:
    """`new_topic` goes to the cluster in a test that uses it, with replicas on all three nodes."""
    topic = new_topic(partitions=3, replication=3, config={"min.insync.replicas": "2"})
    records = [PeerRecord(value=b"%d" % partition, partition=partition) for partition in range(3)]
    java_peer.produce(kafka_cluster.bootstrap, topic, records)
    consumed = java_peer.consume(kafka_cluster.bootstrap, topic)
    assert sorted(record.value or b"" for record in consumed) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("compression", CODECS)
def test_peer_parses_the_batch_it_built(compression: Compression, java_peer: JavaPeer) -> None:
    """Batches are made and read offline, with the producer's fields."""
    data = java_peer.build_batch(
        RECORDS,
        compression=compression,
        base_offset=40,
        producer_id=7,
        producer_epoch=3,
        base_sequence=11,
        transactional=True,
    )
    (batch,) = java_peer.parse_batches(data)
    assert contents(batch.records) == contents(RECORDS)
    assert [(record.offset, record.sequence) for record in batch.records] == [(40, 11), (41, 12), (42, 13)]
    assert (batch.producer_id, batch.producer_epoch, batch.base_sequence, batch.last_offset) == (7, 3, 11, 42)
    assert (batch.compression, batch.transactional, batch.control) == (compression, True, False)


def test_peer_builds_end_markers(java_peer: JavaPeer) -> None:
    """Commit and abort markers are control batches whose keys differ in the type."""
    data = java_peer.build_end_marker("COMMIT", producer_id=7, producer_epoch=3, coordinator_epoch=5)
    data += java_peer.build_end_marker("ABORT", producer_id=7, producer_epoch=3, coordinator_epoch=5)
    commit, abort = java_peer.parse_batches(data)
    assert commit.control
    assert abort.control
    assert commit.records[0].key == b"\0\0\0\1"
    assert abort.records[0].key == b"\0\0\0\0"
    assert commit.records[0].value == b"\0\0\0\0\0\5"


def test_peer_refuses_corrupt_batches_and_goes_on(java_peer: JavaPeer) -> None:
    """A wrong checksum is an error of that command alone."""
    data = java_peer.build_batch(RECORDS)
    with pytest.raises(PeerFailed, match="corrupt"):
        java_peer.parse_batches(data[:-1] + bytes([data[-1] ^ 1]))
    assert len(java_peer.parse_batches(data)) == 1


def test_peer_partitions_as_another_client_does(java_peer: JavaPeer) -> None:
    """The peer's partitioner agrees with aiokafka's for keys of each length modulo four."""
    keys = [bytes(range(200, 200 + length)) for length in range(9)]
    everyone = list(range(1000))
    expected = [DefaultPartitioner()(key, everyone, everyone) for key in keys]
    assert [java_peer.partition_for(key, len(everyone)) for key in keys] == expected
