"""One request and its answer over a fresh plaintext socket: all that a test needs to ask a broker for directly.

It shares nothing with Semel's own client on purpose, so that a fault in the client cannot hide in its own test set-up.
"""

from __future__ import annotations

import io
import socket
import struct
import time
from collections.abc import Mapping
from typing import TypeVar

from kio.schema.create_topics.v5.request import CreatableTopic, CreatableTopicConfig, CreateTopicsRequest
from kio.schema.create_topics.v5.response import CreateTopicsResponse
from kio.schema.errors import ErrorCode
from kio.schema.list_offsets.v5.request import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from kio.schema.list_offsets.v5.response import ListOffsetsResponse
from kio.schema.metadata.v9.request import MetadataRequest, MetadataRequestTopic
from kio.schema.metadata.v9.response import MetadataResponse
from kio.schema.types import BrokerId, TopicName
from kio.serial import entity_reader, entity_writer
from kio.static.primitive import i8, i16, i32, i64
from kio.static.protocol import RequestPayload, ResponsePayload

from semel.errors import BrokerUnreachable, ConnectionLost, KafkaError, RequestTimedOut, WireError

CORRELATION_ID = 1
ANSWER_BYTES_MAX = 64 << 20
POLL_S = 0.02

Response = TypeVar("Response", bound=ResponsePayload)


def exchange(
    address: tuple[str, int], request: RequestPayload, response_type: type[Response], *, timeout_s: float = 10.0
) -> Response:
    """Send `request` and return the broker's answer, read as `response_type`, of the same API and version.

    Raises BrokerUnreachable, ConnectionLost or RequestTimedOut; error codes inside the answer are the caller's to read.
    """
    try:
        connection = socket.create_connection(address, timeout=timeout_s)
    except OSError as error:
        raise BrokerUnreachable(f"No broker answers at {address[0]}:{address[1]}: {error}.") from error
    with connection:
        try:
            connection.sendall(_frame(request))
            answer = _read_frame(connection)
        except TimeoutError as error:
            raise RequestTimedOut(f"{type(request).__name__} was not answered within {timeout_s} s.") from error
        except OSError as error:
            raise ConnectionLost(f"The connection ended before {type(request).__name__} was answered.") from error
    header, header_bytes = entity_reader(response_type.__header_schema__)(answer, 0)
    if header.correlation_id != CORRELATION_ID:
        raise WireError(f"The answer carries correlation id {header.correlation_id}, not {CORRELATION_ID}.")
    response, _ = entity_reader(response_type)(answer, header_bytes)
    return response


def _frame(request: RequestPayload) -> bytes:
    header = request.__header_schema__(
        request_api_key=request.__api_key__,
        request_api_version=request.__version__,
        correlation_id=i32(CORRELATION_ID),
        client_id="semel-testing",
    )
    buffer = io.BytesIO()
    entity_writer(type(header))(buffer, header)
    entity_writer(type(request))(buffer, request)
    body = buffer.getvalue()
    return struct.pack(">i", len(body)) + body


def _read_frame(connection: socket.socket) -> bytes:
    (size,) = struct.unpack(">i", _read_exactly(connection, 4))
    if not 0 < size <= ANSWER_BYTES_MAX:
        raise WireError(f"The answer claims {size} bytes.")
    return _read_exactly(connection, size)


def _read_exactly(connection: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        chunk = connection.recv(size - len(received))
        if not chunk:
            raise ConnectionResetError("the peer closed the connection")
        received += chunk
    return bytes(received)


def parse_bootstrap(bootstrap: str) -> list[tuple[str, int]]:
    """The addresses in a `host:port,host:port` list.

    >>> parse_bootstrap("127.0.0.1:9092,127.0.0.1:9093")
    [('127.0.0.1', 9092), ('127.0.0.1', 9093)]
    """
    pairs = (entry.strip().rpartition(":") for entry in bootstrap.split(","))
    return [(host, int(port)) for host, _, port in pairs]


def live_brokers(address: tuple[str, int], *, timeout_s: float = 5.0) -> set[int]:
    """The ids of the registered, unfenced brokers, as the broker at `address` knows them."""
    return {int(broker.node_id) for broker in _metadata(address, (), timeout_s).brokers}


def create_topic(
    bootstrap: str,
    name: str,
    *,
    partitions: int = 1,
    replication: int = 1,
    config: Mapping[str, str] | None = None,
    timeout_s: float = 30.0,
) -> None:
    """Create a topic and wait until every broker in `bootstrap` knows for each partition a leader that serves it."""
    addresses = parse_bootstrap(bootstrap)
    topic = CreatableTopic(
        name=TopicName(name),
        num_partitions=i32(partitions),
        replication_factor=i16(replication),
        assignments=(),
        configs=tuple(CreatableTopicConfig(name=key, value=value) for key, value in (config or {}).items()),
    )
    controller = _controller(addresses[0], timeout_s)
    answer = exchange(controller, CreateTopicsRequest(topics=(topic,)), CreateTopicsResponse, timeout_s=timeout_s)
    (result,) = answer.topics
    if result.error_code is not ErrorCode.none:
        reason = result.error_message or result.error_code.name
        raise KafkaError(f"The topic {name} could not be created: {reason}", code=result.error_code)
    deadline = time.monotonic() + timeout_s
    for address in addresses:
        while not _is_ready(address, name, partitions):
            if time.monotonic() > deadline:
                raise RequestTimedOut(f"The topic {name} was created but has no leaders after {timeout_s} s.")
            time.sleep(POLL_S)


def _controller(address: tuple[str, int], timeout_s: float) -> tuple[str, int]:
    """Where topics are made: with ZooKeeper only one broker does it, with KRaft any broker passes it on."""
    known = _metadata(address, (), timeout_s)
    found = (broker for broker in known.brokers if broker.node_id == known.controller_id)
    return next(((broker.host, int(broker.port)) for broker in found), address)


def _is_ready(address: tuple[str, int], name: str, partitions: int) -> bool:
    """Whether every partition has a leader that serves it.

    Metadata alone does not tell: a KRaft broker publishes a leader before that leader has opened the partition, and
    answers NOT_LEADER_OR_FOLLOWER for a moment.
    """
    known = _metadata(address, (name,), 5.0)
    (topic,) = known.topics
    led = [one for one in topic.partitions if one.error_code is ErrorCode.none and one.leader_id >= 0]
    if topic.error_code is not ErrorCode.none or len(led) != partitions:
        return False
    addresses = {broker.node_id: (broker.host, int(broker.port)) for broker in known.brokers}
    partitions_by_leader: dict[tuple[str, int], list[int]] = {}
    for one in led:
        if one.leader_id not in addresses:
            return False
        partitions_by_leader.setdefault(addresses[one.leader_id], []).append(int(one.partition_index))
    return all(_serves(leader, name, indexes) for leader, indexes in partitions_by_leader.items())


def _serves(leader: tuple[str, int], name: str, partitions: list[int]) -> bool:
    asked = tuple(ListOffsetsPartition(partition_index=i32(index), timestamp=i64(-1)) for index in partitions)
    request = ListOffsetsRequest(
        replica_id=BrokerId(-1),
        isolation_level=i8(0),
        topics=(ListOffsetsTopic(name=TopicName(name), partitions=asked),),
    )
    (topic,) = exchange(leader, request, ListOffsetsResponse, timeout_s=5.0).topics
    return all(one.error_code is ErrorCode.none for one in topic.partitions)


def _metadata(address: tuple[str, int], topics: tuple[str, ...], timeout_s: float) -> MetadataResponse:
    request = MetadataRequest(
        topics=tuple(MetadataRequestTopic(name=TopicName(topic)) for topic in topics),
        allow_auto_topic_creation=False,
        include_cluster_authorized_operations=False,
        include_topic_authorized_operations=False,
    )
    return exchange(address, request, MetadataResponse, timeout_s=timeout_s)
