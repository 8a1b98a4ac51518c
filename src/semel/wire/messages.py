"""Requests and responses as bytes: frames and headers around kio's generated messages.

A request is written once for all versions: `build` takes plain values under kio's field names and leaves out what the
chosen version does not have yet. What may be left out safely is settled by the ranges in `api.py`.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import cache
from typing import Any, Final, cast

from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader
from kio.serial.errors import SerialError
from kio.static.protocol import Entity, RequestPayload, ResponsePayload

from semel.errors import WireError
from semel.wire.api import CLIENT_VERSIONS, FIELDS_GONE, Api
from semel.wire.shape import check_shape, nested_entity
from semel.wire.writing import write_frame

_SIZE: Final = struct.Struct(">i")

Plain = Any
"""A plain value for `build`: number, string, bytes, None, a sequence of these, or a mapping for a nested entity."""


request_schema: Final = cache(load_request_schema)  # kio looks its module up anew each time


def build(api: Api, version: int, /, **fields: Plain) -> RequestPayload:
    """Make a request of this version from plain values; milliseconds are plain integers.

    >>> build(Api.END_TXN, 3, transactional_id="t", producer_id=1, producer_epoch=0, committed=True).committed
    True
    """
    newest = request_schema(api, CLIENT_VERSIONS[api].highest)
    schema = request_schema(api, version)
    gone = FIELDS_GONE.get(api, frozenset()) - _plan(schema).keys()
    return cast(RequestPayload, _make(schema, newest, {name: fields[name] for name in fields if name not in gone}))


def _make(entity: type[Entity], newest: type[Entity] | None, values: Mapping[str, Plain]) -> Entity:
    plan = _plan(entity)
    newest_plan: Mapping[str, _FieldStep] = _plan(newest) if newest is not None else {}
    made: dict[str, Plain] = {}
    for name, value in values.items():
        step = plan.get(name)
        if step is not None:
            made[name] = step.convert(value, newest_plan[name].entity if name in newest_plan else None)
        elif name not in newest_plan:
            raise TypeError(f"{entity.__name__} has no field {name!r} in any version the client speaks")
    return entity(**made)


@dataclasses.dataclass(frozen=True, slots=True)
class _FieldStep:
    convert: Callable[[Plain, type[Entity] | None], Plain]
    entity: type[Entity] | None


@cache
def _plan(entity: type[Entity]) -> Mapping[str, _FieldStep]:
    return {field.name: _field_step(field) for field in dataclasses.fields(entity)}


def _field_step(field: dataclasses.Field[Any]) -> _FieldStep:
    nested = nested_entity(field.type)
    is_array = "tuple" in str(field.type)
    if nested is not None:

        def convert_nested(value: Plain, newest: type[Entity] | None) -> Plain:
            if value is None:
                return None
            if is_array:
                return tuple(_make(nested, newest, item) for item in cast(Iterable[Mapping[str, Plain]], value))
            return _make(nested, newest, value)

        return _FieldStep(convert_nested, nested)
    if str(field.metadata.get("kafka_type", "")).startswith("timedelta"):
        return _FieldStep(lambda value, _: timedelta(milliseconds=value), None)
    if is_array:
        return _FieldStep(lambda value, _: None if value is None else tuple(value), None)
    return _FieldStep(lambda value, _: value, None)


def encode_request(request: RequestPayload, correlation_id: int, client_id: str) -> list[bytes | memoryview]:
    """The request as a frame, in pieces for one `sendmsg`: size, header, body."""
    header_schema = request.__header_schema__
    header: dict[str, Any] = {
        "request_api_key": request.__api_key__,
        "request_api_version": request.__version__,
        "correlation_id": correlation_id,
        "client_id": client_id,
    }
    return write_frame(header_schema(**header), request)


def response_type_for(request: RequestPayload) -> type[ResponsePayload]:
    """The class of the answer to `request`."""
    return _response_type(request.__api_key__, request.__version__)


@cache
def _response_type(api_key: int, version: int) -> type[ResponsePayload]:
    if api_key == Api.DESCRIBE_TRANSACTIONS:
        # Few ask this, and to make its classes takes a millisecond each.
        from semel.wire.describe_transactions import DescribeTransactionsResponse

        return cast(type[ResponsePayload], DescribeTransactionsResponse)
    return load_response_schema(api_key, version)


def read_correlation_id(frame: bytes | bytearray | memoryview) -> int:
    """The first field of every response header, in every version."""
    if len(frame) < 4:
        raise WireError(f"The broker sent a frame of {len(frame)} bytes, too short for a response header.")
    return _SIZE.unpack_from(frame)[0]


def decode_response(response_type: type[ResponsePayload], frame: bytes | bytearray | memoryview) -> Any:
    """Read a frame (without its size) as a response of this type."""
    header_type = response_type.__header_schema__
    try:
        frame = check_shape(frame, header_type, response_type, entries_max=len(frame))
        _, header_bytes = entity_reader(header_type)(frame, 0)
        response, _ = entity_reader(response_type)(frame, header_bytes)
    except (WireError, SerialError, ValueError, IndexError, OverflowError, struct.error) as error:
        raise WireError(
            f"The broker's {response_type.__name__} (version {response_type.__version__}) could not be read: "
            f"{str(error).rstrip('.')}. Is this the port of a Kafka broker?"
        ) from error
    return response


def read_frame_size(prefix: bytes | bytearray | memoryview, *, frame_bytes_max: int) -> int:
    """The size a frame announces; refused before anything is allocated if it is absurd.

    >>> read_frame_size(b"\\x00\\x00\\x00\\x10", frame_bytes_max=100)
    16
    """
    size: int = _SIZE.unpack(prefix)[0]
    if not 0 <= size <= frame_bytes_max:
        hint = "The port seems to speak TLS or something else than Kafka's protocol" if size > 2**24 or size < 0 else ""
        raise WireError(
            f"The peer announced a frame of {size:,} bytes, and at most {frame_bytes_max:,} are accepted. "
            f"{hint or 'Raise receive.message.max.bytes if this is wanted'}."
        )
    return size
