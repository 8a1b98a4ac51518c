"""Topics at the target: created as they are at the source, and followed as they grow and change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from semel.bridges.mirror.source import SourceTopic
from semel.bridges.retries import LOG
from semel.client.admin import Admin
from semel.errors import ConfigError, KafkaError, NotAuthorized
from semel.wire import ErrorCode

_NOT_COPIED: Final = frozenset(
    {
        # With LogAppendTime the target would put its own time in place of the source's.
        "message.timestamp.type",
        # About replicas and their traffic, which differ from cluster to cluster.
        "min.insync.replicas",
        "unclean.leader.election.enable",
        "leader.replication.throttled.replicas",
        "follower.replication.throttled.replicas",
    }
)


class TopicFollower:
    """Keeps the target's topics in step with the source's."""

    def __init__(self, source: Admin, target: Admin) -> None:
        self._source = source
        self._target = target
        self._configs: dict[str, dict[str, str]] = {}
        """What the source's topics had when they were looked at last."""

    def ensure(self, name: str, topic: SourceTopic, target_name: str) -> None:
        """The topic is at the target, with at least as many partitions."""
        found = self._target.find_topics(target_name)[target_name]
        if found.code == ErrorCode.unknown_topic_or_partition:
            self._create(name, topic, target_name)
        elif found.code == ErrorCode.none and found.partitions < topic.partitions:
            self._target.create_partitions(target_name, topic.partitions)
            LOG.warning("Topic %r grew to %d partitions at the target too.", target_name, topic.partitions)

    def _create(self, name: str, topic: SourceTopic, target_name: str) -> None:
        config = self._configs[name] = self._source_config(name) or {}
        try:
            self._target.create_topics(target_name, partitions=topic.partitions, config=config)
        except KafkaError as error:
            if error.code != ErrorCode.invalid_config:
                raise
            self._target.create_topics(target_name, partitions=topic.partitions)
            self._alter(target_name, config)

    def follow_config(self, name: str, target_name: str) -> None:
        """Bring what has changed at the source to the target. What was set at the target alone stays."""
        config = self._source_config(name)
        if config is None:
            return
        before = self._configs.get(name)
        if before == config:
            return
        entries = self._target.describe_configs("topic", target_name)
        present = {key: entry.value for key, entry in entries.items() if entry.source == "topic"}
        changes: dict[str, str | None] = {key: value for key, value in config.items() if present.get(key) != value}
        changes |= {key: None for key in before or {} if key not in config and key in present}
        if changes:
            self._alter(target_name, changes)
        self._configs[name] = config

    def _alter(self, target_name: str, changes: Mapping[str, str | None]) -> None:
        """One by one: a cluster that refuses one setting takes the others."""
        for key, value in changes.items():
            try:
                self._target.alter_configs("topic", target_name, {key: value})
            except (KafkaError, ConfigError) as error:
                LOG.warning("The target refused %s=%s for topic %r: %s", key, value, target_name, error)

    def _source_config(self, name: str) -> dict[str, str] | None:
        """What is set for this topic itself. None where it may not be looked at."""
        try:
            entries = self._source.describe_configs("topic", name)
        except NotAuthorized:
            LOG.warning("The source does not show the configs of topic %r, so they are not mirrored.", name)
            return None
        return {
            key: entry.value
            for key, entry in entries.items()
            if entry.source == "topic" and entry.value is not None and key not in _NOT_COPIED
        }
