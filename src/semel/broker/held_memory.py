"""One budget for all that clients can make the broker hold, and who has to go when it is spent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kio.schema.errors import ErrorCode

from semel.core.refusal import Refused
from semel.errors import WireError

if TYPE_CHECKING:
    from semel.broker.connection import Connection

HELD_BYTES_MAX: Final = 512 << 20
"""The default of `semel.client.memory.max.bytes`."""
HELD_BYTES_MIN: Final = 32 << 20

# Parts of the budget, as fractions of one. The tables' shares and the connections' make up the whole.
CONNECTIONS_SHARE: Final = 2
BEFORE_LOGIN_SHARE: Final = 8
GROUPS_SHARE: Final = 8
TRANSACTIONAL_IDS_SHARE: Final = 8
PRODUCERS_SHARE: Final = 8
PARTITIONS_SHARE: Final = 16
FETCH_SESSIONS_SHARE: Final = 32
RULES_SHARE: Final = 32
CREDENTIALS_SHARE: Final = 64

PARTITION_BYTES: Final = 5_000
"""About what an empty partition takes, with a topic of its own."""

_TIGHT: Final = 0.75
_NEARLY_ALL: Final = 0.75
_ABOUT_EQUAL_BYTES: Final = 32 << 10
_ANSWER_SHARE: Final = 4
_ANSWER_BYTES_MIN: Final = 1 << 20
_ANSWER_BYTES_MAX: Final = 8 << 20
"""To read more at once would hold the loop for longer than any client needs."""
_RECOUNT_INTERVAL_MS: Final = 1_000
_NEARLY_FULL: Final = 0.9


class HeldMemory:
    """What connections hold: frames that are not complete, requests that are queued or wait, answers that nobody reads.

    All connections share half of the budget. When they hold more than that, the one that holds most is closed.
    Connections that have not logged in share an eighth. Three quarters of the way, no connection reads ahead of the
    request that it waits for; answers to fetches get smaller as the room does. The other half is for what clients
    leave behind in tables: groups, transactional ids, producers, partitions, fetch sessions, ACLs and
    credentials. What does not fit the share of its table is refused, or takes the place of what was used longest ago.
    """

    def __init__(self, bytes_max: int = HELD_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self.connections_max = bytes_max // CONNECTIONS_SHARE
        self.before_login_max = bytes_max // BEFORE_LOGIN_SHARE
        self.total_bytes = 0
        """Of all connections."""
        self.before_login_bytes = 0
        self._held: dict[Connection, int] = {}
        self._before_login: dict[Connection, int] = {}

    @property
    def is_tight(self) -> bool:
        return self.total_bytes > self.connections_max * _TIGHT

    def answer_bytes_max(self) -> int:
        """How large the answer to a fetch may be. A first batch that is larger goes out whole all the same."""
        left = self.connections_max - self.total_bytes
        return min(_ANSWER_BYTES_MAX, max(_ANSWER_BYTES_MIN, left // _ANSWER_SHARE))

    def note(self, connection: Connection, held_bytes: int) -> None:
        """Called by a connection whenever what it holds has changed."""
        self.forget(connection)
        if connection.is_closed:
            return
        self._held[connection] = held_bytes
        self.total_bytes += held_bytes
        if not connection.is_logged_in:
            self._before_login[connection] = held_bytes
            self.before_login_bytes += held_bytes
            while self.before_login_bytes > self.before_login_max:
                self._close_stranger()
        while self.total_bytes > self.connections_max:
            self._close_largest()

    def check_room(self, connection: Connection, added_bytes: int, code: ErrorCode) -> None:
        """Whether a request of the connection may take so much more. Raises Refused.

        With `code` if others leave no room for it at this moment; with POLICY_VIOLATION if it alone takes nearly all.
        """
        held_bytes = self._held.get(connection, 0) + added_bytes
        if self.total_bytes + added_bytes <= self.connections_max:
            return
        is_own = held_bytes > self.connections_max * _NEARLY_ALL
        raise Refused(
            ErrorCode.policy_violation if is_own else code,
            f"To look through these records takes more than {held_bytes:,} bytes of memory. All clients together may "
            f"take {self.connections_max:,}, which is half of semel.client.memory.max.bytes, and they take "
            f"{self.total_bytes:,} now. {'Raise that setting.' if is_own else 'Try again.'}",
        )

    def forget(self, connection: Connection) -> None:
        self.total_bytes -= self._held.pop(connection, 0)
        self.before_login_bytes -= self._before_login.pop(connection, 0)

    def _close_largest(self) -> None:
        # Of equals the newest: the others were there first.
        largest = max(reversed(self._held), key=self._held.__getitem__)
        self._close(largest, "all clients")

    def _close_stranger(self) -> None:
        # Of those that are about equal the oldest: to log in takes a moment, and who stays without is in no hurry.
        held = self._before_login
        largest = max(held, key=lambda one: held[one] // _ABOUT_EQUAL_BYTES)
        self._close(largest, "those that have not logged in")

    def _close(self, connection: Connection, of_whom: str) -> None:
        self.forget(connection)
        connection.refuse(WireError(f"of {of_whom} it made the broker hold the most, and together it was too much"))


class Table:
    """What clients have left behind in one part of the broker's state.

    It is estimated upwards as things are added, and counted again when the estimate is over the share: things also go,
    by time or by request. A table that is nearly full is counted at most once a second, since that takes a while.
    """

    def __init__(self, name: str, bytes_max: int, count_bytes: Callable[[], int], now_ms: Callable[[], int]) -> None:
        self.name = name
        self.bytes_max = bytes_max
        self.held_bytes = 0
        self._count_bytes = count_bytes
        self._now_ms = now_ms
        self._full_ms = -_RECOUNT_INTERVAL_MS

    def take(self, added_bytes: int, code: ErrorCode) -> None:
        """Make room for something that is about to be added. Raises Refused with `code` when there is none."""
        if self.held_bytes + added_bytes > self.bytes_max:
            self._count_again()
            if self.held_bytes + added_bytes > self.bytes_max:
                raise Refused(
                    code,
                    f"The {self.name} take {self.held_bytes:,} bytes of memory, and {self.bytes_max:,} are their share "
                    "of semel.client.memory.max.bytes. Nothing was changed. Remove some, or raise that setting.",
                )
        self.held_bytes += added_bytes

    def _count_again(self) -> None:
        now_ms = self._now_ms()
        if now_ms - self._full_ms >= _RECOUNT_INTERVAL_MS:
            self.held_bytes = self._count_bytes()
            if self.held_bytes > self.bytes_max * _NEARLY_FULL:
                self._full_ms = now_ms
