"""The Spark source in a streaming query: which offsets the next micro-batch takes. Runs beside the driver."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from semel.client.leader_calls import describe
from semel.client.partitions import TopicPartition
from semel.errors import OffsetOutOfRange, SemelError, UnknownTopic
from semel.spark.source_note import begin_of_batch, extend_note, is_same_topic, replaced_topics
from semel.spark.source_offsets import (
    Note,
    OffsetRange,
    Offsets,
    limit_offsets,
    split_note,
    split_ranges,
    to_checkpoint,
)
from semel.spark.source_options import SourceOptions
from semel.spark.source_task import ReadTask, report_loss
from semel.spark.workers import PromptReader
from semel.wire import ErrorCode

# One process asks the cluster, others read records: what only one of them needs is imported on use.
if TYPE_CHECKING:
    import pyarrow as pa

    from semel.spark.source_lookup import Found, Lookup


class RangePartition(InputPartition):
    """The range of one task."""

    def __init__(self, wanted: OffsetRange) -> None:
        super().__init__(wanted)


class StreamReader(PromptReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Offsets are those of Spark's Kafka source, also in the checkpoint, with a note beside them.

    Spark makes one of these in a process beside the driver, which plans, and sends another to the tasks, which read.

    Spark asks for the initial offset several times: before the first micro-batch is planned, after it has written down
    where that ends, and once more when it replays that micro-batch after a restart. The topic may have grown meanwhile.
    So the first answer goes into the note, and a micro-batch begins where the note of its end says.
    """

    def __init__(self, options: SourceOptions, task: ReadTask, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._task = task
        self._clock = clock
        self._lookup: Lookup | None = None
        self._initial: dict[str, Any] | None = None
        self._initial_error: SemelError | None = None
        self._found: Found | None = None
        self._target: Offsets | None = None
        """Where a query with the trigger availableNow ends."""
        self._latest: Offsets | None = None
        self._last_batch_at = float("-inf")

    # -- offsets ---------------------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        if self._initial is None:
            try:
                # Nothing can be lost yet: a topic that is not there is a mistake, also with failOnDataLoss=false.
                found = self._find(may_be_gone=False)
                starts = self._ask.starts(found.partitions)
                self._initial = to_checkpoint(starts, extend_note(None, found.cluster, found.topic_ids, starts))
            except SemelError as error:
                # A new query fails with it at once, when Spark asks for the end of the first micro-batch. A replay of
                # that micro-batch does not need this answer: options that no longer fit must not stop it.
                self._initial_error = error
                self._initial = to_checkpoint({}, Note(None, {}, {}))
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.max_offsets is not None:
            return ReadMaxRows(self._options.max_offsets)
        return ReadAllAvailable() if self._options.min_offsets is None else ReadMinRows(self._options.min_offsets)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._ask.edges(self._find().partitions, "latest")

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        if self._initial_error is not None and start == self._initial:
            raise self._initial_error
        begin, note = split_note(start)
        found = self._find()
        if replaced := self._report_replaced(begin, note):
            # Their records are all new, whatever the offsets of the old topics were.
            begin = {partition: offset for partition, offset in begin.items() if partition.topic not in replaced}
            self._move_target(replaced)
        if self._target is None:
            latest = self._ask.edges(found.partitions, "latest")
        else:  # which may be older than the start of a new query, and then lack a partition
            latest = {
                partition: begin[partition] for partition in begin if partition in found.partitions
            } | self._target
        latest = self._latest = self._settle(begin, latest)
        new = self._begin_of_new(begin, latest)
        begin = begin | new
        # Spark can pass on one limit only and there may be two, so the options count. Everything is everything, though.
        if not isinstance(limit, ReadAllAvailable):
            if self._should_wait(begin, latest):
                return start
            if self._options.max_offsets is not None:
                latest = limit_offsets(begin, latest, self._options.max_offsets)
        return to_checkpoint(latest, extend_note(note, found.cluster, found.topic_ids, new))

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

    def _find(self, *, may_be_gone: bool = True) -> Found:
        """The partitions of now, without what is gone if the user accepts losses."""
        self._found = self._ask.find_partitions(may_be_gone=may_be_gone and not self._options.fail_on_data_loss)
        return self._found

    def _report_replaced(self, offsets: Offsets, note: Note | None) -> frozenset[str]:
        """The topics that are not those of the note: deleted and created again, or of another cluster."""
        if note is None:
            return frozenset()
        found = self._found or self._find()
        replaced = replaced_topics(offsets, note, found.cluster, found.topic_ids)
        for topic in sorted(replaced):
            what = "the topic was deleted and created again"
            if None not in (note.cluster, found.cluster) and note.cluster != found.cluster:
                what = (
                    f"the checkpoint is of cluster {note.cluster} and this is cluster {found.cluster}. If offsets are "
                    "the same there, start a new query with them as startingOffsets"
                )
            gone = f"all that was not read yet: {what}. A query that goes on reads the new topic from its beginning"
            self._report(OffsetOutOfRange, TopicPartition(topic, 0), gone)
        return replaced

    def _move_target(self, topics: frozenset[str]) -> None:
        if self._target is not None:
            moved = [partition for partition in self._target if partition.topic in topics]
            self._target = self._target | self._ask.edges(moved, "latest")

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
        first = self._ask.edges(new, "earliest") if new else {}
        known_topics = {partition.topic for partition in begin}
        for partition, offset in first.items():
            if offset > 0 and partition.topic in known_topics:
                gone = f"offsets 0 to {offset}: the partition is new and begins there"
                self._report(OffsetOutOfRange, partition, gone)
        return first

    def _report(self, kind: type[UnknownTopic] | type[OffsetOutOfRange], partition: TopicPartition, gone: str) -> None:
        report_loss(self._options.fail_on_data_loss, kind, partition, gone)

    # -- tasks -----------------------------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        (begin, began), (until, note) = split_note(start), split_note(end)
        if replaced := self._report_replaced(until, note):
            # Since the micro-batch was planned: there is nothing left to read.
            until = {partition: offset for partition, offset in until.items() if partition.topic not in replaced}
        begin = begin_of_batch(begin, began, note)
        begin |= self._begin_of_new(begin, until)
        for partition in sorted(until):
            if until[partition] < begin[partition]:
                begin[partition] = self._begin_of_backwards(partition, begin, until, began, note)
        ids = {} if note is None else note.topic_ids
        ranges = [OffsetRange(*named, begin[named], until[named], ids.get(named.topic)) for named in sorted(until)]
        options = self._options
        return [
            RangePartition(wanted)
            for wanted in split_ranges(ranges, options.min_partitions, options.max_records_per_partition)
        ]

    def _begin_of_backwards(
        self, partition: TopicPartition, begin: Offsets, until: Offsets, began: Note | None, note: Note | None
    ) -> int:
        """Where a micro-batch begins whose end lies before its start, if the user accepts losses."""
        if note is None and began is not None:
            # A first micro-batch, written down by a version (or by Spark's Kafka source) that kept no start.
            if self._options.fail_on_data_loss:
                raise OffsetOutOfRange(
                    f"The checkpoint holds a first micro-batch of {describe(partition)} that ends at offset "
                    f"{until[partition]}, but not where it began, and {self._options.starting_option} says "
                    f"{begin[partition]} now; nothing was read. Write the offsets to begin with as startingOffsets (in "
                    f"JSON), or failOnDataLoss=false to begin at {until[partition]}.",
                    code=ErrorCode.offset_out_of_range,
                )
            return until[partition]
        self._report(OffsetOutOfRange, partition, _cut_off(begin[partition], until[partition]))
        if began is not None and note is not None and is_same_topic(partition.topic, began, note):
            return until[partition]  # it was cut off: what is left was read before
        [first] = self._ask.edges([partition], "earliest").values()
        return first

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
    return f"at offset {position}: the log ends at {end}, it was cut off, or the topic was deleted and created again"
