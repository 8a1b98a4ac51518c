"""`semel.Outbox`: an application relays its own outbox, right after its commits; the table is the safety net.

Each instance of the application has one. They take turns: one of them relays, the others wait until it is gone. The
turn saves work and is not what keeps rows from being repeated: that is the relay's epoch in Kafka, which also holds
when the turn is lost without anybody noticing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from semel.bridges.addresses import is_postgres_address
from semel.bridges.merge import quote_table
from semel.bridges.postgres_url import with_timeouts
from semel.bridges.relay.relay import relay
from semel.bridges.relay.waking import CHANNEL
from semel.bridges.retries import LOG
from semel.errors import ConfigError, Fenced, InvalidState

if TYPE_CHECKING:
    import psycopg

    Connection = sqlite3.Connection | psycopg.Connection[Any]

_STANDBY_S: Final = 0.5
"""How often an instance that does not relay asks whether it is its turn."""
_AGAIN_S: Final = 5.0
"""How long after an error the relay is started again."""


class Outbox:
    """Takes events into a table, in your own transaction, and relays them from a thread of this process.

    `database` and the options are those of `semel.relay`. An event is on its way milliseconds after your commit. If
    this process dies then, another instance of the name relays it, or the next one that starts: once, in its order.

    >>> with Outbox("shop.db", name="shop", bootstrap="127.0.0.1:9092") as outbox:  # doctest: +SKIP
    ...     with shop:
    ...         shop.execute("INSERT INTO orders VALUES (1, 'tea')")
    ...         outbox.send(shop, "orders", '{"item": "tea"}', key="1")
    """

    def __init__(self, database: str | Path, *, name: str, table: str = "outbox", **options: Any) -> None:
        if unfit := options.keys() & {"stop", "idle_ms", "end_on_sigterm", "on_ready"}:
            raise ConfigError(f"{min(unfit)}= is for semel.relay: an Outbox relays until it is closed.")
        self._database = database
        self._table = quote_table(table)
        self._options = {"name": name, "table": table, **options}
        self._turn = _make_turn(database, name)
        self._stop = threading.Event()
        self._started = threading.Event()
        self._thread: threading.Thread | None = None
        self.trouble: Exception | None = None
        """What keeps this instance from relaying; None if nothing does. Events are safe in the table meanwhile."""

    def __enter__(self) -> Self:
        """Start to relay, or to wait for a turn. Raises what is wrong with options, table or cluster."""
        if self._thread is not None:
            raise InvalidState("This Outbox was started before: make a new one.")
        self._thread = threading.Thread(target=self._run, name="semel-outbox", daemon=True)
        self._thread.start()
        self._started.wait()
        if self.trouble is not None:
            self.close()
            raise self.trouble
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the relay after its present transaction. What it has not relayed stays in the table."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._turn.leave()

    # -- events ------------------------------------------------------------------------------------------------------

    def send(
        self,
        connection: Connection,
        topic: str,
        value: str | bytes | None,
        *,
        key: str | bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Write an event into the table, by your own connection: it is part of your transaction.

        For a table like `semel.outbox_table_sql` makes it. Write rows of another one by yourself, and `wake`.
        """
        columns = f"INSERT INTO {self._table} (topic, key, value, headers)"
        row = (topic, key, value, None if headers is None else json.dumps(headers))
        if isinstance(connection, sqlite3.Connection):
            connection.execute(f"{columns} VALUES (?, ?, ?, ?)", row)
            return
        _check_is_psycopg(connection)
        connection.execute(
            f"WITH written AS ({columns} VALUES (%s, %s, %s, %s) RETURNING 1) "
            f"SELECT pg_notify('{CHANNEL}', '') FROM written".encode(),
            row,
        )

    def wake(self, connection: Connection) -> None:
        """Say that this transaction writes events: the relay looks for them when it commits.

        Not needed after `send`, in SQLite, or where a trigger does it. Without it an event waits for `poll_ms`.
        """
        if not isinstance(connection, sqlite3.Connection):
            _check_is_psycopg(connection)
            connection.execute(f"SELECT pg_notify('{CHANNEL}', '')".encode())

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            wait_s = _STANDBY_S
            try:
                if self._turn.try_take():
                    relay(
                        self._database,
                        **self._options,
                        stop=self._stop,
                        end_on_sigterm=False,
                        on_ready=self._relays,
                    )
            except Fenced as error:
                LOG.info("Another relay of the name %r has taken over: %s", self._options["name"], error)
            except Exception as error:  # whichever it is: the application's own work does not depend on it
                self.trouble, wait_s = error, _AGAIN_S
                if self._started.is_set():
                    LOG.error("Events stay in the table, and are relayed when this is over: %s", error)
            else:
                self.trouble = None
            self._turn.leave_if_taken()
            self._started.set()
            self._stop.wait(wait_s)

    def _relays(self) -> None:
        self.trouble = None
        self._started.set()


def _check_is_psycopg(connection: object) -> None:
    kinds = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(connection).__mro__}
    if "psycopg.Connection" not in kinds:
        raise ConfigError(
            f"An Outbox cannot write by a {type(connection).__qualname__}: give it a connection of sqlite3 or psycopg "
            f"3, or insert the row yourself, with SELECT pg_notify('{CHANNEL}', '') in the same transaction."
        )


class _Turn(ABC):
    """One instance at a time has it, for as long as it lives."""

    @abstractmethod
    def try_take(self) -> bool: ...

    @abstractmethod
    def leave(self) -> None:
        """Let another one have it, and close what was opened for it."""

    def leave_if_taken(self) -> None:
        self.leave()


class _PostgresTurn(_Turn):
    """An advisory lock of a session, which Postgres releases with it."""

    def __init__(self, uri: str, name: str) -> None:
        self._uri = with_timeouts(uri)
        digest = hashlib.sha256(f"semel outbox {name}".encode()).digest()
        self._key = int.from_bytes(digest[:8], "big", signed=True)
        self._connection: psycopg.Connection[Any] | None = None
        self._is_taken = False

    def try_take(self) -> bool:
        import psycopg

        try:
            if self._connection is None:
                self._connection = psycopg.connect(self._uri, autocommit=True, application_name="semel-outbox-turn")
            [(self._is_taken,)] = self._connection.execute("SELECT pg_try_advisory_lock(%s)", (self._key,)).fetchall()
        except BaseException:
            self.leave()
            raise
        return self._is_taken

    def leave(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection, self._is_taken = None, False

    def leave_if_taken(self) -> None:
        if self._is_taken:  # an instance that waits keeps its connection for the next question
            self.leave()


class _SqliteTurn(_Turn):
    """A lock on a file beside the database, which the system releases with the process."""

    def __init__(self, path: str | Path, name: str) -> None:
        self._path = f"{path}.{name}.turn"
        self._file: int | None = None

    def try_take(self) -> bool:
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return False
        self._file = handle
        return True

    def leave(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _make_turn(database: str | Path, name: str) -> _Turn:
    if is_postgres_address(database):
        return _PostgresTurn(str(database), name)
    return _SqliteTurn(database, name)
