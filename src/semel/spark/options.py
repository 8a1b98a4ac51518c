"""What a sink was told to do, checked as far as that goes without a broker. It can be pickled, as Spark needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from semel.client.config import ProducerConfig
from semel.client.settings import parse_config
from semel.errors import ConfigError

DEFAULT_LEDGER: Final = "semel-ledger"
_TRANSACTION_TIMEOUT_MS: Final = 300_000
"""Longer than a producer's own default: a large micro-batch takes its time, and a restart ends what a crash left."""

_OURS: Final = {
    "transactional.id": "the sink names its transactions after the pipeline, so that a restart finds them: use name=",
    "enable.idempotence": "a transaction always is",
    "acks": "a transaction always waits for every replica",
}


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The options of one pipeline."""

    name: str
    settings: Mapping[str, object]
    topic: str | None
    group: str | None
    ledger: str
    writers: int | None
    attempts: int
    checkpoint: str | None = None

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
    group: str | None = None,
    ledger: str = DEFAULT_LEDGER,
    writers: int | None = None,
    attempts: int = 3,
    checkpoint: str | None = None,
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
    kafka = _kafka_settings({**(settings or {}), **more_settings})
    given = {"transaction.timeout.ms": _TRANSACTION_TIMEOUT_MS, **kafka, "bootstrap.servers": bootstrap}
    parse_config(given)
    return SinkOptions(name, given, topic, group, ledger, writers, attempts, checkpoint)


def _kafka_settings(given: Mapping[str, object]) -> dict[str, object]:
    """Settings under Kafka's names: keywords have underscores, and Spark's options the prefix `kafka.`."""
    named = {key.removeprefix("kafka.").replace("_", "."): value for key, value in given.items()}
    for key, reason in _OURS.items():
        if key in named:
            raise ConfigError(f"{key} cannot be set here: {reason}.")
    return named
