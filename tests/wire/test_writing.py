"""Messages as bytes, held against kio's own writer for every message and version that is spoken."""

from __future__ import annotations

import dataclasses
import io
import random
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from kio.index import load_request_schema
from kio.schema.errors import ErrorCode
from kio.schema.heartbeat.v0.request import HeartbeatRequest
from kio.serial import entity_writer

from semel.errors import WireError
from semel.wire.api import CLIENT_VERSIONS, Api
from semel.wire.messages import response_type_for
from semel.wire.server import SERVER_VERSIONS
from semel.wire.shape import nested_entity, varint
from semel.wire.writing import encode_entity, write_frame

_BITS = {"int8": 7, "int16": 15, "int32": 31, "int64": 63}
_TEXTS = ["", "a", "Käfer", "x" * 127, "y" * 300]


def value_of(field: dataclasses.Field[Any], chance: random.Random) -> Any:
    kind, is_array = field.metadata.get("kafka_type"), "tuple" in str(field.type)
    if "None" in str(field.type) and chance.random() < 0.3:
        return None
    if "tag" in field.metadata and chance.random() < 0.4:
        return field.default
    nested = nested_entity(field.type)
    make = (lambda: entity_of(nested, chance)) if nested is not None else (lambda: plain(kind, chance))
    count = chance.choice((0, 1, 2) if nested is not None else (0, 1, 3, 130))
    return tuple(make() for _ in range(count)) if is_array else make()


def plain(kind: Any, chance: random.Random) -> Any:
    if kind in _BITS:
        return chance.choice((-1, 0, 1, chance.getrandbits(_BITS[kind])))
    return {
        "bool": lambda: chance.random() < 0.5,
        "error_code": lambda: chance.choice(list(ErrorCode)),
        "string": lambda: chance.choice(_TEXTS),
        "bytes": lambda: chance.randbytes(chance.choice((0, 5, 200))),
        "records": lambda: chance.randbytes(chance.choice((0, 5, 200))),
        "uuid": lambda: UUID(int=chance.getrandbits(128)),
        "timedelta_i32": lambda: timedelta(milliseconds=chance.getrandbits(31)),
        "timedelta_i64": lambda: timedelta(milliseconds=chance.getrandbits(40)),
        "datetime_i64": lambda: datetime.fromtimestamp(chance.getrandbits(30), UTC),
    }[kind]()


def entity_of(entity: Any, chance: random.Random) -> Any:
    return entity(**{field.name: value_of(field, chance) for field in dataclasses.fields(entity)})


def spoken() -> list[tuple[Api, int]]:
    ranges = [(api, range(served.lowest, served.highest + 1)) for api, served in SERVER_VERSIONS.items()]
    ranges += [(api, range(asked.lowest, asked.highest + 1)) for api, asked in CLIENT_VERSIONS.items()]
    return sorted({(api, version) for api, versions in ranges for version in versions})


def schemas_of(api: Api, version: int) -> list[Any]:
    request: Any = load_request_schema(api, version)
    return [request, response_type_for(request)]


@pytest.mark.parametrize("api", sorted({api for api, _ in spoken()}), ids=lambda api: api.name)
def test_every_message_is_written_as_kio_writes_it(api: Api, rng: random.Random) -> None:
    """Requests and answers of every version, with nulls, tags and long arrays."""
    for version in [version for one, version in spoken() if one == api]:
        for schema in schemas_of(api, version):
            for _ in range(3):
                message = entity_of(schema, rng)
                oracle = io.BytesIO()
                entity_writer(schema)(oracle, message)
                assert encode_entity(message) == oracle.getvalue(), (schema, version)


def heartbeat(group_id: Any) -> Any:
    schema: Any = HeartbeatRequest
    return schema(group_id=group_id, generation_id=1, member_id="m")


def test_a_text_that_the_old_layout_has_no_room_for_is_refused() -> None:
    """Its length is a number of 16 bits: cut off, it would be another name."""
    request = heartbeat("g" * 40_000)
    with pytest.raises(WireError, match="40,000 bytes"):
        encode_entity(request)


def test_null_is_not_written_where_it_cannot_be_read() -> None:
    """A bug on this side must not become an unreadable message on the other."""
    with pytest.raises(TypeError, match="cannot be null"):
        encode_entity(heartbeat(None))


def test_large_fields_stay_where_they_are_between_small_ones() -> None:
    """What surrounds a batch is gathered into few pieces, the batch itself is not copied, and the size is true."""
    schema = load_request_schema(Api.PRODUCE, 9)
    topic: Any = nested_entity(next(one.type for one in dataclasses.fields(schema) if one.name == "topic_data"))
    partition: Any = nested_entity(next(one.type for one in dataclasses.fields(topic) if one.name == "partition_data"))
    batches = [bytes(size) for size in (10, 5_000, 20, 9_000)]
    partitions = tuple(partition(index=index, records=batch) for index, batch in enumerate(batches))
    message: Any = schema
    body = message(
        transactional_id=None,
        acks=-1,
        timeout=timedelta(seconds=1),
        topic_data=(topic(name="t", partition_data=partitions),),
    )
    header: Any = schema.__header_schema__
    pieces = write_frame(
        header(request_api_key=0, request_api_version=9, correlation_id=1, client_id="c"),
        body,
    )
    assert [piece for piece in pieces if len(piece) >= 4096] == [batches[1], batches[3]]
    assert any(piece is batches[1] for piece in pieces)
    assert len(pieces) == 6
    whole = b"".join(pieces)
    assert int.from_bytes(whole[:4]) == len(whole) - 4
    assert whole.endswith(encode_entity(body))


@pytest.mark.parametrize(("number", "written"), [(0, "00"), (127, "7f"), (128, "8001"), (2**31 - 1, "ffffffff07")])
def test_lengths_take_seven_bits_to_the_byte(number: int, written: str) -> None:
    """Kafka's unsigned varint."""
    assert varint(number).hex() == written
