"""Batches of other clients are read here, and batches from here by them.

aiokafka's compiled codec and kafka-python's work on bytes alone. Which codecs they have depends on what is installed
beside them: gzip always, the others where the peer says so. The conformance tests cover all of them with a broker.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from aiokafka import codec as aiokafka_codec
from aiokafka.record.default_records import DefaultRecordBatchBuilder as AiokafkaBuilder
from aiokafka.record.memory_records import MemoryRecords as AiokafkaMemoryRecords
from kafka_python_peer import DefaultRecordBatchBuilder as KafkaPythonBuilder
from kafka_python_peer import MemoryRecords as KafkaPythonMemoryRecords
from kafka_python_peer import codec as kafka_python_codec
from record_samples import COMPRESSIONS, HEADERS_TYPE, decode_by_arrow, decode_by_reference

from semel.records import decode_batches, encode_table
from semel.records.compression import compress, decompress
from semel.records.reference import Record

RECORDS = [
    Record(0, 1_700_000_000_000, b"key", b"value"),
    Record(1, 1_700_000_000_500, None, b"no key", (("h", b"1"), ("null", None))),
    Record(2, 1_699_999_999_000, b"tombstone", None),
    Record(3, 1_700_000_000_001, b"", b"", (("ключ", b""),)),
    *(Record(index, 1_700_000_000_000 + index, b"k%d" % index, b"v" * index) for index in range(4, 100)),
]
PEERS: dict[str, tuple[Any, Any, Any]] = {
    "aiokafka": (AiokafkaBuilder, AiokafkaMemoryRecords, aiokafka_codec),
    "kafka-python": (KafkaPythonBuilder, KafkaPythonMemoryRecords, kafka_python_codec),
}
PEERS_AND_CODECS = [
    (peer, codec)
    for peer, (_, _, codecs) in PEERS.items()
    for codec in COMPRESSIONS
    if codec == "none" or getattr(codecs, f"has_{codec}")()
]


def build_with(builder_class: Any, codec: int) -> bytes:
    builder = builder_class(
        magic=2,
        compression_type=codec,
        is_transactional=1,
        producer_id=5,
        producer_epoch=1,
        base_sequence=10,
        batch_size=1_000_000,
    )
    for record in RECORDS:
        builder.append(
            record.offset,
            timestamp=record.timestamp_ms,
            key=record.key,
            value=record.value,
            headers=list(record.headers),
        )
    return bytes(builder.build())


@pytest.mark.parametrize(("peer", "codec"), PEERS_AND_CODECS)
def test_batches_of_a_peer_decode_to_what_was_sent(peer: str, codec: str) -> None:
    """Both decoders read what aiokafka and kafka-python build."""
    batch = build_with(PEERS[peer][0], COMPRESSIONS.index(codec))
    assert decode_by_reference(batch) == RECORDS
    assert decode_by_arrow(batch) == RECORDS


@pytest.mark.parametrize(("peer", "codec"), PEERS_AND_CODECS)
def test_batches_from_here_are_read_by_a_peer(peer: str, codec: str) -> None:
    """aiokafka and kafka-python read what encode_table writes, checksum and all."""
    table = pa.table(
        {
            "key": pa.array([record.key for record in RECORDS], pa.binary()),
            "value": pa.array([record.value for record in RECORDS], pa.binary()),
            "timestamp": [record.timestamp_ms for record in RECORDS],
            "headers": pa.array(
                [[{"key": k, "value": v} for k, v in record.headers] for record in RECORDS], HEADERS_TYPE
            ),
        }
    )
    batches = encode_table(table, default_timestamp_ms=0, compression=codec, batch_bytes_max=2_000)
    assert len(batches) > 2
    memory: Any = PEERS[peer][1](b"".join(batch.data for batch in batches))
    read: list[tuple[Any, ...]] = []
    while memory.has_next():
        batch = memory.next_batch()
        assert batch.validate_crc()
        read += [(r.timestamp, r.key, r.value, tuple(r.headers)) for r in batch]
    assert read == [(r.timestamp_ms, r.key, r.value, r.headers) for r in RECORDS]


def test_raw_snappy_of_librdkafka_is_read() -> None:
    """librdkafka writes snappy without xerial's framing."""
    data = b"some records " * 5000
    assert bytes(decompress("snappy", pa.Codec("snappy").compress(data, asbytes=True))) == data


def test_xerial_snappy_is_written_in_blocks() -> None:
    """The framing that Java clients write: magic, two versions, then blocks of 32 KiB with their lengths."""
    data = b"some records " * 6000
    packed = bytes(compress("snappy", data))
    assert packed.startswith(b"\x82SNAPPY\x00" + b"\x00\x00\x00\x01" * 2)
    position, blocks = 16, []
    while position < len(packed):
        size = int.from_bytes(packed[position : position + 4], "big")
        blocks.append(packed[position + 4 : position + 4 + size])
        position += 4 + size
    assert len(blocks) == 3
    assert bytes(decompress("snappy", packed)) == data


@pytest.mark.parametrize("data", [b"some records " * 20_000, bytes(range(256)) * 3, b"x"])
def test_lz4_frames_have_independent_blocks(data: bytes) -> None:
    """Java refuses linked blocks: the frame says independent, and blocks that packing would not shrink are stored."""
    packed = bytes(compress("lz4", data))
    assert packed[:7] == b"\x04\x22\x4d\x18\x60\x40\x82"
    assert packed.endswith(b"\x00\x00\x00\x00")
    assert bytes(decompress("lz4", packed)) == data


def test_lz4_frames_of_other_writers_are_read() -> None:
    """Linked blocks, as Arrow's own writer makes them, are read too."""
    data = bytes(range(256)) * 2000
    assert bytes(decompress("lz4", pa.Codec("lz4").compress(data, asbytes=True))) == data


def zstd_without_size(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("size", [0, 5, 255, 256, 70_000, 3_000_000])
def test_zstd_frames_of_other_writers_are_read(size: int) -> None:
    """Frames with and without a declared size, and several in a row in any order."""
    data = (b"some records " * (size // 13 + 1))[:size]
    sized, unsized = bytes(compress("zstd", data)), zstd_without_size(data)
    for frames in ([sized], [unsized], [sized, unsized], [unsized, sized], [sized, sized]):
        assert bytes(decompress("zstd", b"".join(frames))) == data * len(frames)


def test_gzip_of_several_members_is_read_and_written_without_a_time() -> None:
    """Members are joined; the same input always packs to the same bytes."""
    first, second = bytes(compress("gzip", b"first")), bytes(compress("gzip", b"second"))
    assert bytes(decompress("gzip", first + second)) == b"firstsecond"
    assert first[4:8] == b"\x00\x00\x00\x00"
    many = b"".join(bytes(compress("gzip", b"%d," % index)) for index in range(3000))
    assert bytes(decompress("gzip", many)) == b"".join(b"%d," % index for index in range(3000))


def test_decoded_table_of_a_peer_has_the_schema() -> None:
    """Columns of a decoded table are those of RECORD_SCHEMA, with a timestamp type for each row."""
    table = decode_batches(build_with(PEERS["aiokafka"][0], 0))
    assert table.column_names == ["offset", "timestamp", "timestamp_type", "key", "value", "headers"]
    assert set(table["timestamp_type"].to_pylist()) == {0}
