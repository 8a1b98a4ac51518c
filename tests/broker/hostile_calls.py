"""A broker without sockets for tests of hostile input, and requests as bytes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from semel.verify.hostile_frames import World
from semel.verify.hostile_host import HostileHost
from semel.verify.simulated_network import make_request
from semel.wire.api import Api
from semel.wire.messages import encode_request

SECONDS_MAX = 5.0
"""What this bounds took minutes once, or for ever. Generous, since the machine may be busy."""

Work = Callable[[HostileHost, World], Awaitable[None]]
OnHost = Callable[[Work], None]


def runner_on_host(folder: Path) -> OnHost:
    """Something that starts a broker, lets the work be done and stops it, within bounded time."""

    def run(work: Work) -> None:
        async def whole() -> None:
            host = HostileHost(folder)
            await host.start()
            try:
                await work(host, await host.populate())
            finally:
                await host.stop()

        began = time.monotonic()
        asyncio.run(whole())
        assert time.monotonic() - began < 4 * SECONDS_MAX

    return run


def body_of(api: Api, version: int, **fields: Any) -> bytes:
    """A request without its size."""
    return b"".join(encode_request(make_request(api, version, fields), 1, "hostile"))[4:]
