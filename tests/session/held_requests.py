"""A fault for scenes that are built step by step: a request that waits at the broker until the test lets it go on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable

from semel.broker.connection import Connection
from semel.broker.context import Answer
from semel.broker.dispatch import Request, serve


class Hold:
    """Before it is carried out. Whoever has sent it may be gone when it goes on."""

    def __init__(self) -> None:
        self.has_arrived = threading.Event()
        self._may_go_on = threading.Event()

    def let_go(self) -> None:
        self._may_go_on.set()

    async def serve(self, connection: Connection, request: Request) -> Answer:
        self.has_arrived.set()
        while not self._may_go_on.is_set():
            await asyncio.sleep(0.005)
        reply = serve(connection.broker, connection, request)
        return await reply if isinstance(reply, Awaitable) else reply
