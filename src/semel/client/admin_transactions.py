"""Transactions and producers: what is open, who wrote it, and how to end what hangs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from semel.client.cluster import Cluster, CoordinatorKind
from semel.client.item_calls import ItemAnswer, Route, call_for_items, coordinator, flat_names, on_every_broker
from semel.client.leader_calls import PartitionAnswer, by_topic, call_leaders
from semel.client.ownership import NO_TIMEOUT_MS
from semel.client.partitions import TopicPartition
from semel.wire import Api, ErrorCode

_DESCRIBED_AT_ONCE: Final = 500


@dataclass(frozen=True, slots=True)
class ListedTransaction:
    """A transactional id that its coordinator knows."""

    transactional_id: str
    producer_id: int
    state: str
    coordinator: int | None = field(default=None, compare=False)
    """The broker that has listed it."""


@dataclass(frozen=True, slots=True)
class TransactionDescription:
    """A transactional id in full."""

    transactional_id: str
    state: str
    timeout_ms: int
    start_time_ms: int | None
    """None while no transaction is open."""
    producer_id: int
    producer_epoch: int
    partitions: tuple[TopicPartition, ...]
    """The partitions that are written in the open transaction, or still lack its marker."""

    @property
    def is_two_phase(self) -> bool:
        """No timeout ends its transactions: they wait for a decision from outside (KIP-939)."""
        return self.timeout_ms == NO_TIMEOUT_MS


@dataclass(frozen=True, slots=True)
class ProducerState:
    """An idempotent producer as a partition's leader remembers it."""

    producer_id: int
    producer_epoch: int
    last_sequence: int
    last_timestamp_ms: int
    coordinator_epoch: int
    transaction_start_offset: int | None
    """Where its open transaction begins in this partition; None if it has none here."""


class TransactionAdmin:
    """The part of `Admin` about transactions."""

    _cluster: Cluster

    def list_transactions(
        self, *, states: Iterable[str] = (), producer_ids: Iterable[int] = ()
    ) -> list[ListedTransaction]:
        """The transactional ids of all coordinators, all of them or those in one of `states` (such as "Ongoing")."""
        filters = {"state_filters": list(states), "producer_id_filters": list(producer_ids)}

        def listed_by(route: Route) -> Iterable[ListedTransaction]:
            answers = call_for_items(
                self._cluster,
                route,
                Api.LIST_TRANSACTIONS,
                ["transactions"],
                lambda asked: filters,
                lambda response: [ItemAnswer("transactions", response.error_code, response.transaction_states)],
                what=str,
            )
            return (
                ListedTransaction(state.transactional_id, state.producer_id, state.transaction_state, route.find_node())
                for state in answers["transactions"]
            )

        return sorted(on_every_broker(self._cluster, listed_by), key=lambda listed: listed.transactional_id)

    def describe_transactions(self, *transactional_ids: str | Iterable[str]) -> dict[str, TransactionDescription]:
        """What the coordinators know of these transactional ids.

        >>> from semel import Admin, Producer
        >>> with Producer(bootstrap_servers=bootstrap, transactional_id="orders-1") as producer, producer.transaction():
        ...     producer.send("orders", b"10")
        ...     stored = producer.flush()
        ...     with Admin({"bootstrap.servers": bootstrap}) as admin:
        ...         admin.describe_transactions("orders-1")["orders-1"].state
        'Ongoing'
        """
        described: dict[str, TransactionDescription] = {}
        for transactional_id in flat_names(transactional_ids):
            described |= call_for_items(
                self._cluster,
                coordinator(self._cluster, CoordinatorKind.TRANSACTION, transactional_id),
                Api.DESCRIBE_TRANSACTIONS,
                [transactional_id],
                lambda asked: {"transactional_ids": asked},
                lambda response: (
                    ItemAnswer(state.transactional_id, state.error_code, _read_transaction(state))
                    for state in response.transaction_states
                ),
                what=lambda item: f"transactional.id {item!r}",
            )
        return described

    def describe_listed(self, listed: Iterable[ListedTransaction]) -> dict[str, TransactionDescription]:
        """Those of `list_transactions`, hundreds at once. What has expired or moved since is left out."""
        by_node: dict[int, list[str]] = {}
        for one in listed:
            if one.coordinator is not None:
                by_node.setdefault(one.coordinator, []).append(one.transactional_id)
        described: dict[str, TransactionDescription] = {}
        for node, names in by_node.items():
            for start in range(0, len(names), _DESCRIBED_AT_ONCE):
                some = names[start : start + _DESCRIBED_AT_ONCE]
                response = self._cluster.call(node, Api.DESCRIBE_TRANSACTIONS, transactional_ids=some)
                for state in response.transaction_states:
                    if state.error_code == ErrorCode.none:
                        described[state.transactional_id] = _read_transaction(state)
        return described

    def describe_producers(self, topic: str, partition: int) -> list[ProducerState]:
        """The producers that the leader of a partition remembers."""
        return self.describe_all_producers([(topic, partition)])[TopicPartition(topic, partition)]

    def describe_all_producers(
        self, partitions: Iterable[tuple[str, int]]
    ) -> dict[TopicPartition, list[ProducerState]]:
        """The producers of many partitions, by one request to each leader."""

        def fields(asked: Mapping[TopicPartition, None]) -> Mapping[str, Any]:
            return {
                "topics": [{"name": name, "partition_indexes": numbers} for name, numbers in by_topic(asked).items()]
            }

        def read(response: Any) -> Iterator[PartitionAnswer[list[ProducerState]]]:
            for answered in response.topics:
                for item in answered.partitions:
                    producers = [_read_producer(producer) for producer in item.active_producers]
                    named = TopicPartition(answered.name, item.partition_index)
                    yield PartitionAnswer(named, item.error_code, producers, item.error_message)

        questions = {TopicPartition(*named): None for named in partitions}
        return call_leaders(self._cluster, Api.DESCRIBE_PRODUCERS, questions, fields, read)

    def abort_transaction(
        self, topic: str, partition: int, *, producer_id: int, producer_epoch: int, coordinator_epoch: int
    ) -> None:
        """End a hanging transaction in one partition: one that is open there and that no coordinator will ever end.

        Take the three numbers from `describe_producers`. Never do this to a transaction that its coordinator still
        knows as open: its other partitions may commit, and half of it would be missing.
        """
        asked = TopicPartition(topic, partition)

        def fields(_: Mapping[TopicPartition, None]) -> Mapping[str, Any]:
            marker = {
                "producer_id": producer_id,
                "producer_epoch": producer_epoch,
                "transaction_result": False,
                "topics": [{"name": topic, "partition_indexes": [partition]}],
                "coordinator_epoch": coordinator_epoch,
            }
            return {"markers": [marker]}

        def read(response: Any) -> Iterator[PartitionAnswer[None]]:
            for marker in response.markers:
                for answered in marker.topics:
                    for item in answered.partitions:
                        yield PartitionAnswer(
                            TopicPartition(answered.name, item.partition_index), item.error_code, None
                        )

        call_leaders(self._cluster, Api.WRITE_TXN_MARKERS, {asked: None}, fields, read)


def _read_transaction(state: Any) -> TransactionDescription:
    partitions = tuple(
        TopicPartition(topic.topic, partition) for topic in state.topics for partition in topic.partitions
    )
    return TransactionDescription(
        state.transactional_id,
        state.transaction_state,
        int(state.transaction_timeout.total_seconds() * 1000),
        None if state.transaction_start_time_ms < 0 else state.transaction_start_time_ms,
        state.producer_id,
        state.producer_epoch,
        partitions,
    )


def _read_producer(producer: Any) -> ProducerState:
    start = producer.current_txn_start_offset
    return ProducerState(
        producer.producer_id,
        producer.producer_epoch,
        producer.last_sequence,
        producer.last_timestamp,
        producer.coordinator_epoch,
        None if start < 0 else start,
    )
