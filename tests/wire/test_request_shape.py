"""The walk over a request before it is decoded: it goes exactly where the decoder goes, and not a byte further."""

from __future__ import annotations

import random

import pytest
from kio.index import load_request_schema

from semel.errors import WireError
from semel.verify.hostile_frames import FrameMaker, World, served
from semel.wire.api import Api
from semel.wire.hot import read_produce_request
from semel.wire.request_shape import ENTRIES_MAX, check_shape
from semel.wire.server import decode_request

EVERYTHING = [pytest.param(api, version, id=f"{api.name.lower()}-{version}") for api, version in served()]
WITHOUT_TAGS = [
    pytest.param(api, version, id=f"{api.name.lower()}-{version}")
    for api, version in served()
    if load_request_schema(api, version).__flexible__ and (api, version) != (Api.FETCH, 12)
]


def walk(frame: bytes, api: Api, version: int) -> bytes:
    schema = load_request_schema(api, version)
    return check_shape(frame, schema.__header_schema__, schema)


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
    for count, is_taken in ((ENTRIES_MAX, True), (ENTRIES_MAX + 1, False)):
        frame = head + count.to_bytes(4) + b"\0\1x" * count + bytes(4)
        if is_taken:
            assert walk(frame, Api.DELETE_TOPICS, 1) is frame
        else:
            with pytest.raises(WireError, match="more than"):
                walk(frame, Api.DELETE_TOPICS, 1)


def test_tags_are_entries_too() -> None:
    """A hundred megabytes of empty tags would be fifty million turns of a loop, for either reader."""
    count = b"\xa9\xc3\x01"  # 25,001
    tags = b"\x63\x00" * (ENTRIES_MAX + 1)
    with pytest.raises(WireError, match="more than"):
        walk(bytes.fromhex("0012000300000001ffff") + count + tags, Api.API_VERSIONS, 3)
    with pytest.raises(WireError, match="more than"):
        read_produce_request(memoryview(bytes.fromhex("0000000900000001ffff") + count + tags), 9)


def test_a_produce_request_has_a_bounded_number_of_batches() -> None:
    """It is read by hand, with the same bound."""
    topics = (ENTRIES_MAX + 1).to_bytes(4) + b"\0\1t\0\0\0\0" * (ENTRIES_MAX + 1)
    with pytest.raises(WireError, match="more than"):
        read_produce_request(memoryview(bytes.fromhex("0000000300000001ffffffffffff00000000") + topics), 3)


@pytest.mark.parametrize("count", [-2, -(2**31), 2**31 - 1, 5])
def test_counts_that_cannot_be_are_refused_before_anybody_makes_room(count: int) -> None:
    """Below null, and more than there are bytes left."""
    frame = bytes.fromhex("0003000400000001ffff") + count.to_bytes(4, signed=True) + b"\0"
    with pytest.raises(WireError):
        walk(frame, Api.METADATA, 4)
