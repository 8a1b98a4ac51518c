"""Bad bytes: both decoders refuse them with a typed error, the same ones, and never hang or take too much memory."""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path

import pyarrow as pa
import pytest
from record_samples import (
    COMPRESSIONS,
    DECODER_PATHS,
    KERNEL_PATHS,
    decode_by_reference,
    decoder_for,
    patched,
    sample_batches,
    with_crc,
    with_length,
)

from semel.errors import CorruptRecords, RecordTooLarge, SemelError
from semel.records import decode_batches, iter_batches, read_control_batch, read_header, reference, verify_crc
from semel.records.compression import compress, decompress
from semel.records.layout import HEADER_BYTES
from semel.records.reference import Record, write_varint

SAMPLES = sample_batches()
REFUSALS = (CorruptRecords, RecordTooLarge)


def outcome(decode, batch: bytes):  # pyright: ignore[reportMissingParameterType]
    """The records, or the type of refusal; any other exception is a failure of the test."""
    try:
        return decode(batch)
    except REFUSALS as error:
        return type(error)


@pytest.mark.parametrize("path", DECODER_PATHS)
@pytest.mark.parametrize("kind", SAMPLES)
def test_every_truncation_is_refused(kind: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch cut at any byte is refused: as it is, and with length and checksum made to fit the cut."""
    decode = decoder_for(monkeypatch, path)
    whole = SAMPLES[kind]
    for cut in range(len(whole)):
        with pytest.raises(CorruptRecords):
            decode(whole[:cut])
        if cut >= HEADER_BYTES:
            with pytest.raises(REFUSALS):
                decode(with_length(whole[:cut]))


@pytest.mark.parametrize("path", DECODER_PATHS)
@pytest.mark.parametrize("kind", SAMPLES)
def test_any_flipped_bit_is_caught_by_the_checksum(kind: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One changed bit in anything that the checksum covers is refused."""
    decode = decoder_for(monkeypatch, path)
    for position in range(17, len(SAMPLES[kind])):
        damaged = bytearray(SAMPLES[kind])
        damaged[position] ^= 1 << position % 8
        with pytest.raises(CorruptRecords):
            decode(bytes(damaged))


@pytest.mark.parametrize("path", KERNEL_PATHS)
@pytest.mark.parametrize("kind", SAMPLES)
def test_every_flipped_bit_behind_a_right_checksum_is_judged_alike(
    kind: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the checksum made right again, the Arrow codec reads or refuses each single-bit change as the reference."""
    decode = decoder_for(monkeypatch, path)
    for position in range(len(SAMPLES[kind])):
        for bit in range(8):
            damaged = bytearray(SAMPLES[kind])
            damaged[position] ^= 1 << bit
            fixed = with_crc(damaged)
            assert outcome(decode, fixed) == outcome(decode_by_reference, fixed), (position, bit)


@pytest.mark.parametrize("kind", SAMPLES)
def test_iterating_over_flipped_bits_ends(kind: str) -> None:
    """Walking from batch to batch over damaged headers ends, or raises CorruptRecords."""
    for position in range(24):
        for bit in range(8):
            damaged = bytearray(SAMPLES[kind] * 3)
            damaged[position] ^= 1 << bit
            try:
                found = len(list(iter_batches(damaged)))
            except CorruptRecords:
                found = 0
            assert found <= 3


@pytest.mark.parametrize("length", [0, -1, -(2**31), 48])
def test_batch_length_below_its_header_is_refused(length: int) -> None:
    """A length that would not move forward cannot make the walk hang."""
    batch = patched(SAMPLES["plain"], 8, ">i", length)
    with pytest.raises(CorruptRecords, match="length"):
        list(iter_batches(batch))


@pytest.mark.parametrize("magic", [0, 1])
def test_old_message_formats_are_named(magic: int) -> None:
    """Messages from before 0.11 are refused by name instead of being misread."""
    batch = bytearray(SAMPLES["plain"])
    batch[16] = magic
    with pytest.raises(CorruptRecords, match=f"old format \\(magic {magic}\\)"):
        list(iter_batches(batch))


def test_incomplete_last_batch_ends_the_walk() -> None:
    """A fetch response that is cut within its last batch yields those before it."""
    whole = SAMPLES["plain"]
    for cut in range(len(whole)):
        assert len(list(iter_batches(whole * 2 + whole[:cut]))) == 2


@pytest.mark.parametrize("path", DECODER_PATHS)
@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("count", [-(2**31), -1, 0, 3, 5, 100, 2**31 - 1])
def test_lying_record_count_is_refused(
    count: int, compression: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header that counts other than the four records there are is refused, with its last offset adjusted or not."""
    decode = decoder_for(monkeypatch, path)
    batch = SAMPLES["plain" if compression == "none" else compression]
    for last_offset_delta in {3, max(count - 1, 3)}:
        lying = patched(patched(batch, 57, ">i", count), 23, ">i", last_offset_delta)
        with pytest.raises(CorruptRecords):
            decode(lying)


def body_batch(body: bytes, count: int, last_offset_delta: int | None = None) -> bytes:
    """A batch around hand-made record bytes."""
    empty = bytearray(reference.encode_batch([])) + body
    batch = patched(with_length(empty), 57, ">i", count)
    return patched(batch, 23, ">i", count - 1 if last_offset_delta is None else last_offset_delta)


def varint(value: int) -> bytes:
    out = bytearray()
    write_varint(out, value)
    return bytes(out)


def record_bytes(*parts: bytes | int, length: int | None = None) -> bytes:
    """A record from its fields after the attributes: numbers become varints."""
    body = b"\x00" + b"".join(varint(part) if isinstance(part, int) else part for part in parts)
    return varint(len(body) if length is None else length) + body


HUGE = 2**31 - 1
LIES = {
    "record length negative": record_bytes(0, 0, -1, -1, 0, length=-1),
    "record length zero": record_bytes(0, 0, -1, -1, 0, length=0),
    "record length too short": record_bytes(0, 0, -1, -1, 0, length=5),
    "record length too long": record_bytes(0, 0, -1, -1, 0, length=7),
    "record length huge": record_bytes(0, 0, -1, -1, 0, length=HUGE),
    "key length -2": record_bytes(0, 0, -2, -1, 0),
    "key length huge": record_bytes(0, 0, HUGE, -1, 0),
    "key longer than the record": record_bytes(0, 0, 4, b"abc", -1, 0),
    "value length -2": record_bytes(0, 0, -1, -2, 0),
    "value length huge": record_bytes(0, 0, -1, HUGE, 0),
    "value length least": record_bytes(0, 0, -1, -(2**31), 0),
    "header count negative": record_bytes(0, 0, -1, -1, -1),
    "header count huge": record_bytes(0, 0, -1, -1, HUGE),
    "header count too high": record_bytes(0, 0, -1, -1, 2, 1, b"a", -1),
    "header count too low": record_bytes(0, 0, -1, -1, 0, 1, b"a", -1),
    "header key null": record_bytes(0, 0, -1, -1, 1, -1, -1),
    "header key length huge": record_bytes(0, 0, -1, -1, 1, HUGE, -1),
    "header value length -2": record_bytes(0, 0, -1, -1, 1, 1, b"a", -2),
    "header value length huge": record_bytes(0, 0, -1, -1, 1, 1, b"a", HUGE),
    "offset delta negative": record_bytes(0, -1, -1, -1, 0),
    "offset delta beyond the last": record_bytes(0, 1, -1, -1, 0),
    "offset delta of six bytes": record_bytes(0, b"\x80\x80\x80\x80\x80\x00", -1, -1, 0),
    "offset delta of more than 32 bits": record_bytes(0, b"\x80\x80\x80\x80\x10", -1, -1, 0),
    "timestamp delta of eleven bytes": record_bytes(b"\x80" * 10 + b"\x00", 0, -1, -1, 0),
    "timestamp delta of more than 64 bits": record_bytes(b"\x80" * 9 + b"\x02", 0, -1, -1, 0),
    "length varint of six bytes": b"\x8c\x80\x80\x80\x80\x00" + record_bytes(0, 0, -1, -1, 0)[1:],
    "bytes after the last record": record_bytes(0, 0, -1, -1, 0) + b"\x00",
    "nothing": b"",
}


@pytest.mark.parametrize("path", DECODER_PATHS)
@pytest.mark.parametrize("lie", LIES)
def test_lying_lengths_are_refused(lie: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths and counts that do not fit the bytes are refused, in the only record and after many good ones."""
    decode = decoder_for(monkeypatch, path)
    with pytest.raises(CorruptRecords):
        decode(body_batch(LIES[lie], 1))
    good = b"".join(record_bytes(0, index, -1, 10, b"0123456789", 0) for index in range(600))
    if lie not in ("nothing", "offset delta beyond the last"):
        with pytest.raises(CorruptRecords):
            decode(body_batch(good + LIES[lie], 601))


@pytest.mark.parametrize("path", DECODER_PATHS)
def test_varints_longer_than_needed_are_read(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding zeros in a varint are wasteful but legal, as in the Java client."""
    decode = decoder_for(monkeypatch, path)
    padded = record_bytes(b"\x82\x80\x00", b"\x80\x80\x80\x80\x00", b"\x82\x00", b"k", b"\x81\x00", b"\x80\x00")
    assert decode(body_batch(padded, 1)) == [Record(0, 0, b"k", None)]
    short = record_bytes(0, 0, 1, b"k", 1, b"v", 0)
    long_length = b"\x90\x80\x00" + short[1:]
    assert short[:1] == b"\x10"
    assert decode(body_batch(long_length, 1)) == [Record(0, -1, b"k", b"v")]


@pytest.mark.parametrize("path", DECODER_PATHS)
def test_record_attributes_are_ignored(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record's own attribute byte has no meaning in Kafka: any value reads the same."""
    decode = decoder_for(monkeypatch, path)
    records = [bytearray(record_bytes(0, index, 2, b"kk", 10, b"0123456789", 0)) for index in range(600)]
    for index, record in enumerate(records):
        record[1] = index % 256
    assert [record.value for record in decode(body_batch(b"".join(records), 600))] == [b"0123456789"] * 600


@pytest.mark.parametrize("path", KERNEL_PATHS)
def test_flipped_bits_in_long_runs_are_judged_alike(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage in the midst of a long run of equal records, or of ragged ones, is judged as by the reference."""
    decode = decoder_for(monkeypatch, path)
    equal = [Record(index, 1000 + index // 50, b"12345678", b"x" * 30) for index in range(700)]
    ragged = [Record(index, 1000, b"key", b"y" * (20 + index * 7 % 90)) for index in range(700)]
    for records in (equal, ragged):
        whole = reference.encode_batch(records)
        for position in range(HEADER_BYTES + 3, len(whole), 397):
            for bit in (0, 6, 7):
                damaged = bytearray(whole)
                damaged[position] ^= 1 << bit
                fixed = with_crc(damaged)
                assert outcome(decode, fixed) == outcome(decode_by_reference, fixed), (position, bit)


def test_control_batches_are_refused_by_the_table_decoder() -> None:
    """A transaction marker holds no user records and must not turn into rows."""
    with pytest.raises(CorruptRecords, match="transaction marker"):
        decode_batches([SAMPLES["control"]])


@pytest.mark.parametrize("kind", SAMPLES)
def test_wrong_checksum_is_named(kind: str) -> None:
    """verify_crc accepts the batch as written and names the checksum when a byte changed."""
    verify_crc(SAMPLES[kind])
    damaged = bytearray(SAMPLES[kind])
    damaged[-1] ^= 1
    with pytest.raises(CorruptRecords, match="checksum"):
        verify_crc(damaged)
    with pytest.raises(CorruptRecords, match="checksum"):
        decode_by_reference(bytes(damaged))


def test_checksum_is_not_looked_at_when_told_so() -> None:
    """check_crc=False leaves the checksum alone in both codecs."""
    damaged = bytearray(SAMPLES["plain"])
    damaged[17] ^= 1
    assert len(decode_batches([bytes(damaged)], check_crc=False)) == 4
    assert len(reference.decode_batch(damaged, check_crc=False)[1]) == 4


@pytest.mark.parametrize("number", [5, 6, 7])
@pytest.mark.parametrize("path", DECODER_PATHS)
def test_unknown_compression_is_refused(number: int, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codec numbers that Kafka does not have are damage."""
    decode = decoder_for(monkeypatch, path)
    with pytest.raises(CorruptRecords, match="compression"):
        decode(patched(SAMPLES["plain"], 21, ">h", number))


@pytest.mark.parametrize("compression", COMPRESSIONS[1:])
def test_trailing_garbage_after_compressed_records_is_refused(compression: str) -> None:
    """Bytes after the end of the compressed data are damage, not padding."""
    packed = bytes(compress(compression, b"some records " * 50))
    with pytest.raises(CorruptRecords):
        decompress(compression, packed + b"garbage")


BOMB_BYTES = 64 * 1024 * 1024
BOUND = 1024 * 1024
BOMBS = {
    "gzip": lambda: zlib.compress(bytes(BOMB_BYTES), 9, wbits=31),
    "gzip of many members": lambda: zlib.compress(bytes(BOUND // 2), 9, wbits=31) * 100,
    "snappy": lambda: bytes(compress("snappy", bytes(BOMB_BYTES))),
    "snappy raw": lambda: pa.Codec("snappy").compress(bytes(BOMB_BYTES), asbytes=True),
    "lz4": lambda: bytes(compress("lz4", bytes(BOMB_BYTES))),
    "zstd": lambda: bytes(compress("zstd", bytes(BOMB_BYTES))),
    "zstd without size": lambda: zstd_stream(bytes(BOMB_BYTES)),
}


def zstd_stream(data: bytes) -> bytes:
    """A frame that does not declare its content size, as streaming writers make it."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("path", DECODER_PATHS)
@pytest.mark.parametrize("bomb", BOMBS)
def test_compression_bomb_is_refused(bomb: str, path: str) -> None:
    """A small batch that unpacks to far more than the bound is refused by both codecs."""
    packed = BOMBS[bomb]()
    batch = patched(body_batch(packed, 10), 21, ">h", COMPRESSIONS.index(bomb.split()[0]))
    decode = reference.decode_batch if path == "reference" else decode_batches
    with pytest.raises(RecordTooLarge, match=r"fetch\.decompressed\.max\.bytes"):
        decode(batch, decompressed_bytes_max=BOUND)


MEMORY_SCRIPT = """
import pathlib, resource, sys
from semel.errors import RecordTooLarge
from semel.records.compression import decompress
bombs = {path.name: path.read_bytes() for path in pathlib.Path(sys.argv[1]).iterdir()}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name, packed in bombs.items():
    try:
        decompress(name.split()[0], packed, int(sys.argv[2]))
    except RecordTooLarge:
        continue
    sys.exit("not refused: " + name)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_compression_bombs_do_not_take_memory(tmp_path: Path) -> None:
    """Refusing all bombs of 64 MiB takes a process only a few MiB more than it had."""
    for name, make in BOMBS.items():
        (tmp_path / name).write_bytes(make())
    command = [sys.executable, "-c", MEMORY_SCRIPT, str(tmp_path), str(BOUND)]
    grown_kib = int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)
    assert grown_kib < 24 * 1024


def test_truncated_zstd_header_with_room_is_refused() -> None:
    """The first bytes of a frame alone, and a frame that claims an absurd window, are refused."""
    packed = bytes(compress("zstd", b"some records " * 50))
    for cut in range(1, len(packed)):
        with pytest.raises(SemelError):
            decompress("zstd", packed[:cut])
    with pytest.raises(RecordTooLarge):
        decompress("zstd", b"\x28\xb5\x2f\xfd\x00\xf8" + bytes(40), BOUND)


def test_header_too_short_for_its_magic_is_refused() -> None:
    """Less than a header is refused by read_header at every length."""
    for size in range(HEADER_BYTES):
        with pytest.raises(CorruptRecords):
            read_header(SAMPLES["plain"][:size])


def test_control_reader_refuses_user_records_and_cut_markers() -> None:
    """read_control_batch does not take a user batch, or a marker without type or epoch, for a commit."""
    with pytest.raises(CorruptRecords, match="user records"):
        read_control_batch(SAMPLES["plain"])
    for key, value in ((None, b"\0" * 6), (b"\0", b"\0" * 6), (b"\0\0\0\1", None), (b"\0\0\0\1", b"\0" * 5)):
        cut = reference.encode_batch([Record(0, 0, key, value)], transactional=True, control=True)
        with pytest.raises(CorruptRecords):
            read_control_batch(cut)
