"""Faults on purpose: requests that are answered late, with an error, or not at all, carried out or not.

For tests of clients. Which request it meets is said by API, by number and by what it asks for; everything else goes on
as usual.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kio.schema.errors import ErrorCode

from semel.broker.context import Answer
from semel.broker.dispatch import serve
from semel.broker.error_answers import error_answer
from semel.errors import ConfigError
from semel.wire.api import Api
from semel.wire.hot import read_produce_request
from semel.wire.server import SERVER_VERSIONS, decode_request

if TYPE_CHECKING:
    from semel.broker.connection import Connection
    from semel.broker.dispatch import Request


class Fault(Protocol):
    """What becomes of a request. A test may bring its own."""

    def serve(self, connection: Connection, request: Request) -> Awaitable[Answer]: ...


@dataclass(frozen=True, slots=True)
class Delay:
    """It takes longer, by the broker's clock: before the request is carried out, or between that and the answer."""

    ms: float
    carried_out: bool = False

    async def serve(self, connection: Connection, request: Request) -> Answer:
        answer = await _carry_out(connection, request) if self.carried_out else None
        await _wait(connection, self.ms)
        return answer if self.carried_out else await _carry_out(connection, request)


@dataclass(frozen=True, slots=True)
class Drop:
    """The answer never comes, and nothing else on this connection, which stays open: as when a network goes silent."""

    carried_out: bool

    async def serve(self, connection: Connection, request: Request) -> Answer:
        if self.carried_out:
            await _carry_out(connection, request)
        await _wait(connection, None)
        return None


@dataclass(frozen=True, slots=True)
class Cut:
    """The connection is closed in place of an answer."""

    carried_out: bool

    async def serve(self, connection: Connection, request: Request) -> Answer:
        if self.carried_out:
            await _carry_out(connection, request)
        connection.close()
        return None


@dataclass(frozen=True, slots=True)
class Error:
    """The answer has this code, for all that was asked. With `carried_out` it is a lie: the request took effect."""

    code: ErrorCode
    carried_out: bool = False

    async def serve(self, connection: Connection, request: Request) -> Answer:
        served = SERVER_VERSIONS[request.api]
        if not served.lowest <= request.version <= served.highest:
            return await _carry_out(connection, request)  # which refuses it, as nobody here can read it
        if self.carried_out:
            await _carry_out(connection, request)
        return error_answer(connection, request, self.code)


When = Callable[[Any], bool]
"""Takes the decoded request: kio's message, for Produce `semel.wire.hot.ProduceRequest`."""


@dataclass(eq=False)
class Injection:
    """A fault that was asked for; `served` is how often it has struck."""

    api: Api
    fault: Fault
    times: int
    skip: int
    when: When | None
    served: int = field(default=0, init=False)

    def strikes(self, request: Request) -> bool:
        if self.served == self.times or request.api is not self.api:
            return False
        if self.when is not None and not self.when(_decoded(request)):
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.served += 1
        return True


class Faults:
    """What is to go wrong. Tests inject from their own thread, the broker asks from its own.

    >>> faults = Faults()
    >>> once = faults.inject(Api.END_TXN, Cut(carried_out=True), when=lambda request: request.committed)
    >>> once.served
    0
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._injections: list[Injection] = []

    def inject(self, api: Api, fault: Fault, *, times: int = 1, skip: int = 0, when: When | None = None) -> Injection:
        """Let `fault` strike the next `times` requests of this API that `when` is true for, after the first `skip`."""
        if times < 1 or skip < 0:
            raise ConfigError(f"times={times} must be 1 or more, and skip={skip} must not be negative.")
        injection = Injection(api, fault, times, skip, when)
        with self._lock:
            self._injections.append(injection)
        return injection

    def clear(self) -> None:
        """From now on nothing goes wrong any more; what is under way does."""
        with self._lock:
            self._injections.clear()

    def next_for(self, request: Request) -> Fault | None:
        """The fault that meets this request: of several, the one that was injected first."""
        with self._lock:
            for injection in self._injections:
                if injection.strikes(request):
                    return injection.fault
        return None


def _decoded(request: Request) -> Any:
    if request.api is Api.PRODUCE:
        return read_produce_request(memoryview(request.frame), request.version)
    return decode_request(bytes(request.frame), request.api, request.version)[1]


async def _carry_out(connection: Connection, request: Request) -> Answer:
    reply = serve(connection.broker, connection, request)
    return await reply if isinstance(reply, Awaitable) else reply


async def _wait(connection: Connection, delay_ms: float | None) -> None:
    """Until the time is over or the client has gone; without a time only the latter."""
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end() -> None:
        if not over.done():
            over.set_result(None)

    connection.on_close[end] = None
    timer = None if delay_ms is None else connection.broker.clock.call_later(delay_ms, end)
    try:
        await over
    finally:
        connection.on_close.pop(end, None)
        if timer is not None:
            timer.cancel()
