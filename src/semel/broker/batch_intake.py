"""What a producer's batch must look like before a partition takes it: size, checksum, format, keys, compression."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kio.schema.errors import ErrorCode

from semel.broker.pacing import Pace, Slices, finish_now
from semel.broker.storage.record_walk import NoteHeld, RecordWalk
from semel.core.refusal import Refused
from semel.errors import CorruptRecords, RecordTooLarge
from semel.records.layout import (
    COMPRESSION_MASK,
    COMPRESSION_NAMES,
    HEADER_BYTES,
    LENGTH_FIELD_END,
    BatchHeader,
    as_bytes_view,
    check_batch_crc,
    check_header,
    read_header,
    write_header,
)

if TYPE_CHECKING:
    from semel.broker.configs import TopicSettings

_ZSTD: Final = 4
_ZSTD_SINCE: Final = 7
_COMPRESSION_AS_SENT: Final = "producer"
# A megabyte of zeros packs into a kilobyte. Producers make batches of up to the largest message before they are packed,
# so this is more than any needs, and millions of records to look at would keep everybody else waiting.
_UNPACKED_TIMES_MAX: Final = 8
_MESSAGE_BYTES: Final = 1_048_588
# Clients can set max.message.bytes, and this must not grow with it.
_UNPACKED_BYTES_MAX: Final = 16 << 20
_FORM_BYTES_AT_ONCE: Final = 4 << 20
_RECORDS_BYTES_AT_ONCE: Final = 1 << 10
_STEPS_PER_PIECE: Final = 64
_ATTRIBUTES_POSITION: Final = 22
"""Its lower byte, in which the codec stands."""

Checked = tuple[memoryview | bytearray, BatchHeader]


def check_batch(records: memoryview | None, settings: TopicSettings, produce_version: int) -> Checked:
    """The one batch in `records`, ready to be stored. Raises Refused, and then nothing was stored.

    Only for batches that `takes_long` does not name: the others go through its three steps one by one.
    """
    checked = check_form(records, settings, produce_version)
    if needs_records(settings):
        finish_now(check_records(checked, settings))
        return recompressed(checked, settings)
    return checked


def takes_long(records: memoryview, settings: TopicSettings) -> bool:
    """Whether the batch is too much for one turn of the loop: large, or packed, which can mean anything."""
    if len(records) > _FORM_BYTES_AT_ONCE:
        return True
    if not needs_records(settings):
        return False
    is_packed = len(records) > HEADER_BYTES and records[_ATTRIBUTES_POSITION] & COMPRESSION_MASK != 0
    return is_packed or len(records) > _RECORDS_BYTES_AT_ONCE


def check_form(records: memoryview | None, settings: TopicSettings, produce_version: int) -> Checked:
    """What can be seen without a look at the records."""
    if not records:
        raise Refused(ErrorCode.invalid_record, "there is no record batch for the partition")
    if len(records) > settings.max_message_bytes:
        raise _message_too_large(len(records), settings)
    try:
        header = read_header(records)
        if header.total_bytes < len(records):
            raise Refused(ErrorCode.invalid_record, "more than one record batch for the partition")
        check_header(header, records)
        check_batch_crc(header, records)
        _ = header.compression
    except CorruptRecords as error:
        raise Refused(ErrorCode.corrupt_message, str(error)) from error
    if header.attributes & COMPRESSION_MASK == _ZSTD and produce_version < _ZSTD_SINCE:
        raise Refused(ErrorCode.unsupported_compression_type, "zstd needs Produce version 7")
    return records, header


def needs_records(settings: TopicSettings) -> bool:
    """Whether a batch for this topic may have to be unpacked and looked through."""
    return settings.log.compacts or settings.compression_type != _COMPRESSION_AS_SENT


def check_records(checked: Checked, settings: TopicSettings, note_held: NoteHeld = lambda _: None) -> Slices[None]:
    """Look through the records, if the topic wants that: for keys, or because they get another codec.

    Damage would no longer be noticed after that. Headers are not looked at, as there can be millions of them.
    """
    batch, header = checked
    if not settings.log.compacts and not _needs_recompression(header, settings):
        return
    pace = Pace()
    lacks_key = False
    try:
        walk = RecordWalk.of_batch(header, memoryview(batch), bytes_max=_unpacked_max(settings))
        for record in walk:
            # To the end, even if the first has no key: a batch that is damaged further on is damaged.
            if record is None:
                note_held(walk.held_bytes)
            else:
                lacks_key |= record.key is None
            if pace.is_over(1 if record is not None else _STEPS_PER_PIECE):
                yield
    except (CorruptRecords, RecordTooLarge) as error:
        raise Refused(ErrorCode.invalid_record, str(error)) from error
    if lacks_key and settings.log.compacts:
        raise Refused(ErrorCode.invalid_record, "a record without a key cannot be kept in a compacted topic")


def recompressed(checked: Checked, settings: TopicSettings) -> Checked:
    """The same records under the topic's codec."""
    from semel.records import reference
    from semel.records.compression import compress

    records, header = checked
    if not _needs_recompression(header, settings):
        return checked
    try:
        body = reference.unpack_body(header, memoryview(records), _unpacked_max(settings))
    except (CorruptRecords, RecordTooLarge) as error:
        raise Refused(ErrorCode.invalid_record, str(error)) from error
    codec = "none" if settings.compression_type == "uncompressed" else settings.compression_type
    packed = as_bytes_view(compress(codec, body))
    if HEADER_BYTES + len(packed) > settings.max_message_bytes:
        raise _message_too_large(HEADER_BYTES + len(packed), settings)
    batch = bytearray(HEADER_BYTES + len(packed))
    batch[HEADER_BYTES:] = packed
    attributes = header.attributes & ~COMPRESSION_MASK | COMPRESSION_NAMES.index(codec)
    new = header._replace(batch_length=len(batch) - LENGTH_FIELD_END, attributes=attributes)
    write_header(batch, new)
    return batch, read_header(batch)


def _needs_recompression(header: BatchHeader, settings: TopicSettings) -> bool:
    as_it_is = "uncompressed" if header.compression == "none" else header.compression
    return settings.compression_type not in (_COMPRESSION_AS_SENT, as_it_is)


def _unpacked_max(settings: TopicSettings) -> int:
    message_bytes = settings.max_message_bytes
    return max(message_bytes, min(_UNPACKED_TIMES_MAX * max(message_bytes, _MESSAGE_BYTES), _UNPACKED_BYTES_MAX))


def _message_too_large(batch_bytes: int, settings: TopicSettings) -> Refused:
    return Refused(
        ErrorCode.message_too_large,
        f"a batch of {batch_bytes:,} bytes is more than max.message.bytes allows ({settings.max_message_bytes:,})",
    )
