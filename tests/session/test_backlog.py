"""Cutting what was fetched into portions: nothing is lost, repeated or put out of order, whatever the limits."""

from __future__ import annotations

import random

import pyarrow as pa

from semel.client.fetched import PartitionRecords
from semel.client.partitions import TopicPartition
from semel.records import RECORD_SCHEMA
from semel.session.backlog import Backlog, partition_of


def fetched(partition: int, offsets: list[int], next_offset: int, value_bytes: int = 3) -> PartitionRecords:
    columns = {
        "offset": offsets,
        "timestamp": [0] * len(offsets),
        "timestamp_type": [0] * len(offsets),
        "key": [None] * len(offsets),
        "value": [b"v" * value_bytes] * len(offsets),
        "headers": [[] for _ in offsets],
    }
    return PartitionRecords("t", partition, pa.table(columns, schema=RECORD_SCHEMA), next_offset, 0, 0, 0)


def random_fetches(rng: random.Random) -> list[PartitionRecords]:
    """With gaps, as compaction and markers leave them, and answers that hold nothing but those."""
    ends = dict.fromkeys(range(3), 0)
    answers: list[PartitionRecords] = []
    for _ in range(rng.randint(1, 8)):
        partition = rng.randrange(3)
        offsets = sorted(rng.sample(range(ends[partition], ends[partition] + 30), rng.randint(0, 12)))
        ends[partition] = (offsets[-1] if offsets else ends[partition]) + rng.randint(1, 3)
        answers.append(fetched(partition, offsets, ends[partition], rng.randint(0, 50)))
    return answers


def test_portions_put_together_are_what_was_fetched(rng: random.Random) -> None:
    """Every record once and in order, no portion above its limit, and the last position is the last answer's."""
    for _ in range(100):
        answers, backlog = random_fetches(rng), Backlog()
        backlog.add(answers)
        wanted = {p: [o for a in answers if a.partition == p for o in a.table["offset"].to_pylist()] for p in range(3)}
        found: dict[int, list[int]] = {partition: [] for partition in range(3)}
        positions: dict[int, int] = {}
        while not backlog.is_empty:
            records_max, bytes_max = rng.randint(1, 10), rng.randint(1, 600)
            portion = backlog.take(records_max, bytes_max)
            rows = [one.table.num_rows for one in portion]
            assert portion
            assert sum(rows) <= records_max
            for one in portion:
                offsets = one.table["offset"].to_pylist()
                # Whoever begins again at the portion's end finds the rest, and nothing of what is in it.
                assert all(offset < one.next_offset for offset in offsets)
                found[one.partition] += offsets
                positions[one.partition] = one.next_offset
                rest = wanted[one.partition][len(found[one.partition]) :]
                assert all(offset >= one.next_offset for offset in rest)
        assert found == wanted
        assert positions == {a.partition: a.next_offset for a in answers}
        assert (backlog.record_count, backlog.byte_count) == (0, 0)


def test_a_record_above_the_limit_of_bytes_is_a_portion_of_its_own() -> None:
    """A limit that nothing fits into must not stop the reader."""
    backlog = Backlog()
    backlog.add([fetched(0, [0, 1, 2], 3, value_bytes=1_000)])
    assert [one.table.num_rows for one in backlog.take(10, 1)] == [1]
    assert backlog.record_count == 2


def test_what_belongs_to_others_now_is_dropped() -> None:
    """And what stays keeps its order."""
    backlog = Backlog()
    backlog.add([fetched(0, [0], 1), fetched(1, [0], 1), fetched(0, [1], 2)])
    backlog.keep_only({TopicPartition("t", 0)})
    assert [(partition_of(one).partition, one.next_offset) for one in backlog.take(10, 10_000)] == [(0, 1), (0, 2)]
