"""Records that are sent one by one make the same batches whether they take the way of a few or that of a table."""

from __future__ import annotations

import random
from typing import Any

import pytest

from semel.client.config import ProducerConfig
from semel.client.routing import encode_for_partitions
from semel.client.rows import FEW_ROWS, Row, RowBuffer, are_few, encode_few_rows, to_table
from semel.errors import ConfigError, RecordTooLarge
from semel.records import StickyPartitioner

PARTITIONS = 5


def random_bytes(rng: random.Random) -> bytes | None:
    return rng.choice((None, b"", rng.randbytes(rng.randrange(9)), rng.randbytes(rng.randrange(300))))


def random_row(rng: random.Random) -> Row:
    headers = [(rng.choice(("", "trace", "key")), random_bytes(rng)) for _ in range(rng.choice((0, 0, 0, 1, 3)))]
    timestamp_ms = rng.choice((0, -1, 1_700_000_000_000 + rng.randrange(200), rng.randrange(-(2**62), 2**62)))
    partition = rng.choice((None, None, rng.randrange(PARTITIONS)))
    return Row(random_bytes(rng), random_bytes(rng), headers, partition, timestamp_ms)


def encode_both_ways(rows: list[Row], config: ProducerConfig, seed: int) -> tuple[list[Any], list[Any]]:
    """Partitions and bytes of the batches by each way, or what it raises; then those of a second helping."""
    outcomes: list[list[Any]] = []
    for is_few in (True, False):
        sticky = StickyPartitioner(random.Random(seed), batch_bytes=config.batch_bytes)
        common: dict[str, Any] = {"partition_count": lambda _: PARTITIONS, "sticky": sticky, "config": config}
        outcome: list[Any] = []
        for _ in range(2):
            try:
                if is_few:
                    encoded = encode_few_rows("t", rows, **common)
                else:
                    encoded = encode_for_partitions("t", to_table("t", rows), None, now_ms=0, **common)
                outcome += [(index, batch.record_count, bytes(batch.data)) for _, index, batch in encoded]
            except (ConfigError, RecordTooLarge) as error:
                outcome.append(repr(error))
        outcomes.append(outcome)
    return outcomes[0], outcomes[1]


def test_a_few_rows_make_the_batches_that_a_table_of_them_makes(rng: random.Random) -> None:
    """200 random lots of rows: same partitions, same bytes, same cuts, same refusals, same place to go on."""
    refused = 0
    for seed in range(200):
        rows = [random_row(rng) for _ in range(rng.choice((1, 1, 2, 5, FEW_ROWS)))]
        batch_bytes, request_bytes_max = rng.choice(((120, 450), (120, 1_000_000), (400, 450), (100_000, 1_000_000)))
        config = ProducerConfig(
            batch_bytes=batch_bytes,
            request_bytes_max=request_bytes_max,
            compression_type=rng.choice(("none", "none", "gzip", "lz4", "zstd", "snappy")),
        )
        assert are_few(rows)
        few, table = encode_both_ways(rows, config, seed)
        assert few == table
        refused += any(isinstance(one, str) for one in few)
    assert 0 < refused < 100


def test_a_partition_that_is_not_there_is_refused_alike() -> None:
    """The error names it, and nothing of the rows is encoded."""
    rows = [Row(b"a", None, [], 1, 0), Row(b"b", None, [], PARTITIONS, 0)]
    few, table = encode_both_ways(rows, ProducerConfig(), 1)
    assert few == table
    assert f"Partition {PARTITIONS} was asked for" in few[0]


@pytest.mark.parametrize(
    "odd",
    [
        Row("text", None, [], None, 0),  # pyright: ignore[reportArgumentType]
        Row(None, bytearray(b"key"), [], None, 0),  # pyright: ignore[reportArgumentType]
        Row(None, None, [("name", "text")], None, 0),  # pyright: ignore[reportArgumentType]
        Row(None, None, [("naïve", b"")], None, 0),
        Row(None, None, [(b"name", b"")], None, 0),  # pyright: ignore[reportArgumentType]
        Row(None, None, [], -1, 0),
        Row(None, None, [], 2**31, 0),
        Row(None, None, [], True, 0),
        Row(None, None, [], None, 2**63),
        Row(None, None, [], None, 1.5),  # pyright: ignore[reportArgumentType]
    ],
)
def test_what_is_unusual_is_left_to_arrow(odd: Row) -> None:
    """Arrow takes it or refuses it with a word on the type: the quick way has no opinion of its own."""
    assert not are_few([Row(b"value", b"key", [("name", None)], 3, 0), odd])


def test_many_rows_are_worth_a_table() -> None:
    """The quick way ends where it is no longer quicker."""
    buffer = RowBuffer()
    for number in range(FEW_ROWS + 1):
        buffer.add("t", Row(b"%d" % number, None, [], None, 0))
    rows = buffer.take()["t"]
    assert not are_few(rows)
    assert are_few(rows[1:])
    assert buffer.take() == {}


def test_rows_count_until_they_are_in_batches() -> None:
    """A program that ends while another thread encodes must still hear of the records that are lost with it."""
    buffer = RowBuffer()
    buffer.add("t", Row(b"1", None, [], None, 0))
    buffer.add("u", Row(b"2", None, [], None, 0))
    taken = buffer.take()
    assert (buffer.is_empty, buffer.record_count) == (True, 2)
    buffer.note_gone(len(taken["t"]))
    assert buffer.record_count == 1
    buffer.note_gone(len(taken["u"]))
    assert buffer.record_count == 0
