"""Input for queries that are killed, and what their output must be in the end, by the plainest code there is."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from semel.client.admin import Admin
from semel.client.producer import Producer

ROWS = 60
IN_PARTITIONS = 2
START = datetime(2026, 1, 1, tzinfo=UTC)
Row = tuple[int, str, datetime]


@dataclass
class Feed:
    """Input that can be read again: a file a micro-batch for each of two streams, half of which comes again later."""

    folder: Path
    files: int = 0
    left: list[Row] = field(default_factory=list[Row])
    right: list[Row] = field(default_factory=list[Row])

    def add(self, files: int) -> None:
        for _ in range(files):
            first = self.files * ROWS // 2
            numbers = range(first, first + ROWS)
            left: list[Row] = [(row, f"word-{row % 97}", START + timedelta(milliseconds=row * 250)) for row in numbers]
            # The second stream runs ahead at first and behind later, so that either side waits for the other.
            shifted = range(self.files // 2 * ROWS, (self.files // 2 + 1) * ROWS) if self.files % 2 else range(0)
            right: list[Row] = [(row, f"other-{row}", START) for row in shifted]
            write_file(self.folder / "left" / f"{self.files:03}.parquet", left, self.files)
            write_file(self.folder / "right" / f"{self.files:03}.parquet", right, self.files)
            self.left += left
            self.right += right
            self.files += 1


@dataclass
class KafkaFeed(Feed):
    """The first of these streams in a topic too, so many rows at a time."""

    bootstrap: str = ""
    topic: str = ""

    def create(self) -> None:
        with Admin({"bootstrap.servers": self.bootstrap}) as admin:
            admin.create_topics(self.topic, partitions=IN_PARTITIONS)

    def add(self, files: int) -> None:
        seen = len(self.left)
        super().add(files)
        with Producer(bootstrap_servers=self.bootstrap) as producer:
            for place, (number, word, _) in enumerate(self.left[seen:]):
                value = f"{number},{word}".encode()
                producer.send(self.topic, value, key=word.encode(), partition=place % IN_PARTITIONS)

    def ends(self) -> dict[int, int]:
        return dict.fromkeys(range(IN_PARTITIONS), len(self.left) // IN_PARTITIONS)


def write_file(path: Path, rows: list[Row], number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = pa.schema([("id", pa.int64()), ("word", pa.string()), ("at", pa.timestamp("us", "UTC"))])
    table = pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema=schema)
    beside = path.with_suffix(".new")
    pq.write_table(table, beside)
    os.utime(beside, (1_700_000_000 + number, 1_700_000_000 + number))  # Spark takes files by their age
    beside.rename(path)


def expected(kind: str, feed: Feed, rows_max: int | None = None) -> list[bytes]:
    """What the output of this kind of query must be, when so many rows were read."""
    rows = feed.left[:rows_max]
    if kind == "stateless":
        return sorted(f"{number},{word}".encode() for number, word, _ in rows)
    if kind == "deduplicated":
        return sorted(b"%d" % number for number in {number for number, _, _ in rows})
    if kind == "joined":
        others = Counter(number for number, _, _ in feed.right)
        pairs = [(number, word) for number, word, _ in rows for _ in range(others[number])]
        return sorted(f"{number},{word},other-{number}".encode() for number, word in pairs)
    counts: Counter[tuple[int, str]] = Counter()
    sums: Counter[tuple[int, str]] = Counter()
    for number, word, at in rows:
        window = int(at.timestamp()) // 10 * 10
        counts[window, word] += 1
        sums[window, word] += number
    watermark = max(at for _, _, at in rows).timestamp() - 20
    return sorted(
        f"{window},{word},{count},{sums[window, word]}".encode()
        for (window, word), count in counts.items()
        if window + 10 <= watermark
    )
