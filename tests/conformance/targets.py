"""The brokers that the conformance tests run on, what they cannot do, and the types of the fixtures made from them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import pytest

from embedded_kafka import EmbeddedKafka

from semel.errors import UnsupportedByBroker
from semel.testing.apache_kafka import LATEST, OLD, OLDEST, ApacheKafka
from semel.testing.apache_kafka import Protocol as SecurityProtocol
from semel.testing.security import Security


class KafkaUnderTest(Protocol):
    """What the tests know of a broker, of whatever kind."""

    @property
    def bootstrap(self) -> str: ...
    def bootstrap_for(self, protocol: SecurityProtocol) -> str: ...


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of broker. `start` gives one node, `start_cluster` three, where there is such a thing.

    What a broker is too old for, Semel must say: see `is_refused`. `leaves_out` is the test files that cannot run on
    it, each with its reason.
    """

    name: str
    transaction_protocol: int
    start: Callable[[Security], AbstractContextManager[KafkaUnderTest]]
    start_cluster: Callable[[], AbstractContextManager[ApacheKafka]] | None = None
    has_transaction_admin: bool = True
    """Producers and transactions can be described (KIP-664: 2.8 and 3.0)."""
    has_topic_ids: bool = True
    """KIP-516: 2.8."""
    has_features: bool = True
    """What the cluster has agreed on can be asked for (KIP-584: 2.7)."""
    has_consumer_groups: bool = True
    """The broker assigns partitions where the group asks for it (KIP-848: 4.0)."""
    leaves_out: Mapping[str, str] = field(default_factory=dict[str, str])

    def is_refused(self, call: Callable[[], object]) -> bool:
        """On a broker without `has_transaction_admin`: makes the call, checks that Semel refuses it, and is True."""
        if self.has_transaction_admin:
            return False
        with pytest.raises(UnsupportedByBroker, match=r"The broker does not know \w+: .*nothing was sent\. Upgrade it"):
            call()
        return True


_NO_SECURE_LISTENERS = "its broker is started without TLS and SASL: PEM certificates came with 2.7"


def _apache(version: str) -> dict[str, Callable[..., AbstractContextManager[ApacheKafka]]]:
    return {
        "start": lambda security: ApacheKafka(version, security=security),
        "start_cluster": lambda: ApacheKafka(version, nodes=3),
    }


TARGETS = (
    Target("embedded", 2, lambda security: EmbeddedKafka(transaction_version=2, security=security)),
    Target("embedded-1", 1, lambda security: EmbeddedKafka(transaction_version=1, security=security)),
    Target("apache-4", 2, **_apache(LATEST)),
    Target("apache-3.9", 1, **_apache(OLD), has_consumer_groups=False),
    Target(
        "apache-2.5",
        1,
        **_apache(OLDEST),
        has_transaction_admin=False,
        has_topic_ids=False,
        has_features=False,
        has_consumer_groups=False,
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
        on: KafkaUnderTest | None = None,
    ) -> str: ...
