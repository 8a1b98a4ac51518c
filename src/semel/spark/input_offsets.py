"""What a micro-batch consists of, from Spark's own offset log: which query it belongs to and where its input ends.

Spark writes `offsets/N` before batch N runs for the first time and never again, so the file is the same in a replay.
Its first line is a version, its second holds settings, and each further one is the end of a source: JSON, `-` for
nothing, with `name:` in front in version 2. Kafka's sources, Spark's and Semel's, write
`{"topic": {"partition": offset}}`; Semel's adds a note for itself (`source_offsets.split_note`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from semel.client.partitions import TopicPartition
from semel.errors import ConfigError
from semel.spark.checkpoint import CheckpointFiles, ConnectFiles, HadoopFiles, java_class
from semel.spark.source_offsets import NOTE_PREFIX, Offsets, split_note, to_checkpoint

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_NAMED = re.compile(r"[^{}\[\]\"]*?:(?=[\[{\"\-0-9])")
_TEMPORARY: Final = re.compile(r"/temporary-[0-9a-f-]{36}/?$")
"""Spark's name for the checkpoint of a query that was given none."""
_THIS_PROCESS: Final = uuid4().hex
"""Through Spark Connect each run of a query has a process of its own, and does not tell its id."""


@dataclass(frozen=True, slots=True)
class InputEnd:
    """Where a batch's input from one Kafka source ends."""

    topics: dict[str, dict[str, int]]
    """As in Spark's checkpoint: topic, partition, offset."""
    cluster: str | None = None
    """The id of the source's cluster, if it is known."""
    start: dict[str, dict[str, int]] | None = None
    """Where the query's first batch began, if the source tells."""

    @property
    def offsets(self) -> Offsets:
        return split_note(self.topics)[0]


@dataclass(frozen=True, slots=True)
class Input:
    """The identity of a micro-batch, and its input."""

    query: str
    """The id in the checkpoint."""
    run: str
    """The id of this run of the query. Spark replays a batch only in another run."""
    is_first: bool
    """Whether it may be the first batch of this run, which alone can be a replay."""
    digest: str
    ends: list[InputEnd]
    checkpoint: str
    files: CheckpointFiles = field(compare=False)
    earlier: Callable[[], str] = field(compare=False)
    """The offset log of the batch before this one, from batch 1 on."""

    @property
    def is_temporary(self) -> bool:
        """Whether the query was given no checkpoint, so that Spark made one that no restart will find."""
        return _TEMPORARY.search(self.checkpoint) is not None


def read_input(df: DataFrame, batch_id: int, checkpoint: str | None) -> Input:
    """The input of the micro-batch that `foreachBatch` has just handed over."""
    spark: Any = df.sparkSession
    if not hasattr(spark, "_jsparkSession"):
        return _through_connect(spark, batch_id, checkpoint)

    files = HadoopFiles(spark)
    query = running_query(spark)
    if query is None and checkpoint is not None:
        query = _active_query(spark, query_id_in(files, checkpoint))
    if query is None:
        raise ConfigError(
            "This is not called by a streaming query, so there is no checkpoint that names the batch; nothing was "
            "written. Use it with writeStream.foreachBatch, and in the thread that foreachBatch calls. For a "
            "DataFrame that does not stream use semel.write_batch."
        )
    root, query_id, run = query.resolvedCheckpointRoot(), query.id().toString(), query.runId().toString()
    return input_of(files, root, batch_id, query_id, run, query.lastProgress() is None)


def _through_connect(spark: Any, batch_id: int, checkpoint: str | None) -> Input:
    if checkpoint is None:
        raise ConfigError(
            "Through Spark Connect the sink cannot see the query's checkpoint, and without it a replay cannot be "
            "told from a new batch; nothing was written. Pass checkpoint= to the sink, the same as in "
            "option('checkpointLocation', ...)."
        )

    files = ConnectFiles(spark)
    query_id = query_id_in(files, checkpoint)
    # The query itself cannot be seen from here. But the batch that calls is the newest one, and not completed.
    if files.read(f"{checkpoint}/commits/{batch_id}") is not None or (
        files.read(f"{checkpoint}/offsets/{batch_id + 1}") is not None
    ):
        raise ConfigError(
            f"checkpoint={checkpoint!r} has completed batch {batch_id} already, so it is not the checkpoint of the "
            "query that called the sink; nothing was written. Pass the path of option('checkpointLocation', ...)."
        )
    return input_of(files, checkpoint, batch_id, query_id, _THIS_PROCESS, is_first=True)


def input_of(files: CheckpointFiles, root: str, batch_id: int, query: str, run: str, is_first: bool) -> Input:
    """The input of a micro-batch, from the checkpoint at `root`."""

    def read(batch: int) -> str:
        text = files.read(f"{root}/offsets/{batch}")
        if text is None:
            raise ConfigError(
                f"The checkpoint {root} has no offset log of batch {batch}, so this cannot be the query's own; nothing "
                "was written. Pass the same path as in option('checkpointLocation', ...)."
            )
        return text

    text = read(batch_id)
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    return Input(query, run, is_first, digest, parse_ends(text), root, files, lambda: read(batch_id - 1))


def query_id_in(files: CheckpointFiles, checkpoint: str) -> str:
    """The id of the query whose checkpoint it is."""
    metadata = files.read(f"{checkpoint}/metadata")
    if metadata is None:
        raise ConfigError(
            f"There is no checkpoint at {checkpoint}; nothing was written. Pass the same path as in "
            "option('checkpointLocation', ...)."
        )
    return read_query_id(metadata)


def running_query(spark: Any) -> Any | None:
    """Java's own object of the query whose thread has called us, if one has."""
    query_id = spark.sparkContext.getLocalProperty("sql.streaming.queryId")
    return None if query_id is None else _active_query(spark, query_id)


def _active_query(spark: Any, query_id: str) -> Any | None:
    uuid = java_class(spark, "java.util.UUID").fromString(query_id)
    return spark._jsparkSession.sharedState().activeStreamingQueries().get(uuid)


def read_query_id(metadata: str) -> str:
    """
    >>> read_query_id('{"id":"1c9b"}')
    '1c9b'
    """
    return json.loads(metadata)["id"]


def parse_ends(text: str) -> list[InputEnd]:
    """Where the batch's input from each Kafka source ends; other sources say nothing that a group could commit.

    >>> parse_ends('v1\\n{}\\n{"orders":{"0":5,"1":7}}\\n{"logOffset":3}\\n-')
    [InputEnd(topics={'orders': {'0': 5, '1': 7}}, cluster=None, start=None)]
    >>> parse_ends('v2\\n{}\\n0:{"orders":{"0":5}}')[0].offsets
    {TopicPartition(topic='orders', partition=0): 5}
    """
    version, _, *sources = text.split("\n")
    values = [source if version == "v1" else _NAMED.sub("", source, count=1) for source in sources]
    return [end for value in values if (end := _kafka_end(value)) is not None]


def _kafka_end(value: str) -> InputEnd | None:
    try:
        topics = json.loads(value)
    except json.JSONDecodeError:
        return None
    if not isinstance(topics, dict) or not all(_is_kafka(name, offsets) for name, offsets in topics.items()):
        return None
    offsets, note = split_note(topics)
    if not offsets:
        return None
    if note is None:
        return InputEnd(to_checkpoint(offsets))
    return InputEnd(to_checkpoint(offsets), note.cluster, to_checkpoint(note.start))


def _is_kafka(topic: str, partitions: object) -> bool:
    if topic.startswith(NOTE_PREFIX):
        return True
    return isinstance(partitions, dict) and all(
        str(partition).isdecimal() and isinstance(offset, int) and offset >= 0
        for partition, offset in partitions.items()
    )


def merge_ends(ends: list[InputEnd]) -> dict[TopicPartition, int]:
    """One position for each partition. Two sources may read one topic; the group's position is what both have read.

    >>> merge_ends([InputEnd({"a": {"0": 5}}), InputEnd({"a": {"0": 3}})])
    {TopicPartition(topic='a', partition=0): 3}
    """
    merged: dict[TopicPartition, int] = {}
    for end in ends:
        for named, offset in end.offsets.items():
            merged[named] = min(offset, merged.get(named, offset))
    return merged
