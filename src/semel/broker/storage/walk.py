"""The walk through a log file from batch to batch, which tells exactly where and why the bytes stop making sense."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from semel.broker.storage.failures import DamagedLog
from semel.broker.storage.log_file import LogFile
from semel.errors import CorruptRecords
from semel.records.layout import HEADER_BYTES, INT64_MAX, BatchHeader, batch_crc, check_header, read_header

HEADER_CHUNK_BYTES = 8192
BATCH_CHUNK_BYTES = 1024 * 1024


class Walker:
    """Walks over one log file; the caller knows which offset may come first.

    Compaction leaves gaps between offsets. Where it has not been, from `gapless_from` on, a gap is damage.
    """

    def __init__(self, file: LogFile, *, gapless_from: int = INT64_MAX) -> None:
        self._file = file
        self._gapless_from = gapless_from

    def batches(
        self, position: int, next_offset: int, *, check_crc: bool
    ) -> Iterator[tuple[int, BatchHeader, memoryview]]:
        """Position, header and bytes of each batch, read in large pieces."""
        chunk, chunk_start = memoryview(b""), position
        while position < self._file.size:
            at = position - chunk_start
            if len(chunk) - at < HEADER_BYTES:
                chunk, chunk_start, at = memoryview(self._file.read(position, BATCH_CHUNK_BYTES)), position, 0
            header = self._header(chunk, at, position, next_offset)
            if len(chunk) - at < header.total_bytes:
                wanted = max(header.total_bytes, BATCH_CHUNK_BYTES)
                chunk, chunk_start, at = memoryview(self._file.read(position, wanted)), position, 0
            batch = chunk[at : at + header.total_bytes]
            try:
                check_header(header, batch)
            except CorruptRecords as error:
                raise self.damage(position, next_offset, "a batch header contradicts itself") from error
            if check_crc and batch_crc(batch) != header.crc:
                raise self.damage(position, next_offset, "a batch does not match its checksum")
            yield position, header, batch
            position += header.total_bytes
            next_offset = header.last_offset + 1

    def headers(self, position: int, next_offset: int) -> Iterator[tuple[int, BatchHeader]]:
        """Position and header of each batch, without reading large batches whole."""
        chunk, chunk_start = memoryview(b""), position
        while position < self._file.size:
            at = position - chunk_start
            if len(chunk) - at < HEADER_BYTES:
                chunk, chunk_start, at = memoryview(self._file.read(position, HEADER_CHUNK_BYTES)), position, 0
            header = self._header(chunk, at, position, next_offset)
            yield position, header
            position += header.total_bytes
            next_offset = header.last_offset + 1

    def raise_damage(self, position: int, next_offset: int) -> NoReturn:
        """Say what is wrong with the bytes at `position`, which a caller found to be no batch."""
        self._header(memoryview(self._file.read(position, HEADER_BYTES)), 0, position, next_offset)
        raise self.damage(position, next_offset, "no batch begins there")

    def _header(self, chunk: memoryview, at: int, position: int, next_offset: int) -> BatchHeader:
        if len(chunk) - at < HEADER_BYTES:
            raise self.damage(position, next_offset, "the file ends within a batch header", is_cut_short=True)
        try:
            header = read_header(chunk, at)
        except CorruptRecords as error:
            raise self.damage(position, next_offset, "no batch begins there") from error
        if header.base_offset != next_offset and (
            header.base_offset < next_offset or next_offset >= self._gapless_from
        ):
            why = f"a batch with offset {header.base_offset} stands where {next_offset} was expected"
            raise self.damage(position, next_offset, why)
        if position + header.total_bytes > self._file.size:
            raise self.damage(position, next_offset, "the file ends within a batch", is_cut_short=True)
        return header

    def damage(self, position: int, next_offset: int, why: str, *, is_cut_short: bool = False) -> DamagedLog:
        """The error that tells where and why."""
        return DamagedLog(
            f"{self._file.path} is damaged at byte {position} ({why}): its records from offset "
            f"{next_offset} on are not served. Restore the file from a copy, or delete the records up to the next "
            "segment to go on without them.",
            path=self._file.path,
            position=position,
            offset=next_offset,
            is_cut_short=is_cut_short,
        )
