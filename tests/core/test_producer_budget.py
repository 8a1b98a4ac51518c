"""What all partitions together remember of producers stays within one budget."""

from __future__ import annotations

import pytest
from kio.schema.errors import ErrorCode

from semel.core.producer_budget import ProducerBudget
from semel.core.producer_state import BATCH_BYTES, ENTRY_BYTES, ProducerStates
from semel.core.refusal import Refused
from semel.records.control import ControlMarker
from semel.records.layout import BatchHeader, read_header
from semel.records.reference import Record, encode_batch

ONE_BYTES = ENTRY_BYTES + BATCH_BYTES


def header(producer_id: int, *, sequence: int = 0, transactional: bool = False) -> BatchHeader:
    records = [Record(0, 1000, None, b"a", ())]
    return read_header(
        encode_batch(
            records, producer_id=producer_id, producer_epoch=0, base_sequence=sequence, transactional=transactional
        )
    )


def test_the_longest_idle_of_all_partitions_are_forgotten_first() -> None:
    """Not those of the partition that is written to: the budget has one order for all of them."""
    budget = ProducerBudget(10 * ONE_BYTES)
    quiet, busy = ProducerStates(budget=budget), ProducerStates(budget=budget)
    for producer_id in range(5):
        quiet.replay_batch(header(producer_id), now_ms=producer_id)
    for producer_id in range(100, 108):
        busy.replay_batch(header(producer_id), now_ms=producer_id)
    assert len(busy) == 8
    assert {entry.producer_id for entry in quiet} < {2, 3, 4}
    assert budget.held_bytes <= budget.bytes_max
    assert budget.held_bytes == quiet.memory_bytes() + busy.memory_bytes()
    assert budget.forgotten_count == 13 - len(quiet) - len(busy)


def test_ten_thousand_producers_in_each_of_many_partitions_stay_within_the_budget() -> None:
    """Each client can make up producer ids; per partition alone they were bounded by 100,000."""
    budget = ProducerBudget(1_000 * ONE_BYTES)
    partitions = [ProducerStates(budget=budget) for _ in range(20)]
    for producer_id in range(10_000):
        partitions[producer_id % 20].replay_batch(header(producer_id), now_ms=producer_id)
        assert budget.held_bytes <= budget.bytes_max
    assert sum(map(len, partitions)) > 900
    assert all(entry.producer_id > 9_999 - 20 * 60 for states in partitions for entry in states)


def test_a_producer_with_an_open_transaction_is_never_forgotten_and_a_new_one_is_refused() -> None:
    """A forgotten transaction would never end, so the client that would exceed the budget is refused."""
    budget = ProducerBudget(3 * ONE_BYTES)
    states = ProducerStates(budget=budget)
    for producer_id in range(4):
        states.replay_batch(header(producer_id, transactional=True), now_ms=1)
    assert len(states) == 4
    assert budget.is_full
    with pytest.raises(Refused, match=r"semel\.client\.memory\.max\.bytes") as refused:
        states.decide_batch(header(9), now_ms=2)
    assert refused.value.code is ErrorCode.policy_violation
    assert states.decide_batch(header(2, sequence=1, transactional=True), now_ms=2) is None
    states.replay_marker(ControlMarker("commit", 0, 0, 0, 4), 4, 1000, now_ms=3)
    states.replay_marker(ControlMarker("commit", 0, 1, 0, 5), 5, 1000, now_ms=3)
    assert not budget.is_full
    assert states.decide_batch(header(9), now_ms=2) is None


def test_what_expires_or_is_closed_or_loaded_again_is_counted() -> None:
    """The sum must not drift: a budget that counts too much would forget everything in the end."""
    budget = ProducerBudget(1_000 * ONE_BYTES)
    first, second = ProducerStates(budget=budget), ProducerStates(budget=budget)
    for sequence in range(9):
        first.replay_batch(header(1, sequence=sequence), now_ms=1)
    assert budget.held_bytes == ENTRY_BYTES + 5 * BATCH_BYTES
    second.replay_batch(header(2), now_ms=1)
    second.replay_entries(list(first), now_ms=2)
    assert budget.held_bytes == 2 * (ENTRY_BYTES + 5 * BATCH_BYTES)
    first.replay_marker(ControlMarker("abort", 0, 1, 1, 9), 9, 1000, now_ms=3)
    assert first.memory_bytes() == ENTRY_BYTES
    first.replay_expiry([1])
    assert budget.held_bytes == second.memory_bytes()
    second.leave_budget()
    assert budget.held_bytes == 0
