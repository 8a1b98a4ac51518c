"""Random and hand-made records, and the decoders under one roof, for the tests beside it."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
from crc32c import crc32c

from semel.errors import CorruptRecords, RecordTooLarge
from semel.records import (
    RECORD_SCHEMA,
    arrow_decode,
    arrow_encode,
    decode_batches,
    encode_control_batch,
    partitioner,
    reference,
)
from semel.records.compiled import kernel
from semel.records.compression import DECOMPRESSED_BYTES_MAX, headers_max
from semel.records.layout import check_batch_crc, check_header, read_header
from semel.records.reference import Record

COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")
HEADERS_TYPE = RECORD_SCHEMA.field("headers").type

Decoder = Callable[[bytes], list[Record]]


def seed_of_run(salt: int) -> str:
    """The seed of one random test: that of the run, which SEMEL_SEED repeats, and what sets this test apart."""
    seed = f"{os.environ['SEMEL_SEED']}-{salt}"
    print(f"seed {seed} (repeat with SEMEL_SEED={os.environ['SEMEL_SEED']})")
    return seed


def table_records(table: pa.Table) -> list[Record]:
    """A decoded table as reference records."""
    timestamps = table["timestamp"].cast(pa.int64()).to_pylist()
    columns = (table[name].to_pylist() for name in ("offset", "key", "value", "headers"))
    return [
        Record(offset, timestamp, key, value, tuple((header["key"], header["value"]) for header in headers))
        for timestamp, offset, key, value, headers in zip(timestamps, *columns, strict=True)
    ]


def decode_by_reference(batch: bytes) -> list[Record]:
    header, records = reference.decode_batch(batch)
    if header.is_control:
        # The Arrow codec leaves control batches to the caller; so does this one, to be comparable.
        raise CorruptRecords("A control batch.")
    return records


def decode_by_arrow(batch: bytes) -> list[Record]:
    table = decode_batches([batch])
    table.validate(full=True)
    assert table.schema.equals(RECORD_SCHEMA)
    return table_records(table)


def use_path(monkeypatch: Any, path: str) -> None:
    """Go without the kernel, or send small batches down the way of large ones, each of which is decoded alone."""
    if path == "no kernel":
        for module in (arrow_decode, arrow_encode, partitioner):
            monkeypatch.setattr(module, "kernel", None)
    if path == "kernel, alone":
        monkeypatch.setattr(arrow_decode, "_SMALL_BYTES", 0)


KERNEL_PATHS = ("kernel", "kernel, alone")
DECODER_PATHS = ("reference", "no kernel", *KERNEL_PATHS)


def decoder_for(monkeypatch: Any, path: str) -> Decoder:
    use_path(monkeypatch, path)
    if path == "reference":
        return decode_by_reference
    return decode_by_arrow if path == "no kernel" else decode_by_kernel


def decode_by_kernel(batch: bytes) -> list[Record]:
    """What the Arrow codec makes of a batch, after a look at whether the kernel itself judges it as the result says.

    The codec asks the reference about a batch that the kernel refuses, which would hide a kernel that refuses too much.
    """
    try:
        records = decode_by_arrow(batch)
    except (CorruptRecords, RecordTooLarge):
        assert not kernel_takes(batch)
        raise
    assert kernel_takes(batch)
    return records


def kernel_takes(batch: bytes) -> bool:
    """Whether the kernel reads the records of a batch, of which header and compression may be damaged as well."""
    assert kernel is not None, "the compiled kernel is missing: run `make setup`"
    try:
        header = read_header(batch)
        check_header(header, memoryview(batch))
        check_batch_crc(header, memoryview(batch))
        body = reference.unpack_body(header, memoryview(batch), DECOMPRESSED_BYTES_MAX)
    except (CorruptRecords, RecordTooLarge):
        return False
    if header.is_control:
        return False
    return kernel.read_records([(header, body)], headers_max(DECOMPRESSED_BYTES_MAX), bytearray) is not None


def with_crc(batch: bytes | bytearray) -> bytes:
    """The batch with its checksum made right again, so that damage behind it comes to light."""
    fixed = bytearray(batch)
    if len(fixed) >= 21:
        struct.pack_into(">I", fixed, 17, crc32c(memoryview(fixed)[21:]))
    return bytes(fixed)


def with_length(batch: bytes | bytearray) -> bytes:
    """The batch with its length field made right again."""
    fixed = bytearray(batch)
    struct.pack_into(">i", fixed, 8, len(fixed) - 12)
    return with_crc(fixed)


def patched(batch: bytes, position: int, layout: str, value: int) -> bytes:
    """The batch with one header field changed and the checksum made right again."""
    fixed = bytearray(batch)
    struct.pack_into(layout, fixed, position, value)
    return with_crc(fixed)


def sample_batches() -> dict[str, bytes]:
    """One small batch of each kind."""
    plain = [Record(index, 1_700_000_000_000 + index, b"key%d" % index, b"value %d" % index) for index in range(4)]
    equal = [Record(index, 1_700_000_000_000, b"12345678", b"0123456789abcdef") for index in range(6)]
    nulls = [Record(0, 5, None, None), Record(1, 4, b"", b""), Record(2, 3, None, b"x"), Record(3, 2, b"y", None)]
    headers = [
        Record(0, 10, b"k", b"v", (("trace", b"123"), ("empty", b""), ("null", None))),
        Record(1, 11, None, b"w"),
        Record(2, 12, None, b"z", (("ключ", b"\x00"),)),
    ]
    samples = {
        "plain": reference.encode_batch(plain),
        "equal": reference.encode_batch(equal),
        "nulls": reference.encode_batch(nulls),
        "headers": reference.encode_batch(headers),
        "transactional": reference.encode_batch(
            plain, producer_id=9, producer_epoch=2, base_sequence=77, transactional=True
        ),
        "control": encode_control_batch(
            "commit", producer_id=9, producer_epoch=2, coordinator_epoch=1, timestamp_ms=5, base_offset=4
        ),
    }
    for compression in COMPRESSIONS[1:]:
        samples[compression] = reference.encode_batch(plain, compression=compression)
    return samples


class RandomTables:
    """Tables with runs of equal lengths and ragged ones, nulls, headers and wandering timestamps."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def records(self, count: int) -> list[Record]:
        rng = self.rng
        lengths = rng.choice(("equal", "ragged", "runs", "tiny", "around 12"))
        nulls = rng.choice((0.0, 0.0, 0.2, 1.0))
        header_share = rng.choice((0.0, 0.0, 0.0, 0.3, 1.0))
        clock = rng.choice(("still", "rising", "wandering", "wild"))
        keys, values = (
            self._strings(count, lengths, nulls),
            self._strings(count, rng.choice((lengths, "ragged")), nulls),
        )
        timestamps = self._timestamps(count, clock)
        return [
            Record(index, timestamps[index], keys[index], values[index], self._headers(header_share))
            for index in range(count)
        ]

    def _strings(self, count: int, lengths: str, null_share: float) -> list[bytes | None]:
        rng = self.rng
        length = rng.choice((0, 1, 8, 12, 13, 63, 64, 100, 130))
        longest = {"ragged": rng.choice((20, 200)), "tiny": 3, "around 12": 15}.get(lengths, 0)
        strings: list[bytes | None] = []
        for _ in range(count):
            if lengths == "runs" and rng.random() < 0.05:
                length = rng.randrange(40)
            size = length if lengths in ("equal", "runs") else rng.randint(0, longest)
            zeros = rng.random() < 0.1
            strings.append(None if rng.random() < null_share else bytes(size) if zeros else rng.randbytes(size))
        return strings

    def _timestamps(self, count: int, clock: str) -> list[int]:
        rng = self.rng
        now = 1_700_000_000_000
        if clock == "still":
            return [now] * count
        if clock == "rising":
            return [now + index * rng.choice((1, 1, 5)) for index in range(count)]
        if clock == "wandering":
            return [now + rng.randint(-(10 ** rng.randint(0, 11)), 10 ** rng.randint(0, 11)) for _ in range(count)]
        extremes = (-(2**63), 2**63 - 1, 0, -1, now)
        return [rng.choice(extremes) for _ in range(count)]

    def _headers(self, share: float) -> tuple[tuple[str, bytes | None], ...]:
        rng = self.rng
        if rng.random() >= share:
            return ()
        return tuple(
            (
                "h" * rng.randint(0, 14) + rng.choice(("", "é")),
                rng.choice((None, b"", rng.randbytes(rng.randint(1, 20)))),
            )
            for _ in range(rng.randint(1, 3))
        )


def make_table(records: Sequence[Record], rng: random.Random | None = None) -> pa.Table:
    """Records as a table; with a random source, in one of the many types and chunkings that the encoder takes."""
    value = pa.array([record.value for record in records], pa.binary())
    columns = {
        "value": value,
        "key": pa.array([record.key for record in records], pa.binary()),
        "timestamp": pa.array([record.timestamp_ms for record in records], pa.int64()),
        "headers": pa.array(
            [[{"key": key, "value": content} for key, content in record.headers] for record in records], HEADERS_TYPE
        ),
    }
    if rng is None:
        return pa.table(columns)
    for name in ("key", "value"):
        columns[name] = columns[name].cast(rng.choice((pa.binary(), pa.binary(), pa.large_binary(), pa.binary_view())))
    if not any(record.headers for record in records) and rng.random() < 0.5:
        del columns["headers"]
    if all(record.key is None for record in records) and rng.random() < 0.5:
        del columns["key"]
    table = pa.table(columns)
    if rng.random() < 0.3 and len(records) > 1:
        cut = rng.randrange(1, len(records))
        table = pa.concat_tables([table.slice(0, cut), table.slice(cut)])
    if rng.random() < 0.2:
        padded = pa.concat_tables([table.slice(0, 1), table]).combine_chunks()
        table = padded.slice(min(1, len(records)))
    return table
