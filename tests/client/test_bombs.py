"""A few compressed bytes that unpack to gigabytes: read in slices, within bounds that follow what was asked for."""

from __future__ import annotations

import random
import re
import resource
import subprocess
import sys
from collections.abc import Iterator

import pyarrow as pa
import pytest

from semel import Admin
from semel.client.config import ClientConfig
from semel.client.connection import Connection
from semel.client.fetched import Window, decode_opened, open_records, split_off
from semel.client.fetcher import Fetcher
from semel.errors import CorruptRecords, RecordTooLarge
from semel.records.arrow_decode import decode_batches, decode_some
from semel.records.compression import HEADER_MEMORY_BYTES, compress
from semel.records.control import read_control_batch
from semel.records.layout import HEADER_BYTES, LENGTH_FIELD_END, as_bytes_view, read_header, write_header
from semel.records.reference import Record, decode_batch, encode_batch, write_varint
from semel.testing.embedded import EmbeddedBroker
from semel.wire import Api

CODECS = ["gzip", "snappy", "lz4", "zstd"]
MB = 1 << 20

READER = """
import resource, sys
from semel.client.fetcher import Fetcher
settings = {"bootstrap.servers": sys.argv[1], "fetch.max.bytes": int(sys.argv[2])}
with Fetcher(settings) as fetcher:
    fetcher.assign({("bombs", 0): "earliest"})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    count = size = 0
    for table in fetcher.read_until(fetcher.end_offsets()):
        count += table.num_rows
        size += sum(len(value.as_py()) for value in table["value"])
    print(count, size, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


HEADER_READER = """
import resource, sys
from semel.client.fetcher import Fetcher
from semel.errors import RecordTooLarge
with Fetcher({"bootstrap.servers": sys.argv[1]}) as fetcher:
    fetcher.assign({("TOPIC", 0): "earliest"})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    count = 0
    try:
        for table in fetcher.read_until(fetcher.end_offsets()):
            count += table.num_rows
    except RecordTooLarge as error:
        print(count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, error)
"""


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker() as broker:
        yield broker


def produce(broker: EmbeddedBroker, topic: str, batches: list[bytes]) -> None:
    host, _, port = broker.bootstrap.rpartition(":")
    with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
        admin.create_topics(topic)
    connection = Connection(host, int(port), ClientConfig(bootstrap=((host, int(port)),)))
    for batch in batches:
        partition = {"index": 0, "records": batch}
        answer = connection.call(
            Api.PRODUCE,
            transactional_id=None,
            acks=-1,
            timeout=10_000,
            topic_data=[{"name": topic, "partition_data": [partition]}],
        )
        assert answer.responses[0].partition_responses[0].error_code == 0
    connection.close()


def bomb(size: int, compression: str = "zstd", count: int = 1) -> bytes:
    value = bytes(size // count)
    return encode_batch([Record(number, 0, None, value) for number in range(count)], compression=compression)


def test_an_answer_that_unpacks_to_a_gigabyte_is_read_in_a_fraction_of_that(broker: EmbeddedBroker) -> None:
    """Every record arrives, and memory holds one slice and one batch. All of them are in one answer."""
    batches = [bomb(48 * MB)] * 20
    assert sum(map(len, batches)) < 200_000
    produce(broker, "bombs", batches)
    command = [sys.executable, "-c", READER, broker.bootstrap, str(50 * MB)]
    count, size, peak_kb = map(int, subprocess.run(command, capture_output=True, check=True, text=True).stdout.split())
    assert (count, size) == (20, 20 * 48 * MB)
    assert peak_kb * 1024 < 450 * MB


@pytest.mark.parametrize("compression", CODECS)
def test_records_that_compress_well_are_all_read_in_their_order(broker: EmbeddedBroker, compression: str) -> None:
    """As ordinary producers write them: a thousandfold is legal, however little the reader asks for at once."""
    topic = f"legal-{compression}"
    produce(broker, topic, [bomb(MB, compression, count=100) for _ in range(12)])
    settings = {"bootstrap.servers": broker.bootstrap, "fetch.max.bytes": 2 * MB}
    with Fetcher(settings) as fetcher:
        fetcher.assign({(topic, 0): "earliest"})
        tables = list(fetcher.read_until(fetcher.end_offsets()))
    assert [offset for table in tables for offset in table["offset"].to_pylist()] == list(range(1200))
    assert max(table.num_rows for table in tables) <= 200, "two slices of a megabyte and what one batch adds"


def test_moving_a_partition_drops_what_was_not_decoded_yet(broker: EmbeddedBroker) -> None:
    """After a seek, what an earlier answer still holds must not be handed out."""
    produce(broker, "moved", [bomb(MB, count=10) for _ in range(8)])
    with Fetcher({"bootstrap.servers": broker.bootstrap, "fetch.max.bytes": MB}) as fetcher:
        fetcher.assign({("moved", 0): "earliest"})
        assert fetcher.read(10_000)["offset"].to_pylist() == list(range(10))
        fetcher.seek("moved", 0, 75)
        assert fetcher.read(10_000)["offset"].to_pylist() == list(range(75, 80))
        fetcher.seek("moved", 0, 5)
        assert fetcher.read(10_000)["offset"].to_pylist() == list(range(5, 10))
        [until] = fetcher.read_until({("moved", 0): 15})
        assert until["offset"].to_pylist() == list(range(10, 15))


def test_a_batch_beyond_the_bound_is_one_clear_error(broker: EmbeddedBroker) -> None:
    """It names the place and the setting; what comes before it is handed out, and the setting lifts it."""
    produce(broker, "beyond", [bomb(MB), bomb(8 * MB), bomb(MB)])
    settings = {"bootstrap.servers": broker.bootstrap, "fetch.decompressed.max.bytes": 4 * MB}
    with Fetcher(settings) as fetcher:
        fetcher.assign({("beyond", 0): "earliest"})
        assert fetcher.read(10_000)["offset"].to_pylist() == [0]
        with pytest.raises(RecordTooLarge, match=r"'beyond' partition 0 .* offset 1.*fetch\.decompressed\.max\.bytes"):
            fetcher.read(10_000)
    with Fetcher({**settings, "fetch.decompressed.max.bytes": 16 * MB}) as fetcher:
        fetcher.assign({("beyond", 0): "earliest"})
        tables = list(fetcher.read_until(fetcher.end_offsets()))
    assert sum(table.num_rows for table in tables) == 3


def test_millions_of_tiny_records_count_by_the_rows_that_they_become() -> None:
    """Seven bytes each in the batch, many times that as rows."""
    batch = encode_batch([Record(number, 0, None, None) for number in range(50_000)], compression="zstd")
    assert decode_batches([batch]).num_rows == 50_000
    with pytest.raises(RecordTooLarge):
        decode_batches([batch], decompressed_bytes_max=MB)


def header_bomb(records: int, headers: int) -> bytes:
    """Empty headers take two bytes each before they are compressed."""
    fields = encode_batch([Record(0, 0, b"k", None)])[HEADER_BYTES:-1]
    body = bytearray()
    for number in range(records):
        record = bytearray(fields[1:])
        record[2] = number << 1  # the offset delta
        write_varint(record, headers)
        record += bytes(2 * headers)
        write_varint(body, len(record))
        body += record
    packed = as_bytes_view(compress("zstd", body))
    batch = bytearray(HEADER_BYTES) + packed
    plain = read_header(encode_batch([Record(number, 0, None, None) for number in range(records)], compression="zstd"))
    write_header(batch, plain._replace(batch_length=len(batch) - LENGTH_FIELD_END))
    return bytes(batch)


@pytest.mark.parametrize("shape", [(1, 8_000_000), (60, 100_000), (40, 150_000)])
def test_millions_of_headers_are_one_clear_error_before_anything_is_made_of_them(
    broker: EmbeddedBroker, shape: tuple[int, int]
) -> None:
    """One record of 16 MB, compressed to a few hundred bytes, once took 2 GB; now it takes what it unpacks to."""
    topic = f"headers-{shape[0]}"
    produce(broker, topic, [bomb(MB), header_bomb(*shape), bomb(MB)])
    program = HEADER_READER.replace("TOPIC", topic)
    done = subprocess.run([sys.executable, "-c", program, broker.bootstrap], capture_output=True, check=True, text=True)
    count, peak_kb, message = done.stdout.strip().split(" ", 2)
    assert count == "1", "what comes before it is handed out"
    assert int(peak_kb) < 120 * 1024
    assert re.search(rf"'{topic}' partition 0 .* offset 1.*headers.*fetch\.decompressed\.max\.bytes", message)


def test_the_setting_lifts_the_bound_on_headers_and_they_count_in_slices() -> None:
    """Whichever way they are decoded, vectorised or one by one, the limit is the same and so are the headers."""
    for shape in ((1, 60_000), (30, 2_000), (60, 1_000)):
        batch, total = header_bomb(*shape), shape[0] * shape[1]
        with pytest.raises(RecordTooLarge, match="headers"):
            decode_batches([batch], decompressed_bytes_max=total * HEADER_MEMORY_BYTES - 1)
        with pytest.raises(RecordTooLarge, match="headers"):
            decode_batch(batch, decompressed_bytes_max=total * HEADER_MEMORY_BYTES - 1)
        decoded = decode_some([batch], decompressed_bytes_max=total * HEADER_MEMORY_BYTES)
        assert [len(headers) for headers in decoded.table["headers"].to_pylist()] == [shape[1]] * shape[0]
        assert decoded.unpacked_bytes > 2 * total


def test_several_small_batches_are_not_blamed_for_the_headers_of_all_of_them() -> None:
    """Small batches are decoded together; the bound is for each."""
    batches = [header_bomb(2, 500) for _ in range(20)]
    table = decode_batches(batches, decompressed_bytes_max=1_000 * HEADER_MEMORY_BYTES)
    assert sum(len(headers) for headers in table["headers"].to_pylist()) == 20_000


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("rows", [1, 5, 30, 70])
def test_legal_records_with_thousands_of_headers_are_read(compression: str, rows: int) -> None:
    """As the reference codec reads them: keys and values of any length, null values, names that are not ASCII."""
    chance = random.Random(rows)
    records = [
        Record(
            number,
            0,
            None,
            b"v",
            tuple(
                (f"n\u00e4me-{index}" * chance.randrange(8), chance.choice([None, b"", bytes(chance.randrange(200))]))
                for index in range(chance.randrange(3_000))
            ),
        )
        for number in range(rows)
    ]
    batch = encode_batch(records, compression=compression)
    read = [
        tuple((header["key"], header["value"]) for header in headers)
        for headers in decode_batches([batch])["headers"].to_pylist()
    ]
    assert read == [record.headers for record in records]
    assert decode_batch(batch)[1] == records


@pytest.mark.parametrize("seed", range(20))
def test_damage_among_many_headers_is_found_as_the_reference_finds_it(seed: int) -> None:
    """Any byte changed: both codecs refuse the batch, or both read the same."""
    chance = random.Random(seed)
    records = [
        Record(number, 0, None, None, (("k", b"v"), ("", None)) * 200) for number in range(chance.choice([1, 9]))
    ]
    batch = bytearray(encode_batch(records))
    batch[chance.randrange(HEADER_BYTES, len(batch))] = chance.randrange(256)
    try:
        expected = decode_batch(batch, check_crc=False)[1]
    except CorruptRecords:
        with pytest.raises(CorruptRecords):
            decode_batches([batch], check_crc=False)
        return
    read = decode_batches([batch], check_crc=False)["headers"].to_pylist()
    assert [[(one["key"], one["value"]) for one in each] for each in read] == [list(r.headers) for r in expected]


def test_a_control_batch_cannot_be_a_bomb() -> None:
    """A marker is a few bytes; whatever else comes as one is damage, found before it is unpacked."""
    record = Record(0, 0, b"\0\0\0\1", bytes(32 * MB))
    batch = encode_batch(
        [record], compression="zstd", transactional=True, producer_id=1, producer_epoch=0, control=True
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorruptRecords, match="marker"):
        read_control_batch(batch)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 * 1024
    opened = open_records(batch, Window(0, include_markers=True))
    assert opened.damaged is not None


def test_slices_of_an_answer_are_the_answer() -> None:
    """Cut anywhere, the parts have all records, each marker once, and positions that follow on another."""
    batches = b"".join(
        encode_batch([Record(base + n, 0, b"k", b"v" * 1000) for n in range(10)], base_offset=base, compression="gzip")
        for base in range(0, 100, 10)
    )
    whole = decode_opened(open_records(batches, Window(3, 97)), check_crc=True).table
    for bytes_max in (1, 10_500, 30_000, 10**9):
        opened, tables, position = open_records(batches, Window(3, 97)), list[pa.Table](), 3
        while opened is not None:
            decoded = decode_opened(opened, check_crc=True, bytes_max=bytes_max)
            rest = split_off(opened, decoded.batch_count)
            assert decoded.table["offset"][0].as_py() == position
            position = opened.next_offset
            tables.append(decoded.table)
            opened = rest
        assert position == 97
        assert pa.concat_tables(tables).equals(whole)
    assert decode_some([], total_bytes_max=1).batch_count == 0
