"""Record batches as bytes, without a broker: Kafka's reader and writer on one side, Semel's two codecs on the other."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pyarrow as pa
import pytest
from java_peer import Compression, JavaPeer, PeerRecord

from semel.records import (
    BatchHeader,
    ControlMarker,
    decode_batches,
    encode_control_batch,
    encode_table,
    read_control_batch,
    read_header,
    reference,
    stamp,
)

CODECS: tuple[Compression, ...] = ("none", "gzip", "snappy", "lz4", "zstd")
BASE_MS = 1_700_000_000_000
SEED = 8_191

Content = tuple[int | None, int | None, bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...]]


def small_records() -> list[PeerRecord]:
    return [
        PeerRecord(
            key=b"key",
            value=b"value",
            headers=(("a", b"1"), ("a", None), ("", b""), ("\u00e9", b"\0")),
            timestamp_ms=BASE_MS,
        ),
        PeerRecord(key=None, value=None, timestamp_ms=BASE_MS - 5),
        PeerRecord(key=b"", value=b"", timestamp_ms=BASE_MS + 10**10),
        PeerRecord(key=b"\xff\xfe", value=b"not text \x80", timestamp_ms=0),
    ]


def large_records(*, compressible: bool) -> list[PeerRecord]:
    """Values around and above the block sizes of snappy (32 KB) and lz4 (64 KB), between small ones."""
    rng = random.Random(SEED)
    sizes = [10, 32 * 1024 - 1, 32 * 1024, 64 * 1024, 0, 64 * 1024 + 1, 200_000, 3, 400_000]
    return [
        PeerRecord(
            key=b"%d" % size,
            value=(b"again and again " * (size // 16 + 1))[:size] if compressible else rng.randbytes(size),
            timestamp_ms=BASE_MS + number,
        )
        for number, size in enumerate(sizes)
    ]


def many_records() -> list[PeerRecord]:
    rng = random.Random(SEED)
    return [
        PeerRecord(key=rng.randbytes(4), value=rng.randbytes(rng.randrange(30)), timestamp_ms=BASE_MS + number // 7)
        for number in range(3_000)
    ]


SAMPLES: dict[str, Callable[[], list[PeerRecord]]] = {
    "small": small_records,
    "compressible": lambda: large_records(compressible=True),
    "random": lambda: large_records(compressible=False),
    "many": many_records,
}
each_codec = pytest.mark.parametrize("compression", CODECS)
each_sample = pytest.mark.parametrize("sample", SAMPLES)


def contents(records: Sequence[PeerRecord], first_offset: int) -> list[Content]:
    return [
        (first_offset + number, record.timestamp_ms, record.key, record.value, record.headers)
        for number, record in enumerate(records)
    ]


def arrow_contents(batch: bytes) -> list[Content]:
    table = decode_batches([batch])
    columns = [table.column(name) for name in ("offset", "timestamp", "key", "value", "headers")]
    columns[1] = columns[1].cast(pa.int64())
    return [
        (offset, timestamp, key, value, tuple((header["key"], header["value"]) for header in headers))
        for offset, timestamp, key, value, headers in zip(*(column.to_pylist() for column in columns), strict=True)
    ]


def reference_contents(batch: bytes) -> list[Content]:
    _, records = reference.decode_batch(batch)
    return [(record.offset, record.timestamp_ms, record.key, record.value, record.headers) for record in records]


def to_table(records: Sequence[PeerRecord]) -> pa.Table:
    header = pa.struct([("key", pa.string()), ("value", pa.binary())])
    rows: list[list[dict[str, Any]]] = [
        [{"key": name, "value": content} for name, content in record.headers] for record in records
    ]
    return pa.table(
        {
            "key": pa.array([record.key for record in records], pa.binary()),
            "value": pa.array([record.value for record in records], pa.binary()),
            "timestamp": pa.array([record.timestamp_ms for record in records], pa.timestamp("ms", "UTC")),
            "headers": pa.array(rows, pa.list_(header)),
        }
    )


@each_codec
@each_sample
def test_both_codecs_read_a_batch_of_the_java_client(
    sample: str, compression: Compression, java_peer: JavaPeer
) -> None:
    """Every field of the header and of each record is as the Java client wrote it."""
    print(f"seed {SEED}")
    records = SAMPLES[sample]()
    batch = java_peer.build_batch(
        records,
        compression=compression,
        base_offset=2**33,
        producer_id=2**40,
        producer_epoch=7,
        base_sequence=2**31 - 3,
        transactional=True,
        partition_leader_epoch=12,
    )
    assert arrow_contents(batch) == contents(records, 2**33)
    assert reference_contents(batch) == contents(records, 2**33)
    header = read_header(batch)
    assert (header.compression, header.is_transactional, header.is_control) == (compression, True, False)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (2**40, 7, 2**31 - 3)
    assert (header.base_offset, header.last_offset, header.record_count) == (
        2**33,
        2**33 + len(records) - 1,
        len(records),
    )
    assert header.partition_leader_epoch == 12


def test_gaps_of_compaction_and_log_append_time_are_read(java_peer: JavaPeer) -> None:
    """Offsets that are not contiguous stay as they are, and the broker's own time wins over the records'."""
    records = [PeerRecord(value=b"%d" % offset, timestamp_ms=5, offset=offset) for offset in (10, 13, 400)]
    batch = java_peer.build_batch(records, base_offset=10, log_append_time_ms=BASE_MS)
    expected = [(offset, BASE_MS, None, b"%d" % offset, ()) for offset in (10, 13, 400)]
    assert arrow_contents(batch) == expected
    assert reference_contents(batch) == expected
    assert decode_batches([batch]).column("timestamp_type").to_pylist() == [1, 1, 1]


@each_codec
@each_sample
def test_java_client_reads_batches_of_the_arrow_codec(
    sample: str, compression: Compression, java_peer: JavaPeer
) -> None:
    """All records, over as many batches as fit the limit, with checksums that Kafka's reader accepts."""
    print(f"seed {SEED}")
    records = SAMPLES[sample]()
    encoded = encode_table(
        to_table(records),
        compression=compression,
        batch_bytes_max=500_000,
        default_timestamp_ms=1,
        producer_id=9,
        producer_epoch=3,
        base_sequence=40,
        transactional=True,
    )
    batches = java_peer.parse_batches(b"".join(batch.data for batch in encoded))
    assert len(batches) == len(encoded)
    check_parsed(batches, records, compression)
    sequences = [record.sequence for batch in batches for record in batch.records]
    assert sequences == list(range(40, 40 + len(records)))
    assert {(batch.producer_id, batch.producer_epoch, batch.transactional) for batch in batches} == {(9, 3, True)}


@each_codec
def test_java_client_reads_batches_of_the_reference_codec(compression: Compression, java_peer: JavaPeer) -> None:
    """The slow codec is held to the same reader."""
    records = small_records() + large_records(compressible=True)
    given = [
        reference.Record(number, record.timestamp_ms or 0, record.key, record.value, record.headers)
        for number, record in enumerate(records)
    ]
    batches = java_peer.parse_batches(reference.encode_batch(given, compression=compression))
    check_parsed(batches, records, compression)


def check_parsed(batches: Sequence[Any], records: Sequence[PeerRecord], compression: str) -> None:
    got = [
        (record.timestamp_ms, record.key, record.value, record.headers) for batch in batches for record in batch.records
    ]
    assert got == [(record.timestamp_ms, record.key, record.value, record.headers) for record in records]
    assert {(batch.magic, batch.compression, batch.control) for batch in batches} == {(2, compression, False)}
    for batch in batches:
        assert batch.max_timestamp_ms == max(record.timestamp_ms for record in batch.records)


def test_java_client_reads_a_stamped_batch(java_peer: JavaPeer) -> None:
    """Producer fields written into a finished batch are what the reader sees, and its checksum is right again."""
    [batch] = encode_table(to_table(small_records()), default_timestamp_ms=1)
    stamp(batch.data, producer_id=77, producer_epoch=5, base_sequence=2**31 - 2, transactional=True)
    [parsed] = java_peer.parse_batches(bytes(batch.data))
    assert (parsed.producer_id, parsed.producer_epoch, parsed.base_sequence) == (77, 5, 2**31 - 2)
    assert parsed.transactional
    # Sequences count to 2**31 - 1 and go on at 0.
    assert [record.sequence for record in parsed.records] == [2**31 - 2, 2**31 - 1, 0, 1]


@pytest.mark.parametrize("kind", ["commit", "abort"])
def test_markers_are_the_same_bytes_on_both_sides(kind: Literal["commit", "abort"], java_peer: JavaPeer) -> None:
    """Control batches of Semel equal those of Kafka byte for byte, and are read for what they are."""
    theirs = java_peer.build_end_marker(
        "COMMIT" if kind == "commit" else "ABORT",
        producer_id=5,
        producer_epoch=2,
        coordinator_epoch=9,
        base_offset=100,
        timestamp_ms=BASE_MS,
        partition_leader_epoch=3,
    )
    ours = encode_control_batch(
        kind,
        producer_id=5,
        producer_epoch=2,
        coordinator_epoch=9,
        timestamp_ms=BASE_MS,
        base_offset=100,
        partition_leader_epoch=3,
    )
    assert ours == theirs
    assert read_control_batch(theirs) == ControlMarker(kind, 9, 5, 2, 100)
    header: BatchHeader = read_header(theirs)
    assert header.is_control
    assert header.is_transactional
    [parsed] = java_peer.parse_batches(ours)
    assert parsed.control
