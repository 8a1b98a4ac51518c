"""The input offsets inside a transaction: they let lag tools see the pipeline, and nothing else depends on them.

So they must never stop a pipeline that was not asked to commit them. Where the broker refuses them, the batch is
written without them and the log says why; where the user named the group, the error says which right is missing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.partitions import TopicPartition
from semel.client.settings import parse_config
from semel.errors import KafkaError, SemelError, TransactionAborted
from semel.spark.input_offsets import Input, InputEnd, merge_ends, running_query
from semel.spark.options import SinkOptions
from semel.spark.progress import log_event
from semel.wire import ErrorCode

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BOOTSTRAP: Final = "bootstrap.servers"
_PREFIX: Final = "kafka."

_NO_POSITION: Final = frozenset(
    {
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.unknown_member_id,
        ErrorCode.illegal_generation,
        ErrorCode.fenced_instance_id,
        ErrorCode.fenced_member_epoch,
        ErrorCode.stale_member_epoch,
        ErrorCode.unreleased_instance_id,
        ErrorCode.group_id_not_found,
        ErrorCode.invalid_group_id,
        ErrorCode.inconsistent_group_protocol,
    }
)
"""Refusals that last as long as the group or the topic is what it is."""


class LagRefused(TransactionAborted):
    """The broker did not take the input offsets, so the transaction cannot be committed with them."""


@dataclass(slots=True)
class Lag:
    """Which input offsets go into the transactions of one pipeline."""

    options: SinkOptions
    is_on: bool = True
    _clusters: dict[str, str | None] = field(default_factory=dict[str, str | None])
    """The ids of clusters by their addresses."""
    _left_out: set[str] = field(default_factory=set[str])

    def offsets(
        self, batch_input: Input, cluster: Cluster, addresses: Callable[[], set[str]]
    ) -> dict[TopicPartition, int]:
        """Those of the batch's offsets that this cluster can take.

        `addresses` are those of the brokers that the query reads from, for sources that do not tell their cluster.
        """
        if self.options.group is None or not self.is_on or not batch_input.ends:
            return {}
        here = self._id_of(cluster)
        ends = [end for end in batch_input.ends if self._is_of(here, end, addresses)]
        for end in batch_input.ends:
            if end not in ends:
                self._leave_out(end.topics, "they are of another cluster, or of one that cannot be told")
        wanted = merge_ends(ends)
        shapes = cluster.topic_shapes(sorted({named.topic for named in wanted})) if wanted else {}
        counts = {topic: shape.partition_count for topic, shape in shapes.items()}
        known = {named: offset for named, offset in wanted.items() if named.partition < counts.get(named.topic, 0)}
        self._leave_out({named.topic for named in set(wanted) - set(known)}, "the cluster has no such partition")
        return known

    def explain(self, error: KafkaError) -> KafkaError:
        """What to raise for a refusal of the offsets: a lasting one is a `LagRefused`, others stay what they are."""
        group = self.options.group
        if error.code == ErrorCode.topic_authorization_failed:
            reason = "this user has no READ right on the input topics"
        elif error.code == ErrorCode.group_authorization_failed:
            reason = f"this user has no READ right on the group {group!r}"
        elif error.code in _NO_POSITION:
            reason = f"the group {group!r} does not take them ({error.code.name}), as if it had members"
        else:
            return error
        return LagRefused(
            f"The input offsets cannot be committed: {reason}. Nothing was written. They only make the lag visible: "
            "grant the right, name another group=, or pass group=None to go without them.",
            code=error.code,
        )

    def switch_off(self, error: LagRefused, batch_id: int | None) -> None:
        """Go on without offsets, unless the user asked for this group."""
        if self.options.is_group_given:
            raise error
        self.is_on = False
        log_event(
            "lag is not visible", logging.WARNING, pipeline=self.options.name, batch_id=batch_id, reason=str(error)
        )

    def _is_of(self, here: str | None, end: InputEnd, addresses: Callable[[], set[str]]) -> bool:
        if end.cluster is not None:
            return end.cluster == here
        known = [self._id_at(address) for address in addresses()]
        return (bool(known) and all(cluster == here for cluster in known)) or self.options.is_group_given

    def _id_of(self, cluster: Cluster) -> str | None:
        address = str(self.options.settings["bootstrap.servers"])
        if address not in self._clusters:
            self._clusters[address] = Admin(cluster).describe_cluster().cluster_id
        return self._clusters[address]

    def _id_at(self, address: str) -> str | None:
        """The id of the cluster at another address, reached as the output's is; None if that does not work."""
        if address not in self._clusters:
            settings = {**self.options.settings, "bootstrap.servers": address, "default.api.timeout.ms": 5_000}
            try:
                with Cluster(parse_config(settings).client) as cluster:
                    self._clusters[address] = Admin(cluster).describe_cluster().cluster_id
            except SemelError as error:
                log_event("input cluster not reached", logging.DEBUG, address=address, error=str(error))
                self._clusters[address] = None
        return self._clusters[address]

    def _leave_out(self, topics: Iterable[str], reason: str) -> None:
        new = set(topics) - self._left_out
        if new:
            self._left_out |= new
            log_event(
                "offsets left out of the group",
                pipeline=self.options.name,
                topics=", ".join(sorted(new)),
                reason=reason,
            )


def addresses(df: DataFrame) -> set[str]:
    """The brokers that the Kafka sources of the running query were given; none where Spark does not tell."""
    return {settings[BOOTSTRAP] for settings in kafka_sources(df)}


def kafka_sources(df: DataFrame) -> list[dict[str, str]]:
    """The settings of the Kafka sources of a query, under Kafka's own names; none where Spark does not tell.

    `df` is a micro-batch of the running query. Through Spark Connect it is the streaming DataFrame itself, as a
    micro-batch does not know there where it came from.
    """
    spark: Any = df.sparkSession
    try:
        found = _of_running_query(spark) if hasattr(spark, "_jsparkSession") else _of_connect_plan(df)
    except Exception as error:  # another release of Spark may have other plans
        log_event("Spark does not tell the sources' brokers", logging.DEBUG, error=str(error))
        return []
    named = [
        {name.removeprefix(_PREFIX): value for name, value in options.items() if name.startswith(_PREFIX)}
        for options in found
    ]
    return [settings for settings in named if settings.get(BOOTSTRAP)]


def _of_running_query(spark: Any) -> list[dict[str, str]]:
    query = running_query(spark)
    leaves = None if query is None else query.analyzedPlan().collectLeaves()
    if leaves is None:
        return []
    relations = [leaves.apply(number) for number in range(leaves.size())]
    return [
        dict(leaf.extraOptions().asCaseSensitiveMap()) for leaf in relations if leaf.nodeName() == "StreamingRelationV2"
    ]


def _of_connect_plan(df: Any) -> list[dict[str, str]]:
    """From the message that the client sends to the server."""
    found: list[dict[str, str]] = []

    def walk(message: Any) -> None:
        for named, value in message.ListFields():
            if named.name == "data_source":
                found.append(dict(value.options))
            elif named.message_type is not None and not named.message_type.GetOptions().map_entry:
                for inner in value if hasattr(value, "__len__") else [value]:  # repeated, or one
                    walk(inner)

    walk(df._plan.to_proto(df.sparkSession.client))
    return found
