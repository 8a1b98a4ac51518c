"""The brokers that the conformance tests run on, and the types of the fixtures made from them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import pytest

from semel.testing.apache_kafka import LATEST, OLD, ApacheKafka


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of broker. `start` takes the number of nodes."""

    name: str
    transaction_protocol: int
    start: Callable[[int], AbstractContextManager[ApacheKafka]]


TARGETS = (
    Target("apache-4", 2, lambda nodes: ApacheKafka(LATEST, nodes=nodes)),
    Target("apache-3.9", 1, lambda nodes: ApacheKafka(OLD, nodes=nodes)),
)


def chosen_targets() -> list[Target]:
    by_name = {target.name: target for target in TARGETS}
    wanted = [name.strip() for name in os.environ.get("SEMEL_TARGETS", "").split(",") if name.strip()]
    if unknown := sorted(set(wanted) - set(by_name)):
        raise pytest.UsageError(f"SEMEL_TARGETS names unknown targets {unknown}: there are {sorted(by_name)}.")
    return [by_name[name] for name in wanted or by_name]


class NewTopic(Protocol):
    """What the fixture `new_topic` gives."""

    def __call__(
        self,
        partitions: int = 1,
        replication: int = 1,
        config: Mapping[str, str] | None = None,
        *,
        on: ApacheKafka | None = None,
    ) -> str: ...
