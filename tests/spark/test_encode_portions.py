"""Rows become the same blobs in whatever portions Spark hands them over. Neither Spark nor a broker is in here."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st
from stages import encode

from semel.spark.encode import gather

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
PARTITIONS = 3

columns = st.sampled_from([["value"], ["value", "partition"], ["key", "value"], ["key", "value", "headers"]])
portions = st.lists(st.integers(1, 60), min_size=1, max_size=5)


def some_rows(rng: random.Random) -> list[dict[str, object]]:
    """Enough of them for several tables of a few thousand bytes, unless they are short."""
    size_max = rng.choice([0, 10, 400])

    def text() -> bytes | None:
        return rng.choice([None, *(rng.randbytes(rng.randint(0, size_max)) for _ in range(3))])

    def header() -> dict[str, object]:
        return {"key": "h" * rng.randint(0, 5), "value": text()}

    def row() -> dict[str, object]:
        headers = rng.choice([None, [header() for _ in range(rng.randint(0, 3))]])
        return {"key": text(), "value": text(), "headers": headers, "partition": rng.randrange(PARTITIONS)}

    return [row() for _ in range(rng.randint(1, 120))]


def table_of(rows: list[dict[str, object]], names: list[str], text: pa.DataType) -> pa.Table:
    types = {"headers": HEADERS, "partition": pa.int32()}
    schema = pa.schema([(name, types.get(name, text)) for name in names])
    return pa.Table.from_pylist([{name: row[name] for name in names} for row in rows], schema)


def in_portions(table: pa.Table, sizes: list[int]) -> list[pa.RecordBatch]:
    """The table in batches of these sizes, again and again, each with memory of its own as if it came from Spark."""
    cuts: list[pa.RecordBatch] = []
    at = 0
    while at < table.num_rows:
        size = sizes[len(cuts) % len(sizes)]
        cuts += table.slice(at, size).combine_chunks().to_batches()
        at += size
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, table.schema) as writer:
        for batch in cuts:
            writer.write_batch(batch)
    return list(pa.ipc.open_stream(stream.getvalue()))


@settings(deadline=None)
@given(
    st.randoms(use_true_random=True),
    columns,
    portions,
    portions,
    st.sampled_from([pa.binary(), pa.large_binary()]),
)
def test_the_same_rows_in_other_portions_become_the_same_blobs(
    rng: random.Random, names: list[str], once: list[int], again: list[int], text: pa.DataType
) -> None:
    """E2: what Spark computes anew within a transaction goes on in it, as long as the rows come as they were."""
    table = table_of(some_rows(rng), names, text)
    first, second = (
        encode("127.0.0.1:1", "out", [pa.Table.from_batches(in_portions(table, sizes), table.schema)], PARTITIONS)
        for sizes in (once, again)
    )
    assert first.manifest.records == table.num_rows
    assert first.table.drop(["input_bytes"]).equals(second.table.drop(["input_bytes"]))


@settings(deadline=None)
@given(st.randoms(use_true_random=True), columns, portions, st.integers(1, 20_000))
def test_no_row_is_lost_and_none_comes_after_the_one_that_fills_a_table(
    rng: random.Random, names: list[str], sizes: list[int], buffer_bytes: int
) -> None:
    """Held against a slow count of each row's bytes."""
    table = table_of(some_rows(rng), names, pa.binary())

    def slowly() -> Iterator[int]:
        weight = rows_so_far = 0
        for row in table.to_pylist():
            texts = [row.get("key"), row.get("value")]
            for header in row.get("headers") or []:
                texts += [header["key"].encode(), header["value"]]
            weight += 8 + sum(len(text or b"") for text in texts) + 4 * ("partition" in row)
            rows_so_far += 1
            if weight >= buffer_bytes:
                yield rows_so_far
                weight = rows_so_far = 0
        if rows_so_far:
            yield rows_so_far

    gathered = list(gather(iter(in_portions(table, sizes)), buffer_bytes))
    assert [each.num_rows for each in gathered] == list(slowly())
    assert [row for each in gathered for row in each.to_pylist()] == table.to_pylist()
