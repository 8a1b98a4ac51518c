"""One segment of a partition: a log file of record batches with its sparse indexes; append, find, read.

Every batch that is handed out begins where the one before it ends. An index entry is believed only after the batch it
points to has confirmed it; one that lies is rebuilt from the log.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from semel.broker.pacing import Pace, Slices
from semel.broker.storage.disk import Disk
from semel.broker.storage.failures import DamagedLog, told_as
from semel.broker.storage.index import RELATIVE_OFFSET_MAX, OffsetIndex, TimeIndex, check_content
from semel.broker.storage.log_file import LogFile, OpenFiles, read_file, remove_file
from semel.broker.storage.walk import HEADER_CHUNK_BYTES, Walker
from semel.errors import CorruptRecords
from semel.records.layout import (
    HEADER_BYTES,
    INT64_MAX,
    LENGTH_FIELD_END,
    TIMESTAMP_TYPE_BIT,
    BatchHeader,
    read_header,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from semel.broker.storage.record_walk import NoteHeld

LOG_SUFFIX = ".log"
INDEX_SUFFIX = ".index"
TIME_INDEX_SUFFIX = ".timeindex"
ABORTED_SUFFIX = ".txnindex"
CHECKSUMS_SUFFIX = ".indexsums"
INDEX_SUFFIXES = (INDEX_SUFFIX, TIME_INDEX_SUFFIX, ABORTED_SUFFIX)
"""In the order of their checksums."""
SNAPSHOT_SUFFIX = ".snapshot"
SEGMENT_BYTES_MAX = 2**31 - 1  # positions in the index are int32

_HINTS_MAX = 128
# A topic may ask for fewer entries (index.interval.bytes), but everybody waits while the way between two is walked.
_INTERVAL_BYTES_MAX = 64 * 1024
_STEPS_PER_PIECE = 64
_BATCH_SPAN = struct.Struct(">qi11xi")  # base offset, batch length, last offset delta at byte 23

logger = logging.getLogger(__name__)


def offset_name(offset: int) -> str:
    """Kafka's 20 digits, so that names sort like offsets."""
    return f"{offset:020d}"


@dataclass(frozen=True)
class LargeBatch:
    """Where a batch of many megabytes is. It can be read though its segment is removed. Only `read` or `close` it once.

    `read` may run in another thread.
    """

    disk: Disk
    handle: int
    position: int
    size: int

    def read(self) -> bytes:
        """The whole batch, or less if the disk has no more."""
        try:
            with told_as(f"A batch could not be read at byte {self.position}; its bytes were left as they are"):
                pieces = [self.disk.read(self.handle, self.size, self.position)]
                while pieces[-1] and (missing := self.size - sum(map(len, pieces))) > 0:
                    pieces.append(self.disk.read(self.handle, missing, self.position + self.size - missing))
                return b"".join(pieces) if len(pieces) > 1 else pieces[0]
        finally:
            self.close()

    def close(self) -> None:
        self.disk.close(self.handle)


class Segment:
    """The records from `base_offset` up to the next segment.

    `damage` is set when a scan met a batch that is not sound: what lies before it is served, the rest is not.
    """

    def __init__(
        self,
        files: OpenFiles,
        directory: str,
        base_offset: int,
        *,
        now_ms: int,
        create: bool = False,
        suffix: str = LOG_SUFFIX,
    ) -> None:
        self.base_offset = base_offset
        self.stem = f"{directory}/{offset_name(base_offset)}"
        self.file = LogFile(files, self.stem + suffix, create=create)
        self.next_offset = base_offset
        self.max_timestamp = -1
        self.max_timestamp_offset = -1
        self.created_ms = now_ms
        self.damage: DamagedLog | None = None
        self.indexes_written = False
        self._disk = files.disk
        self._index: OffsetIndex | None = OffsetIndex() if create else None
        self._time_index = TimeIndex()
        self._bytes_since_entry = 0
        self._first_timestamp: int | None = None
        self._hints: dict[int, int] = {}

    @property
    def size(self) -> int:
        return self.file.size

    # Appending

    def append(self, buffers: Sequence[Buffer], header: BatchHeader, index_interval_bytes: int) -> None:
        """Store a batch whose final header is `header`."""
        position = self.file.append(buffers)
        self.note(header, position, index_interval_bytes)

    def note(self, header: BatchHeader, position: int, index_interval_bytes: int) -> None:
        """Take a stored batch into the indexes."""
        index = self._index
        if index is None:
            index = self.index
        last_offset = header.base_offset + header.last_offset_delta
        if header.max_timestamp > self.max_timestamp:
            self.max_timestamp = header.max_timestamp
            self.max_timestamp_offset = last_offset
        if self._bytes_since_entry > min(index_interval_bytes, _INTERVAL_BYTES_MAX):
            index.add(last_offset - self.base_offset, position)
            self._time_index.add(self.max_timestamp, self.max_timestamp_offset - self.base_offset)
            self._bytes_since_entry = 0
        self._bytes_since_entry += LENGTH_FIELD_END + header.batch_length
        self.next_offset = last_offset + 1
        self._remember(header.base_offset, position)

    def must_roll(
        self, added_bytes: int, last_offset: int, max_timestamp: int, *, now_ms: int, segment_bytes: int, after_ms: int
    ) -> bool:
        """Kafka's rule: full, or the record is `after_ms` later than the first one, by the records' own time."""
        if self.file.size == 0:
            return False
        if self.file.size + added_bytes > min(segment_bytes, SEGMENT_BYTES_MAX):
            return True
        if last_offset - self.base_offset > RELATIVE_OFFSET_MAX:
            return True
        first = self.first_timestamp()
        waited_ms = max_timestamp - first if first >= 0 else now_ms - self.created_ms
        return waited_ms > after_ms

    def first_timestamp(self) -> int:
        """The largest timestamp of the first batch, -1 if it has none."""
        if self._first_timestamp is None:
            data = self.file.read(0, HEADER_BYTES)
            if len(data) < HEADER_BYTES:
                return -1
            self._first_timestamp = read_header(data).max_timestamp
        return self._first_timestamp

    # Finding

    @property
    def index(self) -> OffsetIndex:
        """The offset index, loaded or rebuilt at first use."""
        if self._index is None and not self._load_indexes():
            self.rebuild()
        assert self._index is not None
        return self._index

    @property
    def time_index(self) -> TimeIndex:
        if self._index is None:
            _ = self.index
        return self._time_index

    @property
    def largest_timestamp(self) -> int:
        if self._index is None:
            _ = self.index
        return self.max_timestamp

    def position_of(self, offset: int) -> int:
        """Where the first batch begins that ends at or behind `offset`; the end of the file if there is none."""
        hint = self._hints.get(offset)
        if hint is not None:
            return hint
        entry = self.index.floor(offset - self.base_offset)
        if entry is not None and not self._confirms(entry[0], self.file.read(entry[1], HEADER_BYTES)):
            self._rebuild_index_that_lied()
            entry = self.index.floor(offset - self.base_offset)
        position = self._walk_to(offset, 0 if entry is None else entry[1])
        self._remember(offset, position)
        return position

    def _walk_to(self, offset: int, position: int) -> int:
        size = self.file.size if self.damage is None else self.damage.position
        chunk, chunk_start = b"", position
        while position < size:
            at = position - chunk_start
            if at + HEADER_BYTES > len(chunk):
                chunk, chunk_start, at = self.file.read(position, HEADER_CHUNK_BYTES), position, 0
            if not _is_sound(chunk, at):
                self.walker().raise_damage(position, self.base_offset)
            base_offset, length, delta = _BATCH_SPAN.unpack_from(chunk, at)
            if position + LENGTH_FIELD_END + length > size:
                # A client takes what is cut short for the end of the answer and would ask for it for ever.
                self.walker().raise_damage(position, self.base_offset)
            if base_offset + delta >= offset:
                return position
            position += LENGTH_FIELD_END + length
        if self.damage is not None:
            raise self.damage
        return size

    def _confirms(self, relative_offset: int, header: bytes | memoryview, at: int = 0) -> bool:
        if not _is_sound(header, at):
            return False
        base_offset, _, delta = _BATCH_SPAN.unpack_from(header, at)
        return base_offset + delta == self.base_offset + relative_offset

    def _remember(self, offset: int, position: int) -> None:
        if len(self._hints) >= _HINTS_MAX:
            self._hints.clear()
        self._hints[offset] = position

    # Reading

    def read(self, offset: int, *, bytes_max: int, end_offset: int | None, one_bytes_max: int) -> bytes | memoryview:
        """Whole batches from the one with `offset` on, none at or behind `end_offset`, up to `bytes_max`.

        If the first is larger than that, it is read up to `one_bytes_max`.
        """
        start = self.position_of(offset)
        end = self.file.size if end_offset is None else self._end_of(end_offset)
        if self.damage is not None:
            if start >= self.damage.position:
                raise self.damage
            end = min(end, self.damage.position)
        if end - start <= bytes_max:
            return self.file.read(start, end - start)
        data = memoryview(self.file.read(start, max(bytes_max, 0)))
        cut = self._last_border(data, start)
        if cut > 0:
            return data[:cut]
        return self._read_one(start, end, one_bytes_max) if one_bytes_max > 0 else b""

    def _end_of(self, end_offset: int) -> int:
        try:
            return self.position_of(end_offset)
        except DamagedLog as damage:
            return damage.position  # what lies before it can still be read

    def _last_border(self, data: memoryview, start: int) -> int:
        """Where the last whole batch in `data` ends, which was read from `start` on."""
        entry = self.index.floor_position(start + len(data) - HEADER_BYTES)
        at = 0
        if entry is not None and entry[1] > start:
            at = entry[1] - start
            if not self._confirms(entry[0], data, at):
                self._rebuild_index_that_lied()
                return self._last_border(data, start)
        while at + HEADER_BYTES <= len(data):
            if not _is_sound(data, at):
                self.walker().raise_damage(start + at, self.base_offset)
            base_offset, length, _ = _BATCH_SPAN.unpack_from(data, at)
            if at + LENGTH_FIELD_END + length > len(data):
                self._remember(base_offset, start + at)  # where the next read will begin
                break
            at += LENGTH_FIELD_END + length
        return at

    def _read_one(self, start: int, end: int, bytes_max: int) -> bytes:
        size = min(self._span_at(start)[1], end - start)
        return self.file.read(start, size) if size <= bytes_max else b""

    def _span_at(self, position: int) -> tuple[int, int]:
        """Base offset and size of the batch there."""
        head = self.file.read(position, HEADER_BYTES)
        if not _is_sound(head, 0):
            self.walker().raise_damage(position, self.base_offset)
        base_offset, length, _ = _BATCH_SPAN.unpack_from(head)
        return base_offset, LENGTH_FIELD_END + length

    def large_batch(self, offset: int, end_offset: int) -> LargeBatch | None:
        """The batch with `offset` or the next, if it begins before `end_offset`."""
        start = self.position_of(offset)
        if start >= self.file.size:
            return None
        base_offset, size = self._span_at(start)
        if base_offset >= end_offset:
            return None
        with told_as(f"{self.file.path} cannot be opened"):
            handle = self._disk.open(self.file.path)
        return LargeBatch(self._disk, handle, start, min(size, self.file.size - start))

    def walker(self, *, gapless_from: int = INT64_MAX) -> Walker:
        return Walker(self.file, gapless_from=gapless_from)

    def batches(self, from_offset: int = 0, *, check_crc: bool = True) -> Iterator[tuple[BatchHeader, memoryview]]:
        """Each whole batch from the one with `from_offset` on; raises DamagedLog where the bytes are not sound."""
        position = 0 if from_offset <= self.base_offset else self.position_of(from_offset)
        try:
            for _, header, batch in self.walker().batches(position, self.base_offset, check_crc=check_crc):
                yield header, batch
        except DamagedLog as damage:
            self.damage = self.damage or damage
            raise

    def find_timestamp(
        self, timestamp_ms: int, from_offset: int, note_held: NoteHeld = lambda _: None
    ) -> Slices[tuple[int, int] | None]:
        """Timestamp and offset of the first record from `from_offset` on that is not older.

        The caller must not go on with it after a pause in which the segment was replaced.
        """
        entry = self.time_index.floor(timestamp_ms)
        if entry is not None:
            from_offset = max(from_offset, self.base_offset + entry[1])
        start = self.position_of(max(from_offset, self.base_offset))
        pace = Pace()
        for position, header in self.walker().headers(start, self.base_offset):
            if header.max_timestamp >= timestamp_ms:
                found = yield from self._find_in_batch(position, header, timestamp_ms, from_offset, note_held)
                if found is not None:
                    return found
            if pace.is_over():
                yield
        return None

    def _find_in_batch(
        self,
        position: int,
        header: BatchHeader,
        timestamp_ms: int,
        from_offset: int,
        note_held: NoteHeld,
    ) -> Slices[tuple[int, int] | None]:
        from semel.broker.storage.record_walk import RecordWalk  # it loads codecs, which other paths do not need
        from semel.records.compression import DECOMPRESSED_BYTES_MAX
        from semel.records.reference import wrap_int64

        packed_bytes = header.total_bytes - HEADER_BYTES

        def read(at: int, size: int) -> bytes:
            return self.file.read(position + HEADER_BYTES + at, max(0, min(size, packed_bytes - at)))

        if header.compression != "none":
            yield  # to begin takes milliseconds, and many clients may ask in the same turn
        pace = Pace()
        walk = RecordWalk(header, read, bytes_max=DECOMPRESSED_BYTES_MAX)
        for record in walk:
            if record is None:
                note_held(walk.held_bytes)
            else:
                offset = header.base_offset + record.offset_delta
                time_ms = wrap_int64(header.base_timestamp + record.timestamp_delta)
                if header.attributes & TIMESTAMP_TYPE_BIT:
                    time_ms = header.max_timestamp
                if time_ms >= timestamp_ms and offset >= from_offset:
                    return time_ms, offset
            if pace.is_over(1 if record is not None else _STEPS_PER_PIECE):
                yield
        return None

    # Index files

    def encode_indexes(self) -> tuple[bytes, bytes]:
        """The contents of `.index` and `.timeindex`; the last entry of the latter is the largest timestamp."""
        index = self.index
        if self.max_timestamp_offset >= 0:
            self._time_index.add(self.max_timestamp, self.max_timestamp_offset - self.base_offset)
        return index.encode(), self._time_index.encode()

    def _load_indexes(self) -> bool:
        index_path, time_path = self.stem + INDEX_SUFFIX, self.stem + TIME_INDEX_SUFFIX
        index_data, time_data = read_file(self._disk, index_path), read_file(self._disk, time_path)
        checksums = read_file(self._disk, self.stem + CHECKSUMS_SUFFIX)
        path = index_path
        try:
            if index_data is None or time_data is None:
                path = index_path if index_data is None else time_path
                raise CorruptRecords("it is missing")
            check_content(index_data, INDEX_SUFFIXES.index(INDEX_SUFFIX), checksums)
            index = OffsetIndex.decode(index_data, log_bytes=self.file.size)
            path = time_path
            check_content(time_data, INDEX_SUFFIXES.index(TIME_INDEX_SUFFIX), checksums)
            time_index = TimeIndex.decode(time_data)
            if not time_data and self.first_timestamp() >= 0:
                raise CorruptRecords("it is empty")
        except CorruptRecords as error:
            if self.file.size:
                logger.warning("Rebuilding %s from its log: %s. No record is lost.", path, error)
            return False
        self._take_indexes(index, time_index)
        return True

    def _take_indexes(self, index: OffsetIndex, time_index: TimeIndex) -> None:
        self._index, self._time_index = index, time_index
        latest, last = time_index.last(), index.last()
        self.max_timestamp, relative = latest if latest is not None else (-1, -1)
        self.max_timestamp_offset = -1 if relative < 0 else self.base_offset + relative
        self._bytes_since_entry = self.file.size - (0 if last is None else last[1])

    def take_indexes_of(self, other: Segment) -> None:
        """Take over what another object knows about the same bytes."""
        self._take_indexes(other.index, other.time_index)
        self.max_timestamp, self.max_timestamp_offset = other.max_timestamp, other.max_timestamp_offset
        self.next_offset = other.next_offset

    def load_indexes_below(self, offset: int, *, may_end_before: bool) -> int:
        """Load the index files if they agree with the log and tell nothing at or above `offset`.

        Returns the position of `offset`; or 0, and the whole segment is to be scanned. `may_end_before`: compaction may
        have removed the batch that ended there.
        """
        if offset <= self.base_offset or not self._load_indexes():
            return self._forget()
        latest, last = self._time_index.last(), self.index.last()
        if max(-1 if latest is None else latest[1], -1 if last is None else last[0]) >= offset - self.base_offset:
            return self._forget()
        start = 0 if last is None else last[1]
        if last is not None and not self._confirms(last[0], self.file.read(start, HEADER_BYTES)):
            return self._forget()
        end, next_offset = start, self.base_offset
        try:
            for position, header in self.walker().headers(start, self.base_offset):
                if header.base_offset >= offset:
                    break
                end, next_offset = position + header.total_bytes, header.last_offset + 1
        except DamagedLog:
            return self._forget()
        if next_offset != offset and not may_end_before:
            return self._forget()
        self._bytes_since_entry = end - start
        self.next_offset = offset
        return end

    def _forget(self) -> int:
        self._index, self._time_index = OffsetIndex(), TimeIndex()
        self.max_timestamp = self.max_timestamp_offset = -1
        self._bytes_since_entry = 0
        self._first_timestamp = None
        self._hints.clear()
        self.next_offset = self.base_offset
        return 0

    def rebuild(self, index_interval_bytes: int = 4096) -> None:
        """Make the indexes anew from the log, checking every batch."""
        next_offset = self.next_offset
        self._forget()
        self.damage = None
        try:
            for position, header, _ in self.walker().batches(0, self.base_offset, check_crc=True):
                self.note(header, position, index_interval_bytes)
        except DamagedLog as damage:
            self.damage = damage
            logger.error("%s The bytes were left as they are.", damage)
        self.next_offset = max(next_offset, self.next_offset)
        self.indexes_written = False

    def _rebuild_index_that_lied(self) -> None:
        logger.warning("Rebuilding %s%s: it points between batches. No record is lost.", self.stem, INDEX_SUFFIX)
        self.rebuild()

    # Files

    def truncate(self, position: int) -> None:
        """Cut the log file; the indexes must not reach behind `position`."""
        self.file.truncate(position)
        self._hints.clear()

    def close(self) -> None:
        self.file.close()

    def remove(self) -> None:
        """Remove the log file and what was derived from it."""
        self.file.discard()
        for suffix in (LOG_SUFFIX, *INDEX_SUFFIXES, CHECKSUMS_SUFFIX):
            remove_file(self._disk, self.stem + suffix)


def _is_sound(data: bytes | memoryview, at: int) -> bool:
    """Whether a header of magic 2 with a possible length is there."""
    if len(data) - at < HEADER_BYTES or data[at + 16] != 2:
        return False
    _, length, delta = _BATCH_SPAN.unpack_from(data, at)
    return length >= HEADER_BYTES - LENGTH_FIELD_END and delta >= 0
