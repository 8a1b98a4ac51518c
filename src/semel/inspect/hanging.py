"""Which open transactions hang: open in a partition, and no coordinator will ever end them there. Pure.

A coordinator ends what it knows: it keeps the list of a transaction's partitions and removes one only after its marker
is written there. So a partition where a transaction is open, and which its coordinator does not list, hangs. This needs
two looks at the partition with the coordinator's answer in between: between the looks the transaction may have ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from semel.client.admin_transactions import ProducerState, TransactionDescription
from semel.client.partitions import TopicPartition

Standing = Literal["alive", "hanging", "unknown"]

ENDED_STATES = ("Empty", "CompleteCommit", "CompleteAbort", "Dead")


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction that is open in one partition, and what its coordinator says of it."""

    topic: str
    partition: int
    producer: ProducerState
    standing: Standing
    explanation: str
    transactional_id: str | None = None
    state: str | None = None
    """The coordinator's; None if no coordinator lists the producer."""

    @property
    def named(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)

    @property
    def start_offset(self) -> int:
        assert self.producer.transaction_start_offset is not None
        return self.producer.transaction_start_offset


def judge(
    named: TopicPartition,
    before: ProducerState,
    known: Mapping[int, TransactionDescription],
    after: Mapping[int, ProducerState],
) -> OpenTransaction | None:
    """None if the transaction has ended between the two looks. `known` is what coordinators said, by producer id.

    >>> from semel.client.partitions import TopicPartition
    >>> state = ProducerState(7, 1, 0, 0, 0, 4)
    >>> judge(TopicPartition("orders", 0), state, {}, {7: state}).standing
    'unknown'
    """
    now = after.get(before.producer_id)
    if now is None or now.transaction_start_offset != before.transaction_start_offset:
        return None
    described = known.get(before.producer_id)
    if described is None:
        return OpenTransaction(*named, now, "unknown", _UNLISTED)
    what = (described.transactional_id, described.state)
    if named in described.partitions:
        return OpenTransaction(*named, now, "alive", _alive(described), *what)
    return OpenTransaction(*named, now, "hanging", _hanging(described, now), *what)


_UNLISTED = (
    "No coordinator lists this producer id. Either its transactional id has expired and the transaction hangs, or this "
    "user may not see it: coordinators list only transactional ids that the user may DESCRIBE."
)


def _alive(described: TransactionDescription) -> str:
    if described.state.startswith("Prepare"):
        return "The coordinator has decided and is writing its marker here."
    if described.is_two_phase:
        return (
            "It is prepared for a two-phase commit (KIP-939): no timeout ends it. Its coordinator ends it when the "
            "producer commits or aborts, or when another one takes its transactional id and does."
        )
    return (
        f"Its coordinator ends it when the producer commits or aborts, or {described.timeout_ms} ms "
        "(transaction.timeout.ms) after its start."
    )


def _hanging(described: TransactionDescription, now: ProducerState) -> str:
    where = (
        f"its last transaction has ended ({described.state})"
        if described.state in ENDED_STATES
        else f"its present transaction ({described.state}) does not include this partition"
    )
    how = (
        "A write came after the coordinator had ended the transaction, or without the partition having been added to "
        "it. Transaction protocol 1 cannot tell such a late write from one of a new transaction"
    )
    if now.producer_epoch < described.producer_epoch:
        how = (
            f"It was written under epoch {now.producer_epoch}, and the transactional id is at epoch "
            f"{described.producer_epoch} by now: a write that came late. Transaction protocol 1 cannot refuse it in a "
            "partition that has not seen the new epoch"
        )
    return (
        f"No marker will ever come here: {where}, so the coordinator does not know that it is open in this "
        f"partition and no timeout applies. {how}; protocol 2 (KIP-890) can."
    )
