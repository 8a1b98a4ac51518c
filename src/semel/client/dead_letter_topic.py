"""Whether dead letters can be written to their topic, found out before anything is read or computed."""

from __future__ import annotations

from semel.client.config import ProducerConfig
from semel.client.dead_letter_size import BYTES_MIN, letter_bytes_max
from semel.client.topic_rules import TopicRules
from semel.errors import ConfigError, NotAuthorized, UnknownTopic
from semel.wire import ErrorCode


def check_dead_letter_rules(topic: str, rules: TopicRules, config: ProducerConfig, so_far: str) -> None:
    """Raise if dead letters cannot be written to `topic`. `so_far` says what was done, as a sentence."""
    check_usable(rules, "Dead letters", "dead_letter=", so_far)
    if letter_bytes_max(rules, config) < BYTES_MIN:
        raise ConfigError(
            f"Dead letters need room for {BYTES_MIN} bytes, and max.message.bytes of topic {topic!r} "
            f"({rules.bytes_max}) or max.request.size ({config.request_bytes_max}) allows less. {so_far} Raise it."
        )
    if rules.needs_key:
        raise ConfigError(
            f"The dead-letter topic {topic!r} is compacted, so dead letters with the same key would replace each "
            f"other. {so_far} Set its cleanup.policy to delete, or pass another dead_letter=."
        )


def check_usable(rules: TopicRules, what: str, option: str, so_far: str) -> None:
    """Raise if the topic is not there or may not be written to."""
    if rules.problem is None:
        return
    kind, code = UnknownTopic, ErrorCode.unknown_topic_or_partition
    if rules.is_forbidden:
        kind, code = NotAuthorized, ErrorCode.topic_authorization_failed
    raise kind(
        f"{what} cannot be written: {rules.problem} {so_far} Create the topic and grant WRITE on it, or pass another "
        f"{option}.",
        code=code,
    )
