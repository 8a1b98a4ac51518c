"""What a producer's batch must look like before a partition takes it: size, checksum, format, keys, compression."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kio.schema.errors import ErrorCode

from semel.core.refusal import Refused
from semel.errors import CorruptRecords, RecordTooLarge
from semel.records.layout import BatchHeader, check_batch_crc, check_header, read_header

if TYPE_CHECKING:
    from semel.records import reference
    from semel.broker.configs import TopicSettings

_ZSTD: Final = 4
_ZSTD_SINCE: Final = 7
_COMPRESSION_AS_SENT: Final = "producer"


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
        _check_keys(records)
    if settings.compression_type not in (
        _COMPRESSION_AS_SENT,
        "uncompressed" if compression == "none" else compression,
    ):
        return _recompressed(records, settings.compression_type)
    return records, header


def _check_keys(records: memoryview) -> None:
    if any(record.key is None for record in _decoded(records)):
        raise Refused(ErrorCode.invalid_record, "a record without a key cannot be kept in a compacted topic")


def _recompressed(records: memoryview, compression: str) -> tuple[bytearray, BatchHeader]:
    from semel.records import reference

    header = read_header(records)
    encoded = reference.encode_batch(
        _decoded(records),
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


def _decoded(records: memoryview) -> list[reference.Record]:
    from semel.records import reference

    try:
        return list(reference.decode_batch(records, check_crc=False)[1])
    except (CorruptRecords, RecordTooLarge) as error:
        raise Refused(ErrorCode.invalid_record, str(error)) from error
