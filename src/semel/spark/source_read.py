"""A task of the Spark source: reads exactly its range of one partition, as Arrow record batches of Spark's types."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa

from semel.client.cluster import Cluster
from semel.client.config import FetchConfig
from semel.client.fetcher import Fetcher
from semel.client.partitions import TopicPartition
from semel.client.settings import parse_config
from semel.client.topic_ids import ask_topic_ids
from semel.errors import KafkaError, OffsetOutOfRange, TopicRecreated, UnknownTopic
from semel.spark.source_offsets import OffsetRange
from semel.spark.source_task import ReadTask, report_loss
from semel.spark.workers import ease_worker
from semel.wire import ErrorCode

# The names of Spark's Kafka source in its order, in the Arrow types that Spark has for them.
SPARK_SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", pa.timestamp("us", tz="UTC")),
        pa.field("timestampType", pa.int32()),
        pa.field(
            "headers",
            pa.list_(pa.field("element", pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))),
        ),
    ]
)

_ROWS_MAX: Final = 32_768
_ROWS_FEW: Final = 2_048
_RECORD_BYTES: Final = 1_024
_FIRST_FETCH_BYTES: Final = 1_048_576


def read_task(task: ReadTask, wanted: OffsetRange) -> Iterator[pa.RecordBatch]:
    """`read_range` in a Python worker of Spark's."""
    try:
        yield from read_range(task, wanted)
    finally:
        ease_worker()


def read_range(task: ReadTask, wanted: OffsetRange) -> Iterator[pa.RecordBatch]:
    """The visible records of the range, in their order; memory holds a few fetches, however long the range is.

    Offsets without a record count as read: gaps of compaction, aborted records, markers. Records that are gone are an
    error, or passed over with a warning, as `fail_on_data_loss` says.
    """
    partition = TopicPartition(wanted.topic, wanted.partition)
    to_batches = _Columns(partition, task.columns)
    position = wanted.start
    with (
        Cluster(parse_config(task.settings).client) as cluster,
        Fetcher(cluster, _fetch_config(task, wanted)) as fetcher,
    ):
        while position < wanted.end:
            fetcher.assign({partition: position})
            try:
                for fetched in fetcher.fetch_until({partition: wanted.end}):
                    _check_topic(cluster, wanted)
                    for records in fetched:
                        yield from to_batches(records.table)
                return
            except (OffsetOutOfRange, UnknownTopic) as error:
                position = _pass_over(task, fetcher, wanted, fetcher.positions[partition], error)


def _check_topic(cluster: Cluster, wanted: OffsetRange) -> None:
    """Asked after records have come: whether they may be of a topic that was created since the range was planned."""
    if wanted.topic_id is None:
        return
    now = ask_topic_ids(cluster, [TopicPartition(wanted.topic, wanted.partition)])().get(wanted.topic)
    if str(now) != wanted.topic_id:
        raise TopicRecreated("the topic was deleted and created again", code=ErrorCode.inconsistent_topic_id)


def _fetch_config(task: ReadTask, wanted: OffsetRange) -> FetchConfig:
    """A short range would throw most of a large fetch away: the first one is sized by it, if the user says nothing."""
    config = parse_config(task.settings).fetch
    if "max.partition.fetch.bytes" in task.settings or "fetch.message.max.bytes" in task.settings:
        return config
    guess = max(_FIRST_FETCH_BYTES, wanted.size * _RECORD_BYTES)
    return replace(config, partition_bytes_max=min(config.partition_bytes_max, guess))


def _pass_over(task: ReadTask, fetcher: Fetcher, wanted: OffsetRange, position: int, error: KafkaError) -> int:
    """Where reading goes on after records that are gone, if that is allowed."""
    partition = TopicPartition(wanted.topic, wanted.partition)
    if isinstance(error, UnknownTopic):
        gone = f"offsets {position} to {wanted.end}: the topic is gone"
        report_loss(task.fail_on_data_loss, UnknownTopic, partition, gone)
        return wanted.end
    if isinstance(error, TopicRecreated):
        gone = f"offsets {position} to {wanted.end}: the topic was deleted and created again meanwhile"
        report_loss(task.fail_on_data_loss, OffsetOutOfRange, partition, gone)
        return wanted.end
    [begin] = fetcher.offsets_for([partition], "earliest").values()
    if position < begin:
        gone = f"offsets {position} to {min(begin, wanted.end)}: the log begins at {begin} now"
        report_loss(task.fail_on_data_loss, OffsetOutOfRange, partition, gone)
        return min(begin, wanted.end)
    [end] = fetcher.offsets_for([partition], "latest").values()
    gone = f"offsets {position} to {wanted.end}: the log ends at {end}, it was cut off, or the topic was created again"
    report_loss(task.fail_on_data_loss, OffsetOutOfRange, partition, gone)
    return wanted.end


class _Columns:
    """From records as they were fetched to record batches as Spark takes them."""

    def __init__(self, partition: TopicPartition, columns: Sequence[str]) -> None:
        self._columns = columns
        self._schema = pa.schema([SPARK_SCHEMA.field(name) for name in columns])
        # Columns of one value are made once and cut to length.
        self._same = {
            "topic": _repeat_text(partition.topic, _ROWS_MAX),
            "partition": _repeat_number(partition.partition, _ROWS_MAX),
        }

    def __call__(self, table: pa.Table) -> Iterator[pa.RecordBatch]:
        if table.num_rows == 0:
            return
        if table.column(0).num_chunks * _ROWS_FEW > table.num_rows:
            table = table.combine_chunks()
        for batch in table.to_batches(max_chunksize=_ROWS_MAX):
            yield pa.RecordBatch.from_arrays([self._column(name, batch) for name in self._columns], schema=self._schema)

    def _column(self, name: str, batch: pa.RecordBatch) -> pa.Array:
        match name:
            case "topic" | "partition":
                return self._same[name].slice(0, batch.num_rows)
            case "timestampType":
                return batch.column("timestamp_type").cast(pa.int32())
            case "timestamp":
                return batch.column(name).cast(SPARK_SCHEMA.field(name).type)
            case "headers":
                return _null_if_empty(batch.column(name))
        return batch.column(name)


def _null_if_empty(headers: pa.ListArray) -> pa.ListArray:
    """Spark's Kafka source has null for a record without headers, and users test for that."""
    kind, count = SPARK_SCHEMA.field("headers").type, len(headers)
    if len(headers.values) == 0:
        return pa.nulls(count, kind)
    edges = np.frombuffer(headers.offsets.buffers()[1], np.int32)[headers.offsets.offset :][: count + 1]
    is_filled = np.packbits(edges[1:] > edges[:-1], bitorder="little")
    buffers = [pa.py_buffer(is_filled), pa.py_buffer(np.ascontiguousarray(edges))]
    return pa.Array.from_buffers(kind, count, buffers, children=[headers.values])


# By buffers, since pyarrow's constructors from Python values import pandas where it is installed: half a second for
# each Python worker.


def _repeat_text(text: str, count: int) -> pa.StringArray:
    data = text.encode()
    edges = np.arange(count + 1, dtype=np.int32) * np.int32(len(data))
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(edges), pa.py_buffer(data * count)])


def _repeat_number(number: int, count: int) -> pa.Int32Array:
    return pa.Array.from_buffers(pa.int32(), count, [None, pa.py_buffer(np.full(count, number, np.int32))])
