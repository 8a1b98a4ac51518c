"""Produce and Fetch by hand against the generated messages, in every version."""

from __future__ import annotations

import dataclasses
import io
import random
from typing import Any

import pytest
from kio.index import load_request_schema, load_response_schema
from kio.schema.errors import ErrorCode
from kio.serial import entity_reader, entity_writer

from semel.errors import WireError
from semel.wire.api import Api
from semel.wire.hot import (
    FetchedPartition,
    ProducedPartition,
    read_produce_request,
    write_fetch_response,
    write_produce_response,
)
from semel.wire.messages import encode_request
from semel.wire.server import SERVER_VERSIONS

PRODUCE_VERSIONS = range(SERVER_VERSIONS[Api.PRODUCE].lowest, SERVER_VERSIONS[Api.PRODUCE].highest + 1)
FETCH_VERSIONS = range(SERVER_VERSIONS[Api.FETCH].lowest, SERVER_VERSIONS[Api.FETCH].highest + 1)


def produce_frame(version: int, topics: list[tuple[str, list[tuple[int, bytes | None]]]], **fields: Any) -> bytes:
    from semel.wire.messages import build

    request = build(
        Api.PRODUCE,
        version,
        transactional_id=fields.get("transactional_id"),
        acks=fields.get("acks", -1),
        timeout=30_000,
        topic_data=[
            {"name": name, "partition_data": [{"index": index, "records": data} for index, data in partitions]}
            for name, partitions in topics
        ],
    )
    return b"".join(bytes(piece) for piece in encode_request(request, 77, "client"))[4:]


@pytest.mark.parametrize("version", PRODUCE_VERSIONS)
def test_a_produce_request_reads_as_it_was_written(version: int) -> None:
    """All fields, in both layouts, with names and records of lengths that need more than one byte."""
    topics = [
        ("t" * 200, [(0, b"x" * 300), (7, None)]),
        ("ü", [(3, b"")]),
        ("empty", []),
    ]
    frame = bytearray(produce_frame(version, topics, transactional_id="id", acks=1))
    request = read_produce_request(memoryview(frame), version)
    assert (request.client_id, request.transactional_id, request.acks, request.timeout_ms) == (
        "client",
        "id",
        1,
        30_000,
    )
    read = [
        (topic.name, [(one.index, None if one.records is None else bytes(one.records)) for one in topic.partitions])
        for topic in request.topics
    ]
    assert read == topics
    assert read_produce_request(memoryview(bytearray(produce_frame(version, []))), version).transactional_id is None


def test_records_are_writable_views_into_the_frame() -> None:
    """The broker puts offsets into them in place; a copy of a megabyte would cost more than everything else."""
    frame = bytearray(produce_frame(9, [("t", [(0, b"abcdef")])]))
    records = read_produce_request(memoryview(frame), 9).topics[0].partitions[0].records
    assert records is not None
    records[0:3] = b"XYZ"
    assert b"XYZdef" in frame


@pytest.mark.parametrize("version", PRODUCE_VERSIONS)
def test_a_truncated_produce_request_is_refused_and_a_prolonged_one_is_read(version: int) -> None:
    """Every length below the whole is an error and never anything else; bytes behind the end are passed over."""
    frame = produce_frame(version, [("topic", [(0, b"records"), (1, b"more")])], transactional_id="id")
    for size in range(8, len(frame)):
        with pytest.raises(WireError):
            read_produce_request(memoryview(bytearray(frame[:size])), version)
    read = read_produce_request(memoryview(bytearray(frame + b"\x00")), version)
    assert read.transactional_id == "id"


@pytest.mark.parametrize("version", PRODUCE_VERSIONS)
def test_a_mutated_produce_request_is_read_or_refused(version: int, rng: random.Random) -> None:
    """Random damage leads to a request or to WireError, never to another exception."""
    frame = produce_frame(version, [("topic", [(0, b"records"), (1, b"more")]), ("b", [(5, None)])])
    for _ in range(500):
        damaged = bytearray(frame)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(8, len(damaged))] = rng.randrange(256)
        try:
            read_produce_request(memoryview(damaged), version)
        except WireError:
            continue


def read_response(api: Api, version: int, frame: bytes) -> tuple[Any, Any]:
    schema = load_response_schema(int(api), version)
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    header, size = entity_reader(schema.__header_schema__)(frame[4:], 0)
    response, rest = entity_reader(schema)(frame[4:], size)
    assert size + rest == len(frame) - 4
    return header, response


@pytest.mark.parametrize("version", PRODUCE_VERSIONS)
def test_a_produce_response_reads_as_it_was_written(version: int) -> None:
    """The generated reader finds every field of the version."""
    topics = [
        ("t" * 150, [ProducedPartition(0, 0, 5, 1_700_000_000_000, 2), ProducedPartition(1, 10, error_message="big")]),
        ("u", []),
    ]
    header, response = read_response(Api.PRODUCE, version, write_produce_response(version, 77, topics))
    assert header.correlation_id == 77
    assert [topic.name for topic in response.responses] == ["t" * 150, "u"]
    stored, refused = response.responses[0].partition_responses
    assert (stored.index, stored.error_code, stored.base_offset) == (0, ErrorCode.none, 5)
    assert stored.log_append_time.timestamp() == 1_700_000_000
    assert (refused.error_code, refused.base_offset, refused.log_append_time) == (ErrorCode.message_too_large, -1, None)
    if version >= 5:
        assert (stored.log_start_offset, refused.log_start_offset) == (2, -1)
    if version >= 8:
        assert (stored.error_message, refused.error_message, refused.record_errors) == (None, "big", ())


@pytest.mark.parametrize("version", FETCH_VERSIONS)
def test_a_fetch_response_reads_as_it_was_written(version: int) -> None:
    """The generated reader finds every field of the version, and the records of several pieces as one."""
    topics = [
        (
            "topic",
            [
                FetchedPartition(0, 0, 10, 8, 1, [(4, 2), (5, 3)], [b"a" * 200, memoryview(b"b" * 100)]),
                FetchedPartition(1, 1),
                FetchedPartition(2, 0, 7, 7, 0, [], []),
            ],
        ),
        ("other", []),
    ]
    pieces = write_fetch_response(version, 77, 3, 0, topics)
    header, response = read_response(Api.FETCH, version, b"".join(bytes(piece) for piece in pieces))
    assert header.correlation_id == 77
    if version >= 7:
        assert (response.session_id, response.error_code) == (3, ErrorCode.none)
    first, second, third = response.responses[0].partitions
    assert (first.partition_index, first.high_watermark, first.last_stable_offset) == (0, 10, 8)
    assert [(one.producer_id, one.first_offset) for one in first.aborted_transactions] == [(4, 2), (5, 3)]
    assert bytes(first.records) == b"a" * 200 + b"b" * 100
    assert (second.error_code, second.aborted_transactions) == (ErrorCode.offset_out_of_range, None)
    assert (third.aborted_transactions, third.records or b"") == ((), b"")
    if version >= 5:
        assert first.log_start_offset == 1


@pytest.mark.parametrize("version", FETCH_VERSIONS)
def test_a_fetch_response_has_the_bytes_of_the_generated_writer(version: int) -> None:
    """Byte for byte, for an answer that the generated message can express as well."""
    pieces = write_fetch_response(
        version, 5, 9, 0, [("t", [FetchedPartition(0, 0, 3, 3, 0, [(1, 2)], [b"records" * 50])])]
    )
    written = b"".join(bytes(piece) for piece in pieces)
    header, response = read_response(Api.FETCH, version, written)
    buffer = io.BytesIO()
    entity_writer(type(header))(buffer, header)
    entity_writer(type(response))(buffer, response)
    assert written[4:] == buffer.getvalue()


def test_the_generated_produce_request_has_no_field_that_is_not_read() -> None:
    """A new version with a new field must not slip by unread."""
    names = {field.name for field in dataclasses.fields(load_request_schema(0, 12))}  # type: ignore[arg-type]
    assert names == {"transactional_id", "acks", "timeout", "topic_data"}
