"""Rows that cannot be written, found before they are encoded, by a few passes over whole columns."""
# pyarrow comes without types, so what it returns is unknown to the checker.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from semel.client.config import INT32_MAX, ProducerConfig
from semel.client.topic_rules import TopicLookup, TopicRules
from semel.records import HEADER_BYTES, encode_table
from semel.records.schema import RecordColumns, as_binary, normalise_columns

_RECORD_BYTES_MAX: Final = 24
"""What a record without headers takes besides its key and value, at most."""
_HEADER_BYTES_MAX: Final = 10
"""What a header takes besides its key and value, at most."""

Mask = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]


class BadRow(NamedTuple):
    """A row of a table that cannot be written, and why, as a sentence."""

    row: int
    reason: str


def find_bad_rows(table: pa.Table, topic: str | None, lookup: TopicLookup, config: ProducerConfig) -> list[BadRow]:
    """The rows that a broker would refuse or that cannot be encoded, in their order.

    `topic` is where all rows go; without it each row names its own in the column `topic`.
    """
    columns = normalise_columns(table)
    bytes_most = batch_bytes_most(columns)
    largest = int(bytes_most.max(initial=0))
    reasons: dict[int, str] = {}
    for name, rows in _rows_by_topic(table, topic, lookup):
        if name is None:
            reasons.update(dict.fromkeys(rows.tolist(), "Its topic is null."))
            continue
        rules = lookup.rules(name)
        if rules.problem is not None:
            reasons.update(dict.fromkeys(rows.tolist(), rules.problem))
            continue
        found = [*_wrong_partitions(table, name, rows, rules.partitions), *_wrong_headers(columns, rows)]
        if rules.needs_key:
            found += _keyless(columns, name, rows)
        for row, reason in found:
            reasons.setdefault(row, reason)
        limit = min(rules.sure_bytes(config), config.request_bytes_max)
        for row in rows[bytes_most[rows] > limit].tolist() if largest > limit else []:
            if row not in reasons and (reason := _too_large(table.slice(row, 1), name, rules, config)) is not None:
                reasons[row] = reason
    return [BadRow(row, reasons[row]) for row in sorted(reasons)]


def _rows_by_topic(
    table: pa.Table, topic: str | None, lookup: TopicLookup
) -> Iterator[tuple[str | None, npt.NDArray[np.intp]]]:
    """The numbers of the rows of each topic; those without a topic under None."""
    if topic is not None:
        yield topic, np.arange(table.num_rows)
        return
    # Spark's strings may hold any bytes.
    named = as_binary("topic", table.column("topic")).combine_chunks().dictionary_encode()
    names: list[str] = [value.decode("utf-8", "backslashreplace") for value in named.dictionary.to_pylist()]
    lookup.learn(names)
    codes = pc.fill_null(named.indices, -1).to_numpy(zero_copy_only=False)
    if len(names) == 1 and not named.null_count:
        yield names[0], np.arange(table.num_rows)
        return
    order = np.argsort(codes, kind="stable")
    present, firsts = np.unique(codes[order], return_index=True)
    for code, rows in zip(present.tolist(), np.split(order, firsts[1:]), strict=True):
        yield (None if code < 0 else names[code]), rows


def _wrong_partitions(
    table: pa.Table, topic: str, rows: npt.NDArray[np.intp], partitions: int
) -> Iterator[tuple[int, str]]:
    if "partition" not in table.column_names:
        return
    asked = table.column("partition")
    if asked.null_count == len(asked):
        return
    chosen = pc.fill_null(asked.cast(pa.int64()), 0).to_numpy()[rows]
    is_wrong: Mask = (chosen < 0) | (chosen >= partitions)
    for row, partition in zip(rows[is_wrong].tolist(), chosen[is_wrong].tolist(), strict=True):
        yield row, f"Partition {partition} was asked for and topic {topic!r} has {partitions}."


def _wrong_headers(columns: RecordColumns, rows: npt.NDArray[np.intp]) -> Iterator[tuple[int, str]]:
    if columns.headers is None:
        return
    entries = columns.headers.combine_chunks()
    counts, flat = _counts(entries), entries.flatten()
    keys = flat.field("key")
    if not (flat.null_count or keys.null_count):
        return
    wrong = flat.is_null().to_numpy(zero_copy_only=False) | keys.is_null().to_numpy(zero_copy_only=False)
    is_wrong = np.zeros(len(counts), np.bool_)
    is_wrong[np.repeat(np.arange(len(counts)), counts)[wrong]] = True
    for row in rows[is_wrong[rows]].tolist():
        yield row, "It has a header without a key, which Kafka does not allow."


def _keyless(columns: RecordColumns, topic: str, rows: npt.NDArray[np.intp]) -> Iterator[tuple[int, str]]:
    is_null = np.ones(columns.row_count, np.bool_)
    if columns.key is not None:
        if not columns.key.null_count:
            return
        is_null = columns.key.is_null().to_numpy()
    for row in rows[is_null[rows]].tolist():
        yield row, f"Topic {topic!r} is compacted, so each record needs a key, and this one's is null."


# -- size ------------------------------------------------------------------------------------------------------------


def batch_bytes_most(columns: RecordColumns) -> Integers:
    """How large a batch of each row alone can be at most before compression, a few bytes above what it takes."""
    total = np.full(columns.row_count, HEADER_BYTES + _RECORD_BYTES_MAX, np.int64)
    for column in (columns.key, columns.value):
        if column is not None:
            total += _lengths(column)
    if columns.headers is not None and columns.headers.null_count < columns.row_count:
        entries = columns.headers.combine_chunks()
        counts, flat = _counts(entries), entries.flatten()
        ends = np.zeros(len(flat) + 1, np.int64)
        np.cumsum(_HEADER_BYTES_MAX + _lengths(flat.field("key")) + _lengths(flat.field("value")), out=ends[1:])
        last = np.cumsum(counts)
        total += ends[last] - ends[last - counts]
    return total


def _too_large(row: pa.Table, topic: str, rules: TopicRules, config: ProducerConfig) -> str | None:
    """Why this one row fits into no batch; None if it does."""
    plain = _bytes_alone(row, "none", None)
    if plain > config.request_bytes_max:
        return f"It takes {plain} bytes, more than max.request.size={config.request_bytes_max}."
    sent = plain
    if config.compression_type != "none":
        packed = _bytes_alone(row, config.compression_type, config.compression_level)
        sent = max(packed, plain) if rules.is_repacked else packed
    if sent > rules.bytes_max:
        return f"It takes {sent} bytes, more than max.message.bytes={rules.bytes_max} of topic {topic!r}."
    return None


def _bytes_alone(row: pa.Table, compression: str, level: int | None) -> int:
    batches = encode_table(
        row,
        compression=compression,
        compression_level=level,
        batch_bytes_max=INT32_MAX,
        default_timestamp_ms=0,
    )
    return len(batches[0].data)


def _lengths(column: pa.Array | pa.ChunkedArray) -> Integers:
    lengths = pc.call_function("binary_length", [column])
    return (pc.fill_null(lengths, 0) if lengths.null_count else lengths).to_numpy().astype(np.int64, copy=False)


def _counts(headers: pa.ListArray) -> Integers:
    return pc.fill_null(headers.value_lengths(), 0).to_numpy().astype(np.int64)
