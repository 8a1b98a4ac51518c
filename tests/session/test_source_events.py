"""Events that wait for their transaction: in memory or in a file, the same comes out, in order and in bounded parts."""

from __future__ import annotations

import random
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.client.partitions import TopicPartition
from semel.errors import SemelError
from semel.records.schema import RECORD_SCHEMA
from semel.session import source_events
from semel.session.source_events import EventStore
from semel.session.source_headers import SourceEvents

PLACES = [TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)]


def events(rows: list[tuple[int, int, int]], size: int = 10) -> SourceEvents:
    """Of offset, transaction and index."""
    count = len(rows)
    columns: dict[str, Any] = {
        "offset": [row[0] for row in rows],
        "timestamp": [0] * count,
        "timestamp_type": [0] * count,
        "key": [None] * count,
        "value": [f"{number}/{index}".encode().ljust(size) for _, number, index in rows],
        "headers": [None] * count,
    }
    offsets, transactions, indexes = (np.array([row[at] for row in rows], np.int64) for at in range(3))
    return SourceEvents(pa.table(columns, schema=RECORD_SCHEMA), offsets, transactions, indexes)


@given(st.integers(0, 2**32), st.sampled_from([0, 3_000, 1_000_000]))
@settings(max_examples=40, deadline=None)
def test_all_events_before_the_positions_come_out_once_and_in_order(number: int, memory_bytes_max: int) -> None:
    """H1: in memory, in a file, and partly in each; whole or in windows."""
    seed = random.Random(number)
    store = EventStore(memory_bytes_max)
    log: dict[TopicPartition, list[tuple[int, int, int]]] = {place: [] for place in PLACES}
    for transaction in range(20):
        for index in range(seed.choice([1, 5, 20])):
            rows = log[seed.choice(PLACES)]
            rows.append((len(rows) * 2, transaction, index))
    for place, rows in log.items():
        at = 0
        while at < len(rows):
            count = seed.choice([1, 7, 100])
            store.add(place, events(rows[at : at + count]))
            at += count
    assert (store.spilled_bytes > 0) == (memory_bytes_max < 1_000_000)
    window = seed.choice([100, 5_000, source_events.WINDOW_BYTES_MAX])
    taken_until = -1
    while taken_until < 19:
        begin, taken_until = taken_until + 1, seed.randrange(taken_until + 1, 20)
        positions = {place: next((r[0] for r in rows if r[1] > taken_until), 10_000) for place, rows in log.items()}
        taken = store.take(positions)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(source_events, "WINDOW_BYTES_MAX", window)
            tables = list(taken.tables())
        values = [value.decode().strip() for table in tables for value in table["value"].to_pylist()]
        wanted = sorted(row[1:] for rows in log.values() for row in rows if begin <= row[1] <= taken_until)
        assert values == [f"{transaction}/{index}" for transaction, index in wanted]
        assert taken.transactions.tolist() == [transaction for transaction, _ in wanted]
        assert {table["topic"][0].as_py() for table in tables if table.num_rows} <= {"a", "b"}
    assert store.memory_bytes == 0


def test_the_file_has_no_name_and_is_private(tmp_path: Path) -> None:
    """Nobody else reads it, and nothing is left of it, whatever ends the process."""
    store = EventStore(0, str(tmp_path))
    store.add(PLACES[0], events([(0, 1, 0)]))
    assert list(tmp_path.iterdir()) == []
    file = store._file
    assert file is not None
    status = Path(f"/proc/self/fd/{file.descriptor}").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_nlink) == (0o600, 0)
    taken = store.take({PLACES[0]: 1})
    assert store._file is None
    assert [len(table) for table in taken.tables()] == [1]


def test_a_folder_without_room_is_one_error(tmp_path: Path) -> None:
    """What happened, what it means, what to do."""
    store = EventStore(0, str(tmp_path / "missing"))
    with pytest.raises(SemelError, match="spill_folder="):
        store.add(PLACES[0], events([(0, 1, 0)]))


LARGE = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from test_source_events import PLACES, events
from semel.session.source_events import EventStore

store, total = EventStore(8_000_000), 0
begun = None
for part in range(100):
    for at, place in enumerate(PLACES[:2]):
        rows = [(part * 100 + n, 1, (part * 100 + n) * 2 + at) for n in range(100)]
        store.add(place, events(rows, size=20_000))
    if part == 10:
        begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for table in store.take({place: 10_000 for place in PLACES}).tables():
    total += table.num_rows
    assert table.nbytes < 60_000_000
print(total, store.spilled_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begun)
"""


def test_a_transaction_of_many_megabytes_takes_little_memory() -> None:
    """H1: 400 MB of one transaction with 8 MB of memory for it: the process grows by far less."""
    done = subprocess.run(
        [sys.executable, "-c", LARGE, str(Path(__file__).parent)], capture_output=True, text=True, check=True
    )
    count, spilled, grown_kb = map(int, done.stdout.split())
    assert count == 20_000
    assert spilled > 380_000_000
    assert grown_kb < 250_000, f"{grown_kb} KB"
