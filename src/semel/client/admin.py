"""Looking at a cluster and changing it: topics, settings, groups, transactions."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from semel.client.admin_groups import CommittedOffset, GroupAdmin, GroupDescription, GroupMember, ListedGroup
from semel.client.admin_topics import (
    BrokerDescription,
    ClusterDescription,
    ConfigEntry,
    Features,
    FoundTopic,
    PartitionDescription,
    TopicAdmin,
    TopicDescription,
)
from semel.client.admin_transactions import (
    ListedTransaction,
    ProducerState,
    TransactionAdmin,
    TransactionDescription,
)
from semel.client.cluster import Cluster
from semel.client.offsets import ListedOffset
from semel.client.settings import merge_settings, parse_config

__all__ = [
    "Admin",
    "BrokerDescription",
    "ClusterDescription",
    "CommittedOffset",
    "ConfigEntry",
    "Features",
    "FoundTopic",
    "GroupDescription",
    "GroupMember",
    "ListedGroup",
    "ListedOffset",
    "ListedTransaction",
    "PartitionDescription",
    "ProducerState",
    "TopicDescription",
    "TransactionDescription",
]


class Admin(TopicAdmin, GroupAdmin, TransactionAdmin):
    """Calls return when the broker has answered; what may pass is retried for `default.api.timeout.ms`.

    >>> with Admin({"bootstrap.servers": bootstrap}) as admin:
    ...     admin.create_topics("returns", partitions=6)
    ...     len(admin.describe_topics("returns")["returns"].partitions)
    6
    """

    def __init__(
        self, cluster_or_settings: Cluster | Mapping[str, object] | None = None, **more_settings: object
    ) -> None:
        self._owns_cluster = not isinstance(cluster_or_settings, Cluster)
        super().__init__(
            cluster_or_settings
            if isinstance(cluster_or_settings, Cluster)
            else Cluster(parse_config(merge_settings(cluster_or_settings, more_settings)).client)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._owns_cluster:
            self._cluster.close()
