"""Logins that failed: noted, counted, and answered late, so that guessing passwords takes time.

The delay is Kafka's `connection.failed.authentication.delay.ms`. It concerns one connection, which is closed after its
answer; the event loop serves the others meanwhile. A right password is never delayed.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from semel.broker.connection import Connection
    from semel.broker.context import Answer

_LOG: Final = logging.getLogger("semel.broker")


def note_failed_login(connection: Connection) -> None:
    """One line and one count. The line names known users only: people type passwords where a name is asked for."""
    assert connection.sasl is not None
    connection.broker.metrics.failed_logins += 1
    _LOG.warning("a login from %s failed: %s", connection.host, connection.sasl.failure)


async def answer_late(connection: Connection, answer: Answer) -> Answer:
    """The answer to a failed login, when the delay is over or the client has gone."""
    broker = connection.broker
    delay_ms = broker.settings.failed_login_delay_ms
    if not delay_ms:
        return answer
    delayed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end() -> None:
        if not delayed.done():
            delayed.set_result(None)

    timer = broker.clock.call_later(delay_ms, end)
    connection.on_close[end] = None
    try:
        await delayed
    finally:
        timer.cancel()
        connection.on_close.pop(end, None)
    return answer
