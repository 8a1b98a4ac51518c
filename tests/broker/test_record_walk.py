"""The walk over the records of a batch sees what the readable codec sees, in pieces, and stops where it does."""

from __future__ import annotations

import tracemalloc
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.broker.storage import record_walk
from semel.broker.storage.record_walk import RecordWalk
from semel.errors import CorruptRecords, RecordTooLarge
from semel.records import reference
from semel.records.compression import compress
from semel.records.layout import (
    COMPRESSION_NAMES,
    HEADER_BYTES,
    LENGTH_FIELD_END,
    as_bytes_view,
    read_header,
    write_header,
)
from semel.records.reference import Record, encode_batch

BYTES_MAX = 64 << 20

texts = st.one_of(st.none(), st.binary(max_size=40), st.binary(min_size=200, max_size=400))
headers = st.lists(st.tuples(st.text(max_size=3), texts), max_size=3).map(tuple)
rows = st.lists(st.tuples(st.integers(0, 2**40), texts, texts, headers), min_size=1, max_size=12)


def walked(batch: bytes, **asked: bool) -> list[record_walk.WalkedRecord]:
    walk = RecordWalk.of_batch(read_header(batch), memoryview(batch), bytes_max=BYTES_MAX, **asked)
    return [record for record in walk if record is not None]


def packed_batch(body: bytes, record_count: int, codec: str = "zstd", timestamp_ms: int = 0) -> bytes:
    """A batch around records that nobody would write."""
    header = read_header(encode_batch([Record(0, timestamp_ms, b"k", b"v")], compression=codec))
    packed = as_bytes_view(compress(codec, body))
    batch = bytearray(HEADER_BYTES + len(packed))
    batch[HEADER_BYTES:] = packed
    length = len(batch) - LENGTH_FIELD_END
    write_header(
        batch, header._replace(batch_length=length, record_count=record_count, last_offset_delta=record_count - 1)
    )
    return bytes(batch)


@pytest.mark.parametrize("codec", COMPRESSION_NAMES)
@pytest.mark.parametrize("piece_bytes", [1, 7, 256 << 10])
def test_the_walk_sees_what_the_readable_codec_sees(
    codec: str, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offsets, times, keys and tombstones, with every codec, wherever the pieces end."""
    monkeypatch.setattr(record_walk, "PIECE_BYTES", piece_bytes)

    @settings(max_examples=40, deadline=None)
    @given(rows)
    def check(found: list[tuple[int, bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...]]]) -> None:
        records = [Record(offset, *row) for offset, row in enumerate(found)]
        batch = encode_batch(records, compression=codec)
        base = read_header(batch).base_timestamp
        expected = [(one.offset, one.timestamp_ms - base, one.key, one.value is None) for one in records]
        seen = walked(batch, keys=True)
        assert [(one.offset_delta, one.timestamp_delta, one.key, one.is_tombstone) for one in seen] == expected
        heads = walked(batch)
        assert [(one.offset_delta, one.key is None) for one in heads] == [
            (one.offset, one.key is None) for one in records
        ]
        assert [one._replace(tail=b"") for one in walked(batch, tails=True)] == seen

    check()


@pytest.mark.parametrize("codec", COMPRESSION_NAMES)
def test_a_batch_that_is_cut_short_or_too_long_is_damaged(codec: str) -> None:
    """Records that do not end where the batch does are never taken for whole."""
    body = bytearray()
    for offset in range(3):
        reference.write_record(body, Record(offset, 0, b"key", b"value"), 0, 0)
    assert len(walked(packed_batch(bytes(body), 3, codec))) == 3
    for wrong in (bytes(body[:-1]), bytes(body) + b"\0"):
        with pytest.raises(CorruptRecords):
            walked(packed_batch(wrong, 3, codec))
    with pytest.raises(CorruptRecords):
        walked(packed_batch(bytes(body), 2, codec))


def test_gzip_in_many_members_is_walked() -> None:
    """A gzip stream may have several members, and zlib stops at the end of each."""
    body = bytearray()
    for offset in range(500):
        reference.write_record(body, Record(offset, 0, b"key", b"value"), 0, 0)
    members = b"".join(zlib.compress(body[at : at + 9], wbits=31) for at in range(0, len(body), 9))
    whole = bytearray(packed_batch(bytes(body), 500, "gzip")[:HEADER_BYTES] + members)
    write_header(whole, read_header(whole)._replace(batch_length=len(whole) - LENGTH_FIELD_END))
    assert len(walked(bytes(whole))) == 500


def test_a_record_with_millions_of_headers_is_stepped_over_in_little_memory() -> None:
    """Eight million headers out of two kilobytes took gigabytes and half a minute."""
    count = 8_000_000
    start = b"\0\0\0\2k\1" + reference.varint_bytes(count)
    body = reference.varint_bytes(len(start) + 2 * count) + start + bytes(2 * count)
    batch = packed_batch(body, 1)
    del body
    tracemalloc.start()
    try:
        (record,) = walked(batch, keys=True)
        assert record.key == b"k"
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    with pytest.raises(RecordTooLarge):
        list(RecordWalk.of_batch(read_header(batch), memoryview(batch), bytes_max=count))
