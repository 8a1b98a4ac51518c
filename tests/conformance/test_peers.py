"""Semel and four other clients read each other's records, with every compression and on every target.

The clients are confluent-kafka (librdkafka), kafka-python, aiokafka and Kafka's own Java client. Batches are compared
without a broker in `test_peer_batches.py`.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from java_peer import Compression, JavaPeer, PeerRecord
from observer import wait_until_settled
from peers import AioKafka, Confluent, Java, KafkaPython, Peer
from targets import KafkaUnderTest, NewTopic

from semel.client.fetcher import Fetcher
from semel.client.producer import Producer
from semel.records import iter_batches
from semel.testing.exchange import create_topic, exchange, parse_bootstrap
from semel.wire import Api, build, response_type_for

CODECS: tuple[Compression, ...] = ("none", "gzip", "snappy", "lz4", "zstd")
PEERS = ("confluent-kafka", "kafka-python", "aiokafka", "java")
PARTITIONS = 3
BASE_MS = 1_700_000_000_000
SEED = 20_240_607


def make_records(seed: int = SEED) -> list[PeerRecord]:
    """Records with all that a client can get wrong; each has a timestamp of its own, by which a test knows it again."""
    rng = random.Random(seed)
    text = b"the same words again and again " * 10_000
    values = [
        None,
        b"",
        b"small",
        text[: 32 * 1024],  # one block of snappy
        text[: 64 * 1024 + 1],  # one block of lz4 and a byte
        text[:300_000],
        rng.randbytes(32 * 1024 + 1),
        rng.randbytes(64 * 1024),
        rng.randbytes(200_000),
        *(rng.randbytes(rng.randrange(40)) for _ in range(150)),
    ]
    headers = [(), (("a", b"1"), ("a", b""), ("\u00e9\U0001f600", rng.randbytes(300))), (("none", None), ("", b"x"))]
    keys = [None, b"", *(rng.randbytes(length) for length in range(1, 30))]
    stamps = [BASE_MS + offset for offset in rng.sample(range(10**9), len(values) * 2)]
    records = [
        PeerRecord(value=value, key=keys[index % len(keys)], headers=headers[index % len(headers)])
        for index, value in enumerate(values * 2)
    ]
    rng.shuffle(records)
    # Large values follow each other here and there, so that batches hold small records before and after large ones.
    return [replace(record, timestamp_ms=stamp) for record, stamp in zip(records, stamps, strict=True)]


@pytest.fixture(scope="module")
def peers(java_peer: JavaPeer) -> dict[str, Peer]:
    everyone: list[Peer] = [Confluent(), KafkaPython(), AioKafka(), Java(java_peer)]
    return {peer.name: peer for peer in everyone}


@pytest.fixture(scope="module")
def records() -> list[PeerRecord]:
    print(f"seed {SEED}")
    return make_records()


@pytest.fixture(scope="module")
def partition_of_key(records: list[PeerRecord], java_peer: JavaPeer) -> dict[bytes, int]:
    """Where the Java client puts each key."""
    keys = {record.key for record in records if record.key is not None}
    return {key: java_peer.partition_for(key, PARTITIONS) for key in keys}


def read_with_semel(bootstrap: str, topic: str) -> list[PeerRecord]:
    with Fetcher({"bootstrap.servers": bootstrap}) as fetcher:
        fetcher.assign({(topic, partition): "earliest" for partition in range(PARTITIONS)})
        rows = [row for table in fetcher.read_until(fetcher.end_offsets()) for row in to_rows(table)]
    assert {row["topic"] for row in rows} == {topic}
    return [
        PeerRecord(
            key=row["key"],
            value=row["value"],
            headers=tuple((header["key"], header["value"]) for header in row["headers"]),
            timestamp_ms=row["timestamp"],
            partition=row["partition"],
            offset=row["offset"],
        )
        for row in rows
    ]


def to_rows(table: pa.Table) -> list[dict[str, Any]]:
    milliseconds = table.column("timestamp").cast(pa.int64())
    return table.set_column(table.column_names.index("timestamp"), "timestamp", milliseconds).to_pylist()


def to_table(records: Iterable[PeerRecord]) -> pa.Table:
    rows = list(records)
    header = pa.struct([("key", pa.string()), ("value", pa.binary())])
    return pa.table(
        {
            "key": pa.array([row.key for row in rows], pa.binary()),
            "value": pa.array([row.value for row in rows], pa.binary()),
            "timestamp": pa.array([row.timestamp_ms for row in rows], pa.timestamp("ms", "UTC")),
            "headers": pa.array([[{"key": k, "value": v} for k, v in row.headers] for row in rows], pa.list_(header)),
        }
    )


def stored_codecs(bootstrap: str, topic: str) -> set[str]:
    """The compressions of the batches with user records, as they lie in the broker's log."""
    request = build(
        Api.FETCH,
        4,
        replica_id=-1,
        max_wait=0,
        min_bytes=0,
        max_bytes=1 << 26,
        isolation_level=0,
        topics=[
            {
                "topic": topic,
                "partitions": [
                    {"partition": partition, "fetch_offset": 0, "partition_max_bytes": 1 << 24}
                    for partition in range(PARTITIONS)
                ],
            }
        ],
    )
    response: Any = exchange(parse_bootstrap(bootstrap)[0], request, response_type_for(request))
    batches = [batch for data in response.responses[0].partitions for batch, _ in iter_batches(data.records)]
    return {batch.compression for batch in batches if not batch.is_control}


def check_same(got: Sequence[PeerRecord], sent: Sequence[PeerRecord], partition_of_key: dict[bytes, int]) -> None:
    """All of `sent` once each, unchanged, in the right partitions, and in order within each of them."""
    number_of = {record.timestamp_ms or 0: number for number, record in enumerate(sent)}
    assert sorted(record.timestamp_ms or 0 for record in got) == sorted(number_of), "records are missing or extra"
    by_number = sorted(got, key=lambda record: number_of[record.timestamp_ms or 0])
    for there, here in zip(by_number, sent, strict=True):
        assert (there.key, there.value, there.headers) == (here.key, here.value, here.headers), here.timestamp_ms
    partitions = {record.key: record.partition for record in got if record.key is not None}
    assert partitions == partition_of_key
    for partition in range(PARTITIONS):
        # Clients read with one fetch or many; what counts is that offsets grow in the order of sending.
        of_partition = [record for record in by_number if record.partition == partition]
        offsets = [record.offset or 0 for record in of_partition]
        assert offsets == sorted(set(offsets))


@pytest.mark.parametrize("compression", CODECS)
@pytest.mark.parametrize("peer_name", PEERS)
def test_semel_reads_what_a_peer_wrote(
    peer_name: str,
    compression: Compression,
    kafka: KafkaUnderTest,
    new_topic: NewTopic,
    peers: dict[str, Peer],
    records: list[PeerRecord],
    partition_of_key: dict[bytes, int],
) -> None:
    """Keys, values, headers, timestamps, order and partitions arrive as the other client sent them."""
    peer, topic = peers[peer_name], new_topic(PARTITIONS)
    sent = [peer.writable(record) for record in records]
    peer.write(kafka.bootstrap, topic, sent, compression)
    assert compression in stored_codecs(kafka.bootstrap, topic)
    check_same(read_with_semel(kafka.bootstrap, topic), sent, partition_of_key)


@pytest.fixture(scope="module", params=CODECS)
def written_by_semel(request: pytest.FixtureRequest, kafka: KafkaUnderTest, records: list[PeerRecord]) -> str:
    """A topic with all records: by table and one by one, in transactions and not, and aborted ones between them."""
    compression: Compression = request.param
    topic = f"semel-{compression}-{uuid.uuid4().hex[:12]}"
    create_topic(kafka.bootstrap, topic, partitions=PARTITIONS)
    settings = {"bootstrap.servers": kafka.bootstrap, "compression.type": compression}
    quarter = len(records) // 4
    with Producer(settings) as producer:
        producer.send_table(topic, to_table(records[:quarter]))
        send_singly(producer, topic, records[quarter : 2 * quarter])
    with Producer(settings, transactional_id=f"{topic}-writer") as producer:
        producer.begin()
        producer.send_table(topic, to_table([replace(record, timestamp_ms=1) for record in records[:50]]))
        producer.flush()
        producer.abort()
        with producer.transaction():
            producer.send_table(topic, to_table(records[2 * quarter : 3 * quarter]))
        with producer.transaction():
            send_singly(producer, topic, records[3 * quarter :])
    wait_until_settled(kafka.bootstrap, topic, PARTITIONS)
    assert stored_codecs(kafka.bootstrap, topic) == {compression}
    return topic


def send_singly(producer: Producer, topic: str, records: Iterable[PeerRecord]) -> None:
    for record in records:
        producer.send(topic, record.value, key=record.key, headers=record.headers, timestamp_ms=record.timestamp_ms)


@pytest.mark.parametrize("peer_name", [*PEERS, "semel"])
def test_a_peer_reads_what_semel_wrote(
    peer_name: str,
    written_by_semel: str,
    kafka: KafkaUnderTest,
    peers: dict[str, Peer],
    records: list[PeerRecord],
    partition_of_key: dict[bytes, int],
) -> None:
    """Keys, values, headers, timestamps, order and partitions arrive as sent, and nothing of an aborted transaction."""
    if peer_name == "semel":
        got = read_with_semel(kafka.bootstrap, written_by_semel)
    else:
        got = peers[peer_name].read(kafka.bootstrap, written_by_semel)
    check_same(got, records, partition_of_key)
