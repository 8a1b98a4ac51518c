"""Topics, their settings and their records, and the cluster they are in."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Never
from uuid import UUID

from semel.client.cluster import Cluster
from semel.client.config import Isolation
from semel.client.item_calls import ItemAnswer, Route, any_broker, broker, call_for_items, controller, flat_names
from semel.client.leader_calls import PartitionAnswer, by_topic, call_leaders
from semel.client.offsets import ListedOffset, When, list_offsets
from semel.client.partitions import ByPartition, TopicPartition, by_partition
from semel.wire import Api, ErrorCode

ResourceKind = Literal["topic", "broker"]
_RESOURCES: Final[Mapping[ResourceKind, int]] = {"topic": 2, "broker": 4}
_SET, _RESET = 0, 1
_WRITE: Final = 4
_NOT_TOLD: Final = -(2**31)
_SOURCES: Final = ("unknown", "topic", "broker", "all brokers", "broker's file", "default", "broker logger")


@dataclass(frozen=True, slots=True)
class PartitionDescription:
    """Who has a partition. `leader` is -1 while nobody leads it."""

    partition: int
    leader: int
    leader_epoch: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """A topic and its partitions, in their order."""

    name: str
    topic_id: UUID | None
    """None from brokers before Kafka 2.8."""
    is_internal: bool
    partitions: tuple[PartitionDescription, ...]


@dataclass(frozen=True, slots=True)
class FoundTopic:
    """What one look at a topic shows. Only `code` means anything if it is an error."""

    code: ErrorCode
    partitions: int
    is_internal: bool
    may_write: bool
    """True where the broker does not tell (before 2.3)."""


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """A setting of a topic or broker. `value` is None where the broker keeps it secret."""

    name: str
    value: str | None
    source: str
    is_read_only: bool
    is_sensitive: bool

    @property
    def is_default(self) -> bool:
        return self.source == "default"


@dataclass(frozen=True, slots=True)
class BrokerDescription:
    """Where a broker listens."""

    node: int
    host: str
    port: int
    rack: str | None


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    """The cluster's name and its brokers of this moment."""

    cluster_id: str
    controller: int
    brokers: tuple[BrokerDescription, ...]


@dataclass(frozen=True, slots=True)
class Features:
    """What the cluster has agreed on; the epoch is -1 before Kafka 2.7."""

    finalized: Mapping[str, int]
    epoch: int
    transaction_protocol: int


_OTHER_NAMES: Final[Mapping[str, str]] = {
    "num_partitions": "partitions",
    "replication_factor": "replication",
    "configs": "config",
    "topic_config": "config",
    "topic_configs": "config",
}
"""What other clients call the arguments of `create_topics`."""


def _wrong_argument(name: str) -> TypeError:
    known = ("partitions", "replication", "config")
    right = [_OTHER_NAMES[name]] if name in _OTHER_NAMES else difflib.get_close_matches(name, known, n=1) or known
    return TypeError(f"create_topics() has no argument {name!r}: write {' or '.join(f'{one}=' for one in right)}.")


class TopicAdmin:
    """The part of `Admin` about topics; also on its own, for those who ask for no more."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    # -- topics ----------------------------------------------------------------------------------------------------

    def create_topics(
        self,
        *names: str | Iterable[str],
        partitions: int = -1,
        replication: int = -1,
        config: Mapping[str, str] | None = None,
        **unknown: Never,
    ) -> None:
        """Create topics of one shape; -1 is the broker's default. Names may come as a list.

        >>> from semel import Admin
        >>> with Admin({"bootstrap.servers": bootstrap}) as admin:
        ...     admin.create_topics("balances", partitions=6, config={"cleanup.policy": "compact"})
        """

        if unknown:
            raise _wrong_argument(next(iter(unknown)))
        topics = flat_names(names)

        def fields(asked: Sequence[str]) -> Mapping[str, Any]:
            configs = [{"name": key, "value": value} for key, value in (config or {}).items()]
            shape = {
                "num_partitions": partitions,
                "replication_factor": replication,
                "assignments": [],
                "configs": configs,
            }
            return {"topics": [{"name": name, **shape} for name in asked], "timeout": self._timeout_ms}

        call_for_items(
            self._cluster,
            controller(self._cluster),
            Api.CREATE_TOPICS,
            topics,
            fields,
            lambda response: (ItemAnswer(t.name, t.error_code, None, t.error_message) for t in response.topics),
            what=_topic,
            done_already=ErrorCode.topic_already_exists,
        )
        self._cluster.forget_leaders(topics)

    def delete_topics(self, *names: str | Iterable[str]) -> None:
        """Delete topics and all their records."""
        topics = flat_names(names)
        call_for_items(
            self._cluster,
            controller(self._cluster),
            Api.DELETE_TOPICS,
            topics,
            lambda asked: {"topic_names": asked, "timeout": self._timeout_ms},
            lambda response: (ItemAnswer(t.name, t.error_code, None) for t in response.responses),
            what=_topic,
            done_already=ErrorCode.unknown_topic_or_partition,
            # A topic that is not there is an answer here, and no reason to wait for it to appear.
            patience=self._cluster.patience(_MISSING_TOPIC_PATIENCE_MS),
        )
        self._cluster.forget_leaders(topics)

    def create_partitions(self, topic: str, count: int) -> None:
        """Give a topic more partitions, `count` in all. Keys then go to other partitions than before."""
        call_for_items(
            self._cluster,
            controller(self._cluster),
            Api.CREATE_PARTITIONS,
            [topic],
            lambda asked: {
                "topics": [{"name": name, "count": count, "assignments": None} for name in asked],
                "timeout": self._timeout_ms,
                "validate_only": False,
            },
            lambda response: (ItemAnswer(t.name, t.error_code, None, t.error_message) for t in response.results),
            what=_topic,
        )
        self._cluster.forget_leaders([topic])

    def list_topics(self, *, include_internal: bool = False) -> list[str]:
        """The names of all topics this user may see."""
        response = self._metadata(None)
        return sorted(topic.name for topic in response.topics if include_internal or not topic.is_internal)

    def describe_topics(self, *names: str | Iterable[str]) -> dict[str, TopicDescription]:
        """Partitions, leaders and replicas of these topics."""
        return call_for_items(
            self._cluster,
            any_broker(),
            Api.METADATA,
            flat_names(names),
            _metadata_fields,
            lambda response: (ItemAnswer(t.name, t.error_code, _read_topic(t)) for t in response.topics),
            what=_topic,
            patience=self._cluster.patience(_MISSING_TOPIC_PATIENCE_MS),
        )

    def may_write(self, topic: str) -> bool:
        """Whether this user has the right to write to a topic; True where the broker does not tell (before 2.3)."""
        answers = call_for_items(
            self._cluster,
            any_broker(),
            Api.METADATA,
            [topic],
            lambda asked: {**_metadata_fields(asked), "include_topic_authorized_operations": True},
            lambda response: (
                ItemAnswer(t.name, t.error_code, getattr(t, "topic_authorized_operations", _NOT_TOLD))
                for t in response.topics
            ),
            what=_topic,
            patience=self._cluster.patience(_MISSING_TOPIC_PATIENCE_MS),
        )
        return answers[topic] == _NOT_TOLD or bool(answers[topic] >> _WRITE & 1)

    def find_topics(self, *names: str) -> dict[str, FoundTopic]:
        """One look at topics that may not be there or may be closed to this user: each with its own error code."""
        response = self._metadata(names, include_rights=True)
        return {topic.name: _read_found(topic) for topic in response.topics}

    def _metadata(self, names: Sequence[str] | None, *, include_rights: bool = False) -> Any:
        everything = call_for_items(
            self._cluster,
            any_broker(),
            Api.METADATA,
            ["the cluster's topics"],
            lambda asked: {**_metadata_fields(names), "include_topic_authorized_operations": include_rights},
            lambda response: [ItemAnswer("the cluster's topics", ErrorCode.none, response)],
            what=str,
        )
        return everything["the cluster's topics"]

    # -- settings --------------------------------------------------------------------------------------------------

    def describe_configs(
        self, kind: ResourceKind, name: str, names: Iterable[str] | None = None
    ) -> dict[str, ConfigEntry]:
        """The settings of a topic or of a broker (by its id), all of them or those named.

        >>> from semel import Admin
        >>> with Admin({"bootstrap.servers": bootstrap}) as admin:
        ...     admin.create_topics("readings")
        ...     admin.describe_configs("topic", "readings")["retention.ms"].value
        '604800000'
        """
        keys = None if names is None else list(names)
        answers = call_for_items(
            self._cluster,
            self._route_to(kind, name),
            Api.DESCRIBE_CONFIGS,
            [name],
            lambda asked: {
                "resources": [
                    {"resource_type": _RESOURCES[kind], "resource_name": item, "configuration_keys": keys}
                    for item in asked
                ]
            },
            lambda response: (
                ItemAnswer(r.resource_name, r.error_code, {c.name: _read_config(c) for c in r.configs}, r.error_message)
                for r in response.results
            ),
            what=lambda item: f"{kind} {item!r}",
        )
        return answers[name]

    def alter_configs(self, kind: ResourceKind, name: str, changes: Mapping[str, str | None]) -> None:
        """Change these settings and leave the others as they are; None puts one back to its default."""
        configs = [
            {"name": key, "config_operation": _RESET if value is None else _SET, "value": value}
            for key, value in changes.items()
        ]
        call_for_items(
            self._cluster,
            self._route_to(kind, name),
            Api.INCREMENTAL_ALTER_CONFIGS,
            [name],
            lambda asked: {
                "resources": [
                    {"resource_type": _RESOURCES[kind], "resource_name": item, "configs": configs} for item in asked
                ],
                "validate_only": False,
            },
            lambda response: (
                ItemAnswer(r.resource_name, r.error_code, None, r.error_message) for r in response.responses
            ),
            what=lambda item: f"{kind} {item!r}",
        )

    def _route_to(self, kind: ResourceKind, name: str) -> Route:
        if kind == "broker":
            self._cluster.nodes()
            return broker(int(name))
        return controller(self._cluster)

    # -- records ---------------------------------------------------------------------------------------------------

    def list_offsets(
        self, questions: ByPartition[When], isolation: Isolation = "read_committed"
    ) -> dict[TopicPartition, ListedOffset]:
        """Where partitions begin, end, or have their first record of a time.

        >>> from semel import Admin
        >>> with Admin({"bootstrap.servers": bootstrap}) as admin:
        ...     admin.create_topics("visits", partitions=2)
        ...     found = admin.list_offsets({("visits", 0): "latest", ("visits", 1): 1_731_628_800_000})
        ...     [one.offset for one in found.values()]
        [0, -1]
        """
        return list_offsets(self._cluster, by_partition(questions), isolation)

    def delete_records(self, before: ByPartition[int]) -> dict[TopicPartition, int]:
        """Delete all records before these offsets (-1: all there are); returns where each partition begins now."""

        def fields(asked: Mapping[TopicPartition, int]) -> Mapping[str, Any]:
            return {
                "topics": [
                    {
                        "name": topic,
                        "partitions": [
                            {"partition_index": partition, "offset": asked[TopicPartition(topic, partition)]}
                            for partition in partitions
                        ],
                    }
                    for topic, partitions in by_topic(asked).items()
                ],
                "timeout": self._timeout_ms,
            }

        def read(response: Any) -> Iterator[PartitionAnswer[int]]:
            for topic in response.topics:
                for item in topic.partitions:
                    named = TopicPartition(topic.name, item.partition_index)
                    yield PartitionAnswer(named, item.error_code, item.low_watermark)

        return call_leaders(self._cluster, Api.DELETE_RECORDS, by_partition(before), fields, read)

    # -- cluster ---------------------------------------------------------------------------------------------------

    def describe_cluster(self) -> ClusterDescription:
        """The cluster's id and its brokers."""
        response = self._metadata([])
        brokers = tuple(BrokerDescription(b.node_id, b.host, b.port, b.rack) for b in response.brokers)
        return ClusterDescription(response.cluster_id or "", response.controller_id, brokers)

    def features(self) -> Features:
        """The features that the cluster has finalized, and the transaction protocol that follows from them."""
        capabilities = self._cluster.any_connection().capabilities
        return Features(
            dict(capabilities.finalized_features),
            capabilities.finalized_features_epoch,
            capabilities.transaction_protocol,
        )

    @property
    def _timeout_ms(self) -> int:
        return self._cluster.config.request_timeout_ms


_MISSING_TOPIC_PATIENCE_MS: Final = 3_000


def _topic(name: str) -> str:
    return f"topic {name!r}"


def _metadata_fields(names: Sequence[str] | None) -> Mapping[str, Any]:
    return {
        "topics": None if names is None else [{"topic_id": None, "name": name} for name in names],
        "allow_auto_topic_creation": False,
        "include_cluster_authorized_operations": False,
        "include_topic_authorized_operations": False,
    }


def _read_topic(topic: Any) -> TopicDescription:
    partitions = (
        PartitionDescription(
            item.partition_index,
            item.leader_id,
            getattr(item, "leader_epoch", -1),
            tuple(item.replica_nodes),
            tuple(item.isr_nodes),
        )
        for item in sorted(topic.partitions, key=lambda item: item.partition_index)
    )
    return TopicDescription(topic.name, getattr(topic, "topic_id", None), topic.is_internal, tuple(partitions))


def _read_found(topic: Any) -> FoundTopic:
    rights = getattr(topic, "topic_authorized_operations", _NOT_TOLD)
    may_write = rights == _NOT_TOLD or bool(rights >> _WRITE & 1)
    return FoundTopic(topic.error_code, len(topic.partitions), topic.is_internal, may_write)


def _read_config(item: Any) -> ConfigEntry:
    source = _SOURCES[item.config_source] if 0 <= item.config_source < len(_SOURCES) else "unknown"
    return ConfigEntry(item.name, item.value, source, item.read_only, item.is_sensitive)
