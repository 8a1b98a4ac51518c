"""How an idle relay hears of new rows before it is time to look for them. Only for speed: it looks all the same.

Postgres tells by NOTIFY, which whoever writes a row may send in the same transaction. SQLite counts the commits of
other connections, in this process or in others, and to read that count costs microseconds.
"""

from __future__ import annotations

import select
import sqlite3
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final

from semel.bridges.postgres_url import with_timeouts
from semel.bridges.retries import LOG

if TYPE_CHECKING:
    import psycopg

CHANNEL: Final = "semel_relay"
"""The channel of Postgres' notifications, for all outbox tables of a database. What they say does not matter."""

_LOOK_S: Final = 0.005
"""How often the count of SQLite's commits is read."""
_LISTEN_AGAIN_S: Final = 5.0


class Waker(ABC):
    """Belongs to the relay's thread."""

    @abstractmethod
    def wait(self, seconds: float) -> bool:
        """Return after so long, or at once with True when rows may have been committed since the last call."""

    def close(self) -> None:  # noqa: B027
        """Nothing is held open by default."""


class Clock(Waker):
    """Only time wakes."""

    def wait(self, seconds: float) -> bool:
        time.sleep(seconds)
        return False


class PostgresWaker(Waker):
    """Listens on a connection of its own. Where that cannot be, time alone wakes, and it tries again."""

    def __init__(self, uri: str) -> None:
        self._uri = with_timeouts(uri)
        self._connection: psycopg.Connection[Any] | None = None
        self._listen_at = 0.0

    def wait(self, seconds: float) -> bool:
        import psycopg

        try:
            is_new = self._connection is None and self._listen()
            if self._connection is not None:
                return is_new or self._wait_for_notice(self._connection, seconds)
        except (psycopg.Error, OSError) as error:
            LOG.warning("Postgres cannot wake the relay, which looks for new rows by the clock meanwhile: %s", error)
            self.close()
        time.sleep(seconds)
        return False

    def _listen(self) -> bool:
        """True if it listens since now: what was written before has to be looked for."""
        import psycopg

        if time.monotonic() < self._listen_at:
            return False
        self._listen_at = time.monotonic() + _LISTEN_AGAIN_S
        self._connection = psycopg.connect(self._uri, autocommit=True, application_name="semel-relay-waker")
        self._connection.execute(f"LISTEN {CHANNEL}")
        return True

    def _wait_for_notice(self, connection: psycopg.Connection[Any], seconds: float) -> bool:
        if _take_notices(connection):
            return True
        readable, _, _ = select.select([connection.pgconn.socket], [], [], seconds)
        if not readable:
            return False
        connection.pgconn.consume_input()
        return _take_notices(connection)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _take_notices(connection: psycopg.Connection[Any]) -> bool:
    """All that have come: one look finds the rows of them all."""
    has_come = False
    while connection.pgconn.notifies() is not None:
        has_come = True
    return has_come


class SqliteWaker(Waker):
    """Watches the file's own count of commits."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._seen = -1

    def wait(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            if self._has_changed():
                return True
            time.sleep(min(left_s, _LOOK_S))
        return self._has_changed()

    def _has_changed(self) -> bool:
        try:
            if self._connection is None:
                self._connection = sqlite3.connect(self._path, timeout=0)
            (count,) = self._connection.execute("PRAGMA data_version").fetchone()
        except sqlite3.Error as error:  # another one is moving the file's journal, or it is gone: the relay will see
            LOG.debug("the count of commits cannot be read: %s", error)
            self.close()
            return False
        before, self._seen = self._seen, count
        return count != before

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection, self._seen = None, -1
