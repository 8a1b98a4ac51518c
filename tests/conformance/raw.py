"""A client of single requests in chosen versions, over one socket: what a broker answers, with nothing in between.

It knows nothing of the client package. Fields have kio's names and plain values; those that a version does not have are
left out, so that one test can say the same in several versions. Waiting is the test's own: `settled` asks again while
the broker says that it is not ready.
"""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, Final, cast

from kio.index import UnknownEntity, load_request_schema
from kio.static.protocol import Entity, RequestPayload, ResponsePayload

from semel.errors import WireError
from semel.testing.exchange import parse_bootstrap
from semel.wire import PROTOCOL_2_VERSIONS, Api, ErrorCode, VersionRange, decode_response, encode_request
from semel.wire.messages import response_type_for
from semel.wire.server import SERVER_VERSIONS
from semel.wire.shape import nested_entity

AGES: Final = ("oldest", "middle", "newest")
"""Of the versions of an API that this broker and the embedded one both serve."""

NOT_READY: Final = frozenset(
    {
        ErrorCode.coordinator_not_available,
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.not_coordinator,
        ErrorCode.concurrent_transactions,
        ErrorCode.not_leader_or_follower,
    }
)
"""What Kafka says while a topic is made or loaded, or markers are on their way."""

_WAIT_S: Final = 30.0
_POLL_S: Final = 0.01
_TIMEOUT_S: Final = 40.0
_VERSION_MAX: Final = 20


class RawClient:
    """One connection. A broker answers a connection's requests one by one: who waits for two answers needs two."""

    def __init__(self, bootstrap: str) -> None:
        (address,) = parse_bootstrap(bootstrap)
        self._socket = socket.create_connection(address, timeout=_TIMEOUT_S)
        self._correlation_id = 0
        self._waiting: list[tuple[int, type[ResponsePayload]]] = []
        answer = self.call(Api.API_VERSIONS, 0)
        self._served = {int(one.api_key): VersionRange(one.min_version, one.max_version) for one in answer.api_keys}

    def close(self) -> None:
        self._socket.close()

    def serves(self, api: Api) -> bool:
        return api in self._served

    def version(self, api: Api, age: str = "newest", *, protocol: int = 1, lowest: int = 0, highest: int = 99) -> int:
        """The oldest, middle or newest version that both sides serve, of those that speak this transaction protocol."""
        theirs, ours = self._served[api], SERVER_VERSIONS[api]
        if api in PROTOCOL_2_VERSIONS:
            since = PROTOCOL_2_VERSIONS[api]
            lowest, highest = (max(lowest, since), highest) if protocol == 2 else (lowest, min(highest, since - 1))
        lowest = max(lowest, theirs.lowest, ours.lowest)
        highest = min(highest, theirs.highest, ours.highest)
        assert lowest <= highest, f"{api.name}: no version is served by both, {theirs} and {ours}"
        return {"oldest": lowest, "middle": (lowest + highest) // 2, "newest": highest}[age]

    def call(self, api: Api, version: int, /, **fields: Any) -> Any:
        self.send(api, version, **fields)
        return self.receive()

    def send(self, api: Api, version: int, /, **fields: Any) -> None:
        """Send without waiting; `receive` gives the answers in the order of the requests."""
        request = request_of(api, version, fields)
        self._correlation_id += 1
        self._waiting.append((self._correlation_id, response_type_for(request)))
        self._socket.sendall(b"".join(encode_request(request, self._correlation_id, "raw")))

    def receive(self) -> Any:
        correlation_id, response_type = self._waiting.pop(0)
        frame = self._read(int.from_bytes(self._read(4), "big"))
        assert int.from_bytes(frame[:4], "big") == correlation_id
        return decode_response(response_type, frame)

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self._socket.recv(size - len(data))
            if not piece:
                raise WireError("The broker closed the connection.")
            data += piece
        return bytes(data)


@contextmanager
def connect(bootstrap: str) -> Iterator[RawClient]:
    with closing(RawClient(bootstrap)) as raw:
        yield raw


Connect = Callable[[], AbstractContextManager[RawClient]]


def settled(ask: Callable[[], Any], code_of: Callable[[Any], ErrorCode] = lambda answer: answer.error_code) -> Any:
    """The first answer that is not about the broker's not being ready."""
    deadline = time.monotonic() + _WAIT_S
    while code_of(answer := ask()) in NOT_READY:
        assert time.monotonic() < deadline, f"the broker still answers {code_of(answer).name}"
        time.sleep(_POLL_S)
    return answer


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float = _WAIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not after {timeout_s:g} s: {what}"
        time.sleep(_POLL_S)


def request_of(api: Api, version: int, fields: Mapping[str, Any]) -> RequestPayload:
    known = _fields_of_any_version(api)
    assert fields.keys() <= known, f"{api.name} has no {fields.keys() - known} in any version"
    return cast(RequestPayload, _entity(load_request_schema(api, version), fields))


@cache
def _fields_of_any_version(api: Api) -> frozenset[str]:
    names: set[str] = set()
    for version in range(_VERSION_MAX):
        try:
            names.update(field.name for field in dataclasses.fields(load_request_schema(api, version)))
        except UnknownEntity:  # kio has not every version
            continue
    return frozenset(names)


def _entity(schema: type[Entity], values: Mapping[str, Any]) -> Entity:
    return schema(
        **{
            field.name: _plain(field, values[field.name])
            for field in dataclasses.fields(schema)
            if field.name in values
        }
    )


def _plain(field: dataclasses.Field[Any], value: Any) -> Any:
    nested, is_array = nested_entity(field.type), "tuple" in str(field.type)
    if value is None:
        return None
    if nested is not None:
        return tuple(_entity(nested, one) for one in value) if is_array else _entity(nested, value)
    if str(field.metadata.get("kafka_type", "")).startswith("timedelta"):
        return timedelta(milliseconds=value)
    return tuple(value) if is_array else value
