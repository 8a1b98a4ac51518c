"""Who asks, and what a handler may answer."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kio.static.protocol import ResponsePayload

if TYPE_CHECKING:
    from semel.broker.connection import Connection


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The client behind one request, as far as it has shown itself."""

    connection: Connection
    principal: str
    host: str
    client_id: str | None
    api_version: int
    correlation_id: int


@dataclass(frozen=True, slots=True)
class Encoded:
    """An answer that is a whole frame already."""

    pieces: Sequence[bytes | memoryview]


Answer = ResponsePayload | Encoded | None
"""What goes back to the client. None: it wants no answer."""

Reply = Answer | Awaitable[Answer]
"""What a handler returns: only what truly has to wait is awaitable."""
