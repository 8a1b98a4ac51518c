"""Events that wait until their transaction is whole, in memory up to a limit and then in a file.

The file has no name, so a process that is killed leaves nothing behind, and no other user can open it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np
import pyarrow as pa

from semel.client.fetched import READ_SCHEMA
from semel.client.partitions import TopicPartition
from semel.errors import SemelError
from semel.session.source_headers import Numbers, SourceEvents

WINDOW_BYTES_MAX: Final = 32 * 1024 * 1024
"""How much of a transaction is in memory at a time when it is read in parts."""
_FILE_BYTES_MAX: Final = 256 * 1024 * 1024
"""A file is closed, and its room given back, when nothing in it is needed any more."""
_BATCH_ROWS: Final = 4_096
"""A part of a spilled table is read in pieces of so many rows."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Events that follow each other in one partition. The numbers are in memory, the records may be in a file."""

    place: TopicPartition
    offsets: Numbers
    transactions: Numbers
    indexes: Numbers
    records: pa.Table | _Spilled
    begin: int
    """Which of the records is the first."""
    byte_count: int
    """Of the records, about."""

    def cut(self, count: int) -> tuple[Self, Self]:
        """The first ones and the others."""
        first_bytes = self.byte_count * count // len(self.offsets)
        return self._slice(0, count, first_bytes), self._slice(count, len(self.offsets), self.byte_count - first_bytes)

    def _slice(self, begin: int, end: int, byte_count: int) -> Self:
        return replace(
            self,
            offsets=self.offsets[begin:end],
            transactions=self.transactions[begin:end],
            indexes=self.indexes[begin:end],
            begin=self.begin + begin,
            byte_count=byte_count,
        )

    @property
    def memory_bytes(self) -> int:
        return 0 if isinstance(self.records, _Spilled) else self.byte_count

    def read(self, begin: int, end: int) -> pa.Table:
        """Some of its records, in `READ_SCHEMA`."""
        first, count = self.begin + begin, end - begin
        table = self.records.load() if isinstance(self.records, _Spilled) else self.records
        table = table.slice(first, count)
        columns = {name: table.column(name) for name in table.column_names}
        columns["timestampType"] = columns.pop("timestamp_type")
        columns["topic"] = pa.repeat(pa.scalar(self.place.topic, pa.string()), count)
        columns["partition"] = pa.repeat(pa.scalar(self.place.partition, pa.int32()), count)
        return pa.table([columns[name] for name in READ_SCHEMA.names], schema=READ_SCHEMA)


class EventStore:
    """In each partition in the order of offsets."""

    def __init__(self, memory_bytes_max: int, folder: str | None = None) -> None:
        self.memory_bytes_max = memory_bytes_max
        self._folder = folder
        self._waiting: dict[TopicPartition, deque[_Piece]] = {}
        self._file: _SpillFile | None = None
        self.memory_bytes = 0
        self.spilled_bytes = 0
        """Written to files so far."""

    @property
    def is_full(self) -> bool:
        return self.memory_bytes >= self.memory_bytes_max

    def add(self, place: TopicPartition, events: SourceEvents) -> None:
        table = events.table
        if not table.num_rows:
            return
        size = table.nbytes
        records: pa.Table | _Spilled = table
        if self.memory_bytes + size > self.memory_bytes_max:
            records = self._spill(table)
        else:
            self.memory_bytes += size
        piece = _Piece(place, events.offsets, events.transactions, events.indexes, records, 0, size)
        self._waiting.setdefault(place, deque()).append(piece)

    def _spill(self, table: pa.Table) -> _Spilled:
        try:
            if self._file is None or self._file.size >= _FILE_BYTES_MAX:
                self._file = _SpillFile(self._folder)
            spilled = self._file.append(table)
        except OSError as error:
            raise SemelError(
                f"A transaction of the source does not fit into {self.memory_bytes_max:,} bytes of memory, and it "
                f"could not be kept in {self._folder or tempfile.gettempdir()}: {error.strerror}. Nothing of it was "
                "applied; what came before it was. Make room there, or let spill_folder= name another folder."
            ) from error
        self.spilled_bytes += spilled.size
        return spilled

    def take(self, positions: Mapping[TopicPartition, int]) -> TakenEvents:
        """Everything before these offsets."""
        taken: list[_Piece] = []
        for place, waiting in self._waiting.items():
            while waiting and waiting[0].offsets[0] < positions[place]:
                piece = waiting.popleft()
                count = int(piece.offsets.searchsorted(positions[place]))
                if count < len(piece.offsets):
                    piece, rest = piece.cut(count)
                    waiting.appendleft(rest)
                self.memory_bytes -= piece.memory_bytes
                taken.append(piece)
        if not any(self._waiting.values()):
            self._file = None  # its room is given back with the last piece of it
        return TakenEvents(taken)


class TakenEvents:
    """Events of several partitions, to be read in the order of transactions and of events in them."""

    def __init__(self, pieces: list[_Piece]) -> None:
        self._pieces = pieces
        sizes = [len(piece.offsets) for piece in pieces]
        self.count = sum(sizes)
        self.byte_count = sum(piece.byte_count for piece in pieces)
        transactions = _joined(piece.transactions for piece in pieces)
        order = np.lexsort((_joined(piece.indexes for piece in pieces), transactions))
        self.transactions: Numbers = transactions[order]
        """Of each event, in order."""
        ranks = np.empty(self.count, np.int64)
        ranks[order] = np.arange(self.count)
        self._ranks = np.split(ranks, np.cumsum(sizes)[:-1]) if sizes else []
        self._whole: pa.Table | None = None

    @property
    def is_small(self) -> bool:
        """Whether it is one window."""
        return self.byte_count <= WINDOW_BYTES_MAX

    def tables(self, begin: int = 0, end: int | None = None) -> Iterator[pa.Table]:
        """Events number `begin` to `end`, in order, in tables of about `WINDOW_BYTES_MAX` at most."""
        end = self.count if end is None else end
        if self.is_small:
            self._whole = whole = self._read(0, self.count) if self._whole is None else self._whole
            yield whole.slice(begin, end - begin)
            return
        at_once = max(1, self.count * WINDOW_BYTES_MAX // self.byte_count)
        for first in range(begin, end, at_once):
            yield self._read(first, min(first + at_once, end))

    def _read(self, begin: int, end: int) -> pa.Table:
        tables: list[pa.Table] = []
        ranks: list[Numbers] = []
        for piece, of_piece in zip(self._pieces, self._ranks, strict=True):
            # Within a partition the order is that of offsets, so ranks grow.
            first, last = (int(at) for at in of_piece.searchsorted((begin, end)))
            if first < last:
                tables.append(piece.read(first, last))
                ranks.append(of_piece[first:last])
        if not tables:
            return READ_SCHEMA.empty_table()
        table = pa.concat_tables(tables)
        return table if len(tables) == 1 else table.take(pa.array(np.argsort(np.concatenate(ranks))))


def _joined(arrays: Iterable[Numbers]) -> Numbers:
    found = list(arrays)
    return np.concatenate(found) if found else np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class _Spilled:
    """A table in a file."""

    file: _SpillFile
    at: int
    size: int

    def load(self) -> pa.Table:
        """Its buffers are the pages of the file, which take no memory that the system cannot have back."""
        mapped = mmap.mmap(self.file.descriptor, self.size, access=mmap.ACCESS_READ, offset=self.at)
        return pa.ipc.open_stream(pa.py_buffer(mapped)).read_all()


class _SpillFile:
    """Tables one behind the other, in a file without a name."""

    def __init__(self, folder: str | None) -> None:
        with tempfile.TemporaryFile(prefix="semel-", dir=folder) as file:
            self.descriptor = os.dup(file.fileno())
        self.size = 0

    def __del__(self) -> None:
        descriptor: int | None = getattr(self, "descriptor", None)
        if descriptor is not None:
            os.close(descriptor)

    def append(self, table: pa.Table) -> _Spilled:
        at = self.size
        with os.fdopen(os.dup(self.descriptor), "wb") as file:
            file.seek(at)
            with pa.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(table, max_chunksize=_BATCH_ROWS)
            file.flush()
            size = file.tell() - at
        self.size = at + -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        return _Spilled(self, at, size)
