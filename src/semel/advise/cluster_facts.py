"""What a live cluster shows: collected once, as values that the rules look at. Nothing is changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from semel.client.admin import Admin, TopicDescription
from semel.client.offsets import When
from semel.errors import KafkaError, SemelError, UnsupportedByBroker

_TOPIC_SETTINGS: Final = ("min.insync.replicas", "unclean.leader.election.enable")
_BROKER_SETTINGS: Final = ("transaction.max.timeout.ms", "offsets.retention.minutes")
_LOOKS: Final = 4
"""How often transactional ids are looked at, so that one that is initialised again and again shows."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """A topic, its smallest replication, and the settings that decide what an acknowledgement is worth."""

    name: str
    is_internal: bool
    replication: int
    min_insync_replicas: int | None
    may_elect_unclean: bool


@dataclass(frozen=True, slots=True)
class GroupPosition:
    """What a group has committed in a partition, and where that partition's committed and written records ended
    afterwards."""

    group: str
    topic: str
    partition: int
    committed: int
    last_stable_offset: int
    high_watermark: int


@dataclass(frozen=True, slots=True)
class IdLook:
    """A transactional id at one moment."""

    transactional_id: str
    state: str
    producer_id: int
    producer_epoch: int


@dataclass(slots=True)
class ClusterFacts:
    """Everything that the rules about a cluster need."""

    bootstrap: str
    broker_count: int
    transaction_protocol: int
    knows_protocol_2: bool
    broker_settings: Mapping[str, str]
    topics: list[TopicFacts] = field(default_factory=list[TopicFacts])
    positions: list[GroupPosition] = field(default_factory=list[GroupPosition])
    looks: list[list[IdLook]] = field(default_factory=list[list[IdLook]])
    producer_counts: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    not_seen: list[str] = field(default_factory=list[str])
    """What could not be looked at, and why."""

    @property
    def transaction_timeout_ms_max(self) -> int | None:
        text = self.broker_settings.get("transaction.max.timeout.ms", "")
        return int(text) if text.isdigit() else None


def collect_facts(
    settings: Mapping[str, object],
    *,
    topics: Iterable[str] | None = None,
    watch_s: float = 2.0,
    wait: Callable[[float], None] = time.sleep,
) -> ClusterFacts:
    """Look at a cluster; `topics` bounds the look to these and to internal ones. What may not be seen is noted."""
    with Admin(settings) as admin:
        cluster = admin.describe_cluster()
        features = admin.features()
        facts = ClusterFacts(
            bootstrap=str(settings.get("bootstrap.servers", "")),
            broker_count=len(cluster.brokers),
            transaction_protocol=features.transaction_protocol,
            # Kafka finalizes its kraft.version from 3.9 on and group.version from 4.0 on, where protocol 2 came too.
            knows_protocol_2="group.version" in features.finalized or features.transaction_protocol >= 2,
            broker_settings={},
        )
        node = str(cluster.brokers[0].node) if cluster.brokers else "0"
        facts.broker_settings = _try(facts, "settings of the brokers", lambda: _broker_settings(admin, node)) or {}
        _collect_topics(facts, admin, topics)
        wanted = {topic.name for topic in facts.topics if not topic.is_internal}
        _try(facts, "positions of groups", lambda: _collect_positions(facts, admin, wanted))
        _try(facts, "transactional ids", lambda: _collect_looks(facts, admin, watch_s / max(1, _LOOKS - 1), wait))
        _try(facts, "producers of partitions", lambda: _collect_producers(facts, admin, wanted))
    return facts


def _try(facts: ClusterFacts, what: str, look: Callable[[], T]) -> T | None:
    try:
        return look()
    except (KafkaError, UnsupportedByBroker) as error:
        facts.not_seen.append(f"{what}: {error}")
    return None


def _broker_settings(admin: Admin, node: str) -> dict[str, str]:
    entries = admin.describe_configs("broker", node, _BROKER_SETTINGS)
    return {name: entry.value for name, entry in entries.items() if entry.value is not None}


def _collect_topics(facts: ClusterFacts, admin: Admin, wanted: Iterable[str] | None) -> None:
    named = None if wanted is None else set(wanted)
    every = admin.list_topics(include_internal=True)
    found = admin.find_topics(*every)
    visible = [name for name in every if found[name].code.value == 0]
    described = admin.describe_topics(*visible) if visible else {}
    if named is not None and (missing := sorted(named - set(visible))):
        raise SemelError(f"There is no topic {missing[0]!r} that this user may see. Name topics of this cluster.")
    for name in visible:
        topic = described[name]
        if named is None or name in named or topic.is_internal or name in LEDGERS:
            _try(facts, f"settings of topic {name}", lambda topic=topic: facts.topics.append(_topic(admin, topic)))


LEDGERS: Final = ("semel-ledger", "semel-relay-progress")
"""Topics that Semel keeps progress in."""


def _topic(admin: Admin, topic: TopicDescription) -> TopicFacts:
    entries = admin.describe_configs("topic", topic.name, _TOPIC_SETTINGS)
    values: dict[str, Any] = {name: entry.value or "" for name, entry in entries.items()}
    insync = values.get("min.insync.replicas", "")
    return TopicFacts(
        topic.name,
        topic.is_internal,
        min((len(partition.replicas) for partition in topic.partitions), default=0),
        int(insync) if insync.isdigit() else None,
        values.get("unclean.leader.election.enable") == "true",
    )


def _collect_positions(facts: ClusterFacts, admin: Admin, topics: set[str]) -> None:
    """Offsets first, ends afterwards: ends only grow, so a group that is beyond one has certainly been there."""
    committed = [
        (listed.group, partition, position.offset)
        for listed in admin.list_groups()
        for partition, position in admin.committed_offsets(listed.group, require_stable=False).items()
        if partition.topic in topics
    ]
    if not committed:
        return
    asked: dict[tuple[str, int], When] = {(one.topic, one.partition): "latest" for _, one, _ in committed}
    stable = admin.list_offsets(asked, "read_committed")
    written = admin.list_offsets(asked, "read_uncommitted")
    for group, one, offset in committed:
        if one in stable and one in written:
            ends = stable[one].offset, written[one].offset
            facts.positions.append(GroupPosition(group, one.topic, one.partition, offset, *ends))


def _collect_looks(facts: ClusterFacts, admin: Admin, pause_s: float, wait: Callable[[float], None]) -> None:
    for number in range(_LOOKS):
        if number:
            wait(pause_s)
        ids = [listed.transactional_id for listed in admin.list_transactions()]
        described = admin.describe_transactions(ids) if ids else {}
        facts.looks.append(
            [IdLook(name, one.state, one.producer_id, one.producer_epoch) for name, one in described.items()]
        )


def _collect_producers(facts: ClusterFacts, admin: Admin, topics: set[str]) -> None:
    described = admin.describe_topics(sorted(topics)) if topics else {}
    for topic in described.values():
        for partition in topic.partitions:
            if partition.leader >= 0:
                count = len(admin.describe_producers(topic.name, partition.partition))
                facts.producer_counts[topic.name, partition.partition] = count
