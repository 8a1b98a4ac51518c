"""The rules about a cluster: what is seen there becomes findings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Final

from semel.advise.cluster_facts import LEDGERS, ClusterFacts, IdLook, TopicFacts
from semel.advise.rules import Finding, finding

_PRODUCERS_MANY: Final = 5_000
_EPOCH_NEAR_END: Final = 32_000
_EPOCH_MAX: Final = 32_767
_FOUGHT_OVER: Final = 2
_NAMED_MAX: Final = 5
_EXACTLY_ONCE_TOPICS: Final = ("__transaction_state", "__consumer_offsets", *LEDGERS)


def check_cluster(facts: ClusterFacts, *, longest_pause_s: float | None = None) -> Iterator[Finding]:
    """What is wrong in a cluster. Without the longest pause of its pipelines nothing is said about lost offsets."""
    yield from _check_topics(facts)
    yield from _check_broker(facts, longest_pause_s)
    yield from _check_groups(facts)
    yield from _check_ids(facts)
    for (topic, partition), count in facts.producer_counts.items():
        if count >= _PRODUCERS_MANY:
            yield finding("many-producers", f"{topic}-{partition}", f"{count:,} producers are remembered")


def _check_topics(facts: ClusterFacts) -> Iterator[Finding]:
    by_rule: dict[str, list[TopicFacts]] = defaultdict(list)
    for topic in facts.topics:
        for rule in _rules_of(topic, facts.broker_count):
            by_rule[rule].append(topic)
    for rule, topics in by_rule.items():
        what, commands = _TOPIC_TEXTS[rule]
        names = [topic.name for topic in topics]
        yield finding(
            rule,
            _some(names),
            what.format(topics[0]),
            *(
                command.format(b=facts.bootstrap, t=topic.name, less=max(1, topic.replication - 1))
                for topic in topics[:_NAMED_MAX]
                for command in commands
            ),
        )


_ALTER: Final = "kafka-configs.sh --bootstrap-server {b} --alter --entity-type topics --entity-name {t} --add-config "
_MOVE: Final = "kafka-reassign-partitions.sh --bootstrap-server {b} --execute --reassignment-json-file {t}.json"
_TOPIC_TEXTS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "internal-topic-not-replicated": ("replication factor 1", (_MOVE,)),
    "topic-not-replicated": ("replication factor 1", (_MOVE,)),
    "min-insync-replicas-too-high": (
        "min.insync.replicas={0.min_insync_replicas}, and {0.replication} replicas",
        (f"{_ALTER}min.insync.replicas={{less}}",),
    ),
    "min-insync-replicas-equal-replication": (
        "min.insync.replicas={0.min_insync_replicas}, and {0.replication} replicas",
        (f"{_ALTER}min.insync.replicas={{less}}",),
    ),
    "min-insync-replicas-too-low": (
        "min.insync.replicas=1, and {0.replication} replicas",
        (f"{_ALTER}min.insync.replicas=2",),
    ),
    "unclean-leader-election": (
        "unclean.leader.election.enable=true",
        (f"{_ALTER}unclean.leader.election.enable=false",),
    ),
}


def _rules_of(topic: TopicFacts, broker_count: int) -> Iterator[str]:
    insync, replication = topic.min_insync_replicas, topic.replication
    if replication == 1 and broker_count > 1:
        is_ours = topic.name in _EXACTLY_ONCE_TOPICS
        yield "internal-topic-not-replicated" if is_ours else "topic-not-replicated"
    if insync is not None and replication:
        if insync > replication:
            yield "min-insync-replicas-too-high"
        elif insync == replication > 1:
            yield "min-insync-replicas-equal-replication"
        elif insync == 1 and replication >= 3:
            yield "min-insync-replicas-too-low"
    if topic.may_elect_unclean and replication > 1:
        yield "unclean-leader-election"


def _check_broker(facts: ClusterFacts, longest_pause_s: float | None) -> Iterator[Finding]:
    minutes = facts.broker_settings.get("offsets.retention.minutes", "")
    if longest_pause_s is not None and minutes.isdigit() and int(minutes) * 60 <= longest_pause_s:
        needed = int(longest_pause_s // 60 * 2)
        yield finding(
            "offsets-expire",
            "brokers",
            f"offsets.retention.minutes={minutes}, and the longest pause is {longest_pause_s / 60:,.0f} minutes",
            f"offsets.retention.minutes={needed}  # in server.properties of every broker, then restart them in turn",
        )
    if facts.transaction_protocol < 2:
        commands = (
            (f"kafka-features.sh --bootstrap-server {facts.bootstrap} upgrade --feature transaction.version=2",)
            if facts.knows_protocol_2
            else ()
        )
        yield finding("transaction-protocol-1", "cluster", "transaction.version is below 2", *commands)


def _check_groups(facts: ClusterFacts) -> Iterator[Finding]:
    by_group: dict[str, list[str]] = defaultdict(list)
    for one in facts.positions:
        # Beyond the end of all records is the position of a topic that was deleted and created again.
        if one.last_stable_offset < one.committed <= one.high_watermark:
            where = f"{one.topic}-{one.partition} at {one.committed}, last stable offset {one.last_stable_offset}"
            by_group[one.group].append(where)
    for group, places in by_group.items():
        yield finding(
            "group-reads-uncommitted", f"group {group}", f"it is in {_some(places)}", "isolation.level=read_committed"
        )


def _check_ids(facts: ClusterFacts) -> Iterator[Finding]:
    by_id: dict[str, list[IdLook]] = defaultdict(list)
    for looks in facts.looks:
        for look in looks:
            by_id[look.transactional_id].append(look)
    for name, looks in by_id.items():
        bumps = sum(
            (before.producer_id, before.producer_epoch) != (after.producer_id, after.producer_epoch)
            for before, after in pairwise(looks)
        )
        if bumps >= _FOUGHT_OVER and _only_initialised(looks, facts.transaction_protocol):
            yield finding(
                "transactional-id-fought-over",
                f"transactional.id {name}",
                f"its producer epoch went from {looks[0].producer_epoch} to {looks[-1].producer_epoch} "
                f"in {len(looks)} looks",
            )
        if looks[-1].producer_epoch >= _EPOCH_NEAR_END:
            yield finding(
                "producer-epoch-near-its-end",
                f"transactional.id {name}",
                f"epoch {looks[-1].producer_epoch:,} of {_EPOCH_MAX:,}",
            )


def _only_initialised(looks: list[IdLook], protocol: int) -> bool:
    """Protocol 2 raises the epoch with each transaction too; there only an id without any says something."""
    return protocol < 2 or all(look.state == "Empty" for look in looks)


def _some(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - _NAMED_MAX} more" if len(every) > _NAMED_MAX else ""
    return ", ".join(every[:_NAMED_MAX]) + more
