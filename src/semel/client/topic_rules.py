"""What topics take: whether they are there, how large a batch may be, whether a record needs a key.

The driver asks for the topics that it knows. Topics that rows name are asked for in the tasks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

from semel.client.admin import Admin, FoundTopic
from semel.client.cluster import Cluster
from semel.client.config import INT32_MAX, ProducerConfig
from semel.client.failures import failure
from semel.errors import NotAuthorized, UnsupportedByBroker
from semel.wire import Action, Api, ErrorCode, verdict

_MISSING_PATIENCE_MS: Final = 3_000
"""A topic that was created a moment ago may be unknown to some brokers for so long."""
_BYTES_MAX: Final = "max.message.bytes"
_POLICY: Final = "cleanup.policy"
_COMPRESSION: Final = "compression.type"
OWN_TOPICS: Final = frozenset({"semel-ledger", "semel-relay-progress", "semel-source-progress"})
"""Where Semel keeps progress unless a user names other topics. A row that named one could overwrite a pipeline's."""
_LEGAL_NAME: Final = re.compile(r"[a-zA-Z0-9._-]{1,249}")


_WAITED_MAX: Final = 10_000
_waited: WeakKeyDictionary[Cluster, set[str]] = WeakKeyDictionary()
"""Topics that were missing after a wait: the next task looks for them again, and does not wait again."""


@dataclass(frozen=True, slots=True)
class TopicRules:
    """What one topic takes."""

    partitions: int = 0
    problem: str | None = None
    """Why nothing can be written to it, as a sentence."""
    is_forbidden: bool = False
    """The problem is a missing right."""
    bytes_max: int = INT32_MAX
    """Of a batch as it is sent. Without the right to read the topic's settings no limit is known."""
    needs_key: bool = False
    is_repacked: bool = False
    """The broker may compress batches in another way, and then applies its limit again."""

    def sure_bytes(self, config: ProducerConfig) -> int:
        """A batch of so many bytes before compression fits, whatever is in it."""
        # What cannot be compressed grows by a few bytes in each block.
        margin = 0 if config.compression_type == "none" else self.bytes_max // 128 + 128
        return self.bytes_max - margin


class TopicLookup:
    """Rules by topic, asked for when first needed. One object serves one task, or one look of the driver."""

    def __init__(
        self,
        find_cluster: Callable[[], Cluster],
        known: Mapping[str, TopicRules] | None = None,
        *,
        missing_patience_ms: float = _MISSING_PATIENCE_MS,
    ) -> None:
        self._find_cluster = find_cluster
        self._known = dict(known or {})
        self._missing_patience_ms = missing_patience_ms

    def rules(self, topic: str) -> TopicRules:
        if topic not in self._known:
            self.learn([topic])
        return self._known[topic]

    def learn(self, topics: Collection[str]) -> None:
        """Ask for all of these at once, as far as they are not known."""
        wanted = [topic for topic in topics if topic not in self._known]
        for topic in [topic for topic in wanted if not is_legal_name(topic)]:
            self._known[topic] = TopicRules(problem=f"{topic[:100]!r} is not a legal name for a topic.")
        self._known |= {topic: keeps_progress(topic) for topic in OWN_TOPICS.intersection(wanted)}
        wanted = [topic for topic in wanted if topic not in self._known]
        if not wanted:
            return
        cluster = self._find_cluster()
        for topic, found in self._find(cluster, wanted).items():
            self._known[topic] = _refusal(topic, found) or _ask_settings(cluster, topic, found)

    def _find(self, cluster: Cluster, topics: Collection[str]) -> dict[str, FoundTopic]:
        found: dict[str, FoundTopic] = {}
        patience = cluster.patience()
        waited = _waited.setdefault(cluster, set())
        if len(waited) > _WAITED_MAX:
            waited.clear()
        while True:
            found |= Admin(cluster).find_topics(*(topic for topic in topics if _is_open(found.get(topic))))
            waiting = {topic: seen.code for topic, seen in found.items() if _is_open(seen)}
            if not waiting:
                return found
            is_only_missing = set(waiting.values()) == {ErrorCode.unknown_topic_or_partition}
            is_new = not waited.issuperset(waiting)
            if is_only_missing and not (is_new and patience.elapsed_ms < self._missing_patience_ms):
                waited.update(waiting)
                self._missing_patience_ms = 0  # one wait for each task: rows may name any number of topics
                return found
            topic, code = next(iter(waiting.items()))
            if patience.is_spent:
                raise failure(code, Api.METADATA, f"topic {topic!r}")
            patience.pause(verdict(code, Api.METADATA))


def keeps_progress(topic: str) -> TopicRules:
    return TopicRules(problem=f"Topic {topic!r} keeps the progress of pipelines, and takes nothing else.")


def is_legal_name(topic: str) -> bool:
    """
    >>> is_legal_name("orders.eu-1"), is_legal_name(".."), is_legal_name("")
    (True, False, False)
    """
    return _LEGAL_NAME.fullmatch(topic) is not None and topic not in (".", "..")


def _is_open(found: FoundTopic | None) -> bool:
    """Whether another look may show something else."""
    if found is None:
        return True
    return found.code != ErrorCode.none and verdict(found.code, Api.METADATA).action is Action.RETRIABLE


def _refusal(topic: str, found: FoundTopic) -> TopicRules | None:
    if found.code == ErrorCode.unknown_topic_or_partition:
        return TopicRules(problem=f"The cluster has no topic {topic!r}.")
    if found.code == ErrorCode.topic_authorization_failed or (found.code == ErrorCode.none and not found.may_write):
        return TopicRules(problem=f"This user may not write to topic {topic!r}.", is_forbidden=True)
    if found.code != ErrorCode.none:
        return TopicRules(problem=f"{found.code.name.upper()} for topic {topic!r}.")
    return TopicRules(problem=f"Topic {topic!r} is Kafka's own.") if found.is_internal else None


# -- settings --------------------------------------------------------------------------------------------------------

_settings: WeakKeyDictionary[Cluster, dict[str, tuple[float, Mapping[str, str]]]] = WeakKeyDictionary()
"""Settings by topic, and when they were asked for: a micro-batch should not ask again for what hardly changes."""


def _ask_settings(cluster: Cluster, topic: str, found: FoundTopic) -> TopicRules:
    by_topic = _settings.setdefault(cluster, {})
    asked_at, settings = by_topic.get(topic, (None, {}))
    now = cluster.clock()
    if asked_at is None or now - asked_at > cluster.config.metadata_max_age_ms / 1000:
        settings = _describe(cluster, topic)
        by_topic[topic] = (now, settings)
    return TopicRules(
        found.partitions,
        bytes_max=int(settings.get(_BYTES_MAX, INT32_MAX)),
        needs_key="compact" in settings.get(_POLICY, ""),
        is_repacked=settings.get(_COMPRESSION, "producer") != "producer",
    )


def _describe(cluster: Cluster, topic: str) -> dict[str, str]:
    try:
        entries = Admin(cluster).describe_configs("topic", topic, [_BYTES_MAX, _POLICY, _COMPRESSION])
    except (NotAuthorized, UnsupportedByBroker):
        return {}  # then a broker may still refuse a batch, and the micro-batch stops with its error
    return {name: entry.value for name, entry in entries.items() if entry.value is not None}
