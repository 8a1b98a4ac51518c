"""The rows that are there at the beginning: exactly those that the stream of a new slot does not bring."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from contextlib import closing
from typing import Any

from semel.bridges.capture.changes import Change, TableFormat
from semel.bridges.capture.lsn import parse_lsn
from semel.bridges.capture.pgoutput import Begin
from semel.bridges.capture.positions import SNAPSHOT, End, Event
from semel.bridges.capture.replication import SlotMade, connection_string, import_driver
from semel.bridges.merge import literal
from semel.bridges.postgres import translate_error


class SnapshotReader:
    """Reads tables as they were when a slot was made. Row by row: the server sends as fast as they are taken."""

    def __init__(self, uri: str, slot: SlotMade, application_name: str) -> None:
        self._uri = uri
        self._slot = slot
        self._application_name = application_name
        lsn = parse_lsn(slot.lsn)
        # Before every transaction of the stream, whose commits begin at the slot's own place.
        self._begin = Begin(lsn - 1, Begin.at_us(time.time()), 0)
        self._end_lsn = lsn

    def events(self, tables: Iterable[tuple[TableFormat, str]]) -> Generator[Event[Change] | End, None, None]:
        """Transaction 0: the rows of all tables, and its end."""
        index = 0
        with closing(self._rows(tables)) as rows:  # also if it is not read to its end: it holds a connection
            for table, row in rows:
                yield Event(self._begin, SNAPSHOT, index, Change("snapshot", table, table.key_of(row), row))
                index += 1
        yield End(self._begin, SNAPSHOT, index, self._end_lsn)

    def _rows(self, tables: Iterable[tuple[TableFormat, str]]) -> Generator[tuple[TableFormat, Any], None, None]:
        psycopg = import_driver()
        written = connection_string(self._uri, application_name=self._application_name)
        try:
            with psycopg.connect(written, autocommit=True) as connection:
                connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                connection.execute(f"SET TRANSACTION SNAPSHOT {literal(self._slot.snapshot)}")
                connection.execute("SET LOCAL row_security = off")  # hidden rows are an error then, and not missing
                for table, query in tables:
                    with connection.cursor().copy(f"COPY ({query}) TO STDOUT") as copy:
                        for row in copy.rows():
                            yield table, tuple(None if value is None else value.encode() for value in row)
                connection.execute("COMMIT")
        except psycopg.Error as error:
            raise translate_error(error, self._uri, is_connecting=False) from error
