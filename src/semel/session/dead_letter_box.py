"""A session's dead letters: where they go, how many there were, and how many there may be."""

from __future__ import annotations

from typing import Final, NamedTuple

from semel.client.cluster import Cluster
from semel.client.config import ProducerConfig
from semel.client.dead_letter_size import SHORT_ERROR_MAX, fit_letter, letter_bytes, letter_bytes_max
from semel.client.dead_letter_topic import check_dead_letter_rules
from semel.client.dead_letters import dead_letter_headers, describe_error, too_many_dead_letters
from semel.client.topic_rules import TopicLookup
from semel.errors import ConfigError, InvalidState, RecordFailed
from semel.session.transaction import Headers, Row

_BYTES_MAX: Final = 1_048_576
"""Kafka's default for the largest batch, until the topic was asked."""


class DeadLetter(NamedTuple):
    """The record to write for one that failed."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers
    fits: bool
    """Whether those that were taken before and this one may go in one batch; if not, the former must leave first."""


class DeadLetterBox:
    """
    >>> box = DeadLetterBox("failed", 1, ["orders"])
    >>> box.take(Row("orders", 0, 17, 0, None, b"tea"), ValueError("no amount")).topic
    'failed'
    >>> box.end(committed=True)
    >>> box.committed_count
    1
    """

    def __init__(self, topic: str | None, limit: int | None, inputs: tuple[str, ...] | list[str]) -> None:
        if topic is not None and topic in inputs:
            raise ConfigError(
                f"dead_letter={topic!r} is one of the topics that are read, so a record that fails would come back for "
                "ever. Name another topic."
            )
        if limit is not None and limit < 0:
            raise ConfigError(f"dead_letter_max={limit} must not be negative; None is no limit.")
        self.topic = topic
        self.committed_count = 0
        self._limit = limit
        self._pending = 0
        self._bytes_max = _BYTES_MAX
        self._gathered_bytes = 0

    def take(self, row: Row, error: BaseException | str, more: Headers = ()) -> DeadLetter:
        """Count one more; raises if that is one too many. A record too large for the topic is cut.

        `more` are headers to add, which are never cut.
        """
        if self.topic is None:
            raise InvalidState('This session has no topic for dead letters: write dead_letter="topic".')
        if self._limit is not None and self.committed_count + self._pending >= self._limit:
            last = error if isinstance(error, str) else describe_error(error)
            raise too_many_dead_letters(self.topic, self._limit, f"{last} ({origin(row)})")
        self._pending += 1
        text = error if isinstance(error, str) else describe_error(error)
        where = (row.topic, row.partition, row.offset)
        ours = [*dead_letter_headers(*where, text), *more]
        if letter_bytes(row.key, row.value, [*row.headers, *ours]) > self._bytes_max:
            ours = [*dead_letter_headers(*where, text[:SHORT_ERROR_MAX]), *more]
        letter = fit_letter(row.key, row.value, row.headers, ours, self._bytes_max)
        size = letter_bytes(*letter)
        fits = self._gathered_bytes + size <= self._bytes_max
        self._gathered_bytes = size + (self._gathered_bytes if fits else 0)
        return DeadLetter(self.topic, *letter, fits)

    @property
    def pending_count(self) -> int:
        """How many the open transaction has."""
        return self._pending

    def end(self, *, committed: bool) -> None:
        """The transaction that they were in has ended."""
        if committed:
            self.committed_count += self._pending
        self._pending = self._gathered_bytes = 0

    def check_writable(self, cluster: Cluster, config: ProducerConfig) -> None:
        """Raise at the start, and not at the first failure, if dead letters cannot be written to the topic."""
        if self.topic is None:
            return
        rules = TopicLookup(lambda: cluster).rules(self.topic)
        check_dead_letter_rules(self.topic, rules, config, "Nothing was read.")
        self._bytes_max = letter_bytes_max(rules, config)

    def refused(self, row: Row, error: BaseException) -> RecordFailed:
        """The error for a dead letter that could not be written itself."""
        return RecordFailed(
            f"The dead letter of {origin(row)} cannot be written to topic {self.topic!r}: {describe_error(error)} The "
            "transaction was aborted, so its records come again after a restart. Mend the topic, or pass another "
            "dead_letter=.",
            topic=row.topic,
            partition=row.partition,
            offset=row.offset,
        )


def origin(row: Row) -> str:
    """
    >>> origin(Row("orders", 2, 17, 0, None, None))
    'orders-2 at offset 17'
    """
    return f"{row.topic}-{row.partition} at offset {row.offset}"
