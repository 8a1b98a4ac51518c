"""The transaction coordinator's calls, as one owner of a `transactional.id` makes them.

Each may be repeated when its answer is lost: the coordinator recognises the repeat by producer id and epoch. What the
answers mean for the transaction is decided in `producer.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from semel.client.cluster import Answered, Cluster, CoordinatorKind
from semel.client.failures import failure
from semel.client.ownership import NOBODY, Owner, ProducerIdentity
from semel.client.partitions import TopicPartition
from semel.client.retry import Patience
from semel.errors import Fenced, KafkaError, UnsupportedByBroker
from semel.wire import PROTOCOL_2_VERSIONS, Action, Api, ErrorCode, verdict


@dataclass(frozen=True, slots=True)
class GroupMember:
    """Whose offsets a transaction commits. With a generation, a member that lost them is refused (KIP-447)."""

    group_id: str
    generation_id: int = -1
    member_id: str = ""
    group_instance_id: str | None = None


@dataclass(slots=True)
class TransactionCalls:
    """The calls about one `transactional.id`.

    `protocol` is the one its owner began the transaction with: a cluster may be upgraded in the middle, and the two
    must not be mixed within one. `two_phase` says that no timeout may end the owner's transactions (KIP-939).
    """

    cluster: Cluster
    transactional_id: str
    timeout_ms: int
    protocol: int
    two_phase: bool = False

    def highest_version(self, api: Api) -> int | None:
        """Requests of protocol 2 are sent only where the cluster has finalized it."""
        return PROTOCOL_2_VERSIONS[api] - 1 if self.protocol == 1 else None

    def init_producer_id(
        self, current: ProducerIdentity = NOBODY, *, patience: Patience | None = None
    ) -> ProducerIdentity:
        """End whatever transaction is open and get a higher epoch (KIP-360 if `current` is given).

        Without `current` every other owner of the id is fenced; with it, the call itself fails if one has fenced us.
        """
        response = self._init(current, patience)
        return ProducerIdentity(response.producer_id, response.producer_epoch)

    def keep_prepared(
        self, current: ProducerIdentity = NOBODY, *, patience: Patience | None = None
    ) -> tuple[ProducerIdentity, ProducerIdentity | None]:
        """The same, but an open transaction stays open; returns the identity it was begun with besides (KIP-939).

        All that can be done then is to end it, under the new identity.
        """
        response = self._init(current, patience, keep_prepared_txn=True)
        kept = ProducerIdentity(response.ongoing_txn_producer_id, response.ongoing_txn_producer_epoch)
        return ProducerIdentity(response.producer_id, response.producer_epoch), None if kept == NOBODY else kept

    def _init(self, current: ProducerIdentity, patience: Patience | None, **two_phase: bool) -> Any:
        return self._call(
            Api.INIT_PRODUCER_ID,
            _top_level,
            patience=patience,
            transaction_timeout=self.timeout_ms,
            producer_id=current.producer_id,
            producer_epoch=current.producer_epoch,
            enable2_pc=self.two_phase,
            **two_phase,
        )

    @property
    def _name(self) -> str:
        return f"transactional.id {self.transactional_id!r}"

    def owner(self, *, patience: Patience | None = None) -> Owner | None:
        """Who owns the id now and in what state; None where the broker cannot tell (before Kafka 3.0).

        Raises Fenced where the coordinator has forgotten the id, which it does only when nothing is open under it.
        """
        try:
            response = self._call(
                Api.DESCRIBE_TRANSACTIONS,
                lambda response: Answered(response.transaction_states[0].error_code),
                patience=patience,
                transactional_ids=[self.transactional_id],
            )
        except UnsupportedByBroker:
            return None
        except KafkaError as error:
            if error.code == ErrorCode.transactional_id_not_found:
                raise failure(ErrorCode.invalid_producer_id_mapping, Api.INIT_PRODUCER_ID, self._name) from error
            raise
        found = response.transaction_states[0]
        timeout_ms = round(found.transaction_timeout.total_seconds() * 1000)
        return Owner(ProducerIdentity(found.producer_id, found.producer_epoch), found.transaction_state, timeout_ms)

    def try_end_as(self, identity: ProducerIdentity) -> bool:
        """Abort what is open under this identity; False if the coordinator's epoch is another one.

        EndTxn looks at the epoch before all else, so this is also how to learn whether an epoch is the current one
        where `owner` cannot tell.
        """
        try:
            self.end(identity, commit=False)
        except KafkaError as error:
            # INVALID_TXN_STATE comes after the epoch was found right: nothing is open, or its commit is decided.
            if error.code != ErrorCode.invalid_txn_state and not isinstance(error, Fenced):
                raise
            return error.code == ErrorCode.invalid_txn_state
        return True

    def add_partitions(self, identity: ProducerIdentity, partitions: Collection[TopicPartition]) -> None:
        """Protocol 1: tell the coordinator before the first write to each partition."""
        self._call(
            Api.ADD_PARTITIONS_TO_TXN,
            lambda response: _worst(
                (partition.partition_error_code, Api.ADD_PARTITIONS_TO_TXN)
                for topic in response.results_by_topic_v3_and_below
                for partition in topic.results_by_partition
            ),
            v3_and_below_transactional_id=self.transactional_id,
            v3_and_below_producer_id=identity.producer_id,
            v3_and_below_producer_epoch=identity.producer_epoch,
            v3_and_below_topics=[
                {"name": topic, "partitions": indexes} for topic, indexes in _by_topic(partitions).items()
            ],
        )

    def commit_offsets(
        self,
        identity: ProducerIdentity,
        offsets: Mapping[TopicPartition, int],
        member: GroupMember,
        notes: Mapping[TopicPartition, str],
    ) -> None:
        """Put consumed positions into the transaction. `notes` are kept beside them, as Kafka's offset metadata."""
        if self.protocol == 1:
            self._call(
                Api.ADD_OFFSETS_TO_TXN,
                _top_level,
                group_id=member.group_id,
                producer_id=identity.producer_id,
                producer_epoch=identity.producer_epoch,
            )
        self.cluster.call_coordinator(
            CoordinatorKind.GROUP,
            member.group_id,
            Api.TXN_OFFSET_COMMIT,
            lambda response: _worst(
                (partition.error_code, Api.TXN_OFFSET_COMMIT)
                for topic in response.topics
                for partition in topic.partitions
            ),
            what=f"the offsets of group {member.group_id!r}",
            highest=self.highest_version(Api.TXN_OFFSET_COMMIT),
            transactional_id=self.transactional_id,
            group_id=member.group_id,
            producer_id=identity.producer_id,
            producer_epoch=identity.producer_epoch,
            generation_id=member.generation_id,
            member_id=member.member_id,
            group_instance_id=member.group_instance_id,
            topics=[
                {
                    "name": topic,
                    "partitions": [
                        {
                            "partition_index": index,
                            "committed_offset": offsets[TopicPartition(topic, index)],
                            "committed_leader_epoch": -1,
                            "committed_metadata": notes.get(TopicPartition(topic, index), ""),
                        }
                        for index in indexes
                    ],
                }
                for topic, indexes in _by_topic(offsets).items()
            ],
        )

    def end(self, identity: ProducerIdentity, *, commit: bool, patience: Patience | None = None) -> ProducerIdentity:
        """Commit or abort. Protocol 2 answers with the identity for the next transaction."""
        response = self._call(
            Api.END_TXN,
            _top_level,
            patience=patience,
            highest=self.highest_version(Api.END_TXN),
            producer_id=identity.producer_id,
            producer_epoch=identity.producer_epoch,
            committed=commit,
        )
        if getattr(response, "producer_id", NOBODY.producer_id) == NOBODY.producer_id:
            return identity
        return ProducerIdentity(response.producer_id, response.producer_epoch)

    def _call(self, api: Api, read_answer: Any, *, patience: Patience | None = None, **fields: Any) -> Any:
        if api not in (Api.ADD_PARTITIONS_TO_TXN, Api.DESCRIBE_TRANSACTIONS):
            fields["transactional_id"] = self.transactional_id
        return self.cluster.call_coordinator(
            CoordinatorKind.TRANSACTION,
            self.transactional_id,
            api,
            read_answer,
            what=self._name,
            patience=patience,
            **fields,
        )


def _top_level(response: Any) -> Answered:
    return Answered(response.error_code)


_SEVERITY = {Action.RETRIABLE: 0, Action.ABORTABLE: 1, Action.FATAL: 2}


def _worst(items: Iterable[tuple[ErrorCode, Api]]) -> Answered:
    """Of many partitions' codes, the one that decides what to do with the whole request."""
    codes = [(code, api) for code, api in items if code != ErrorCode.none]
    if not codes:
        return Answered(ErrorCode.none)
    # OPERATION_NOT_ATTEMPTED only says that another partition was refused.
    telling = [item for item in codes if item[0] != ErrorCode.operation_not_attempted] or codes
    code, _ = max(telling, key=lambda item: _SEVERITY[verdict(*item).action])
    return Answered(code)


def _by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    topics: dict[str, list[int]] = {}
    for topic, partition in sorted(partitions):
        topics.setdefault(topic, []).append(partition)
    return topics
