"""A connection that speaks Postgres' replication protocol, by libpq through psycopg's own binding (`psycopg.pq`).

libpq hands the messages out of COPY BOTH; what they say is in a few fixed fields. One thread reads and answers.
"""

from __future__ import annotations

import select
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final, NamedTuple

from semel.bridges.capture.lsn import format_lsn
from semel.bridges.merge import literal, quote
from semel.bridges.postgres import translate_error
from semel.bridges.postgres_url import check_url, with_timeouts
from semel.errors import ConfigError, DatabaseError, SemelError

OPTIONS: Final = (
    "-c datestyle=ISO -c intervalstyle=postgres -c extra_float_digits=3 -c timezone=UTC -c bytea_output=hex "
    "-c statement_timeout=0 -c lock_timeout=0 -c idle_in_transaction_session_timeout=0"
)
"""How values are printed, the same in the snapshot and in the stream; and a snapshot may take long."""
_DATA: Final = struct.Struct(">cQQq")
_KEEPALIVE: Final = struct.Struct(">cQqB")
_STATUS: Final = struct.Struct(">cQQQqB")
_EPOCH_S: Final = 946_684_800
_LOOK_S: Final = 0.1
_OBJECT_IN_USE: Final = "55006"
_NO_WALSENDER: Final = ("walsender", "wal sender")


class Received(NamedTuple):
    """What the server has sent."""

    data: bytes | None
    """A message of the output plugin; None for a keepalive."""
    end_lsn: int
    """Everything that was committed before it has been sent."""
    wants_answer: bool = False


class SlotMade(NamedTuple):
    """A new slot: its stream begins exactly where the snapshot ends."""

    lsn: str
    snapshot: str


class ServerError(Exception):
    """The server's own words."""

    def __init__(self, text: str, sqlstate: str | None) -> None:
        super().__init__(text)
        self.sqlstate = sqlstate


def import_driver() -> ModuleType:
    try:
        import psycopg
    except ImportError as error:
        raise ConfigError("Change capture needs Postgres' drivers: pip install 'semel[postgres]'.") from error
    return psycopg


def connection_string(uri: str, **more: str) -> str:
    """The user's, with our way to print values, and with timeouts."""
    check_url(uri)
    import_driver()
    from psycopg.conninfo import conninfo_to_dict, make_conninfo

    try:
        given = conninfo_to_dict(with_timeouts(uri))
    except Exception as error:
        raise translate_error(error, uri, is_connecting=True) from None
    options = f"{given.get('options') or ''} {OPTIONS}".strip()
    return make_conninfo("", **{**given, "options": options, "client_encoding": "UTF8", **more})


class ReplicationConnection:
    """Opened when it is made."""

    def __init__(self, uri: str, application_name: str, is_stopping: Callable[[], bool]) -> None:
        self._uri = uri
        self._is_stopping = is_stopping
        self._pq: Any = import_driver().pq
        written = connection_string(uri, replication="database", application_name=application_name)
        self._connection: Any = self._pq.PGconn.connect(written.encode())
        if self._connection.status != self._pq.ConnStatus.OK:
            raise self._refused(self._connection.get_error_message())
        self._connection.nonblocking = 1

    def close(self) -> None:
        self._connection.finish()

    # -- commands ----------------------------------------------------------------------------------------------------

    def make_slot(self, slot: str, version: int, *, failover: bool) -> SlotMade:
        """Waits until every transaction has ended that is open now. The snapshot lives until the next command."""
        if version >= 150_000:
            options = f"(SNAPSHOT 'export'{', FAILOVER true' if failover else ''})"
        else:
            options = "EXPORT_SNAPSHOT"
        [[_, lsn, snapshot, _]] = self._run(f"CREATE_REPLICATION_SLOT {quote(slot)} LOGICAL pgoutput {options}")
        return SlotMade(lsn, snapshot)

    def drop_slot(self, slot: str, *, waits: bool = True) -> None:
        """Raises if it is in use, unless it `waits` for its end."""
        self._run(f"DROP_REPLICATION_SLOT {quote(slot)}{' WAIT' if waits else ''}")

    def timeline_history(self, timeline: int) -> str:
        [[_, history]] = self._run(f"TIMELINE_HISTORY {timeline}")
        return history

    def start(self, slot: str, publication: str, lsn: int) -> None:
        options = f"proto_version '1', publication_names {literal(quote(publication))}"
        self._run(f"START_REPLICATION SLOT {quote(slot)} LOGICAL {format_lsn(lsn)} ({options})")

    def _run(self, command: str) -> list[list[str]]:
        with self._translated():
            return self._run_translated(command)

    def _run_translated(self, command: str) -> list[list[str]]:
        connection, pq = self._connection, self._pq
        connection.send_query(command.encode())
        self._flush()
        rows: list[list[str]] = []
        while True:
            while connection.is_busy():
                self.wait_readable(_LOOK_S)
                connection.consume_input()
                if self._is_stopping():
                    raise Stopped
            result = connection.get_result()
            if result is None:
                return rows
            if result.status == pq.ExecStatus.COPY_BOTH:
                return rows
            if result.status not in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
                raise self._failed(result)
            columns = range(result.nfields)
            for row in range(result.ntuples):
                rows.append([(result.get_value(row, column) or b"").decode() for column in columns])

    # -- the stream --------------------------------------------------------------------------------------------------

    def read(self, wait_s: float) -> Received | None:
        """The next message; None if none comes in time."""
        until = time.monotonic() + wait_s
        with self._translated():
            while True:
                length, data = self._connection.get_copy_data(1)
                if length > 0:
                    return _parse(bytes(data))
                if length < 0:
                    raise self._ended()
                if not self.wait_readable(max(0.0, until - time.monotonic())):
                    return None
                self._connection.consume_input()

    def wait_readable(self, seconds: float) -> bool:
        with self._translated():
            return bool(select.select([self._connection.socket], [], [], seconds)[0])

    def confirm(self, lsn: int, *, wants_answer: bool = False) -> None:
        """Everything before `lsn` is safe, and the server may forget it."""
        now_us = int((time.time() - _EPOCH_S) * 1_000_000)
        with self._translated():
            self._connection.put_copy_data(_STATUS.pack(b"r", lsn, lsn, lsn, now_us, wants_answer))
            self._flush()

    # -- libpq -------------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """While the server's buffers are full, what it sends must be read, or both would wait for each other."""
        while self._connection.flush():
            select.select([self._connection.socket], [self._connection.socket], [], _LOOK_S)
            self._connection.consume_input()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except import_driver().Error as error:
            raise translate_error(ServerError(str(error), None), self._uri, is_connecting=False) from error

    # -- errors ------------------------------------------------------------------------------------------------------

    def _ended(self) -> SemelError:
        result = self._connection.get_result()
        if result is None or not result.error_message:
            error = ServerError("the server has ended the stream", None)
            return translate_error(error, self._uri, is_connecting=False)
        return self._failed(result)

    def _failed(self, result: Any) -> SemelError:
        state = result.error_field(self._pq.DiagnosticField.SQLSTATE)
        text = result.error_message.decode(errors="replace")
        error = translate_error(ServerError(text, state.decode() if state else None), self._uri, is_connecting=False)
        if isinstance(error, DatabaseError) and error.sqlstate == _OBJECT_IN_USE:
            # Who has the slot is found out before; so it has changed hands since, and may do so again.
            error.is_transient = True
        return error

    def _refused(self, text: str) -> SemelError:
        if any(words in text.lower() for words in _NO_WALSENDER):
            return ConfigError(
                f"Postgres does not let this role read its log ({' '.join(text.split())}). Nothing was captured. Run: "
                "ALTER ROLE ... REPLICATION; or on a managed server grant the role that stands for it, such as "
                "rds_replication."
            )
        return translate_error(ServerError(text, None), self._uri, is_connecting=True)


class Stopped(Exception):
    """The run was asked to end while a command waited."""


def _parse(message: bytes) -> Received:
    if message[:1] == b"w":
        _, _, end_lsn, _ = _DATA.unpack_from(message)
        return Received(message[_DATA.size :], end_lsn)
    if message[:1] == b"k":
        _, end_lsn, _, wants_answer = _KEEPALIVE.unpack_from(message)
        return Received(None, end_lsn, bool(wants_answer))
    raise DatabaseError(f"Postgres has sent a message of the unknown kind {message[:1]!r} in its log.")
