"""The Arrow codec and the reference codec write the same bytes and read the same values."""

from __future__ import annotations

import os
import random

import pytest
from record_samples import (
    COMPRESSIONS,
    DECODER_PATHS,
    RandomTables,
    decode_by_arrow,
    decode_by_reference,
    decoder_for,
    make_table,
    patched,
    seed_of_run,
    table_records,
    use_path,
    with_crc,
)

from semel.errors import CorruptRecords
from semel.records import decode_batches, encode_table, read_header, reference
from semel.records.layout import SEQUENCE_MAX
from semel.records.reference import Record

TABLES_PER_PART = int(os.environ.get("SEMEL_RANDOM_TABLES", "5000")) // 10


def random_count(rng: random.Random) -> int:
    return rng.choice((0, 1, 2, 3, rng.randint(4, 60), rng.randint(4, 60), rng.randint(60, 200)))


def random_options(rng: random.Random) -> dict[str, object]:
    options: dict[str, object] = {"compression": rng.choice(COMPRESSIONS), "transactional": rng.random() < 0.3}
    if rng.random() < 0.5:
        sequence = rng.choice((0, 5, SEQUENCE_MAX - 3))
        options |= {
            "producer_id": rng.randrange(2**40),
            "producer_epoch": rng.randrange(2**15),
            "base_sequence": sequence,
        }
    if options["compression"] == "zstd" and rng.random() < 0.3:
        options["compression_level"] = 5
    return options


def check_encoding(
    records: list[Record], options: dict[str, object], batch_bytes_max: int, rng: random.Random
) -> bytes:
    """Encode a table of the records and compare each batch with the reference's; returns all bytes."""
    default = records[0].timestamp_ms if records else 0
    table = make_table(records, rng)
    batches = encode_table(table, default_timestamp_ms=default, batch_bytes_max=batch_bytes_max, **options)  # pyright: ignore[reportArgumentType]
    row = 0
    for batch in batches:
        part = [
            Record(index, record.timestamp_ms, record.key, record.value, record.headers)
            for index, record in enumerate(records[row : row + batch.record_count])
        ]
        fields = dict(options)
        if "base_sequence" in fields:
            fields["base_sequence"] = (int(str(fields["base_sequence"])) + row) % 2**31
        assert bytes(batch.data) == reference.encode_batch(part, **fields)  # pyright: ignore[reportArgumentType]
        row += batch.record_count
    assert row == len(records)
    return b"".join(bytes(batch.data) for batch in batches)


@pytest.mark.parametrize("part", range(10))
def test_both_codecs_agree_on_random_tables(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """5,000 random tables: the same bytes out, and the same values back. SEMEL_RANDOM_TABLES=100000 for more."""
    rng = random.Random(seed_of_run(1000 + part))
    use_path(monkeypatch, DECODER_PATHS[part % len(DECODER_PATHS)])
    tables = RandomTables(rng)
    for _ in range(TABLES_PER_PART):
        records = tables.records(random_count(rng))
        data = check_encoding(records, random_options(rng), rng.choice((1_048_576, 1_048_576, 2_000)), rng)
        decoded = table_records(decode_batches(data))
        assert [(r.timestamp_ms, r.key, r.value, r.headers) for r in decoded] == [
            (r.timestamp_ms, r.key, r.value, r.headers) for r in records
        ]


@pytest.mark.parametrize("part", range(6))
def test_both_codecs_agree_on_large_batches(part: int) -> None:
    """Batches of thousands of records, which take the paths for runs, for sweeps and for wide offset deltas."""
    rng = random.Random(seed_of_run(2000 + part))
    tables = RandomTables(rng)
    for count in (600, 3_000, 9_000):
        records = tables.records(count)
        data = check_encoding(records, {"compression": rng.choice(COMPRESSIONS)}, 1_048_576, rng)
        decoded = table_records(decode_batches(data))
        assert [(r.key, r.value, r.headers, r.timestamp_ms) for r in decoded] == [
            (r.key, r.value, r.headers, r.timestamp_ms) for r in records
        ]


@pytest.mark.parametrize("path", DECODER_PATHS)
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 700])
def test_offsets_count_from_the_base_offset(path: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that the broker moved to its place in the log decodes to offsets from there on."""
    decode = decoder_for(monkeypatch, path)
    records = [Record(10**12 + index, 1000, b"k", b"some value") for index in range(count)]
    assert decode(reference.encode_batch(records, base_offset=10**12)) == records


@pytest.mark.parametrize("path", DECODER_PATHS)
@pytest.mark.parametrize("count", [5, 600])
def test_compacted_batch_keeps_its_gaps(path: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compaction leaves gaps between offsets and a last offset without a record: both decoders keep the offsets."""
    decode = decoder_for(monkeypatch, path)
    rng = random.Random(seed_of_run(7))
    offsets = sorted(rng.sample(range(100, 100 + 3 * count), count))
    records = [Record(offset, 1000 + offset, b"key", b"value of equal length") for offset in offsets]
    batch = bytearray(reference.encode_batch(records, base_offset=100))
    batch[23:27] = (3 * count + 50).to_bytes(4, "big")
    fixed = with_crc(batch)
    assert decode(fixed) == records
    assert read_header(fixed).last_offset == 100 + 3 * count + 50


@pytest.mark.parametrize("path", DECODER_PATHS)
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_batch_emptied_by_compaction_has_no_records(
    path: str, compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of which compaction left only the header is legal and decodes to nothing, whatever codec it names."""
    decode = decoder_for(monkeypatch, path)
    batch = patched(reference.encode_batch([]), 21, ">h", COMPRESSIONS.index(compression))
    assert decode(batch) == []


@pytest.mark.parametrize("path", DECODER_PATHS)
@pytest.mark.parametrize("count", [3, 600])
def test_log_append_time_gives_every_record_the_max_timestamp(
    path: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With timestamp type 1 the broker's time in max_timestamp stands for every record."""
    decode = decoder_for(monkeypatch, path)
    records = [Record(index, 1000 + index, None, b"value") for index in range(count)]
    batch = patched(patched(reference.encode_batch(records), 21, ">h", 0x08), 35, ">q", 999_999)
    assert {record.timestamp_ms for record in decode(batch)} == {999_999}
    assert set(decode_batches([batch])["timestamp_type"].to_pylist()) == {1}


@pytest.mark.parametrize("path", DECODER_PATHS)
def test_delete_horizon_is_the_base_of_the_deltas(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the delete horizon in base_timestamp (KIP-534) the deltas count from it, negative ones too."""
    decode = decoder_for(monkeypatch, path)
    records = [Record(0, 5_000, b"k", None), Record(1, 1_000, b"k", b"v"), Record(2, 2_000, b"k", b"v")]
    batch = patched(reference.encode_batch(records), 21, ">h", 0x40)
    assert read_header(batch).has_delete_horizon
    assert [record.timestamp_ms for record in decode(batch)] == [5_000, 1_000, 2_000]


@pytest.mark.parametrize("path", DECODER_PATHS)
@pytest.mark.parametrize("count", [3, 600])
def test_header_keys_that_are_not_utf8_are_replaced(path: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header key in another encoding is shown with replacement characters; the batch is not refused."""
    decode = decoder_for(monkeypatch, path)
    key = b"caf\xe9".decode("utf-8", errors="surrogateescape")
    batch = reference.encode_batch([Record(index, 0, None, b"v", ((key, b"1"),)) for index in range(count)])
    assert decode(batch) == [Record(index, 0, None, b"v", (("caf�", b"1"),)) for index in range(count)]


def test_small_batches_are_decoded_together_in_order() -> None:
    """Thousands of tiny batches between large ones keep their order, offsets and timestamp types."""
    rng = random.Random(seed_of_run(3))
    data = b""
    expected: list[Record] = []
    for _ in range(300):
        count = rng.choice((1, 2, 5, 5, 600))
        records = [
            Record(len(expected) + index, 50 + index, rng.randbytes(3), rng.randbytes(9)) for index in range(count)
        ]
        data += reference.encode_batch(records, base_offset=len(expected), compression=rng.choice(COMPRESSIONS))
        expected += records
    assert table_records(decode_batches(data)) == expected


def test_one_damaged_batch_among_small_ones_is_named() -> None:
    """Grouping small batches does not blur which of them is damaged."""
    good = reference.encode_batch([Record(5, 0, None, b"good")], base_offset=5)
    bad = bytearray(reference.encode_batch([Record(6, 0, None, b"bad")], base_offset=6))
    bad[61] ^= 0x01
    with pytest.raises(CorruptRecords, match="offset 6"):
        decode_batches([good, with_crc(bad), good])
    assert decode_by_arrow(good) == decode_by_reference(good)
