"""Dead letters of the sink, the driver's side: the topic is checked, tasks get their terms, and the rows are counted.

Rows that cannot be written go to a topic of their own, in the transaction of the others.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from semel.client.cluster import Cluster
from semel.client.dead_letter_topic import check_dead_letter_rules, check_usable
from semel.client.topic_rules import TopicLookup, TopicRules
from semel.errors import ConfigError, KafkaError, TooManyDeadLetters
from semel.spark.blobs import Manifest
from semel.spark.options import SinkOptions
from semel.spark.progress import log_event

_SO_FAR: Final = "Nothing was computed or written."


@dataclass(frozen=True, slots=True)
class DeadLetterTerms:
    """What the tasks of one micro-batch or job need to know to write dead letters."""

    topic: str
    limit: int
    pipeline: str
    batch_id: int | None
    job_id: str | None
    rules: Mapping[str, TopicRules]
    """Of the dead-letter topic, and of the outputs that the user's program names."""

    @classmethod
    def from_json(cls, read: Mapping[str, Any] | None) -> DeadLetterTerms | None:
        """From what `dataclasses.asdict` made."""
        if read is None:
            return None
        return cls(**{**read, "rules": {topic: TopicRules(**rules) for topic, rules in read["rules"].items()}})

    @property
    def what(self) -> str:
        named = f"job {self.job_id!r}" if self.batch_id is None else f"batch {self.batch_id}"
        return f"{named} of pipeline {self.pipeline!r}"


def make_terms(
    options: SinkOptions, cluster: Cluster, topics: Collection[str], batch_id: int | None, job_id: str | None
) -> DeadLetterTerms | None:
    """The terms of one micro-batch or job; None without `dead_letter`.

    `topics` are the outputs that the user's program names, other than those that rows name. What is wrong with such a
    topic is an error: it is a mistake in the program, and no row is at fault.
    """
    if options.dead_letter is None:
        return None
    lookup = TopicLookup(lambda: cluster)
    lookup.learn([options.dead_letter, *topics])
    rules = {options.dead_letter: check_dead_letter_topic(options, cluster, None, lookup)}
    for topic in topics:
        _check_apart(options.dead_letter, topic)
        rules[topic] = lookup.rules(topic)
        check_usable(rules[topic], "Rows", "topic=", _SO_FAR)
    return DeadLetterTerms(options.dead_letter, options.dead_letter_max, options.name, batch_id, job_id, rules)


def check_dead_letter_topic(
    options: SinkOptions, cluster: Cluster, topic: str | None, lookup: TopicLookup | None = None
) -> TopicRules:
    """What the dead-letter topic takes; raises if dead letters cannot be written to it."""
    name = options.dead_letter
    assert name is not None, "there is a dead-letter topic to check"
    _check_apart(name, topic)
    rules = (lookup or TopicLookup(lambda: cluster)).rules(name)
    check_dead_letter_rules(name, rules, options.producer_config, _SO_FAR)
    return rules


def _check_apart(dead_letter: str, topic: str | None) -> None:
    if dead_letter == topic:
        raise ConfigError(
            f"dead_letter={dead_letter!r} is an output topic itself; nothing was computed or written. Dead letters "
            "need a topic of their own."
        )


def check_count(manifest: Manifest, terms: DeadLetterTerms | None) -> None:
    """Raise `TooManyDeadLetters` if all tasks together have more of them than there may be; log them otherwise."""
    if terms is None or not manifest.dead_letters:
        return
    example = manifest.example or ""
    if manifest.dead_letters > terms.limit:
        raise too_many(terms, str(manifest.dead_letters), example)
    log_event(
        "rows cannot be written and become dead letters",
        logging.WARNING,
        pipeline=terms.pipeline,
        batch_id=terms.batch_id,
        job_id=terms.job_id,
        dead_letters=manifest.dead_letters,
        dead_letter_topic=terms.topic,
        example=example,
    )


def too_many(terms: DeadLetterTerms, count: str, example: str) -> TooManyDeadLetters:
    """`count` is a number, or says that it is the least there are."""
    return TooManyDeadLetters(
        f"{count} rows of {terms.what} cannot be written, more than dead_letter_max={terms.limit}. No transaction was "
        f"opened, and nothing of it was written, dead letters neither. One of them: {example} Mend the cause and start "
        "again, or raise dead_letter_max if so many are expected."
    )


def refused_for_size(error: KafkaError, options: SinkOptions) -> KafkaError:
    """The error of a broker that refused a batch, with what the user can do about the row in it."""
    if options.dead_letter is None:
        advice = "Or pass dead_letter='a-topic' to write such rows there and go on."
    else:
        advice = (
            "The sink did not know this limit, or it was lowered a moment ago: grant DescribeConfigs on the topic, and "
            "such rows become dead letters."
        )
    return KafkaError(f"{error} The transaction is aborted and nothing of it will be seen. {advice}", code=error.code)
