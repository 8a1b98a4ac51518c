"""Two independent ways to read a broker after a chaos run: librdkafka's consumer, and single requests over a socket."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Mapping
from typing import Any

import confluent_kafka
from kio.schema.errors import ErrorCode

from semel.verify.chaos_ledger import TopicPartition, Violation
from semel.verify.simulated_network import make_request
from semel.verify.simulated_readers import visible_records
from semel.wire.api import Api
from semel.wire.messages import decode_response, encode_request, response_type_for

Records = dict[TopicPartition, list[tuple[int, str]]]
"""Offset and value of each visible record."""

_TIMEOUT_S = 20.0
_PATIENCE_S = 60.0
_FETCH_BYTES = 200_000
UNSTABLE = -2
_LATEST, _EARLIEST = -1, -2


def ask(bootstrap: str, api: Api, version: int, **fields: Any) -> Any:
    """One request and its answer, on a connection of its own. Raises OSError."""
    host, _, port = bootstrap.rpartition(":")
    request = make_request(api, version, fields)
    with socket.create_connection((host, int(port)), timeout=_TIMEOUT_S) as connection:
        connection.sendall(b"".join(encode_request(request, 1, "chaos")))
        size = int.from_bytes(_receive(connection, 4))
        return decode_response(response_type_for(request), _receive(connection, size))


def _receive(connection: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        piece = connection.recv(count - len(received))
        if not piece:
            raise ConnectionResetError("the broker closed the connection")
        received += piece
    return bytes(received)


def all_partitions(bootstrap: str) -> list[TopicPartition]:
    """Every partition that the broker has, those of internal topics too."""
    answer = ask(
        bootstrap,
        Api.METADATA,
        9,
        topics=None,
        allow_auto_topic_creation=False,
        include_cluster_authorized_operations=False,
        include_topic_authorized_operations=False,
    )
    return sorted((topic.name, one.partition_index) for topic in answer.topics for one in topic.partitions)


def ends(
    bootstrap: str, partitions: Iterable[TopicPartition], *, is_stable: bool, timestamp: int = _LATEST
) -> dict[TopicPartition, int]:
    """The log ends, or the last stable offsets; or where the logs begin."""
    topics: dict[str, list[dict[str, int]]] = {}
    for topic, index in partitions:
        topics.setdefault(topic, []).append(
            {"partition_index": index, "timestamp": timestamp, "current_leader_epoch": -1}
        )
    answer = ask(
        bootstrap,
        Api.LIST_OFFSETS,
        5,
        replica_id=-1,
        isolation_level=int(is_stable),
        topics=[{"name": topic, "partitions": ones} for topic, ones in topics.items()],
    )
    found: dict[TopicPartition, int] = {}
    for topic in answer.topics:
        for one in topic.partitions:
            if one.error_code is not ErrorCode.none:
                raise Violation(f"the end of {topic.name}-{one.partition_index} is not told: {one.error_code.name}")
            found[topic.name, one.partition_index] = one.offset
    return found


def read_by_requests(bootstrap: str, partitions: Iterable[TopicPartition]) -> Records:
    """All committed records, by Fetch requests and our own look at batches, markers and aborted transactions."""
    return {where: _read_partition(bootstrap, where) for where in partitions}


def _read_partition(bootstrap: str, where: TopicPartition) -> list[tuple[int, str]]:
    records: list[tuple[int, str]] = []
    position = ends(bootstrap, [where], is_stable=False, timestamp=_EARLIEST)[where]
    while True:
        one = _fetch(bootstrap, where, position)
        if one.error_code is not ErrorCode.none:
            raise Violation(f"{where[0]}-{where[1]} cannot be read at offset {position}: {one.error_code.name}")
        found, following = visible_records(one, position, is_committed=True)
        records += found
        if following == position:
            if position < one.last_stable_offset:
                raise Violation(f"a reader of {where[0]}-{where[1]} stands still at offset {position}")
            return records
        position = following


def _fetch(bootstrap: str, where: TopicPartition, position: int) -> Any:
    answer = ask(
        bootstrap,
        Api.FETCH,
        11,
        replica_id=-1,
        max_wait=0,
        min_bytes=0,
        max_bytes=_FETCH_BYTES,
        isolation_level=1,
        session_id=0,
        session_epoch=-1,
        topics=[
            {
                "topic": where[0],
                "partitions": [{"partition": where[1], "fetch_offset": position, "partition_max_bytes": _FETCH_BYTES}],
            }
        ],
        forgotten_topics_data=[],
        rack_id="",
    )
    return answer.responses[0].partitions[0]


def read_by_librdkafka(bootstrap: str, stable_ends: Mapping[TopicPartition, int]) -> Records:
    """The same by librdkafka's consumer, up to these offsets."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "verdict",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 50,
            "log_level": 0,
        }
    )
    records: Records = {where: [] for where in stable_ends}
    deadline = time.monotonic() + _PATIENCE_S
    waiting = {where for where, end in stable_ends.items() if end > 0}
    try:
        consumer.assign([confluent_kafka.TopicPartition(topic, index, 0) for topic, index in waiting])
        while waiting:
            if time.monotonic() > deadline:
                raise Violation(f"librdkafka does not get to the end of {sorted(waiting)}")
            for message in consumer.consume(1000, timeout=0.1):
                error = message.error()
                if error is None:
                    where, offset, value = place_and_value(message)
                    records[where].append((offset, value))
                elif error.code() == confluent_kafka.KafkaError._PARTITION_EOF:
                    waiting.discard((str(message.topic()), message.partition() or 0))
                else:
                    raise Violation(f"librdkafka cannot read {message.topic()}-{message.partition()}: {error}")
    finally:
        consumer.close()
    return records


def place_and_value(message: confluent_kafka.Message) -> tuple[TopicPartition, int, str]:
    """Partition, offset and value of a message that is no error."""
    topic, index, offset, value = message.topic(), message.partition(), message.offset(), message.value()
    if topic is None or index is None or offset is None or value is None:
        raise Violation(f"a message without place or value: {topic} {index} {offset} {value!r}")
    return (topic, index), offset, value.decode()


def committed_positions(bootstrap: str, group: str, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
    """Where a group stands; -1 where it has no position, UNSTABLE while a transaction is about to move it."""
    topics: dict[str, list[int]] = {}
    for topic, index in partitions:
        topics.setdefault(topic, []).append(index)
    answer = ask(
        bootstrap,
        Api.OFFSET_FETCH,
        7,
        group_id=group,
        topics=[{"name": topic, "partition_indexes": indexes} for topic, indexes in topics.items()],
        require_stable=True,
    )
    found: dict[TopicPartition, int] = {}
    for topic in answer.topics:
        for one in topic.partitions:
            if one.error_code is ErrorCode.unstable_offset_commit:
                position = UNSTABLE
            elif one.error_code is not ErrorCode.none:
                raise Violation(f"the position of {group} is not told: {one.error_code.name}")
            else:
                position = one.committed_offset
            found[topic.name, one.partition_index] = position
    return found
