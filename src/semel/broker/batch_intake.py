"""What a producer's batch must look like before a partition takes it: size, checksum, format, keys, compression."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from kio.schema.errors import ErrorCode

from semel.core.refusal import Refused
from semel.errors import CorruptRecords, RecordTooLarge
from semel.records.layout import BatchHeader, check_batch_crc, check_header, read_header

if TYPE_CHECKING:
    from semel.broker.configs import TopicSettings
    from semel.records import reference

_ZSTD: Final = 4
_ZSTD_SINCE: Final = 7
_COMPRESSION_AS_SENT: Final = "producer"
# A megabyte of zeros packs into a kilobyte. Producers make batches of up to the largest message before they are packed,
# so this is more than any needs, and millions of records to look at would keep everybody else waiting.
_UNPACKED_TIMES_MAX: Final = 8
_MESSAGE_BYTES: Final = 1_048_588


def check_batch(
    records: memoryview | None, settings: TopicSettings, produce_version: int
) -> tuple[memoryview | bytearray, BatchHeader]:
    """The one batch in `records`, ready to be stored. Raises Refused, and then nothing was stored."""
    if not records:
        raise Refused(ErrorCode.invalid_record, "there is no record batch for the partition")
    if len(records) > settings.max_message_bytes:
        raise Refused(
            ErrorCode.message_too_large,
            f"a batch of {len(records):,} bytes is more than max.message.bytes allows ({settings.max_message_bytes:,})",
        )
    try:
        header = read_header(records)
        if header.total_bytes < len(records):
            raise Refused(ErrorCode.invalid_record, "more than one record batch for the partition")
        check_header(header, records)
        check_batch_crc(header, records)
        compression = header.compression
    except CorruptRecords as error:
        raise Refused(ErrorCode.corrupt_message, str(error)) from error
    if header.attributes & 0x07 == _ZSTD and produce_version < _ZSTD_SINCE:
        raise Refused(ErrorCode.unsupported_compression_type, "zstd needs Produce version 7")
    if settings.log.compacts:
        _check_keys(records, header, settings)
    if settings.compression_type not in (
        _COMPRESSION_AS_SENT,
        "uncompressed" if compression == "none" else compression,
    ):
        return _recompressed(records, header, settings)
    return records, header


def _check_keys(records: memoryview, header: BatchHeader, settings: TopicSettings) -> None:
    # To the end, even if the first has no key: a batch that is damaged further on is damaged.
    if sum(record.key is None for record in _decoded(records, header, settings)):
        raise Refused(ErrorCode.invalid_record, "a record without a key cannot be kept in a compacted topic")


def _recompressed(records: memoryview, header: BatchHeader, settings: TopicSettings) -> tuple[bytearray, BatchHeader]:
    from semel.records import reference

    compression = settings.compression_type
    encoded = reference.encode_batch(
        list(_decoded(records, header, settings)),
        compression="none" if compression == "uncompressed" else compression,
        base_offset=header.base_offset,
        partition_leader_epoch=header.partition_leader_epoch,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=header.base_sequence,
        transactional=header.is_transactional,
    )
    batch = bytearray(encoded)
    return batch, read_header(batch)


def _decoded(records: memoryview, header: BatchHeader, settings: TopicSettings) -> Iterator[reference.Record]:
    from semel.records import reference

    bytes_max = _UNPACKED_TIMES_MAX * max(settings.max_message_bytes, _MESSAGE_BYTES)
    try:
        yield from reference.iterate_body(header, reference.unpack_body(header, records, bytes_max))
    except (CorruptRecords, RecordTooLarge) as error:
        raise Refused(ErrorCode.invalid_record, str(error)) from error
