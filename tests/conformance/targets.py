"""The brokers that the conformance tests run on, what they cannot do, and the types of the fixtures made from them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import pytest

from semel.errors import UnsupportedByBroker
from semel.testing.apache_kafka import LATEST, OLD, OLDEST, ApacheKafka


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of broker. `start` takes the number of nodes.

    What a broker is too old for, Semel must say: see `is_refused`. `leaves_out` is the test files that cannot run on
    it, each with its reason.
    """

    name: str
    transaction_protocol: int
    start: Callable[[int], AbstractContextManager[ApacheKafka]]
    has_transaction_admin: bool = True
    """Producers and transactions can be described (KIP-664: 2.8 and 3.0)."""
    has_topic_ids: bool = True
    """KIP-516: 2.8."""
    has_features: bool = True
    """What the cluster has agreed on can be asked for (KIP-584: 2.7)."""
    leaves_out: Mapping[str, str] = field(default_factory=dict[str, str])

    def is_refused(self, call: Callable[[], object]) -> bool:
        """On a broker without `has_transaction_admin`: makes the call, checks that Semel refuses it, and is True."""
        if self.has_transaction_admin:
            return False
        with pytest.raises(UnsupportedByBroker, match=r"The broker does not know \w+: .*nothing was sent\. Upgrade it"):
            call()
        return True


_NO_SECURE_LISTENERS = "its broker is started without TLS and SASL: PEM certificates came with 2.7"


TARGETS = (
    Target("apache-4", 2, lambda nodes: ApacheKafka(LATEST, nodes=nodes)),
    Target("apache-3.9", 1, lambda nodes: ApacheKafka(OLD, nodes=nodes)),
    Target(
        "apache-2.5",
        1,
        lambda nodes: ApacheKafka(OLDEST, nodes=nodes),
        has_transaction_admin=False,
        has_topic_ids=False,
        has_features=False,
        leaves_out=dict.fromkeys(("test_errors.py", "test_secure_listeners.py"), _NO_SECURE_LISTENERS),
    ),
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
