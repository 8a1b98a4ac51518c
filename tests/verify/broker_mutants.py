"""Bugs to plant in the broker, each as a patch: the simulation must find every one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from semel.broker import transaction_runtime
from semel.broker.durability import Durability
from semel.broker.fetch_sessions import FetchSessions
from semel.broker.storage import cleaner
from semel.broker.transaction_runtime import TransactionRuntime
from semel.core import classic_groups, producer_state
from semel.core.compaction import Compaction
from semel.core.group_offsets import GroupOffsets
from semel.core.partition_log import PartitionLog
from semel.core.producer_state import ProducerStates
from semel.core.transaction_metadata import PREPARED, Marker, TransactionMetadata, TransactionStatus, marker_of
from semel.core.transaction_records import decode_transaction
from semel.core.transactions import TransactionCoordinator

Mutant = Callable[[pytest.MonkeyPatch], None]


def _nothing(*_: Any, **__: Any) -> None:
    return None


def repeats_are_stored_again(patch: pytest.MonkeyPatch) -> None:
    """The duplicate check is switched off."""
    patch.setattr(ProducerStates, "decide_batch", _nothing)


def stable_offset_ignores_open_transactions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PartitionLog, "last_stable_offset", property(lambda log: log.high_watermark))


def epochs_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    """A fenced producer goes on writing into the transaction of its successor."""

    def owned(self: TransactionCoordinator, transactional_id: str, *_: Any) -> Any:
        metadata = self.get(transactional_id)
        if metadata is None or metadata.status in PREPARED:
            return original(self, transactional_id, -1, -1)
        return metadata

    original: Any = vars(TransactionCoordinator)["_owned"]
    patch.setattr(TransactionCoordinator, "_owned", owned)
    patch.setattr(producer_state, "_check_producer_epoch", _nothing)


def pending_offsets_count_at_once(patch: pytest.MonkeyPatch) -> None:
    original = GroupOffsets.replay_offset

    def replay(self: GroupOffsets, record: Any, *, producer_id: int | None = None, **where: Any) -> None:
        original(self, record, producer_id=None, **where)

    patch.setattr(GroupOffsets, "replay_offset", replay)


def aborts_become_commits(patch: pytest.MonkeyPatch) -> None:
    def always_commit(metadata: Any) -> Marker:
        return marker_of(metadata)._replace(committed=True)

    patch.setattr(transaction_runtime, "marker_of", always_commit)


def markers_come_before_the_decision(patch: pytest.MonkeyPatch) -> None:
    original: Any = vars(TransactionRuntime)["_carry_out"]

    async def carry_out(self: Any, decision: Any) -> Any:
        record = decision.record
        if record is not None and decision.needs_markers:
            marker = marker_of(record)
            for partition in self._existing(record.partitions):
                self._mark(
                    partition,
                    marker.producer_id,
                    marker.producer_epoch,
                    committed=marker.committed,
                    protocol_2=record.client_transaction_version >= 2,
                )
            await self._broker.durability.wait_committed(self._existing(record.partitions))
        return await original(self, decision)

    patch.setattr(TransactionRuntime, "_carry_out", carry_out)


def decisions_are_lost_at_a_restart(patch: pytest.MonkeyPatch) -> None:
    """A transaction that was decided and not yet marked is taken for open again."""

    def decode(key: bytes, value: bytes | None) -> Any:
        decoded = decode_transaction(key, value)
        if isinstance(decoded, TransactionMetadata) and decoded.status in PREPARED:
            return replace(decoded, status=TransactionStatus.ONGOING)
        return decoded

    patch.setattr(transaction_runtime, "decode_transaction", decode)


def commits_are_not_synced(patch: pytest.MonkeyPatch) -> None:
    async def wait(*_: Any) -> None:
        return None

    patch.setattr(Durability, "wait_committed", wait)


def aborted_records_are_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PartitionLog, "aborted_transactions", lambda *_: [])


def generations_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    """A member that was thrown out commits its offsets all the same (KIP-447)."""
    patch.setattr(classic_groups, "check_offset_commit", _nothing)


def unstable_offsets_are_handed_out(patch: pytest.MonkeyPatch) -> None:
    """The next owner of a partition starts before what an open transaction has processed (KIP-447)."""
    original = GroupOffsets.decide_fetch

    def fetch(self: GroupOffsets, group_id: str, partitions: Any, *, require_stable: bool = False) -> Any:
        return original(self, group_id, partitions, require_stable=False)

    patch.setattr(GroupOffsets, "decide_fetch", fetch)


# Bugs that the simulation found when it first ran.


def lost_markers_are_not_restored(patch: pytest.MonkeyPatch) -> None:
    """After a loss of power the transaction was complete, a marker gone, and its records aborted."""

    async def leave(_: Any) -> None:
        return None

    patch.setattr(TransactionRuntime, "_restore_lost_markers", leave)


def a_decision_forgets_where_it_ended(patch: pytest.MonkeyPatch) -> None:
    """After a loss of power a marker written again committed the beginning of the next transaction as well."""
    patch.setattr(transaction_runtime, "_is_of_a_later_transaction", lambda *_: False)


def owners_outlive_a_loss_of_power(patch: pytest.MonkeyPatch) -> None:
    """Half of a transaction was lost with the power, and its owner committed the other half."""

    async def leave(*_: Any) -> None:
        return None

    patch.setattr(TransactionRuntime, "_shut_out", leave)


def compaction_overlooks_an_abort_at_its_edge(patch: pytest.MonkeyPatch) -> None:
    """An aborted offset passed for the latest of its key, and the committed one was removed."""

    def compaction(end_offset: int, *, aborted: Any, **rest: Any) -> Any:
        return Compaction(end_offset, aborted=[one for one in aborted if one.last_offset < end_offset], **rest)

    patch.setattr(cleaner, "Compaction", compaction)


def session_ids_begin_again_at_a_restart(patch: pytest.MonkeyPatch) -> None:
    """A reader's old fetch session was another's new one."""
    original = FetchSessions.__init__

    def init(self: FetchSessions, sessions_max: int, _: Any) -> None:
        numbers = iter(range(1, 1_000_000))
        original(self, sessions_max, lambda: next(numbers))

    patch.setattr(FetchSessions, "__init__", init)


FOUND_BY: dict[Mutant, int] = {
    decisions_are_lost_at_a_restart: 3,
    commits_are_not_synced: 3,
    unstable_offsets_are_handed_out: 10,
    lost_markers_are_not_restored: 3,
    generations_are_not_compared: 16,
    a_decision_forgets_where_it_ended: 101,
    owners_outlive_a_loss_of_power: 3,
    compaction_overlooks_an_abort_at_its_edge: 66,
    session_ids_begin_again_at_a_restart: 60,
}
"""The seed to try first, where most seeds do not lead there. A change to the simulation or the broker may move it."""

MUTANTS: list[Mutant] = [
    repeats_are_stored_again,
    stable_offset_ignores_open_transactions,
    epochs_are_not_compared,
    pending_offsets_count_at_once,
    aborts_become_commits,
    markers_come_before_the_decision,
    decisions_are_lost_at_a_restart,
    commits_are_not_synced,
    aborted_records_are_not_told,
    generations_are_not_compared,
    unstable_offsets_are_handed_out,
    lost_markers_are_not_restored,
    a_decision_forgets_where_it_ended,
    owners_outlive_a_loss_of_power,
    compaction_overlooks_an_abort_at_its_edge,
    session_ids_begin_again_at_a_restart,
]
