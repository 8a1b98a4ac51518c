"""A Spark pipeline's ledger: the micro-batches and jobs that were committed, and the batch that a record came from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from semel.client.cluster import Cluster
from semel.client.offsets import edge_offsets
from semel.client.partitions import TopicPartition
from semel.errors import UnknownTopic
from semel.inspect.log import LogReader
from semel.inspect.outcomes import Status
from semel.records.reference import decode_batch
from semel.spark.ledger import Entry
from semel.spark.options import DEFAULT_LEDGER
from semel.wire import ErrorCode

__all__ = ["DEFAULT_LEDGER", "LedgerEntry", "entry_of_producer", "read_ledger"]

LEDGER_BYTES_MAX: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """A record of the ledger. A stream's entry is there twice: under the pipeline's name and under its query's id."""

    key: str
    partition: int
    offset: int
    status: Status
    """Only entries that are "committed" count."""
    entry: Entry

    @property
    def pipeline(self) -> str:
        """The name that the user gave it. Entries of earlier releases do not have it."""
        return self.entry.pipeline or self.key.partition("/")[0]

    @property
    def job(self) -> str | None:
        """The job's id, if it is one of `write_batch`."""
        name, slash, job = self.key.partition("/")
        return job if slash and name else None

    @property
    def is_by_query(self) -> bool:
        return self.key.startswith("/query/")


def read_ledger(
    cluster: Cluster, name: str | None = None, *, topic: str = DEFAULT_LEDGER, bytes_max: int = LEDGER_BYTES_MAX
) -> list[LedgerEntry]:
    """The entries of a pipeline, or of all, oldest first. Compaction keeps the newest of each key for certain.

    Entries of open and aborted transactions are among them, with their status.
    """
    if topic not in cluster.list_topics():
        raise UnknownTopic(
            f"The cluster has no topic {topic!r}, or this user may not see it, so no ledger was read. Name "
            "the topic that the pipeline was given as ledger=.",
            code=ErrorCode.unknown_topic_or_partition,
        )
    found: list[LedgerEntry] = []
    for number in sorted(cluster.leaders(topic)):
        named = TopicPartition(topic, number)
        [start] = edge_offsets(cluster, [named], "earliest").values()
        found += _read_partition(LogReader(cluster, named, start), bytes_max)
    chosen = [one for one in found if name is None or name in (one.pipeline, one.key)]
    return sorted(chosen, key=lambda one: (one.entry.at_ms, one.partition, one.offset))


def _read_partition(reader: LogReader, bytes_max: int) -> list[LedgerEntry]:
    reader.look()
    end = reader.high_watermark
    found: dict[int, LedgerEntry] = {}
    while reader.position < end and reader.bytes_read < bytes_max:
        for seen in reader.read(end=end):
            for decided in seen.decided:
                for offset in range(decided.base_offset, decided.last_offset + 1):
                    if offset in found:
                        one = found[offset]
                        found[offset] = LedgerEntry(one.key, one.partition, offset, decided.status, one.entry)
            if seen.batch.status == "marker":
                continue
            for record in decode_batch(seen.data)[1]:
                entry = _decode(record.value)
                if record.key is not None and entry is not None:
                    key = record.key.decode(errors="replace")
                    found[record.offset] = LedgerEntry(
                        key, reader.partition.partition, record.offset, seen.batch.status, entry
                    )
    return list(found.values())


def _decode(value: bytes | None) -> Entry | None:
    """None for a deleted entry and for a record that is none."""
    try:
        entry = Entry.decode(value) if value else None
    except (ValueError, TypeError, AttributeError, json.JSONDecodeError):
        return None
    return entry if entry is not None and _is_sound(entry) else None


def _is_sound(entry: Entry) -> bool:
    """Any program may write to the topic, so an entry's fields need not be what they should."""
    numbers = (entry.batch, entry.records, entry.at_ms, entry.producer_id, entry.producer_epoch)
    texts = (entry.query, entry.pipeline, *(entry.outputs or ()))
    return all(isinstance(one, int) for one in numbers) and all(isinstance(one, str) for one in texts)


def entry_of_producer(entries: list[LedgerEntry], producer_id: int, producer_epoch: int) -> LedgerEntry | None:
    """The batch or job that was written under this producer id and epoch: each has an epoch of its own."""
    matching = (
        one for one in entries if (one.entry.producer_id, one.entry.producer_epoch) == (producer_id, producer_epoch)
    )
    return next((one for one in matching if not one.is_by_query), None)
