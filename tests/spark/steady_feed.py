"""A topic that another process writes to all the time, and what queries saw of it, batch by batch.

`python steady_feed.py <bootstrap> <topic> <records a second>` writes numbers until its input is closed.
"""

from __future__ import annotations

import itertools
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import semel

PARTITIONS = 2
_TICK_S = 0.01


@contextmanager
def feeding(bootstrap: str, topic: str, rate: int) -> Iterator[None]:
    """The topic gets so many records a second for the length of the block; it has some already when it begins."""
    command = [sys.executable, __file__, bootstrap, topic, str(rate)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        ends = semel.TopicPartition(topic, 0)
        with semel.Admin({"bootstrap.servers": bootstrap}) as admin:
            deadline = time.monotonic() + 60
            while admin.list_offsets({ends: "latest"})[ends].offset < rate // 4:
                assert process.poll() is None, "the feed has ended"
                assert time.monotonic() < deadline, "the feed does not write"
                time.sleep(0.05)
        yield
        assert process.poll() is None, "the feed has ended"
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)
    assert process.returncode == 0


def write(bootstrap: str, topic: str, rate: int) -> None:
    started, numbers = time.monotonic(), itertools.count()
    with semel.Producer({"bootstrap.servers": bootstrap, "linger.ms": 5}) as producer:
        sent = 0
        while not select.select([sys.stdin], [], [], _TICK_S)[0]:
            due = int((time.monotonic() - started) * rate)
            for number in itertools.islice(numbers, max(0, due - sent)):
                producer.send(topic, b"%d" % number, partition=number % PARTITIONS)
            sent = max(sent, due)


Seen = dict[str, list[int]]
"""Of a micro-batch, by partition: first and last offset, how many records, and the sum of the numbers in them."""


def summarize(batch: Any) -> Seen:
    """What is in a micro-batch."""
    sums = ["min(offset)", "max(offset)", "count(*)", "sum(cast(cast(value as string) as long))"]
    by_partition = batch.selectExpr("partition", "offset", "value").groupBy("partition")
    from pyspark.sql.functions import expr

    rows = by_partition.agg(*(expr(text).alias(text) for text in sums)).collect()
    return {str(row["partition"]): [row[text] for text in sums] for row in rows}


def check_seen(runs: list[tuple[int, Seen]], bootstrap: str, topic: str, start: dict[int, int]) -> int:
    """Every record from the start on was seen, in one micro-batch only; a micro-batch is the same in each replay.

    The records themselves come from another client. Returns how many there were.
    """
    batches: dict[int, Seen] = {}
    for number, seen in runs:
        assert batches.setdefault(number, seen) == seen, f"batch {number} differs in its replay"
    assert sorted(batches) == list(range(len(batches)))
    position, total, sums = dict(start), 0, dict.fromkeys(start, 0)
    for number in sorted(batches):
        for partition, (first, last, count, added) in sorted(batches[number].items()):
            where = f"partition {partition} in batch {number}"
            assert first == position[int(partition)], f"{where} begins at {first} and not at {position}"
            assert count == last - first + 1, where
            position[int(partition)] = last + 1
            sums[int(partition)] += added
            total += count
    for partition, begin in start.items():
        assert sums[partition] == _sum(bootstrap, topic, partition, begin, position[partition])
    return total


def _sum(bootstrap: str, topic: str, partition: int, begin: int, end: int) -> int:
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "sums", "enable.auto.commit": False})
    try:
        consumer.assign([TopicPartition(topic, partition, begin)])
        total, position, deadline = 0, begin, time.monotonic() + 60
        while position < end:
            assert time.monotonic() < deadline, f"the other client stays at {position}"
            for message in consumer.consume(10_000, timeout=1):
                assert message.error() is None, message.error()
                if message.offset() == position and position < end:
                    total += int(message.value() or b"")
                    position += 1
        return total
    finally:
        consumer.close()


if __name__ == "__main__":
    write(sys.argv[1], sys.argv[2], int(sys.argv[3]))
