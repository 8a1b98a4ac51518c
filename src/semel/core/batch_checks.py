"""What a batch must look like before a partition takes it, told from its header alone: shape and timestamps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kio.schema.errors import ErrorCode

from semel.core.refusal import Refused
from semel.records.layout import TIMESTAMP_TYPE_BIT, BatchHeader

TimestampType = Literal["CreateTime", "LogAppendTime"]
NO_TIMESTAMP = -1


@dataclass(frozen=True, slots=True)
class Timestamps:
    """How a batch is to be stamped when stored.

    `attributes` and `max_timestamp` go into its header; `log_append_time_ms` into the answer, -1 unless the topic has
    LogAppendTime.
    """

    attributes: int
    max_timestamp: int
    log_append_time_ms: int


def check_header(header: BatchHeader, *, from_client: bool) -> None:
    """Refuse, with INVALID_RECORD, a header that no correct producer writes."""
    if header.record_count < 1:
        raise _invalid(f"the batch claims {header.record_count} records")
    if header.last_offset_delta != header.record_count - 1:
        raise _invalid(f"the batch claims {header.record_count} records over {header.last_offset_delta + 1} offsets")
    if header.producer_id < 0 and (header.is_transactional or header.is_control):
        raise _invalid("a transactional batch needs a producer id")
    if header.is_control:
        raise _invalid("only the transaction coordinator writes control records")
    if not from_client:
        return
    if header.base_offset != 0:
        raise _invalid(f"the batch starts at offset {header.base_offset}; offsets are given by the broker, send 0")
    if header.producer_id >= 0 and header.base_sequence < 0:
        raise _invalid(f"producer {header.producer_id} sent sequence {header.base_sequence}")


def decide_timestamp(
    header: BatchHeader, *, now_ms: int, timestamp_type: TimestampType, before_max_ms: int, after_max_ms: int
) -> Timestamps:
    """Apply message.timestamp.type and message.timestamp.before/after.max.ms to a client's batch.

    Looks at the first and the largest timestamp, which are in the header; those between are not unpacked.

    >>> from semel.records.layout import read_header
    >>> from semel.records.reference import Record, encode_batch
    >>> header = read_header(encode_batch([Record(0, 1000, None, b"a", ())]))
    >>> decide_timestamp(header, now_ms=5000, timestamp_type="LogAppendTime", before_max_ms=10, after_max_ms=10)
    Timestamps(attributes=8, max_timestamp=5000, log_append_time_ms=5000)
    """
    if timestamp_type == "LogAppendTime":
        if header.timestamp_type:
            raise Refused(ErrorCode.invalid_timestamp, "only the broker may set the timestamp type LogAppendTime")
        return Timestamps(header.attributes | TIMESTAMP_TYPE_BIT, now_ms, now_ms)
    for timestamp_ms in (header.base_timestamp, header.max_timestamp):
        if timestamp_ms == NO_TIMESTAMP:
            continue
        if now_ms - timestamp_ms > before_max_ms or timestamp_ms - now_ms > after_max_ms:
            raise Refused(
                ErrorCode.invalid_timestamp,
                f"timestamp {timestamp_ms} is not within {before_max_ms} ms before and {after_max_ms} ms after the "
                f"broker's time {now_ms}; see message.timestamp.before.max.ms and message.timestamp.after.max.ms",
            )
    return Timestamps(header.attributes & ~TIMESTAMP_TYPE_BIT, header.max_timestamp, NO_TIMESTAMP)


def _invalid(reason: str) -> Refused:
    return Refused(ErrorCode.invalid_record, reason)
