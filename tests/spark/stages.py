"""The sink's two stages without Spark: rows in, blobs as Spark would keep them, and write tasks run by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from semel.client.shared import SharedTransaction
from semel.spark.blobs import Manifest, Slots, read_manifest
from semel.spark.dead_letters import DeadLetterTerms
from semel.spark.encode import Encode
from semel.spark.write import Write


class Row(dict[str, Any]):
    """A row as `collect` returns it."""

    __getattr__ = dict.__getitem__


@dataclass
class Blobs:
    """What Spark keeps between the stages: the blobs of one write task, in their order."""

    table: pa.Table
    manifest: Manifest

    def batches(self, first: int = 0, stop: int | None = None, *, rows: int = 3) -> Iterator[pa.RecordBatch]:
        return iter(self.table.slice(first, None if stop is None else stop - first).to_batches(max_chunksize=rows))


def encode(
    bootstrap: str,
    topic: str | None,
    parts: list[pa.Table],
    partitions: int,
    *,
    batch_size: int = 1_000,
    dead_letters: DeadLetterTerms | None = None,
    **more: Any,
) -> Blobs:
    """Stage 1: each of `parts` is the input of one task."""
    settings = {"bootstrap.servers": bootstrap, "batch.size": batch_size, **more}
    counts = {} if topic is None else {topic: partitions}
    job = Encode(settings, topic, counts, Slots.make(1), 1_000, "seed", buffer_bytes=4_000, dead_letters=dead_letters)
    made = [batch for task, part in enumerate(parts) for batch in job.encode(iter(part.to_batches()), task)]
    table = pa.Table.from_batches(made).sort_by([("map", "ascending"), ("number", "ascending")])
    return Blobs(table, read_manifest([Row(row) for row in table.to_pylist()]))


def write(
    bootstrap: str, shared: SharedTransaction, blobs: Blobs, batches: Any = None, *, attempt: int = 0
) -> list[Row]:
    """Stage 2: one attempt of the one write task."""
    job = Write({"bootstrap.servers": bootstrap}, shared, blobs.manifest)
    given = blobs.batches() if batches is None else batches
    return [Row(row) for batch in job.write(given, attempt) for row in batch.to_pylist()]
