"""What all clients together make the broker hold for them, and who has to go when it is too much."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from semel.errors import WireError

if TYPE_CHECKING:
    from semel.broker.connection import Connection

HELD_BYTES_MAX: Final = 512 << 20
NOTED_BYTES: Final = 1 << 20


class HeldMemory:
    """Frames that are not complete, requests that wait for their turn, and answers that nobody reads.

    One connection is bounded by itself, at some 100 MB; a few dozen hostile ones would still be the end of the process.
    So the one that holds most is closed as soon as all together hold more than `bytes_max`.
    """

    def __init__(self, bytes_max: int = HELD_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self.total_bytes = 0
        self._held: dict[Connection, int] = {}

    def note(self, connection: Connection, held_bytes: int) -> None:
        """Called by a connection whenever it holds `NOTED_BYTES` or more, and when it no longer does."""
        self.forget(connection)
        if held_bytes < NOTED_BYTES or connection.is_closed:
            return
        self._held[connection] = held_bytes
        self.total_bytes += held_bytes
        while self.total_bytes > self.bytes_max:
            largest = max(self._held, key=self._held.__getitem__)
            self.forget(largest)
            largest.refuse(WireError("of all clients it made the broker hold the most, and together it was too much"))

    def forget(self, connection: Connection) -> None:
        self.total_bytes -= self._held.pop(connection, 0)
