"""The Spark source in a streaming query: which offsets the next micro-batch takes. Runs beside the driver."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from semel.client.partitions import TopicPartition
from semel.errors import OffsetOutOfRange, UnknownTopic
from semel.spark.source_offsets import OffsetRange, Offsets, from_checkpoint, limit_offsets, split_ranges, to_checkpoint
from semel.spark.source_options import SourceOptions
from semel.spark.source_task import ReadTask, report_loss
from semel.spark.workers import PromptReader

# One process asks the cluster, others read records: what only one of them needs is imported on use.
if TYPE_CHECKING:
    import pyarrow as pa

    from semel.spark.source_lookup import Found, Lookup


class RangePartition(InputPartition):
    """The range of one task."""

    def __init__(self, wanted: OffsetRange) -> None:
        super().__init__(wanted)


class StreamReader(PromptReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Offsets are those of Spark's Kafka source, also in the checkpoint.

    Spark makes one of these in a process beside the driver, which plans, and sends another to the tasks, which read.
    """

    def __init__(self, options: SourceOptions, task: ReadTask, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._task = task
        self._clock = clock
        self._lookup: Lookup | None = None
        self._target: Offsets | None = None
        """Where a query with the trigger availableNow ends."""
        self._latest: Offsets | None = None
        self._topic_ids: dict[str, UUID | None] = {}
        self._last_batch_at = float("-inf")

    # -- offsets ---------------------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        found = self._find()
        return to_checkpoint(self._ask.starts(found.partitions))

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.max_offsets is not None:
            return ReadMaxRows(self._options.max_offsets)
        return ReadAllAvailable() if self._options.min_offsets is None else ReadMinRows(self._options.min_offsets)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._ask.edges(self._find().partitions, "latest")

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        begin = from_checkpoint(start)
        found = self._find()
        latest = self._ask.edges(found.partitions, "latest") if self._target is None else self._target
        latest = self._latest = self._settle(begin, latest)
        # Spark can pass on one limit only and there may be two, so the options count. Everything is everything, though.
        if not isinstance(limit, ReadAllAvailable):
            begin = begin | self._begin_of_new(begin, latest)
            if self._should_wait(begin, latest):
                return start
            if self._options.max_offsets is not None:
                latest = limit_offsets(begin, latest, self._options.max_offsets)
        return to_checkpoint(latest)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return None if self._latest is None else to_checkpoint(self._latest)

    def _should_wait(self, begin: Offsets, latest: Offsets) -> bool:
        """Whether there is less than `minOffsetsPerTrigger`, and `maxTriggerDelay` is not over yet."""
        least = self._options.min_offsets
        if least is None or self._target is not None:
            return False
        now = self._clock()
        new = sum(max(0, offset - begin[partition]) for partition, offset in latest.items())
        if new < least and (now - self._last_batch_at) * 1000 < self._options.max_trigger_delay_ms:
            return True
        self._last_batch_at = now
        return False

    # -- losses ----------------------------------------------------------------------------------------------------

    def _find(self) -> Found:
        """The partitions of now. Remembers the ids of topics: only these tell that one was deleted and made anew."""
        found = self._ask.find_partitions(may_be_gone=not self._options.fail_on_data_loss)
        for topic, topic_id in found.topic_ids.items():
            if self._topic_ids.get(topic, topic_id) != topic_id:
                what = (
                    "all that was not read yet: the topic was deleted and made anew; start a new query for the new one"
                )
                self._report(OffsetOutOfRange, TopicPartition(topic, 0), what)
            self._topic_ids[topic] = topic_id
        return found

    def _settle(self, begin: Offsets, latest: Offsets) -> Offsets:
        """The ends, with what is odd about them explained, reported, or put right."""
        for partition in sorted(set(begin) - set(latest)):
            gone = f"from offset {begin[partition]} on: the partition is no longer there, or no longer subscribed to"
            self._report(UnknownTopic, partition, gone)
        behind = [partition for partition, offset in latest.items() if offset < begin.get(partition, 0)]
        if not behind:
            return latest
        # A checkpoint of a read_uncommitted reader may be ahead of the last stable offset: that is no loss.
        logged = self._ask.edges(behind, "latest", "read_uncommitted")
        settled = dict(latest)
        for partition in sorted(behind):
            if begin[partition] <= logged[partition]:
                settled[partition] = begin[partition]
            else:
                self._report(OffsetOutOfRange, partition, _cut_off(begin[partition], logged[partition]))
        return settled

    def _begin_of_new(self, begin: Mapping[TopicPartition, int], end: Mapping[TopicPartition, int]) -> Offsets:
        """Partitions that came up since the last micro-batch begin with their first record."""
        new = sorted(set(end) - set(begin))
        return self._ask.edges(new, "earliest") if new else {}

    def _report(self, kind: type[UnknownTopic] | type[OffsetOutOfRange], partition: TopicPartition, gone: str) -> None:
        report_loss(self._options.fail_on_data_loss, kind, partition, gone)

    # -- tasks -----------------------------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        begin, until = from_checkpoint(start), from_checkpoint(end)
        known_topics = {partition.topic for partition in begin}
        for partition, offset in self._begin_of_new(begin, until).items():
            if offset > 0 and partition.topic in known_topics:
                self._report(
                    OffsetOutOfRange, partition, f"offsets 0 to {offset}: the partition is new and begins there"
                )
            begin[partition] = offset
        backwards = [partition for partition in until if until[partition] < begin[partition]]
        for partition, offset in (self._ask.edges(backwards, "earliest") if backwards else {}).items():
            self._report(OffsetOutOfRange, partition, _cut_off(begin[partition], until[partition]))
            begin[partition] = offset
        ranges = [OffsetRange(*named, begin[named], until[named]) for named in sorted(until)]
        options = self._options
        return [
            RangePartition(wanted)
            for wanted in split_ranges(ranges, options.min_partitions, options.max_records_per_partition)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from semel.spark.source_read import read_task

        return read_task(self._task, partition.value)

    def stop(self) -> None:
        if self._lookup is not None:
            self._lookup.close()

    @property
    def _ask(self) -> Lookup:
        # Made when first used: until then the reader can be pickled, and tasks have no use for it.
        if self._lookup is None:
            from semel.spark.source_lookup import Lookup

            self._lookup = Lookup(self._options)
        return self._lookup


def _cut_off(position: int, end: int) -> str:
    return f"at offset {position}: the log ends at {end}, it was cut off or the topic was made anew"
