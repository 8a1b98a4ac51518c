"""What one partition's bytes hold for a reader: ends, gaps, cuts and damage."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest
from hypothesis import given, note
from hypothesis import strategies as st
from partition_log import random_log

from semel.client.fetched import (
    READ_SCHEMA,
    PartitionRecords,
    Window,
    cut_to_window,
    decode_opened,
    open_records,
    to_read_table,
)
from semel.errors import CorruptRecords
from semel.records import RECORD_SCHEMA, encode_control_batch
from semel.records.reference import Record, encode_batch


def batch(base_offset: int, count: int) -> bytes:
    records = [Record(base_offset + number, 0, None, b"v%d" % (base_offset + number)) for number in range(count)]
    return encode_batch(records, base_offset=base_offset)


def offsets_in(data: bytes, window: Window) -> list[int]:
    return decode_opened(open_records(data, window), check_crc=True).table["offset"].to_pylist()


@given(seed=st.integers(0, 2**32))
def test_a_window_gives_exactly_its_offsets(seed: int) -> None:
    """Start and end in the middle of batches: nothing before, nothing from the end on, nothing missing."""
    note(f"seed {seed}")
    chance = random.Random(seed)
    log = random_log(chance, steps=20)
    start = chance.randint(0, log.end_offset)
    end = chance.randint(start, log.end_offset + 3)
    data, _ = log.serve(start, 1 << 30, read_committed=False)

    opened = open_records(data, Window(start, end, read_committed=False))

    table = decode_opened(opened, check_crc=True).table
    assert list(zip(table["offset"].to_pylist(), table["value"].to_pylist(), strict=True)) == log.visible(
        start, end, read_committed=False
    )
    assert opened.next_offset == min(end, max(start, log.end_offset))


def test_a_start_within_a_batch_cuts_off_the_records_before_it() -> None:
    """Brokers send whole batches; the reader asked from offset 12 on."""
    assert offsets_in(batch(10, 5), Window(12)) == [12, 13, 14]


def test_a_batch_that_lies_wholly_before_the_start_moves_nothing() -> None:
    """The position never goes back."""
    opened = open_records(batch(0, 5), Window(8))

    assert (opened.next_offset, opened.visible) == (8, [])


def test_what_an_answer_holds_twice_is_handed_out_once() -> None:
    """A broker that begins again within an answer must not make a reader repeat."""
    data = batch(0, 3) + batch(3, 2) + batch(0, 3) + batch(3, 2) + batch(5, 1)
    assert offsets_in(data, Window(0)) == [0, 1, 2, 3, 4, 5]
    assert offsets_in(data, Window(4)) == [4, 5]


def test_batches_from_the_last_stable_offset_on_wait_for_the_next_fetch() -> None:
    """A batch that became stable after the broker took the number is left: no record lies beyond what is reported."""
    opened = open_records(batch(0, 5) + batch(5, 5), Window(0, last_stable_offset=5))

    assert opened.next_offset == 5
    assert decode_opened(opened, check_crc=True).table["offset"].to_pylist() == [0, 1, 2, 3, 4]


def test_a_gap_up_to_the_end_counts_as_reached() -> None:
    """Compaction took offsets 5 to 19: a reader up to 10 is finished when it meets offset 20."""
    opened = open_records(batch(0, 5) + batch(20, 5), Window(0, 10))

    assert opened.next_offset == 10


def test_a_batch_that_is_not_whole_asks_for_a_larger_limit() -> None:
    """Bytes without a whole batch are no progress and no damage."""
    opened = open_records(batch(0, 5)[:-1], Window(0))

    assert opened.is_cut_short
    assert opened.next_offset == 0


def test_a_cut_last_batch_is_left_out() -> None:
    """Responses are cut at a byte limit; what is whole is read."""
    opened = open_records(batch(0, 5) + batch(5, 5)[:-1], Window(0))

    assert (opened.next_offset, opened.is_cut_short) == (5, False)


def test_what_comes_before_damage_is_good() -> None:
    """A walk that meets bytes that are no batch stops there and says why."""
    opened = open_records(batch(0, 5) + b"\x00" * 16 + b"\x09" + b"\x00" * 60, Window(0))

    assert opened.next_offset == 5
    assert isinstance(opened.damaged, CorruptRecords)


@pytest.mark.parametrize("include_markers", [True, False])
def test_markers_come_when_they_are_asked_for(include_markers: bool) -> None:
    """The position moves past a marker either way."""
    ending = encode_control_batch(
        "abort", producer_id=3, producer_epoch=1, coordinator_epoch=2, timestamp_ms=0, base_offset=5
    )

    opened = open_records(batch(0, 5) + ending, Window(0, include_markers=include_markers))

    assert opened.next_offset == 6
    assert [(m.kind, m.producer_id, m.offset) for m in opened.markers] == ([("abort", 3, 5)] if include_markers else [])


def test_cutting_works_across_chunks() -> None:
    """A table of several chunks, some of them empty, is cut by offset."""
    chunks = [[0, 1], [], [5, 6], [9]]
    tables = [
        pa.table(
            [pa.array([v] * len(c) if n else c, RECORD_SCHEMA.field(n).type) for n in range(6)], RECORD_SCHEMA.names
        )
        for c in chunks
        for v in (None,)
    ]
    table = pa.concat_tables(tables)

    assert cut_to_window(table, 1, 6)["offset"].to_pylist() == [1, 5]
    assert cut_to_window(table, 7, 9)["offset"].to_pylist() == []
    assert cut_to_window(table, 0, None).num_rows == 5


def test_the_read_table_names_topic_and_partition_in_sparks_order() -> None:
    """Column names, their order and the two added columns."""
    table = decode_opened(open_records(batch(0, 2), Window(0)), check_crc=True).table

    read = to_read_table([PartitionRecords("orders", 3, table, 2, 2, 2, 0)])

    assert read.schema == READ_SCHEMA
    assert read.column_names == [
        "key",
        "value",
        "topic",
        "partition",
        "offset",
        "timestamp",
        "timestampType",
        "headers",
    ]
    assert read.select(["topic", "partition", "offset", "value"]).to_pylist() == [
        {"topic": "orders", "partition": 3, "offset": 0, "value": b"v0"},
        {"topic": "orders", "partition": 3, "offset": 1, "value": b"v1"},
    ]
    assert to_read_table([]).schema == READ_SCHEMA
