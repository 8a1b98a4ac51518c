"""The broker's side of the wire: which versions it serves, requests from bytes, answers to bytes."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cache
from typing import Any, Final, cast

from kio.serial import entity_reader
from kio.serial.errors import SerialError
from kio.static.protocol import Entity, RequestPayload, ResponsePayload

from semel.errors import WireError
from semel.wire.api import Api, VersionRange
from semel.wire.messages import Plain, request_schema, response_type_for
from semel.wire.shape import REQUEST_ENTRIES_MAX, REQUEST_TEXT_BYTES_MAX, check_shape, nested_entity
from semel.wire.writing import write_frame

# What the embedded broker answers. Versions with topic ids in Produce and Fetch would bring a second way to name a
# topic and nothing else; those for brokers among themselves (AddPartitionsToTxn 4+) have nobody to speak them.
SERVER_VERSIONS: Final[Mapping[Api, VersionRange]] = {
    Api.PRODUCE: VersionRange(3, 12),
    Api.FETCH: VersionRange(4, 12),
    Api.LIST_OFFSETS: VersionRange(1, 8),
    Api.METADATA: VersionRange(0, 12),
    Api.OFFSET_COMMIT: VersionRange(2, 9),
    Api.OFFSET_FETCH: VersionRange(1, 9),
    Api.FIND_COORDINATOR: VersionRange(0, 6),
    Api.JOIN_GROUP: VersionRange(0, 9),
    Api.HEARTBEAT: VersionRange(0, 4),
    Api.LEAVE_GROUP: VersionRange(0, 5),
    Api.SYNC_GROUP: VersionRange(0, 5),
    Api.DESCRIBE_GROUPS: VersionRange(0, 6),
    Api.LIST_GROUPS: VersionRange(0, 5),
    Api.SASL_HANDSHAKE: VersionRange(0, 1),
    Api.API_VERSIONS: VersionRange(0, 4),
    Api.CREATE_TOPICS: VersionRange(2, 7),
    Api.DELETE_TOPICS: VersionRange(1, 6),
    Api.DELETE_RECORDS: VersionRange(0, 2),
    Api.INIT_PRODUCER_ID: VersionRange(0, 6),
    Api.OFFSET_FOR_LEADER_EPOCH: VersionRange(2, 4),
    Api.ADD_PARTITIONS_TO_TXN: VersionRange(0, 3),
    Api.ADD_OFFSETS_TO_TXN: VersionRange(0, 4),
    Api.END_TXN: VersionRange(0, 5),
    Api.WRITE_TXN_MARKERS: VersionRange(1, 1),
    Api.TXN_OFFSET_COMMIT: VersionRange(0, 5),
    Api.DESCRIBE_ACLS: VersionRange(1, 3),
    Api.CREATE_ACLS: VersionRange(1, 3),
    Api.DELETE_ACLS: VersionRange(1, 3),
    Api.DESCRIBE_CONFIGS: VersionRange(1, 4),
    Api.ALTER_CONFIGS: VersionRange(0, 2),
    Api.DESCRIBE_LOG_DIRS: VersionRange(1, 4),
    Api.SASL_AUTHENTICATE: VersionRange(0, 2),
    Api.CREATE_PARTITIONS: VersionRange(0, 3),
    Api.DELETE_GROUPS: VersionRange(0, 2),
    Api.INCREMENTAL_ALTER_CONFIGS: VersionRange(0, 1),
    Api.OFFSET_DELETE: VersionRange(0, 0),
    Api.DESCRIBE_USER_SCRAM_CREDENTIALS: VersionRange(0, 0),
    Api.ALTER_USER_SCRAM_CREDENTIALS: VersionRange(0, 0),
    Api.DESCRIBE_CLUSTER: VersionRange(0, 1),
    Api.DESCRIBE_PRODUCERS: VersionRange(0, 0),
    Api.DESCRIBE_TRANSACTIONS: VersionRange(0, 0),
    Api.LIST_TRANSACTIONS: VersionRange(0, 2),
    Api.CONSUMER_GROUP_HEARTBEAT: VersionRange(0, 1),
    Api.CONSUMER_GROUP_DESCRIBE: VersionRange(0, 1),
    Api.DESCRIBE_TOPIC_PARTITIONS: VersionRange(0, 0),
}

# Entries with many fields take longer to read than others, and nobody needs so many of them at once.
_ENTRIES_MAX: Final[Mapping[Api, int]] = {
    Api.CREATE_ACLS: 5_000,
    Api.DELETE_ACLS: 5_000,
    Api.ALTER_CONFIGS: 10_000,
    Api.INCREMENTAL_ALTER_CONFIGS: 10_000,
}

_HEAD: Final = struct.Struct(">hhi")
_UNREADABLE: Final = (WireError, SerialError, ValueError, IndexError, OverflowError, struct.error)


def read_request_head(frame: bytes | bytearray) -> tuple[int, int, int]:
    """API key, version and correlation id, which every request begins with.

    >>> read_request_head(bytes.fromhex("0012 0003 00000007 ffff"))
    (18, 3, 7)
    """
    if len(frame) < _HEAD.size:
        raise WireError(f"The client sent a frame of {len(frame)} bytes, too short for a request header.")
    return cast(tuple[int, int, int], _HEAD.unpack_from(frame))


def decode_request(frame: bytes, api: Api, version: int) -> tuple[str | None, Any]:
    """The client id and the request in a frame (without its size) whose head was read before."""
    schema = request_schema(api, version)
    try:
        checked = check_shape(
            frame,
            schema.__header_schema__,
            schema,
            entries_max=_ENTRIES_MAX.get(api, REQUEST_ENTRIES_MAX),
            text_bytes_max=REQUEST_TEXT_BYTES_MAX,
        )
        header, header_bytes = entity_reader(schema.__header_schema__)(checked, 0)
        # Bytes after the end are left alone, as Kafka does: librdkafka's Metadata request has three of them.
        request, _ = entity_reader(schema)(checked, header_bytes)
    except _UNREADABLE as error:
        raise WireError(f"A {schema.__name__} (version {version}) could not be read: {error}") from error
    return getattr(header, "client_id", None), request


def respond(request: RequestPayload, /, **fields: Plain) -> ResponsePayload:
    """The answer to `request` in its own version, from plain values; leaves out what that version does not have.

    Nested entities are mappings, arrays are sequences, milliseconds are numbers. A field that the version needs and
    that is not given raises TypeError; only the throttle time, which is never used here, has a default.

    >>> from kio.schema.errors import ErrorCode
    >>> request = request_schema(Api.END_TXN, 5)(
    ...     transactional_id="t", producer_id=1, producer_epoch=0, committed=True
    ... )
    >>> respond(request, error_code=ErrorCode.none, producer_id=1, producer_epoch=1).producer_epoch
    1
    """
    fields.setdefault("throttle_time", 0)
    return cast(ResponsePayload, _make(response_type_for(request), fields))


def _make(entity: type[Entity], values: Mapping[str, Plain]) -> Entity:
    converters = _converters(entity)
    return entity(**{name: convert(values[name]) for name, convert in converters if name in values})


@cache
def _converters(entity: type[Entity]) -> tuple[tuple[str, Callable[[Plain], Plain]], ...]:
    return tuple((field.name, _converter(field)) for field in dataclasses.fields(cast(Any, entity)))


def _converter(field: dataclasses.Field[Any]) -> Callable[[Plain], Plain]:
    nested = nested_entity(field.type)
    is_array = "tuple" in str(field.type)
    kafka_type = str(field.metadata.get("kafka_type", ""))
    if nested is not None and is_array:
        return lambda value: None if value is None else tuple(_make(nested, item) for item in value)
    if nested is not None:
        return lambda value: None if value is None else _make(nested, value)
    if kafka_type.startswith("timedelta"):
        return lambda value: timedelta(milliseconds=value)
    if is_array:
        return lambda value: None if value is None else tuple(value)
    return _unchanged


def _unchanged(value: Plain) -> Plain:
    return value


def encode_response(response: ResponsePayload, correlation_id: int) -> list[bytes | memoryview]:
    """The answer as a frame, in pieces: size, header, body. Large fields are passed on by reference."""
    header: Any = response.__header_schema__
    return write_frame(header(correlation_id=correlation_id), response)
