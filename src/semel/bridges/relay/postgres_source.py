"""An outbox table in Postgres as a source: the SQL around `horizon.py`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from semel.bridges.merge import literal, quote, quote_table
from semel.bridges.postgres import PostgresDatabase
from semel.bridges.relay.horizon import IN_PROGRESS_MAX, Horizon, Interval, after_interval, after_row, decide_interval
from semel.bridges.relay.options import Columns, RelayOptions
from semel.bridges.relay.postgres_checks import IDENTITY, HiddenRows, check_outbox, check_server, identity_in
from semel.bridges.relay.routes import TOPIC_COLUMN
from semel.bridges.relay.row_source import Identity, Portion, Position, RowSource, count_fitting, nothing_due
from semel.bridges.relay.snapshots import NOTHING, Snapshot
from semel.bridges.relay.waking import PostgresWaker, Waker
from semel.bridges.retries import LOG
from semel.errors import ConfigError, DatabaseUnreachable

_IDS_MAX: Final = 200_000
"""How many ids are looked up at once: 3 MB, and few enough scans for a table with millions of rows."""
_DELETED_AT_ONCE: Final = 10_000
_WARN_AGAIN_S: Final = 60.0
_FINITE: Final = "CASE WHEN isfinite({0}) THEN {1} END"
"""Infinity has no milliseconds; such a row gets the time at which it is relayed."""


class PostgresSource(RowSource):
    """Rows of one table. First their ids and sizes are looked up, then the rows, as many as fit into memory.

    No transaction is open between two calls, so that a slow broker does not keep Postgres from cleaning up.
    """

    def __init__(self, database: PostgresDatabase, options: RelayOptions) -> None:
        self.table = options.table
        self._database = database
        self._options = options
        self._columns: Columns | None = None
        self._types: dict[str, str] = {}
        self._server: Identity = {}
        self._waiting: _Waiting | None = None
        self._warned_at = -_WARN_AGAIN_S

    def prepare(self) -> Identity:
        self._waiting = None
        self._server = check_server(self._database)
        self._columns = check_outbox(self._database, self._options)
        self._types = {name: one.type for name, one in (self._database.columns(self.table) or {}).items()}
        return {**self._server, "table": self._database.full_name(self.table)}

    def make_waker(self) -> Waker:
        return PostgresWaker(self._database.uri)

    def close(self) -> None:
        self._waiting = None
        self._database.close()

    def is_behind(self, position: Position) -> bool:
        now, _ = self._look()
        return not now.may_follow(Horizon.decode(dict(position)).newest)

    # -- reading -----------------------------------------------------------------------------------------------------

    def next(self, position: Position | None, rows_max: int) -> Portion:
        horizon = Horizon() if position is None else Horizon.decode(dict(position))
        waiting = self._waiting
        if waiting is None or waiting.horizon != horizon:
            waiting = self._find(horizon)
        if waiting is None:
            self._waiting = None
            return nothing_due(horizon.encode())
        interval = waiting.interval
        if not len(waiting.ids):
            assert waiting.is_all
            self._waiting = None
            is_idle = horizon.until is None  # else a later interval may hold rows
            return nothing_due(after_interval(interval).encode(), is_idle=is_idle)
        count = count_fitting(waiting.sizes, rows_max)
        ids, last = waiting.ids[:count], int(waiting.ids[count - 1])
        rows = self._read(interval, int(ids[0]), last)
        is_end = waiting.is_all and count == len(waiting.ids)
        end = after_interval(interval) if is_end else after_row(interval, last)
        # The ids in memory may end before the interval does: then the next call looks for more.
        self._waiting = None if count == len(waiting.ids) else waiting.rest(count, end)

        def position_at(done: int) -> Position:
            return (after_row(interval, rows.column("id")[done - 1].as_py()) if done < rows.num_rows else end).encode()

        return Portion(rows, position_at, has_more=not is_end)

    def _find(self, horizon: Horizon) -> _Waiting | None:
        """The ids that are due; None if nothing can be said now."""
        now, newest = self._look()
        if not now.may_follow(horizon.newest):
            raise ConfigError(
                f"Postgres has gone back: its transactions stand at {now.xmax}, and rows up to {horizon.newest.xmax} "
                "were relayed. Nothing more was relayed. The database was put back to an earlier state, or another "
                "server answers at its address. Start the relay again to see what can be done."
            )
        if newest is not None and newest >= now.xmax:
            raise ConfigError(
                f"A row of {self.table!r} has transaction id {newest}, which this server has not given out yet: the "
                "rows come from another server, perhaps by a dump. Nothing more was relayed. Run: "
                f"UPDATE {self._name} SET {self._xid} = DEFAULT WHERE {self._xid} >= '{now.xmax}'; Those rows are then "
                "relayed as new ones."
            )
        if horizon.until is None and len(now.in_progress) > IN_PROGRESS_MAX:
            if time.monotonic() - self._warned_at >= _WARN_AGAIN_S:
                self._warned_at = time.monotonic()
                LOG.warning(
                    "%d transactions are open in Postgres, and progress has room for %d. The relay waits for fewer.",
                    len(now.in_progress),
                    IN_PROGRESS_MAX,
                )
            return None
        interval = decide_interval(horizon, now)
        is_quiet = newest is None or (newest < interval.since.xmax and not interval.ended)
        if is_quiet or not interval.may_hold_rows:
            return _Waiting(horizon, interval, _EMPTY, _EMPTY, True)
        return self._find_ids(horizon, interval)

    def _look(self) -> tuple[Snapshot, int | None]:
        """The present snapshot, and the highest transaction id of a row that it shows.

        After a crash Postgres gives out again the ids of transactions that had not reached its disk: those that were
        rolled back, and those with `synchronous_commit = off`. A relay that has counted them as ended would take new
        rows for relayed ones. So a snapshot is used once everything that it shows is on disk.

        A bare name in ORDER BY is first looked for among the results, where the id is text: hence `row.`.
        """
        [(snapshot, newest, is_on_disk, hides_rows, *server)] = self._database.execute(
            "SELECT pg_current_snapshot()::text, "
            f"(SELECT {self._xid}::text FROM {self._name} AS row ORDER BY row.{self._xid} DESC LIMIT 1), "
            "pg_current_wal_flush_lsn() >= pg_current_wal_insert_lsn(), "
            f"row_security_active({literal(self._name)}::regclass), {IDENTITY}"
        ).rows
        self._check_server(server)
        if hides_rows:
            raise HiddenRows(self.table)
        if not is_on_disk:
            self._write_to_disk()
        return Snapshot.parse(snapshot), None if newest is None else int(newest)

    def _check_server(self, found: Sequence[object]) -> None:
        """A pooler keeps our connection to it when it leads to another server, so each transaction looks for itself."""
        if identity_in(found) != self._server:
            raise DatabaseUnreachable(
                "Another server answers at the address of this database. Whether the relay may go on there is found "
                "out next.",
                is_transient=True,
            )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """On the server that the position belongs to, where rows that are hidden from this user are an error.

        Both is asked inside of the transaction: behind a pooler the next one may be on another connection.
        """
        with self._database.transaction():
            [(_, *server)] = self._database.execute(f"SELECT set_config('row_security', 'off', true), {IDENTITY}").rows
            self._check_server(server)
            yield

    def _write_to_disk(self) -> None:
        """Everything that transactions have logged until now. A commit waits for all that was logged before it."""
        with self._database.transaction():
            self._database.execute("SET LOCAL synchronous_commit = local")
            self._database.execute("SELECT pg_logical_emit_message(true, 'semel-relay', '')")

    def _find_ids(self, horizon: Horizon, interval: Interval) -> _Waiting:
        columns = self._chosen
        parts = [columns.value, *(one for one in (columns.key, columns.headers) if one is not None)]
        size = " + ".join(f"coalesce({_length(part, self._types[part])}, 0)" for part in parts)
        # By a cursor and not by LIMIT: that would make the planner walk the primary key of a large table for few rows.
        with self._transaction():
            self._database.execute(
                f"DECLARE semel_due NO SCROLL CURSOR FOR SELECT {quote(columns.id)}::bigint AS id, "
                f"({size})::bigint AS size FROM {self._name} AS row WHERE {self._due(interval)} "
                f"ORDER BY row.{quote(columns.id)}"
            )
            found = self._database.query(f"FETCH FORWARD {_IDS_MAX} FROM semel_due")
        ids, sizes = (found.column(name).to_numpy().astype(np.int64, copy=False) for name in ("id", "size"))
        return _Waiting(horizon, interval, ids, sizes, len(ids) < _IDS_MAX)

    def _read(self, interval: Interval, first: int, last: int) -> pa.Table:
        columns = self._chosen
        key = columns.id
        wanted = [
            f"{quote(key)}::bigint AS id",
            f"{self._bytes(columns.value)} AS value",
            f"{self._bytes(columns.key)} AS key",
            f"{f'{quote(columns.headers)}::text' if columns.headers else 'NULL::text'} AS headers",
            f"{self._time(columns.timestamp)} AS timestamp",
            *(f"{quote(name)}::text AS {quote(TOPIC_COLUMN + name)}" for name in columns.topic),
        ]
        with self._transaction():
            rows = self._database.query(
                f"SELECT {', '.join(wanted)} FROM {self._name} AS row WHERE {quote(key)} BETWEEN {first} AND {last} "
                f"AND {self._due(interval)} ORDER BY row.{quote(key)}"
            )
        for name in ("value", "key"):
            at = rows.column_names.index(name)
            rows = rows.set_column(at, name, rows.column(name).cast(pa.binary()))
        # Postgres takes longer for the milliseconds of a row than for all the rest of it.
        at = rows.column_names.index("timestamp")
        times = rows.column("timestamp")
        if pa.types.is_timestamp(times.type):
            whole = pc.call_function("floor_temporal", [times], pc.RoundTemporalOptions(unit="millisecond"))
            times = whole.cast(pa.timestamp("ms", times.type.tz)).cast(pa.int64())
        return rows.set_column(at, "timestamp", times)

    def _due(self, interval: Interval) -> str:
        """`Interval.is_due` as SQL that an index on the transaction id can answer."""
        since, until = interval.since, interval.until
        ended = ",".join(map(str, interval.ended))
        parts = [
            f"(({self._xid} >= '{since.xmax}'::xid8 AND {self._xid} < '{until.xmax}'::xid8)"
            + (f" OR {self._xid} = ANY ('{{{ended}}}'::xid8[]))" if ended else ")"),
            f"pg_visible_in_snapshot({self._xid}, {literal(str(until))}::pg_snapshot)",
        ]
        if interval.after is not None:
            parts.append(f"{quote(self._chosen.id)} > {interval.after}")
        return " AND ".join(parts)

    def _bytes(self, column: str | None) -> str:
        if column is None:
            return "NULL::bytea"
        return quote(column) if self._types[column] == "bytea" else f"{quote(column)}::text"

    def _time(self, column: str | None) -> str:
        """As a time of Postgres', or in milliseconds."""
        if column is None:
            return "NULL::bigint"
        kind = self._types[column]
        if kind.startswith("timestamp") or kind == "date":
            name = quote(column)
            # Without a time zone it is UTC's, whatever the session's is.
            return _FINITE.format(name, name if "with time zone" in kind else f"{name}::timestamp AT TIME ZONE 'UTC'")
        if kind in ("bigint", "integer"):
            return f"{quote(column)}::bigint"
        raise ConfigError(
            f"Column {column!r} of {self.table!r} is {kind}, which is no time. Nothing was relayed. Name a column of "
            "type timestamptz, or of milliseconds since 1970 (bigint), by timestamp=."
        )

    # -- cleaning up -------------------------------------------------------------------------------------------------

    def delete_done(self, position: Position) -> int:
        horizon = Horizon.decode(dict(position))
        if horizon.newest == NOTHING or (horizon.relayed == NOTHING and horizon.after is None):
            return 0
        deleted, key = 0, quote(self._chosen.id)
        while True:
            with self._transaction():
                changed = self._database.execute(
                    f"DELETE FROM {self._name} WHERE {key} IN (SELECT {key} FROM {self._name} WHERE "
                    f"{self._done(horizon)} LIMIT {_DELETED_AT_ONCE})"
                ).changed
            deleted += changed
            if changed < _DELETED_AT_ONCE:
                return deleted

    def _done(self, horizon: Horizon) -> str:
        """`Horizon.is_done` as SQL."""
        parts = []
        if horizon.relayed != NOTHING:
            parts.append(self._seen(horizon.relayed))
        if horizon.until is not None and horizon.after is not None:
            parts.append(f"({self._seen(horizon.until)} AND {quote(self._chosen.id)} <= {horizon.after})")
        return f"({' OR '.join(parts)})" if parts else "false"

    def _seen(self, snapshot: Snapshot) -> str:
        return (
            f"({self._xid} < '{snapshot.xmax}'::xid8 AND "
            f"pg_visible_in_snapshot({self._xid}, {literal(str(snapshot))}::pg_snapshot))"
        )

    def advice_after_restore(self, position: Position) -> str:
        done = self._done(Horizon.decode(dict(position)))
        return (
            f"If the table comes from a dump or an older backup: before new rows are written, run DELETE FROM "
            f"{self._name} WHERE {done}; which removes the rows that were relayed, then UPDATE {self._name} SET "
            f'{self._xid} = DEFAULT; and pass resume="all", which relays every row of the table.'
        )

    @property
    def _chosen(self) -> Columns:
        assert self._columns is not None
        return self._columns

    @property
    def _name(self) -> str:
        return quote_table(self.table)

    @property
    def _xid(self) -> str:
        return quote(self._options.xid)


_EMPTY: Final[npt.NDArray[np.int64]] = np.zeros(0, np.int64)


class _Waiting:
    """Ids that are due from a horizon on, in their order, and about how large their rows are."""

    def __init__(
        self,
        horizon: Horizon,
        interval: Interval,
        ids: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int64],
        is_all: bool,
    ) -> None:
        self.horizon = horizon
        self.interval = interval
        self.ids = ids
        self.sizes = sizes
        self.is_all = is_all
        """Whether the interval has no further ids."""

    def rest(self, count: int, horizon: Horizon) -> _Waiting:
        return _Waiting(horizon, self.interval, self.ids[count:], self.sizes[count:], self.is_all)


def _length(column: str, kind: str) -> str:
    """How many bytes a value takes in memory. For text and bytes Postgres need not unpack what is stored apart."""
    plain = kind in ("bytea", "text") or kind.startswith("character")
    return f"octet_length({quote(column)})" if plain else f"octet_length({quote(column)}::text)"
