"""`format("semel")` as Spark sees it: the source with its batch reader, and the way to the writers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import pyspark
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from semel.errors import ConfigError
from semel.spark.source_needs import check_pyspark
from semel.spark.workers import PromptReader

try:
    from pyspark.sql.datasource import (
        DataSource,
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
        InputPartition,
    )
except ModuleNotFoundError:  # before pyspark 4.0. From there on the import must succeed, or no Python source is found
    check_pyspark(pyspark.__version__)
    raise

# Spark imports this file in every session that looks for any Python data source, and in a new process for each
# streaming query: what costs time is imported on use.
if TYPE_CHECKING:
    import pyarrow as pa

    from semel.spark.source_options import SourceOptions
    from semel.spark.source_task import ReadTask

HEADERS: Final = "headers"
SCHEMA: Final = StructType(
    [
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("timestampType", IntegerType()),
        StructField(
            HEADERS,
            ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())])),
        ),
    ]
)


class SemelSource(DataSource):
    """Kafka topics as a DataFrame, with the options and columns of Spark's Kafka source.

    >>> (
    ...     spark.readStream.format("semel")
    ...     .option("kafka.bootstrap.servers", "127.0.0.1:9092")
    ...     .option("subscribe", "orders")
    ...     .load()
    ... )  # doctest: +SKIP
    """

    @classmethod
    def name(cls) -> str:
        return "semel"

    def schema(self) -> StructType:
        is_with_headers = self._parse().include_headers
        return StructType([column for column in SCHEMA.fields if is_with_headers or column.name != HEADERS])

    def reader(self, schema: StructType) -> DataSourceReader:
        options = self._parse().for_batch()
        return BatchReader(options, _read_task(options, schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        options = self._parse().for_stream()
        from semel.spark.source_stream import StreamReader

        return StreamReader(options, _read_task(options, schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        check_pyspark(pyspark.__version__)
        if overwrite:
            raise ConfigError('A topic cannot be overwritten; nothing was written. Use mode("append").')
        from semel.spark.format_options import parse_job_options
        from semel.spark.format_writer import JobWriter

        options, job_id = parse_job_options(self.options)
        return JobWriter(options, schema, job_id)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        check_pyspark(pyspark.__version__)
        if overwrite:
            raise ConfigError(
                "Output mode complete writes the whole result again with every micro-batch, and a topic cannot be "
                "overwritten; nothing was written. Use update or append."
            )
        from semel.spark.format_options import parse_stream_options
        from semel.spark.format_writer import StreamWriter

        return StreamWriter(parse_stream_options(self.options), schema)

    def _parse(self) -> SourceOptions:
        check_pyspark(pyspark.__version__)
        from semel.spark.source_options import parse_options

        return parse_options(self.options)


class BatchReader(PromptReader, DataSourceReader):
    """A batch query: the offsets are looked up once, when it is planned."""

    def __init__(self, options: SourceOptions, task: ReadTask) -> None:
        self._options = options
        self._task = task

    def partitions(self) -> list[InputPartition]:
        from semel.spark.source_lookup import Lookup
        from semel.spark.source_offsets import OffsetRange, split_ranges

        options = self._options
        lookup = Lookup(options)
        try:
            found = lookup.find_partitions()
            starts, ends = lookup.starts(found.partitions), lookup.ends(found.partitions)
        finally:
            lookup.close()
        ids = {topic: None if topic_id is None else str(topic_id) for topic, topic_id in found.topic_ids.items()}
        ranges = [
            OffsetRange(*partition, starts[partition], ends[partition], ids.get(partition.topic))
            for partition in sorted(found.partitions)
        ]
        pieces = split_ranges(ranges, options.min_partitions, options.max_records_per_partition)
        return [InputPartition(wanted) for wanted in pieces]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from semel.spark.source_read import read_task

        # Without any partition Spark makes one up, of the value None.
        return iter(()) if partition.value is None else read_task(self._task, partition.value)


def _read_task(options: SourceOptions, schema: StructType) -> ReadTask:
    """A schema of the user's may leave columns out, which then need not be carried to Spark; others are not there."""
    from semel.spark.source_task import ReadTask

    types = {column.name: column.dataType for column in SCHEMA.fields}
    for column in schema.fields:
        if types.get(column.name) != column.dataType:
            choice = ", ".join(f"{name} {kind.simpleString()}" for name, kind in types.items())
            raise ConfigError(
                f"The schema has {column.name} {column.dataType.simpleString()}, which the source does not give: "
                f"leave schema() out, or choose from {choice}."
            )
    return ReadTask(options.settings, tuple(schema.fieldNames()), options.fail_on_data_loss)
