"""The compiled kernel: built of the present source, as strict as the reference, and possibly missing."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from kernel_fuzzing import exact, fuzz
from record_samples import RandomTables, make_table, seed_of_run, table_records

import semel.records
from semel.errors import RecordTooLarge
from semel.records import EncodedBatch, decode_batches, encode_table, kernel, reference
from semel.records.arrow_encode import encode_records
from semel.records.layout import HEADER_BYTES, read_header
from semel.records.reference import Record

SOURCE = Path(semel.records.__file__).with_name("kernel.pyx")
BATCHES = int(os.environ.get("SEMEL_FUZZ_BATCHES", "20000"))


def test_the_kernel_was_built_of_the_source_beside_it() -> None:
    """An edit of kernel.pyx that nobody compiled must not go unnoticed. `make setup` compiles it."""
    assert hashlib.sha256(SOURCE.read_bytes()).hexdigest() == kernel.SOURCE_DIGEST, "run `make setup`"


def test_mutated_batches_are_read_or_refused_as_the_reference_does() -> None:
    """20,000 of them, and 2,000 damaged tables; SEMEL_FUZZ_BATCHES for more, and `make fuzz` for sanitizers as well."""
    outcomes = fuzz(kernel, random.Random(seed_of_run(61)), BATCHES, judged_every=1)
    assert all(outcomes[what] > BATCHES // 200 for what in ("read", "refused", "columns written", "columns refused"))


def batch_of(values: list[bytes]) -> tuple[Any, bytes]:
    batch = reference.encode_batch([Record(row, 0, None, value) for row, value in enumerate(values)])
    return read_header(batch), batch[HEADER_BYTES:]


def test_batches_that_are_too_large_for_one_column_are_refused() -> None:
    """Arrow's offsets have 32 bits: together the bytes of a group must not exceed them, whatever counts say."""
    header, body = batch_of([b"x" * 100] * 10)
    huge = pa.allocate_buffer(2**30)  # never touched
    assert kernel.read_records([(header, memoryview(body)), (header, huge), (header, huge)], 100, exact) is None


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (lambda: kernel.StringColumn([None, exact(4), exact(0)], 0, 1, False), "offsets"),
        (lambda: kernel.StringColumn([exact(0), exact(8), exact(0)], 0, 1, False), "validity"),
        (lambda: kernel.StringColumn([None, exact(8), exact(0)], -1, 1, False), "validity"),
        (lambda: kernel.Columns(strings(2), strings(1), None, None), "keys"),
        (lambda: kernel.Columns(strings(2), None, (None, exact(8), 0), None), "shorter"),
        (lambda: kernel.Columns(strings(1), None, None, (None, exact(8), 0, strings(1), strings(2))), "headers"),
        (lambda: kernel.Writer(exact(60), 61, 0), "room"),
        (lambda: kernel.murmur2(strings(2), exact(7)), "room"),
    ],
)
def test_buffers_that_are_too_short_are_refused(columns: Any, words: str) -> None:
    """Before anything is read or written."""
    with pytest.raises(ValueError, match=words):
        columns()


def strings(count: int) -> Any:
    return kernel.StringColumn([None, exact(4 * (count + 1)), exact(0)], 0, count, False)


def test_offsets_that_point_outside_are_refused() -> None:
    """As an Arrow array that was made of foreign buffers may have."""
    ends = pa.py_buffer(b"\0\0\0\0\xff\0\0\0\3\0\0\0")  # Arrow looks at the last one only
    bad = pa.Array.from_buffers(pa.binary(), 2, [None, ends, pa.py_buffer(b"abc")])
    with pytest.raises(ValueError, match="outside"):
        encode_table(pa.table({"value": bad}), default_timestamp_ms=0)
    with pytest.raises(ValueError, match="outside"):
        semel.records.partitions_for_keys(bad, 3)


def random_records(salt: int, count: int) -> list[Record]:
    return RandomTables(random.Random(seed_of_run(salt))).records(count)


def test_single_records_make_the_batches_of_their_table() -> None:
    """200 lots of rows, with headers, nulls and any timestamps: the same bytes, cuts and refusals."""
    rng = random.Random(seed_of_run(62))
    refused = 0
    for salt in range(200):
        records = random_records(100 + salt, rng.randrange(1, 60))
        limit = rng.choice((150, 300, 100_000))
        how: dict[str, Any] = {"compression": rng.choice(("none", "lz4")), "compression_level": None}
        outcomes: list[Any] = []
        for encode in (
            lambda: encode_records(records, batch_bytes_max=limit, **how),  # noqa: B023
            lambda: encode_table(make_table(records), default_timestamp_ms=0, batch_bytes_max=limit, **how),  # noqa: B023
        ):
            try:
                outcomes.append([bytes(batch.data) for batch in encode()])
            except RecordTooLarge as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]
        refused += isinstance(outcomes[0], str)
    assert 0 < refused < 200


def test_threads_decode_and_encode_at_once() -> None:
    """The loops run without the GIL: four threads at once get what one gets."""
    table = make_table(random_records(63, 3_000))
    expected = [bytes(batch.data) for batch in encode_table(table, default_timestamp_ms=0)]
    decoded = decode_batches(expected)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(20):
            same = [bytes(batch.data) for batch in encode_table(table, default_timestamp_ms=0)] == expected
            if not same or not decode_batches(expected).equals(decoded):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def _sizes(batches: list[EncodedBatch]) -> list[int]:
    return [decode_batches([batch.data]).num_rows for batch in batches]


def test_batches_cross_to_other_processes() -> None:
    """As Spark's workers get them: pickled, decoded there with a kernel of their own."""
    batches = encode_table(make_table(random_records(64, 500)), default_timestamp_ms=0, batch_bytes_max=4_000)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_sizes, (batches,)) == [batch.record_count for batch in batches]


WITHOUT_KERNEL = """
import sys, warnings
sys.modules["semel.records.kernel"] = None
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import pyarrow as pa
    from semel.records import decode_batches, encode_table, partitions_for_keys
    table = pa.table({"key": ["21", None], "value": ["one", None], "headers": [[{"key": "h", "value": b"1"}], None]})
    batches = encode_table(table, default_timestamp_ms=5)
    decoded = decode_batches(batch.data for batch in batches)
    print(decoded["key"].to_pylist(), decoded["value"].to_pylist(), decoded["headers"].to_pylist())
    print(partitions_for_keys(table["key"], 10).tolist())
print(*(one.message for one in caught if issubclass(one.category, RuntimeWarning)), sep="\\n")
"""


def test_without_the_kernel_the_reference_serves_and_one_warning_says_so() -> None:
    """As where neither a wheel fits nor a compiler is there."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_KERNEL], capture_output=True, text=True, check=True, timeout=60
    )
    columns, partitions, *warned = done.stdout.splitlines()
    assert columns == "[b'21', None] [b'one', None] [[{'key': 'h', 'value': b'1'}], []]"
    assert partitions == "[0, -1]"
    (warning,) = warned
    assert "times as slow" in warning
    assert "python3-dev" in warning


def test_without_the_kernel_random_tables_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes and values are those of the kernel."""
    tables = [make_table(random_records(300 + salt, 40)) for salt in range(100)]
    by_kernel = [[bytes(b.data) for b in encode_table(t, default_timestamp_ms=0, batch_bytes_max=900)] for t in tables]
    decoded = [table_records(decode_batches(batches)) for batches in by_kernel]
    monkeypatch.setattr("semel.records.arrow_encode.kernel", None)
    monkeypatch.setattr("semel.records.arrow_decode.kernel", None)
    for table, batches, records in zip(tables, by_kernel, decoded, strict=True):
        slow = [bytes(one.data) for one in encode_table(table, default_timestamp_ms=0, batch_bytes_max=900)]
        assert slow == batches
        assert table_records(decode_batches(slow)) == records
