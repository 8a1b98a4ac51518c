"""Frames, headers and messages as bytes."""

from __future__ import annotations

import dataclasses
import io
import struct
from datetime import timedelta
from typing import Any

import pytest
from kio.index import load_request_schema, load_response_schema
from kio.schema.request_header.v2.header import RequestHeader
from kio.serial import entity_reader, entity_writer

from semel.errors import WireError
from semel.wire import (
    CLIENT_VERSIONS,
    Api,
    ErrorCode,
    build,
    decode_response,
    encode_request,
    read_frame_size,
    response_type_for,
)
from semel.wire.api import FIELDS_GONE

CLUSTER_OPERATIONS = "include_cluster_authorized_operations"
OFFSETS: dict[str, Any] = {
    "transactional_id": "t",
    "group_id": "g",
    "producer_id": 7,
    "producer_epoch": 1,
    "generation_id": 3,
    "member_id": "m",
    "group_instance_id": None,
    "topics": [
        {
            "name": "in",
            "partitions": [
                {"partition_index": 0, "committed_offset": 5, "committed_leader_epoch": -1, "committed_metadata": ""}
            ],
        }
    ],
}


def test_a_request_reads_back_as_it_was_built_and_its_size_is_true() -> None:
    """Size, header and body of a frame are what another implementation's reader expects."""
    request = build(Api.TXN_OFFSET_COMMIT, 5, **OFFSETS)
    frame = b"".join(bytes(chunk) for chunk in encode_request(request, 42, "me"))
    assert struct.unpack_from(">i", frame)[0] == len(frame) - 4
    header, used = entity_reader(RequestHeader)(frame[4:], 0)
    assert (header.correlation_id, header.client_id, header.request_api_key) == (42, "me", Api.TXN_OFFSET_COMMIT)
    assert entity_reader(load_request_schema(Api.TXN_OFFSET_COMMIT, 5))(frame[4:], used)[0] == request


@pytest.mark.parametrize("api", list(CLIENT_VERSIONS))
def test_the_table_has_all_fields_that_newer_versions_dropped(api: Api) -> None:
    """A call site may name a field that is gone: it is left out as long as the table knows it."""
    spoken = CLIENT_VERSIONS[api]
    by_version = [
        {field.name for field in dataclasses.fields(load_request_schema(api, version))}
        for version in range(spoken.lowest, spoken.highest + 1)
    ]
    assert FIELDS_GONE.get(api, frozenset()) == set().union(*by_version) - by_version[-1]


def test_a_field_that_the_version_lacks_is_left_out_and_a_misspelt_one_is_refused() -> None:
    """One call site serves every version, and a typo cannot hide behind that."""
    flags = dict.fromkeys(
        ("allow_auto_topic_creation", CLUSTER_OPERATIONS, "include_topic_authorized_operations"), False
    )
    assert hasattr(build(Api.METADATA, 8, topics=[{"name": "a"}], **flags), CLUSTER_OPERATIONS)
    for version in (4, 12):  # before the field came, and after it went
        topics = [{"topic_id": None, "name": "a"}]
        assert not hasattr(build(Api.METADATA, version, topics=topics, **flags), CLUSTER_OPERATIONS)
    with pytest.raises(TypeError, match="transactionalid"):
        build(Api.END_TXN, 3, transactionalid="t", producer_id=1, producer_epoch=0, committed=True)


def test_record_batches_are_passed_on_without_a_copy() -> None:
    """A megabyte of records is sent from where it lies."""
    records = memoryview(bytearray(100_000))
    request = build(
        Api.PRODUCE,
        9,
        transactional_id=None,
        acks=-1,
        timeout=1_000,
        topic_data=[{"name": "t", "partition_data": [{"index": 0, "records": records}]}],
    )
    assert any(chunk is records for chunk in encode_request(request, 1, "c"))


@pytest.mark.parametrize("size", [-1, 101, 2**31 - 1])
def test_an_absurd_frame_size_is_refused_before_anything_is_allocated(size: int) -> None:
    """A peer that is not Kafka, or hostile, costs no memory."""
    with pytest.raises(WireError, match="at most 100"):
        read_frame_size(struct.pack(">i", size), frame_bytes_max=100)


def _example_response() -> tuple[Any, bytes]:
    response_type: Any = load_response_schema(Api.INIT_PRODUCER_ID, 4)
    header_type: Any = response_type.__header_schema__
    response = response_type(
        throttle_time=timedelta(milliseconds=5), error_code=ErrorCode.none, producer_id=9, producer_epoch=2
    )
    buffer = io.BytesIO()
    entity_writer(header_type)(buffer, header_type(correlation_id=1))
    entity_writer(response_type)(buffer, response)
    return response_type, buffer.getvalue()


def test_every_truncation_of_a_response_is_one_typed_error() -> None:
    """A cut answer is never half read."""
    response_type, frame = _example_response()
    assert decode_response(response_type, frame).producer_id == 9
    for length in range(len(frame)):
        with pytest.raises(WireError, match="could not be read"):
            decode_response(response_type, frame[:length])


def test_the_answer_to_api_versions_has_the_old_header() -> None:
    """Kafka answers ApiVersions v3 with header v0, whatever the body's version."""
    request = build(Api.API_VERSIONS, 3, client_software_name="semel", client_software_version="0")
    assert response_type_for(request).__header_schema__.__version__ == 0
