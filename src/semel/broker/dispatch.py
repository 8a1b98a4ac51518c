"""From a frame to its handler: which API, which version, and whether this client may ask yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from semel.broker.context import Reply, RequestContext
from semel.broker.error_answers import mirrored
from semel.errors import WireError
from semel.wire.api import Api
from semel.wire.server import SERVER_VERSIONS, decode_request, read_request_head

if TYPE_CHECKING:
    from semel.broker.connection import Connection
    from semel.broker.state import Broker

Handler = Callable[["Broker", RequestContext, Any], Reply]

# Handlers are loaded when they are first asked for: most clients use a dozen of them.
_MODULES: Final[Mapping[Api, str]] = {
    api: f"semel.broker.handlers.k{int(api):02d}_{api.name.lower()}" for api in SERVER_VERSIONS
}
_API_BY_KEY: Final[Mapping[int, Api]] = {int(api): api for api in SERVER_VERSIONS}
_READS_ITS_FRAME: Final = frozenset({Api.PRODUCE})
"""Its handler takes the frame itself, since the records in it are not to be copied."""

_OF_GROUPS: Final = frozenset(
    {
        Api.OFFSET_COMMIT,
        Api.OFFSET_FETCH,
        Api.JOIN_GROUP,
        Api.HEARTBEAT,
        Api.LEAVE_GROUP,
        Api.SYNC_GROUP,
        Api.DESCRIBE_GROUPS,
        Api.LIST_GROUPS,
        Api.ADD_OFFSETS_TO_TXN,
        Api.TXN_OFFSET_COMMIT,
        Api.DELETE_GROUPS,
        Api.OFFSET_DELETE,
        Api.CONSUMER_GROUP_HEARTBEAT,
        Api.CONSUMER_GROUP_DESCRIBE,
    }
)
"""With the first of them the coordinator of groups is loaded, which takes longer than one turn of the loop should."""
_LOADED: Final = set[int]()

# Ids are kept for as long as their group or producer is, and repeated in every record of it. Kafka takes up to 32,767
# bytes of them.
ID_CHARACTERS_MAX: Final = 1_024
CLIENT_ID_CHARACTERS_MAX: Final = 255
_IDS: Final = (
    "group_id",
    "member_id",
    "group_instance_id",
    "instance_id",
    "rack_id",
    "transactional_id",
    "v3_and_below_transactional_id",
)
OTHER_FRAME_BYTES_MAX: Final = 16 << 20
"""Of requests that are not Produce: decoded, they take several times as much."""
CREDENTIALS_FRAME_BYTES_MAX: Final = 2 << 20
"""Thousands of credentials. In larger frames there are salts that are refused in any case."""


@dataclass(frozen=True, slots=True)
class Request:
    """A frame whose head has been read."""

    api: Api
    version: int
    correlation_id: int
    frame: bytearray


Decoded = tuple[str | None, Any]
"""The client's id and its request."""


@cache
def handler_for(api: Api) -> Handler:
    handler = import_module(_MODULES[api]).handle
    if api in _OF_GROUPS:
        import_module("semel.broker.group_runtime")
    _LOADED.add(int(api))
    return handler


def needs_preparation(key: int) -> bool:
    """Whether the handler of this API, if there is one, has never been asked for, and takes a while to load."""
    return key not in _LOADED and key in _API_BY_KEY


def prepare(request: Request) -> Decoded | None:
    """Load the handler of a request and read the request, as far as `serve` would. To be called in any thread."""
    handler_for(request.api)
    served = SERVER_VERSIONS[request.api]
    is_served = served.lowest <= request.version <= served.highest
    return _decode(request) if is_served and request.api not in _READS_ITS_FRAME else None


def _decode(request: Request) -> Decoded:
    return decode_request(bytes(request.frame), request.api, request.version)


def read_request(connection: Connection, frame: bytearray) -> Request:
    """Read the head of a frame. Raises WireError when the conversation cannot go on."""
    key, version, correlation_id = read_request_head(frame)
    api = _API_BY_KEY.get(key)
    if api is None:
        raise WireError(f"it asked for API {key}, which is not known here")
    bytes_max = CREDENTIALS_FRAME_BYTES_MAX if api is Api.ALTER_USER_SCRAM_CREDENTIALS else OTHER_FRAME_BYTES_MAX
    if len(frame) > bytes_max and api is not Api.PRODUCE:
        raise WireError(f"its {api.name} has {len(frame):,} bytes; at most {bytes_max:,} are taken")
    sasl = connection.sasl
    if sasl is not None and not sasl.admits(api):
        if sasl.has_session_ended:
            connection.broker.metrics.expired_logins += 1
            raise WireError(f"its login was older than connections.max.reauth.ms when it asked for {api.name}")
        raise WireError(f"it asked for {api.name} without being logged in")
    return Request(api, version, correlation_id, frame)


def serve(broker: Broker, connection: Connection, request: Request, decoded: Decoded | None = None) -> Reply:
    """Hand a request to its handler. `decoded` is what `prepare` has made of it, if it was called."""
    api, version = request.api, request.version
    served = SERVER_VERSIONS[api]
    if not served.lowest <= version <= served.highest:
        if api is Api.API_VERSIONS:
            return import_module(_MODULES[api]).answer_newer_client(broker, request.correlation_id)
        raise WireError(
            f"it asked for {api.name} in version {version}, and {served.lowest}-{served.highest} are served"
        )
    if api in _READS_ITS_FRAME:
        client_id, message = None, request.frame
    else:
        client_id, message = decoded or _decode(request)
        if any(len(getattr(message, name, None) or "") > ID_CHARACTERS_MAX for name in _IDS):
            return mirrored(message, ErrorCode.invalid_request)
        if client_id is not None:
            client_id = client_id[:CLIENT_ID_CHARACTERS_MAX]
    context = RequestContext(
        connection, connection.principal, connection.host, client_id, version, request.correlation_id
    )
    return handler_for(api)(broker, context, message)
