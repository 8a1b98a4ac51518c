"""The brokers that the conformance tests run on, what they cannot do, and the types of the fixtures made from them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest
from embedded_kafka import EmbeddedKafka

from semel.errors import UnsupportedByBroker
from semel.testing.apache_kafka import LATEST, OLD, OLDEST, ApacheKafka
from semel.testing.apache_kafka import Protocol as SecurityProtocol
from semel.testing.security import Security

WHOLE = bool(os.environ.get("SEMEL_WHOLE"))
"""Also what is left out to save time: other clients on Apache Kafka, and the full number of messages."""


class KafkaUnderTest(Protocol):
    """What the tests know of a broker, of whatever kind."""

    @property
    def bootstrap(self) -> str: ...
    def bootstrap_for(self, protocol: SecurityProtocol) -> str: ...


class RestartableKafka(KafkaUnderTest, Protocol):
    """A broker that a test has for itself, with its own settings."""

    def restart(self, *, kill: bool) -> None:
        """End it, as a crash would or in order, and start it again at the same address with the same data."""


class _ApacheNode(ApacheKafka):
    def restart(self, *, kill: bool) -> None:
        if kill:
            self.node(0).kill()
        else:
            self.node(0).stop()
        self.node(0).start()


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of broker. `start` gives one node, `start_cluster` three, where there is such a thing.

    What a broker is too old for, Semel must say: see `is_refused`. `leaves_out` is the test files that cannot run on
    it, each with its reason.
    """

    name: str
    transaction_protocol: int
    start: Callable[[Security], AbstractContextManager[KafkaUnderTest]]
    start_own: Callable[[Mapping[str, str]], AbstractContextManager[RestartableKafka]]
    start_cluster: Callable[[], AbstractContextManager[ApacheKafka]] | None = None
    start_without_sync: Callable[[], AbstractContextManager[KafkaUnderTest]] | None = None
    """Where `start` gives one that syncs its transactions, as Apache Kafka never does."""
    has_transaction_admin: bool = True
    """Producers and transactions can be described (KIP-664: 2.8 and 3.0)."""
    has_topic_ids: bool = True
    """KIP-516: 2.8."""
    has_features: bool = True
    """What the cluster has agreed on can be asked for (KIP-584: 2.7)."""
    has_consumer_groups: bool = True
    """The broker assigns partitions where the group asks for it (KIP-848: 4.0)."""
    has_fenced_code: bool = True
    """A fenced producer is told PRODUCER_FENCED where its request's version knows it (KIP-588: 2.7)."""
    verifies_partitions: bool = True
    """A batch for a partition that its transaction does not have is refused (KIP-890: 3.6)."""
    has_producer_expiry: bool = True
    """How long an idle producer is remembered can be set (producer.id.expiration.ms: 3.5)."""
    has_strict_groups: bool = True
    """An instance id that its member does not have is refused, and members may heartbeat while they wait for their
    assignment (after 2.5)."""
    completes_after_kill: bool = True
    """What was decided or timed out when the only broker was killed is ended at its next start. 4.3.0 sometimes calls
    it complete there without having written the markers: partitions that it has not taken up yet count as deleted."""
    has_time: bool = WHOLE
    """For tens of thousands of transactions through the whole client, every day."""
    has_metrics_page: bool = False
    """Its numbers can be read over HTTP. Apache Kafka has them in JMX, which only Java reads."""
    leaves_out: Mapping[str, str] = field(default_factory=dict[str, str])

    def is_refused(self, call: Callable[[], object]) -> bool:
        """On a broker without `has_transaction_admin`: makes the call, checks that Semel refuses it, and is True."""
        if self.has_transaction_admin:
            return False
        with pytest.raises(UnsupportedByBroker, match=r"The broker does not know \w+: .*nothing was sent\. Upgrade it"):
            call()
        return True


_NO_SECURE_LISTENERS = "its broker is started without TLS and SASL: PEM certificates came with 2.7"


_GROUPS_ARE_THE_SAME = "its groups are those of another target, where they are tested"
_COPIERS_ARE_NEWER = "the clients of today are tried on releases that are still in use"
_WITH_WHOLE = "takes ten minutes and tries Kafka against other clients than ours: SEMEL_WHOLE=1 does it"

_OTHERS_CLIENTS = ("test_copying_clients.py", "test_group_clients.py")
_UNLESS_WHOLE: dict[str, str] = {} if WHOLE else dict.fromkeys(_OTHERS_CLIENTS, _WITH_WHOLE)
_RAW = tuple(sorted(path.name for path in Path(__file__).parent.glob("test_raw_*.py")))
_RAW_UNLESS_WHOLE = {} if WHOLE else dict.fromkeys(_RAW, "its single requests are those of 3.9: SEMEL_WHOLE=1 does it")


def _apache(version: str) -> dict[str, Any]:
    return {
        "start": lambda security: ApacheKafka(version, security=security),
        "start_own": lambda config: _ApacheNode(version, config=config),
        "start_cluster": lambda: ApacheKafka(version, nodes=3),
    }


def _embedded(transaction_version: int) -> dict[str, Any]:
    return {
        "start": lambda security: EmbeddedKafka(transaction_version=transaction_version, security=security),
        "start_own": lambda config: EmbeddedKafka(
            transaction_version=transaction_version, config=config, has_metrics_page=True
        ),
        "start_without_sync": lambda: EmbeddedKafka(transaction_version=transaction_version, syncs=False),
        "has_metrics_page": True,
    }


TARGETS = (
    Target("embedded", 2, **_embedded(2), has_time=True),
    Target("embedded-1", 1, **_embedded(1), leaves_out={"test_group_clients.py": _GROUPS_ARE_THE_SAME}),
    Target("apache-4", 2, **_apache(LATEST), completes_after_kill=False, leaves_out=_UNLESS_WHOLE),
    Target("apache-3.9", 1, **_apache(OLD), has_consumer_groups=False, leaves_out=_UNLESS_WHOLE),
    Target(
        "apache-2.5",
        1,
        **_apache(OLDEST),
        has_transaction_admin=False,
        has_topic_ids=False,
        has_features=False,
        has_consumer_groups=False,
        has_fenced_code=False,
        verifies_partitions=False,
        has_producer_expiry=False,
        has_strict_groups=False,
        leaves_out={
            **dict.fromkeys(("test_errors.py", "test_secure_listeners.py"), _NO_SECURE_LISTENERS),
            **dict.fromkeys(_OTHERS_CLIENTS, _COPIERS_ARE_NEWER),
            **_RAW_UNLESS_WHOLE,
        },
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
