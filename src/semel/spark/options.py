"""What a sink was told to do, checked as far as that goes without a broker. It can be pickled, as Spark needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any, Final, Literal, get_args

from semel.client.config import ProducerConfig
from semel.client.dead_letters import DEAD_LETTER_MAX
from semel.client.settings import parse_config
from semel.errors import ConfigError

DEFAULT_LEDGER: Final = "semel-ledger"
_TRANSACTION_TIMEOUT_MS: Final = 300_000
"""Longer than a producer's own default: a large micro-batch takes its time, and a restart ends what a crash left."""

Resume = Literal["committed", "checkpoint"]
"""How a pipeline goes on with a checkpoint that the ledger does not know."""

_OURS: Final = {
    "transactional.id": "the sink names its transactions after the pipeline, so that a restart finds them: use name=",
    "enable.idempotence": "a transaction always is",
    "acks": "a transaction always waits for every replica",
}


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The options of one pipeline."""

    name: str
    settings: Mapping[str, object] = field(repr=False)
    topic: str | None
    group: str | None
    """None commits no input offsets."""
    is_group_given: bool
    ledger: str
    writers: int | None
    attempts: int
    checkpoint: str | None = None
    dead_letter: str | None = None
    dead_letter_max: int = DEAD_LETTER_MAX
    resume: Resume | None = None

    @property
    def producer_config(self) -> ProducerConfig:
        return parse_config(self.settings).producer


def make_options(
    *,
    name: str,
    bootstrap: str,
    topic: str | None,
    settings: Mapping[str, object] | None,
    more_settings: Mapping[str, Any],
    group: str | EllipsisType | None = ...,
    ledger: str = DEFAULT_LEDGER,
    writers: int | None = None,
    attempts: int = 3,
    checkpoint: str | None = None,
    dead_letter: str | None = None,
    dead_letter_max: int = DEAD_LETTER_MAX,
    resume: Resume | None = None,
) -> SinkOptions:
    """Options from what a user wrote; a mistake raises `ConfigError` before anything happens.

    >>> make_options(name="a", bootstrap="h:1", topic="t", settings={"kafka.linger.ms": 5}, more_settings={}).name
    'a'
    """
    if not name or "/" in name:
        raise ConfigError(
            f"name={name!r} cannot name a pipeline: it must not be empty and must not hold '/'. It becomes the "
            "transactional.id, and a job's is name/job_id."
        )
    if attempts < 1 or (writers is not None and writers < 1):
        raise ConfigError("attempts and writers count from 1: leave them out for the defaults.")
    if resume is not None and resume not in get_args(Resume):
        raise ConfigError(f"resume={resume!r} is not understood: write {' or '.join(map(repr, get_args(Resume)))}.")
    if group == "":
        raise ConfigError("group is empty: name the group, leave it out for the pipeline's name, or pass None.")
    if topic == ledger:
        raise ConfigError(f"topic={topic!r} is where the ledger is kept: rows need a topic of their own.")
    if dead_letter is not None:
        _check_dead_letter(dead_letter, dead_letter_max, {topic: "output topic", ledger: "ledger"})
    kafka = _kafka_settings({**(settings or {}), **more_settings})
    given = {"transaction.timeout.ms": _TRANSACTION_TIMEOUT_MS, **kafka, "bootstrap.servers": bootstrap}
    parse_config(given)
    return SinkOptions(
        name=name,
        settings=given,
        topic=topic,
        group=name if isinstance(group, EllipsisType) else group,
        is_group_given=isinstance(group, str),
        ledger=ledger,
        writers=writers,
        attempts=attempts,
        checkpoint=checkpoint,
        dead_letter=dead_letter,
        dead_letter_max=dead_letter_max,
        resume=resume,
    )


def _check_dead_letter(dead_letter: str, limit: int, others: Mapping[str | None, str]) -> None:
    if dead_letter in others:
        raise ConfigError(
            f"dead_letter={dead_letter!r} is the {others[dead_letter]} itself; nothing was computed or written. Dead "
            "letters need a topic of their own."
        )
    if limit < 1:
        raise ConfigError(f"dead_letter_max={limit} allows no dead letter: write 1 or more, or leave dead_letter out.")


def _kafka_settings(given: Mapping[str, object]) -> dict[str, object]:
    """Settings under Kafka's names: keywords have underscores, and Spark's options the prefix `kafka.`."""
    named = {key.removeprefix("kafka.").replace("_", "."): value for key, value in given.items()}
    for key, reason in _OURS.items():
        if key in named:
            raise ConfigError(f"{key} cannot be set here: {reason}.")
    return named
