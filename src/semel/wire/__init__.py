"""Kafka's protocol as bytes: frames, headers, version ranges and the table of error codes. No socket, no clock."""

from kio.schema.errors import ErrorCode

from semel.wire.api import (
    CLIENT_VERSIONS,
    PROTOCOL_2_VERSIONS,
    TWO_PHASE_COMMIT_VERSION,
    Api,
    BrokerCapabilities,
    VersionRange,
)
from semel.wire.codes import Action, Refresh, Verdict, verdict
from semel.wire.messages import (
    build,
    decode_response,
    encode_request,
    read_correlation_id,
    read_frame_size,
    response_type_for,
)

__all__ = [
    "CLIENT_VERSIONS",
    "PROTOCOL_2_VERSIONS",
    "TWO_PHASE_COMMIT_VERSION",
    "Action",
    "Api",
    "BrokerCapabilities",
    "ErrorCode",
    "Refresh",
    "Verdict",
    "VersionRange",
    "build",
    "decode_response",
    "encode_request",
    "read_correlation_id",
    "read_frame_size",
    "response_type_for",
    "verdict",
]
