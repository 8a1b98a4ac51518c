"""A whole broker on a temporary directory, asked by bytes like a client does, with a clock that moves when told."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from handler_calls import _make as make_entity
from kio.index import load_request_schema

from semel.broker.context import Encoded, RequestContext
from semel.broker.dispatch import handler_for
from semel.broker.durability import Fsync
from semel.broker.pacing import finish_now
from semel.broker.state import Broker, BrokerOptions
from semel.wire.api import Api
from semel.wire.messages import decode_response, encode_request, response_type_for
from semel.wire.server import SERVER_VERSIONS, decode_request, encode_response


class StillClock:
    """Stands still; nothing is called later, the tests do what is due."""

    def __init__(self) -> None:
        self.time_ms = 1_700_000_000_000

    def now_ms(self) -> int:
        return self.time_ms

    def call_later(self, delay_ms: float, callback: Callable[[], None]) -> Any:
        return None


class Asker:
    """Asks a broker. With an `age`, every API is asked in that version, or the nearest that is served."""

    def __init__(self, broker: Broker, clock: StillClock, age: int) -> None:
        self.broker = broker
        self.clock = clock
        self.age = age

    def version_of(self, api: Api) -> int:
        served = SERVER_VERSIONS[api]
        return min(max(self.age, served.lowest), served.highest)

    async def ask(
        self, api: Api, version: int | None = None, /, *, principal: str = "User:ANONYMOUS", **fields: object
    ) -> Any:
        version = self.version_of(api) if version is None else version
        request = make_entity(load_request_schema(api, version), fields)
        frame = b"".join(encode_request(request, 7, "client"))[4:]
        client_id, decoded = decode_request(frame, api, version)
        context = RequestContext(cast(Any, None), principal, "127.0.0.1", client_id, version, 7)
        reply = handler_for(api)(self.broker, context, decoded)
        if inspect.isawaitable(reply):
            reply = await asyncio.wait_for(reply, 5)
        pieces = reply.pieces if isinstance(reply, Encoded) else encode_response(cast(Any, reply), 7)
        return decode_response(response_type_for(request), b"".join(pieces)[4:])

    async def pass_time(self, ms: int) -> None:
        self.clock.time_ms += ms
        finish_now(self.broker.groups.tick())
        await self.broker.transactions.tick()
        await asyncio.sleep(0)


@asynccontextmanager
async def running(data: Path, *, age: int = 99, fsync: Fsync = Fsync.NEVER, **config: str) -> AsyncIterator[Asker]:
    """A broker with the topic `t` of two partitions."""
    clock = StillClock()
    options = BrokerOptions(
        data=data, fsync=fsync, config={key.replace("_", "."): text for key, text in config.items()}
    )
    broker = Broker(options, clock=clock)
    await broker.start()
    if broker.topics.get("t") is None:
        broker.topics.create(broker.topics.decide_create("t", broker.settings, partition_count=2, configs={}))
    try:
        yield Asker(broker, clock, age)
    finally:
        await broker.stop()


def counting_turns(asker: Asker) -> list[int]:
    """A list that grows with every turn that long requests take from here on."""
    turns: list[int] = []
    wait_turn = asker.broker.lane.wait_turn

    async def counted() -> None:
        turns.append(len(turns))
        await wait_turn()

    asker.broker.lane.wait_turn = counted
    return turns
