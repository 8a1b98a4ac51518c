"""What a micro-batch consists of, from Spark's own offset log: which query it belongs to and where its input ends.

Spark writes `offsets/N` before batch N runs for the first time and never again, so the file is the same in a replay.
Its first line is a version, its second holds settings, and each further one is the end of a source: JSON, `-` for
nothing, with `name:` in front in version 2. Kafka's sources, Spark's and Semel's, write
`{"topic": {"partition": offset}}`.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from semel.client.partitions import TopicPartition
from semel.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_NAMED = re.compile(r"[^{}\[\]\"]*?:(?=[\[{\"\-0-9])")


@dataclass(frozen=True, slots=True)
class Input:
    """The identity of a micro-batch's input."""

    query: str
    digest: str
    ends: dict[TopicPartition, int] = field(default_factory=dict[TopicPartition, int])


def read_input(df: DataFrame, batch_id: int, checkpoint: str | None) -> Input:
    """The input of the micro-batch that `foreachBatch` has just handed over."""
    spark: Any = df.sparkSession
    if hasattr(spark, "_jsparkSession"):
        root, query = _running_query(spark)
        checkpoint = root or checkpoint
        if checkpoint is None:
            raise ConfigError(
                "This is not called by a streaming query, so there is no checkpoint that names the batch; nothing was "
                "written. Use it with writeStream.foreachBatch, or semel.write_batch for what does not stream."
            )
        text = _read_by_hadoop(spark, f"{checkpoint}/offsets/{batch_id}")
        query = query or read_query_id(_read_by_hadoop(spark, f"{checkpoint}/metadata"))
    else:
        if checkpoint is None:
            raise ConfigError(
                "Through Spark Connect the sink cannot see the query's checkpoint, and without it a replay cannot be "
                "told from a new batch; nothing was written. Pass checkpoint= to KafkaSink, the same as in "
                "option('checkpointLocation', ...)."
            )
        text = _read_by_spark(spark, f"{checkpoint}/offsets/{batch_id}")
        query = read_query_id(_read_by_spark(spark, f"{checkpoint}/metadata"))
    return Input(query, hashlib.sha256(text.encode()).hexdigest()[:32], parse_ends(text))


def _running_query(spark: Any) -> tuple[str | None, str | None]:
    """Checkpoint and id of the query whose thread has called us, or nothing."""
    query = running_query(spark)
    return (None, None) if query is None else (query.resolvedCheckpointRoot(), query.id().toString())


def running_query(spark: Any) -> Any | None:
    """Java's own object of that query, if a query has called us."""
    query_id = spark.sparkContext.getLocalProperty("sql.streaming.queryId")
    if query_id is None:
        return None
    uuid = _java_class(spark, "java.util.UUID").fromString(query_id)
    return spark._jsparkSession.sharedState().activeStreamingQueries().get(uuid)


def _read_by_hadoop(spark: Any, path: str) -> str:
    """A small file from any file system that Spark can use, without a job."""
    named = _java_class(spark, "org.apache.hadoop.fs.Path")(path)
    stream = named.getFileSystem(spark.sparkContext._jsc.hadoopConfiguration()).open(named)
    try:
        return _java_class(spark, "org.apache.commons.io.IOUtils").toString(stream, "UTF-8")
    finally:
        stream.close()


def _java_class(spark: Any, name: str) -> Any:
    """Asked for by its whole name: attribute by attribute, Java would look for a class `org` in every jar, then for
    `org.apache`, and so on, which took 9 ms of each micro-batch."""
    return getattr(spark.sparkContext._jvm, name)


def _read_by_spark(spark: Any, path: str) -> str:
    """The same through Spark Connect, where only jobs can read."""
    return spark.read.text(path, wholetext=True).collect()[0].value


def read_query_id(metadata: str) -> str:
    """
    >>> read_query_id('{"id":"1c9b"}')
    '1c9b'
    """
    return json.loads(metadata)["id"]


def parse_ends(text: str) -> dict[TopicPartition, int]:
    """Where the batch's input from Kafka ends; other sources say nothing that a group could commit.

    >>> parse_ends('v1\\n{}\\n{"orders":{"0":5,"1":7}}\\n{"logOffset":3}\\n-')
    {TopicPartition(topic='orders', partition=0): 5, TopicPartition(topic='orders', partition=1): 7}
    >>> parse_ends('v2\\n{}\\n0:{"orders":{"0":5}}')
    {TopicPartition(topic='orders', partition=0): 5}
    """
    version, _, *sources = text.split("\n")
    ends: dict[TopicPartition, int] = {}
    for source in sources:
        value = source if version == "v1" else _NAMED.sub("", source, count=1)
        for named, offset in _kafka_ends(value).items():
            # Two sources may read one topic; the group's position is what both have read.
            ends[named] = min(offset, ends.get(named, offset))
    return ends


def _kafka_ends(value: str) -> dict[TopicPartition, int]:
    try:
        topics = json.loads(value)
    except json.JSONDecodeError:
        return {}
    if not isinstance(topics, dict):
        return {}
    ends: dict[TopicPartition, int] = {}
    for topic, partitions in topics.items():
        if not isinstance(partitions, dict):
            return {}
        for partition, offset in partitions.items():
            if not str(partition).isdecimal() or not isinstance(offset, int) or offset < 0:
                return {}
            ends[TopicPartition(topic, int(partition))] = offset
    return ends
