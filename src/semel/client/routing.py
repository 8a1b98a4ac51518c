"""From tables to encoded batches, each for one partition. No IO."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from semel.client.config import ProducerConfig
from semel.errors import ConfigError, RecordTooLarge
from semel.records import EncodedBatch, StickyPartitioner, encode_table, split_by_partition


def encode_for_partitions(
    topic: str | None,
    table: pa.Table,
    partition: int | None,
    *,
    partition_count: Callable[[str], int],
    sticky: StickyPartitioner,
    config: ProducerConfig,
    now_ms: int,
) -> Iterator[tuple[str, int, EncodedBatch]]:
    """The table's rows as batches of at most `batch.size`, with the topic and partition of each."""
    for name, rows in by_topic(topic, table):
        count = partition_count(name)
        for index, part in split_by_partition(rows, _partitions(name, rows, partition, count, sticky)):
            for batch in encode_rows(part, config, now_ms):
                yield name, index, batch


def encode_rows(table: pa.Table, config: ProducerConfig, now_ms: int) -> list[EncodedBatch]:
    """The rows of one partition as batches of `batch.size`, or of `max.request.size` if a record needs it.

    In Kafka's own client the former is how much to gather and the latter what a record may take, so a record above
    `batch.size` is nothing unusual.
    """

    def encode(batch_bytes_max: int) -> list[EncodedBatch]:
        return encode_table(
            table,
            compression=config.compression_type,
            compression_level=config.compression_level,
            batch_bytes_max=batch_bytes_max,
            default_timestamp_ms=now_ms,
        )

    with suppress(RecordTooLarge):
        return encode(config.batch_bytes)
    return encode(config.request_bytes_max)


def checked_table(table: Any) -> pa.Table:
    """The table, or what to write instead of what was given."""
    if isinstance(table, pa.Table):
        return table
    if isinstance(table, pa.RecordBatch):
        return pa.Table.from_batches([table])
    name = type(table).__name__
    advice = {
        "dict": "write pa.table({...})",
        "list": "write pa.Table.from_pylist([...])",
        "DataFrame": "write pa.Table.from_pandas(...)",
    }.get(name, "make one of it, or use send for a single record")
    raise ConfigError(f"send_table takes a pyarrow.Table and was given a {name}: {advice}. Nothing was sent.")


def by_topic(topic: str | None, table: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """The rows of each topic, in their order."""
    if "value" not in table.column_names:
        raise ConfigError(f"The table has no column 'value'; it has {', '.join(table.column_names)}. Nothing was sent.")
    if topic is not None:
        yield topic, table
        return
    if "topic" not in table.column_names:
        raise ConfigError("No topic was given and the table has no column 'topic'; nothing was sent.")
    topics = table.column("topic").combine_chunks()
    if topics.null_count:
        raise ConfigError(f"{topics.null_count} rows have no topic; nothing was sent.")
    encoded = topics.cast(pa.string()).dictionary_encode()
    codes = np.asarray(encoded.indices, np.int32)
    for code, rows in split_by_partition(table, codes):
        yield encoded.dictionary[code].as_py(), rows


def _partitions(
    topic: str, table: pa.Table, partition: int | None, count: int, sticky: StickyPartitioner
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """A partition that was asked for wins over the key's."""
    if partition is not None:
        chosen = np.full(table.num_rows, partition, np.int32)
    elif "partition" in table.column_names:
        asked = table.column("partition")
        if asked.null_count == table.num_rows:
            return sticky.assign(table, count)
        chosen = pc.fill_null(asked.cast(pa.int32()), -1).to_numpy()
        if asked.null_count:
            free = chosen < 0
            chosen = chosen.copy()
            chosen[free] = sticky.assign(table.filter(pa.array(free)), count)
    else:
        return sticky.assign(table, count)
    wrong = chosen[(chosen < 0) | (chosen >= count)]
    if len(wrong):
        raise wrong_partition(topic, int(wrong[0]), count)
    return chosen


def wrong_partition(
    topic: str, partition: int, count: int, meaning: str = "nothing of this table was sent"
) -> ConfigError:
    numbers = "0" if count == 1 else f"0 to {count - 1}"
    return ConfigError(f"Partition {partition} was asked for and topic {topic!r} has {numbers}; {meaning}.")
