"""Change capture as a source of rows: the slot, its snapshot and its stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Final

from semel.bridges.capture.changes import Change, TableFormat, changes_of
from semel.bridges.capture.checks import (
    CapturedTable,
    SlotState,
    check_capture_server,
    check_tables,
    find_key,
    find_publication,
    find_slot,
    make_publication,
    published_rows,
)
from semel.bridges.capture.decide import check_slot, decide_capture
from semel.bridges.capture.lsn import end_of_timeline, parse_lsn
from semel.bridges.capture.options import CaptureOptions
from semel.bridges.capture.pgoutput import Begin, Commit, Relation, decode
from semel.bridges.capture.portions import CapturedPortion, table_of
from semel.bridges.capture.positions import CapturePosition, End, Event, Numbering, OtherHistory, position_after
from semel.bridges.capture.replication import Received, ReplicationConnection
from semel.bridges.capture.rows import EventRow, RowMaker, make_rows
from semel.bridges.capture.snapshot import SnapshotReader
from semel.bridges.failpoints import reach
from semel.bridges.postgres import PostgresDatabase
from semel.bridges.relay.progress import RelayProgress
from semel.bridges.relay.row_source import PORTION_BYTES_MAX, Identity, Portion, Position, RowSource, nothing_due
from semel.bridges.relay.waking import Waker
from semel.bridges.retries import LOG
from semel.errors import ConfigError, DatabaseError

_ASK_S: Final = 1.0
"""How often an idle stream is asked how far the server has read its log."""
_ASK_SOON_S: Final = 0.05
_PAUSE_S: Final = 0.1
"""How long a transaction may pause in the middle before what has come of it is written."""
_TURN_S: Final = 1.0
"""After so long without an event of ours the run gets its turn."""
_HANDOVER_S: Final = 30.0
Item = Event[Change] | End


class CaptureSource(RowSource):
    """One replication connection and one for questions, used by one thread."""

    def __init__(self, uri: str, options: CaptureOptions, is_stopping: Callable[[], bool]) -> None:
        self.table = options.relay.table
        self.heartbeat_s = options.heartbeat_s
        self._uri = uri
        self._options = options
        self._is_stopping = is_stopping
        self._database = PostgresDatabase(uri)
        self._rows = make_rows(options)
        self._replication: ReplicationConnection | None = None
        self._stream: _Stream | None = None
        self._version = 0
        self._tables: list[CapturedTable] = []
        self._identity: Identity = {}

    def close(self) -> None:
        self._end_stream()
        self._database.close()

    def _end_stream(self) -> None:
        connection, self._replication, self._stream = self._replication, None, None
        if connection is not None:
            connection.close()

    def _connection(self) -> ReplicationConnection:
        if self._replication is None:
            self._replication = ReplicationConnection(self._uri, self._options.application_name, self._is_stopping)
        return self._replication

    # -- the start ---------------------------------------------------------------------------------------------------

    def prepare(self) -> Identity:
        self._end_stream()
        options, database = self._options, self._database
        self._version, server = check_capture_server(database, options)
        self._tables = check_tables(database, options)
        publication = find_publication(database, options, self._tables)
        [(name,)] = database.execute("SELECT current_database()::text").rows
        tables = {table.full_name: table.oid for table in self._tables}
        mine = {"kind": "postgres capture", "name": name, "slot": options.slot, "tables": tables}
        self._identity = {**server, **mine, "publication": publication}
        self._connection()  # finds out whether the role may read the log, before another capture is fenced
        return self._identity

    def decide(self, progress: RelayProgress | None) -> CapturePosition | None:
        """Where to go on; None for a new slot. Raises if something would be lost."""
        now = parse_lsn(str(self._database.scalar("SELECT pg_current_wal_insert_lsn()::text")))
        return decide_capture(self._options, progress, self._identity, self._slot(), now, self._end_of_timeline)

    def _slot(self) -> SlotState | None:
        return find_slot(self._database, self._options.slot)

    def _end_of_timeline(self, timeline: int) -> int | None:
        return end_of_timeline(self._connection().timeline_history(self._identity["timeline"]), timeline)

    def ensure_publication(self) -> None:
        """Before the slot is made: what was logged before a publication was there cannot be read."""
        tables = check_tables(self._database, self._options)
        if find_publication(self._database, self._options, tables) is None:
            make_publication(self._database, self._options, tables)

    def known_topics(self) -> list[str]:
        """The topics of the tables, as far as they do not depend on rows."""
        known = set[str]() if self._options.is_outbox else {"schema", "table"}
        if not known.issuperset(self._options.relay.topic.columns):
            return []
        places = ({"schema": table.schema, "table": table.name} for table in self._tables)
        found = [self._options.relay.topic.topic_for(place.get) for place in places]
        return sorted({topic for topic in found if topic is not None})

    def is_behind(self, position: Position) -> bool:
        return False  # `decide` has looked

    def advice_after_restore(self, position: Position) -> str:
        return ""

    def delete_done(self, position: Position) -> int:
        return 0

    # -- the snapshot ------------------------------------------------------------------------------------------------

    def begin(self) -> Generator[CapturedPortion, None, None]:
        """A new slot, and the rows that are there as its transaction 0. The slot of a start that failed is dropped."""
        self._end_stream()
        connection = self._connection()
        if self._slot() is not None:
            self._wait_until_free()
            connection.drop_slot(self._options.slot)
        made = connection.make_slot(self._options.slot, self._version, failover=self._options.failover)
        reach("capture_slot_made")
        tables = [published_rows(self._database, self._options, table) for table in self._tables]
        reader = SnapshotReader(self._uri, made, self._options.application_name)
        return self._portions(reader.events(tables if self._options.snapshot else []))

    def drop_slot(self) -> None:
        """After a start that failed for good, so that the server does not keep its log for nobody."""
        try:
            self._end_stream()
            self._connection().drop_slot(self._options.slot, waits=False)
        except (DatabaseError, ConfigError) as error:
            LOG.warning("The replication slot %s could not be dropped: %s", self._options.slot, error)

    def _portions(self, items: Generator[Item, None, None]) -> Generator[CapturedPortion]:
        """One at a time in memory."""
        with closing(items):
            yield from self._cut(items)

    def _cut(self, items: Iterator[Item]) -> Generator[CapturedPortion, None, None]:
        batch = _Batch(self._options.relay.rows_max)
        for item in items:
            batch.add(item, self._rows.row(item) if isinstance(item, Event) else self._rows.end(item))
            if batch.is_full or isinstance(item, End):
                yield self._portion(batch, {})
                reach("capture_snapshot_part")
                batch = _Batch(self._options.relay.rows_max)

    def _portion(self, batch: _Batch, topics: Mapping[str, int]) -> CapturedPortion:
        return CapturedPortion(
            table_of(batch.rows), _no_position, items=batch.items, source=self._options.name, topics=topics
        )

    # -- the stream --------------------------------------------------------------------------------------------------

    def next(self, position: Position | None, rows_max: int) -> Portion:
        assert position is not None
        start = CapturePosition.decode(position)
        stream = self._stream
        if stream is None or stream.place != start.place:  # less was written than has come, or nobody knows
            stream = self._open(start)
        batch = stream.collect(_Batch(rows_max))
        if batch.rows:
            return self._portion(batch, start.topics)
        return nothing_due(stream.move(start).encode(), is_idle=stream.is_caught_up)

    def _open(self, start: CapturePosition) -> _Stream:
        self._end_stream()
        self._wait_until_free()
        target = parse_lsn(str(self._database.scalar("SELECT pg_current_wal_flush_lsn()::text")))
        connection = self._connection()
        connection.start(self._options.slot, self._options.publication, start.lsn)
        # It cannot change hands any more. The server would begin later without a word if the slot does.
        check_slot(self._options, start, self._slot())
        self._stream = _Stream(connection, start, target, self._table_format, self._rows)
        return self._stream

    def _table_format(self, relation: Relation) -> TableFormat:
        return TableFormat(relation, find_key(self._database, relation))

    def _wait_until_free(self) -> None:
        """An older connection of ours may have the slot: of a process that died or was fenced. It is ended."""
        until = time.monotonic() + _HANDOVER_S
        while (slot := self._slot()) is not None and slot.active_pid is not None:
            if slot.active_name == self._options.application_name:
                self._database.execute(f"SELECT pg_terminate_backend({int(slot.active_pid)})")
            if time.monotonic() > until or self._is_stopping():
                raise DatabaseError(
                    f"The replication slot {self._options.slot!r} is still in use by process {slot.active_pid} of the "
                    "server. Nothing is lost.",
                    is_transient=True,
                )
            time.sleep(_PAUSE_S)

    def committed(self, position: Position) -> None:
        if self._stream is not None:
            self._stream.confirmed = CapturePosition.decode(position).lsn
            self._stream.tell()
            reach("capture_confirmed")

    def make_waker(self) -> Waker:
        return _StreamWaker(self)

    def wait(self, seconds: float) -> bool:
        """Until the stream has something to read, or for so long."""
        if self._replication is None:
            time.sleep(seconds)
            return False
        try:
            return self._replication.wait_readable(seconds)
        except DatabaseError:
            return True  # the connection is lost, as the next look will find


class _StreamWaker(Waker):
    """The stream itself tells of new changes."""

    def __init__(self, source: CaptureSource) -> None:
        self._source = source

    def wait(self, seconds: float) -> bool:
        return self._source.wait(seconds)


def _no_position(done: int) -> Position:
    raise AssertionError("the position after events follows from where they were routed to")


class _Batch:
    """Rows of one portion to be, as they come."""

    def __init__(self, rows_max: int) -> None:
        self.rows: list[EventRow] = []
        self.items: list[Item] = []
        self._rows_max = rows_max
        self._bytes = 0

    def add(self, item: Item, row: EventRow) -> None:
        self.items.append(item)
        self.rows.append(row)
        self._bytes += row.size

    @property
    def is_full(self) -> bool:
        return len(self.rows) >= self._rows_max or self._bytes >= PORTION_BYTES_MAX


class _Stream:
    """What comes from a slot, from one position on."""

    def __init__(
        self,
        connection: ReplicationConnection,
        start: CapturePosition,
        target: int,
        make_table: Callable[[Relation], TableFormat],
        rows: RowMaker,
    ) -> None:
        self.place = start.place
        """Where it stands after everything that has come of it."""
        self.confirmed = start.lsn
        self._connection = connection
        self._numbering = Numbering[Change](start)
        self._target = target
        self._make_table = make_table
        self._rows = rows
        self._tables: dict[int, TableFormat] = {}
        self._sent_lsn = 0
        self._asked_at = 0.0

    @property
    def is_caught_up(self) -> bool:
        """Whether everything was read that was in the log when the stream was opened."""
        return self._sent_lsn >= self._target and not self._numbering.is_inside

    def move(self, start: CapturePosition) -> CapturePosition:
        """Where it stands when nothing of ours has come since `start`."""
        now = self._numbering.position
        moved = start if now is None else replace(start, lsn=max(start.lsn, now.lsn))
        self.place = moved.place
        return moved

    def tell(self, *, wants_answer: bool = False) -> None:
        self._connection.confirm(self.confirmed, wants_answer=wants_answer)

    def collect(self, batch: _Batch) -> _Batch:
        """Until the batch is full, or nothing more is there at the end of a transaction."""
        until = time.monotonic() + _TURN_S
        while not batch.is_full:
            patience_s = _PAUSE_S if self._numbering.is_inside and batch.rows else 0.0
            received = self._connection.read(patience_s)
            if received is None:
                break
            if received.data is not None:
                self._take(received.data, batch)
            else:
                self._heard(received)
            if not batch.rows and time.monotonic() > until:
                break
        if not batch.rows:
            self._ask()
        else:
            self.place = position_after(batch.items[-1], {}).place
        return batch

    def _heard(self, keepalive: Received) -> None:
        self._sent_lsn = max(self._sent_lsn, keepalive.end_lsn)
        self._numbering.passed(keepalive.end_lsn)
        if keepalive.wants_answer:
            self.tell()

    def _ask(self) -> None:
        """An idle table must not keep the log of a busy one, so the server says how far it has read."""
        now = time.monotonic()
        if now - self._asked_at >= (_ASK_S if self.is_caught_up else _ASK_SOON_S):
            self._asked_at = now
            self.tell(wants_answer=True)

    def _take(self, data: bytes, batch: _Batch) -> None:
        try:
            message = decode(data)
            if message is None:
                return
            if isinstance(message, Begin):
                self._numbering.begin(message)
            elif isinstance(message, Commit):
                end = self._numbering.commit(message)
                if end is not None:
                    batch.add(end, self._rows.end(end))
            elif isinstance(message, Relation):
                self._tables[message.oid] = self._make_table(message)
            else:
                for change in filter(self._rows.takes, changes_of(message, self._tables)):
                    event = self._numbering.change(change)
                    if event is not None:
                        batch.add(event, self._rows.row(event))
        except (ValueError, KeyError) as error:
            raise DatabaseError(
                f"What Postgres has sent cannot be understood: {error}. Nothing is lost: the slot keeps it. Report it "
                "with the versions of Postgres and Semel."
            ) from error
        except OtherHistory as error:
            raise ConfigError(
                f"The replication slot was made again, or belongs to another history of the server: {error}. Changes "
                "may be missing, so the capture stops, and nothing was written twice. Start it under another name=, "
                "which takes a new snapshot."
            ) from error
