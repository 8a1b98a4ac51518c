"""What of a client's batch is checked by its header alone: its shape and its timestamps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kio.schema.errors import ErrorCode
from partition_model import make_header

from semel.core.batch_checks import Timestamps, decide_timestamp
from semel.core.partition_log import PartitionLog
from semel.core.refusal import Refused
from semel.records.layout import BatchHeader


def outcome(call: Callable[[], object]) -> object:
    try:
        return call()
    except Refused as refusal:
        return refusal.code


@pytest.mark.parametrize(
    "header",
    [
        make_header()._replace(record_count=0, last_offset_delta=-1),
        make_header()._replace(record_count=2),
        make_header(count=2)._replace(record_count=1),
        make_header(producer_id=7, producer_epoch=0, base_sequence=-1),
        make_header(transactional=True),
        make_header(producer_id=7, producer_epoch=0, base_sequence=0, transactional=True, control=True),
        make_header(control=True),
        make_header(base_offset=5),
    ],
)
def test_headers_that_no_correct_producer_sends_are_refused(header: BatchHeader) -> None:
    """Lying counts would shift offsets, and control records from a client would end other people's transactions."""
    assert outcome(lambda: PartitionLog().decide_append(header, now_ms=0)) is ErrorCode.invalid_record


def test_create_time_must_be_near_the_brokers_clock() -> None:
    """message.timestamp.before.max.ms and after.max.ms, both borders included."""

    def stamp(base: int, largest: int) -> object:
        header = make_header(count=2)._replace(base_timestamp=base, max_timestamp=largest)
        return outcome(
            lambda: decide_timestamp(
                header, now_ms=1000, timestamp_type="CreateTime", before_max_ms=100, after_max_ms=10
            )
        )

    assert stamp(900, 1010) == Timestamps(0, 1010, -1)
    assert stamp(-1, -1) == Timestamps(0, -1, -1)
    assert stamp(899, 1000) is ErrorCode.invalid_timestamp
    assert stamp(1000, 1011) is ErrorCode.invalid_timestamp


def test_log_append_time_is_the_brokers_alone() -> None:
    """The broker stamps the batch whatever the producer wrote, and refuses one that claims to be stamped."""

    def stamp(attributes: int) -> object:
        header = make_header(timestamp_ms=1)._replace(attributes=attributes)
        return outcome(
            lambda: decide_timestamp(
                header, now_ms=1000, timestamp_type="LogAppendTime", before_max_ms=0, after_max_ms=0
            )
        )

    assert stamp(0x10) == Timestamps(0x18, 1000, 1000)
    assert stamp(0x18) is ErrorCode.invalid_timestamp
