"""Good rows apart from bad ones, in the tasks: the former become batches for their topics, the latter dead letters."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa

from semel.client.cluster import Cluster
from semel.client.config import ProducerConfig
from semel.client.dead_letter_size import letter_bytes_max
from semel.client.routing import by_topic, encode_for_partitions
from semel.client.topic_rules import TopicLookup, TopicRules
from semel.errors import KafkaError, NotAuthorized, SemelError, UnknownTopic
from semel.records import EncodedBatch, StickyPartitioner
from semel.records.schema import normalise_columns
from semel.spark.bad_rows import BadRow, batch_bytes_most, find_bad_rows
from semel.spark.dead_letter_record import Row, dead_letter, read_row, show
from semel.spark.dead_letters import DeadLetterTerms, too_many

_HEADERS: Final = pa.list_(pa.struct([("key", pa.binary()), ("value", pa.binary())]))
_LETTERS: Final = pa.schema([("key", pa.binary()), ("value", pa.binary()), ("headers", _HEADERS)])


class Sorter:
    """Encodes the tables of one task: good rows for their topics, and the others as dead letters."""

    def __init__(
        self,
        terms: DeadLetterTerms,
        topic: str | None,
        find_cluster: Callable[[], Cluster],
        config: ProducerConfig,
        sticky: StickyPartitioner,
        now_ms: int,
        seed: str,
    ) -> None:
        self.terms = terms
        self.example: str | None = None
        """What is wrong with the first bad row."""
        self._topic = topic
        # Readers of the dead-letter topic could not tell a row that names it from a dead letter.
        barred = {terms.topic: TopicRules(problem="It names the dead-letter topic.")}
        self._lookup = TopicLookup(find_cluster, {**terms.rules, **barred})
        self._config = config
        self._sticky = sticky
        self._letters_sticky = StickyPartitioner(random.Random(f"{seed}-dead"), batch_bytes=config.batch_bytes)
        self._now_ms = now_ms
        self._count = 0

    def encode(self, table: pa.Table) -> Iterator[tuple[str, int, EncodedBatch]]:
        """Batches with their topics and partitions; those for `terms.topic` hold dead letters.

        Raises `TooManyDeadLetters` as soon as this task alone has more than there may be in all.
        """
        bad = find_bad_rows(table, self._topic, self._lookup, self._config)
        if not bad:
            yield from self._encode_good(table)
            return
        self._count += len(bad)
        self.example = self.example or show(table, bad[0], self._topic)
        if self._count > self.terms.limit:
            raise too_many(self.terms, f"At least {self._count}", self.example)
        is_good = np.ones(table.num_rows, np.bool_)
        is_good[[row for row, _ in bad]] = False
        yield from self._encode_good(table.filter(pa.array(is_good)))
        yield from self._encode_letters(table, bad)

    def _encode_good(self, table: pa.Table) -> Iterator[tuple[str, int, EncodedBatch]]:
        if not table.num_rows:
            return
        for name, rows in by_topic(self._topic, table):
            rules = self._lookup.rules(name)
            for part, config in _runs(rows, rules, self._config):
                yield from self._encode(name, part, rules, config, self._sticky)

    def _encode_letters(self, table: pa.Table, bad: list[BadRow]) -> Iterator[tuple[str, int, EncodedBatch]]:
        rules = self.terms.rules[self.terms.topic]
        bytes_max = letter_bytes_max(rules, self._config)
        rows = [dead_letter(row, reason, self.terms, self._now_ms, bytes_max) for row, reason in self._read(table, bad)]
        config = _bounded(self._config, bytes_max)
        letters = pa.Table.from_pylist(rows, schema=_LETTERS)
        yield from self._encode(self.terms.topic, letters, rules, config, self._letters_sticky)

    def _encode(
        self, topic: str, rows: pa.Table, rules: TopicRules, config: ProducerConfig, sticky: StickyPartitioner
    ) -> Iterator[tuple[str, int, EncodedBatch]]:
        return encode_for_partitions(
            topic,
            rows,
            None,
            partition_count=lambda _: rules.partitions,
            sticky=sticky,
            config=config,
            now_ms=self._now_ms,
        )

    def _read(self, table: pa.Table, bad: list[BadRow]) -> Iterator[tuple[Row, str]]:
        for number, reason in bad:
            yield read_row(table, number, self._topic), reason


def _runs(rows: pa.Table, rules: TopicRules, config: ProducerConfig) -> Iterator[tuple[pa.Table, ProducerConfig]]:
    """The rows in runs, such that no batch of any is larger than the topic takes.

    A row that fits only because it can be compressed must be alone in its batch.
    """
    sure = rules.sure_bytes(config)
    if sure >= config.request_bytes_max:
        yield rows, config
        return
    bounded = _bounded(config, sure)
    first = 0
    for row in np.flatnonzero(batch_bytes_most(normalise_columns(rows)) > sure).tolist():
        if row > first:
            yield rows.slice(first, row - first), bounded
        yield rows.slice(row, 1), config
        first = row + 1
    if first < rows.num_rows:
        yield rows.slice(first), bounded


def _bounded(config: ProducerConfig, bytes_max: int) -> ProducerConfig:
    return replace(
        config,
        batch_bytes=max(1, min(config.batch_bytes, bytes_max)),
        request_bytes_max=max(1, min(config.request_bytes_max, bytes_max)),
    )


def explain(
    error: SemelError, table: pa.Table, topic: str | None, lookup: TopicLookup, config: ProducerConfig
) -> SemelError:
    """The error of a table with a bad row, with that row's key and topic; any other error as it is."""
    if not isinstance(error, ValueError | UnknownTopic | NotAuthorized):
        return error
    try:
        bad = find_bad_rows(table, topic, lookup, config)
    except SemelError:
        return error  # the first one matters more
    if not bad:
        return error
    sentence = (
        f"A row cannot be written, so nothing of this micro-batch or job was written: {show(table, bad[0], topic)} "
        "Mend the row, or pass dead_letter='a-topic' to write such rows there and go on."
    )
    return type(error)(sentence, code=error.code) if isinstance(error, KafkaError) else type(error)(sentence)
