"""What encode_table takes, how it cuts batches, and how stamp completes them."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from record_samples import COMPRESSIONS, RandomTables, make_table, seed_of_run, table_records

import semel.records
from semel.errors import ConfigError, RecordTooLarge
from semel.records import (
    ControlMarker,
    decode_batches,
    encode_control_batch,
    encode_table,
    read_control_batch,
    read_header,
    reference,
    stamp,
)
from semel.records.reference import Record, write_record


def encode(table: pa.Table, **options: object) -> bytes:
    batches = encode_table(table, default_timestamp_ms=1000, **options)  # pyright: ignore[reportArgumentType]
    return b"".join(batch.data for batch in batches)


def values_of(data: bytes) -> list[bytes | None]:
    return decode_batches(data)["value"].to_pylist()


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.large_binary(),
        pa.binary_view(),
        pa.dictionary(pa.int32(), pa.string()),
    ],
    ids=str,
)
def test_every_kind_of_string_column_is_taken(kind: pa.DataType) -> None:
    """Keys and values in any of Arrow's string and binary types become the same bytes, nulls included."""
    texts = ["one", None, "", "a text that is longer than twelve bytes", "zwölf"]
    column = (
        pa.array(texts, pa.string()).cast(kind)
        if not pa.types.is_dictionary(kind)
        else pa.array(texts).dictionary_encode()
    )
    expected = [None if text is None else text.encode() for text in texts]
    decoded = decode_batches(encode(pa.table({"key": column, "value": column})))
    assert decoded["value"].to_pylist() == expected
    assert decoded["key"].to_pylist() == expected


def test_fixed_size_binary_null_and_sliced_columns_are_taken() -> None:
    """Columns of one width, of nothing but nulls, and slices of larger ones are read from their own rows only."""
    table = pa.table({"key": pa.nulls(4), "value": pa.array([b"abc", None, b"def", b"ghi"], pa.binary(3))})
    assert values_of(encode(table.slice(1, 2))) == [None, b"def"]
    assert decode_batches(encode(table))["key"].to_pylist() == [None] * 4


def test_null_slots_that_hold_bytes_are_skipped() -> None:
    """Arrow allows a null to sit over bytes: these must not leak into the records around it."""
    offsets = pa.py_buffer(np.array([0, 3, 6, 9], np.int32))
    column = pa.Array.from_buffers(pa.binary(), 3, [pa.py_buffer(b"\x05"), offsets, pa.py_buffer(b"abcXXXdef")])
    assert values_of(encode(pa.table({"value": column, "key": column}))) == [b"abc", None, b"def"]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Berlin"])
def test_timestamps_of_any_unit_and_zone_become_milliseconds(unit: str, zone: str | None) -> None:
    """A timestamp column names an instant, whatever its unit and zone; null takes the default."""
    seconds = pa.array([1_700_000_000, None, -5], pa.timestamp("s", tz=zone))
    table = pa.table({"value": ["a", "b", "c"], "timestamp": seconds.cast(pa.timestamp(unit, tz=zone))})
    assert decode_batches(encode(table))["timestamp"].cast(pa.int64()).to_pylist() == [1_700_000_000_000, 1000, -5000]


def test_headers_given_as_a_map_or_with_null_lists_are_taken() -> None:
    """Spark's map type and null lists are headers too."""
    as_map = pa.array([[("a", b"1"), ("b", None)], None, []], pa.map_(pa.string(), pa.binary()))
    decoded = decode_batches(encode(pa.table({"value": ["x", "y", "z"], "headers": as_map})))
    assert decoded["headers"].to_pylist() == [[{"key": "a", "value": b"1"}, {"key": "b", "value": None}], [], []]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (pa.table({"key": ["a"]}), "no column `value`"),
        (pa.table({"value": [1]}), "int64"),
        (pa.table({"value": ["a"], "key": [1.5]}), "double"),
        (pa.table({"value": ["a"], "timestamp": ["now"]}), "`timestamp`"),
        (pa.table({"value": ["a"], "headers": ["h"]}), "`headers`"),
        (pa.table({"value": ["a"], "headers": [[{"name": "h", "value": b"1"}]]}), "`headers`"),
        (pa.table({"value": ["a"], "headers": [[{"key": None, "value": b"1"}]]}), "header without a key"),
        (pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["value", "value"]), "more than once"),
    ],
)
def test_unsuitable_columns_are_refused_by_name(table: pa.Table, words: str) -> None:
    """What cannot be encoded is refused before anything is, with the column and its type."""
    with pytest.raises(ConfigError, match=words):
        encode(table)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compression": "brotli"}, "brotli"),
        ({"compression": "lz4", "compression_level": 3}, "only for gzip and zstd"),
        ({"compression": "gzip", "compression_level": 99}, "outside"),
        ({"base_sequence": 2**31}, "base_sequence"),
    ],
)
def test_unsuitable_options_are_refused(options: dict[str, object], words: str) -> None:
    """Settings that no broker or codec knows are refused with what is possible."""
    with pytest.raises(ConfigError, match=words):
        encode(pa.table({"value": ["a"]}), **options)


def test_empty_table_gives_no_batches() -> None:
    """Nothing to send is no batch, not an empty one."""
    assert encode_table(pa.table({"value": pa.array([], pa.binary())}), default_timestamp_ms=0) == []
    assert encode_table(pa.table({"value": pa.chunked_array([], pa.binary())}), default_timestamp_ms=0) == []


@pytest.mark.parametrize("limit", [600, 1_000, 20_000])
def test_batches_are_full_and_never_above_the_limit(limit: int) -> None:
    """Cutting is greedy: no batch exceeds the limit, and none would have had room for the next record."""
    rng = random.Random(seed_of_run(11))
    tables = RandomTables(rng)
    for _ in range(60):
        records = tables.records(rng.randint(1, 400))
        batches = encode_table(make_table(records, rng), default_timestamp_ms=0, batch_bytes_max=limit)
        row = 0
        for batch in batches:
            assert len(batch.data) <= limit
            following = row + batch.record_count
            if following < len(records):
                body = bytearray()
                after = records[following]
                moved = Record(batch.record_count, after.timestamp_ms, after.key, after.value, after.headers)
                write_record(body, moved, 0, records[row].timestamp_ms)
                assert len(batch.data) + len(body) > limit
            row = following
        assert row == len(records)


def test_limit_counts_bytes_before_compression() -> None:
    """A batch is cut by what it unpacks to, so that compression cannot make batches that no reader wants to unpack."""
    table = pa.table({"value": [bytes(1000)] * 100})
    batches = encode_table(table, default_timestamp_ms=0, batch_bytes_max=10_000, compression="zstd")
    assert [batch.record_count for batch in batches] == [9] * 11 + [1]


@pytest.mark.parametrize("row", [0, 5])
def test_record_above_the_limit_is_named(row: int) -> None:
    """The row, its size, the limit and the settings to raise are in the message."""
    values = [b"small"] * 10
    values[row] = bytes(5000)
    with pytest.raises(
        RecordTooLarge, match=rf"Row {row} takes 50\d\d bytes .* 4096.*max\.request\.size.*message\.max\.bytes"
    ):
        encode(pa.table({"value": values}), batch_bytes_max=4096)


def test_largest_record_that_fits_is_encoded() -> None:
    """The limit itself is allowed, one byte less is not."""
    table = pa.table({"value": [bytes(5000)]})
    size = len(encode(table))
    assert len(encode(table, batch_bytes_max=size)) == size
    with pytest.raises(RecordTooLarge):
        encode(table, batch_bytes_max=size - 1)


def test_time_differences_of_millions_of_years_are_cut_by_the_limit() -> None:
    """Timestamps millions of years apart make batches within the same limits, and come back unchanged."""
    table = pa.table({"value": [b"v" * 50] * 30, "timestamp": pa.array([0, 2**62] * 15, pa.int64())})
    batches = encode_table(table, default_timestamp_ms=0, batch_bytes_max=500)
    assert max(len(batch.data) for batch in batches) <= 500
    assert sum(batch.record_count for batch in batches) == 30
    decoded = table_records(decode_batches(b"".join(batch.data for batch in batches)))
    assert [record.timestamp_ms for record in decoded] == [0, 2**62] * 15
    with pytest.raises(RecordTooLarge, match="Row 0"):
        encode_table(table, default_timestamp_ms=0, batch_bytes_max=100)


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("transactional", [False, True])
def test_stamping_equals_encoding_with_the_fields(compression: str, transactional: bool) -> None:
    """A batch encoded without a producer and stamped later is the batch encoded with it, byte for byte."""
    table = make_table(RandomTables(random.Random(seed_of_run(5))).records(50))
    fields = {"producer_id": 4711, "producer_epoch": 3, "base_sequence": 99, "transactional": transactional}
    (plain,) = encode_table(table, default_timestamp_ms=0, compression=compression)
    (direct,) = encode_table(table, default_timestamp_ms=0, compression=compression, **fields)  # pyright: ignore[reportArgumentType]
    stamp(plain.data, **fields)  # pyright: ignore[reportArgumentType]
    assert bytes(plain.data) == bytes(direct.data)
    copy = bytearray(direct.data)
    stamp(copy, producer_id=-1, producer_epoch=-1, base_sequence=-1, transactional=False)
    assert copy == bytes(encode(table, compression=compression))


def test_stamp_refuses_what_it_cannot_write_into() -> None:
    """Read-only bytes and anything but one whole batch are refused."""
    batch = encode(pa.table({"value": ["a"]}))
    fields = {"producer_id": 1, "producer_epoch": 0, "base_sequence": 0}
    with pytest.raises(ConfigError, match="writable"):
        stamp(memoryview(batch), transactional=True, **fields)
    with pytest.raises(ConfigError, match="one whole batch"):
        stamp(bytearray(batch + batch), transactional=True, **fields)


def test_sequences_go_on_over_batches_and_wrap() -> None:
    """Each batch starts where the one before ended; after 2**31-1 comes 0, and last_sequence wraps too."""
    table = pa.table({"value": [b"x" * 100] * 20})
    batches = encode_table(
        table,
        default_timestamp_ms=0,
        batch_bytes_max=600,
        producer_id=1,
        producer_epoch=0,
        base_sequence=2**31 - 6,
    )
    headers = [read_header(batch.data) for batch in batches]
    sequence = 2**31 - 6
    for header in headers:
        assert header.base_sequence == sequence
        assert header.last_sequence == (sequence + header.record_count - 1) % 2**31
        sequence = (sequence + header.record_count) % 2**31
    assert any(header.last_sequence < header.base_sequence for header in headers)


def test_header_properties_read_the_attribute_bits() -> None:
    """Compression, transaction, control and timestamp type come from their own bits."""
    header = read_header(
        reference.encode_batch([Record(7, 3, None, b"v")], base_offset=7, compression="zstd", transactional=True)
    )
    assert (header.compression, header.is_transactional, header.is_control, header.timestamp_type) == (
        "zstd",
        True,
        False,
        0,
    )
    assert (header.last_offset, header.last_sequence, header.record_count) == (7, -1, 1)


@pytest.mark.parametrize("kind", ["commit", "abort"])
def test_control_batches_come_back_as_they_were_written(kind: str) -> None:
    """A marker keeps its kind, producer, epochs and offset."""
    batch = encode_control_batch(
        kind,  # pyright: ignore[reportArgumentType]
        producer_id=7,
        producer_epoch=2,
        coordinator_epoch=5,
        timestamp_ms=1,
        base_offset=33,
    )
    assert read_control_batch(batch) == ControlMarker(kind, 5, 7, 2, 33)  # pyright: ignore[reportArgumentType]
    header = read_header(batch)
    assert (header.is_control, header.is_transactional, header.base_sequence) == (True, True, -1)


def test_unknown_control_records_are_stepped_over() -> None:
    """Control types of Kafka's own metadata log, and control batches emptied by compaction, hold no marker."""
    other = reference.encode_batch([Record(0, 0, b"\0\0\0\2", b"\0\0")], control=True)
    assert read_control_batch(other) is None
    assert read_control_batch(reference.encode_batch([], control=True)) is None


def test_encoded_batch_survives_pickling_and_stays_writable() -> None:
    """Batches cross process borders in Spark, and are stamped on the other side."""
    (batch,) = encode_table(pa.table({"value": ["a"]}), default_timestamp_ms=0)
    copy = pickle.loads(pickle.dumps(batch))
    assert bytes(copy.data) == bytes(batch.data)
    stamp(copy.data, producer_id=1, producer_epoch=0, base_sequence=0, transactional=True)


def test_public_names_are_pinned() -> None:
    """The names that other packages use; a change here is a change of the interface."""
    assert sorted(semel.records.__all__) == sorted(
        {
            "DECOMPRESSED_BYTES_MAX",
            "HEADER_BYTES",
            "RECORD_SCHEMA",
            "BatchHeader",
            "ControlMarker",
            "EncodedBatch",
            "StickyPartitioner",
            "decode_batches",
            "encode_control_batch",
            "encode_table",
            "iter_batches",
            "partitions_for_keys",
            "read_control_batch",
            "read_header",
            "reference",
            "split_by_partition",
            "stamp",
            "verify_crc",
        }
    )
    assert all(getattr(semel.records, name) is not None for name in semel.records.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = semel.records.no_such_name


def test_headers_can_be_read_without_loading_arrow() -> None:
    """A broker that looks at headers and markers starts without the cost of NumPy and Arrow."""
    script = "import sys, semel.records; semel.records.read_header; assert not {'numpy', 'pyarrow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
