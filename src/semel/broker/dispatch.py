"""From a frame to its handler: which API, which version, and whether this client may ask yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from semel.broker.context import Reply, RequestContext
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


@dataclass(frozen=True, slots=True)
class Request:
    """A frame whose head has been read."""

    api: Api
    version: int
    correlation_id: int
    frame: bytearray


@cache
def handler_for(api: Api) -> Handler:
    return import_module(_MODULES[api]).handle


def read_request(connection: Connection, frame: bytearray) -> Request:
    """Read the head of a frame. Raises WireError when the conversation cannot go on."""
    key, version, correlation_id = read_request_head(frame)
    api = _API_BY_KEY.get(key)
    if api is None:
        raise WireError(f"it asked for API {key}, which is not known here")
    sasl = connection.sasl
    if sasl is not None and not sasl.admits(api):
        raise WireError(f"it asked for {api.name} without being logged in")
    return Request(api, version, correlation_id, frame)


def serve(broker: Broker, connection: Connection, request: Request) -> Reply:
    """Hand a request to its handler."""
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
        client_id, message = decode_request(bytes(request.frame), api, version)
    context = RequestContext(
        connection, connection.principal, connection.host, client_id, version, request.correlation_id
    )
    return handler_for(api)(broker, context, message)
