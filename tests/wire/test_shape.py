"""The walk over a request before it is decoded: it goes exactly where the decoder goes, and not a byte further."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import random
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from kio.index import load_request_schema
from kio.schema.errors import ErrorCode
from kio.serial import entity_writer

from semel.errors import WireError
from semel.verify.hostile_frames import FrameMaker, World, served
from semel.wire.api import CLIENT_VERSIONS, Api
from semel.wire.hot import read_produce_request
from semel.wire.messages import decode_response, response_type_for
from semel.wire.server import decode_request
from semel.wire.shape import REQUEST_ENTRIES_MAX, check_shape, nested_entity

EVERYTHING = [pytest.param(api, version, id=f"{api.name.lower()}-{version}") for api, version in served()]
WITHOUT_TAGS = [
    pytest.param(api, version, id=f"{api.name.lower()}-{version}")
    for api, version in served()
    if load_request_schema(api, version).__flexible__ and (api, version) != (Api.FETCH, 12)
]


def walk(frame: bytes, api: Api, version: int) -> bytes:
    schema = load_request_schema(api, version)
    return bytes(check_shape(frame, schema.__header_schema__, schema, entries_max=REQUEST_ENTRIES_MAX))


@pytest.mark.parametrize(("api", "version"), EVERYTHING)
def test_a_valid_request_passes_unchanged_and_none_that_is_shorter_does(
    api: Api, version: int, rng: random.Random
) -> None:
    """Its last byte is the last byte that the walk wants, in every version."""
    maker = FrameMaker(World(), rng)
    for _ in range(5):
        frame = maker.frame(api, version, 1)[4:]
        assert walk(frame, api, version) is frame
        with pytest.raises(WireError):
            walk(frame[:-1], api, version)
        assert walk(frame + b"tail", api, version) == frame + b"tail"


@pytest.mark.parametrize(("api", "version"), WITHOUT_TAGS)
def test_tags_that_are_not_known_are_passed_over(api: Api, version: int, rng: random.Random) -> None:
    """A newer client may say more than this broker understands (KIP-482); the decoder fails at such tags."""
    frame = FrameMaker(World(), rng).frame(api, version, 1)[4:]
    assert frame[-1] == 0
    tagged = frame[:-1] + b"\x02\x63\x03abc\x64\x00"
    assert walk(tagged, api, version) == frame
    if api is not Api.PRODUCE:
        assert decode_request(tagged, api, version) == decode_request(frame, api, version)


def test_tags_that_are_known_stay_and_count_once() -> None:
    """Fetch 12 has one. Repeated a thousand times it must not make a count that one byte cannot hold."""
    head = bytes.fromhex("0001000c00000001ffff00") + bytes(25) + b"\x01\x01\x01"
    once = b"\x00\x03\x03id"
    frame = head + b"\x01" + once
    assert decode_request(frame, Api.FETCH, 12)[1].cluster_id == "id"
    many = head + b"\xe8\x07" + once * 1000
    assert walk(many, Api.FETCH, 12) == frame


def test_the_number_of_entries_is_bounded_over_all_arrays() -> None:
    """Nested arrays count as well: many small ones are as much work as a large one."""
    head = bytes.fromhex("0014000100000001ffff")
    for count, is_taken in ((REQUEST_ENTRIES_MAX, True), (REQUEST_ENTRIES_MAX + 1, False)):
        frame = head + count.to_bytes(4) + b"\0\1x" * count + bytes(4)
        if is_taken:
            assert walk(frame, Api.DELETE_TOPICS, 1) is frame
        else:
            with pytest.raises(WireError, match="more entries than"):
                walk(frame, Api.DELETE_TOPICS, 1)


def test_tags_are_entries_too() -> None:
    """A hundred megabytes of empty tags would be fifty million turns of a loop, for either reader."""
    count = b"\xa9\xc3\x01"  # 25,001
    tags = b"\x63\x00" * (REQUEST_ENTRIES_MAX + 1)
    with pytest.raises(WireError, match="more entries than"):
        walk(bytes.fromhex("0012000300000001ffff") + count + tags, Api.API_VERSIONS, 3)
    with pytest.raises(WireError, match="more entries than"):
        read_produce_request(memoryview(bytes.fromhex("0000000900000001ffff") + count + tags), 9)


def test_a_produce_request_has_a_bounded_number_of_batches() -> None:
    """It is read by hand, with the same bound."""
    topics = (REQUEST_ENTRIES_MAX + 1).to_bytes(4) + b"\0\1t\0\0\0\0" * (REQUEST_ENTRIES_MAX + 1)
    with pytest.raises(WireError, match="more entries than"):
        read_produce_request(memoryview(bytes.fromhex("0000000300000001ffffffffffff00000000") + topics), 3)


@pytest.mark.parametrize("count", [-2, -(2**31), 2**31 - 1, 5])
def test_counts_that_cannot_be_are_refused_before_anybody_makes_room(count: int) -> None:
    """Below null, and more than there are bytes left."""
    frame = bytes.fromhex("0003000400000001ffff") + count.to_bytes(4, signed=True) + b"\0"
    with pytest.raises(WireError):
        walk(frame, Api.METADATA, 4)


# -- answers -----------------------------------------------------------------------------------------------------------

ANSWERS = [
    pytest.param(api, version, id=f"{api.name.lower()}-{version}")
    for api, spoken in CLIENT_VERSIONS.items()
    for version in range(spoken.lowest, spoken.highest + 1)
]


def sample(entity: Any) -> Any:
    """An entity with something in every field."""
    return entity(**{field.name: _sample_value(field) for field in dataclasses.fields(entity)})


def _sample_value(field: dataclasses.Field[Any]) -> Any:
    nested, kind = nested_entity(field.type), field.metadata.get("kafka_type", "")
    samples = {"string": "name", "bool": True, "bytes": b"bytes", "uuid": UUID(int=7), "records": b"records"}
    samples |= {"error_code": ErrorCode.none, "datetime_i64": datetime.fromtimestamp(1, UTC)}
    value = sample(nested) if nested else samples.get(kind, timedelta(seconds=1) if "timedelta" in kind else 3)
    return (value, value) if "tuple" in str(field.type) else value


def answer(api: Api, version: int) -> tuple[Any, bytes]:
    """The type of an answer and a frame of it."""
    payload = response_type_for(sample(load_request_schema(api, version)))
    frame = io.BytesIO()
    entity_writer(payload.__header_schema__)(frame, sample(payload.__header_schema__))
    entity_writer(payload)(frame, sample(payload))
    return payload, frame.getvalue()


@pytest.mark.parametrize(("api", "version"), ANSWERS)
def test_an_answer_is_read_whole_and_never_cut_short(api: Api, version: int) -> None:
    """The walk goes where the decoder goes, in every version that the client speaks."""
    payload, frame = answer(api, version)
    assert decode_response(payload, memoryview(frame)) == sample(payload)
    for size in range(len(frame)):
        with pytest.raises(WireError, match="could not be read"):
            decode_response(payload, frame[:size])


@pytest.mark.parametrize(("api", "version"), ANSWERS)
def test_a_newer_broker_may_add_tags_to_an_answer(api: Api, version: int) -> None:
    """KIP-482 lets it, without a new version: the client passes over what it does not know."""
    payload, frame = answer(api, version)
    if not payload.__flexible__ or any("tag" in field.metadata for field in dataclasses.fields(payload)):
        return  # it cannot have tags, or has some: then its last byte is not their count
    assert decode_response(payload, frame[:-1] + b"\x01\x63\x03abc") == sample(payload)


@pytest.mark.parametrize(("api", "version"), ANSWERS)
def test_a_garbled_answer_is_an_error_and_makes_no_room_for_what_it_announces(
    api: Api, version: int, rng: random.Random
) -> None:
    """Any bytes in place of four others: read, or refused; a count of billions once ended the process."""
    payload, frame = answer(api, version)
    for _ in range(100):
        garbled = bytearray(frame)
        at = rng.randrange(len(frame))
        garbled[at : at + 4] = rng.choice((b"\x7f\xff\xff\xff", b"\xff\xff\xff\x0f", rng.randbytes(4)))
        with contextlib.suppress(WireError):
            decode_response(payload, garbled)
