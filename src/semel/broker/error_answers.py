"""An error code as a whole answer to any request: its topics, partitions, groups and members, each with that code.

Made from the shape of the messages alone, so that every API in every version is covered. Produce and Fetch have writers
of their own, and Metadata must still name the broker, or a client would have nobody left to ask.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, Final, get_args

from kio.schema.errors import ErrorCode

from semel.broker.context import Answer, Encoded, RequestContext
from semel.wire.api import Api
from semel.wire.hot import (
    FetchedPartition,
    ProducedPartition,
    read_produce_request,
    write_fetch_response,
    write_produce_response,
)
from semel.wire.messages import response_type_for
from semel.wire.server import decode_request, respond
from semel.wire.shape import nested_entity

if TYPE_CHECKING:
    from semel.broker.connection import Connection
    from semel.broker.dispatch import Request
    from semel.broker.state import Broker

# What an answer repeats of its request, so that the client knows what the code is about.
_NAMES: Final = frozenset(
    {
        "name",
        "topic",
        "topic_id",
        "partition",
        "partition_index",
        "group_id",
        "member_id",
        "group_instance_id",
        "key",
        "transactional_id",
        "resource_type",
        "resource_name",
        "user",
    }
)
_EMPTY: Final = {"string": "", "bytes": b"", "bool": False, "uuid": None, "records": None}
_OF_THE_SESSION: Final = frozenset(
    {
        ErrorCode.fetch_session_id_not_found,
        ErrorCode.invalid_fetch_session_epoch,
        ErrorCode.fetch_session_topic_id_error,
    }
)


def error_answer(connection: Connection, request: Request, code: ErrorCode) -> Answer:
    """What a broker that refuses all of this request answers. None where the client wants no answer."""
    if request.api is Api.PRODUCE:
        return _produce(connection, request, code)
    _, message = decode_request(bytes(request.frame), request.api, request.version)
    if request.api is Api.FETCH:
        return _fetch(connection.broker, request, message, code)
    if request.api is Api.METADATA:
        return _metadata(connection, message, code)
    return mirrored(message, code)


def mirrored(message: Any, code: ErrorCode) -> Any:
    """The response to a decoded request in which every error code is `code`.

    >>> from semel.wire.messages import build
    >>> request = build(Api.END_TXN, 3, transactional_id="t", producer_id=1, producer_epoch=0, committed=True)
    >>> mirrored(request, ErrorCode.producer_fenced).error_code.name
    'producer_fenced'
    """
    return _made(response_type_for(message), message, code)


def _made(entity: Any, source: Any, code: ErrorCode) -> Any:
    return entity(**{field.name: _value(field, source, code) for field in dataclasses.fields(entity)})


def _value(field: dataclasses.Field[Any], source: Any, code: ErrorCode) -> Any:
    kind: str = field.metadata.get("kafka_type", "")
    nested = nested_entity(field.type)
    if kind == "error_code":
        return code
    if nested is not None and "tuple" in str(field.type):
        # Arrays without a code in them, such as the members of a group, are what an error has nothing of.
        items = _counterpart(field.name, source) if _holds_code(nested) else ()
        return tuple(_made(nested, item, code) for item in items)
    if field.name in _NAMES:
        if not dataclasses.is_dataclass(source):
            return source
        if hasattr(source, field.name):
            return getattr(source, field.name)
    if field.default is not dataclasses.MISSING:
        return field.default
    if type(None) in get_args(field.type):
        return None
    if nested is not None:
        return _made(nested, source, code)
    if "tuple" in str(field.type):
        return ()
    return timedelta(0) if kind.startswith("timedelta") else _EMPTY.get(kind, -1)


def _counterpart(name: str, source: Any) -> Sequence[Any]:
    """The array of the request that this one answers: of the same name, or else the first there is."""
    if not dataclasses.is_dataclass(source):
        return ()
    arrays = {field.name: getattr(source, field.name) for field in dataclasses.fields(source) if _is_array(field)}
    return arrays.get(name) or next(iter(arrays.values()), None) or ()


def _is_array(field: dataclasses.Field[Any]) -> bool:
    return "tuple" in str(field.type)


@cache
def _holds_code(entity: Any) -> bool:
    for field in dataclasses.fields(entity):
        nested = nested_entity(field.type)
        if field.metadata.get("kafka_type") == "error_code" or (nested is not None and _holds_code(nested)):
            return True
    return False


def _produce(connection: Connection, request: Request, code: ErrorCode) -> Answer:
    message = read_produce_request(memoryview(request.frame), request.version)
    if message.acks == 0:
        # There is nobody to tell, and Kafka lets such a producer know by closing its connection.
        connection.close()
        return None
    topics = [
        (topic.name, [ProducedPartition(partition.index, code) for partition in topic.partitions])
        for topic in message.topics
    ]
    return Encoded([write_produce_response(request.version, request.correlation_id, topics)])


def _fetch(broker: Broker, request: Request, message: Any, code: ErrorCode) -> Answer:
    # Session 0 ends the client's session: it names all of its partitions again next time, and misses nothing.
    if code in _OF_THE_SESSION:
        return Encoded(write_fetch_response(request.version, request.correlation_id, 0, code, []))
    topics: dict[str, list[FetchedPartition]] = {}
    for name, index in dict.fromkeys(_fetched_partitions(broker, message)):
        topics.setdefault(name, []).append(FetchedPartition(index, code))
    return Encoded(write_fetch_response(request.version, request.correlation_id, 0, 0, [*topics.items()]))


def _fetched_partitions(broker: Broker, message: Any) -> Iterable[tuple[str, int]]:
    """Those that the request names, and those that its session knows from earlier ones."""
    yield from ((topic.topic, one.partition) for topic in message.topics for one in topic.partitions)
    session_id = getattr(message, "session_id", 0)
    if session_id and message.session_epoch > 0:
        yield from broker.fetch_sessions.partitions_of(session_id)


def _metadata(connection: Connection, message: Any, code: ErrorCode) -> Answer:
    broker = connection.broker
    context = RequestContext(
        connection, connection.principal, connection.host, None, message.__version__, correlation_id=0
    )
    host, port = broker.advertised(context)
    asked = [(one.name, getattr(one, "topic_id", None)) for one in message.topics or ()]
    everything = [(topic.name, topic.topic_id) for topic in broker.topics]
    node_id = broker.settings.node_id
    return respond(
        message,
        brokers=[{"node_id": node_id, "host": host, "port": port, "rack": broker.settings.rack}],
        cluster_id=broker.topics.cluster_id,
        controller_id=node_id,
        topics=[
            {"error_code": code, "name": name, "topic_id": topic_id, "is_internal": False, "partitions": ()}
            for name, topic_id in asked or everything
        ],
        cluster_authorized_operations=-(2**31),
    )
