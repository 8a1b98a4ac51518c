"""Whether topics still are the ones that were read: their ids, asked of the brokers that served the records.

Asked after the records came: if the id is still the same, they were not of another topic of that name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from uuid import UUID

from semel.client.cluster import TRANSPORT_ERRORS, Cluster
from semel.client.connection import Pending
from semel.client.partitions import TopicPartition
from semel.errors import UnknownTopic
from semel.wire import Api, ErrorCode


def ask_topic_ids(cluster: Cluster, partitions: Collection[TopicPartition]) -> Callable[[], dict[str, UUID | None]]:
    """Ask now; what is returned waits for the answers. Topics that are no longer there are missing in them."""
    by_node: dict[int, set[str]] = {}
    topics = {partition.topic for partition in partitions}
    try:
        for partition in partitions:
            by_node.setdefault(cluster.leader(*partition).node, set()).add(partition.topic)
    except UnknownTopic:  # another topic of the name has fewer partitions
        return lambda: _ask_with_patience(cluster, topics)
    if any(node < 0 for node in by_node):
        return lambda: _ask_with_patience(cluster, topics)
    try:
        pendings = [_submit(cluster, node, asked) for node, asked in by_node.items()]
    except TRANSPORT_ERRORS:
        return lambda: _ask_with_patience(cluster, topics)

    def wait() -> dict[str, UUID | None]:
        found: dict[str, set[UUID | None]] = {topic: set() for topic in topics}
        try:
            for pending in pendings:
                while not pending.done:
                    cluster.wait_any([pending])
                for topic in pending.result().topics:
                    if topic.error_code is ErrorCode.none:
                        found[topic.name].add(topic.topic_id)
        except TRANSPORT_ERRORS:
            return _ask_with_patience(cluster, topics)
        # Brokers that do not agree are about to: what is missing here counts as changed.
        return {topic: ids.pop() for topic, ids in found.items() if len(ids) == 1}

    return wait


def _submit(cluster: Cluster, node: int, topics: Collection[str]) -> Pending:
    return cluster.submit(
        node,
        Api.METADATA,
        topics=[{"topic_id": None, "name": topic} for topic in sorted(topics)],
        allow_auto_topic_creation=False,
        include_cluster_authorized_operations=False,
        include_topic_authorized_operations=False,
    )


def _ask_with_patience(cluster: Cluster, topics: Collection[str]) -> dict[str, UUID | None]:
    cluster.refresh_topics(topics)
    return {topic: cluster.topic_id(topic) for topic in topics}
